//! Errors in the shape of Anthropic's API, for all requests to its paths.

use super::super::request_id::HttpRequestId;
use crate::error::ApiError;
use axum::{
    Json,
    extract::Request,
    http::{HeaderName, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::sync::Arc;
use tandem_api::RequestError;

/// The header in which Anthropic's clients look for a request's id.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// The code of the error for a conversation that this server would have to store (`thread`). With this code, Anthropic's SDK sends the whole
/// conversation instead; its tool runner relies on that.
const THREAD_UNSUPPORTED: &str = "thread_unsupported_request";

/// The layer that writes the errors of `/v1/messages` and the paths below it in Anthropic's shape, and gives all their responses the header
/// `request-id`.
pub(in super::super) async fn shaped(request: Request, next: Next) -> Response {
    let rest = request.uri().path().strip_prefix("/v1/messages");
    if !rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) {
        return next.run(request).await;
    }
    let HttpRequestId(id) = request.extensions().get().cloned().expect("the outermost layer sets the id");
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions().get::<Arc<ApiError>>() {
        let shaped = Json(body(error, &id)).into_response();
        let mut headers = std::mem::take(response.headers_mut());
        headers.remove(header::CONTENT_LENGTH);
        response = (response.status(), headers, shaped).into_response();
    }
    response.headers_mut().extend(HeaderValue::from_str(&id).ok().map(|id| (REQUEST_ID, id)));
    response
}

/// Returns the body of an error response, which is also the data of an `error` event.
pub(super) fn body(error: &ApiError, request_id: &str) -> Value {
    let kind = match error.status() {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    };
    let message = context_message(error).unwrap_or_else(|| error.message());
    let mut body = json!({ "type": "error", "error": { "type": kind, "message": message }, "request_id": request_id });
    if matches!(error, ApiError::Request(RequestError::Invalid { param, .. }) if param == "thread") {
        body["error"]["details"] = json!({ "error_code": THREAD_UNSUPPORTED });
    }
    body
}

/// Returns Anthropic's text for a request that does not fit into the context. Clients look for it, and send fewer tokens then.
fn context_message(error: &ApiError) -> Option<String> {
    let ApiError::Request(error) = error else { return None };
    let too_long = |tokens: usize, max: u32| format!("prompt is too long: {tokens} tokens > {max} maximum");
    match error.original() {
        RequestError::ContextLength { context_length, prompt_tokens, .. } if prompt_tokens >= context_length => {
            // The answer has one token at least.
            Some(too_long(*prompt_tokens as usize + 1, *context_length))
        }
        RequestError::ContextLength { context_length, prompt_tokens, new_tokens, .. } => Some(format!(
            "input length and `max_tokens` exceed context limit: {prompt_tokens} + {new_tokens} > {context_length}, decrease input length \
             or `max_tokens` and try again"
        )),
        RequestError::PromptLength { context_length, tokens_min, .. } => Some(too_long(*tokens_min, *context_length)),
        _ => None,
    }
}
