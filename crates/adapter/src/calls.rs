//! Calls to an engine's server for whose answers the server need not run the model.

use crate::{api::EngineFailure, failure, http::EngineHttp};
use bytes::Bytes;
use hyper::Method;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::time::Duration;

/// Time limit for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the body of the answer to a GET request.
///
/// # Errors
/// Fails if the server does not answer, or answers with an error.
pub(crate) async fn get(http: &EngineHttp, path: &str) -> Result<Bytes, EngineFailure> {
    failure::check(http.read(Method::GET, path, None, ANSWER_TIMEOUT).await?)
}

/// Returns the body of the answer to a GET request, decoded from JSON.
///
/// # Errors
/// Fails as [`get`] does, or if the body does not have the expected form.
pub(crate) async fn get_json<T: DeserializeOwned>(http: &EngineHttp, path: &str) -> Result<T, EngineFailure> {
    json(&get(http, path).await?)
}

/// Returns the body of the answer to a POST request.
///
/// # Errors
/// Fails if the server does not answer, or answers with an error.
pub(crate) async fn post(http: &EngineHttp, path: &str, request: &Value) -> Result<Bytes, EngineFailure> {
    failure::check(http.read(Method::POST, path, Some(request.to_string().into_bytes()), ANSWER_TIMEOUT).await?)
}

/// Decodes a JSON body.
///
/// # Errors
/// Fails if the body does not have the expected form.
pub(crate) fn json<T: DeserializeOwned>(json: &[u8]) -> Result<T, EngineFailure> {
    serde_json::from_slice(json).map_err(|error| EngineFailure::Protocol(error.to_string()))
}
