use super::*;
use crate::{Backend, Job, KvExchange, Ledger, Requests, WorkerSettings};
use futures::StreamExt;
use parking_lot::Mutex;
use tandem_engine::{EngineInfo, Generate, Prefill, Refusal};
use tandem_kv::{Change, KvEvent, SequenceHash, Snapshot, StoredChain};
use tandem_process::{Metrics, Shutdown};
use tandem_proto::{CHUNK_HASHES_MAX, SnapshotAssembly, v1};
use tokio::sync::{broadcast, watch};
use tonic::Code;

struct Scripted {
    batches: Mutex<Option<broadcast::Sender<Arc<KvBatch>>>>,
    snapshot: Mutex<Snapshot>,
    hangs: watch::Sender<bool>,
    loras: watch::Sender<Arc<[String]>>,
}

#[tonic::async_trait]
impl Backend for Scripted {
    fn info(&self) -> &EngineInfo {
        unreachable!("the worker's info is made by the test")
    }

    async fn prefill(&self, _: Prefill) -> Result<Box<dyn Job>, Refusal> {
        Err(Refusal::Gone)
    }

    async fn generate(&self, _: Generate) -> Result<Box<dyn Job>, Refusal> {
        Err(Refusal::Gone)
    }

    async fn watch(&self) -> Option<CacheWatch> {
        let batches = self.batches.lock().as_ref()?.subscribe();
        Some(CacheWatch { snapshot: self.snapshot.lock().clone(), load: Load::default(), batches })
    }

    async fn hung(&self) {
        drop(self.hangs.subscribe().wait_for(|hangs| *hangs).await);
    }

    fn kv_exchange(&self) -> KvExchange<'_> {
        KvExchange::None
    }

    fn loras(&self) -> Arc<[String]> {
        self.loras.borrow().clone()
    }

    async fn loras_changed(&self, known: &Arc<[String]>) {
        drop(self.loras.subscribe().wait_for(|now| !Arc::ptr_eq(now, known)).await);
    }
}

struct Watched {
    service: ControlService,
    backend: Arc<Scripted>,
    metrics: Arc<WorkerMetrics>,
    shutdown: Shutdown,
}

impl Watched {
    /// Returns a worker that buffers `capacity` batches. A watcher that falls further behind loses batches.
    fn new(capacity: usize) -> Self {
        let (batches, _) = broadcast::channel(capacity);
        let snapshot = Snapshot { at_event_id: 0, stored: Vec::new() };
        let backend = Arc::new(Scripted {
            batches: Some(batches).into(),
            snapshot: snapshot.into(),
            hangs: watch::Sender::new(false),
            loras: watch::Sender::default(),
        });
        let (shutdown, registry) = (Shutdown::default(), Metrics::default());
        let metrics = Arc::new(WorkerMetrics::new(&registry, "w", 8));
        let worker = Worker {
            info: WorkerInfo { instance_id: "now".to_owned(), ..Default::default() }.into(),
            first_loras: backend.loras(),
            backend: backend.clone(),
            metrics: metrics.clone(),
            requests: Requests::new(shutdown.clone()),
            ledger: Ledger::default().of("w", &registry),
            shutdown: shutdown.clone(),
            settings: Arc::new(WorkerSettings::default()),
        };
        Self { service: ControlService::new(worker), backend, metrics, shutdown }
    }

    async fn watch(&self) -> Replies<WatchReply> {
        let request = WatchRequest { instance_id: "now".to_owned(), events_over_nats: false };
        self.service.watch(Request::new(request)).await.expect("the request names this instance").into_inner()
    }

    /// Opens a `Watch` stream and reads the messages that come first: the snapshot and the load.
    async fn watch_batches(&self) -> Replies<WatchReply> {
        let mut replies = self.watch().await;
        assert!(matches!(next(&mut replies).await, watch_reply::Message::Snapshot(chunk) if chunk.last));
        next_batch(&mut replies).await;
        replies
    }

    fn send(&self, batch: KvBatch) {
        let batches = self.backend.batches.lock();
        batches.as_ref().expect("the engine has not ended").send(Arc::new(batch)).expect("a stream is open");
    }
}

async fn next(replies: &mut Replies<WatchReply>) -> watch_reply::Message {
    replies.next().await.expect("the stream is open").expect("the stream has no error").message.expect("messages are not empty")
}

