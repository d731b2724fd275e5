//! A frontend with a fake cluster. The test is the client, places the prompts, and controls every generation.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request, Response, StatusCode, body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::{
    collections::VecDeque,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};
use tandem_frontend::FrontendSettings;
use tandem_process::{Metrics, Shutdown};
use tandem_proto::v1::{
    BookingsReply, BookingsRequest, Candidate, DecodeStarted, ExplainReply, ExplainRequest, Failure, FailureReason, FinishReply,
    FinishRequest, Finished, GenerateReply, GenerateRequest, Placement, PromptLogprobs, RouteReply, RouteRequest, Scheduled,
    Token, Tokens, WorkerInfo, WorkerRef, WorkerView, WorkersReply, WorkersRequest,
    decode_server::{Decode, DecodeServer},
    finished::FinishReason,
    generate_reply, route_reply, route_request,
    router_server::{Router, RouterServer},
    worker_info::Role,
};
use tandem_text::ServedModel;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Status, Streaming};

pub use crate::texts::{merged, text};

const WAIT_MAX: Duration = Duration::from_secs(20);

pub async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(WAIT_MAX, future).await.expect("the operation ends in time")
}

/// A running frontend with its fake cluster.
pub struct Cluster {
    pub frontend: SocketAddr,
    pub metrics: Metrics,
    pub shutdown: Shutdown,
    /// The router's next answers, in order; `None`: the router closes the stream. If the list is empty, the router answers with [`local`].
    placements: Arc<Mutex<VecDeque<Option<route_reply::Message>>>>,
    pub decode_workers: Arc<Mutex<u32>>,
    pub decode: SocketAddr,
    calls: mpsc::UnboundedReceiver<Call>,
    finishes: mpsc::UnboundedReceiver<FinishRequest>,
    routes: mpsc::UnboundedReceiver<Received>,
    pub server: JoinHandle<Result<(), tandem_frontend::FrontendError>>,
}

/// A `Generate` call of the frontend to the decode worker.
pub struct Call {
    pub request: GenerateRequest,
    replies: mpsc::Sender<Result<GenerateReply, Status>>,
}

/// What the router has received: a message, or the end of a stream.
#[derive(Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "a test receives few of them")]
pub enum Received {
    Message(route_request::Message),
    /// The frontend has closed the stream, which ends the booking.
    Closed,
}

struct FakeRouter {
    placements: Arc<Mutex<VecDeque<Option<route_reply::Message>>>>,
    decode_workers: Arc<Mutex<u32>>,
    decode: SocketAddr,
    received: mpsc::UnboundedSender<Received>,
}

struct FakeDecode {
    calls: mpsc::UnboundedSender<Call>,
    finishes: mpsc::UnboundedSender<FinishRequest>,
}

#[tonic::async_trait]
impl Router for FakeRouter {
    type RouteStream = ReceiverStream<Result<RouteReply, Status>>;

    async fn route(
        &self,
        request: tonic::Request<Streaming<RouteRequest>>,
    ) -> Result<tonic::Response<Self::RouteStream>, Status> {
        let (replies, stream) = mpsc::channel(8);
        let (placements, decode, received) = (Arc::clone(&self.placements), self.decode, self.received.clone());
        let mut requests = request.into_inner();
        tokio::spawn(async move {
            while let Ok(Some(RouteRequest { message: Some(message) })) = requests.message().await {
                if matches!(message, route_request::Message::AnswerFinished(_)) {
                    // This message precedes the end of the stream of every complete answer; tests/http/routers.rs checks it.
                    continue;
                }
                let expects_reply = !matches!(message, route_request::Message::PrefillFinished(_));
                received.send(Received::Message(message)).ok();
                if expects_reply {
                    let scripted = placements.lock().expect("no test panics with the lock").pop_front();
                    let Some(reply) = scripted.unwrap_or_else(|| Some(route_reply::Message::Placement(local(decode)))) else {
                        break;
                    };
                    // The frontend must skip this message, which stands for an unknown one from a router of a later version.
                    replies.send(Ok(RouteReply { message: None })).await.ok();
                    replies.send(Ok(RouteReply { message: Some(reply) })).await.ok();
                }
            }
            received.send(Received::Closed).ok();
        });
        Ok(tonic::Response::new(ReceiverStream::new(stream)))
    }

