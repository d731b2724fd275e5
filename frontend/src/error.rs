//! The errors that a client may receive, and the only table that maps them to HTTP statuses and OpenAI's error body.

use crate::{
    dispatch::{DispatchError, seconds},
    keys::Exceeded,
};
use axum::{
    Json,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::{borrow::Cow, sync::Arc};
use tandem_proto::v1::FailureReason;

/// The header with which a server says whether OpenAI's and Anthropic's clients may repeat a request.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// The reason that a request gets an error instead of a result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("The body is not valid JSON: {0}.")]
    Json(#[source] serde_json::Error),
    #[error("The body is not valid UTF-8 (at byte {at}).")]
    Utf8 { at: usize },
    #[error("The body must be a JSON object.")]
    NoObject,
    #[error("The body is nested too deeply: at most {max} levels are allowed.")]
    Nesting { max: usize },
    #[error("The body is larger than {max} bytes.")]
    BodyTooLarge { max: usize },
    #[error("The body has more than {max} JSON values (counted by commas and brackets); split it into several requests.")]
    Elements { max: usize },
    #[error(
        "The body arrived more slowly than {bytes_per_second} bytes a second; send the request again over a faster connection."
    )]
    BodySlow { bytes_per_second: u32 },
    #[error("The body ended early, or one of its chunks is malformed; check Content-Length or Transfer-Encoding.")]
    BodyBroken,
    #[error("The memory reserved for request bodies is in use by other requests; try again shortly.")]
    BodyBudget,
    #[error(
        "The body is not sent as JSON; send the header 'content-type: application/json' (curl: -H 'content-type: application/json')."
    )]
    ContentType,
    #[error(
        "The body is sent with a Content-Encoding, which this server does not decode; send it uncompressed, without this header."
    )]
    ContentEncoding,
    #[error("Invalid type or value for '{param}': {}.", in_json_words(.source))]
    Type { param: String, source: serde_json::Error },
    #[error("'{param}' {problem}.")]
    Invalid { param: String, problem: Problem },
    #[error("The model '{model}' does not exist; GET /v1/models lists those that do.")]
    ModelNotFound { model: String },
    #[error("The request has no API key; send yours in the header 'Authorization: Bearer KEY', or in 'x-api-key: KEY'.")]
    MissingKey,
    #[error("The API key is not valid; check it, or ask the operator of this server for another one.")]
    UnknownKey,
    #[error("This API key may not use the model '{model}'; /v1/models lists the models that it may use.")]
    ModelNotAllowed { model: String },
    #[error("{0}.")]
    KeyLimit(Exceeded),
    #[error("The model has no chat template; use /v1/completions.")]
    NoChatTemplate,
    #[error("The model's chat template refuses these messages: {}.", .0.detail().unwrap_or("the template failed"))]
    Template(#[source] minijinja::Error),
    #[error(
        "The model's chat template takes too many steps, too much memory or too much time for these messages; send fewer or shorter messages."
    )]
    TemplateExhausted,
    /// The message is the same as OpenAI's, because some clients search for it.
    #[error(
        "This model's maximum context length is {context_length} tokens. However, you requested {} tokens ({prompt_tokens} in the \
         {}, {new_tokens} in the completion). Please reduce the length of the {} or completion.",
        u64::from(*.prompt_tokens) + u64::from(*.new_tokens), .prompt, .prompt
    )]
    ContextLength {
        context_length: u32,
        prompt_tokens: u32,
        new_tokens: u32,
        /// The field that holds the prompt: `messages` or `prompt`.
        prompt: &'static str,
        param: &'static str,
    },
    #[error(
        "This model's maximum context length is {context_length} tokens. However, your {param} resulted in at least {tokens_min} \
         tokens. Please reduce the length of the {param}."
    )]
    PromptLength { context_length: u32, tokens_min: usize, param: &'static str },
    #[error(
        "The header '{header}' is not accepted from this client; leave it out. The operator can allow it with the frontend's \
         --trusted-proxies and --expose-details."
    )]
    Untrusted { header: HeaderName },
    #[error(
        "This page is for the operator, and is not shown to this client. Open it on the frontend's --admin-listen, or from an address that \
         --trusted-proxies and --expose-details of the frontend allow."
    )]
    UntrustedPage,
    #[error("Unknown path; /openapi.json lists the paths of this server.")]
    UnknownPath,
    #[error("This server does not serve {path}: {advice}.")]
    Unserved { path: &'static str, advice: &'static str },
    #[error("This path does not allow this method; see /openapi.json.")]
    Method,
    #[error("The name in the header 'Host' is not one of this server's; use its IP address, or add the name to --allowed-hosts.")]
    Host,
    #[error("Web pages of other sites may not send requests to this server.")]
    Origin,
    #[error("The admin port only explains placements (header 'x-tandem-explain: true'); send the request to the API's port.")]
    AdminExplains,
    #[error("Too many connections are open; try again shortly, or reuse an open connection.")]
    Connections,
    #[error("Too many requests are running; try again shortly.")]
    Overloaded,
    #[error(
        "The request needs {sequences} sequences (prompts × n), but at most {max} may run at once; lower 'n' or send fewer prompts."
    )]
    TooManySequences { sequences: usize, max: usize },
    #[error("This client's limit of {max} running sequences (prompts × n) is reached; try again when some of them have ended.")]
    ClientLimit { max: usize },
    #[error("The server failed to process the request; its log says why.")]
    Internal,
    /// Another error, with the name that the field at fault has in the request.
    #[error("{error}")]
    Renamed {
        param: String,
        #[source]
        error: Box<ApiError>,
    },
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
}

