//! Writes answers of `/inference/v1/generate`: the token ids of one prompt's samples, in vLLM's format.

use super::{
    answer::Run,
    progress::Details,
    prompt_logprobs::{PromptLogprobs, rank},
    sse::{DONE, Format, write_event},
    token::finite,
};
use crate::{
    error::ApiError,
    stream::{AnswerEvent, Delta, FinishReason, TokenLogprobs},
    usage::Usage,
};
use schemars::JsonSchema;
use serde::Serialize;
use tandem_api::StreamUsage;
use tandem_kv::TokenId;

pub(super) struct Generated {
    run: Run,
    /// `None`: the answer is not streamed.
    stream: Option<StreamUsage>,
    /// The samples of an answer that is not streamed.
    samples: Vec<Delta>,
}

/// The body of a response that is not streamed.
#[derive(JsonSchema, Serialize)]
pub(super) struct Answer<'a> {
    request_id: &'a str,
    model: &'a str,
    created: u64,
    choices: Vec<Choice<'a>>,
    usage: Usage,
    prompt_logprobs: Option<PromptLogprobs<'a>>,
    kv_transfer_params: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<serde_json::Map<String, serde_json::Value>>")]
    tandem: Option<Details>,
}

/// An event of a streamed answer.
#[derive(JsonSchema, Serialize)]
pub(super) struct Chunk<'a> {
    request_id: &'a str,
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<serde_json::Map<String, serde_json::Value>>")]
    tandem: Option<Details>,
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
    /// vLLM's name of a token in an answer without text.
    token: String,
    token_id: TokenId,
    logprob: f32,
    /// The token's place in the list of the likeliest tokens, from 1; `None`: it is not one of the requested alternatives.
    rank: Option<usize>,
    bytes: Option<()>,
}

impl Generated {
    pub(super) fn new(run: Run, stream: Option<StreamUsage>) -> Self {
        let samples = (0..run.progress.samples as u32).map(|sample| Delta { sample, ..Delta::default() }).collect();
        Self { run, stream, samples }
    }

    fn write_chunk(&self, out: &mut Vec<u8>, choices: Vec<Choice<'_>>, usage: bool, tandem: Option<Details>) {
        let usage = usage.then(|| self.run.progress.usage());
        write_event(out, &Chunk { request_id: &self.run.id, choices, usage, tandem });
    }

    fn choice<'a>(&self, delta: &'a Delta) -> Choice<'a> {
        let logprobs = self.run.wants_logprobs.then(|| Logprobs { content: delta.logprobs.iter().map(sampled).collect() });
        Choice { index: delta.sample, logprobs, finish_reason: delta.finish, token_ids: &delta.token_ids }
    }

    fn details(&self) -> Option<Details> {
        self.run.details.then(|| self.run.progress.details())
    }
}

impl Format for Generated {
    fn run(&mut self) -> &mut Run {
        &mut self.run
    }

    fn write(&mut self, out: &mut Vec<u8>, _: usize, event: AnswerEvent) -> Result<(), ApiError> {
        match (event, self.stream) {
            (AnswerEvent::Delta(delta), Some(usage)) => {
                self.write_chunk(out, vec![self.choice(&delta)], usage.in_every_chunk, None);
            }
            (AnswerEvent::Delta(delta), None) => {
                let sample = &mut self.samples[delta.sample as usize];
                sample.token_ids.extend(delta.token_ids);
                sample.logprobs.extend(delta.logprobs);
                sample.finish = sample.finish.or(delta.finish);
            }
            _ => {}
        }
        Ok(())
    }

    fn write_end(&mut self, out: &mut Vec<u8>) {
        if let Some(usage) = self.stream {
            if usage.at_end || self.run.details {
                self.write_chunk(out, Vec::new(), true, self.details());
            }
            out.extend_from_slice(DONE);
            return;
        }
        let answer = Answer {
            request_id: &self.run.id,
            model: &self.run.model.id,
            created: self.run.created,
            choices: self.samples.iter().map(|sample| self.choice(sample)).collect(),
            usage: self.run.progress.usage(),
            prompt_logprobs: self.run.prompt_logprobs(0),
            kv_transfer_params: None,
            tandem: self.details(),
        };
        serde_json::to_writer(out, &answer).expect("the keys of an answer are strings");
    }
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
