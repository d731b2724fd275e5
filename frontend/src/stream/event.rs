//! The events of a prompt's answer.

use crate::dispatch::Facts;
use tandem_api::answer::{Delta, TokenLogprobs};
use tandem_proto::v1::{PrefillChunk, Scheduled};

pub(crate) enum AnswerEvent {
    /// The first token was generated. This event occurs once, before all other events.
    Started(Box<Facts>),
    /// The number of cached tokens, if the event `Started` announces that the worker reports it later. This event occurs at most once.
    Scheduled(Scheduled),
    /// The worker was lost after the last sample had ended, and before it had reported the number of cached tokens.
    ReportLost,
    /// The chunks of the prefill. This event occurs only if the worker reports them.
    Prefilled(Vec<PrefillChunk>),
    /// The logprobs of the prompt's own tokens. This event occurs only if they were requested, and before the first delta.
    PromptLogprobs(Vec<TokenLogprobs>),
    Delta(Delta),
    /// The generation was resumed on the decode worker with this name.
    Resumed(String),
    /// All samples have ended. No event follows.
    Finished,
}
