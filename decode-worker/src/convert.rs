//! Conversions between wire messages and the engine's types. Requests are checked here, and only here.

use std::time::Duration;
use tandem_engine::{BadWord, FinishReason, Generate, Generated, KvSource, Sampling, TokenLogprobs};
use tandem_grammar::{CallInput, Constraint, InputPlace, Kind};
use tandem_kv::{Namespace, TokenId};
use tandem_proto::{
    NAMESPACE_BYTES_MAX, TEXT_BYTES_MAX,
    v1::{self, GenerateRequest, WorkerRef, constraint, finished},
};
use tokio::time::Instant;

/// Maximum number of samples of one prompt.
const SAMPLES_MAX: u32 = 128;
/// Maximum number of alternatives whose logprobs are returned for one token.
const LOGPROBS_MAX: u32 = 20;
/// Maximum number of tokens with a logit bias, the same as in the frontend.
const BIASES_MAX: usize = 1_024;
/// Maximum number of stop tokens: more than the number that a frontend lets a client set plus the number that a model has.
const STOP_TOKENS_MAX: usize = 1_024;
/// Maximum number of token sequences that must not be generated.
const BAD_WORD_FORMS_MAX: usize = 256;
/// Maximum length of a token sequence that must not be generated. Each step compares it with the last tokens of the sample.
const BAD_WORD_TOKENS_MAX: usize = 512;
/// The largest absolute value of a penalty or bias. Larger values have the same effect, and with this limit all logits stay finite.
const WEIGHT_MAX: f32 = 1_000.0;

#[derive(Debug)]
pub(crate) struct DecodeRequest {
    pub(crate) attempt: u32,
    pub(crate) traceparent: String,
    pub(crate) generate: Generate,
    pub(crate) output: Output,
    pub(crate) prefill: Option<WorkerRef>,
    /// The time within which the prefill must begin; `None` sets no limit.
    pub(crate) start_within: Option<Duration>,
    /// The time until which the request may wait in the queue.
    pub(crate) wait_until: Option<Instant>,
}

#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) samples: usize,
    pub(crate) stop_tokens: Vec<TokenId>,
    /// The prompt's token ids; empty unless the request wants the prompt's logprobs.
    pub(crate) prompt: Vec<TokenId>,
}

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
    #[error("generated must list each sample once, in ascending order, with at most max_tokens tokens of the vocabulary")]
    Generated,
    #[error("{field} must be {allowed}")]
    OutOfRange { field: &'static str, allowed: &'static str },
    #[error("constraint must have a kind")]
    NoConstraint,
    #[error("prefill must have an instance_id and an address")]
    NoPrefillWorker,
    #[error("a prompt whose logprobs are requested must be prefilled on the decode worker")]
    PromptLogprobsElsewhere,
}

impl DecodeRequest {
    pub(crate) fn check(request: GenerateRequest, vocab_size: usize) -> Result<Self, Invalid> {
        let known = |token: &TokenId| usize::try_from(*token).is_ok_and(|token| token < vocab_size);
        if request.prompt.is_empty() {
            return Err(Invalid::EmptyPrompt);
        }
        check_texts(&request)?;
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
        check_tokens(&sampling, known)?;
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
                priority: request.priority.unwrap_or_default().into(),
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
            wait_until: request.wait_max_ms.map(|ms| Instant::now() + Duration::from_millis(ms.into())),
        })
    }
}

/// Checks the sizes of all texts of a request except the prompt.
fn check_texts(request: &GenerateRequest) -> Result<(), Invalid> {
    let texts = [
        ("request_id", request.request_id.len(), TEXT_BYTES_MAX, "at most 1024 bytes"),
        ("traceparent", request.traceparent.len(), TEXT_BYTES_MAX, "at most 1024 bytes"),
        ("account", request.account.len(), TEXT_BYTES_MAX, "at most 1024 bytes"),
        ("cache_namespace", request.cache_namespace.len(), NAMESPACE_BYTES_MAX, "at most 4096 bytes"),
    ];
    let too_long = texts.into_iter().find(|(_, bytes, bytes_max, _)| bytes > bytes_max);
    too_long.map_or(Ok(()), |(field, _, _, allowed)| Err(Invalid::OutOfRange { field, allowed }))
}

