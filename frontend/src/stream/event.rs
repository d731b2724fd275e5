//! The events of a prompt's answer.

use crate::dispatch::Facts;
use tandem_kv::TokenId;
use tandem_proto::v1::{PrefillChunk, Scheduled};

/// An event of one prompt's answer.
pub(crate) enum AnswerEvent {
    /// The first token was generated. This event occurs once, before all other events.
    Started(Box<Facts>),
    /// The number of cached tokens, if `Facts` says that the worker reports it later. This event occurs at most once.
    Scheduled(Scheduled),
    /// The chunks of the prefill, if the worker reports them.
    Prefilled(Vec<PrefillChunk>),
    /// The logprobs of the prompt's own tokens, if requested. This event occurs before the first delta.
    PromptLogprobs(Vec<TokenLogprobs>),
    Delta(Delta),
    /// The generation was resumed on another worker.
    Resumed,
    /// All samples have ended. No event follows.
    Finished,
}

/// New tokens of one sample, or the sample's end.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Delta {
    pub(crate) sample: u32,
    /// The text that can be sent now; empty if no character is complete, or if the text may begin a stop string.
    pub(crate) text: String,
    /// The logprobs of the tokens of `text`, if requested.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// The number of tokens generated since the last delta.
    pub(crate) tokens: u32,
    pub(crate) finish: Option<FinishReason>,
}

/// Why a sample has ended. The names are OpenAI's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishReason {
    /// The sample ended at a stop token or a stop string.
    Stop,
    /// The sample reached `max_tokens` or the end of the context.
    Length,
}

impl FinishReason {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// A token with its logprob and the most likely alternatives.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenLogprobs {
    pub(crate) token: TokenId,
    /// The natural logarithm of the token's probability; `None` for the first token of a prompt.
    pub(crate) logprob: Option<f32>,
    pub(crate) top: Vec<(TokenId, f32)>,
    /// The number of characters of the text before the token.
    pub(crate) text_offset: usize,
}
