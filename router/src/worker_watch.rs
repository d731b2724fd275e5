//! Watches one worker: its description, its cache and its load, while it is connected; reconnects when it is lost.
//!
//! A worker is a member from its first complete snapshot until its stream ends, breaks, falls silent or sends a message of another
//! instance. A gap in its events does not end its membership: a new snapshot replaces what was known. Events come over NATS if
//! that is configured, and on the stream while NATS is disconnected or delivers nothing; loads and heartbeats always come on the
//! stream.

use crate::{
    cluster::{Cluster, JoinError, MemberId},
    metrics::WorkerSeries,
    subscription::{EventSource, KvSubscription, SubscriptionError, Update},
};
use std::{convert::Infallible, sync::Arc, time::Duration};
use tandem_kv::Snapshot;
use tandem_node::{
    Backoff,
    events::{Broker, unix_us},
    retry::error_chain,
};
use tandem_proto::{
    channel::{self, Channel, Network},
    v1::{
        DescribeRequest, SnapshotChunk, SnapshotRequest, WatchReply, WatchRequest, WorkerInfo, control_client::ControlClient,
        watch_reply::Message,
    },
};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::{Code, Status, Streaming, transport::Endpoint};

/// The first pause between attempts: short enough for a worker that starts together with the router.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// The longest pause between attempts: a worker that returns is found within it, and one that is down costs almost nothing.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// How long NATS is not used after it delivered nothing between two gaps: its operator has to permit the messages, and until
/// then a snapshot per second would be wasted.
const NO_DELIVERY_PAUSE: Duration = Duration::from_secs(30);

/// Time for which NATS is not used after it disconnected.
const DISCONNECTED_PAUSE: Duration = Duration::from_secs(1);

