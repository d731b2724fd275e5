//! Requests to vLLM's `/inference/v1/generate`, with token ids as input and output.

use base64::{Engine as _, prelude::BASE64_STANDARD as BASE64};
use serde::Serialize;
use serde_json::{Value, json};
use std::{borrow::Cow, collections::HashMap};
use tandem_engine::{PromptImage, Sampling};
use tandem_grammar::{Constraint, Kind};
use tandem_kv::TokenId;

/// Maximum number of logprobs that an engine returns by default (vLLM's `--max-logprobs`).
const LOGPROBS_MAX: u32 = 20;

/// The mask that limits seeds to 63 bits. Without it, vLLM would treat every larger seed as the largest 63-bit number.
const SEED_MASK: u64 = i64::MAX as u64;

#[derive(Serialize)]
pub(super) struct GenerateBody<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<&'a str>,
    /// With one placeholder for each image.
    pub token_ids: Cow<'a, [TokenId]>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub content_parts: Vec<ContentPart>,
    pub sampling_params: SamplingParams<'a>,
    pub cache_salt: String,
    pub stream: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream_options: Option<VllmStreamOptions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_transfer_params: Option<Value>,
}

/// An image. Its identity becomes an input of the hashes of its blocks, and the key of the engine's other caches.
#[derive(Serialize)]
pub(super) struct ContentPart {
    #[serde(rename = "type")]
    kind: &'static str,
    url: String,
    uuid: String,
}

impl ContentPart {
    pub fn new(PromptImage { start, media_type, data, .. }: &PromptImage) -> Self {
        let url = format!("data:{media_type};base64,{}", BASE64.encode(data));
        Self { kind: "image_url", url, uuid: start.id.to_string() }
    }
}

/// Returns the tokens with one placeholder for each image, which the engine replaces by as many as it needs.
pub(super) fn collapsed<'a>(tokens: &'a [TokenId], images: &[PromptImage]) -> Cow<'a, [TokenId]> {
    if images.is_empty() {
        return Cow::Borrowed(tokens);
    }
    let (mut collapsed, mut from) = (Vec::with_capacity(tokens.len()), 0);
    for image in images {
        collapsed.extend_from_slice(&tokens[from..=image.start.at]);
        from = image.start.at + image.len;
    }
    collapsed.extend_from_slice(&tokens[from..]);
    Cow::Owned(collapsed)
}

#[derive(Serialize)]
pub(super) struct VllmStreamOptions {
    pub include_usage: bool,
}

/// vLLM's sampling parameters. Tandem's stop tokens include the end-of-sequence tokens, so `ignore_eos` is set.
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
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprob_token_ids: Vec<TokenId>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    allowed_token_ids: &'a [TokenId],
    /// The texts that the answer must not contain. The engine converts them to tokens with its own tokenizer.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    bad_words: Vec<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    structured_outputs: Option<Value>,
    extra_args: ExtraArgs,
}

#[derive(Serialize)]
struct ExtraArgs {
    /// The engine's KV events then also report cached blocks that the request uses, so the mirror gets blocks whose earlier events were lost.
    kv_cache_report_mode: &'static str,
}

impl<'a> SamplingParams<'a> {
    /// Returns the parameters of a generation with at most `max_tokens` new tokens.
    pub fn new(sampling: &'a Sampling, max_tokens: u32) -> Self {
        // vLLM returns as many alternatives as this list has tokens, and the sampled token is one of them. So the list has one token more: its
        // first one is repeated.
        let requested = if sampling.logprobs.is_some() { sampling.logprob_token_ids.as_slice() } else { &[] };
        let logprob_token_ids: Vec<_> = requested.iter().chain(requested.first()).copied().collect();
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
            // vLLM ends a constrained text with its own end-of-sequence token, which is allowed only where the text is complete.
            ignore_eos: sampling.constraint.is_none(),
            detokenize: false,
            // If the sampled token is none of the alternatives, vLLM returns it in place of the last alternative. So one alternative more is
            // requested.
            logprobs: match logprob_token_ids.len() {
                0 => sampling.logprobs.map(|top| (top + 1).min(LOGPROBS_MAX)),
                requested => Some(requested as u32),
            },
            logprob_token_ids,
            allowed_token_ids: &sampling.allowed_token_ids,
            bad_words: sampling.bad_words.iter().map(|word| word.text.as_str()).collect(),
            prompt_logprobs: None,
            structured_outputs: sampling.constraint.as_ref().map(structured_outputs),
            extra_args: ExtraArgs { kv_cache_report_mode: "full" },
        }
    }

    /// Returns these parameters, changed so that the engine's KV events do not report cache hits.
    pub fn without_hits(self) -> Self {
        Self { extra_args: ExtraArgs { kv_cache_report_mode: "incremental" }, ..self }
    }

    /// Returns the parameters of a request that only computes its prompt, and one token, because vLLM generates at least one.
    pub fn prompt_only(sampling: &'a Sampling, prompt_logprobs: Option<u32>) -> Self {
        Self { temperature: 0.0, prompt_logprobs, structured_outputs: None, ..Self::new(sampling, 1) }
    }
}