impl From<Exceeded> for ApiError {
    fn from(exceeded: Exceeded) -> Self {
        Self::KeyLimit(exceeded)
    }
}

/// The problem with a field. In the error message, this text follows the field's name.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum Problem {
    #[error("is required")]
    Missing,
    #[error("must be {allowed}, but is {found}")]
    Range { allowed: &'static str, found: f64 },
    #[error("must not be empty")]
    Empty,
    #[error("must not be below {best}, the priority of this API key, but is {found}; lower values are served earlier")]
    Priority { best: i32, found: i32 },
    #[error("must have at most {max} {unit}")]
    TooMany { max: usize, unit: &'static str },
    #[error("must be one of {allowed}")]
    Choice { allowed: &'static str },
    #[error("must contain only token ids below {vocab_size}, the size of the vocabulary")]
    Vocabulary { vocab_size: usize },
    #[error("{rule}")]
    Rule { rule: &'static str },
    #[error("cannot be combined with '{other}'")]
    Conflict { other: String },
    #[error("cannot be enforced: {problem}")]
    Constraint { problem: String },
    #[error("is a part of type '{kind}', but the model reads only text; send parts of type 'text'")]
    Part { kind: String },
    #[error("is '{kind}', but this server supports only tools of type 'function'")]
    ToolType { kind: String },
    #[error("is a block of type '{kind}', which this server does not read here; send text")]
    Block { kind: String },
    #[error("is not supported by this server; leave it out")]
    Unsupported,
    #[error("is not supported by this server, which renders messages with the model's own chat template; leave it out")]
    Template,
}

impl ApiError {
    pub(crate) fn invalid(param: impl Into<String>, problem: Problem) -> Self {
        Self::Invalid { param: param.into(), problem }
    }

    /// Returns the same error with another name of the field at fault, for a request whose fields have other names than where the error
    /// occurred.
    pub(crate) fn renamed(self, rename: impl FnOnce(&str) -> String) -> Self {
        match self {
            Self::Invalid { param, problem } => Self::Invalid { param: rename(&param), problem },
            Self::Type { param, source } => Self::Type { param: rename(&param), source },
            other => match other.parts().param.map(rename) {
                Some(param) => Self::Renamed { param, error: Box::new(other) },
                None => other,
            },
        }
    }

    /// Maps the error to the HTTP status and the fields of OpenAI's error body.
    fn parts(&self) -> Parts<'_> {
        const INVALID: &str = "invalid_request_error";
        let client = |status, param, code| Parts { status, kind: INVALID, param, code, retry_after: None };
        let bad = |param, code| client(StatusCode::BAD_REQUEST, param, code);
        let server = |status, code| Parts { status, kind: "server_error", param: None, code: Some(code), retry_after: Some(1) };
        let unavailable = |code| server(StatusCode::SERVICE_UNAVAILABLE, code);
        match self {
            Self::Json(_) => bad(None, Some("invalid_json")),
            Self::Utf8 { .. } => bad(None, Some("invalid_utf8")),
            Self::NoObject => bad(None, Some("invalid_type")),
            Self::Nesting { .. } => bad(None, Some("nesting_too_deep")),
            Self::BodyTooLarge { .. } => client(StatusCode::PAYLOAD_TOO_LARGE, None, Some("body_too_large")),
            Self::Elements { .. } => bad(None, Some("too_many_values")),
            Self::BodySlow { .. } => client(StatusCode::REQUEST_TIMEOUT, None, Some("body_too_slow")),
            Self::BodyBroken => bad(None, Some("body_incomplete")),
            Self::BodyBudget => unavailable("body_budget"),
            Self::ContentType | Self::ContentEncoding => {
                client(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, Some("unsupported_media_type"))
            }
            Self::Type { param, .. } => bad(Some(param), Some("invalid_type")),
            Self::Invalid { param, problem } => bad(Some(param), Some(problem.code())),
            Self::ModelNotFound { .. } => client(StatusCode::NOT_FOUND, Some("model"), Some("model_not_found")),
            Self::MissingKey => client(StatusCode::UNAUTHORIZED, None, Some("missing_api_key")),
            Self::UnknownKey => client(StatusCode::UNAUTHORIZED, None, Some("invalid_api_key")),
            Self::ModelNotAllowed { .. } => client(StatusCode::FORBIDDEN, Some("model"), Some("model_not_allowed")),
            Self::KeyLimit(exceeded) => Parts {
                kind: "rate_limit_error",
                retry_after: exceeded.retry_seconds(),
                ..client(StatusCode::TOO_MANY_REQUESTS, None, Some("rate_limit_exceeded"))
            },
            Self::NoChatTemplate => bad(Some("messages"), Some("unsupported_value")),
            Self::Template(_) => bad(Some("messages"), Some("invalid_value")),
            Self::TemplateExhausted => bad(Some("messages"), Some("too_many")),
            Self::ContextLength { param, .. } | Self::PromptLength { param, .. } => {
                bad(Some(param), Some("context_length_exceeded"))
            }
            Self::Untrusted { .. } | Self::UntrustedPage => client(StatusCode::FORBIDDEN, None, Some("untrusted_client")),
            Self::UnknownPath => client(StatusCode::NOT_FOUND, None, Some("unknown_path")),
            Self::Unserved { .. } => client(StatusCode::NOT_FOUND, None, Some("path_not_served")),
            Self::Method => client(StatusCode::METHOD_NOT_ALLOWED, None, Some("method_not_allowed")),
            Self::Host => client(StatusCode::MISDIRECTED_REQUEST, None, Some("unknown_host")),
            Self::AdminExplains => client(StatusCode::NOT_FOUND, None, Some("admin_port")),
            Self::Origin => client(StatusCode::FORBIDDEN, None, Some("foreign_origin")),
            Self::Connections => unavailable("too_many_connections"),
            Self::Overloaded => unavailable("overloaded"),
            Self::TooManySequences { .. } => bad(Some("n"), Some("too_many_sequences")),
            Self::ClientLimit { .. } => Parts {
                kind: "rate_limit_error",
                retry_after: Some(1),
                ..client(StatusCode::TOO_MANY_REQUESTS, None, Some("rate_limit_exceeded"))
            },
            Self::Renamed { param, error } => Parts { param: Some(param), ..error.parts() },
            Self::Internal => Parts { retry_after: None, ..server(StatusCode::INTERNAL_SERVER_ERROR, "internal_error") },
            Self::Dispatch(error) => match error {
                DispatchError::Refused { .. } => bad(None, Some("request_refused")),
                DispatchError::Overloaded { retry_after } => {
                    Parts { retry_after: Some(seconds(*retry_after)), ..unavailable("overloaded") }
                }
                DispatchError::NoWorker { .. } => unavailable("no_worker"),
                DispatchError::NoRouter => unavailable("no_router"),
                DispatchError::RouterUnready { reason: FailureReason::Draining } => unavailable("router_draining"),
                DispatchError::RouterUnready { .. } => unavailable("router_starting"),
                DispatchError::Router(_) | DispatchError::RouterClosed => unavailable("router_unreachable"),
                DispatchError::ClusterMismatch => unavailable("cluster_mismatch"),
                DispatchError::Attempts { .. } => unavailable("attempts_exhausted"),
                DispatchError::Timeout { .. } => server(StatusCode::GATEWAY_TIMEOUT, "first_token_timeout"),
                DispatchError::Lost { .. } => unavailable("worker_lost"),
                DispatchError::EndsWorkers => {
                    Parts { retry_after: None, ..server(StatusCode::INTERNAL_SERVER_ERROR, "request_ends_workers") }
                }
                DispatchError::Stopped => unavailable("draining"),
            },
        }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.parts().status
    }

    /// Returns the error's code, which is one of this program's, never a text of the client.
    pub(crate) fn code(&self) -> Option<&'static str> {
        self.parts().code
    }

    pub(crate) fn message(&self) -> String {
        shortened(&self.to_string()).into_owned()
    }

    pub(crate) fn body(&self) -> Value {
        let Parts { kind, param, code, .. } = self.parts();
        json!({ "error": { "message": self.message(), "type": kind, "param": param, "code": code } })
    }

    /// Returns the body with the seconds after which the client may try again, for an event of a stream, whose headers are sent before.
    pub(crate) fn event(&self) -> Value {
        let mut body = self.body();
        if let Some(seconds) = self.parts().retry_after {
            body["error"]["retry_after"] = seconds.into();
        }
        body
    }
}

struct Parts<'a> {
    status: StatusCode,
    kind: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
    /// The number of seconds after which the client may retry; `None`: the response has no header `retry-after`.
    retry_after: Option<u16>,
}