async fn next_batch(replies: &mut Replies<WatchReply>) -> v1::KvEventBatch {
    match next(replies).await {
        watch_reply::Message::Batch(batch) => batch,
        other => panic!("{other:?} was sent in place of a batch"),
    }
}

fn stored(event_id: u64) -> KvEvent {
    let chain = StoredChain { parent: None, sequence_hashes: vec![SequenceHash(event_id)] };
    KvEvent { event_id, change: Change::Stored(chain) }
}

fn events(ids: std::ops::RangeInclusive<u64>) -> KvBatch {
    KvBatch { last_event_id: *ids.end(), events: ids.map(stored).collect(), ..Default::default() }
}

fn load(running_sequences: u32) -> KvBatch {
    KvBatch { load: Load { running_sequences, ..Default::default() }, ..Default::default() }
}

fn ids(batch: &v1::KvEventBatch) -> Vec<u64> {
    batch.events.iter().map(|event| event.event_id).collect()
}

#[tokio::test(start_paused = true)]
async fn watch_stream_fails_while_the_engine_hangs() {
    let worker = Watched::new(8);
    let mut replies = worker.watch_batches().await;
    worker.backend.hangs.send_replace(true);
    let ended = replies.next().await.expect("an error ends the stream").expect_err("the stream ends");
    assert_eq!((ended.code(), ended.message()), (Code::Unavailable, "the engine hangs"));
    let mut again = worker.watch().await;
    again.next().await.expect("an error ends the stream").expect_err("the second stream ends at once");
    worker.backend.hangs.send_replace(false);
    worker.watch_batches().await;
}

#[tokio::test(start_paused = true)]
async fn snapshot_is_sent_first_and_the_events_that_it_includes_are_not_sent_again() {
    let worker = Watched::new(16);
    let chain = StoredChain { parent: None, sequence_hashes: (0..2 * CHUNK_HASHES_MAX as u64 + 1).map(SequenceHash).collect() };
    *worker.backend.snapshot.lock() = Snapshot { at_event_id: 5, stored: vec![chain] };
    let mut replies = worker.watch().await;
    tokio::task::yield_now().await;
    worker.send(events(4..=5));
    worker.send(events(5..=7));

    let mut assembly = SnapshotAssembly::new(usize::MAX);
    let mut chunks = 0;
    let snapshot = loop {
        let watch_reply::Message::Snapshot(chunk) = next(&mut replies).await else { panic!("the snapshot is not complete") };
        chunks += 1;
        if let Some(snapshot) = assembly.push(chunk).expect("the assembly accepts the chunk") {
            break snapshot;
        }
    };
    assert_eq!((chunks, snapshot.at_event_id), (3, 5));
    let first = next_batch(&mut replies).await;
    assert_eq!((first.last_event_id, ids(&first)), (5, vec![]), "a load follows the snapshot immediately");
    let second = next_batch(&mut replies).await;
    assert_eq!((second.last_event_id, ids(&second)), (7, vec![6, 7]));
}

#[tokio::test(start_paused = true)]
async fn events_are_sent_immediately_and_a_load_without_events_is_delayed() {
    let worker = Watched::new(16);
    let mut replies = worker.watch_batches().await;
    let started = Instant::now();
    worker.send(events(1..=2));
    assert_eq!(ids(&next_batch(&mut replies).await), [1, 2]);
    worker.send(KvBatch { included_request_ids: vec!["r".to_owned()], last_event_id: 2, ..Default::default() });
    assert_eq!(next_batch(&mut replies).await.load.expect("every batch has a load").included_request_ids, ["r"]);
    assert_eq!(started.elapsed(), Duration::ZERO);

    for running in 1..=5 {
        worker.send(KvBatch { last_event_id: 2, ..load(running) });
    }
    let held_back = next_batch(&mut replies).await;
    assert_eq!(started.elapsed(), LOAD_INTERVAL);
    assert_eq!((held_back.last_event_id, held_back.load.expect("every batch has a load").running_sequences), (2, 5));
}

