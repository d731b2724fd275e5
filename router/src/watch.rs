//! Follows one worker: who it is, what its cache holds, how busy it is, for as long as it lives, and again when it returns.
//!
//! A worker is a member from its first complete snapshot until its stream ends, breaks, falls silent or speaks for another
//! instance. A gap in its events does not end its membership: another snapshot replaces what was known. Events come over NATS where
//! there is one, and on the stream while it is away or brings nothing; loads and signs of life always come on the stream.

use crate::{
    cluster::{Cluster, MemberId, Refused},
    feed::{Broken, Feed, News, Way},
    metrics::WorkerSeries,
};
use std::{sync::Arc, time::Duration};
use tandem_kv::Snapshot;
use tandem_node::{
    Tries,
    events::{Broker, unix_us},
    retry::complaint,
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

/// Pause before the first new try. Soon enough for a worker that starts with the router.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// Longest pause between tries: a worker that comes back is found within it, and one that is down costs nearly nothing.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// NATS that brought nothing between two gaps is not asked again for so long: its operator has to let messages through, and until
/// then a snapshot a second would be wasted.
const DEAF_PAUSE: Duration = Duration::from_secs(30);

/// Pause before NATS that was away is listened to again.
const AWAY_PAUSE: Duration = Duration::from_secs(1);

/// NATS answers in milliseconds; who waits for longer hears nothing of the worker.
const SUBSCRIBE_WAIT: Duration = Duration::from_secs(2);

/// Why the router stopped following an instance.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("it cannot be reached")]
    Unreachable(#[from] tonic::transport::Error),
    #[error("it answered with an error")]
    Failed(#[from] Status),
    #[error("it did not answer in {0:?}")]
    Silent(Duration),
    #[error("it ended the stream")]
    Ended,
    #[error("it is not admitted")]
    Refused(#[from] Refused),
    #[error("what it says cannot be right")]
    Broken(#[from] Broken),
}

/// Follows the worker at this address until dropped.
pub(crate) struct Watcher {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) network: Network,
    pub(crate) address: String,
    pub(crate) endpoint: Endpoint,
    /// How long the worker may be silent.
    pub(crate) silence_max: Duration,
    /// Where its events may come from, too.
    pub(crate) broker: Option<Broker>,
}

/// Why a worker's events are to be followed from a snapshot anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// Some are missing.
    Gap,
    /// NATS has gone away.
    Away,
    /// NATS is there (again).
    Back,
    /// NATS is there and brings nothing.
    Deaf,
}

impl Watcher {
    /// Never returns. Dropped at any await, it leaves nothing behind.
    pub(crate) async fn run(self) {
        let mut tries = Tries::new(PAUSE_MIN, PAUSE_MAX);
        loop {
            let lost = match self.follow(&mut tries).await {
                Ok(never) => match never {},
                Err(lost) => lost,
            };
            self.cluster.lock().absent(&self.address, complaint(&lost), matches!(lost, Lost::Refused(_)));
            self.tell(&lost, &mut tries);
            sleep(tries.pause()).await;
        }
    }

    /// Once, until the worker was well again: the same complaint every second helps nobody.
    fn tell(&self, lost: &Lost, tries: &mut Tries) {
        let complaint = complaint(lost);
        if !tries.is_news(&complaint) {
            return tracing::debug!(worker = %self.address, "still not routed to: {complaint}");
        }
        match lost {
            Lost::Refused(_) | Lost::Broken(_) => tracing::warn!(worker = %self.address, "not routed to: {complaint}"),
            Lost::Unreachable(_) | Lost::Failed(_) | Lost::Silent(_) | Lost::Ended => {
                tracing::info!(worker = %self.address, "not routed to: {complaint}");
            }
        }
    }

    /// One connection's life.
    async fn follow(&self, tries: &mut Tries) -> Result<std::convert::Infallible, Lost> {
        let mut control =
            ControlClient::new(self.network.connect(&self.endpoint).await?).max_decoding_message_size(channel::MESSAGE_BYTES_MAX);
        let info = self.in_time(control.describe(DescribeRequest {})).await?.map_err(not_described)?.into_inner();
        let series = {
            let cluster = self.cluster.lock();
            cluster.admits(&info)?;
            cluster.series(&info.worker_id)
        };
        let mut member = Member { watcher: self, info, series, id: None };
        // From then on NATS may be listened to.
        let mut listen_at = Instant::now();
        loop {
            let turn = match &self.broker {
                Some(broker) if broker.is_connected() && Instant::now() >= listen_at => {
                    self.follow_published(&mut control, &mut member, tries, broker).await?
                }
                _ => self.follow_stream(&mut control, &mut member, tries, listen_at).await?,
            };
            match turn {
                Turn::Gap => {
                    member.count_gap();
                    sleep(tries.pause()).await;
                }
                Turn::Deaf => {
                    tracing::warn!(worker = %self.address, "NATS brings none of its KV events; may both publish and subscribe there?");
                    listen_at = Instant::now() + DEAF_PAUSE;
                }
                // It may be gone and back several times a second; each time costs the worker a snapshot.
                Turn::Away => listen_at = Instant::now() + AWAY_PAUSE,
                Turn::Back => {}
            }
        }
    }

    /// Everything on one stream.
    async fn follow_stream(
        &self,
        control: &mut ControlClient<Channel>,
        member: &mut Member<'_>,
        tries: &mut Tries,
        listen_at: Instant,
    ) -> Result<Turn, Lost> {
        let mut replies = self.watch(control, member, false).await?;
        let mut feed = Feed::new(&member.info, Way::Stream);
        let nats_is_back = async {
            let Some(broker) = &self.broker else { return std::future::pending().await };
            sleep_until(listen_at).await;
            broker.until(true).await;
        };
        tokio::pin!(nats_is_back);
        loop {
            let reply = tokio::select! {
                biased;
                () = &mut nats_is_back => return Ok(Turn::Back),
                reply = self.in_time(replies.message()) => reply?,
            };
            let Some(reply) = on_stream(reply)? else { return Ok(Turn::Gap) };
            match feed.take(reply, Instant::now()) {
                Err(Broken::Gap { .. }) => return Ok(Turn::Gap),
                news => member.take(news?, Way::Stream, tries).await?,
            }
        }
    }

    /// Loads on a stream, events over NATS, snapshots when they are needed. What NATS brings while a snapshot comes waits in the
    /// subscription; if that overflows, events are missing and there is another snapshot.
    async fn follow_published(
        &self,
        control: &mut ControlClient<Channel>,
        member: &mut Member<'_>,
        tries: &mut Tries,
        broker: &Broker,
    ) -> Result<Turn, Lost> {
        let subscribing = timeout(SUBSCRIBE_WAIT, broker.subscribe(&member.info.instance_id));
        let Ok(Ok(mut published)) = subscribing.await else { return Ok(Turn::Deaf) };
        let mut replies = self.watch(control, member, true).await?;
        let mut feed = Feed::new(&member.info, Way::Published);
        let mut snapshot = Some(self.snapshot(control, member).await?);
        // Gaps since events came by whatever way. The first may be of what was on its way when we subscribed.
        let mut quiet_gaps = 0;
        let mut heard_at = Instant::now();
        loop {
            let (news, way) = tokio::select! {
                biased;
                () = broker.until(false) => return Ok(Turn::Away),
                () = sleep_until(heard_at + self.silence_max) => return Err(Lost::Silent(self.silence_max)),
                reply = replies.message() => {
                    let Some(reply) = on_stream(reply)? else { return Ok(Turn::Gap) };
                    heard_at = Instant::now();
                    let way = if has_events(&reply) { Way::Stream } else { Way::Published };
                    quiet_gaps *= u32::from(way == Way::Published);
                    (feed.take(reply, heard_at), way)
                }
                chunk = next_chunk(&mut snapshot), if snapshot.is_some() => {
                    heard_at = Instant::now();
                    (feed.take_chunk(chunk?), Way::Published)
                }
                batch = published.next(), if snapshot.is_none() => {
                    let Some(batch) = batch else { return Ok(Turn::Deaf) };
                    quiet_gaps = 0;
                    (feed.take_published(batch, Instant::now()), Way::Published)
                }
            };
            let taken = match news {
                Ok(news) => {
                    if matches!(news, News::Cache(_)) {
                        snapshot = None;
                    }
                    member.take(news, way, tries).await
                }
                Err(broken) => Err(broken.into()),
            };
            match taken {
                Ok(()) => {}
                Err(Lost::Broken(broken)) if broken.is_healed_by_a_snapshot(way) => {
                    quiet_gaps += 1;
                    // Events on the stream do not wait while a snapshot comes: who sends them there is heard there.
                    if quiet_gaps == 2 || way == Way::Stream {
                        return Ok(Turn::Deaf);
                    }
                    member.count_gap();
                    sleep(tries.pause()).await;
                    feed.restart();
                    snapshot = Some(self.snapshot(control, member).await?);
                }
                Err(lost) => return Err(lost),
            }
        }
    }

    async fn watch(
        &self,
        control: &mut ControlClient<Channel>,
        member: &Member<'_>,
        events_over_nats: bool,
    ) -> Result<Streaming<WatchReply>, Lost> {
        let request = WatchRequest { instance_id: member.info.instance_id.clone(), events_over_nats };
        Ok(self.in_time(control.watch(request)).await??.into_inner())
    }

    async fn snapshot(
        &self,
        control: &mut ControlClient<Channel>,
        member: &Member<'_>,
    ) -> Result<Streaming<SnapshotChunk>, Lost> {
        let request = SnapshotRequest { instance_id: member.info.instance_id.clone() };
        Ok(self.in_time(control.snapshot(request)).await??.into_inner())
    }

    async fn in_time<T>(&self, answer: impl Future<Output = T>) -> Result<T, Lost> {
        timeout(self.silence_max, answer).await.map_err(|_| Lost::Silent(self.silence_max))
    }
}

/// Why a worker does not report its identity.
fn not_described(status: Status) -> Lost {
    match status.code() {
        Code::Unauthenticated => Refused::OtherKey.into(),
        _ => status.into(),
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.cluster.lock().not_absent(&self.address);
    }
}

/// An instance that is followed. Dropping it takes the worker and its entries out of the cluster.
struct Member<'a> {
    watcher: &'a Watcher,
    info: WorkerInfo,
    /// Gaps are counted before it has joined, too.
    series: WorkerSeries,
    /// Set from the first snapshot on.
    id: Option<MemberId>,
}

impl Member<'_> {
    fn replace(&mut self, snapshot: &Snapshot) -> Result<(), Refused> {
        let mut state = self.watcher.cluster.lock();
        match self.id {
            Some(id) => state.replace(id, snapshot),
            None => {
                self.id = Some(state.join(self.info.clone(), self.watcher.address.clone(), snapshot)?);
                let WorkerInfo { worker_id, instance_id, .. } = &self.info;
                tracing::info!(worker_id, instance_id, address = %self.watcher.address, "worker joined");
            }
        }
        Ok(())
    }

    /// `way`: how events come, if these are some.
    async fn take(&mut self, news: News, way: Way, tries: &mut Tries) -> Result<(), Lost> {
        let brings_events = match &news {
            News::Nothing => false,
            News::Cache(_) => true,
            News::Batch { batch, .. } => !batch.events.is_empty(),
        };
        match news {
            News::Nothing => {}
            News::Cache(snapshot) => self.replace(&snapshot)?,
            News::Batch { batch, beside, sent_unix_us } => {
                let cluster = &self.watcher.cluster;
                if brings_events && sent_unix_us > 0 {
                    cluster.lock().count_lag(Duration::from_micros(unix_us().saturating_sub(sent_unix_us)));
                }
                if let Some(id) = self.id {
                    cluster.apply(id, batch, beside).await?;
                }
                tries.reset();
            }
        }
        if let Some(id) = self.id.filter(|_| brings_events) {
            self.watcher.cluster.lock().comes_by(id, way);
        }
        Ok(())
    }

    fn count_gap(&self) {
        self.series.gaps.increment(1);
        tracing::warn!(worker = %self.watcher.address, "its KV events have a gap; asking for its cache anew");
    }
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.watcher.cluster.leave(id);
            let WorkerInfo { worker_id, instance_id, .. } = &self.info;
            tracing::info!(worker_id, instance_id, address = %self.watcher.address, "worker left");
        }
    }
}

/// The stream's next message; `None` when the worker has noticed itself that we missed events.
fn on_stream(reply: Result<Option<WatchReply>, Status>) -> Result<Option<WatchReply>, Lost> {
    match reply {
        Ok(Some(reply)) => Ok(Some(reply)),
        Ok(None) => Err(Lost::Ended),
        Err(status) if status.code() == Code::DataLoss => Ok(None),
        Err(status) => Err(status.into()),
    }
}

fn has_events(reply: &WatchReply) -> bool {
    matches!(&reply.message, Some(Message::Batch(batch)) if !batch.events.is_empty())
}

async fn next_chunk(snapshot: &mut Option<Streaming<SnapshotChunk>>) -> Result<SnapshotChunk, Lost> {
    match snapshot {
        Some(chunks) => chunks.message().await?.ok_or(Lost::Ended),
        None => std::future::pending().await,
    }
}
