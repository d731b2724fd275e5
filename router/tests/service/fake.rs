//! Fake workers that send the messages which a test chooses, and a router over real sockets with a client.

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex},
    time::Duration,
};
use tandem_kv::{Change, KvBatch, KvEvent, Load, SequenceHash, Snapshot, StoredChain};
use tandem_process::{Metrics, Shutdown};
use tandem_proto::{
    channel, event_batch, snapshot_chunks,
    v1::{
        AttemptFailed, Candidate, DescribeRequest, DrainReply, DrainRequest, Failure, FailureReason, Placement, PrefillFinished,
        RoutePrompt, RouteReply, RouteRequest, SnapshotChunk, SnapshotRequest, WatchReply, WatchRequest, WorkerInfo, WorkerView,
        WorkersReply, WorkersRequest,
        control_server::{Control, ControlServer},
        route_reply, route_request,
        router_client::RouterClient,
        watch_reply,
        worker_info::Role,
    },
};
use tandem_router::{RouterError, RouterSettings};
use tokio::{
    net::TcpListener,
    sync::{
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
        oneshot,
    },
    time::{sleep, timeout},
};
use tokio_stream::{Stream, wrappers::UnboundedReceiverStream};
use tonic::{Request, Response, Status, Streaming, transport::Channel};

/// The time limit of every wait. It is longer than any wait of these tests takes on a busy machine, so only a failing test reaches it.
const TIMEOUT: Duration = Duration::from_secs(20);

pub const BLOCK: u32 = 16;

/// Returns the output of the future. Panics if the future does not end within the time limit.
pub async fn soon<T>(what: impl Future<Output = T>) -> T {
    timeout(TIMEOUT, what).await.expect("the operation ends in time")
}

/// A worker process, as the router sees it.
pub struct FakeWorker {
    pub address: String,
    info: Arc<Mutex<WorkerInfo>>,
    watches: UnboundedReceiver<FakeWatch>,
    snapshots: UnboundedReceiver<FakeSnapshot>,
    refusals: UnboundedReceiver<String>,
}

/// A router's request for a snapshot.
pub struct FakeSnapshot {
    instance_id: String,
    chunks: UnboundedSender<Result<SnapshotChunk, Status>>,
}

/// The worker's end of one `Watch` stream. Dropping it ends the stream.
pub struct FakeWatch {
    instance_id: String,
    /// Whether the router wants to receive the events over NATS.
    pub events_over_nats: bool,
    replies: UnboundedSender<Result<WatchReply, Status>>,
}

struct Service {
    info: Arc<Mutex<WorkerInfo>>,
    watches: UnboundedSender<FakeWatch>,
    snapshots: UnboundedSender<FakeSnapshot>,
    refusals: UnboundedSender<String>,
}

#[tonic::async_trait]
impl Control for Service {
    async fn describe(&self, request: Request<DescribeRequest>) -> Result<Response<WorkerInfo>, Status> {
        self.refusals.send(request.into_inner().refusal).map_err(over)?;
        Ok(Response::new(self.info.lock().expect("no test panics with the lock").clone()))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<WatchReply, Status>> + Send>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let WatchRequest { instance_id, events_over_nats } = request.into_inner();
        if instance_id != self.info.lock().expect("no test panics with the lock").instance_id {
            return Err(Status::failed_precondition("another instance"));
        }
        let (replies, stream) = unbounded_channel();
        self.watches.send(FakeWatch { instance_id, events_over_nats, replies }).map_err(over)?;
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(stream))))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        Err(Status::unimplemented("routers drain no worker"))
    }

    type SnapshotStream = Pin<Box<dyn Stream<Item = Result<SnapshotChunk, Status>> + Send>>;

    async fn snapshot(&self, request: Request<SnapshotRequest>) -> Result<Response<Self::SnapshotStream>, Status> {
        let instance_id = request.into_inner().instance_id;
        let (chunks, stream) = unbounded_channel();
        self.snapshots.send(FakeSnapshot { instance_id, chunks }).map_err(over)?;
        Ok(Response::new(Box::pin(UnboundedReceiverStream::new(stream))))
    }
}

fn over<T>(_: T) -> Status {
    Status::unavailable("the test has ended")
}

impl FakeWorker {
    pub async fn start(role: Role, worker_id: &str) -> Self {
        let info = WorkerInfo {
            role: role.into(),
            worker_id: worker_id.to_owned(),
            instance_id: format!("{worker_id}-1"),
            model: "m".to_owned(),
            revision: "r".to_owned(),
            block_size: BLOCK,
            capacity_blocks: 100_000,
            block_bytes: 1_000,
            ..Default::default()
        };
        let (info, (watches, received), (snapshots, asked), (refusals, refused)) =
            (Arc::new(Mutex::new(info)), unbounded_channel(), unbounded_channel(), unbounded_channel());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("the listener is bound").to_string();
        let service = ControlServer::new(Service { info: info.clone(), watches, snapshots, refusals });
        tokio::spawn(channel::server().add_service(service).serve_with_incoming(channel::incoming(listener)));
        Self { address, info, watches: received, snapshots: asked, refusals: refused }
    }

