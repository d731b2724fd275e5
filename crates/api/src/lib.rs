//! Clients' requests and their checks, and the formats of answers.
//!
//! Errors name the field at fault. A known parameter that is not supported is refused if its value would change the answer. Unknown fields
//! are ignored, and a header of the answer names them.

pub mod agents;
pub mod answer;
pub mod anthropic;
mod anthropic_fields;
mod calls;
pub mod chat;
pub mod completions;
pub mod constraint;
mod constraint_forms;
mod context;
mod error;
mod fields;
mod generate;
mod ignored;
pub mod images;
mod limits;
mod messages;
mod names;
mod options;
mod parameters;
mod rendering;
pub mod responses;
mod responses_fields;
mod schema;
mod tokenize;
mod tools;
mod unsupported;

pub use chat::efforts;
pub use context::{body_bytes_max, check_context, check_texts, elements_max, prompt_bytes_max};
pub use error::{Problem, RequestError, at_most, shortened};
pub use fields::ids;
pub use generate::{Generate, GenerateRequest};
pub use ignored::Ignored;
pub use names::ParamNames;
pub use options::{LogprobsWith, Options, StreamUsage, TextOptions, cache_salt};
pub use parameters::{ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest};
pub use schema::OfModels;
pub use tokenize::{DetokenizeRequest, TokenizeRequest};

use serde::de::DeserializeOwned;

/// The maximum nesting of objects and lists: less than serde_json's limit. Requests need few levels, but JSON schemas may need many.
const NESTING_MAX: usize = 100;

/// Parses a body of at most `elements_max` values, which bounds the memory and the time of parsing. Also returns the names of the fields that
/// were ignored because this server does not know them.
///
/// # Errors
/// The body is not valid JSON or has too many values, or a field has the wrong type.
pub fn parse<T: DeserializeOwned>(body: &[u8], elements_max: usize) -> Result<(T, Ignored), RequestError> {
    let text = std::str::from_utf8(body).map_err(|error| RequestError::Utf8 { at: error.valid_up_to() })?;
    let Extent { deepest, elements } = extent(body);
    if deepest > NESTING_MAX {
        return Err(RequestError::Nesting { max: NESTING_MAX });
    }
    if elements > elements_max {
        return Err(RequestError::Elements { max: elements_max });
    }
    if text.trim_start().starts_with('[') {
        // Without this check, serde would read a list's elements as the values of an object's fields.
        return Err(RequestError::NoObject);
    }
    let mut json = serde_json::Deserializer::from_str(text);
    let mut ignored = Ignored::default();
    let mut add = |path: serde_ignored::Path<'_>| ignored.add(&path);
    let known = serde_ignored::Deserializer::new(&mut json, &mut add);
    let request = serde_path_to_error::deserialize(known).map_err(|error| {
        let path = error.path().to_string();
        unreadable(path, error.into_inner())
    })?;
    json.end().map_err(RequestError::Json)?;
    Ok((request, ignored))
}

/// Converts serde's error for the field at this path.
fn unreadable(path: String, source: serde_json::Error) -> RequestError {
    let text = source.to_string();
    // A number beyond the range of an f64 is valid JSON, so it is reported as an error of its field.
    if !source.is_data() && !text.starts_with("number out of range") {
        return RequestError::Json(source);
    }
    let duplicate = text.strip_prefix("duplicate field `").and_then(|rest| rest.split('`').next());
    let param = match (path.as_str(), duplicate) {
        (".", None) => return RequestError::NoObject,
        (".", Some(field)) => field.to_owned(),
        (_, Some(field)) => format!("{path}.{field}"),
        (_, None) => shortened(&path).into_owned(),
    };
    RequestError::Type { param, source }
}

/// The extent of the values in a JSON text.
#[derive(Debug, PartialEq)]
struct Extent {
    /// The maximum number of levels of nested objects and lists.
    deepest: usize,
    /// The number of commas and opening brackets. All lists and objects together have at most this many members.
    elements: usize,
}

/// Measures a JSON text without building its values. serde_json does not limit the nesting of values that it skips.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_and_commas_within_strings_are_not_counted() {
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
                panic!("no value must be built")
            }
        }
        for body in ["{\"messages\":[{},{},{},{}]}", "{\"tools\":[0,0,0,0,0]}", "{\"a\":1,\"b\":2,\"c\":3,\"d\":4,\"e\":5}"] {
            assert!(matches!(parse::<Built>(body.as_bytes(), 4), Err(RequestError::Elements { max: 4 })), "{body}");
        }
    }
}
