//! A small HTTP/1.1 client for an engine's server: one base address, optional TLS and bearer token, whole or streamed answers.

use bytes::Bytes;
use eventsource_stream::{EventStreamError, Eventsource};
use futures::{Stream, StreamExt};
use http_body_util::{BodyExt, BodyStream, Full, Limited};
use hyper::{
    Method, Request, Response, StatusCode, Uri,
    body::Incoming,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue},
};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use parking_lot::Mutex;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};
use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tandem_process::Secret;
use tokio::time::timeout;

/// Time limit for opening a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle connections are closed after this time. Servers close them later (uvicorn after 5 s), so no request is sent on a connection that the server
/// is closing.
const IDLE_TIMEOUT: Duration = Duration::from_secs(4);
/// Maximum size of a whole answer and of one event of a streamed answer, in bytes. The longest are the metrics of a server with many ranks.
pub(crate) const ANSWER_MAX: usize = 4 << 20;

/// The reason why a request has no complete answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineHttpError {
    #[error("the request received no response")]
    Request(#[from] hyper_util::client::legacy::Error),
    #[error("the connection was closed in the middle of the response")]
    Body(#[from] hyper::Error),
    #[error("the response is longer than {0} bytes, which is the limit")]
    TooLong(usize),
    #[error("no response within {0:?}")]
    Timeout(Duration),
    #[error("the response has an event that cannot be read: {0}")]
    Event(String),
}

impl EngineHttpError {
    /// Returns whether the request cannot have ended the server: it has not reached the server, or the server continues to send something else than
    /// an answer.
    pub fn cannot_have_ended_the_server(&self) -> bool {
        match self {
            Self::Request(error) => {
                let reason = error.source().and_then(|source| source.downcast_ref::<hyper::Error>());
                error.is_connect() || reason.is_some_and(hyper::Error::is_parse)
            }
            Self::TooLong(_) | Self::Event(_) => true,
            Self::Body(_) | Self::Timeout(_) => false,
        }
    }
}

/// The reason why a client cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The server's address is invalid.
    #[error("the engine's address {0:?} is not valid; write an http:// or https:// URL with a host and without a query")]
    Url(String),
    /// The key has characters that are not allowed in an HTTP header.
    #[error("the engine's key has characters that are not allowed in an HTTP header; check the file that holds the key")]
    Key,
    /// The certificates are not valid PEM.
    #[error("the certificates for the engine are not valid PEM: {0}")]
    Certificate(String),
}

#[derive(Clone)]
pub(crate) struct HttpClient {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// The beginning of every URL: the scheme, the authority and a path prefix without a slash at its end.
    base: Arc<str>,
    host: Arc<str>,
    key: Option<Arc<ServerKey>>,
}

/// The key that the server requires, and the header that has been made from it.
struct ServerKey {
    secret: Secret,
    bearer: Mutex<HeaderValue>,
}

impl ServerKey {
    fn header(&self) -> HeaderValue {
        self.bearer.lock().clone()
    }

    /// Reads the secret again. Returns the header that has been made from it.
    fn read_again(&self) -> HeaderValue {
        let mut header = self.bearer.lock();
        // A new key that no header can hold does not replace the last one.
        if let Ok(now) = bearer(&self.secret) {
            *header = now;
        }
        header.clone()
    }
}

