//! The request of `/inference/v1/generate`: token ids in, token ids out, with vLLM's fields.

use super::{
    fields::{Id, Whole, ids},
    limits::CACHE_SALT_CHARS_MAX,
    names::ParamNames,
    options::{self, Options},
    parameters::{SamplingParams, StreamOptions},
    schema::{NAMES_MODEL, SERVED},
    unsupported::{Setting, check},
};
use crate::error::{Problem, RequestError, at_most};
use schemars::{JsonSchema, Schema};
use serde::Deserialize;
use serde_json::json;
use tandem_kv::TokenId;
use tandem_text::ServedModel;

/// The maximum length of a client's request id, in characters.
const ID_CHARS_MAX: usize = 256;

/// A parsed request.
#[derive(Deserialize, JsonSchema)]
#[schemars(transform = add_rules)]
pub struct GenerateRequest {
    #[schemars(extend("x-served" = "model"))]
    /// The model's id.
    pub model: Option<String>,
    /// The answer has this id. Within the cluster, the request has an id of the frontend.
    #[schemars(length(max = ID_CHARS_MAX))]
    request_id: Option<String>,
    #[schemars(required, length(min = 1))]
    token_ids: Option<Vec<Id>>,
    #[schemars(required)]
    sampling_params: Option<SamplingParams>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[schemars(length(min = 1, max = CACHE_SALT_CHARS_MAX))]
    cache_salt: Option<String>,
    #[schemars(range(min = i32::MIN, max = i32::MAX))]
    priority: Option<Whole>,
    #[serde(default)]
    features: Setting,
    #[serde(default)]
    content_parts: Setting,
    #[serde(default)]
    kv_transfer_params: Setting,
    #[serde(default)]
    ec_transfer_params: Setting,
}

/// Adds the rules that concern several fields to the schema of a request.
fn add_rules(schema: &mut Schema) {
    let whole = json!({ "properties": { "stream": { "enum": [false, null] }, "stream_options": { "type": "null" } } });
    let no_prompt_logprobs = json!({ "properties": { "prompt_logprobs": { "type": "null" } } });
    let streamed =
        json!({ "properties": { "stream": { "const": true }, "sampling_params": no_prompt_logprobs }, "required": ["stream"] });
    schema.insert("anyOf".to_owned(), json!([whole, streamed]));
    schema.insert(SERVED.to_owned(), NAMES_MODEL.into());
}

/// A checked request.
pub struct Generate {
    /// The prompt's tokens.
    pub tokens: Vec<TokenId>,
    /// The checked parameters.
    pub options: Options,
    /// The limit on generated tokens; `None` if only the context limits them.
    pub max_tokens: Option<u32>,
    /// The client's own id of the request.
    pub request_id: Option<String>,
}

impl GenerateRequest {
    /// Checks the request.
    ///
    /// # Errors
    /// A parameter is missing, out of range or not supported.
    pub fn check(self, model: &ServedModel) -> Result<Generate, RequestError> {
        let unsupported = [
            ("features", &self.features),
            ("content_parts", &self.content_parts),
            ("kv_transfer_params", &self.kv_transfer_params),
            ("ec_transfer_params", &self.ec_transfer_params),
        ];
        for (name, found) in unsupported {
            check(name, found, &[])?;
        }
        let tokens = self.token_ids.map(ids).ok_or_else(|| RequestError::invalid("token_ids", Problem::Missing))?;
        if tokens.is_empty() {
            return Err(RequestError::invalid("token_ids", Problem::Empty));
        }
        let vocab_size = model.tokenizer.vocab_size();
        if tokens.iter().any(|token| *token as usize >= vocab_size) {
            return Err(RequestError::invalid("token_ids", Problem::Vocabulary { vocab_size }));
        }
        at_most("request_id", self.request_id.as_ref().map_or(0, |id| id.chars().count()), ID_CHARS_MAX, "characters")?;
        let mut params = self.sampling_params.ok_or_else(|| RequestError::invalid("sampling_params", Problem::Missing))?;
        if let Some(name) = params.misplaced() {
            let rule = "is a field of the request, not of 'sampling_params'";
            return Err(RequestError::invalid(name, Problem::Rule { rule }).within("sampling_params"));
        }
        params.without_text();
        let (max_tokens, logprobs) = (params.max_tokens, params.logprobs);
        let stream = options::stream(self.stream, self.stream_options)?;
        let cache_salt = options::cache_salt(self.cache_salt)?;
        let priority = options::priority(self.priority)?;
        let mut checked = || {
            let mut options = params.take_common()?.check(&ParamNames::GENERATE, model)?;
            let count = |Whole(found)| options::token_count("max_tokens", found, 1);
            let max_tokens = max_tokens.map(count).transpose()?;
            options::check_min_tokens(&options, max_tokens)?;
            options.sampling.max_tokens = max_tokens;
            options.sampling.logprobs = logprobs.map(|Whole(found)| options::alternatives("logprobs", found)).transpose()?;
            options::check_logprob_tokens(&options)?;
            options::check_prompt_logprobs(options.prompt_logprobs, stream)?;
            Ok((options, max_tokens))
        };
        let (options, max_tokens) = checked().map_err(|error: RequestError| error.within("sampling_params"))?;
        let options = Options { stream, cache_salt, priority, ..options };
        Ok(Generate { tokens, options, max_tokens, request_id: self.request_id })
    }
}
