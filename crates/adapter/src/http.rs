//! The HTTP client of an engine's server. It sends the server's key, and reads the key again when the server refuses it.

use bytes::Bytes;
use futures::{Stream, StreamExt, future::poll_fn, stream::BoxStream};
use hyper::{
    HeaderMap, Method, Response, StatusCode,
    body::Incoming,
    header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, HeaderValue, InvalidHeaderValue},
};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
pub(crate) use tandem_client::{HttpError, whole};
use tandem_process::Secret;
use tokio::time::{Instant, timeout};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of an answer that is not streamed, and of one event of a stream, in bytes. The longest answers are the metrics of a server
/// with many ranks.
pub(crate) const ANSWER_MAX: usize = 4 << 20;
/// Maximum size of an answer with the logprobs of a prompt, in bytes.
pub(crate) const PROMPT_LOGPROBS_MAX: usize = 64 << 20;

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

/// The time in which an answer must end after its last chunk that matters.
const END_MAX: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub(crate) struct EngineHttp {
    http: tandem_client::HttpClient,
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
        // Keeps the last key if the new one is not allowed in a header.
        if let Ok(now) = self.secret.bearer() {
            *header = now;
        }
        header.clone()
    }
}

impl EngineHttp {
    /// Returns a client of the server at `url`. `ca` has PEM certificates of authorities that are trusted besides the public ones.
    pub fn new(url: &str, key: Option<Secret>, ca: Option<&[u8]>) -> Result<Self, ClientError> {
        let with_header = |secret: Secret| Ok(Arc::new(ServerKey { bearer: Mutex::new(secret.bearer()?), secret }));
        let key = key.map(with_header).transpose().map_err(|_: InvalidHeaderValue| ClientError::Key)?;
        let authorities = tandem_client::authorities(ca).map_err(ClientError::Certificate)?;
        let http = tandem_client::HttpClient::new(url, authorities, CONNECT_TIMEOUT);
        Ok(Self { http: http.map_err(|_| ClientError::Url(url.to_owned()))?, key })
    }

    pub fn url(&self) -> &str {
        self.http.url()
    }

    pub fn host(&self) -> &str {
        self.http.host()
    }

    /// Sends a request with a JSON body, or without one. Returns the answer when its head has arrived. If the server refuses the key and
    /// the key's file has a new key, the request is sent again.
    ///
    /// # Errors
    /// Fails if the server cannot be reached, or if the connection is lost.
    pub async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&'static str, String)],
        json: Option<Vec<u8>>,
    ) -> Result<Response<Incoming>, HttpError> {
        let json = Bytes::from(json.unwrap_or_default());
        let key = self.key.as_ref().map(|key| key.header());
        let answer = self.send_once(method.clone(), path, headers, json.clone(), key.clone()).await?;
        if matches!(answer.status(), StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            let now = self.key.as_ref().map(|key| key.read_again());
            // Repeats the request if the key has changed since it was sent, even if another request has read the new key first.
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
    ) -> Result<Response<Incoming>, HttpError> {
        let mut all = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        all.extend(key.map(|key| (AUTHORIZATION, key)));
        for (name, value) in headers {
            // A request id with characters that are not allowed in a header is not sent.
            all.extend(HeaderValue::try_from(value).ok().map(|value| (HeaderName::from_static(name), value)));
        }
        self.http.send(method, path, all, json).await
    }

    /// Sends a request and reads the complete answer.
    ///
    /// # Errors
    /// Fails if the server cannot be reached, if the connection is lost, or if the answer is longer than [`ANSWER_MAX`] or not complete within `limit`.
    pub async fn read(
        &self,
        method: Method,
        path: &str,
        json: Option<Vec<u8>>,
        limit: Duration,
    ) -> Result<(StatusCode, Bytes), HttpError> {
        let reading = async {
            let answer = self.send(method, path, &[], json).await?;
            let status = answer.status();
            Ok((status, whole(answer, ANSWER_MAX).await?))
        };
        timeout(limit, reading).await.unwrap_or(Err(HttpError::Timeout(limit)))
    }
}

/// Returns the data of the server-sent events of an answer as they arrive. Dropping the stream closes the connection.
pub(crate) fn events(answer: Response<Incoming>) -> impl Stream<Item = Result<String, HttpError>> + Send {
    tandem_client::events(answer, ANSWER_MAX)
}

