//! The HTTP client of the server that is measured.

use bytes::Bytes;
use hyper::{
    HeaderMap, Method, Response, StatusCode,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderValue},
};
use std::time::Duration;
use tandem_client::{HttpClient, HttpError, authorities, whole};

/// The time limit for opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit for a complete answer that is not streamed.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum number of bytes of an answer that is not streamed.
const WHOLE_MAX: usize = 64 << 20;
/// The reason why a server's answer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// The answer is not complete.
    #[error(transparent)]
    Http(#[from] HttpError),
    /// The answer is not JSON.
    #[error("the response with HTTP status {0} is not JSON")]
    NotJson(StatusCode),
    /// The server refused the request.
    #[error("the server answered with HTTP status {status}: {message}")]
    Status {
        /// The HTTP status of the answer.
        status: StatusCode,
        /// The message in the answer.
        message: String,
    },
}

/// The address of a server, or the certificates for it, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum UrlError {
    /// The address is not a URL that can be used.
    #[error(
        "{0:?} is not the address of a server; write http://host:port or https://host:port, with a path if the API is below one"
    )]
    Url(String),
    /// The certificates cannot be used.
    #[error("the file with the server's certificate cannot be used: {0}")]
    Ca(String),
}

/// A client of one server. It is cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Http {
    client: HttpClient,
    headers: HeaderMap,
}

impl Http {
    /// Makes a client. `url` may end with `/v1`. `ca` has certificates of authorities in PEM format, which are trusted in addition to the
    /// public authorities. `headers` are added to every request.
    pub(crate) fn new(url: &str, ca: Option<&[u8]>, headers: HeaderMap) -> Result<Self, UrlError> {
        let base = url.trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base);
        let trusted = authorities(ca).map_err(UrlError::Ca)?;
        let client = HttpClient::new(base, trusted, CONNECT_TIMEOUT).map_err(|_| UrlError::Url(url.to_owned()))?;
        Ok(Self { client, headers })
    }

    /// Returns the same client with one more header.
    pub(crate) fn with_header(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.insert(name, HeaderValue::from_static(value));
        self
    }

    /// Sends a POST request with a JSON body. Returns the answer when its head has arrived.
    pub(crate) async fn post(&self, path: &str, json: Bytes) -> Result<Response<Incoming>, HttpError> {
        let mut headers = self.headers.clone();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        self.client.send(Method::POST, path, headers, json).await
    }

    /// Sends a POST request, and reads the complete answer as JSON.
    pub(crate) async fn post_json(&self, path: &str, json: &serde_json::Value) -> Result<serde_json::Value, AnswerError> {
        read(self.post(path, json.to_string().into())).await
    }

    /// Sends a GET request, and reads the complete answer as JSON.
    pub(crate) async fn get_json(&self, path: &str) -> Result<serde_json::Value, AnswerError> {
        read(self.client.send(Method::GET, path, self.headers.clone(), Bytes::new())).await
    }
}

/// Reads a complete answer.
async fn read(answer: impl Future<Output = Result<Response<Incoming>, HttpError>>) -> Result<serde_json::Value, AnswerError> {
    let reading = async {
        let answer = answer.await?;
        let status = answer.status();
        let body = whole(answer, WHOLE_MAX).await?;
        if !status.is_success() {
            return Err(AnswerError::Status { status, message: message(&body) });
        }
        serde_json::from_slice(&body).map_err(|_| AnswerError::NotJson(status))
    };
    tokio::time::timeout(READ_TIMEOUT, reading).await.unwrap_or(Err(HttpError::Timeout(READ_TIMEOUT).into()))
}

/// Returns the message in the body of an error. If the body has it at none of the paths that common servers use, returns the beginning of the
/// body.
pub(crate) fn message(body: &[u8]) -> String {
    let parsed: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let places = ["/error/message", "/message", "/detail", "/error"];
    let message = places.iter().find_map(|place| parsed.pointer(place)?.as_str());
    message.map(str::to_owned).unwrap_or_else(|| String::from_utf8_lossy(body).chars().take(500).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_may_end_with_v1_and_must_be_a_url() {
        for (url, base) in [
            ("http://h:8000", "http://h:8000"),
            ("http://h:8000/", "http://h:8000"),
            ("https://h/v1", "https://h"),
            ("https://h/openai/v1/", "https://h/openai"),
        ] {
            assert_eq!(Http::new(url, None, HeaderMap::new()).expect(url).client.url(), base);
        }
        for url in ["h:8000", "ftp://h", "/v1", "http://", "http://h?x=1"] {
            let error = Http::new(url, None, HeaderMap::new()).expect_err(url);
            assert!(error.to_string().contains("http://host:port"), "{error}");
        }
    }

    #[test]
    fn error_message_is_found_in_the_bodies_of_several_servers() {
        for (body, expected) in [
            (r#"{"error": {"message": "busy", "code": 1}}"#, "busy"),
            (r#"{"object": "error", "message": "busy"}"#, "busy"),
            (r#"{"detail": "busy"}"#, "busy"),
            (r#"{"error": "busy"}"#, "busy"),
            ("busy", "busy"),
            ("", ""),
        ] {
            assert_eq!(message(body.as_bytes()), expected, "{body}");
        }
    }
}