/// Checks that all tokens that the sampling parameters name are in the model's vocabulary.
fn check_tokens(sampling: &Sampling, known: impl Fn(&TokenId) -> bool) -> Result<(), Invalid> {
    let bad_tokens = sampling.bad_words.iter().flat_map(|word| word.forms.iter().flatten());
    for (field, all_known) in [
        ("allowed_token_ids", sampling.allowed_token_ids.iter().all(&known)),
        ("logprob_token_ids", sampling.logprob_token_ids.iter().all(&known)),
        ("bad_words", bad_tokens.into_iter().all(&known)),
    ] {
        if !all_known {
            return Err(Invalid::OutOfRange { field, allowed: "token ids of the model's vocabulary" });
        }
    }
    Ok(())
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
        allowed_token_ids: wire.allowed_token_ids.into(),
        bad_words: wire.bad_words.into_iter().map(bad_word).collect(),
        logprob_token_ids: wire.logprob_token_ids,
        constraint: match wire.constraint {
            Some(wire) => Some(constraint(wire)?),
            None if wire.call_inputs.is_empty() => None,
            None => Some(Kind::CallInputs(wire.call_inputs.into_iter().map(call_input).collect()).into()),
        },
    };
    let Sampling { top_p, repetition_penalty, min_tokens, max_tokens, .. } = sampling;
    let forms = || sampling.bad_words.iter().flat_map(|word| &word.forms);
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
        ("logprob_token_ids", "at most 20 tokens", sampling.logprob_token_ids.len() <= LOGPROBS_MAX as usize),
        ("bad_words", "at most 256 sequences of tokens", forms().count() <= BAD_WORD_FORMS_MAX),
        ("bad_words", "sequences of 1 to 512 tokens", forms().all(|form| (1..=BAD_WORD_TOKENS_MAX).contains(&form.len()))),
        ("bad_words", "texts of at most 1024 bytes", sampling.bad_words.iter().all(|word| word.text.len() <= TEXT_BYTES_MAX)),
        ("logprobs", "at most 20", sampling.logprobs.is_none_or(|top| top <= LOGPROBS_MAX)),
    ] {
        if !holds {
            return Err(Invalid::OutOfRange { field, allowed });
        }
    }
    Ok(sampling)
}

fn bad_word(wire: v1::BadWord) -> BadWord {
    BadWord { text: wire.text, forms: wire.forms.into_iter().map(|form| form.tokens).collect() }
}

fn constraint(wire: v1::Constraint) -> Result<Constraint, Invalid> {
    let v1::Constraint { kind, begins_after, lenient } = wire;
    let kind = match kind.ok_or(Invalid::NoConstraint)? {
        constraint::Kind::JsonSchema(schema) => Kind::JsonSchema { schema, lenient },
        constraint::Kind::JsonObject(_) => Kind::JsonObject,
        constraint::Kind::Regex(regex) => Kind::Regex(regex),
        constraint::Kind::Choice(choices) => Kind::Choice(choices.texts),
        constraint::Kind::Grammar(grammar) => Kind::Grammar(grammar),
        constraint::Kind::StructuralTag(tags) => Kind::StructuralTag(tags),
    };
    if begins_after.len() > TEXT_BYTES_MAX {
        return Err(Invalid::OutOfRange { field: "begins_after", allowed: "at most 1024 bytes" });
    }
    Ok(Constraint { kind, begins_after: Some(begins_after).filter(|marker| !marker.is_empty()) })
}

fn call_input(constraint::CallInput { places, grammar, regex }: constraint::CallInput) -> CallInput {
    let place = |constraint::InputPlace { begin, head, end, tail }| {
        let end = Some(end).filter(|end| !end.is_empty());
        InputPlace { begin, head, end, tail }
    };
    let kind = if grammar.is_empty() { Kind::Regex(regex) } else { Kind::Grammar(grammar) };
    CallInput { places: places.into_iter().map(place).collect(), kind }
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

/// Converts the end of a sample. `logprobs` belongs to the stop token that ended the sample.
pub(crate) fn finished(sample: u32, reason: FinishReason, logprobs: Option<TokenLogprobs>) -> v1::Finished {
    let (reason, stop_token) = match reason {
        FinishReason::Stop(token) => (finished::FinishReason::Stop, Some(token)),
        FinishReason::Complete => (finished::FinishReason::Stop, None),
        FinishReason::Length => (finished::FinishReason::Length, None),
    };
    let stop_logprobs = stop_token.filter(|_| logprobs.is_some()).map(|stop| token(stop, logprobs));
    v1::Finished { sample, reason: reason.into(), stop_token, stop_logprobs }
}

#[cfg(test)]
mod tests;
