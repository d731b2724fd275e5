//! The formats of answers. A format converts the parts of an answer to a JSON body or to server-sent events. Its caller runs the request
//! and sends the bytes.

mod chat;
mod choices;
mod custom_input;
mod envelope;
mod failure;
mod generated;
mod messages;
mod prompt_logprobs;
mod responses;
mod sse;
mod style;
mod token;
mod usage;

pub use envelope::{ChoiceFormat, Envelope};
pub use failure::AnswerFailure;
pub use generated::{GeneratedAnswer, GeneratedChunk};
pub use sse::KEEP_ALIVE;
pub use style::Style;
pub use token::token_text;
pub use usage::Usage;

use crate::options::{Options, StreamUsage};
use envelope::Logprobs;
use prompt_logprobs::PromptLogprobs;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use tandem_kv::TokenId;
use tandem_text::{ServedModel, chat::Piece};

/// What a format knows of the request, and of its answer so far.
pub struct AnswerContext {
    /// The model that answers.
    pub model: Arc<ServedModel>,
    /// The answer's id.
    pub id: String,
    /// The usage up to the last part for which [`has_usage_at`](Self::has_usage_at) is true; once the answer has ended, of the whole
    /// answer.
    pub usage: Usage,
    /// The router's estimate of the cached tokens at the answer's beginning, while `usage` lacks their number.
    pub cached_estimate: Option<u32>,
    /// The object `tandem`, once the answer has ended; `None`: the answer does not have it.
    pub details: Option<Value>,
    /// The time at which the answer was complete, in seconds since 1970.
    pub completed: Option<u64>,
    /// The time at which the answer began, in seconds since 1970.
    created: u64,
    request_id: String,
    /// The usage in a streamed answer; `None` if the answer is not streamed.
    stream: Option<StreamUsage>,
    /// The number of answers to each prompt.
    samples: usize,
    /// The tokens of each prompt; empty lists if the answer does not have them.
    prompt_token_ids: Vec<Vec<TokenId>>,
    /// Whether the answer has the ids of the prompt's and the generated tokens.
    token_ids: bool,
    /// Whether logprobs name tokens by their ids.
    tokens_as_ids: bool,
    /// The number of alternatives for each generated token and each repeated token of the prompt; `None`: the answer has no logprobs.
    logprobs: Option<usize>,
    /// The number of alternatives for each token of the prompt; `None`: the answer does not have the prompt's logprobs.
    prompt_logprobs: Option<usize>,
}

impl AnswerContext {
    /// Returns the context of an answer that begins at `created`, in seconds since 1970. `prompts` yields the tokens of each prompt.
    pub fn new<'a>(
        style: &Style,
        model: Arc<ServedModel>,
        request_id: &str,
        options: &Options,
        prompts: impl Iterator<Item = &'a [TokenId]>,
        created: u64,
    ) -> Self {
        let token_ids = |tokens: &[TokenId]| if options.token_ids { tokens.to_vec() } else { Vec::new() };
        Self {
            model,
            id: style.answer_id(request_id),
            usage: Usage::default(),
            cached_estimate: None,
            details: None,
            completed: None,
            created,
            request_id: request_id.to_owned(),
            stream: options.stream,
            samples: options.samples as usize,
            prompt_token_ids: prompts.map(token_ids).collect(),
            token_ids: options.token_ids,
            tokens_as_ids: options.tokens_as_ids,
            logprobs: options.sampling.logprobs.map(|top| top as usize),
            prompt_logprobs: options.prompt_logprobs.map(|top| top as usize),
        }
    }

    /// Returns whether the usage so far is written with this part of the answer.
    pub fn has_usage_at(&self, part: &AnswerPart) -> bool {
        matches!(part, AnswerPart::Started { .. }) || self.stream.is_some_and(|usage| usage.in_every_chunk)
    }

    /// Returns the tokens of a prompt, if the answer has them.
    fn prompt_token_ids(&self, prompt: usize) -> Option<&[TokenId]> {
        self.token_ids.then(|| self.prompt_token_ids[prompt].as_slice())
    }

    /// Returns the logprobs of a prompt's tokens, if the answer has them.
    fn prompt_logprobs<'a>(&'a self, tokens: Option<&'a [TokenLogprobs]>) -> Option<PromptLogprobs<'a>> {
        Some(PromptLogprobs { model: &self.model, alternatives: self.prompt_logprobs?, tokens: tokens? })
    }

    /// Returns the logprobs of generated tokens, if the answer has them.
    fn logprobs<'a>(&'a self, tokens: &'a [TokenLogprobs]) -> Option<Logprobs<'a>> {
        self.logprobs.is_some().then_some(Logprobs { model: &self.model, tokens, as_ids: self.tokens_as_ids })
    }
}