impl HttpClient {
    /// Returns a client of the server at `url`. `ca` has PEM certificates of authorities that are trusted besides the public ones.
    pub fn new(url: &str, key: Option<Secret>, ca: Option<&[u8]>) -> Result<Self, ClientError> {
        let invalid = || ClientError::Url(url.to_owned());
        let uri: Uri = url.parse().map_err(|_| invalid())?;
        let host = uri.host().filter(|_| matches!(uri.scheme_str(), Some("http" | "https")) && uri.query().is_none());
        let host = host.ok_or_else(invalid)?.into();
        let with_header = |secret: Secret| Ok(Arc::new(ServerKey { bearer: Mutex::new(bearer(&secret)?), secret }));
        let key = key.map(with_header).transpose()?;
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let connector =
            HttpsConnectorBuilder::new().with_tls_config(tls(ca)?).https_or_http().enable_http1().wrap_connector(connector);
        let client =
            Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE_TIMEOUT).build(connector);
        Ok(Self { client, base: url.trim_end_matches('/').into(), host, key })
    }

    pub fn url(&self) -> &str {
        &self.base
    }

    pub fn host(&self) -> &str {
        &self.host
    }

    /// Sends a request with a JSON body, or without one. Returns the answer when its head has arrived. If the server refuses the key and the key's file
    /// has a new one, the request is sent again.
    ///
    /// # Errors
    /// Fails if the server cannot be reached, or if the connection is lost.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&'static str, String)],
        json: Option<Vec<u8>>,
    ) -> Result<Response<Incoming>, EngineHttpError> {
        let json = Bytes::from(json.unwrap_or_default());
        let key = self.key.as_ref().map(|key| key.header());
        let answer = self.send_once(method.clone(), path, headers, json.clone(), key.clone()).await?;
        if matches!(answer.status(), StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            let now = self.key.as_ref().map(|key| key.read_again());
            // Another request may have read the new key before.
            if now != key {
                return self.send_once(method, path, headers, json, now).await;
            }
        }
        Ok(answer)
    }

    async fn send_once(
        &self,
        method: Method,
        path: &str,
        headers: &[(&'static str, String)],
        json: Bytes,
        key: Option<HeaderValue>,
    ) -> Result<Response<Incoming>, EngineHttpError> {
        let mut request = Request::new(Full::new(json));
        *request.method_mut() = method;
        *request.uri_mut() = format!("{}{path}", self.base).parse().expect("a checked address and a constant path are a URI");
        let all = request.headers_mut();
        all.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        all.extend(key.map(|key| (AUTHORIZATION, key)));
        for (name, value) in headers {
            // A request id with characters that are not allowed in a header is not sent.
            all.extend(HeaderValue::try_from(value).ok().map(|value| (HeaderName::from_static(name), value)));
        }
        Ok(self.client.request(request).await?)
    }

    /// Sends a request and reads the whole answer.
    ///
    /// # Errors
    /// Fails if the server cannot be reached, if the connection is lost, or if the answer is longer than [`ANSWER_MAX`] or not complete within `limit`.
    pub async fn read(
        &self,
        method: Method,
        path: &str,
        json: Option<Vec<u8>>,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), EngineHttpError> {
        let reading = async {
            let answer = self.send(method, path, &[], json).await?;
            let status = answer.status();
            Ok((status, whole(answer, ANSWER_MAX).await?))
        };
        timeout(limit, reading).await.unwrap_or(Err(EngineHttpError::Timeout(limit)))
    }
}

fn bearer(key: &Secret) -> Result<HeaderValue, ClientError> {
    let mut bearer = HeaderValue::try_from(format!("Bearer {}", key.expose())).map_err(|_| ClientError::Key)?;
    bearer.set_sensitive(true);
    Ok(bearer)
}

/// Returns the body of an answer.
///
/// # Errors
/// Fails if the body is longer than `max` bytes, or if the connection is lost.
pub(crate) async fn whole(answer: Response<Incoming>, max: usize) -> Result<Bytes, EngineHttpError> {
    match Limited::new(answer.into_body(), max).collect().await {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) => {
            Err(error.downcast::<hyper::Error>().map_or(EngineHttpError::TooLong(max), |error| EngineHttpError::Body(*error)))
        }
    }
}

