//! Conversions between wire messages and the engine's types. Requests are checked here, and only here.

use std::time::Duration;
use tandem_engine::{FinishReason, Generate, Generated, KvSource, Sampling, TokenLogprobs};
use tandem_kv::{Namespace, TokenId};
use tandem_proto::{
    NAMESPACE_BYTES_MAX, TEXT_BYTES_MAX,
    v1::{self, GenerateRequest, WorkerRef, finished},
};

/// The most samples of one prompt.
const SAMPLES_MAX: u32 = 128;
/// The most alternatives whose logprobs are returned for one token.
const LOGPROBS_MAX: u32 = 20;
/// The most tokens with a bias. A frontend has the same limit.
const BIASES_MAX: usize = 1_024;
/// The most tokens that end a sample: more than a frontend allows a client, plus those of the model.
const STOP_TOKENS_MAX: usize = 1_024;
/// The largest absolute value of penalties and biases: larger ones make no difference, and all logits stay finite.
const WEIGHT_MAX: f32 = 1_000.0;

/// A checked request.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) attempt: u32,
    pub(crate) traceparent: String,
    pub(crate) generate: Generate,
    pub(crate) output: Output,
    pub(crate) prefill: Option<WorkerRef>,
    /// The longest time until the prefill begins; `None`: no limit.
    pub(crate) start_within: Option<Duration>,
}

/// The parts of the request that are needed to forward the engine's events.
#[derive(Debug)]
pub(crate) struct Output {
    /// The number of samples that run.
    pub(crate) samples: usize,
    pub(crate) stop_tokens: Vec<TokenId>,
    /// Empty unless the request wants the prompt's logprobs.
    pub(crate) prompt: Vec<TokenId>,
}

/// The reason that no worker can run a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Invalid {
    #[error("prompt must have at least one token")]
    EmptyPrompt,
    #[error("prompt must have only token ids of the model's vocabulary")]
    UnknownToken,
    #[error("sampling must be set")]
    NoSampling,
    #[error("samples must be between 1 and {SAMPLES_MAX}")]
    Samples,
    #[error("generated must name samples in order, each once, with at most max_tokens tokens, all in the vocabulary")]
    Generated,
    #[error("{field} must be {allowed}")]
    OutOfRange { field: &'static str, allowed: &'static str },
    #[error("prefill must have an instance_id and an address")]
    NoPrefillWorker,
    #[error("a prompt whose logprobs are requested must be prefilled on the decode worker")]
    PromptLogprobsElsewhere,
}

impl Request {
    pub(crate) fn check(request: GenerateRequest, vocab_size: usize) -> Result<Self, Invalid> {
        let known = |token: &TokenId| usize::try_from(*token).is_ok_and(|token| token < vocab_size);
        if request.prompt.is_empty() {
            return Err(Invalid::EmptyPrompt);
        }
        for (field, bytes, bytes_max, allowed) in [
            ("request_id", request.request_id.len(), TEXT_BYTES_MAX, "at most 1024 bytes"),
            ("traceparent", request.traceparent.len(), TEXT_BYTES_MAX, "at most 1024 bytes"),
            ("account", request.account.len(), TEXT_BYTES_MAX, "at most 1024 bytes"),
            ("cache_namespace", request.cache_namespace.len(), NAMESPACE_BYTES_MAX, "at most 4096 bytes"),
        ] {
            if bytes > bytes_max {
                return Err(Invalid::OutOfRange { field, allowed });
            }
        }
        if !request.prompt.iter().all(known) {
            return Err(Invalid::UnknownToken);
        }
        if !(1..=SAMPLES_MAX).contains(&request.samples) {
            return Err(Invalid::Samples);
        }
        if request.prompt_logprobs.is_some_and(|top| top > LOGPROBS_MAX) {
            return Err(Invalid::OutOfRange { field: "prompt_logprobs", allowed: "at most 20" });
        }
        if let Some(prefill) = &request.prefill {
            if prefill.address.is_empty() || prefill.instance_id.is_empty() {
                return Err(Invalid::NoPrefillWorker);
            }
            if request.prompt_logprobs.is_some() {
                return Err(Invalid::PromptLogprobsElsewhere);
            }
        }
        let sampling = sampling(request.sampling.ok_or(Invalid::NoSampling)?)?;
        let generated = request.generated;
        let tokens_max = sampling.max_tokens.map_or(usize::MAX, |max| max as usize);
        let in_order = generated.is_sorted_by(|one, next| one.sample < next.sample);
        let resumable =
            |of: &v1::ResumedSample| of.sample < request.samples && of.tokens.len() <= tokens_max && of.tokens.iter().all(known);
        if !in_order || !generated.iter().all(resumable) {
            return Err(Invalid::Generated);
        }
        Ok(Self {
            attempt: request.attempt,
            traceparent: request.traceparent,
            output: Output {
                samples: if generated.is_empty() { request.samples as usize } else { generated.len() },
                stop_tokens: sampling.stop_token_ids.clone(),
                prompt: if request.prompt_logprobs.is_some() { request.prompt.clone() } else { Vec::new() },
            },
            generate: Generate {
                request_id: request.request_id,
                account: request.account,
                namespace: Namespace::from_bytes(&request.cache_namespace),
                prompt: request.prompt,
                sampling,
                samples: request.samples,
                kv: if request.prefill.is_some() { KvSource::Remote } else { KvSource::Local },
                prompt_logprobs: request.prompt_logprobs,
                generated: generated.into_iter().map(|of| Generated { sample: of.sample, tokens: of.tokens }).collect(),
            },
            prefill: request.prefill,
            start_within: request.prefill_start_timeout_ms.map(|ms| Duration::from_millis(ms.into())),
        })
    }
}

