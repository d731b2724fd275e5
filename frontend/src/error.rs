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
use std::sync::Arc;
use tandem_api::{Problem, RequestError, answer::AnswerFailure, shortened};
use tandem_proto::v1::FailureReason;

/// The header with which a server says whether OpenAI's and Anthropic's clients may repeat a request.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// The reason that a request gets an error instead of a result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("The body is larger than {max} bytes.")]
    BodyTooLarge { max: usize },
    #[error("The body arrived more slowly than {bytes_per_second} bytes a second; send it again over a faster connection.")]
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
    #[error(
        "The body is not sent as a form; send the header 'content-type: multipart/form-data; boundary=…' (curl: -F model=… -F file=@…)."
    )]
    FormType,
    #[error(
        "The model '{model}' does not generate text here: its requests for embeddings, rerank, score, classify, pooling and audio are passed \
         through to other servers."
    )]
    PassedThrough { model: String },
    #[error(
        "The model '{model}' generates text, and this path is for models that do not, such as embedding models; the operator can add one \
         with the frontend's --passthrough MODEL=URL."
    )]
    NotPassedThrough { model: String },
    #[error("No server of the model '{model}' answers; try again shortly.")]
    NoServer { model: String },
    #[error("The model '{model}' does not exist; GET /v1/models lists the served models.")]
    ModelNotFound { model: String },
    #[error("The request has no API key; send yours in the header 'Authorization: Bearer KEY', or in 'x-api-key: KEY'.")]
    MissingKey,
    #[error("The API key is not valid; check it, or ask the operator of this server for another one.")]
    UnknownKey,
    #[error("This API key may not use the model '{model}'; /v1/models lists the models that it may use.")]
    ModelNotAllowed { model: String },
    #[error("{0}.")]
    KeyLimit(Exceeded),
    #[error(
        "The header '{header}' is not accepted from this client; leave it out. The operator can allow it with the frontend's \
         --trusted-proxies and --expose-details."
    )]
    Untrusted { header: HeaderName },
    #[error(
        "This page is for the operator, and is not shown to this client. The operator can allow its address with --trusted-proxies ADDRESS, \
         or all addresses with --expose-details always; `tandem frontend` can also show the page on a port of its own, --admin-listen."
    )]
    UntrustedPage,
    #[error(
        "This server has no such path; /openapi.json lists its paths. A client's base URL is this server's address followed by /v1, for \
         Anthropic's clients without /v1."
    )]
    UnknownPath,
    #[error("This page is on another port of this server, that of its --admin-listen.")]
    OnAdminPort,
    #[error("This path does not allow this method; see /openapi.json.")]
    Method,
    #[error("The name in the header 'Host' is not one of this server's; use its IP address, or add the name to --allowed-hosts.")]
    Host,
    #[error(
        "Web pages of other sites may not send requests to this server; its operator can allow this site with --cors-origin."
    )]
    Origin,
    #[error("The admin port only explains placements (header 'x-tandem-explain: true'); send the request to the API's port.")]
    AdminExplains,
    #[error("Too many connections are open; try again shortly, or reuse an open connection.")]
    Connections,
    #[error("This server is starting{}{step}; try again shortly.", if .step.is_empty() { "" } else { ": " })]
    Starting { step: String },
    #[error("Too many requests are running; try again shortly.")]
    Overloaded,
    #[error(
        "The request needs {sequences} sequences (prompts × n), but at most {max} may run at once; lower 'n' or send fewer prompts."
    )]
    TooManySequences { sequences: usize, max: usize },
    #[error("This client's limit of {max} running sequences (prompts × n) is reached; try again when some of them have ended.")]
    ClientLimit { max: usize },
    #[error("No server that reads images answers; try again shortly.")]
    Renderers,
    #[error(transparent)]
    Dispatch(#[from] DispatchError),
}

impl From<Exceeded> for ApiError {
    fn from(exceeded: Exceeded) -> Self {
        Self::KeyLimit(exceeded)
    }
}

impl ApiError {
    pub(crate) fn invalid(param: impl Into<String>, problem: Problem) -> Self {
        RequestError::invalid(param, problem).into()
    }