    pub fn describe_as(&self, change: impl FnOnce(&mut WorkerInfo)) {
        change(&mut self.info.lock().expect("no test panics with the lock"));
    }

    /// Returns the router's next `Watch` stream.
    pub async fn watched(&mut self) -> FakeWatch {
        soon(self.watches.recv()).await.expect("the server runs")
    }

    /// Returns the next reason for which the router refuses the worker.
    pub async fn refused(&mut self) -> String {
        loop {
            let reason = soon(self.refusals.recv()).await.expect("the server runs");
            if !reason.is_empty() {
                return reason;
            }
        }
    }

    pub async fn snapshot_requested(&mut self) -> FakeSnapshot {
        soon(self.snapshots.recv()).await.expect("the server runs")
    }

    /// Accepts the router's next `Watch` stream and sends an empty snapshot on it, so that the worker joins.
    pub async fn join(&mut self) -> FakeWatch {
        let watch = self.watched().await;
        watch.snapshot(0, &[]);
        watch
    }
}

impl FakeSnapshot {
    /// Sends a snapshot with one chain of blocks, which begins a prompt.
    pub fn answer(self, at_event_id: u64, hashes: &[u64]) {
        for chunk in root_chain(&self.instance_id, at_event_id, hashes) {
            self.chunks.send(Ok(chunk)).expect("the router listens");
        }
    }
}

fn root_chain(instance_id: &str, at_event_id: u64, hashes: &[u64]) -> Vec<SnapshotChunk> {
    let stored = if hashes.is_empty() { vec![] } else { vec![chain(None, hashes)] };
    snapshot_chunks(instance_id, &Snapshot { at_event_id, stored })
}

impl FakeWatch {
    pub fn send(&self, message: watch_reply::Message) {
        self.replies.send(Ok(WatchReply { message: Some(message) })).expect("the router listens");
    }

    pub fn fail(self, status: Status) {
        self.replies.send(Err(status)).expect("the router listens");
    }

    /// Sends a snapshot with one chain of blocks, which begins a prompt.
    pub fn snapshot(&self, at_event_id: u64, hashes: &[u64]) {
        for chunk in root_chain(&self.instance_id, at_event_id, hashes) {
            self.send(watch_reply::Message::Snapshot(chunk));
        }
    }

    pub fn events(&self, first: u64, changes: Vec<Change>) {
        let events: Vec<KvEvent> = (first..).zip(changes).map(|(event_id, change)| KvEvent { event_id, change }).collect();
        let last_event_id = first + events.len() as u64 - 1;
        self.batch(KvBatch { last_event_id, events, ..Default::default() });
    }

    /// Sends a heartbeat without events. `last_event_id` is the id of the worker's last event.
    pub fn heartbeat(&self, last_event_id: u64, load: Load, included_request_ids: &[&str]) {
        let included_request_ids = included_request_ids.iter().map(|id| (*id).to_owned()).collect();
        self.batch(KvBatch { last_event_id, load, included_request_ids, ..Default::default() });
    }

    fn batch(&self, batch: KvBatch) {
        self.send(watch_reply::Message::Batch(event_batch(&self.instance_id, &batch, 0)));
    }

    /// Waits until the router has closed this stream.
    pub async fn abandoned(&self) {
        soon(self.replies.closed()).await;
    }
}

pub fn hashes(numbers: &[u64]) -> Vec<SequenceHash> {
    numbers.iter().copied().map(SequenceHash).collect()
}

pub fn chain(parent: Option<u64>, numbers: &[u64]) -> StoredChain {
    StoredChain { parent: parent.map(SequenceHash), sequence_hashes: hashes(numbers) }
}

pub fn stored(parent: Option<u64>, numbers: &[u64]) -> Change {
    Change::Stored(chain(parent, numbers))
}

pub struct TestRouter {
    pub client: RouterClient<Channel>,
    pub metrics: Metrics,
    pub shutdown: Shutdown,
    pub ended: oneshot::Receiver<Result<(), RouterError>>,
    pub address: SocketAddr,
}

impl TestRouter {
    pub async fn start(workers: &[&FakeWorker], settings: RouterSettings) -> Self {
        Self::start_at(Self::listener().await, workers, settings).await
    }

    pub async fn start_at(listener: TcpListener, workers: &[&FakeWorker], settings: RouterSettings) -> Self {
        let workers = workers.iter().map(|worker| worker.address.clone()).collect();
        Self::start_on(listener, RouterSettings { workers, ..settings }).await
    }

    pub async fn start_with(settings: RouterSettings) -> Self {
        Self::start_on(Self::listener().await, settings).await
    }

    async fn listener() -> TcpListener {
        TcpListener::bind("127.0.0.1:0").await.expect("a port is free")
    }

    async fn start_on(listener: TcpListener, settings: RouterSettings) -> Self {
        let address = listener.local_addr().expect("the listener is bound");
        let (metrics, shutdown) = (Metrics::default(), Shutdown::default());
        let settings = RouterSettings { seed: 4, ..settings };
        let (tell, ended) = oneshot::channel();
        let running = tandem_router::run(listener, settings, metrics.clone(), shutdown.clone());
        shutdown.spawn(async move { drop(tell.send(running.await)) });
        let client = RouterClient::new(Self::connect(address).await);
        Self { client, metrics, shutdown, ended, address }
    }

