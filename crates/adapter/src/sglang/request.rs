//! Requests to SGLang's `/generate`, with token ids as input and output.

use crate::{
    api::{EngineCall, EngineFailure},
    grammar,
    served::Loras,
};
use serde::Serialize;
use std::{collections::HashMap, sync::Arc};
use tandem_engine::{KvHandle, Sampling};
use tandem_grammar::{Constraint, Kind, is_ebnf};
use tandem_kv::{HashKey, TokenId, cache_salt};

/// The mask that limits seeds to 63 bits, because SGLang's seeds are signed.
const SEED_MASK: u64 = i64::MAX as u64;

/// The inputs of a request besides its prompt and its sampling parameters, and what the server can do.
#[derive(Clone, Debug)]
pub(super) struct SglangOptions {
    /// A random number that distinguishes the ids of this connection's requests from those of others.
    pub connection: u64,
    /// The data-parallel rank that requests name; `None` if the server has one rank.
    pub rank: Option<u32>,
    pub hash_key: HashKey,
    pub loras: Arc<Loras>,
    /// The maximum length of a sequence, in tokens.
    pub context_length: u32,
    /// Whether equal seeds give equal answers (`--enable-deterministic-inference`).
    pub uses_seeds: bool,
    /// Whether the server finds the end of a model's reasoning (`--reasoning-parser`).
    pub finds_reasoning: bool,
}

#[derive(Serialize)]
pub(super) struct SglangBody {
    pub rid: String,
    pub input_ids: Vec<TokenId>,
    sampling_params: SglangSampling,
    cache_salt: String,
    pub stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    lora_path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    routed_dp_rank: Option<u32>,
    /// Whether the constraint begins after the model's reasoning.
    require_reasoning: bool,
    #[serde(flatten)]
    logprobs: Option<LogprobRequest>,
    #[serde(flatten)]
    room: Option<RoomFields>,
}

/// The room in which a prefill server sends the KV to a decode server. Both get the same fields.
#[derive(Serialize)]
struct RoomFields {
    bootstrap_host: String,
    bootstrap_port: u16,
    bootstrap_room: u64,
}

#[derive(Debug, Serialize)]
struct LogprobRequest {
    return_logprob: bool,
    /// The position of the first token whose logprob is returned.
    logprob_start_len: usize,
    top_logprobs_num: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids_logprob: Option<Vec<TokenId>>,
}

/// SGLang's sampling parameters. It refuses requests with other fields.
#[derive(Debug, Serialize)]
struct SglangSampling {
    max_new_tokens: u32,
    min_new_tokens: u32,
    temperature: f32,
    top_p: f32,
    /// -1 keeps all tokens.
    top_k: i64,
    min_p: f32,
    frequency_penalty: f32,
    presence_penalty: f32,
    repetition_penalty: f32,
    #[serde(skip_serializing_if = "HashMap::is_empty")]
    logit_bias: HashMap<String, f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sampling_seed: Option<u64>,
    stop_token_ids: Vec<TokenId>,
    /// Whether the answer ends neither at the model's end-of-sequence tokens nor at `stop_token_ids`.
    ignore_eos: bool,
    #[serde(flatten)]
    constraint: Option<EngineConstraint>,
}

/// A constraint in the form that SGLang accepts.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum EngineConstraint {
    JsonSchema(String),
    Regex(String),
    Ebnf(String),
    StructuralTag(String),
}

/// Checks whether the server supports the parameters.
///
/// # Errors
/// Fails if the server does not support one of them. The text says what to do.
pub(super) fn check(sampling: &Sampling, settings: &SglangOptions) -> Result<(), &'static str> {
    let is_drawn = sampling.temperature > 0.0 && sampling.top_k != 1;
    match sampling {
        _ if sampling.seed_is_given && is_drawn && !settings.uses_seeds => Err(
            "SGLang repeats an answer for a seed only with --enable-deterministic-inference: leave out the seed, or set temperature to 0",
        ),
        _ if !sampling.allowed_token_ids.is_empty() => Err("SGLang has no allowed_token_ids"),
        _ if !sampling.bad_words.is_empty() => Err("SGLang has no bad_words"),
        Sampling { constraint: None, .. } => Ok(()),
        Sampling { constraint: Some(Constraint { begins_after: Some(_), .. }), .. } if !settings.finds_reasoning => Err(
            "this SGLang server has no --reasoning-parser, so a constraint cannot begin after the reasoning: disable one of them",
        ),
        Sampling { constraint: Some(constraint), .. } => engine_constraint(&constraint.kind).map(drop),
    }
}