#[tokio::test(start_paused = true)]
async fn idle_worker_sends_a_heartbeat_every_second() {
    let worker = Watched::new(16);
    let mut replies = worker.watch_batches().await;
    worker.send(events(1..=3));
    next_batch(&mut replies).await;
    worker.metrics.observe_bandwidth(500, Duration::from_secs(1));
    worker.metrics.observe_scheduled(100, tandem_engine::CachedTokens::on_device(0));
    for second in 1..=3_u32 {
        let started = Instant::now();
        let heartbeat = next_batch(&mut replies).await;
        assert_eq!(started.elapsed(), HEARTBEAT, "{second}");
        assert_eq!((heartbeat.last_event_id, ids(&heartbeat)), (3, vec![]));
        let load = heartbeat.load.expect("every batch has a load");
        assert_eq!(load.transfer_bytes_per_second, 500.0);
        let (prompts, cached_tokens) = (u64::from(second), 16 * (u64::from(second) - 1));
        let totals = v1::CacheTotals { prompts, prompts_hit: prompts - 1, prompt_tokens: 100 * prompts, cached_tokens };
        assert_eq!(load.cache, Some(totals), "the next load has the totals");
        worker.metrics.observe_scheduled(100, tandem_engine::CachedTokens::on_device(16));
    }
}

