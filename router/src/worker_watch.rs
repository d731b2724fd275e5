//! Receives the description, the KV events and the load of one worker while it is connected.
//!
//! A worker is a member from its first complete snapshot until its stream ends, fails, is silent for too long or carries a message of
//! another instance. A gap in its events does not end its membership: a new snapshot replaces the known content of its cache. If NATS is
//! configured, events arrive over NATS. While NATS is disconnected or delivers nothing, they arrive on the stream. Loads and heartbeats
//! always arrive on the stream.

use crate::{
    cluster::{Cluster, JoinError, MemberId},
    metrics::WorkerSeries,
    subscription::{CacheUpdate, EventRoute, KvSubscription, SubscriptionError},
    watch::{ConnectionEnd, LostMember, Reason, RemoteProcess, Watch},
};
use std::{convert::Infallible, time::Duration};
use tandem_kv::Snapshot;
use tandem_process::{
    Backoff,
    events::{Broker, unix_us},
};
use tandem_proto::{
    channel::{self, Channel},
    v1::{
        DescribeRequest, SnapshotChunk, SnapshotRequest, UnavailableWorker, WatchReply, WatchRequest, WorkerInfo,
        control_client::ControlClient, watch_reply::Message,
    },
};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tonic::{Code, Status, Streaming};

/// The time for which NATS is not used after it delivered no event between two gaps. The likely cause is that NATS does not permit the
/// messages, which only an operator can change. Until then, each further try costs the worker a snapshot.
const NO_DELIVERY_PAUSE: Duration = Duration::from_secs(30);

/// The time for which NATS is not used after it disconnected. The pause bounds the number of snapshots, because each reconnection costs the
/// worker one.
const DISCONNECTED_PAUSE: Duration = Duration::from_secs(1);

/// The time limit for a subscription at NATS. NATS normally answers within milliseconds.
const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) struct WorkerWatcher(pub(crate) RemoteProcess);

/// The reason for which a worker's cache has to be read from a snapshot again.
enum Resync {
    /// Events are missing from the subscription.
    Gap,
    NatsDisconnected,
    NatsConnected,
    /// NATS is connected but does not deliver the worker's events.
    NoDelivery,
}

impl Watch for WorkerWatcher {
    fn cluster(&self) -> &Cluster {
        &self.0.cluster
    }

    async fn receive(&self, backoff: &mut Backoff) -> Result<Infallible, ConnectionEnd> {
        let Self(remote) = self;
        let mut control = ControlClient::new(remote.connect().await?).max_decoding_message_size(channel::MESSAGE_BYTES_MAX);
        // The worker writes the refusal to its own log.
        let refusal = remote.cluster.lock().unavailable.refusal(&remote.address);
        let info = remote.in_time(control.describe(DescribeRequest { refusal })).await?.map_err(not_described)?.into_inner();
        let series = {
            let state = remote.cluster.lock();
            state.check_joinable(&info)?;
            state.metrics.worker(&info.worker_id)
        };
        let mut connection = WorkerConnection { remote, backoff, control, info, series, member: None };
        let Err(end) = connection.follow().await;
        Err(connection.ended(end))
    }

    fn on_lost(&self, lost: &ConnectionEnd, reason: Reason) {
        let Self(RemoteProcess { cluster, address, .. }) = self;
        match lost {
            ConnectionEnd::Lost(lost) => log_lost(address, lost, &reason.text),
            _ if !reason.is_new => tracing::debug!(worker = %address, "worker still unavailable: {}", reason.text),
            ConnectionEnd::Incompatible(_) | ConnectionEnd::InvalidEvents(_) => {
                tracing::warn!(worker = %address, "worker unavailable: {}", reason.text)
            }
            _ => tracing::info!(worker = %address, "worker unavailable: {}", reason.text),
        }
        let incompatible = matches!(lost, ConnectionEnd::Incompatible(_));
        let worker_id = match lost {
            ConnectionEnd::Lost(lost) => lost.worker_id.clone(),
            _ => String::new(),
        };
        let worker = UnavailableWorker { address: address.clone(), reason: reason.text, incompatible, worker_id };
        cluster.lock().update_unavailable(|workers| workers.insert(worker));
    }
}

fn log_lost(address: &str, LostMember { worker_id, instance_id, end }: &LostMember, reason: &str) {
    if end.is_planned() {
        tracing::info!(worker_id, instance_id, %address, "worker drains: it finishes its requests, and new ones go to other workers");
    } else {
        tracing::warn!(
            worker_id, instance_id, %address,
            "worker lost: {reason}; requests go to other workers, and the router connects again each second"
        );
    }
}

/// Returns the error for a worker that refused to describe itself.
fn not_described(status: Status) -> ConnectionEnd {
    match status.code() {
        Code::Unauthenticated => JoinError::OtherKey.into(),
        _ => status.into(),
    }
}

impl Drop for WorkerWatcher {
    fn drop(&mut self) {
        self.0.cluster.lock().update_unavailable(|workers| workers.remove(&self.0.address));
    }
}

