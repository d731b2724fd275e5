//! The events of a prompt's answer.

use crate::dispatch::Facts;
use tandem_kv::TokenId;
use tandem_proto::v1::{PrefillChunk, Scheduled};
use tandem_text::chat::Piece;

/// An event of one prompt's answer.
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
    /// The generation was resumed on another worker.
    Resumed,
    /// All samples have ended. No event follows.
    Finished,
}

/// New tokens of one sample, or the sample's end.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Delta {
    pub(crate) sample: u32,
    /// The text that can be sent now; empty if no character is complete, or if the text may begin a stop string. The answer of a
    /// conversation has `pieces` instead.
    pub(crate) text: String,
    pub(crate) pieces: Vec<Piece>,
    /// The logprobs of the tokens of the text or pieces; empty if they were not requested.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// The tokens generated since the last delta. They include a stop token and the tokens of a stop string, which have no text.
    pub(crate) token_ids: Vec<TokenId>,
    /// The number of these tokens that are reasoning.
    pub(crate) reasoning_tokens: u32,
    pub(crate) finish: Option<FinishReason>,
    /// The stop string at which the sample ended; `None` if it has not ended, or has ended for another reason.
    pub(crate) stop_string: Option<String>,
}

impl Delta {
    /// Returns the number of generated tokens.
    pub(crate) fn tokens(&self) -> u32 {
        self.token_ids.len() as u32
    }
}

/// The reason why a sample has ended. The names are OpenAI's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, schemars::JsonSchema, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishReason {
    /// The sample ended at a stop token or a stop string.
    Stop,
    /// The sample reached `max_tokens` or the end of the context.
    Length,
    /// The sample ended with a tool call.
    ToolCalls,
}

impl FinishReason {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
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