fn sampling(wire: v1::Sampling) -> Result<Sampling, Invalid> {
    let sampling = Sampling {
        max_tokens: wire.max_tokens,
        min_tokens: wire.min_tokens,
        temperature: wire.temperature,
        top_p: wire.top_p,
        top_k: wire.top_k,
        min_p: wire.min_p,
        frequency_penalty: wire.frequency_penalty,
        presence_penalty: wire.presence_penalty,
        repetition_penalty: wire.repetition_penalty,
        logit_bias: wire.logit_bias,
        seed: wire.seed,
        stop_token_ids: wire.stop_token_ids,
        logprobs: wire.logprobs,
    };
    let Sampling { top_p, repetition_penalty, min_tokens, max_tokens, .. } = sampling;
    let is_weight = |weight: &f32| (-WEIGHT_MAX..=WEIGHT_MAX).contains(weight);
    // A NaN fails these checks, because it is in no range.
    for (field, allowed, holds) in [
        ("temperature", "between 0 and 100", (0.0..=100.0).contains(&sampling.temperature)),
        ("top_p", "above 0 and at most 1", top_p > 0.0 && top_p <= 1.0),
        ("min_p", "between 0 and 1", (0.0..=1.0).contains(&sampling.min_p)),
        ("frequency_penalty", "between -1000 and 1000", is_weight(&sampling.frequency_penalty)),
        ("presence_penalty", "between -1000 and 1000", is_weight(&sampling.presence_penalty)),
        ("repetition_penalty", "above 0 and at most 1000", repetition_penalty > 0.0 && repetition_penalty <= WEIGHT_MAX),
        ("logit_bias", "between -1000 and 1000", sampling.logit_bias.values().all(is_weight)),
        ("logit_bias", "of at most 1024 tokens", sampling.logit_bias.len() <= BIASES_MAX),
        ("stop_token_ids", "at most 1024 tokens", sampling.stop_token_ids.len() <= STOP_TOKENS_MAX),
        ("min_tokens", "at most max_tokens", max_tokens.is_none_or(|max_tokens| min_tokens <= max_tokens)),
        ("logprobs", "at most 20", sampling.logprobs.is_none_or(|top| top <= LOGPROBS_MAX)),
    ] {
        if !holds {
            return Err(Invalid::OutOfRange { field, allowed });
        }
    }
    Ok(sampling)
}

pub(crate) fn started(started: &tandem_engine::Started) -> v1::DecodeStarted {
    v1::DecodeStarted {
        queue_ms: started.queue.as_secs_f64() * 1e3,
        kv_transfer_ms: started.kv_transfer.as_secs_f64() * 1e3,
        kv_transfer_bytes: started.kv_transfer_bytes,
    }
}

pub(crate) fn token(token: TokenId, logprobs: Option<TokenLogprobs>) -> v1::Token {
    let Some(TokenLogprobs { logprob, top }) = logprobs else {
        return v1::Token { token, ..Default::default() };
    };
    let top = top.into_iter().map(|alternative| v1::TokenLogprob { token: alternative.token, logprob: alternative.logprob });
    v1::Token { token, logprob: Some(logprob), top: top.collect() }
}

pub(crate) fn prompt_logprobs(prompt: &[TokenId], logprobs: Vec<Option<TokenLogprobs>>) -> v1::PromptLogprobs {
    v1::PromptLogprobs { tokens: prompt.iter().zip(logprobs).map(|(id, logprobs)| token(*id, logprobs)).collect() }
}

pub(crate) fn finished(sample: u32, reason: FinishReason) -> v1::Finished {
    let (reason, stop_token) = match reason {
        FinishReason::Stop(token) => (finished::FinishReason::Stop, Some(token)),
        FinishReason::Length => (finished::FinishReason::Length, None),
    };
    v1::Finished { sample, reason: reason.into(), stop_token }
}

#[cfg(test)]
mod tests;