/// A connection to one worker instance. Dropping it removes the worker and its index entries from the cluster.
struct WorkerConnection<'a> {
    remote: &'a RemoteProcess,
    backoff: &'a mut Backoff,
    control: ControlClient<Channel>,
    info: WorkerInfo,
    /// The worker's metrics. They exist before the worker joins, because gaps are counted from the start.
    series: WorkerSeries,
    /// The worker's membership; `None` before the first snapshot.
    member: Option<MemberId>,
}

impl WorkerConnection<'_> {
    async fn follow(&mut self) -> Result<Infallible, ConnectionEnd> {
        let remote = self.remote;
        let mut use_nats_at = Instant::now();
        loop {
            let resync = match &remote.cluster.settings.broker {
                Some(broker) if broker.is_connected() && Instant::now() >= use_nats_at => self.receive_over_nats(broker).await?,
                broker => self.receive_direct(broker.as_ref(), use_nats_at).await?,
            };
            match resync {
                Resync::Gap => self.pause_after_gap().await,
                Resync::NoDelivery => {
                    tracing::warn!(
                        worker = %remote.address,
                        "NATS delivers none of this worker's KV events, so the router reads them directly; \
                         check the NATS permissions of worker and router"
                    );
                    use_nats_at = Instant::now() + NO_DELIVERY_PAUSE;
                }
                Resync::NatsDisconnected => use_nats_at = Instant::now() + DISCONNECTED_PAUSE,
                Resync::NatsConnected => {}
            }
        }
    }

    /// Removes the worker from the members. Returns the error; [`ConnectionEnd::Lost`] if the worker was a member.
    fn ended(&mut self, end: ConnectionEnd) -> ConnectionEnd {
        let Some(id) = self.member.take() else { return end };
        self.remote.cluster.leave(id);
        let WorkerInfo { worker_id, instance_id, .. } = self.info.clone();
        ConnectionEnd::Lost(Box::new(LostMember { worker_id, instance_id, end }))
    }

    /// Receives snapshot, events and loads on the worker's stream until NATS can be used.
    async fn receive_direct(&mut self, broker: Option<&Broker>, use_nats_at: Instant) -> Result<Resync, ConnectionEnd> {
        let mut replies = self.watch(EventRoute::Direct).await?;
        let mut subscription = KvSubscription::new(&self.info, EventRoute::Direct);
        let nats_connected = async {
            let Some(broker) = broker else { return std::future::pending().await };
            sleep_until(use_nats_at).await;
            broker.until(true).await;
        };
        tokio::pin!(nats_connected);
        loop {
            let reply = tokio::select! {
                biased;
                () = &mut nats_connected => return Ok(Resync::NatsConnected),
                reply = self.remote.in_time(replies.message()) => reply?,
            };
            let Some(reply) = reply_or_gap(reply)? else { return Ok(Resync::Gap) };
            match subscription.take(reply, Instant::now()) {
                Err(SubscriptionError::Gap { .. }) => return Ok(Resync::Gap),
                update => self.apply(update?, EventRoute::Direct).await?,
            }
        }
    }

    /// Receives loads on the worker's stream, events over NATS, and snapshots on request. While a snapshot is being received, events wait
    /// in the NATS subscription. If that buffer overflows, events are missing and another snapshot is requested.
    async fn receive_over_nats(&mut self, broker: &Broker) -> Result<Resync, ConnectionEnd> {
        let subscribing = timeout(SUBSCRIBE_TIMEOUT, broker.subscribe(&self.info.instance_id));
        let Ok(Ok(mut published)) = subscribing.await else { return Ok(Resync::NoDelivery) };
        let mut replies = self.watch(EventRoute::Nats).await?;
        let mut subscription = KvSubscription::new(&self.info, EventRoute::Nats);
        let mut snapshot = Some(self.snapshot().await?);
        // The number of gaps since the last event arrived, from either source. One gap is expected: it may concern events that were
        // published while this router subscribed.
        let mut gaps_without_events = 0;
        let mut last_message_at = Instant::now();
        let silence_max = self.remote.cluster.settings.silence_max;
        loop {
            let (update, source) = tokio::select! {
                biased;
                () = broker.until(false) => return Ok(Resync::NatsDisconnected),
                () = sleep_until(last_message_at + silence_max) => return Err(ConnectionEnd::Silent(silence_max)),
                reply = replies.message() => {
                    let Some(reply) = reply_or_gap(reply)? else { return Ok(Resync::Gap) };
                    last_message_at = Instant::now();
                    let source = if has_events(&reply) { EventRoute::Direct } else { EventRoute::Nats };
                    gaps_without_events *= u32::from(source == EventRoute::Nats);
                    (subscription.take(reply, last_message_at), source)
                }
                chunk = next_chunk(&mut snapshot), if snapshot.is_some() => {
                    last_message_at = Instant::now();
                    (subscription.take_chunk(chunk?), EventRoute::Nats)
                }
                batch = published.next(), if snapshot.is_none() => {
                    let Some(batch) = batch else { return Ok(Resync::NoDelivery) };
                    gaps_without_events = 0;
                    (subscription.take_published(batch, Instant::now()), EventRoute::Nats)
                }
            };
            let applied = match update {
                Ok(update) => {
                    if matches!(update, CacheUpdate::Snapshot(_)) {
                        snapshot = None;
                    }
                    self.apply(update, source).await
                }
                Err(error) => Err(error.into()),
            };
            match applied {
                Err(ConnectionEnd::InvalidEvents(error)) if error.is_repaired_by_snapshot(source) => {
                    gaps_without_events += 1;
                    // Only events from NATS wait until the snapshot is complete. A gap among events on the stream shows that the worker
                    // sends its events there, so the router stops using NATS and reads them from the stream.
                    if gaps_without_events == 2 || source == EventRoute::Direct {
                        return Ok(Resync::NoDelivery);
                    }
                    self.pause_after_gap().await;
                    subscription.restart();
                    snapshot = Some(self.snapshot().await?);
                }
                applied => applied?,
            }
        }
    }

    async fn watch(&mut self, events: EventRoute) -> Result<Streaming<WatchReply>, ConnectionEnd> {
        let request = WatchRequest { instance_id: self.info.instance_id.clone(), events_over_nats: events == EventRoute::Nats };
        Ok(self.remote.in_time(self.control.watch(request)).await??.into_inner())
    }

    async fn snapshot(&mut self) -> Result<Streaming<SnapshotChunk>, ConnectionEnd> {
        let request = SnapshotRequest { instance_id: self.info.instance_id.clone() };
        Ok(self.remote.in_time(self.control.snapshot(request)).await??.into_inner())
    }

    async fn replace(&mut self, snapshot: &Snapshot) -> Result<(), JoinError> {
        let Self { remote: RemoteProcess { cluster, address, .. }, info, .. } = self;
        let content = cluster.load(snapshot).await;
        match self.member {
            Some(id) => cluster.replace(id, content),
            None => {
                self.member = Some(cluster.lock().join(info.clone(), address.clone(), content)?);
                tracing::info!(worker_id = info.worker_id, instance_id = info.instance_id, %address, "worker joined");
            }
        }
        Ok(())
    }

    /// Applies the update. `source` is the source of its events, if it has any.
    async fn apply(&mut self, update: CacheUpdate, source: EventRoute) -> Result<(), ConnectionEnd> {
        let cluster = &self.remote.cluster;
        let has_events = match update {
            CacheUpdate::None => false,
            CacheUpdate::Loras(loras) => {
                self.info.loras = loras;
                self.member.map_or(Ok(()), |id| cluster.lock().members.set_loras(id, &self.info))?;
                false
            }
            CacheUpdate::Snapshot(snapshot) => {
                self.replace(&snapshot).await?;
                true
            }
            CacheUpdate::Batch { batch, stats, sent_unix_us } => {
                let has_events = !batch.events.is_empty();
                if has_events && sent_unix_us > 0 {
                    let lag = Duration::from_micros(unix_us().saturating_sub(sent_unix_us));
                    cluster.lock().metrics.event_lag.record(lag);
                }
                if let Some(id) = self.member {
                    cluster.apply(id, *batch, stats).await?;
                }
                self.backoff.reset();
                has_events
            }
        };
        if let Some(id) = self.member.filter(|_| has_events) {
            cluster.lock().members.set_event_source(id, source);
        }
        Ok(())
    }

    /// Counts and logs that events are missing, and waits before a snapshot is requested.
    async fn pause_after_gap(&mut self) {
        self.series.gaps.increment(1);
        tracing::warn!(worker = %self.remote.address, "KV events of this worker are missing; requesting a snapshot of its cache");
        sleep(self.backoff.next_delay()).await;
    }
}

