//! Converts a decode worker's replies to the events of an answer, with text, logprobs and finish reasons.

mod answer;
mod event;
mod samples;

pub(crate) use answer::answers;
pub(crate) use event::AnswerEvent;