/// Returns the data of the server-sent events of an answer as they arrive. Dropping the stream closes the connection.
pub(crate) fn events(answer: Response<Incoming>) -> impl Stream<Item = Result<String, EngineHttpError>> + Send {
    // The number of bytes that have arrived since the last event. The parser keeps them.
    let kept = Arc::new(AtomicUsize::new(0));
    let parsed = Arc::clone(&kept);
    let pieces = BodyStream::new(answer.into_body()).filter_map(move |frame| {
        let piece = frame.map_err(EngineHttpError::from).map(|frame| frame.into_data().ok()).transpose();
        let arrived = piece.as_ref().map_or(0, |piece| piece.as_ref().map_or(0, Bytes::len));
        let is_too_long = kept.fetch_add(arrived, Ordering::Relaxed) + arrived > ANSWER_MAX;
        std::future::ready(if is_too_long { Some(Err(EngineHttpError::TooLong(ANSWER_MAX))) } else { piece })
    });
    pieces.eventsource().map(move |event| match event {
        Ok(event) => {
            parsed.store(0, Ordering::Relaxed);
            Ok(event.data)
        }
        Err(EventStreamError::Transport(error)) => Err(error),
        Err(error) => Err(EngineHttpError::Event(error.to_string())),
    })
}

fn tls(ca: Option<&[u8]>) -> Result<ClientConfig, ClientError> {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.into() };
    for certificate in CertificateDer::pem_slice_iter(ca.unwrap_or_default()) {
        let added =
            certificate.map_err(|error| error.to_string()).and_then(|der| roots.add(der).map_err(|error| error.to_string()));
        added.map_err(ClientError::Certificate)?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    Ok(config.expect("ring has the default protocols").with_root_certificates(roots).with_no_client_auth())
}

#[cfg(test)]
pub(crate) mod testing {
    use tokio::{
        io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
        net::TcpListener,
    };

    /// Starts a server that answers each request without a body. `answer` returns the status, the length and the body for a path. Returns the URL.
    pub(crate) async fn serve(mut answer: impl FnMut(&str) -> (u16, usize, String) + Send + 'static) -> String {
        serve_heads(move |head| answer(head.split(' ').nth(1).unwrap())).await
    }

    /// Does the same, but `answer` has the whole head of a request.
    #[allow(clippy::disallowed_methods, reason = "the end of the test's runtime ends the task")]
    pub(crate) async fn serve_heads(mut answer: impl FnMut(&str) -> (u16, usize, String) + Send + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move {
            loop {
                let mut client = BufReader::new(listener.accept().await.unwrap().0);
                let mut head = String::new();
                while client.read_line(&mut head).await.is_ok_and(|length| length > 0) {
                    if head.ends_with("\r\n\r\n") {
                        let (status, length, body) = answer(&head);
                        let answer = format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n\r\n{body}");
                        // A client may close the connection in the middle of an answer.
                        drop(client.write_all(answer.as_bytes()).await);
                        head.clear();
                    }
                }
            }
        });
        url
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[test]
    fn invalid_url_key_or_certificate_is_refused() {
        for url in ["http://engine:8000", "https://engine", "http://[::1]:8000/base/"] {
            HttpClient::new(url, Some(Secret::from("secret".to_owned())), None).expect(url);
        }
        for url in ["engine:8000", "ftp://engine", "/path", "http://", "http://engine?x=1", "tcp://engine:1"] {
            assert!(matches!(HttpClient::new(url, None, None), Err(ClientError::Url(_))), "{url}");
        }
        assert!(matches!(HttpClient::new("http://e", Some(Secret::from("a\nb".to_owned())), None), Err(ClientError::Key)));
        let broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert!(matches!(HttpClient::new("http://e", None, Some(broken)), Err(ClientError::Certificate(_))));
    }

    async fn client(body: String) -> HttpClient {
        let url = testing::serve(move |_| (200, body.len(), body.clone())).await;
        HttpClient::new(&url, None, None).unwrap()
    }

