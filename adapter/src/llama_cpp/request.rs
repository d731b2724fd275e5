//! Requests to llama.cpp's `/completion`: token ids in, token ids out.

use serde::Serialize;
use tandem_engine::Sampling;
use tandem_kv::TokenId;

/// The samplers in the order of Tandem's engine; the server's own order has the temperature last. Samplers that are not listed are off.
const SAMPLERS: [&str; 5] = ["penalties", "temperature", "min_p", "top_k", "top_p"];

/// The fields of a streamed answer's last event. The others repeat the prompt as text, and all settings.
const RESPONSE_FIELDS: [&str; 4] = ["stop", "stop_type", "tokens_predicted", "timings"];

/// llama.cpp's default window of presence and frequency penalties, in tokens. The prompt's tokens in the window count as generated, so with
/// a larger window a long prompt would decide the answer.
const PENALTY_WINDOW: u32 = 64;

/// The body of a streamed request.
#[derive(Serialize)]
pub(super) struct CompletionBody<'a> {
    prompt: &'a [TokenId],
    n_predict: u32,
    cache_prompt: bool,
    stream: bool,
    return_tokens: bool,
    /// The first event has the number of cached tokens, before the prompt is computed.
    return_progress: bool,
    response_fields: [&'static str; 4],
    samplers: [&'static str; 5],
    temperature: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
    frequency_penalty: f32,
    presence_penalty: f32,
    repeat_penalty: f32,
    repeat_last_n: u32,
    logit_bias: Vec<(TokenId, f32)>,
    seed: u32,
    /// Bars all end-of-sequence tokens.
    ignore_eos: bool,
    n_probs: u32,
}

/// What a request depends on besides its prompt and its sampling.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodySettings {
    pub context_length: u32,
    pub prefix_caching: bool,
    pub end_token: Option<TokenId>,
}

impl<'a> CompletionBody<'a> {
    pub fn new(prompt: &'a [TokenId], sampling: &Sampling, settings: &BodySettings) -> Self {
        let BodySettings { context_length, prefix_caching, end_token } = *settings;
        let headroom = context_length.saturating_sub(u32::try_from(prompt.len()).unwrap_or(u32::MAX)).max(1);
        let mut logit_bias: Vec<_> = sampling.logit_bias.iter().map(|(token, bias)| (*token, *bias)).collect();
        logit_bias.sort_unstable_by_key(|(token, _)| *token);
        let counts_tokens = sampling.frequency_penalty != 0.0 || sampling.presence_penalty != 0.0;
        Self {
            prompt,
            n_predict: sampling.max_tokens.unwrap_or(u32::MAX).min(headroom),
            cache_prompt: prefix_caching,
            stream: true,
            return_tokens: true,
            return_progress: true,
            response_fields: RESPONSE_FIELDS,
            samplers: SAMPLERS,
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            frequency_penalty: sampling.frequency_penalty,
            presence_penalty: sampling.presence_penalty,
            repeat_penalty: sampling.repetition_penalty,
            repeat_last_n: if counts_tokens { PENALTY_WINDOW } else { context_length },
            logit_bias,
            seed: seed(sampling.seed),
            ignore_eos: match end_token {
                Some(end) => !sampling.stop_token_ids.contains(&end),
                None => sampling.stop_token_ids.is_empty(),
            },
            // The sampled token's own logprob comes with at least one alternative only.
            n_probs: sampling.logprobs.map_or(0, |top| top.max(1)),
        }
    }
}

/// Returns a seed of 32 bits; consecutive seeds stay different. The largest one would be a random seed.
fn seed(seed: u64) -> u32 {
    (seed % u64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    const SETTINGS: BodySettings = BodySettings { context_length: 100, prefix_caching: true, end_token: Some(2) };

    fn body(sampling: &Sampling, settings: &BodySettings) -> Value {
        serde_json::to_value(CompletionBody::new(&[1, 5], sampling, settings)).expect("plain data")
    }

    #[test]
    fn all_parameters_are_passed_on() {
        let sampling = Sampling {
            max_tokens: Some(9),
            temperature: 0.5,
            top_p: 0.25,
            top_k: 7,
            min_p: 0.125,
            frequency_penalty: 1.0,
            presence_penalty: -1.0,
            repetition_penalty: 1.5,
            logit_bias: [(7, -3.0), (5, 3.0)].into(),
            seed: 11,
            stop_token_ids: vec![2],
            logprobs: Some(3),
            ..Sampling::default()
        };
        assert_eq!(
            body(&sampling, &SETTINGS),
            json!({
                "prompt": [1, 5], "n_predict": 9, "cache_prompt": true, "stream": true, "return_tokens": true, "return_progress": true,
                "response_fields": ["stop", "stop_type", "tokens_predicted", "timings"],
                "samplers": ["penalties", "temperature", "min_p", "top_k", "top_p"],
                "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "frequency_penalty": 1.0, "presence_penalty": -1.0,
                "repeat_penalty": 1.5, "repeat_last_n": 64, "logit_bias": [[5, 3.0], [7, -3.0]], "seed": 11, "ignore_eos": false,
                "n_probs": 3,
            })
        );
    }

    #[test]
    fn values_that_the_server_would_interpret_differently_are_replaced() {
        let of = |sampling, field: &str| body(&sampling, &SETTINGS)[field].clone();
        let default = Sampling::default;
        assert_eq!(of(Sampling { max_tokens: None, ..default() }, "n_predict"), 98, "the context ends there");
        assert_eq!(of(Sampling { repetition_penalty: 1.5, ..default() }, "repeat_last_n"), 100, "it counts prompt and answer");
        assert_eq!(of(Sampling { logprobs: Some(0), ..default() }, "n_probs"), 1);
        for (of_request, sent) in [(7, 7), (8, 8), (u64::from(u32::MAX) - 1, u32::MAX - 1), (u32::MAX.into(), 0), (1 << 40, 256)]
        {
            assert_eq!(of(Sampling { seed: of_request, ..default() }, "seed"), sent);
        }
    }

    #[test]
    fn end_of_sequence_is_barred_unless_it_is_a_stop_token() {
        let ignored = |stop_token_ids: &[TokenId], end_token| {
            let sampling = Sampling { stop_token_ids: stop_token_ids.to_vec(), ..Sampling::default() };
            body(&sampling, &BodySettings { end_token, ..SETTINGS })["ignore_eos"] == true
        };
        assert_eq!([ignored(&[2], Some(2)), ignored(&[3], Some(2)), ignored(&[], Some(2))], [false, true, true]);
        assert_eq!([ignored(&[3], None), ignored(&[], None)], [false, true]);
    }
}