/// Returns vLLM's form of a constraint. vLLM itself finds the end of the reasoning, if its server has a reasoning parser.
fn structured_outputs(Constraint { kind, .. }: &Constraint) -> Value {
    match kind {
        Kind::JsonSchema { schema, .. } => json!({ "json": schema }),
        Kind::JsonObject => json!({ "json_object": true }),
        Kind::Regex(regex) => json!({ "regex": regex }),
        Kind::Choice(texts) => json!({ "choice": texts }),
        Kind::Grammar(grammar) => json!({ "grammar": grammar }),
        Kind::StructuralTag(tags) => json!({ "structural_tag": tags }),
        // The adapter has removed this constraint.
        Kind::CallInputs(_) => json!({}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_engine::BadWord;
    use tandem_kv::{ImageId, ImageStart};

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
            seed_is_given: true,
            stop_token_ids: vec![2],
            logprobs: Some(3),
            allowed_token_ids: [7, 8].into(),
            bad_words: [BadWord { text: "ugly".to_owned(), forms: vec![vec![4, 5]] }].into(),
            logprob_token_ids: Vec::new(),
            constraint: Some(Kind::Regex("a+".to_owned()).into()),
        };
        let body = GenerateBody {
            model: Some("lora"),
            token_ids: Cow::Borrowed(&[1, 2]),
            content_parts: Vec::new(),
            sampling_params: SamplingParams::new(&sampling, 9),
            cache_salt: "s".to_owned(),
            stream: true,
            stream_options: Some(VllmStreamOptions { include_usage: true }),
            kv_transfer_params: None,
        };
        assert_eq!(
            serde_json::to_value(body).expect("the request body can be serialized"),
            json!({
                "model": "lora", "token_ids": [1, 2], "cache_salt": "s", "stream": true, "stream_options": { "include_usage": true },
                "sampling_params": {
                    "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125,
                    "frequency_penalty": 1.0, "presence_penalty": -1.0, "repetition_penalty": 1.5, "logit_bias": { "5": 3.0 },
                    "seed": i64::MAX, "stop_token_ids": [2], "ignore_eos": false, "detokenize": false, "logprobs": 4,
                    "allowed_token_ids": [7, 8], "bad_words": ["ugly"], "structured_outputs": { "regex": "a+" },
                    "extra_args": { "kv_cache_report_mode": "full" },
                },
            })
        );
    }

    #[test]
    fn each_image_is_sent_with_one_placeholder_and_its_identity() {
        let image = |at, len| PromptImage {
            start: ImageStart { at, id: ImageId([0xab; 32]) },
            len,
            media_type: "image/gif".to_owned(),
            data: b"GIF".as_slice().into(),
        };
        let tokens = [9, 9, 9, 1, 2, 9, 3, 9, 9];
        assert_eq!(*collapsed(&tokens, &[image(0, 3), image(5, 1), image(7, 2)]), [9, 1, 2, 9, 3, 9]);
        assert!(matches!(collapsed(&tokens, &[]), Cow::Borrowed(all) if *all == tokens));
        let part = serde_json::to_value(ContentPart::new(&image(0, 3))).expect("the part can be serialized");
        assert_eq!(part, json!({ "type": "image_url", "url": "data:image/gif;base64,R0lG", "uuid": "ab".repeat(32) }));
    }

    #[test]
    fn constraints_are_sent_under_the_field_names_of_vllm() {
        for (kind, expected) in [
            (Kind::JsonSchema { schema: "{}".to_owned(), lenient: true }, json!({ "json": "{}" })),
            (Kind::JsonObject, json!({ "json_object": true })),
            (Kind::Choice(vec!["a".to_owned(), "b".to_owned()]), json!({ "choice": ["a", "b"] })),
            (Kind::Grammar("root ::= \"a\"".to_owned()), json!({ "grammar": "root ::= \"a\"" })),
            (Kind::StructuralTag("{}".to_owned()), json!({ "structural_tag": "{}" })),
        ] {
            let sampling = Sampling { constraint: Some(kind.into()), ..Sampling::default() };
            assert_eq!(SamplingParams::new(&sampling, 1).structured_outputs, Some(expected));
            assert_eq!(SamplingParams::prompt_only(&sampling, None).structured_outputs, None);
        }
        let sampling = Sampling::default();
        let free = SamplingParams::new(&sampling, 1);
        assert!(free.structured_outputs.is_none() && free.ignore_eos);
    }

    #[test]
    fn at_most_twenty_logprobs_are_requested() {
        let requested = |top| SamplingParams::new(&Sampling { logprobs: top, ..Sampling::default() }, 1).logprobs;
        assert_eq!([None, Some(0), Some(19), Some(20)].map(requested), [None, Some(1), Some(20), Some(20)]);
    }

    #[test]
    fn requested_tokens_replace_the_likeliest_alternatives() {
        let requested = |logprobs| {
            let sampling = Sampling { logprobs, logprob_token_ids: vec![5, 3], ..Sampling::default() };
            let body = serde_json::to_value(SamplingParams::new(&sampling, 1)).expect("the parameters can be serialized");
            (body.get("logprobs").cloned(), body.get("logprob_token_ids").cloned())
        };
        assert_eq!(requested(Some(0)), (Some(json!(3)), Some(json!([5, 3, 5]))));
        assert_eq!(requested(None), (None, None));
    }
}