#[tokio::test(start_paused = true)]
async fn load_that_changes_in_every_step_is_sent_at_a_fixed_interval() {
    let worker = Watched::new(16);
    let mut replies = worker.watch_batches().await;
    let steps = async {
        for running in 0.. {
            worker.send(load(running));
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    };
    let received = async {
        let started = Instant::now();
        for _ in 0..10 {
            next_batch(&mut replies).await;
        }
        started.elapsed()
    };
    let elapsed = tokio::select! { () = steps => unreachable!(), elapsed = received => elapsed };
    assert!((Duration::from_millis(950)..=Duration::from_millis(1_100)).contains(&elapsed), "{elapsed:?}");
}

#[tokio::test(start_paused = true)]
async fn slow_watcher_receives_data_loss_and_other_watchers_continue() {
    let worker = Watched::new(4);
    let (mut slow, mut quick) = (worker.watch_batches().await, worker.watch_batches().await);
    for id in 1..=100 {
        worker.send(events(id..=id));
        assert_eq!(ids(&next_batch(&mut quick).await), [id]);
    }
    let mut received = Vec::new();
    let error = loop {
        match slow.next().await.expect("an error ends the stream") {
            Ok(WatchReply { message: Some(watch_reply::Message::Batch(batch)) }) => received.extend(ids(&batch)),
            Ok(_) => panic!("a second snapshot was sent"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.code(), Code::DataLoss);
    assert!(
        received.len() < 100 && received.iter().zip(1..).all(|(id, expected)| *id == expected),
        "events before the error have no gap"
    );
    assert!(slow.next().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn each_watch_stream_reports_that_the_loras_have_changed() {
    let worker = Watched::new(4);
    let mut before = worker.watch_batches().await;
    let described = async || {
        let reply = worker.service.describe(Request::new(DescribeRequest::default())).await;
        reply.expect("the worker describes itself").into_inner().loras
    };
    for loras in [vec!["sql".to_owned(), "poem".to_owned()], vec!["poem".to_owned()], Vec::new()] {
        worker.backend.loras.send_replace(loras.clone().into());
        let mut later = worker.watch_batches().await;
        // A router may have called Describe at any time before, so a stream that begins later reports the change, too.
        for replies in [&mut before, &mut later] {
            let message = next(replies).await;
            assert!(matches!(&message, watch_reply::Message::Loras(now) if now.names == loras), "{loras:?}: {message:?}");
        }
        assert_eq!(described().await, loras);
        worker.send(events(1..=1));
        assert_eq!(ids(&next_batch(&mut later).await), [1], "no second message follows");
        next_batch(&mut before).await;
    }
}

#[tokio::test(start_paused = true)]
async fn watch_of_another_instance_is_refused() {
    let worker = Watched::new(4);
    let request = WatchRequest { instance_id: "before".to_owned(), events_over_nats: false };
    let error = worker.service.watch(Request::new(request)).await.expect_err("the watch of another instance is refused");
    assert_eq!(error.code(), Code::FailedPrecondition);
}

#[tokio::test(start_paused = true)]
async fn draining_worker_ends_its_watch_streams() {
    let worker = Watched::new(4);
    let mut replies = worker.watch_batches().await;
    let started = Instant::now();
    worker.shutdown.run(Duration::from_secs(30)).await;
    assert_eq!(started.elapsed(), Duration::ZERO, "no watch stream delays the drain");
    let error = replies.next().await.expect("the stream ends with an error").expect_err("the last reply is an error");
    assert_eq!(error.code(), Code::Unavailable);
    let request = WatchRequest { instance_id: "now".to_owned(), events_over_nats: false };
    let error = worker.service.watch(Request::new(request)).await.expect_err("a draining worker refuses watches");
    assert_eq!(error.code(), Code::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn watch_streams_end_when_the_engine_ends() {
    let worker = Watched::new(4);
    let mut replies = worker.watch_batches().await;
    worker.backend.batches.lock().take();
    let error = replies.next().await.expect("the stream ends with an error").expect_err("the last reply is an error");
    assert_eq!(error.code(), Code::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn watch_stream_carries_events_while_nats_is_disconnected() {
    let worker = Watched::new(16);
    let chain = StoredChain { parent: None, sequence_hashes: vec![SequenceHash(9)] };
    *worker.backend.snapshot.lock() = Snapshot { at_event_id: 5, stored: vec![chain] };
    let request = WatchRequest { instance_id: "now".to_owned(), events_over_nats: true };
    let mut replies = worker.service.watch(Request::new(request)).await.expect("the request names this instance").into_inner();
    assert_eq!(next_batch(&mut replies).await.last_event_id, 5, "a watch for events over NATS sends no snapshot");
    worker.send(events(6..=7));
    let batch = next_batch(&mut replies).await;
    assert_eq!(ids(&batch), [6, 7]);
    assert!(batch.sent_unix_us > 0);

    let snapshot =
        |instance_id: &str| worker.service.snapshot(Request::new(v1::SnapshotRequest { instance_id: instance_id.to_owned() }));
    let chunks: Vec<_> = snapshot("now").await.expect("the request names this instance").into_inner().collect().await;
    let mut assembly = SnapshotAssembly::new(usize::MAX);
    let whole = chunks
        .into_iter()
        .map(|chunk| assembly.push(chunk.expect("the assembly accepts the chunk")).expect("the chunks are in order"));
    assert_eq!(whole.last().flatten(), Some(worker.backend.snapshot.lock().clone()));
    assert_eq!(
        snapshot("before").await.expect_err("the snapshot of another instance is refused").code(),
        Code::FailedPrecondition
    );
}

#[tokio::test]
async fn each_reason_for_which_a_router_refuses_the_worker_is_logged_once_and_bounded() {
    let file = tempfile::NamedTempFile::new().expect("the system can create a temporary file");
    let writer = Arc::new(std::fs::File::create(file.path()).expect("the file is writable"));
    let log = tracing_subscriber::fmt().with_ansi(false).with_writer(writer).finish();
    let _log = tracing::subscriber::set_default(log);
    let worker = Watched::new(8);
    let long = "é".repeat(REFUSAL_MAX);
    for refusal in ["", "the block size differs", "the block size differs", "", "the block size differs", &long] {
        let request = DescribeRequest { refusal: refusal.to_owned() };
        worker.service.describe(Request::new(request)).await.expect("the worker describes itself");
    }
    let text = std::fs::read_to_string(file.path()).expect("the file exists");
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("a router refuses this worker")).collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(
        lines[0].contains("WARN") && lines[0].contains("the block size differs") && lines[1].len() < REFUSAL_MAX + 300,
        "{text}"
    );
}

#[tokio::test]
async fn refusal_to_drain_has_its_reason() {
    for (key_fingerprint, reason) in
        [("", "set --cluster-key-file"), ("aa", "a part of a process with others, such as `tandem up`")]
    {
        let mut worker = Watched::new(8);
        let info = WorkerInfo::clone(&worker.service.worker.info);
        worker.service.worker.info = WorkerInfo { key_fingerprint: key_fingerprint.to_owned(), ..info }.into();
        let request = DrainRequest { instance_id: "now".to_owned() };
        let refused = worker.service.drain(Request::new(request)).await.expect_err("the process has other parts or no key");
        assert!(refused.message().contains(reason), "{}", refused.message());
    }
}