fn engine_constraint(kind: &Kind) -> Result<EngineConstraint, &'static str> {
    Ok(match kind {
        Kind::JsonSchema { schema, .. } => EngineConstraint::JsonSchema(schema.clone()),
        Kind::JsonObject => EngineConstraint::JsonSchema(r#"{"type":"object"}"#.to_owned()),
        Kind::Regex(regex) => EngineConstraint::Regex(regex.clone()),
        Kind::Choice(texts) => EngineConstraint::Ebnf(grammar::choice(texts)),
        Kind::Grammar(grammar) if is_ebnf(grammar) => EngineConstraint::Ebnf(grammar.clone()),
        Kind::StructuralTag(tags) => EngineConstraint::StructuralTag(tags.clone()),
        Kind::Grammar(_) => return Err("SGLang has no grammars in Lark: send the grammar in EBNF"),
        Kind::CallInputs(_) => return Err("SGLang cannot constrain the inputs of calls"),
    })
}

impl SglangBody {
    /// Returns a request that streams an answer.
    pub fn new(call: &EngineCall, sampling: &Sampling, settings: &SglangOptions) -> Self {
        let room = settings.context_length.saturating_sub(u32::try_from(call.tokens.len()).unwrap_or(u32::MAX)).max(1);
        let max_new_tokens = sampling.max_tokens.unwrap_or(u32::MAX).min(room);
        let constraint = sampling.constraint.as_ref().and_then(|constraint| engine_constraint(&constraint.kind).ok());
        // Tandem's stop tokens include the end-of-sequence tokens, unless these do not end the answer.
        let ignore_eos = sampling.stop_token_ids.is_empty() && constraint.is_none();
        let begins_after = sampling.constraint.as_ref().is_some_and(|constraint| constraint.begins_after.is_some());
        Self {
            rid: settings.rid(&call.request_id),
            input_ids: call.tokens.clone(),
            cache_salt: cache_salt(&settings.hash_key, &call.namespace),
            stream: true,
            lora_path: settings.loras.of(&call.namespace).map(str::to_owned),
            routed_dp_rank: settings.rank,
            require_reasoning: constraint.is_some() && begins_after,
            logprobs: sampling.logprobs.map(|top| LogprobRequest {
                return_logprob: true,
                logprob_start_len: call.tokens.len(),
                top_logprobs_num: top,
                token_ids_logprob: (!sampling.logprob_token_ids.is_empty()).then(|| sampling.logprob_token_ids.clone()),
            }),
            sampling_params: SglangSampling {
                max_new_tokens,
                // SGLang excludes the model's end-of-sequence tokens up to this number of tokens, also if they do not end the answer.
                min_new_tokens: if ignore_eos { 0 } else { sampling.min_tokens.min(max_new_tokens) },
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: if sampling.top_k == 0 { -1 } else { sampling.top_k.into() },
                min_p: sampling.min_p,
                frequency_penalty: sampling.frequency_penalty,
                presence_penalty: sampling.presence_penalty,
                repetition_penalty: sampling.repetition_penalty,
                logit_bias: sampling.logit_bias.iter().map(|(token, bias)| (token.to_string(), *bias)).collect(),
                sampling_seed: settings.uses_seeds.then_some(sampling.seed & SEED_MASK),
                stop_token_ids: sampling.stop_token_ids.clone(),
                ignore_eos,
                constraint,
            },
            room: None,
        }
    }

    /// Returns this request for one half of it, whose KV moves in a room.
    ///
    /// # Errors
    /// Fails if the handle is not that of a room.
    pub fn in_room(mut self, handle: &KvHandle) -> Result<Self, EngineFailure> {
        let fields = handle.room().and_then(|(address, bootstrap_room)| {
            let (host, port) = address.rsplit_once(':')?;
            Some(RoomFields { bootstrap_host: host.to_owned(), bootstrap_port: port.parse().ok()?, bootstrap_room })
        });
        self.room = Some(fields.ok_or_else(|| EngineFailure::Protocol("a handle is not that of a room".to_owned()))?);
        Ok(self)
    }

    pub fn is_in_room(&self) -> bool {
        self.room.is_some()
    }

    /// Returns a request for the logprobs of the prompt's tokens, each with `top` alternatives. It generates no token.
    pub fn prompt_logprobs(call: &EngineCall, top: u32, settings: &SglangOptions) -> Self {
        let sampling = Sampling { temperature: 0.0, logprobs: Some(top), ..Sampling::default() };
        let mut body = Self::new(call, &sampling, settings);
        (body.stream, body.sampling_params.max_new_tokens) = (false, 0);
        body.logprobs.iter_mut().for_each(|logprobs| logprobs.logprob_start_len = 0);
        body
    }