    type BookingsStream = ReceiverStream<Result<BookingsReply, Status>>;

    async fn bookings(&self, _: tonic::Request<BookingsRequest>) -> Result<tonic::Response<Self::BookingsStream>, Status> {
        Err(Status::unimplemented("only routers call this method"))
    }

    async fn explain(&self, _: tonic::Request<ExplainRequest>) -> Result<tonic::Response<ExplainReply>, Status> {
        Ok(tonic::Response::new(ExplainReply { explanation: "because".to_owned(), ..ExplainReply::default() }))
    }

    async fn workers(&self, _: tonic::Request<WorkersRequest>) -> Result<tonic::Response<WorkersReply>, Status> {
        let info = |role: Role, worker_id: String| WorkerInfo { role: role.into(), worker_id, ..WorkerInfo::default() };
        let view = |role, name| WorkerView { info: Some(info(role, name)), ..WorkerView::default() };
        let decode = *self.decode_workers.lock().expect("no test panics with the lock");
        let workers = std::iter::once(view(Role::Prefill, "p0".to_owned()))
            .chain((0..decode).map(|number| view(Role::Decode, format!("d{number}"))))
            .collect();
        let unavailable_reason = (decode == 0).then(|| "no decode worker".to_owned());
        Ok(tonic::Response::new(WorkersReply { workers, unavailable_reason, ..WorkersReply::default() }))
    }
}

#[tonic::async_trait]
impl Decode for FakeDecode {
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<GenerateReply, Status>> + Send>>;

    async fn generate(&self, request: tonic::Request<GenerateRequest>) -> Result<tonic::Response<Self::GenerateStream>, Status> {
        let (replies, stream) = mpsc::channel(64);
        let request = request.into_inner();
        self.calls.send(Call { request, replies }).map_err(|_| Status::unavailable("the test is over"))?;
        Ok(tonic::Response::new(Box::pin(ReceiverStream::new(stream))))
    }

    async fn finish(&self, request: tonic::Request<FinishRequest>) -> Result<tonic::Response<FinishReply>, Status> {
        self.finishes.send(request.into_inner()).map_err(|_| Status::unavailable("the test is over"))?;
        Ok(tonic::Response::new(FinishReply {}))
    }
}

fn worker(name: &str, address: &str) -> WorkerRef {
    WorkerRef {
        worker_id: name.to_owned(),
        instance_id: format!("{name}-instance"),
        address: address.to_owned(),
        ..Default::default()
    }
}

/// A placement without a prefill worker. The decode worker has one of the prompt's blocks cached.
fn local(decode: SocketAddr) -> Placement {
    let decode = Candidate { worker: Some(worker("d0", &decode.to_string())), overlap_blocks: 1, predicted_blocks: 9 };
    Placement { decode: Some(decode), block_size: 16, ..Placement::default() }
}

impl Cluster {
    pub async fn start() -> Self {
        Self::with(|_| {}).await
    }

    /// Starts a cluster with changed settings. The model is the simulator's, with a context of 512 tokens. Requests do not wait for a
    /// router.
    pub async fn with(change: impl FnOnce(&mut FrontendSettings)) -> Self {
        Self::measured(Metrics::default(), change).await
    }

