//! The requests of OpenAI's API to a fake vLLM server, as requests with token ids. The answers have the usage where OpenAI's have it.

use axum::body::Bytes;
use serde_json::{Value, json};

/// Returns the text of a completion's prompt.
pub(super) fn completion(body: &Value) -> Option<String> {
    body["prompt"].as_str().map(str::to_owned)
}

/// Returns the text of a conversation.
pub(super) fn chat(body: &Value) -> Option<String> {
    let line = |message: &Value| Some(format!("{}: {}\n", message["role"].as_str()?, message["content"].as_str()?));
    Some(body["messages"].as_array()?.iter().map(line).collect::<Option<String>>()? + "assistant: ")
}

/// Returns the body of the request with token ids whose answer is that to `body`.
///
/// # Errors
/// The body is no JSON, or has no text.
pub(super) fn of_ids(body: &Bytes, text: fn(&Value) -> Option<String>) -> Result<Bytes, &'static str> {
    let body = serde_json::from_slice::<Value>(body).map_err(|_| "not JSON")?;
    let text = text(&body).ok_or("there is no text")?;
    let of_ids = json!({
        "token_ids": text.bytes().map(u32::from).collect::<Vec<_>>(), "model": body["model"], "cache_salt": body["cache_salt"],
        "stream": body["stream"], "sampling_params": { "max_tokens": body["max_tokens"], "temperature": 0 },
    });
    Ok(of_ids.to_string().into())
}
