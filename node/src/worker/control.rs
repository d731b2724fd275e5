//! `Control`: what a worker is, and every change of its cache to everybody who watches.

use super::{ClientGone, Replies, ReplySender, Requests, WorkerMetrics};
use crate::Shutdown;
use futures::future::BoxFuture;
use std::{sync::Arc, time::Duration};
use tandem_kv::{KvBatch, Load, Snapshot};
use tandem_proto::{
    event_batch, snapshot_chunks,
    v1::{
        DescribeRequest, WatchReply, WatchRequest, WorkerInfo, control_server::Control, control_server::ControlServer,
        watch_reply,
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

/// Where watchers get the cache from; `None` when the engine is gone.
pub type Watch = Arc<dyn Fn() -> BoxFuture<'static, Option<Watched>> + Send + Sync>;

/// The service; one value a worker.
pub struct ControlService {
    info: WorkerInfo,
    watch: Watch,
    metrics: Arc<WorkerMetrics>,
    shutdown: Shutdown,
    requests: Requests,
}

impl ControlService {
    /// A worker that says `info` about itself.
    pub fn new(info: WorkerInfo, watch: Watch, metrics: Arc<WorkerMetrics>, requests: Requests, shutdown: Shutdown) -> Self {
        Self { info, watch, metrics, shutdown, requests }
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
        if request.get_ref().instance_id != self.info.instance_id {
            return Err(Status::failed_precondition("this worker was started anew; describe it again"));
        }
        if self.requests.is_draining() {
            return Err(draining());
        }
        let (shutdown, instance_id) = (self.shutdown.clone(), self.info.instance_id.clone());
        let (watched, metrics) = ((self.watch)(), self.metrics.clone());
        let replies = self.requests.start_background(|replies| async move {
            let watcher = Watcher { instance_id, metrics, replies };
            let error = tokio::select! {
                () = shutdown.draining() => draining(),
                ended = async { watcher.run(watched.await).await } => ended?,
            };
            watcher.replies.fail(error).await
        });
        Ok(Response::new(replies))
    }
}

fn draining() -> Status {
    Status::unavailable("the worker is leaving")
}

fn engine_gone() -> Status {
    Status::unavailable("the engine is gone")
}

struct Watcher {
    instance_id: String,
    metrics: Arc<WorkerMetrics>,
    replies: ReplySender<WatchReply>,
}

impl Watcher {
    /// Tells everything until it cannot be told without a gap; says why then.
    async fn run(&self, watched: Option<Watched>) -> Result<Status, ClientGone> {
        let Some(Watched { snapshot, load, mut batches }) = watched else { return Ok(engine_gone()) };
        let above = snapshot.at_event_id;
        for chunk in snapshot_chunks(&self.instance_id, &snapshot) {
            self.replies.send(WatchReply { message: Some(watch_reply::Message::Snapshot(chunk)) }).await?;
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
                        let has_news = batch.events.last().is_some_and(|last| last.event_id > above);
                        if has_news || !batch.taken_in.is_empty() {
                            told = self.tell(&batch, above).await?;
                        }
                    }
                    Err(RecvError::Lagged(_)) => return Ok(Status::data_loss("the watcher is too slow; watch again")),
                    Err(RecvError::Closed) => return Ok(engine_gone()),
                },
            }
        }
    }

    async fn tell(&self, batch: &KvBatch, above: u64) -> Result<Told, ClientGone> {
        let mut message = event_batch(&self.instance_id, batch, above);
        if let Some(load) = &mut message.load {
            load.transfer_bytes_per_second = self.metrics.transfer_bytes_per_second();
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