    pub async fn measured(metrics: Metrics, change: impl FnOnce(&mut FrontendSettings)) -> Self {
        let (received, routes) = mpsc::unbounded_channel();
        let (call, calls) = mpsc::unbounded_channel();
        let (finish, finishes) = mpsc::unbounded_channel();
        let bind = || async { TcpListener::bind("127.0.0.1:0").await.expect("a port is free") };
        let (router_listener, decode_listener, listener) = (bind().await, bind().await, bind().await);
        let address = |listener: &TcpListener| listener.local_addr().expect("the listener is bound");
        let (router, decode, frontend) = (address(&router_listener), address(&decode_listener), address(&listener));
        let (placements, decode_workers) = (Arc::default(), Arc::new(Mutex::new(1)));
        let fake =
            FakeRouter { placements: Arc::clone(&placements), decode_workers: Arc::clone(&decode_workers), decode, received };
        let serve = tonic::transport::Server::builder().add_service(RouterServer::new(fake));
        tokio::spawn(serve.serve_with_incoming(tandem_proto::channel::incoming(router_listener)));
        let serve =
            tonic::transport::Server::builder().add_service(DecodeServer::new(FakeDecode { calls: call, finishes: finish }));
        tokio::spawn(serve.serve_with_incoming(tandem_proto::channel::incoming(decode_listener)));
        let shutdown = Shutdown::default();
        let mut settings = FrontendSettings::new(router.to_string(), ServedModel::sim("m").with_context_length(512));
        settings.router_wait = Duration::ZERO;
        change(&mut settings);
        let server = tokio::spawn(tandem_frontend::run(listener, settings, metrics.clone(), shutdown.clone()));
        Self { frontend, metrics, shutdown, placements, decode_workers, decode, calls, finishes, routes, server }
    }

    /// Appends an answer to the list of the router's next answers.
    pub fn place(&self, reply: route_reply::Message) {
        self.placements.lock().expect("no test panics with the lock").push_back(Some(reply));
    }

    /// Makes the router close the stream in place of its next answer.
    pub fn close_next_route(&self) {
        self.placements.lock().expect("no test panics with the lock").push_back(None);
    }

    /// Returns a placement with a prefill worker that has this many of the prompt's blocks cached.
    pub fn remote(&self, overlap_blocks: u32, block_size: u32) -> route_reply::Message {
        let prefill = Candidate { worker: Some(worker("p0", "127.0.0.1:1")), overlap_blocks, predicted_blocks: 50 };
        route_reply::Message::Placement(Placement { prefill: Some(prefill), block_size, ..local(self.decode) })
    }

    /// Returns a placement on a decode worker that is unreachable.
    pub fn unreachable(&self) -> route_reply::Message {
        let decode = Candidate { worker: Some(worker("lost", "127.0.0.1:1")), ..Candidate::default() };
        route_reply::Message::Placement(Placement { decode: Some(decode), block_size: 16, ..Placement::default() })
    }

    /// Waits for the frontend's next call to the decode worker.
    pub async fn call(&mut self) -> Call {
        soon(self.calls.recv()).await.expect("the fake worker runs")
    }

    pub fn no_call(&mut self) -> bool {
        self.calls.try_recv().is_err()
    }

    /// Waits for the call with which the frontend ends a generation on the worker while the attempt's cached tokens are still to be
    /// reported.
    pub async fn finish(&mut self) -> FinishRequest {
        soon(self.finishes.recv()).await.expect("the fake worker runs")
    }

    pub fn no_finish(&mut self) -> bool {
        self.finishes.try_recv().is_err()
    }

    pub async fn received(&mut self) -> Received {
        soon(self.routes.recv()).await.expect("the fake router runs")
    }

    /// Waits until this many further `Route` streams have closed.
    pub async fn routes_closed(&mut self, count: usize) {
        let mut closed = 0;
        while closed < count {
            closed += usize::from(self.received().await == Received::Closed);
        }
    }