    pub async fn connect(address: SocketAddr) -> Channel {
        channel::endpoint(&address.to_string()).expect("the address is valid").connect().await.expect("the router listens")
    }

    pub async fn view(&self) -> WorkersReply {
        self.client.clone().workers(WorkersRequest {}).await.expect("the router always answers").into_inner()
    }

    /// Waits until the router's view of its workers satisfies the condition. Returns this view.
    pub async fn until(&self, done: impl Fn(&WorkersReply) -> bool) -> WorkersReply {
        let reached = timeout(TIMEOUT, async {
            loop {
                let view = self.view().await;
                if done(&view) {
                    return view;
                }
                sleep(Duration::from_millis(1)).await;
            }
        });
        match reached.await {
            Ok(view) => view,
            Err(_) => panic!("the view did not change in time: {:?}", self.view().await),
        }
    }

    /// Waits until the worker is a member and this many of its blocks are in the index.
    pub async fn until_indexed(&self, worker_id: &str, blocks: u64) {
        self.until(|view| worker(view, worker_id).is_some_and(|worker| worker.indexed_blocks == blocks)).await;
    }

    pub async fn until_left(&self, worker_id: &str) {
        self.until(|view| worker(view, worker_id).is_none()).await;
    }

    pub fn metric(&self, series: &str) -> Option<f64> {
        let text = self.metrics.render();
        text.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
    }

    /// Opens a `Route` stream and sends these messages on it.
    pub async fn open(&self, messages: Vec<route_request::Message>) -> Result<Route, Status> {
        let (requests, stream) = unbounded_channel();
        for message in messages {
            requests.send(RouteRequest { message: Some(message) }).expect("the stream is open");
        }
        let replies = self.client.clone().route(UnboundedReceiverStream::new(stream)).await?.into_inner();
        Ok(Route { requests, replies })
    }

    pub async fn route(&self, prompt: RoutePrompt) -> Route {
        self.open(vec![route_request::Message::Prompt(prompt)]).await.expect("the prompt is well-formed")
    }
}

pub fn worker<'a>(view: &'a WorkersReply, worker_id: &str) -> Option<&'a WorkerView> {
    view.workers.iter().find(|worker| worker.info.as_ref().is_some_and(|info| info.worker_id == worker_id))
}

/// A frontend's `Route` stream, which holds a booking.
pub struct Route {
    pub requests: UnboundedSender<RouteRequest>,
    replies: Streaming<RouteReply>,
}

impl Route {
    pub async fn reply(&mut self) -> Result<Option<RouteReply>, Status> {
        soon(self.replies.message()).await
    }

    pub async fn placement(&mut self) -> Placement {
        match self.reply().await.expect("the stream has no error").expect("the stream has a reply").message {
            Some(route_reply::Message::Placement(placement)) => placement,
            other => panic!("expected a placement, got {other:?}"),
        }
    }

    pub async fn draining(&mut self) {
        let reply = self.reply().await.expect("the stream has no error").expect("the stream has a reply").message;
        assert!(matches!(reply, Some(route_reply::Message::Draining(_))), "{reply:?}");
    }

    pub async fn failure(&mut self) -> Failure {
        match self.reply().await.expect("the stream has no error").expect("the stream has a reply").message {
            Some(route_reply::Message::Failure(failure)) => failure,
            other => panic!("expected a failure, got {other:?}"),
        }
    }

    /// Sends the message, after one of a kind that only a later version's frontend sends, and that the router skips.
    pub fn send(&self, message: route_request::Message) {
        for message in [None, Some(message)] {
            self.requests.send(RouteRequest { message }).expect("the stream is open");
        }
    }

    pub fn failed(&self, instance_id: &str) {
        let failed =
            AttemptFailed { instance_id: instance_id.to_owned(), reason: FailureReason::PrefillLost.into(), generated_tokens: 0 };
        self.send(route_request::Message::Failed(failed));
    }

    pub fn prefill_finished(&self, cached_tokens: Option<u32>) {
        self.send(route_request::Message::PrefillFinished(PrefillFinished { cached_tokens }));
    }
}

/// Returns a prompt that has a full block for each of `numbers`, and one more token.
pub fn prompt(request_id: &str, numbers: &[u64]) -> RoutePrompt {
    RoutePrompt {
        request_id: request_id.to_owned(),
        model: "m".to_owned(),
        sequence_hashes: numbers.to_vec(),
        prompt_tokens: numbers.len() as u32 * BLOCK + 1,
        samples: 1,
        ..Default::default()
    }
}

/// Returns the candidate's instance id, overlap blocks and predicted blocks.
pub fn chosen(candidate: Option<Candidate>) -> Option<(String, u32, u32)> {
    let candidate = candidate?;
    Some((candidate.worker?.instance_id, candidate.overlap_blocks, candidate.predicted_blocks))
}
