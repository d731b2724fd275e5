//! Requests of clients and their checks. A field of the wrong type or out of range is named in the error; a known parameter that
//! is not supported is refused if its value would change the answer; unknown fields are ignored.

pub(crate) mod chat;
pub(crate) mod completions;
mod fields;
mod options;
mod unsupported;

pub(crate) use options::{Options, StreamUsage};

use crate::error::{ApiError, shortened};
use serde::de::DeserializeOwned;

/// Nesting of objects and lists; requests need five levels.
const NESTING_MAX: usize = 32;

/// Parses a body. Nesting and values are counted before anything is built: at most `elements_max` values bound the memory and the
/// time of parsing.
///
/// # Errors
/// The body is not valid JSON, too large, or a field has the wrong type.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8], elements_max: usize) -> Result<T, ApiError> {
    let text = std::str::from_utf8(body).map_err(|error| ApiError::Utf8 { at: error.valid_up_to() })?;
    let Extent { deepest, elements } = extent(body);
    if deepest > NESTING_MAX {
        return Err(ApiError::Nesting { max: NESTING_MAX });
    }
    if elements > elements_max {
        return Err(ApiError::Elements { max: elements_max });
    }
    if text.trim_start().starts_with('[') {
        // serde would read a list as the values of an object's fields.
        return Err(ApiError::NoObject);
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let request = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        unreadable(path, error.into_inner())
    })?;
    json.end().map_err(ApiError::Json)?;
    Ok(request)
}

/// Classifies serde's error at this path.
fn unreadable(path: String, source: serde_json::Error) -> ApiError {
    let text = source.to_string();
    // A number out of an f64's range is valid JSON.
    if !source.is_data() && !text.starts_with("number out of range") {
        return ApiError::Json(source);
    }
    let duplicate = text.strip_prefix("duplicate field `").and_then(|rest| rest.split('`').next());
    let param = match (path.as_str(), duplicate) {
        (".", None) => return ApiError::NoObject,
        (".", Some(field)) => field.to_owned(),
        (_, Some(field)) => format!("{path}.{field}"),
        (_, None) => shortened(&path).into_owned(),
    };
    ApiError::Type { param, source }
}

/// The size of a JSON text's values.
#[derive(Debug, PartialEq)]
struct Extent {
    /// Levels of nested objects and lists.
    deepest: usize,
    /// Commas and opening brackets: at least as many as the members of all lists and objects.
    elements: usize,
}

/// Measures a JSON text without building its values. serde_json does not limit the depth of what it skips.
fn extent(json: &[u8]) -> Extent {
    let (mut depth, mut deepest, mut elements, mut in_text, mut escaped) = (0_usize, 0, 0, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            _ if in_text => {}
            b'{' | b'[' => {
                elements += 1;
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            b',' => elements += 1,
            _ => {}
        }
    }
    Extent { deepest, elements }
}

/// Defines a request type with its own fields and those of both endpoints. A known but unsupported parameter is accepted if it is
/// null, false, empty, or equal to the value after `=`, where that does not change the answer.
macro_rules! request {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }
     unsupported { $($unsupported:ident $(= $accepted:literal)*,)* }) => {
        crate::request::request! {
            @build $(#[$doc])* $name { $($(#[$field_doc])* $field: $type,)* } common {
                n: crate::request::fields::Whole, stream: bool, stream_options: crate::request::options::StreamOptions,
                min_tokens: crate::request::fields::Whole, temperature: f64, top_p: f64, top_k: crate::request::fields::Whole,
                min_p: f64, frequency_penalty: f64, presence_penalty: f64, repetition_penalty: f64,
                logit_bias: crate::request::fields::BoundedMap<{ crate::request::options::LOGIT_BIASES_MAX }>,
                seed: crate::request::fields::Whole, stop: crate::request::fields::Stop,
                stop_token_ids: crate::request::fields::Bounded<i64, { crate::request::options::STOP_TOKENS_MAX }>,
                ignore_eos: bool, cache_salt: String,
            } unsupported {
                $($unsupported $(= $accepted)*,)*
                // Parameters of OpenAI.
                functions, modalities = "text", response_format = "text", store, tool_choice = "none", tools,
                // Parameters of vLLM.
                allowed_token_ids, bad_words, detokenize = true, ec_transfer_params, guided_choice, guided_decoding_backend,
                guided_grammar, guided_json, guided_regex, guided_whitespace_pattern, include_stop_str_in_output,
                kv_transfer_params, length_penalty = 1, logits_processors, logprob_token_ids, priority = 0, prompt_logprobs,
                repetition_detection, return_token_ids, return_tokens_as_token_ids, skip_special_tokens = true, structural_tag,
                structured_outputs, thinking_token_budget, truncate_prompt_tokens, use_beam_search, vllm_xargs,
                // Parameters of SGLang.
                custom_logit_processor, custom_params, ebnf, input_ids, json_schema, logit_processor, lora_path, no_stop_trim, regex,
                return_hidden_states, return_routed_experts, session_params, stop_regex,
                // Parameters of Dynamo, Ollama and llama.cpp.
                nvext, format, options, raw, think, dry_multiplier = 0, grammar, mirostat = 0, n_probs = 0, typical_p = 1,
                xtc_probability = 0,
            }
        }
    };
    (@build $(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }
     common { $($common:ident: $common_type:ty,)* }
     unsupported { $($unsupported:ident $(= $accepted:literal)*,)* }) => {
        $(#[$doc])*
        #[derive(serde::Deserialize)]
        pub(crate) struct $name {
            $($(#[$field_doc])* pub(crate) $field: Option<$type>,)*
            pub(crate) model: Option<String>,
            max_tokens: Option<crate::request::fields::Whole>,
            $($common: Option<$common_type>,)*
            $(#[serde(default)] $unsupported: crate::request::unsupported::Setting,)*
        }

        impl $name {
            /// Refuses unsupported parameters, and moves out those of both endpoints.
            fn take_common(&mut self) -> Result<crate::request::options::Common, crate::error::ApiError> {
                $(crate::request::unsupported::check(stringify!($unsupported), &self.$unsupported, &[$($accepted.into())*])?;)*
                Ok(crate::request::options::Common { $($common: self.$common.take(),)* })
            }
        }
    };
}
use request;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_members_are_counted_outside_of_strings() {
        for (json, deepest, elements) in
            [("1", 0, 0), ("[]", 1, 1), (r#"{"a":[1,{}]}"#, 3, 4), (r#"["[[[,[", "\"[[,", "\\"]"#, 1, 3), ("]]][", 1, 1)]
        {
            assert_eq!(extent(json.as_bytes()), Extent { deepest, elements }, "{json}");
        }
    }

    #[test]
    fn body_with_too_many_values_is_refused_before_any_is_built() {
        #[derive(Debug)]
        struct Built;
        impl<'de> serde::Deserialize<'de> for Built {
            fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
                panic!("it must not be built")
            }
        }
        for body in ["{\"messages\":[{},{},{},{}]}", "{\"tools\":[0,0,0,0,0]}", "{\"a\":1,\"b\":2,\"c\":3,\"d\":4,\"e\":5}"] {
            assert!(matches!(parse::<Built>(body.as_bytes(), 4), Err(ApiError::Elements { max: 4 })), "{body}");
        }
    }
}