/// Removes a worker that is still a member because it is no longer listed, or because the router ends.
impl Drop for WorkerConnection<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.member {
            let Self { remote: RemoteProcess { cluster, address, .. }, info, .. } = self;
            cluster.leave(id);
            tracing::info!(worker_id = info.worker_id, instance_id = info.instance_id, %address, "worker left");
        }
    }
}

/// Returns the stream's next message; `None` if the worker reports that it has not sent all events to this router.
fn reply_or_gap(reply: Result<Option<WatchReply>, Status>) -> Result<Option<WatchReply>, ConnectionEnd> {
    match reply {
        Ok(Some(reply)) => Ok(Some(reply)),
        Ok(None) => Err(ConnectionEnd::Closed),
        Err(status) if status.code() == Code::DataLoss => Ok(None),
        Err(status) => Err(status.into()),
    }
}

fn has_events(reply: &WatchReply) -> bool {
    matches!(&reply.message, Some(Message::Batch(batch)) if !batch.events.is_empty())
}

async fn next_chunk(snapshot: &mut Option<Streaming<SnapshotChunk>>) -> Result<SnapshotChunk, ConnectionEnd> {
    match snapshot {
        Some(chunks) => chunks.message().await?.ok_or(ConnectionEnd::Closed),
        None => std::future::pending().await,
    }
}
