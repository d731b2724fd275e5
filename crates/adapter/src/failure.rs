//! Errors in the answers of engines' servers.

use crate::{
    api::EngineFailure,
    http::{self, ANSWER_MAX},
};
use bytes::Bytes;
use hyper::{Response, StatusCode, body::Incoming};
use serde::Deserialize;
use std::time::Duration;
use tokio::time::timeout;

/// Time limit for the body of an error.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of characters of an engine's message that are passed on.
const MESSAGE_MAX: usize = 2_000;

/// The value of `error` in the body of an error: `{"error": {"message": …}}`, or `{"error": "Unauthorized"}`.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum ErrorBody {
    Text(String),
    Object { message: String },
}

impl ErrorBody {
    pub fn message(self) -> String {
        match self {
            Self::Text(message) | Self::Object { message } => shortened(&message),
        }
    }
}

/// Returns a message of an engine as it is passed on.
pub(crate) fn shortened(message: &str) -> String {
    message.chars().take(MESSAGE_MAX).collect()
}

/// Returns the body of an answer.
///
/// # Errors
/// Fails if the answer's status is an error.
pub(crate) fn check((status, body): (StatusCode, Bytes)) -> Result<Bytes, EngineFailure> {
    if status.is_success() { Ok(body) } else { Err(of(status.as_u16(), &body)) }
}

/// Reads the body of an answer whose status is an error. If the body does not arrive, the status alone determines the failure.
pub(crate) async fn read(answer: Response<Incoming>) -> EngineFailure {
    let status = answer.status().as_u16();
    let body = timeout(BODY_TIMEOUT, http::whole(answer, ANSWER_MAX)).await;
    of(status, &body.ok().and_then(Result::ok).unwrap_or_default())
}

fn of(status: u16, body: &[u8]) -> EngineFailure {
    #[derive(Deserialize)]
    struct Body {
        error: ErrorBody,
    }
    let message = match serde_json::from_slice::<Body>(body) {
        Ok(body) => body.error.message(),
        Err(_) => format!("HTTP {status} without a message"),
    };
    of_status(status, message)
}

/// Returns the failure that an HTTP status stands for.
pub(crate) fn of_status(status: u16, message: String) -> EngineFailure {
    match status {
        400 | 413 | 422 => EngineFailure::Invalid(message),
        401 | 403 | 404 | 405 => EngineFailure::Denied { status, message },
        429 | 503 => EngineFailure::Full(message),
        _ => EngineFailure::Failed(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_status_determines_the_engine_failure() {
        let refused = of(400, br#"{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}"#);
        assert!(matches!(refused, EngineFailure::Invalid(message) if message == "too long"));
        let denied = of(401, br#"{"error":"Unauthorized"}"#);
        assert!(matches!(denied, EngineFailure::Denied { status: 401, message } if message == "Unauthorized"));
        assert!(matches!(of(503, b"busy"), EngineFailure::Full(_)));
        assert!(matches!(of(500, b""), EngineFailure::Failed(_)));
    }

    #[tokio::test]
    async fn http_status_alone_determines_the_failure_if_the_body_is_missing() {
        let long = format!(r#"{{"error":{{"message":"{}"}}}}"#, "x".repeat(ANSWER_MAX));
        let silent = String::new();
        for body in [long, silent] {
            let url = http::testing::serve(move |_| (500, ANSWER_MAX * 2, body.clone())).await;
            let client = http::EngineHttp::new(&url, None, None).unwrap();
            let answer = client.send(hyper::Method::GET, "/", &[], None).await.unwrap();
            tokio::time::pause();
            assert!(matches!(read(answer).await, EngineFailure::Failed(message) if message == "HTTP 500 without a message"));
            tokio::time::resume();
        }
    }

    #[test]
    fn long_message_of_an_engine_is_cut() {
        let body = format!(r#"{{"error":"{}"}}"#, "ä".repeat(MESSAGE_MAX + 1));
        assert!(matches!(of(400, body.as_bytes()), EngineFailure::Invalid(message) if message == "ä".repeat(MESSAGE_MAX)));
    }
}