/// Limit on a subscription to NATS, which answers within milliseconds.
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a connection to a worker has ended.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("it cannot be reached")]
    Unreachable(#[from] tonic::transport::Error),
    #[error("it answered with an error")]
    Failed(#[from] Status),
    #[error("it did not answer within {0:?}")]
    Silent(Duration),
    #[error("it closed the stream")]
    Closed,
    #[error("it cannot join")]
    Incompatible(#[from] JoinError),
    #[error("it sent an invalid message")]
    Invalid(#[from] SubscriptionError),
}

/// Watches the worker at this address until dropped.
pub(crate) struct WorkerWatcher {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) network: Network,
    pub(crate) address: String,
    pub(crate) endpoint: Endpoint,
    /// Time without messages after which the worker counts as lost.
    pub(crate) silence_max: Duration,
    /// The NATS connection over which its events may come.
    pub(crate) broker: Option<Broker>,
}

/// Why a worker's cache has to be read from a snapshot again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Resync {
    /// Events are missing from the subscription.
    Gap,
    /// NATS has disconnected.
    NatsDisconnected,
    /// NATS is connected (again).
    NatsConnected,
    /// NATS is connected and delivers no events of the worker.
    NoDelivery,
}

impl WorkerWatcher {
    /// Connects again and again; never returns. Cancel-safe: dropping the future removes the worker from the cluster.
    pub(crate) async fn run(self) {
        let mut backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
        loop {
            let lost = match self.connect(&mut backoff).await {
                Ok(never) => match never {},
                Err(lost) => lost,
            };
            self.cluster.lock().set_unavailable(&self.address, error_chain(&lost), matches!(lost, Lost::Incompatible(_)));
            self.log(&lost, &mut backoff);
            sleep(backoff.next_delay()).await;
        }
    }

    /// Logs each reason once until the worker has been connected again.
    fn log(&self, lost: &Lost, backoff: &mut Backoff) {
        let reason = error_chain(lost);
        if !backoff.is_new_error(&reason) {
            return tracing::debug!(worker = %self.address, "worker still unavailable: {reason}");
        }
        match lost {
            Lost::Incompatible(_) | Lost::Invalid(_) => tracing::warn!(worker = %self.address, "worker unavailable: {reason}"),
            Lost::Unreachable(_) | Lost::Failed(_) | Lost::Silent(_) | Lost::Closed => {
                tracing::info!(worker = %self.address, "worker unavailable: {reason}");
            }
        }
    }

    /// Receives events and loads until the connection is lost.
    async fn connect(&self, backoff: &mut Backoff) -> Result<Infallible, Lost> {
        let mut control =
            ControlClient::new(self.network.connect(&self.endpoint).await?).max_decoding_message_size(channel::MESSAGE_BYTES_MAX);
        let info = self.in_time(control.describe(DescribeRequest {})).await?.map_err(not_described)?.into_inner();
        let series = {
            let state = self.cluster.lock();
            state.check_joinable(&info)?;
            state.series(&info.worker_id)
        };
        let mut worker = ConnectedWorker { watcher: self, info, series, member: None };
        // NATS is not used before.
        let mut use_nats_at = Instant::now();
        loop {
            let resync = match &self.broker {
                Some(broker) if broker.is_connected() && Instant::now() >= use_nats_at => {
                    self.receive_over_nats(&mut control, &mut worker, backoff, broker).await?
                }
                _ => self.receive_direct(&mut control, &mut worker, backoff, use_nats_at).await?,
            };
            match resync {
                Resync::Gap => {
                    worker.count_gap();
                    sleep(backoff.next_delay()).await;
                }
                Resync::NoDelivery => {
                    tracing::warn!(
                        worker = %self.address,
                        "NATS delivers none of this worker's KV events; check that both may publish and subscribe there"
                    );
                    use_nats_at = Instant::now() + NO_DELIVERY_PAUSE;
                }
                // NATS may flap several times a second; each time costs the worker a snapshot.
                Resync::NatsDisconnected => use_nats_at = Instant::now() + DISCONNECTED_PAUSE,
                Resync::NatsConnected => {}
            }
        }
    }

    /// Receives everything on the worker's stream, until NATS can be used.
    async fn receive_direct(
        &self,
        control: &mut ControlClient<Channel>,
        worker: &mut ConnectedWorker<'_>,
        backoff: &mut Backoff,
        use_nats_at: Instant,
    ) -> Result<Resync, Lost> {
        let mut replies = self.watch(control, worker, false).await?;
        let mut subscription = KvSubscription::new(&worker.info, EventSource::Direct);
        let nats_connected = async {
            let Some(broker) = &self.broker else { return std::future::pending().await };
            sleep_until(use_nats_at).await;
            broker.until(true).await;
        };
        tokio::pin!(nats_connected);
        loop {
            let reply = tokio::select! {
                biased;
                () = &mut nats_connected => return Ok(Resync::NatsConnected),
                reply = self.in_time(replies.message()) => reply?,
            };
            let Some(reply) = reply_or_gap(reply)? else { return Ok(Resync::Gap) };
            match subscription.take(reply, Instant::now()) {
                Err(SubscriptionError::Gap { .. }) => return Ok(Resync::Gap),
                update => worker.apply(update?, EventSource::Direct, backoff).await?,
            }
        }
    }

    /// Receives loads on the worker's stream, events over NATS, and snapshots on request. While a snapshot is being received, events
    /// wait in the NATS subscription; if that overflows, events are missing and another snapshot is requested.
    async fn receive_over_nats(
        &self,
        control: &mut ControlClient<Channel>,
        worker: &mut ConnectedWorker<'_>,
        backoff: &mut Backoff,
        broker: &Broker,
    ) -> Result<Resync, Lost> {
        let subscribing = timeout(SUBSCRIBE_TIMEOUT, broker.subscribe(&worker.info.instance_id));
        let Ok(Ok(mut published)) = subscribing.await else { return Ok(Resync::NoDelivery) };
        let mut replies = self.watch(control, worker, true).await?;
        let mut subscription = KvSubscription::new(&worker.info, EventSource::Nats);
        let mut snapshot = Some(self.snapshot(control, worker).await?);
        // Gaps since the last event arrived from any source. The first may concern events published while we subscribed.
        let mut gaps_without_events = 0;
        let mut last_message_at = Instant::now();
        loop {
            let (update, source) = tokio::select! {
                biased;
                () = broker.until(false) => return Ok(Resync::NatsDisconnected),
                () = sleep_until(last_message_at + self.silence_max) => return Err(Lost::Silent(self.silence_max)),
                reply = replies.message() => {
                    let Some(reply) = reply_or_gap(reply)? else { return Ok(Resync::Gap) };
                    last_message_at = Instant::now();
                    let source = if has_events(&reply) { EventSource::Direct } else { EventSource::Nats };
                    gaps_without_events *= u32::from(source == EventSource::Nats);
                    (subscription.take(reply, last_message_at), source)
                }
                chunk = next_chunk(&mut snapshot), if snapshot.is_some() => {
                    last_message_at = Instant::now();
                    (subscription.take_chunk(chunk?), EventSource::Nats)
                }
                batch = published.next(), if snapshot.is_none() => {
                    let Some(batch) = batch else { return Ok(Resync::NoDelivery) };
                    gaps_without_events = 0;
                    (subscription.take_published(batch, Instant::now()), EventSource::Nats)
                }
            };
            let applied = match update {
                Ok(update) => {
                    if matches!(update, Update::Snapshot(_)) {
                        snapshot = None;
                    }
                    worker.apply(update, source, backoff).await
                }
                Err(error) => Err(error.into()),
            };
            match applied {
                Ok(()) => {}
                Err(Lost::Invalid(error)) if error.is_repaired_by_snapshot(source) => {
                    gaps_without_events += 1;
                    // Only events from NATS wait until the snapshot is complete. A gap among events of the stream shows that the
                    // worker sends its events there, so they are read there from now on.
                    if gaps_without_events == 2 || source == EventSource::Direct {
                        return Ok(Resync::NoDelivery);
                    }
                    worker.count_gap();
                    sleep(backoff.next_delay()).await;
                    subscription.restart();
                    snapshot = Some(self.snapshot(control, worker).await?);
                }
                Err(lost) => return Err(lost),
            }
        }
    }

    async fn watch(
        &self,
        control: &mut ControlClient<Channel>,
        worker: &ConnectedWorker<'_>,
        events_over_nats: bool,
    ) -> Result<Streaming<WatchReply>, Lost> {
        let request = WatchRequest { instance_id: worker.info.instance_id.clone(), events_over_nats };
        Ok(self.in_time(control.watch(request)).await??.into_inner())
    }

    async fn snapshot(
        &self,
        control: &mut ControlClient<Channel>,
        worker: &ConnectedWorker<'_>,
    ) -> Result<Streaming<SnapshotChunk>, Lost> {
        let request = SnapshotRequest { instance_id: worker.info.instance_id.clone() };
        Ok(self.in_time(control.snapshot(request)).await??.into_inner())
    }

    async fn in_time<T>(&self, answer: impl Future<Output = T>) -> Result<T, Lost> {
        timeout(self.silence_max, answer).await.map_err(|_| Lost::Silent(self.silence_max))
    }
}

/// Returns why a worker does not describe itself.
fn not_described(status: Status) -> Lost {
    match status.code() {
        Code::Unauthenticated => JoinError::OtherKey.into(),
        _ => status.into(),
    }
}

impl Drop for WorkerWatcher {
    fn drop(&mut self) {
        self.cluster.lock().clear_unavailable(&self.address);
    }
}

/// A connected instance. Dropping it removes the worker and its index entries from the cluster.
struct ConnectedWorker<'a> {
    watcher: &'a WorkerWatcher,
    info: WorkerInfo,
    /// Gaps are counted before it has joined, too.
    series: WorkerSeries,
    /// Set from the first snapshot on.
    member: Option<MemberId>,
}

