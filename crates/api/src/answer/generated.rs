//! Writes answers of `/inference/v1/generate`: the token ids of one prompt's samples, in vLLM's format.

use super::{
    AnswerContext, AnswerFormat, AnswerPart, Delta, FinishReason, TokenLogprobs, Usage,
    prompt_logprobs::{PromptLogprobs, rank},
    sse::{DONE, write_event, write_json},
    token::finite,
};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use tandem_kv::TokenId;

pub(super) struct GeneratedFormat {
    /// The samples of an answer that is not streamed.
    samples: Vec<Delta>,
    /// The logprobs of the prompt's tokens, if they have arrived.
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
}

/// The body of a response that is not streamed.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "Answer")]
pub struct GeneratedAnswer<'a> {
    request_id: &'a str,
    model: &'a str,
    created: u64,
    choices: Vec<Choice<'a>>,
    usage: Usage,
    prompt_logprobs: Option<PromptLogprobs<'a>>,
    kv_transfer_params: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<serde_json::Map<String, Value>>")]
    tandem: Option<&'a Value>,
}

/// An event of a streamed answer.
#[derive(JsonSchema, Serialize)]
#[schemars(rename = "Chunk")]
pub struct GeneratedChunk<'a> {
    request_id: &'a str,
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<serde_json::Map<String, Value>>")]
    tandem: Option<&'a Value>,
}

#[derive(JsonSchema, Serialize)]
struct Choice<'a> {
    index: u32,
    logprobs: Option<Logprobs>,
    finish_reason: Option<FinishReason>,
    token_ids: &'a [TokenId],
}

#[derive(JsonSchema, Serialize)]
struct Logprobs {
    content: Vec<Sampled>,
}

/// A sampled token with its alternatives.
#[derive(JsonSchema, Serialize)]
struct Sampled {
    #[serde(flatten)]
    token: Alternative,
    top_logprobs: Vec<Alternative>,
}

#[derive(JsonSchema, Serialize)]
struct Alternative {
    /// The token as vLLM names it in answers without text.
    token: String,
    token_id: TokenId,
    logprob: f32,
    /// The token's place in the list of the likeliest tokens, from 1; `None`: it is not one of the requested alternatives.
    rank: Option<usize>,
    bytes: Option<()>,
}

impl GeneratedFormat {
    pub(super) fn new(context: &AnswerContext) -> Self {
        let samples = (0..context.samples as u32).map(|sample| Delta { sample, ..Delta::default() }).collect();
        Self { samples, prompt_logprobs: None }
    }
}

impl AnswerFormat for GeneratedFormat {
    fn write(&mut self, context: &AnswerContext, out: &mut Vec<u8>, _: usize, part: AnswerPart) {
        match (part, context.stream) {
            (AnswerPart::Delta(delta), Some(stream)) => {
                let usage = stream.in_every_chunk.then_some(context.usage);
                write_event(out, &chunk(context, vec![choice(context, &delta)], usage, None));
            }
            (AnswerPart::Delta(delta), None) => {
                let sample = &mut self.samples[delta.sample as usize];
                sample.token_ids.extend(delta.token_ids);
                sample.logprobs.extend(delta.logprobs);
                sample.finish = sample.finish.or(delta.finish);
            }
            (AnswerPart::PromptLogprobs { tokens, .. }, _) => self.prompt_logprobs = Some(tokens),
            (AnswerPart::Started { .. }, _) => {}
        }
    }

    fn write_end(&mut self, context: &AnswerContext, out: &mut Vec<u8>) {
        let tandem = context.details.as_ref();
        if let Some(stream) = context.stream {
            if stream.at_end || tandem.is_some() {
                write_event(out, &chunk(context, Vec::new(), Some(context.usage), tandem));
            }
            out.extend_from_slice(DONE);
            return;
        }
        let answer = GeneratedAnswer {
            request_id: &context.id,
            model: &context.model.id,
            created: context.created,
            choices: self.samples.iter().map(|sample| choice(context, sample)).collect(),
            usage: context.usage,
            prompt_logprobs: context.prompt_logprobs(self.prompt_logprobs.as_deref()),
            kv_transfer_params: None,
            tandem,
        };
        write_json(out, &answer);
    }
}

fn chunk<'a>(
    context: &'a AnswerContext,
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
    tandem: Option<&'a Value>,
) -> GeneratedChunk<'a> {
    GeneratedChunk { request_id: &context.id, choices, usage, tandem }
}

fn choice<'a>(context: &AnswerContext, delta: &'a Delta) -> Choice<'a> {
    let logprobs = context.logprobs.map(|_| Logprobs { content: delta.logprobs.iter().map(sampled).collect() });
    Choice { index: delta.sample, logprobs, finish_reason: delta.finish, token_ids: &delta.token_ids }
}

fn sampled(entry: &TokenLogprobs) -> Sampled {
    let alternative = |token: TokenId, logprob: f32| Alternative {
        token: format!("token_id:{token}"),
        token_id: token,
        logprob: finite(logprob),
        rank: rank(&entry.top, token),
        bytes: None,
    };
    Sampled {
        token: alternative(entry.token, entry.logprob.unwrap_or(f32::NEG_INFINITY)),
        top_logprobs: entry.top.iter().map(|(token, logprob)| alternative(*token, *logprob)).collect(),
    }
}