    /// Changes this request so that it continues an answer, whose `generated` tokens `input_ids` has already, beyond the end-of-sequence token
    /// at which the server has ended it. Returns `false` if the answer has as many tokens as it may have. The request gets another id, because the
    /// server aborts the id of an answer about two seconds after the answer.
    pub fn continue_answer(&mut self, generated: usize) -> bool {
        self.rid = continued(&self.rid);
        let params = &mut self.sampling_params;
        let generated = u32::try_from(generated).unwrap_or(u32::MAX);
        params.max_new_tokens = params.max_new_tokens.saturating_sub(generated);
        params.min_new_tokens = params.min_new_tokens.saturating_sub(generated);
        params.ignore_eos = true;
        self.logprobs.iter_mut().for_each(|logprobs| logprobs.logprob_start_len = self.input_ids.len());
        params.max_new_tokens > 0
    }
}

/// Returns the id of the request that continues the answer to the request with this id.
pub(super) fn continued(rid: &str) -> String {
    format!("{rid}+")
}

impl SglangOptions {
    /// Returns the id of a request in the server. The server refuses an id that is in use, and aborts all requests whose ids begin with the given
    /// one. So an id has its length before its text: then no id is the beginning of another, except of its own continuation.
    pub fn rid(&self, request_id: &str) -> String {
        format!("{:016x}-{}:{request_id}", self.connection, request_id.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use tandem_engine::BadWord;
    use tandem_kv::Namespace;

    fn settings() -> SglangOptions {
        SglangOptions {
            connection: 0xab,
            rank: None,
            hash_key: HashKey::NONE,
            loras: Arc::new(Loras::new("m", Vec::new())),
            context_length: 100,
            uses_seeds: false,
            finds_reasoning: false,
        }
    }

    fn call() -> EngineCall {
        EngineCall {
            request_id: "r-1".to_owned(),
            namespace: Namespace::new("m", "", "", "tenant"),
            tokens: vec![1, 5],
            images: [].into(),
        }
    }

    fn body(sampling: &Sampling, settings: &SglangOptions) -> Value {
        serde_json::to_value(SglangBody::new(&call(), sampling, settings)).expect("a body is plain data")
    }

    #[test]
    fn all_parameters_are_sent_to_the_server() {
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
            logprob_token_ids: vec![8, 7],
            constraint: Some(Kind::Regex("a+".to_owned()).into()),
            ..Sampling::default()
        };
        let settings = SglangOptions {
            rank: Some(1),
            loras: Arc::new(Loras::new("base", vec!["m".to_owned()])),
            uses_seeds: true,
            ..settings()
        };
        assert_eq!(
            body(&sampling, &settings),
            json!({
                "rid": "00000000000000ab-3:r-1", "input_ids": [1, 5], "stream": true, "lora_path": "m", "routed_dp_rank": 1, "require_reasoning": false,
                "cache_salt": cache_salt(&HashKey::NONE, &call().namespace),
                "return_logprob": true, "logprob_start_len": 2, "top_logprobs_num": 3, "token_ids_logprob": [8, 7],
                "sampling_params": {
                    "max_new_tokens": 9, "min_new_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125,
                    "frequency_penalty": 1.0, "presence_penalty": -1.0, "repetition_penalty": 1.5, "logit_bias": { "5": 3.0 },
                    "sampling_seed": i64::MAX, "stop_token_ids": [2], "ignore_eos": false, "regex": "a+",
                },
            })
        );
    }

    #[test]
    fn values_that_the_server_would_interpret_differently_are_replaced() {
        let of = |sampling: Sampling| body(&sampling, &settings())["sampling_params"].clone();
        let params = of(Sampling { max_tokens: None, min_tokens: 5, ..Sampling::default() });
        assert_eq!(
            (&params["max_new_tokens"], &params["top_k"]),
            (&json!(98), &json!(-1)),
            "the limit is the rest of the context"
        );
        assert_eq!((&params["ignore_eos"], &params["min_new_tokens"]), (&json!(true), &json!(0)), "no token ends the answer");
        let params = of(Sampling { max_tokens: Some(3), min_tokens: 5, stop_token_ids: vec![2], ..Sampling::default() });
        assert_eq!((&params["ignore_eos"], &params["min_new_tokens"]), (&json!(false), &json!(3)));
        assert!(params.get("sampling_seed").is_none() && params.get("logit_bias").is_none());
    }

    #[test]
    fn prompt_logprobs_are_requested_without_generating() {
        let body = serde_json::to_value(SglangBody::prompt_logprobs(&call(), 2, &settings())).expect("a body is plain data");
        assert_eq!((&body["stream"], &body["sampling_params"]["max_new_tokens"]), (&json!(false), &json!(0)));
        assert_eq!(
            (&body["return_logprob"], &body["logprob_start_len"], &body["top_logprobs_num"]),
            (&json!(true), &json!(0), &json!(2))
        );
    }

    #[test]
    fn continued_request_ignores_end_of_sequence_and_has_the_rest_of_the_tokens() {
        let sampling = Sampling { max_tokens: Some(5), stop_token_ids: vec![2], logprobs: Some(0), ..Sampling::default() };
        let mut request = SglangBody::new(&call(), &sampling, &settings());
        request.input_ids.extend([7, 8, 9]);
        assert!(request.continue_answer(3));
        let sent = serde_json::to_value(&request).expect("a body is plain data");
        assert_eq!((&sent["input_ids"], &sent["logprob_start_len"]), (&json!([1, 5, 7, 8, 9]), &json!(5)));
        assert_eq!(
            (&sent["sampling_params"]["max_new_tokens"], &sent["sampling_params"]["ignore_eos"]),
            (&json!(2), &json!(true))
        );
        assert!(!request.continue_answer(2), "no more tokens are allowed");
    }

    #[test]
    fn constraints_are_sent_under_the_field_names_of_sglang_or_refused() {
        let of = |kind: Kind| {
            let sampling = Sampling { constraint: Some(kind.into()), ..Sampling::default() };
            let refused = check(&sampling, &settings()).err();
            let params = body(&sampling, &settings())["sampling_params"].clone();
            let fields = ["json_schema", "regex", "ebnf", "structural_tag"].map(|field| params[field].clone());
            (fields, refused.is_some())
        };
        let schema = Kind::JsonSchema { schema: "{}".to_owned(), lenient: true };
        assert_eq!(of(schema), ([json!("{}"), Value::Null, Value::Null, Value::Null], false));
        assert_eq!(of(Kind::JsonObject), ([json!(r#"{"type":"object"}"#), Value::Null, Value::Null, Value::Null], false));
        let choice = Kind::Choice(vec!["a\"".to_owned(), "b".to_owned()]);
        assert_eq!(of(choice), ([Value::Null, Value::Null, json!(r#"root ::= "a\"" | "b""#), Value::Null], false));
        let ebnf = "root ::= \"a\"".to_owned();
        assert_eq!(of(Kind::Grammar(ebnf.clone())), ([Value::Null, Value::Null, json!(ebnf), Value::Null], false));
        assert_eq!(of(Kind::StructuralTag("{}".to_owned())), ([Value::Null, Value::Null, Value::Null, json!("{}")], false));
        assert_eq!(of(Kind::Grammar("start: \"a\"".to_owned())), ([(); 4].map(|()| Value::Null), true));
    }

    #[test]
    fn constraint_after_the_reasoning_needs_a_server_that_finds_its_end() {
        let late = Constraint { kind: Kind::JsonObject, begins_after: Some("</think>".to_owned()) };
        let sampling = Sampling { constraint: Some(late), ..Sampling::default() };
        assert!(check(&sampling, &settings()).is_err_and(|why| why.contains("--reasoning-parser")));
        let settings = SglangOptions { finds_reasoning: true, ..settings() };
        check(&sampling, &settings).expect("the server finds the end");
        assert_eq!(body(&sampling, &settings)["require_reasoning"], true);
    }

    #[test]
    fn what_the_server_cannot_do_is_refused_by_name() {
        let seeded = Sampling { seed_is_given: true, ..Sampling::default() };
        let words = [BadWord { text: "ugly".to_owned(), forms: vec![vec![4, 5]] }];
        for (sampling, name) in [
            (seeded.clone(), "--enable-deterministic-inference"),
            (Sampling { allowed_token_ids: [7].into(), ..Sampling::default() }, "allowed_token_ids"),
            (Sampling { bad_words: words.into(), ..Sampling::default() }, "bad_words"),
        ] {
            assert!(check(&sampling, &settings()).is_err_and(|why| why.contains(name)), "{name}");
        }
        check(&seeded, &SglangOptions { uses_seeds: true, ..settings() }).expect("the server uses seeds");
        for greedy in [Sampling { temperature: 0.0, ..seeded.clone() }, Sampling { top_k: 1, ..seeded }] {
            check(&greedy, &settings()).expect("the answer does not depend on the seed");
        }
    }

    #[test]
    fn no_request_id_is_the_beginning_of_another() {
        let ids = ["r-1", "r-1-", "r-10", "", "1", "3:r-1"].map(|id| settings().rid(id));
        for (at, id) in ids.iter().enumerate() {
            assert!(ids.iter().enumerate().all(|(other, of_other)| at == other || !of_other.starts_with(id)), "{id}");
        }
    }
}
