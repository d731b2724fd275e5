//! The errors of requests, in OpenAI's and in Anthropic's shape.

use crate::error::RequestError;
use serde_json::{Value, json};

/// The code of the error for a conversation that this server would have to store (`thread`). With this code, Anthropic's SDK sends the whole
/// conversation instead; its tool runner relies on that.
const THREAD_UNSUPPORTED: &str = "thread_unsupported_request";

/// An error as a client receives it.
pub struct AnswerFailure<'a> {
    /// The HTTP status.
    pub status: u16,
    /// OpenAI's type of the error.
    pub kind: &'static str,
    /// The message for people.
    pub message: String,
    /// The field at fault, if the error is of one field.
    pub param: Option<&'a str>,
    /// The code by which programs recognise the error.
    pub code: Option<&'static str>,
    /// The number of seconds after which the client may retry, if the response says it.
    pub retry_after: Option<u16>,
    /// The fault of the request; `None` if the request is not at fault.
    pub request: Option<&'a RequestError>,
}

impl AnswerFailure<'_> {
    /// Returns the body of a response in OpenAI's shape.
    pub fn body(&self) -> Value {
        json!({ "error": { "message": self.message, "type": self.kind, "param": self.param, "code": self.code } })
    }

    /// Returns the body for an event of a stream. It has the seconds after which the client may retry, because the headers were sent before.
    pub(super) fn event(&self) -> Value {
        let mut body = self.body();
        if let Some(seconds) = self.retry_after {
            body["error"]["retry_after"] = seconds.into();
        }
        body
    }

    /// Returns the body of a response in Anthropic's shape, which is also the data of an `error` event.
    pub fn anthropic_body(&self, request_id: &str) -> Value {
        let kind = match self.status {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            504 => "timeout_error",
            400..500 => "invalid_request_error",
            _ => "api_error",
        };
        let message = self.request.and_then(context_message).unwrap_or_else(|| self.message.clone());
        let mut body = json!({ "type": "error", "error": { "type": kind, "message": message }, "request_id": request_id });
        if matches!(self.request, Some(RequestError::Invalid { param, .. }) if param == "thread") {
            body["error"]["details"] = json!({ "error_code": THREAD_UNSUPPORTED });
        }
        body
    }
}

/// Returns Anthropic's text for a request that does not fit into the context. Clients search for it, and then send fewer tokens.
fn context_message(error: &RequestError) -> Option<String> {
    let too_long = |tokens: usize, max: u32| format!("prompt is too long: {tokens} tokens > {max} maximum");
    match error {
        RequestError::ContextLength { context_length, prompt_tokens, .. } if prompt_tokens >= context_length => {
            // An answer has at least one token.
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
