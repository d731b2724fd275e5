//! The HTTP client of the server that is measured.

use bytes::Bytes;
use futures::{Stream, StreamExt};
use http_body_util::{BodyExt, BodyStream, Full, Limited};
use hyper::{
    HeaderMap, Request, Response, StatusCode, Uri,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderValue},
};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use rustls::{ClientConfig, RootCertStore};
use std::{sync::Arc, time::Duration};

/// Time limit for opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for answers that generate nothing.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Limit on the bytes of an answer that is read as a whole.
const WHOLE_MAX: usize = 64 << 20;
/// The time after which an idle connection is closed. Servers close idle connections later (uvicorn: after 5 s), so no request is sent on a
/// connection that the server is closing.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);

/// Why an answer could not be read.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The server cannot be reached, or the connection was lost before the answer began.
    #[error("the request received no response")]
    Request(#[from] hyper_util::client::legacy::Error),
    /// The connection was lost before the answer was complete, or the answer is too long.
    #[error("the response could not be read")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The server took too long.
    #[error("no response within {} s", READ_TIMEOUT.as_secs())]
    Timeout,
    /// The answer is not JSON.
    #[error("the response with HTTP status {0} is not JSON")]
    NotJson(StatusCode),
    /// The server refused the request.
    #[error("the server answered with HTTP status {status}: {message}")]
    Status {
        /// The status.
        status: StatusCode,
        /// The message in the answer.
        message: String,
    },
}

/// The address of a server is not a URL that can be used.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not the address of a server; write http://host:port or https://host:port, with a path if the API is below one")]
pub struct UrlError(String);

/// A client of one server. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// The beginning of every URL, without `/v1` and without a slash at the end.
    base: Arc<str>,
    headers: HeaderMap,
}

impl Http {
    /// Makes a client. `url` may end with `/v1`. `headers` are added to every request.
    pub(crate) fn new(url: &str, headers: HeaderMap) -> Result<Self, UrlError> {
        let base = url.trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base);
        let invalid = || UrlError(url.to_owned());
        let uri: Uri = base.parse().map_err(|_| invalid())?;
        let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
        if !is_http || uri.host().is_none_or(str::is_empty) || uri.query().is_some() {
            return Err(invalid());
        }
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(tls()).https_or_http().enable_http1().wrap_connector(connector);
        let client =
            Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE_TIMEOUT).build(connector);
        Ok(Self { client, base: base.into(), headers })
    }

    /// Returns the same client with one more header.
    pub(crate) fn with_header(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.insert(name, HeaderValue::from_static(value));
        self
    }

    /// Sends a POST with a body of JSON; returns the answer when its head has arrived.
    pub(crate) async fn post(&self, path: &str, json: Bytes) -> Result<Response<Incoming>, HttpError> {
        let mut request = self.request(path, json);
        *request.method_mut() = hyper::Method::POST;
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(self.client.request(request).await?)
    }

    /// Sends a POST, and reads the whole answer as JSON.
    pub(crate) async fn post_json(&self, path: &str, json: &serde_json::Value) -> Result<serde_json::Value, HttpError> {
        read(self.post(path, json.to_string().into())).await
    }

    /// Sends a GET, and reads the whole answer as JSON.
    pub(crate) async fn get_json(&self, path: &str) -> Result<serde_json::Value, HttpError> {
        let request = self.request(path, Bytes::new());
        read(async { Ok(self.client.request(request).await?) }).await
    }

    fn request(&self, path: &str, body: Bytes) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::new(body));
        *request.uri_mut() = format!("{}{path}", self.base).parse().expect("a checked address and a constant path are a URI");
        *request.headers_mut() = self.headers.clone();
        request
    }
}

/// Reads a whole answer.
async fn read(answer: impl Future<Output = Result<Response<Incoming>, HttpError>>) -> Result<serde_json::Value, HttpError> {
    let reading = async {
        let answer = answer.await?;
        let status = answer.status();
        let body = whole(answer, WHOLE_MAX).await?;
        if !status.is_success() {
            return Err(HttpError::Status { status, message: message(&body) });
        }
        serde_json::from_slice(&body).map_err(|_| HttpError::NotJson(status))
    };
    tokio::time::timeout(READ_TIMEOUT, reading).await.unwrap_or(Err(HttpError::Timeout))
}

/// Returns the body of an answer.
pub(crate) async fn whole(answer: Response<Incoming>, max: usize) -> Result<Bytes, HttpError> {
    let body = Limited::new(answer.into_body(), max).collect().await.map_err(HttpError::Body)?;
    Ok(body.to_bytes())
}

/// Returns the bytes of an answer as they arrive. Dropping the stream closes the connection.
pub(crate) fn chunks(answer: Response<Incoming>) -> impl Stream<Item = Result<Bytes, hyper::Error>> + Send {
    BodyStream::new(answer.into_body()).filter_map(async |frame| match frame {
        Ok(frame) => frame.into_data().ok().map(Ok),
        Err(error) => Some(Err(error)),
    })
}

/// Returns the message of an error's body, in whichever of the usual places it is.
pub(crate) fn message(body: &[u8]) -> String {
    let parsed: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let places = ["/error/message", "/message", "/detail", "/error"];
    let message = places.iter().find_map(|place| parsed.pointer(place)?.as_str());
    message.map(str::to_owned).unwrap_or_else(|| String::from_utf8_lossy(body).chars().take(500).collect())
}

/// Returns a TLS configuration that trusts the public authorities.
fn tls() -> ClientConfig {
    let roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.into() };
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    config.expect("ring has the default protocols").with_root_certificates(roots).with_no_client_auth()
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
            assert_eq!(&*Http::new(url, HeaderMap::new()).expect(url).base, base);
        }
        for url in ["h:8000", "ftp://h", "/v1", "http://", "http://h?x=1"] {
            let error = Http::new(url, HeaderMap::new()).expect_err(url);
            assert!(error.to_string().contains("http://host:port"), "{error}");
        }
    }

    #[test]
    fn message_is_found_in_the_bodies_of_several_servers() {
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