    #[tokio::test]
    async fn rotated_key_is_read_from_its_file_when_the_server_refuses_the_last_one() {
        let accepted = Arc::new(Mutex::new("first"));
        let key = Arc::clone(&accepted);
        let url = testing::serve_heads(move |head| {
            let is_accepted = head.lines().any(|line| line == format!("authorization: Bearer {}", key.lock()));
            (if is_accepted { 200 } else { 401 }, 0, String::new())
        })
        .await;
        let file = tempfile::NamedTempFile::new().unwrap();
        let write = |key: &str| std::fs::write(file.path(), key).unwrap();
        write("first\n");
        let client = HttpClient::new(&url, Some(Secret::in_file(file.path().into()).unwrap()), None).unwrap();
        let status = async || client.read(Method::GET, "/", None, Duration::from_secs(60)).await.unwrap().0;
        assert_eq!(status().await, StatusCode::OK);
        *accepted.lock() = "second";
        assert_eq!(status().await, StatusCode::UNAUTHORIZED, "the file has no other key yet");
        for unusable in ["", "a\nb"] {
            write(unusable);
            assert_eq!(status().await, StatusCode::UNAUTHORIZED, "{unusable:?}");
        }
        write("second\n");
        // Both are refused, and only the first one finds that the file has changed.
        assert_eq!(tokio::join!(status(), status()), (StatusCode::OK, StatusCode::OK));
    }

    #[tokio::test]
    async fn only_a_connection_that_breaks_may_be_the_end_of_the_server() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let client = HttpClient::new(&url, None, None).unwrap();
        let answered = async |answer: String| {
            let serve = async {
                let (mut stream, _) = listener.accept().await.unwrap();
                let _ = stream.read(&mut [0; 4_096]).await;
                let _ = stream.write_all(answer.as_bytes()).await;
            };
            let ask = async { client.send(Method::GET, "/", &[], None).await.map(events)?.next().await.expect("not the end") };
            tokio::join!(ask, serve).0.expect_err("there is no event").cannot_have_ended_the_server()
        };
        for (head, endless) in [
            ("HTTP/1.1 200 OK\r\nx-long: ", "x"),
            ("HTTP/1.1 200 OK\r\ncontent-length: 4611686018427387904\r\n\r\n", "["),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4000000000000000\r\n", "1"),
            ("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\ndata: ", "x"),
            ("HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n", "\n"),
            ("SSH-2.0-server\r\n", "x"),
        ] {
            assert!(answered(head.to_owned() + &endless.repeat(2 * ANSWER_MAX)).await, "{head}");
        }
        for broken in ["", "HTTP/1.1 2", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nda"] {
            assert!(!answered(broken.to_owned()).await, "{broken}");
        }
        drop(listener);
        let refused = client.send(Method::GET, "/", &[], None).await.expect_err("nothing listens");
        assert!(refused.cannot_have_ended_the_server());
    }

    #[tokio::test]
    async fn answer_above_the_limit_is_an_error() {
        let read = async |length| client("x".repeat(length)).await.read(Method::GET, "/", None, Duration::from_secs(60)).await;
        assert_eq!(read(ANSWER_MAX).await.unwrap().1.len(), ANSWER_MAX);
        assert!(matches!(read(ANSWER_MAX + 1).await, Err(EngineHttpError::TooLong(ANSWER_MAX))));
    }

    #[tokio::test]
    async fn only_one_event_and_not_the_stream_is_limited() {
        let event = format!("data: {}\n\n", "x".repeat(ANSWER_MAX / 2));
        let short = client(event.repeat(3)).await.send(Method::GET, "/", &[], None).await.unwrap();
        assert_eq!(events(short).filter(|event| std::future::ready(event.is_ok())).count().await, 3);
        let line = "x".repeat(ANSWER_MAX / 8);
        for endless in [line.clone(), format!("data: {line}\n"), format!(":{line}\n")] {
            let answer = client(endless.repeat(9)).await.send(Method::GET, "/", &[], None).await.unwrap();
            let first = Box::pin(events(answer)).next().await;
            assert!(matches!(first, Some(Err(EngineHttpError::TooLong(_)))), "{first:?}");
        }
    }
}
