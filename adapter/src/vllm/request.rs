//! Requests to vLLM's `/inference/v1/generate`: token ids in, token ids out.

use serde::Serialize;
use serde_json::Value;
use std::collections::HashMap;
use tandem_engine::Sampling;
use tandem_kv::TokenId;

/// The most logprobs that an engine returns by default (`--max-logprobs`).
const LOGPROBS_MAX: u32 = 20;

/// The mask that limits seeds to 63 bits. Without it, vLLM would treat every larger seed as the largest 63-bit number.
const SEED_MASK: u64 = i64::MAX as u64;

#[derive(Serialize)]
pub(super) struct GenerateBody<'a> {
    pub token_ids: &'a [TokenId],
    pub sampling_params: SamplingParams<'a>,
    pub cache_salt: String,
    pub stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream_options: Option<StreamOptions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfer_params: Option<Value>,
}

#[derive(Serialize)]
pub(super) struct StreamOptions {
    pub include_usage: bool,
}

/// vLLM's sampling parameters. Tandem's stop tokens include the end-of-sequence tokens, so `ignore_eos` is always set.
#[derive(Serialize)]
pub(super) struct SamplingParams<'a> {
    max_tokens: u32,
    min_tokens: u32,
    temperature: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
    frequency_penalty: f32,
    presence_penalty: f32,
    repetition_penalty: f32,
    #[serde(skip_serializing_if = "HashMap::is_empty")]
    logit_bias: HashMap<String, f32>,
    seed: u64,
    stop_token_ids: &'a [TokenId],
    ignore_eos: bool,
    detokenize: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<u32>,
    extra_args: ExtraArgs,
}

#[derive(Serialize)]
struct ExtraArgs {
    /// Makes KV events also report the cached blocks that the request uses, so that the mirror adds blocks whose events it missed.
    kv_cache_report_mode: &'static str,
}

impl<'a> SamplingParams<'a> {
    /// Returns the parameters of a generation with at most `max_tokens` new tokens.
    pub fn new(sampling: &'a Sampling, max_tokens: u32) -> Self {
        Self {
            max_tokens,
            min_tokens: sampling.min_tokens.min(max_tokens),
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            frequency_penalty: sampling.frequency_penalty,
            presence_penalty: sampling.presence_penalty,
            repetition_penalty: sampling.repetition_penalty,
            logit_bias: sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), *bias)).collect(),
            seed: sampling.seed & SEED_MASK,
            stop_token_ids: &sampling.stop_token_ids,
            ignore_eos: true,
            detokenize: false,
            // If the sampled token is none of the alternatives, vLLM returns it in place of the last alternative, so one alternative more
            // is requested.
            logprobs: sampling.logprobs.map(|top| (top + 1).min(LOGPROBS_MAX)),
            prompt_logprobs: None,
            extra_args: ExtraArgs { kv_cache_report_mode: "full" },
        }
    }

    /// Returns the parameters of a request that only computes its prompt. vLLM generates at least one token.
    pub fn prompt_only(sampling: &'a Sampling, prompt_logprobs: Option<u32>) -> Self {
        Self { temperature: 0.0, prompt_logprobs, ..Self::new(sampling, 1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn request_body_contains_all_sampling_parameters() {
        let sampling = Sampling {
            max_tokens: Some(9),
            min_tokens: 2,
            temperature: 0.5,
            top_p: 0.25,
            top_k: 7,
            min_p: 0.125,
            frequency_penalty: 1.0,
            presence_penalty: -1.0,
            repetition_penalty: 1.5,
            logit_bias: [(5, 3.0)].into(),
            seed: u64::MAX,
            stop_token_ids: vec![2],
            logprobs: Some(3),
        };
        let body = GenerateBody {
            token_ids: &[1, 2],
            sampling_params: SamplingParams::new(&sampling, 9),
            cache_salt: "s".to_owned(),
            stream: true,
            stream_options: Some(StreamOptions { include_usage: true }),
            kv_transfer_params: None,
        };
        assert_eq!(
            serde_json::to_value(body).expect("the request body can be serialized"),
            json!({
                "token_ids": [1, 2], "cache_salt": "s", "stream": true, "stream_options": { "include_usage": true },
                "sampling_params": {
                    "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125,
                    "frequency_penalty": 1.0, "presence_penalty": -1.0, "repetition_penalty": 1.5, "logit_bias": { "5": 3.0 },
                    "seed": i64::MAX, "stop_token_ids": [2], "ignore_eos": true, "detokenize": false, "logprobs": 4,
                    "extra_args": { "kv_cache_report_mode": "full" },
                },
            })
        );
    }

    #[test]
    fn at_most_twenty_logprobs_are_requested() {
        let requested = |top| SamplingParams::new(&Sampling { logprobs: top, ..Sampling::default() }, 1).logprobs;
        assert_eq!([None, Some(0), Some(19), Some(20)].map(requested), [None, Some(1), Some(20), Some(20)]);
    }
}