/// Returns the next item of a stream and when it arrived; without a time if it was there before it was awaited. Cancel-safe.
pub(crate) async fn next_arrival<S: Stream + Unpin>(stream: &mut S) -> (Option<S::Item>, Option<Instant>) {
    let mut is_awaited = false;
    let next = poll_fn(|context| {
        let next = stream.poll_next_unpin(context);
        is_awaited |= next.is_pending();
        next
    });
    let next = next.await;
    (next, is_awaited.then(Instant::now))
}

/// Reads the rest of an answer, so that its connection can carry the next request. Closes the connection if the answer does not end in time.
pub(crate) fn read_end<T: Send + 'static>(mut answer: BoxStream<'static, T>) {
    #[expect(clippy::disallowed_methods, reason = "the task ends after `END_MAX`, and a job that waited for it would end later")]
    tokio::spawn(timeout(END_MAX, async move { while answer.next().await.is_some() {} }));
}

#[cfg(test)]
pub(crate) mod testing {
    use tokio::{
        io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
        net::TcpListener,
    };

    /// Starts a server for requests without a body. `answer` returns the status, the length and the body for a path. Returns the URL.
    pub(crate) async fn serve(mut answer: impl FnMut(&str) -> (u16, usize, String) + Send + 'static) -> String {
        serve_heads(move |head| answer(head.split(' ').nth(1).unwrap())).await
    }

    /// Starts a server as [`serve`] does, but passes the complete head of each request to `answer`.
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
    use futures::StreamExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[test]
    fn invalid_url_key_or_certificate_is_refused() {
        for url in ["http://engine:8000", "https://engine", "http://[::1]:8000/base/"] {
            EngineHttp::new(url, Some(Secret::from("secret".to_owned())), None).expect(url);
        }
        for url in ["engine:8000", "ftp://engine", "/path", "http://", "http://engine?x=1", "tcp://engine:1"] {
            assert!(matches!(EngineHttp::new(url, None, None), Err(ClientError::Url(_))), "{url}");
        }
        assert!(matches!(EngineHttp::new("http://e", Some(Secret::from("a\nb".to_owned())), None), Err(ClientError::Key)));
        let broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert!(matches!(EngineHttp::new("http://e", None, Some(broken)), Err(ClientError::Certificate(_))));
    }

    async fn client(body: String) -> EngineHttp {
        let url = testing::serve(move |_| (200, body.len(), body.clone())).await;
        EngineHttp::new(&url, None, None).unwrap()
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
        let client = EngineHttp::new(&url, Some(Secret::in_file(file.path().into()).unwrap()), None).unwrap();
        let status = async || client.read(Method::GET, "/", None, Duration::from_secs(60)).await.unwrap().0;
        assert_eq!(status().await, StatusCode::OK);
        *accepted.lock() = "second";
        assert_eq!(status().await, StatusCode::UNAUTHORIZED, "the file has no other key yet");
        for unusable in ["", "a\nb"] {
            write(unusable);
            assert_eq!(status().await, StatusCode::UNAUTHORIZED, "{unusable:?}");
        }
        write("second\n");
        // The server refuses both requests, and only the first of them finds that the file has changed.
        assert_eq!(tokio::join!(status(), status()), (StatusCode::OK, StatusCode::OK));
    }

    #[tokio::test]
    async fn only_a_lost_connection_may_mean_that_the_server_has_ended() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let client = EngineHttp::new(&url, None, None).unwrap();
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
        assert!(matches!(read(ANSWER_MAX + 1).await, Err(HttpError::TooLong(ANSWER_MAX))));
    }

    #[tokio::test]
    async fn size_of_one_event_is_limited_but_not_that_of_the_stream() {
        let event = format!("data: {}\n\n", "x".repeat(ANSWER_MAX / 2));
        let short = client(event.repeat(3)).await.send(Method::GET, "/", &[], None).await.unwrap();
        assert_eq!(events(short).filter(|event| std::future::ready(event.is_ok())).count().await, 3);
        let line = "x".repeat(ANSWER_MAX / 8);
        for endless in [line.clone(), format!("data: {line}\n"), format!(":{line}\n")] {
            let answer = client(endless.repeat(9)).await.send(Method::GET, "/", &[], None).await.unwrap();
            let first = Box::pin(events(answer)).next().await;
            assert!(matches!(first, Some(Err(HttpError::TooLong(_)))), "{first:?}");
        }
    }
}
