//! The connections to a server. A connection has no task of its own: the task that waits for an answer also reads and writes, so a piece of
//! an answer wakes one task.

use crate::HttpError;
use bytes::Bytes;
use futures::task::noop_waker;
use http_body_util::Full;
use hyper::{
    Request, Response, Uri,
    body::{Body, Frame, Incoming, SizeHint},
    client::conn::http1::{self, SendRequest},
};
use hyper_rustls::{HttpsConnector, MaybeHttpsStream};
use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioIo};
use parking_lot::Mutex;
use std::{
    future::poll_fn,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    net::TcpStream,
    runtime::Handle,
    time::{Instant, sleep},
};
use tower_service::Service;

/// The time after which an idle connection is not used again. Servers close idle connections later (uvicorn: after 5 s), so no request is
/// sent on a connection that the server is closing.
const IDLE_MAX: Duration = Duration::from_secs(4);

/// The connections to one server. It is cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Connections {
    connector: HttpsConnector<HttpConnector>,
    /// The scheme, the host and the port of the server.
    to: Uri,
    idle: IdleConnections,
}

/// The connections that wait for the next request, and since when, the newest last.
type IdleConnections = Arc<Mutex<Vec<(Connection, Instant)>>>;

#[derive(Debug)]
struct Connection {
    requests: SendRequest<Full<Bytes>>,
    /// Reads and writes; `None` once the connection has ended.
    driver: Option<http1::Connection<MaybeHttpsStream<TokioIo<TcpStream>>, Full<Bytes>>>,
}

/// The body of an answer. Dropping it before its end closes the connection.
#[derive(Debug)]
pub struct AnswerBody {
    body: Incoming,
    /// The connection, and where it waits for the next request after the end of the body; `None` after the end.
    connection: Option<(Connection, IdleConnections)>,
}

impl Connections {
    pub(crate) fn new(connector: HttpsConnector<HttpConnector>, to: Uri) -> Self {
        Self { connector, to, idle: Arc::default() }
    }

    /// Sends a request, whose URI is a path. Returns the answer when its head has arrived.
    pub(crate) async fn send(&self, mut request: Request<Full<Bytes>>) -> Result<Response<AnswerBody>, HttpError> {
        while let Some(connection) = self.take_idle() {
            match connection.send(request, &self.idle).await {
                Ok(answer) => return Ok(answer),
                // The server has closed the connection before it got the request.
                Err((_, Some(unsent))) => request = unsent,
                Err((error, None)) => return Err(HttpError::Request(error)),
            }
        }
        let mut connector = self.connector.clone();
        poll_fn(|context| connector.poll_ready(context)).await.map_err(HttpError::Connect)?;
        let stream = connector.call(self.to.clone()).await.map_err(HttpError::Connect)?;
        let (requests, driver) = http1::handshake(stream).await.map_err(HttpError::Request)?;
        let connection = Connection { requests, driver: Some(driver) };
        connection.send(request, &self.idle).await.map_err(|(error, _)| HttpError::Request(error))
    }

    /// Takes the newest idle connection that is still open.
    fn take_idle(&self) -> Option<Connection> {
        loop {
            let (mut connection, since) = self.idle.lock().pop()?;
            connection.drive(&mut Context::from_waker(&noop_waker()));
            if connection.requests.is_ready() && since.elapsed() < IDLE_MAX {
                return Some(connection);
            }
        }
    }
}

impl Connection {
    /// Sends a request. An error comes with the request if nothing of it was sent.
    async fn send(
        mut self,
        request: Request<Full<Bytes>>,
        idle: &IdleConnections,
    ) -> Result<Response<AnswerBody>, (hyper::Error, Option<Request<Full<Bytes>>>)> {
        let mut answer = pin!(self.requests.try_send_request(request));
        let answer = poll_fn(|context| {
            self.drive(context);
            answer.as_mut().poll(context)
        });
        let answer = answer.await.map_err(|mut error| {
            let unsent = error.take_message();
            (error.into_error(), unsent)
        })?;
        let connection = Some((self, Arc::clone(idle)));
        Ok(answer.map(|body| {
            let mut body = AnswerBody { body, connection };
            if body.is_end_stream() {
                body.on_end();
            }
            body
        }))
    }

    /// Reads and writes what can be read and written now.
    fn drive(&mut self, context: &mut Context<'_>) {
        // Requests and bodies report errors.
        self.driver.take_if(|driver| Pin::new(driver).poll(context).is_ready());
    }
}

impl AnswerBody {
    /// Keeps the connection for the next request, unless the server closes it.
    fn on_end(&mut self) {
        if let Some((mut connection, idle)) = self.connection.take() {
            connection.drive(&mut Context::from_waker(&noop_waker()));
            if connection.requests.is_ready() {
                rest(connection, &idle);
            }
        }
    }
}

