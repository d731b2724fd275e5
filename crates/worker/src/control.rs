//! The `Control` service: describes a worker, and streams its KV events and load.

use crate::{Backend, CacheWatch, Disconnected, Replies, ReplySender, Worker, WorkerMetrics};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tandem_kv::{KvBatch, Load};
use tandem_process::{
    LogLimit,
    events::{Broker, unix_us},
};
use tandem_proto::{
    event_batch, snapshot_chunks,
    v1::{
        DescribeRequest, DrainReply, DrainRequest, FailureReason, Loras, SnapshotChunk, SnapshotRequest, WatchReply,
        WatchRequest, WorkerInfo, control_server::Control, watch_reply,
    },
};
use tokio::{sync::broadcast::error::RecvError, time::Instant};
use tonic::{Request, Response, Status};

/// The longest time between two messages on a `Watch` stream. Each message carries the last event's id and the load, so the router notices
/// when the last batch was lost or the worker is unreachable.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The shortest time between two messages without events: routers need not know the load after each step of a few milliseconds.
const LOAD_INTERVAL: Duration = Duration::from_millis(100);

/// A worker that has become idle reports its load after this time, so that the next request is placed by the current load.
const IDLE_INTERVAL: Duration = Duration::from_millis(10);

/// The `Control` service of one worker.
pub(crate) struct ControlService {
    worker: Worker,
    /// The reason for which a router last refused this worker.
    refusal: Mutex<String>,
    refusals: LogLimit,
}

/// The maximum length in bytes of a refusal's reason in the log. The rest of a longer reason is cut off.
const REFUSAL_MAX: usize = 1_000;

#[tonic::async_trait]
impl Control for ControlService {
    async fn describe(&self, request: Request<DescribeRequest>) -> Result<Response<WorkerInfo>, Status> {
        self.log_refusal(request.into_inner().refusal);
        Ok(Response::new(self.worker.description()))
    }

    type WatchStream = Replies<WatchReply>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let WatchRequest { instance_id, events_over_nats } = request.into_inner();
        self.admit(&instance_id)?;
        let Worker { first_loras, backend, metrics, shutdown, settings, .. } = self.worker.clone();
        let broker = settings.broker.clone().filter(|_| events_over_nats);
        let replies = self.worker.requests.start_background(|replies| async move {
            let watcher = LoadWatcher {
                instance_id,
                backend: Arc::clone(&backend),
                first_loras,
                metrics,
                replies,
                broker,
                without_snapshot: events_over_nats,
            };
            let error = tokio::select! {
                // The branches are polled in this order, because a hung engine does not answer `watch`. While the engine hangs, every new
                // stream ends with the error of `engine_hung`, so the router places no requests on this worker.
                biased;
                () = shutdown.draining() => draining(),
                () = backend.hung() => engine_hung(),
                ended = async { watcher.run(backend.watch().await).await } => ended?,
            };
            watcher.replies.fail(error).await
        });
        Ok(Response::new(replies))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        let DrainRequest { instance_id } = request.into_inner();
        if instance_id == self.worker.info.instance_id && self.worker.shutdown.is_draining() {
            return Ok(Response::new(DrainReply {}));
        }
        self.admit(&instance_id)?;
        let Some(drain) = &self.worker.settings.drain else {
            // `tandem up` always has a key.
            return Err(Status::failed_precondition(match &*self.worker.info.key_fingerprint {
                "" => {
                    "the worker listens on an address that other machines reach, and has neither a cluster key nor a certificate, so that any \
                     caller could end it; set --cluster-key-file, or stop its process with SIGTERM"
                }
                _ => "the worker is a part of a process with others, such as `tandem up`; stop this process instead",
            }));
        };
        tracing::info!("the worker is asked to drain");
        drain.notify_one();
        Ok(Response::new(DrainReply {}))
    }

    type SnapshotStream = Replies<SnapshotChunk>;

    async fn snapshot(&self, request: Request<SnapshotRequest>) -> Result<Response<Self::SnapshotStream>, Status> {
        let SnapshotRequest { instance_id } = request.into_inner();
        self.admit(&instance_id)?;
        let backend = self.worker.backend.clone();
        let replies = self.worker.requests.start_background(|replies| async move {
            let watch = tokio::select! {
                biased;
                () = backend.hung() => return replies.fail(engine_hung()).await,
                watch = backend.watch() => watch,
            };
            let Some(CacheWatch { snapshot, .. }) = watch else { return replies.fail(engine_ended()).await };
            for chunk in snapshot_chunks(&instance_id, &snapshot) {
                replies.send(chunk).await?;
            }
            Ok(())
        });
        Ok(Response::new(replies))
    }
}