impl Problem {
    fn code(&self) -> &'static str {
        match self {
            Self::Missing => "missing_required_parameter",
            Self::Range { .. }
            | Self::Choice { .. }
            | Self::Vocabulary { .. }
            | Self::Rule { .. }
            | Self::Conflict { .. }
            | Self::Constraint { .. }
            | Self::Priority { .. } => "invalid_value",
            Self::Empty => "empty_value",
            Self::TooMany { .. } => "too_many",
            Self::Unsupported | Self::Template => "unsupported_parameter",
            Self::Block { .. } | Self::Part { .. } | Self::ToolType { .. } => "unsupported_value",
        }
    }
}

/// The response has the error as an extension, so that a layer can write it in the shape of another API.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let parts = self.parts();
        let is_final = matches!(self, Self::Dispatch(DispatchError::EndsWorkers))
            || (parts.status == StatusCode::TOO_MANY_REQUESTS && parts.retry_after.is_none());
        let mut response = (parts.status, Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = parts.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if is_final {
            // OpenAI's and Anthropic's clients would send the request again.
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        if parts.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(Arc::new(self));
        response
    }
}

/// Checks that a length or number is at most `max`.
///
/// # Errors
/// `found` is greater than `max`.
pub(crate) fn at_most(param: &str, found: usize, max: usize, unit: &'static str) -> Result<(), ApiError> {
    if found > max { Err(ApiError::invalid(param, Problem::TooMany { max, unit })) } else { Ok(()) }
}

/// Shortens a client's text that is to be quoted in an error.
pub(crate) fn shortened(text: &str) -> Cow<'_, str> {
    const BYTES_MAX: usize = 1000;
    if text.len() <= BYTES_MAX { text.into() } else { format!("{}…", &text[..text.floor_char_boundary(BYTES_MAX)]).into() }
}

/// Returns serde's error message with JSON type names in place of Rust's.
fn in_json_words(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let Some((found, (expected, place))) =
        text.rsplit_once("expected ").and_then(|(found, rest)| Some((found, rest.split_once(" at line ")?)))
    else {
        return text;
    };
    let expected = match expected {
        "i64" => "a whole number",
        "u32" => "a token id",
        "f64" => "a number",
        "a sequence" => "a list",
        "a map" => "an object",
        rust if rust.starts_with("struct ") => "an object",
        other => other,
    };
    format!("{found}expected {expected} at line {place}")
}