    pub async fn send(&self, method: Method, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Reply {
        send(self.frontend, method, path, headers, body.into()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Reply {
        self.send(Method::POST, path, &DETAILS, body.to_string()).await
    }

    pub async fn get(&self, path: &str) -> (StatusCode, Value) {
        self.send(Method::GET, path, &[], "").await.json().await
    }

    pub fn spawn_post(&self, path: &'static str, body: Value) -> JoinHandle<Reply> {
        let frontend = self.frontend;
        tokio::spawn(async move { send(frontend, Method::POST, path, &DETAILS, body.to_string().into()).await })
    }

    pub async fn metric(&self, line: &str) -> bool {
        self.metrics.render().lines().any(|found| found == line)
    }

    /// Waits until the metrics have this line.
    pub async fn counted(&self, line: &str) {
        for _ in 0..2000 {
            if self.metric(line).await {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        panic!("{line} is missing\n{}", self.metrics.render());
    }
}

/// Returns the status, the header `retry-after` if there is one, and the code of an error.
pub async fn refused(reply: tokio::task::JoinHandle<Reply>) -> (StatusCode, Option<String>, Value) {
    let reply = soon(reply).await.expect("the client task runs");
    let retry_after = reply.header("retry-after").map(str::to_owned);
    let (status, body) = reply.json().await;
    assert_eq!(body["error"]["param"], Value::Null);
    (status, retry_after, body["error"]["code"].clone())
}

const DETAILS: [(&str, &str); 1] = [("x-tandem-details", "true")];

pub async fn send(frontend: SocketAddr, method: Method, path: &str, headers: &[(&str, &str)], body: Bytes) -> Reply {
    let stream = TcpStream::connect(frontend).await.expect("the frontend listens");
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.expect("the frontend speaks HTTP");
    let connection = Connection(tokio::spawn(async move {
        connection.await.ok();
    }));
    let mut request = Request::builder().method(method).uri(path).header("host", "localhost");
    if !headers.iter().any(|(name, _)| *name == "content-type") {
        request = request.header("content-type", "application/json");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(body)).expect("the request is well-formed");
    let response = soon(sender.send_request(request)).await.expect("every request ends with a reply");
    Reply { response, _connection: connection }
}

/// A client's connection. Dropping it disconnects the client.
struct Connection(JoinHandle<()>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A response whose body is still to be read. Dropping it disconnects the client.
pub struct Reply {
    pub response: Response<Incoming>,
    _connection: Connection,
}

impl Reply {
    pub fn status(&self) -> StatusCode {
        self.response.status()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name).and_then(|value| value.to_str().ok())
    }

    pub async fn text(mut self) -> (StatusCode, String) {
        let body = soon(self.response.body_mut().collect()).await.expect("the body is complete").to_bytes();
        (self.response.status(), String::from_utf8(body.to_vec()).expect("the body is UTF-8"))
    }

    pub async fn json(self) -> (StatusCode, Value) {
        let (status, text) = self.text().await;
        let json = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{status}, not JSON: {text}"));
        (status, json)
    }

    /// Returns the next bytes of a stream.
    pub async fn more(&mut self) -> String {
        let frame = soon(self.response.body_mut().frame()).await.expect("the stream continues").expect("the frame is complete");
        String::from_utf8(frame.into_data().expect("the frame has data, not trailers").to_vec()).expect("the event is UTF-8")
    }

    /// Returns all events of a stream, and whether `[DONE]` ended it.
    pub async fn events(self) -> (Vec<Value>, bool) {
        assert_eq!(self.header("content-type"), Some("text/event-stream; charset=utf-8"));
        assert_eq!(self.header("x-accel-buffering"), Some("no"));
        let (_, text) = self.text().await;
        events(&text)
    }
}

impl Reply {
    /// Returns all events of a stream whose events have names, each with its name. Comments are skipped.
    pub async fn named_events(self) -> Vec<(String, Value)> {
        assert_eq!(self.header("content-type"), Some("text/event-stream; charset=utf-8"));
        assert_eq!(self.header("x-accel-buffering"), Some("no"));
        let (_, text) = self.text().await;
        let event = |frame: &str| {
            let (name, data) =
                frame.strip_prefix("event: ").and_then(|rest| rest.split_once("\ndata: ")).expect("the event has a name");
            (name.to_owned(), serde_json::from_str(data).expect("the event is JSON"))
        };
        text.split_terminator("\n\n").filter(|frame| !frame.starts_with(':')).map(event).collect()
    }
}

/// Returns the events in the text of a stream, and whether `[DONE]` ended it. Checks that every event is one line of data, and that no
/// event follows `[DONE]`.
pub fn events(text: &str) -> (Vec<Value>, bool) {
    let (mut events, mut done) = (Vec::new(), false);
    for frame in text.split_terminator("\n\n") {
        assert!(!done, "a frame follows [DONE]: {frame}");
        let data = frame.strip_prefix("data: ").unwrap_or_else(|| panic!("the frame has no data: {frame:?}"));
        match data {
            "[DONE]" => done = true,
            _ => events.push(serde_json::from_str(data).unwrap_or_else(|_| panic!("not JSON: {data:?}"))),
        }
    }
    (events, done)
}

impl Call {
    pub async fn send(&self, message: generate_reply::Message) {
        self.replies.send(Ok(GenerateReply { message: Some(message) })).await.ok();
    }

    /// Sends a message that the frontend does not know, as a later version could.
    pub async fn send_unknown(&self) {
        self.replies.send(Ok(GenerateReply { message: None })).await.ok();
    }

    pub async fn fail(self, status: Status) {
        self.replies.send(Err(status)).await.ok();
    }

    /// Whether the frontend has closed the stream.
    pub fn is_closed(&self) -> bool {
        self.replies.is_closed()
    }

    pub async fn closed(&self) {
        soon(self.replies.closed()).await;
    }

    /// Reports that the prefill has begun, and that the decode worker has the prompt's KV.
    pub async fn begin(&self, cached_tokens: Option<u32>) {
        self.send(scheduled(cached_tokens)).await;
        self.start().await;
    }

    /// Like [`Call::begin`], but announces that the cached tokens are reported later.
    pub async fn begin_uncounted(&self) {
        let scheduled = Scheduled { reported_later: true, ..Scheduled::default() };
        self.send(generate_reply::Message::Scheduled(scheduled)).await;
        self.start().await;
    }

    async fn start(&self) {
        let started = DecodeStarted { queue_ms: 1.5, kv_transfer_ms: 2.5, kv_transfer_bytes: 4096 };
        self.send(generate_reply::Message::DecodeStarted(started)).await;
    }

    /// Sends a whole answer, in which every sample has `text` and ends at its limit of tokens.
    pub async fn answer(self, cached_tokens: Option<u32>, text: &str) {
        self.begin(cached_tokens).await;
        for sample in 0..self.request.samples {
            self.send(tokens(sample, text.as_bytes())).await;
            self.send(finished(sample, FinishReason::Length, None)).await;
        }
    }
}

pub fn scheduled(cached_tokens: Option<u32>) -> generate_reply::Message {
    let cached_tokens_by_tier = cached_tokens.map(|tokens| ("device".to_owned(), tokens)).into_iter().collect();
    generate_reply::Message::Scheduled(Scheduled { cached_tokens, cached_tokens_by_tier, reported_later: false })
}

/// Returns a message with one token for each byte, as in the simulator's vocabulary.
pub fn tokens(sample: u32, bytes: &[u8]) -> generate_reply::Message {
    let token = |byte: &u8| Token { token: (*byte).into(), logprob: None, top: Vec::new() };
    generate_reply::Message::Tokens(Tokens { sample, tokens: bytes.iter().map(token).collect() })
}

/// Returns one token for each byte, each with a logprob of -0.5 and the alternative `z` with a logprob of -1.5.
pub fn likely(bytes: &[u8]) -> Vec<Token> {
    use tandem_proto::v1::TokenLogprob;
    let token = |byte: &u8| Token {
        token: (*byte).into(),
        logprob: Some(-0.5),
        top: vec![TokenLogprob { token: (*byte).into(), logprob: -0.5 }, TokenLogprob { token: b'z'.into(), logprob: -1.5 }],
    };
    bytes.iter().map(token).collect()
}

pub fn prompt_logprobs(tokens: Vec<Token>) -> generate_reply::Message {
    generate_reply::Message::PromptLogprobs(PromptLogprobs { tokens })
}

pub fn finished(sample: u32, reason: FinishReason, stop_token: Option<u32>) -> generate_reply::Message {
    generate_reply::Message::Finished(Finished { sample, reason: reason.into(), stop_token, stop_logprobs: None })
}

pub fn failure(reason: FailureReason, instance_id: &str) -> Failure {
    let message = "because of the test".to_owned();
    Failure { reason: reason.into(), message, instance_id: instance_id.to_owned(), retry_after_ms: 0 }
}

pub fn chat(options: Value) -> Value {
    merged(json!({ "model": "m", "messages": [{ "role": "user", "content": "Hi" }] }), options)
}

pub fn completion(prompt: Value, options: Value) -> Value {
    merged(json!({ "model": "m", "prompt": prompt }), options)
}

pub const CHAT: &str = "/v1/chat/completions";
pub const COMPLETIONS: &str = "/v1/completions";
