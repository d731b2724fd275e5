//! Requests to llama.cpp's `/completion`, with token ids as input and output.

use crate::grammar;
use serde::Serialize;
use serde_json::Value;
use tandem_engine::Sampling;
use tandem_grammar::{Constraint, Kind, is_ebnf};
use tandem_kv::TokenId;

/// The server's samplers in the order in which Tandem's engine applies them. By default the server applies the temperature last. Samplers that are
/// not listed are disabled.
const SAMPLERS: [&str; 5] = ["penalties", "temperature", "min_p", "top_k", "top_p"];

/// The fields that are requested for the last event of a streamed answer. Other fields would repeat the prompt's text and all settings.
const RESPONSE_FIELDS: [&str; 4] = ["stop", "stop_type", "tokens_predicted", "timings"];

/// llama.cpp's default window of presence and frequency penalties, in tokens. Prompt tokens in the window are penalised like generated ones, so
/// with a larger window a long prompt would change the answer.
const PENALTY_WINDOW: u32 = 64;

#[derive(Serialize)]
pub(super) struct CompletionBody<'a> {
    prompt: &'a [TokenId],
    n_predict: u32,
    cache_prompt: bool,
    stream: bool,
    return_tokens: bool,
    /// Whether the server sends an event with the number of cached tokens before it computes the prompt.
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
    /// Whether end-of-sequence tokens are excluded from the answer.
    ignore_eos: bool,
    n_probs: u32,
    #[serde(flatten)]
    constraint: Option<ServerConstraint>,
}

/// A constraint in the form that the server accepts.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum ServerConstraint {
    JsonSchema(Value),
    /// A grammar in llama.cpp's format GBNF.
    Grammar(String),
}

/// Checks whether the server supports this kind of constraint.
///
/// # Errors
/// Fails if the server does not support it. The text says what to do.
pub(super) fn check(constraint: &Constraint) -> Result<(), &'static str> {
    server_constraint(constraint).map(drop)
}

fn server_constraint(Constraint { kind, begins_after }: &Constraint) -> Result<ServerConstraint, &'static str> {
    if begins_after.is_some() {
        return Err("llama.cpp cannot begin a constraint after the reasoning: disable the reasoning, or the constraint");
    }
    Ok(match kind {
        Kind::JsonSchema { schema, .. } => {
            ServerConstraint::JsonSchema(serde_json::from_str(schema).map_err(|_| "the JSON schema is not valid JSON")?)
        }
        Kind::JsonObject => ServerConstraint::JsonSchema(serde_json::json!({ "type": "object" })),
        Kind::Choice(texts) => ServerConstraint::Grammar(grammar::choice(texts)),
        Kind::Grammar(grammar) if is_ebnf(grammar) => ServerConstraint::Grammar(grammar.clone()),
        Kind::Grammar(_) => return Err("llama.cpp has no grammars in Lark: send the grammar in GBNF"),
        Kind::Regex(_) => return Err("llama.cpp has no constraint by a regular expression: send a grammar in GBNF"),
        Kind::CallInputs(_) => return Err("llama.cpp cannot constrain the inputs of calls"),
        Kind::StructuralTag(_) => return Err("llama.cpp has no structural tags"),
    })
}

/// The inputs of a request besides its prompt and its sampling parameters.
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
            // The server reports the logprob of the sampled token only together with at least one alternative.
            n_probs: sampling.logprobs.map_or(0, |top| top.max(1)),
            constraint: sampling.constraint.as_ref().and_then(|constraint| server_constraint(constraint).ok()),
        }
    }
}

/// Returns a seed of 32 bits. Consecutive seeds stay different. The largest number is not used, because it means a random seed.
fn seed(seed: u64) -> u32 {
    (seed % u64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const SETTINGS: BodySettings = BodySettings { context_length: 100, prefix_caching: true, end_token: Some(2) };

    fn body(sampling: &Sampling, settings: &BodySettings) -> Value {
        serde_json::to_value(CompletionBody::new(&[1, 5], sampling, settings)).expect("plain data")
    }

    #[test]
    fn all_sampling_parameters_are_sent_to_the_server() {
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
        assert_eq!(of(Sampling { max_tokens: None, ..default() }, "n_predict"), 98, "the limit is the rest of the context");
        assert_eq!(
            of(Sampling { repetition_penalty: 1.5, ..default() }, "repeat_last_n"),
            100,
            "the penalty counts the prompt and the answer"
        );
        assert_eq!(of(Sampling { logprobs: Some(0), ..default() }, "n_probs"), 1);
        for (of_request, sent) in [(7, 7), (8, 8), (u64::from(u32::MAX) - 1, u32::MAX - 1), (u32::MAX.into(), 0), (1 << 40, 256)]
        {
            assert_eq!(of(Sampling { seed: of_request, ..default() }, "seed"), sent);
        }
    }

    #[test]
    fn constraints_are_sent_to_the_server_or_refused() {
        let of = |kind: Kind| {
            let sampling = Sampling { constraint: Some(kind.into()), ..Sampling::default() };
            let refused = check(sampling.constraint.as_ref().expect("the sampling has a constraint")).err();
            let body = body(&sampling, &SETTINGS);
            (body["json_schema"].clone(), body["grammar"].clone(), refused.is_some())
        };
        let schema = Kind::JsonSchema { schema: r#"{"type":"null"}"#.to_owned(), lenient: false };
        assert_eq!(of(schema), (json!({ "type": "null" }), Value::Null, false));
        assert_eq!(of(Kind::JsonObject), (json!({ "type": "object" }), Value::Null, false));
        let choice = Kind::Choice(vec!["a\"".to_owned(), "b".to_owned()]);
        assert_eq!(of(choice), (Value::Null, json!(r#"root ::= "a\"" | "b""#), false));
        let ebnf = "root ::= \"a\"".to_owned();
        assert_eq!(of(Kind::Grammar(ebnf.clone())), (Value::Null, json!(ebnf), false));
        for kind in [Kind::Grammar("start: \"a\"".to_owned()), Kind::Regex("a".to_owned()), Kind::StructuralTag("{}".to_owned())]
        {
            assert_eq!(of(kind), (Value::Null, Value::Null, true));
        }
        let late = Constraint { kind: Kind::JsonObject, begins_after: Some("</think>".to_owned()) };
        assert!(check(&late).is_err_and(|why| why.contains("reasoning")));
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
