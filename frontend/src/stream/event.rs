//! The events of which a prompt's answer consists.

use crate::dispatch::Facts;
use tandem_kv::TokenId;
use tandem_proto::v1::PrefillChunk;

/// A step of one prompt's answer.
pub(crate) enum AnswerEvent {
    /// The first token has come. First, once.
    Started(Box<Facts>),
    /// How the prompt was prefilled, if the worker reports it.
    Prefilled(Vec<PrefillChunk>),
    /// The logprobs of the prompt's own tokens, if they were asked for. Before the first delta.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// More of a sample.
    Delta(Delta),
    /// The generation was resumed on another worker.
    Resumed,
    /// All samples have ended. Last.
    Finished,
}

/// More of one sample.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Delta {
    pub(crate) sample: u32,
    /// May be empty: a token may give no text yet.
    pub(crate) text: String,
    /// The logprobs of the tokens that `text` consists of, if they were asked for.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// Tokens generated since the last delta.
    pub(crate) tokens: u32,
    pub(crate) finish: Option<FinishReason>,
}

/// Why a sample has ended, in OpenAI's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishReason {
    /// The sample ended at a stop token or a stop string.
    Stop,
    /// The sample reached `max_tokens` or the context's end.
    Length,
}

impl FinishReason {
    /// The same text as in JSON.
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
    /// Characters before it in its text.
    pub(crate) text_offset: usize,
}