    /// Maps the error to the HTTP status and the fields of OpenAI's error body.
    fn parts(&self) -> Parts<'_> {
        let client = |status, param, code| Parts { status, kind: "invalid_request_error", param, code, retry_after: None };
        let bad = |param, code| client(StatusCode::BAD_REQUEST, param, code);
        let server = |status, code| Parts { status, kind: "server_error", param: None, code: Some(code), retry_after: Some(1) };
        let unavailable = |code| server(StatusCode::SERVICE_UNAVAILABLE, code);
        let failed = |code| Parts { retry_after: None, ..server(StatusCode::INTERNAL_SERVER_ERROR, code) };
        let limited = |retry_after| {
            let (kind, code) = ("rate_limit_error", Some("rate_limit_exceeded"));
            Parts { kind, retry_after, ..client(StatusCode::TOO_MANY_REQUESTS, None, code) }
        };
        match self {
            Self::Request(RequestError::Busy) | Self::Overloaded => unavailable("overloaded"),
            Self::Request(RequestError::Failed) => failed("internal_error"),
            Self::Request(error) => bad(error.param(), Some(error.code())),
            Self::BodyTooLarge { .. } => client(StatusCode::PAYLOAD_TOO_LARGE, None, Some("body_too_large")),
            Self::BodySlow { .. } => client(StatusCode::REQUEST_TIMEOUT, None, Some("body_too_slow")),
            Self::BodyBroken => bad(None, Some("body_incomplete")),
            Self::BodyBudget => unavailable("body_budget"),
            Self::ContentType | Self::FormType | Self::ContentEncoding => {
                client(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, Some("unsupported_media_type"))
            }
            Self::ModelNotFound { .. } => client(StatusCode::NOT_FOUND, Some("model"), Some("model_not_found")),
            Self::PassedThrough { .. } => bad(Some("model"), Some("model_passed_through")),
            Self::NotPassedThrough { .. } => bad(Some("model"), Some("model_not_passed_through")),
            Self::NoServer { .. } => unavailable("no_server"),
            Self::MissingKey => client(StatusCode::UNAUTHORIZED, None, Some("missing_api_key")),
            Self::UnknownKey => client(StatusCode::UNAUTHORIZED, None, Some("invalid_api_key")),
            Self::ModelNotAllowed { .. } => client(StatusCode::FORBIDDEN, Some("model"), Some("model_not_allowed")),
            Self::KeyLimit(exceeded) => limited(exceeded.retry_seconds()),
            Self::Untrusted { .. } | Self::UntrustedPage => client(StatusCode::FORBIDDEN, None, Some("untrusted_client")),
            Self::UnknownPath => client(StatusCode::NOT_FOUND, None, Some("unknown_path")),
            Self::Method => client(StatusCode::METHOD_NOT_ALLOWED, None, Some("method_not_allowed")),
            Self::Host => client(StatusCode::MISDIRECTED_REQUEST, None, Some("unknown_host")),
            Self::AdminExplains | Self::OnAdminPort => client(StatusCode::NOT_FOUND, None, Some("admin_port")),
            Self::Origin => client(StatusCode::FORBIDDEN, None, Some("foreign_origin")),
            Self::Connections => unavailable("too_many_connections"),
            Self::Starting { .. } => unavailable("starting"),
            Self::Renderers => unavailable("no_renderer"),
            Self::TooManySequences { .. } => bad(Some("n"), Some("too_many_sequences")),
            Self::ClientLimit { .. } => limited(Some(1)),
            Self::Dispatch(error) => match error {
                DispatchError::Refused { .. } => bad(None, Some("request_refused")),
                DispatchError::NotServed => client(StatusCode::NOT_FOUND, Some("model"), Some("model_not_found")),
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
                DispatchError::EndsWorkers { .. } => failed("request_ends_workers"),
                DispatchError::Stopped => unavailable("draining"),
            },
        }
    }

    pub(crate) fn status(&self) -> StatusCode {
        self.parts().status
    }

    /// Returns the error's code, a constant, which never has text from the client.
    pub(crate) fn code(&self) -> Option<&'static str> {
        self.parts().code
    }

    /// Returns the error for the APIs' error bodies.
    pub(crate) fn failure(&self) -> AnswerFailure<'_> {
        let Parts { status, kind, param, code, retry_after } = self.parts();
        let request = if let Self::Request(error) = self { Some(error) } else { None };
        let message = shortened(&self.to_string()).into_owned();
        AnswerFailure { status: status.as_u16(), kind, message, param, code, retry_after, request }
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

/// The response has the error as an extension, so that a layer can write it in the shape of another API.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let parts = self.parts();
        let is_final = matches!(self, Self::Dispatch(DispatchError::EndsWorkers { .. }))
            || (parts.status == StatusCode::TOO_MANY_REQUESTS && parts.retry_after.is_none());
        let mut response = (parts.status, Json(self.failure().body())).into_response();
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