/// Puts a connection where it waits for the next request.
fn rest(connection: Connection, idle: &IdleConnections) {
    let mut all = idle.lock();
    all.push((connection, Instant::now()));
    // The first one starts the task that closes those that are not used again. Without a runtime, the next request closes them.
    if let (1, Ok(runtime)) = (all.len(), Handle::try_current()) {
        let idle = Arc::downgrade(idle);
        #[expect(clippy::disallowed_methods, reason = "the task ends soon after the last idle connection")]
        runtime.spawn(async move {
            loop {
                sleep(IDLE_MAX).await;
                let Some(idle) = idle.upgrade() else { return };
                let mut all = idle.lock();
                all.retain(|(_, since)| since.elapsed() < IDLE_MAX);
                if all.is_empty() {
                    return;
                }
            }
        });
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        if let Some((connection, _)) = &mut self.connection {
            connection.drive(context);
        }
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if matches!(polled, Poll::Ready(None)) || self.is_end_stream() {
            self.on_end();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use crate::{HttpClient, authorities, whole};
    use bytes::Bytes;
    use http_body_util::BodyExt;
    use hyper::{HeaderMap, Method};
    use std::time::Duration;
    use tokio::{
        io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
        net::{TcpListener, TcpStream},
    };

    const CHUNK: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n";
    const END: &str = "0\r\n\r\n";

    async fn server() -> (TcpListener, HttpClient) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://user@{}/base/", listener.local_addr().expect("it listens"));
        let roots = authorities(None).expect("the public authorities are valid");
        (listener, HttpClient::new(&url, roots, Duration::from_secs(5)).expect("the URL is valid"))
    }

    async fn accept(listener: &TcpListener) -> BufReader<TcpStream> {
        BufReader::new(listener.accept().await.expect("a client connects").0)
    }

    /// Reads a request without a body, and writes the answer. Returns the request; empty if the client has closed the connection.
    async fn answer(client: &mut BufReader<TcpStream>, text: &str) -> String {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") && client.read_line(&mut head).await.is_ok_and(|length| length > 0) {}
        drop(client.write_all(text.as_bytes()).await);
        head
    }

    async fn get(client: &HttpClient) -> hyper::Response<super::AnswerBody> {
        client.send(Method::GET, "/path?a=b", HeaderMap::new(), Bytes::new()).await.expect("the server answers")
    }

    async fn get_whole(client: &HttpClient) -> Bytes {
        whole(get(client).await, 10).await.expect("the answer is complete")
    }

    #[tokio::test]
    async fn complete_answers_share_a_connection_and_an_abandoned_answer_closes_it() {
        let (listener, client) = server().await;
        let serving = async {
            let mut first = accept(&listener).await;
            let head = answer(&mut first, &[CHUNK, END].concat()).await;
            answer(&mut first, &[CHUNK, END].concat()).await;
            answer(&mut first, CHUNK).await;
            assert_eq!(answer(&mut first, "").await, "", "the client closes the connection");
            answer(&mut accept(&listener).await, &[CHUNK, END].concat()).await;
            head
        };
        let requests = async {
            assert_eq!((get_whole(&client).await, get_whole(&client).await), ("a".into(), "a".into()));
            get(&client).await.frame().await.expect("the answer has begun").expect("the connection is open");
            get_whole(&client).await;
        };
        let (head, ()) = tokio::join!(serving, requests);
        let host = format!("host: {}\r\n", listener.local_addr().expect("it listens"));
        assert!(head.starts_with("GET /base/path?a=b HTTP/1.1\r\n") && head.contains(&host), "{head}");
    }

    #[tokio::test]
    async fn connection_that_the_server_has_closed_is_replaced() {
        let (listener, client) = server().await;
        let serving = async {
            for _ in 0..2 {
                answer(&mut accept(&listener).await, &[CHUNK, END].concat()).await;
            }
        };
        let requests = async {
            get_whole(&client).await;
            get_whole(&client).await;
        };
        tokio::join!(serving, requests);
    }

    #[tokio::test]
    async fn lost_connection_is_an_error_of_the_request_or_of_the_body() {
        let (listener, client) = server().await;
        let serving = async {
            answer(&mut accept(&listener).await, "").await;
            answer(&mut accept(&listener).await, CHUNK).await;
        };
        let requests = async {
            let lost = client.send(Method::GET, "/", HeaderMap::new(), Bytes::new()).await.map(|_| ());
            assert!(matches!(lost, Err(crate::HttpError::Request(_))), "{lost:?}");
            let lost = whole(get(&client).await, 10).await;
            assert!(matches!(lost, Err(crate::HttpError::Body(_))), "{lost:?}");
        };
        tokio::join!(serving, requests);
        drop(listener);
        let refused = client.send(Method::GET, "/", HeaderMap::new(), Bytes::new()).await.map(|_| ());
        assert!(matches!(&refused, Err(error) if error.cannot_have_ended_the_server()), "{refused:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connection_is_closed() {
        let (listener, client) = server().await;
        let serving = async {
            let mut client = accept(&listener).await;
            answer(&mut client, &[CHUNK, END].concat()).await;
            assert_eq!(answer(&mut client, "").await, "", "the client closes the connection");
        };
        tokio::join!(serving, get_whole(&client));
    }
}
