//! Turns a decode worker's replies into the events of an answer: text, logprobs, finish reasons.

mod answer;
mod detokenizer;
mod event;
mod samples;
mod stop;

pub(crate) use answer::answers;
pub(crate) use event::{AnswerEvent, Delta, FinishReason, TokenLogprobs};
