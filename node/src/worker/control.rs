//! `Control`: what a worker is, and every change of its cache to everybody who watches.

use super::{ClientGone, Replies, ReplySender, Requests, WorkerMetrics};
use crate::{
    Shutdown,
    events::{Broker, unix_us},
};
use futures::future::BoxFuture;
use std::{sync::Arc, time::Duration};
use tandem_kv::{KvBatch, Load, Snapshot};
use tandem_proto::{
    event_batch, snapshot_chunks,
    v1::{
        DescribeRequest, SnapshotChunk, SnapshotRequest, WatchReply, WatchRequest, WorkerInfo, control_server::Control,
        control_server::ControlServer, watch_reply,
    },
};
use tokio::{
    sync::broadcast::{self, error::RecvError},
    time::Instant,
};
use tonic::{Request, Response, Status};

/// At least this often a watcher hears the last event's id and the load, so that a lost last batch and a dead worker are noticed.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// A load alone is told this often at most: steps take milliseconds, and a router's choice does not change with each.
const LOAD_INTERVAL: Duration = Duration::from_millis(100);

/// A cache at one moment, and all that happens to it afterwards.
pub struct Watched {
    /// The cache.
    pub snapshot: Snapshot,
    /// The load.
    pub load: Load,
    /// Every batch since. Events with ids up to the snapshot's are in the snapshot.
    pub batches: broadcast::Receiver<Arc<KvBatch>>,
}

/// What an engine shows of itself.
#[derive(Clone)]
pub struct Watch {
    /// Where watchers get the cache from; `None` when the engine is gone.
    pub start: Arc<dyn Fn() -> BoxFuture<'static, Option<Watched>> + Send + Sync>,
    /// Resolves when the engine hangs, at once if it does so now.
    pub hung: Arc<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>,
}

/// The service; one value a worker.
pub struct ControlService {
    info: WorkerInfo,
    watch: Watch,
    metrics: Arc<WorkerMetrics>,
    shutdown: Shutdown,
    requests: Requests,
    broker: Option<Broker>,
}

impl ControlService {
    /// A worker that says `info` about itself, and publishes events at the broker if there is one (see [`Broker::publish_all`]).
    pub fn new(
        info: WorkerInfo,
        watch: Watch,
        metrics: Arc<WorkerMetrics>,
        requests: Requests,
        shutdown: Shutdown,
        broker: Option<Broker>,
    ) -> Self {
        Self { info, watch, metrics, shutdown, requests, broker }
    }

    /// For a gRPC server.
    pub fn into_server(self) -> ControlServer<Self> {
        ControlServer::new(self)
    }
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<WorkerInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    type WatchStream = Replies<WatchReply>;

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let WatchRequest { instance_id, events_over_nats } = request.into_inner();
        self.admit(&instance_id)?;
        let (shutdown, broker) = (self.shutdown.clone(), self.broker.clone().filter(|_| events_over_nats));
        let (watched, hung, metrics) = ((self.watch.start)(), (self.watch.hung)(), self.metrics.clone());
        let replies = self.requests.start_background(|replies| async move {
            let watcher = Watcher { instance_id, metrics, replies, broker };
            let error = tokio::select! {
                // An engine that hangs is not even asked.
                biased;
                () = shutdown.draining() => draining(),
                // Not routed to until it moves: who asks again hears this again.
                () = hung => engine_hangs(),
                ended = async { watcher.run(watched.await, events_over_nats).await } => ended?,
            };
            watcher.replies.fail(error).await
        });
        Ok(Response::new(replies))
    }

    type SnapshotStream = Replies<SnapshotChunk>;

    async fn snapshot(&self, request: Request<SnapshotRequest>) -> Result<Response<Self::SnapshotStream>, Status> {
        let SnapshotRequest { instance_id } = request.into_inner();
        self.admit(&instance_id)?;
        let (watched, hung) = ((self.watch.start)(), (self.watch.hung)());
        let replies = self.requests.start_background(|replies| async move {
            let watched = tokio::select! {
                biased;
                () = hung => return replies.fail(engine_hangs()).await,
                watched = watched => watched,
            };
            let Some(Watched { snapshot, .. }) = watched else { return replies.fail(engine_gone()).await };
            for chunk in snapshot_chunks(&instance_id, &snapshot) {
                replies.send(chunk).await?;
            }
            Ok(())
        });
        Ok(Response::new(replies))
    }
}

impl ControlService {
    fn admit(&self, instance_id: &str) -> Result<(), Status> {
        if instance_id != self.info.instance_id {
            return Err(Status::failed_precondition("this worker was started anew; describe it again"));
        }
        if self.requests.is_draining() { Err(draining()) } else { Ok(()) }
    }
}

fn draining() -> Status {
    Status::unavailable("the worker is leaving")
}

fn engine_hangs() -> Status {
    Status::unavailable("the engine hangs")
}

fn engine_gone() -> Status {
    Status::unavailable("the engine is gone")
}

struct Watcher {
    instance_id: String,
    metrics: Arc<WorkerMetrics>,
    replies: ReplySender<WatchReply>,
    /// Where the client hears of events, too.
    broker: Option<Broker>,
}

impl Watcher {
    /// Tells everything until it cannot be told without a gap; says why then.
    async fn run(&self, watched: Option<Watched>, without_snapshot: bool) -> Result<Status, ClientGone> {
        let Some(Watched { snapshot, load, mut batches }) = watched else { return Ok(engine_gone()) };
        let above = snapshot.at_event_id;
        if !without_snapshot {
            for chunk in snapshot_chunks(&self.instance_id, &snapshot) {
                self.replies.send(WatchReply { message: Some(watch_reply::Message::Snapshot(chunk)) }).await?;
            }
        }
        drop(snapshot);
        // What a heartbeat says: the newest state without what is told once.
        let mut newest = KvBatch { last_event_id: above, load, ..Default::default() };
        let mut told = self.tell(&newest, above).await?;
        loop {
            let wait = if newest.load == told.load { HEARTBEAT } else { LOAD_INTERVAL };
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(told.at + wait) => told = self.tell(&newest, above).await?,
                batch = batches.recv() => match batch {
                    Ok(batch) => {
                        newest.last_event_id = batch.last_event_id.max(above);
                        newest.load = batch.load.clone();
                        let has_news = !self.is_published() && batch.events.last().is_some_and(|last| last.event_id > above);
                        if has_news || !batch.included_request_ids.is_empty() {
                            told = self.tell(&batch, above).await?;
                        }
                    }
                    Err(RecvError::Lagged(_)) => return Ok(Status::data_loss("the watcher is too slow; watch again")),
                    Err(RecvError::Closed) => return Ok(engine_gone()),
                },
            }
        }
    }

    /// Whether the client hears of events by another way now.
    fn is_published(&self) -> bool {
        self.broker.as_ref().is_some_and(Broker::is_connected)
    }

    async fn tell(&self, batch: &KvBatch, above: u64) -> Result<Told, ClientGone> {
        let mut message = event_batch(&self.instance_id, batch, above);
        message.sent_unix_us = unix_us();
        if self.is_published() {
            message.events.clear();
        }
        if let Some(load) = &mut message.load {
            load.transfer_bytes_per_second = self.metrics.transfer_bytes_per_second();
            load.cache = Some(self.metrics.cache_totals());
            load.steps = Some(self.metrics.step_totals());
        }
        self.replies.send(WatchReply { message: Some(watch_reply::Message::Batch(message)) }).await?;
        Ok(Told { at: Instant::now(), load: batch.load.clone() })
    }
}

struct Told {
    at: Instant,
    load: Load,
}

#[cfg(test)]
mod tests;