impl ControlService {
    pub(crate) fn new(worker: Worker) -> Self {
        Self { worker, refusal: Mutex::default(), refusals: LogLimit::default() }
    }

    /// Logs each new reason for which a router does not let this worker join.
    fn log_refusal(&self, reason: String) {
        let reason = &reason[..reason.floor_char_boundary(REFUSAL_MAX)];
        let mut last = self.refusal.lock();
        if !reason.is_empty() && *last != reason && self.refusals.admit().is_some() {
            tracing::warn!(reason, "a router refuses this worker, which therefore gets no requests");
            reason.clone_into(&mut last);
        }
    }

    fn admit(&self, instance_id: &str) -> Result<(), Status> {
        if instance_id != self.worker.info.instance_id {
            return Err(Status::failed_precondition("the worker has restarted as another instance; call Describe again"));
        }
        if self.worker.shutdown.is_draining() { Err(draining()) } else { Ok(()) }
    }
}

fn draining() -> Status {
    FailureReason::Draining.refusal("the worker is draining")
}

fn engine_hung() -> Status {
    Status::unavailable("the engine hangs")
}

fn engine_ended() -> Status {
    Status::unavailable("the engine has ended")
}

struct LoadWatcher {
    instance_id: String,
    backend: Arc<dyn Backend>,
    /// The LoRAs of the instance when it started. The client may have read any later list.
    first_loras: Arc<[String]>,
    metrics: Arc<WorkerMetrics>,
    replies: ReplySender<WatchReply>,
    /// The broker over which the client receives the events while the broker is connected; `None` if the stream carries all events.
    broker: Option<Broker>,
    without_snapshot: bool,
}

impl LoadWatcher {
    /// Sends the snapshot and all later events, until they cannot be sent without a gap. Returns the error with which the stream ends.
    async fn run(&self, watch: Option<CacheWatch>) -> Result<Status, Disconnected> {
        let Some(CacheWatch { snapshot, load, mut batches }) = watch else { return Ok(engine_ended()) };
        let above = snapshot.at_event_id;
        if !self.without_snapshot {
            for chunk in snapshot_chunks(&self.instance_id, &snapshot) {
                self.replies.send(WatchReply { message: Some(watch_reply::Message::Snapshot(chunk)) }).await?;
            }
        }
        drop(snapshot);
        // The content of the next heartbeat: the newest load and event id. Events and request ids are not repeated in a heartbeat.
        let mut newest = KvBatch { last_event_id: above, load, ..Default::default() };
        let mut sent = self.send(&newest, above).await?;
        let mut loras = Arc::clone(&self.first_loras);
        loop {
            let wait = match (is_idle(&newest.load), is_idle(&sent.load)) {
                _ if newest.load == sent.load => HEARTBEAT,
                (true, false) => IDLE_INTERVAL,
                _ => LOAD_INTERVAL,
            };
            tokio::select! {
                biased;
                () = self.backend.loras_changed(&loras) => {
                    loras = self.backend.loras();
                    let message = watch_reply::Message::Loras(Loras { names: loras.to_vec() });
                    self.replies.send(WatchReply { message: Some(message) }).await?;
                }
                () = tokio::time::sleep_until(sent.at + wait) => sent = self.send(&newest, above).await?,
                batch = batches.recv() => match batch {
                    Ok(batch) => {
                        newest.last_event_id = batch.last_event_id.max(above);
                        newest.load = batch.load.clone();
                        let has_events = !self.is_published() && batch.events.last().is_some_and(|last| last.event_id > above);
                        if has_events || !batch.included_request_ids.is_empty() {
                            sent = self.send(&batch, above).await?;
                        }
                    }
                    Err(RecvError::Lagged(_)) => {
                        let reason = "the client reads the Watch stream too slowly and has missed events; call Watch again";
                        return Ok(Status::data_loss(reason));
                    }
                    Err(RecvError::Closed) => return Ok(engine_ended()),
                },
            }
        }
    }

    fn is_published(&self) -> bool {
        self.broker.as_ref().is_some_and(Broker::is_connected)
    }

    async fn send(&self, batch: &KvBatch, above: u64) -> Result<SentLoad, Disconnected> {
        let mut message = event_batch(&self.instance_id, batch, above);
        message.sent_unix_us = unix_us();
        if self.is_published() {
            message.events.clear();
        }
        if let Some(load) = &mut message.load {
            self.metrics.add_to(load);
        }
        self.replies.send(WatchReply { message: Some(watch_reply::Message::Batch(message)) }).await?;
        Ok(SentLoad { at: Instant::now(), load: batch.load.clone() })
    }
}

fn is_idle(load: &Load) -> bool {
    load.running_sequences == 0 && load.waiting_requests == 0
}

struct SentLoad {
    at: Instant,
    load: Load,
}

#[cfg(test)]
mod tests;
