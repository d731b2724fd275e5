//! From a decode worker's replies to the pieces of an answer: text, logprobs, ends.

mod answer;
mod detokenise;
mod stop;

pub(crate) use answer::answers;

use crate::dispatch::Facts;
use tandem_kv::TokenId;
use tandem_proto::v1::PrefillChunk;

/// What comes of one prompt.
pub(crate) enum Piece {
    /// First, once: the first token is there.
    Started(Box<Facts>),
    /// How the prompt was prefilled, if that comes after the first token.
    Prefilled(Vec<PrefillChunk>),
    /// Of the prompt's own tokens, when they were asked for; before any sample's pieces.
    PromptLogprobs(Vec<TokenLogprobs>),
    /// More of a sample.
    Delta(Delta),
    /// Another worker goes on.
    Migrated,
    /// All samples have ended. Last.
    Finished,
}

/// More of one sample.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Delta {
    pub(crate) sample: u32,
    /// May be empty: a token may give no text yet.
    pub(crate) text: String,
    /// Of the tokens whose text is given, when they were asked for.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// Tokens generated since the last piece.
    pub(crate) tokens: u32,
    pub(crate) finish: Option<Finish>,
}

/// Why a sample has ended, in OpenAI's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Finish {
    /// By itself, or at a stop string.
    Stop,
    /// At `max_tokens` or the context's end.
    Length,
}

impl Finish {
    /// As it is written, too.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// A token, how likely it was, and what else could have been.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenLogprobs {
    pub(crate) token: TokenId,
    /// The first token of a prompt has none.
    pub(crate) logprob: Option<f32>,
    pub(crate) top: Vec<(TokenId, f32)>,
    /// Characters before it in its text.
    pub(crate) text_offset: usize,
}