impl ConnectedWorker<'_> {
    fn replace(&mut self, snapshot: &Snapshot) -> Result<(), JoinError> {
        let mut state = self.watcher.cluster.lock();
        match self.member {
            Some(id) => state.members.replace(id, snapshot),
            None => {
                self.member = Some(state.join(self.info.clone(), self.watcher.address.clone(), snapshot)?);
                let WorkerInfo { worker_id, instance_id, .. } = &self.info;
                tracing::info!(worker_id, instance_id, address = %self.watcher.address, "worker joined");
            }
        }
        Ok(())
    }

    /// Applies the update, whose events (if it has some) came from this source.
    async fn apply(&mut self, update: Update, source: EventSource, backoff: &mut Backoff) -> Result<(), Lost> {
        let cluster = &self.watcher.cluster;
        let has_events = match update {
            Update::None => false,
            Update::Snapshot(snapshot) => {
                self.replace(&snapshot)?;
                true
            }
            Update::Batch { batch, stats, sent_unix_us } => {
                let has_events = !batch.events.is_empty();
                if has_events && sent_unix_us > 0 {
                    cluster.lock().record_event_lag(Duration::from_micros(unix_us().saturating_sub(sent_unix_us)));
                }
                if let Some(id) = self.member {
                    cluster.apply(id, batch, stats).await?;
                }
                backoff.reset();
                has_events
            }
        };
        if let Some(id) = self.member.filter(|_| has_events) {
            cluster.lock().members.set_event_source(id, source);
        }
        Ok(())
    }

    fn count_gap(&self) {
        self.series.gaps.increment(1);
        tracing::warn!(worker = %self.watcher.address, "KV events of this worker are missing; requesting a snapshot of its cache");
    }
}

impl Drop for ConnectedWorker<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.member {
            self.watcher.cluster.leave(id);
            let WorkerInfo { worker_id, instance_id, .. } = &self.info;
            tracing::info!(worker_id, instance_id, address = %self.watcher.address, "worker left");
        }
    }
}

/// Returns the stream's next message; `None` if the worker itself has noticed that this router missed events.
fn reply_or_gap(reply: Result<Option<WatchReply>, Status>) -> Result<Option<WatchReply>, Lost> {
    match reply {
        Ok(Some(reply)) => Ok(Some(reply)),
        Ok(None) => Err(Lost::Closed),
        Err(status) if status.code() == Code::DataLoss => Ok(None),
        Err(status) => Err(status.into()),
    }
}

fn has_events(reply: &WatchReply) -> bool {
    matches!(&reply.message, Some(Message::Batch(batch)) if !batch.events.is_empty())
}

async fn next_chunk(snapshot: &mut Option<Streaming<SnapshotChunk>>) -> Result<SnapshotChunk, Lost> {
    match snapshot {
        Some(chunks) => chunks.message().await?.ok_or(Lost::Closed),
        None => std::future::pending().await,
    }
}