/// A part of the answer to one prompt.
pub enum AnswerPart {
    /// The first token was generated. This part comes once, before all others.
    Started {
        /// The prompt's text, if the answer repeats it without logprobs.
        echo: Option<String>,
    },
    /// The logprobs of the prompt's own tokens. This part comes only if they were requested, once, and before the first delta.
    PromptLogprobs {
        /// The logprobs.
        tokens: Vec<TokenLogprobs>,
        /// The prompt's text, if the answer repeats it with these logprobs.
        echo: Option<String>,
    },
    /// New tokens of a sample, or its end.
    Delta(Delta),
}

/// New tokens of one sample, or the sample's end.
#[derive(Debug, Default, PartialEq)]
pub struct Delta {
    /// The sample's index among those of its prompt.
    pub sample: u32,
    /// The text that can be sent now; empty if no character is complete, or if the text may begin a stop string. The answer of a
    /// conversation has `pieces` instead.
    pub text: String,
    /// The pieces of a conversation's answer.
    pub pieces: Vec<Piece>,
    /// The logprobs of the tokens of the text or pieces; empty if they were not requested.
    pub logprobs: Vec<TokenLogprobs>,
    /// The tokens generated since the last delta. They include a stop token and the tokens of a stop string, which have no text.
    pub token_ids: Vec<TokenId>,
    /// The number of tokens in `token_ids` that are reasoning.
    pub reasoning_tokens: u32,
    /// The reason why the sample ended; `None` until then.
    pub finish: Option<FinishReason>,
    /// The stop string at which the sample ended; `None` until then, or if it ended for another reason.
    pub stop_string: Option<String>,
}

impl Delta {
    /// Returns the number of generated tokens.
    pub fn tokens(&self) -> u32 {
        self.token_ids.len() as u32
    }
}

/// The reason why a sample has ended. The names are OpenAI's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, schemars::JsonSchema, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The sample ended at a stop token or a stop string.
    Stop,
    /// The sample reached `max_tokens` or the end of the context.
    Length,
    /// The sample ended with a tool call.
    ToolCalls,
}

impl FinishReason {
    /// Returns its name in OpenAI's API.
    pub fn label(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// A token with its logprob and the most likely alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub token: TokenId,
    /// The natural logarithm of the token's probability; `None` for the first token of a prompt.
    pub logprob: Option<f32>,
    /// The most likely alternatives.
    pub top: Vec<(TokenId, f32)>,
    /// The number of characters of the text before the token.
    pub text_offset: usize,
}

/// Writes an answer in one format.
pub trait AnswerFormat: Send {
    /// Appends the bytes for a part of the answer to the prompt with this index.
    fn write(&mut self, context: &AnswerContext, out: &mut Vec<u8>, prompt: usize, part: AnswerPart);

    /// Appends the end of the answer. An answer that is not streamed consists of only this.
    fn write_end(&mut self, context: &AnswerContext, out: &mut Vec<u8>);

    /// Appends the end of a streamed answer that failed.
    fn write_error(&mut self, _: &AnswerContext, out: &mut Vec<u8>, failure: &AnswerFailure<'_>) {
        sse::write_event(out, &failure.event());
    }

    /// Returns the bytes that are sent in a long pause between two events.
    fn keep_alive(&self) -> &'static [u8] {
        KEEP_ALIVE
    }
}
