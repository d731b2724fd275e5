//! Errors in the answers of engines' servers.

use crate::api::EngineFailure;
use bytes::Bytes;
use hyper::StatusCode;
use serde::Deserialize;

/// The body of an error: `{"error": {"message": …}}`, or `{"error": "Unauthorized"}`.
#[derive(Deserialize)]
#[serde(untagged)]
pub(crate) enum ErrorBody {
    Text(String),
    Object { message: String },
}

impl ErrorBody {
    pub fn message(self) -> String {
        match self {
            Self::Text(message) | Self::Object { message } => message,
        }
    }
}

/// Returns the body of an answer.
///
/// # Errors
/// Fails if the status of the answer is that of an error.
pub(crate) fn check((status, body): (StatusCode, Bytes)) -> Result<Bytes, EngineFailure> {
    if status.is_success() { Ok(body) } else { Err(of(status.as_u16(), &body)) }
}

pub(crate) fn of(status: u16, body: &[u8]) -> EngineFailure {
    #[derive(Deserialize)]
    struct Body {
        error: ErrorBody,
    }
    let message = match serde_json::from_slice::<Body>(body) {
        Ok(body) => body.error.message(),
        Err(_) => format!("HTTP {status} without a message"),
    };
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
}
