//! The paths of OpenAI's API of a fake vLLM server. The answers are those to token ids, which have the usage where OpenAI's have it.

use super::server::{Engine, error, generate};
use axum::{
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use serde_json::{Value, json};
use std::sync::Arc;

pub(super) async fn completions(state: State<Arc<Engine>>, headers: HeaderMap, body: Bytes) -> Response {
    answered(state, headers, &body, |body| body["prompt"].as_str().map(str::to_owned)).await
}

pub(super) async fn chat(state: State<Arc<Engine>>, headers: HeaderMap, body: Bytes) -> Response {
    answered(state, headers, &body, |body| {
        let line = |message: &Value| Some(format!("{}: {}\n", message["role"].as_str()?, message["content"].as_str()?));
        Some(body["messages"].as_array()?.iter().map(line).collect::<Option<String>>()? + "assistant: ")
    })
    .await
}

async fn answered(state: State<Arc<Engine>>, headers: HeaderMap, body: &Bytes, text: fn(&Value) -> Option<String>) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(body) else { return error(StatusCode::BAD_REQUEST, "not JSON") };
    let Some(text) = text(&body) else { return error(StatusCode::BAD_REQUEST, "there is no text") };
    let of_ids = json!({
        "token_ids": text.bytes().map(u32::from).collect::<Vec<_>>(), "model": body["model"], "cache_salt": body["cache_salt"],
        "stream": body["stream"], "sampling_params": { "max_tokens": body["max_tokens"], "temperature": 0 },
    });
    generate(state, headers, of_ids.to_string().into()).await
}
