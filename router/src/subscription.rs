//! The KV event subscription to one worker. It puts the worker's messages in order: first a snapshot, then every later event once.
//!
//! Either all messages come on one `Watch` stream, or loads come on the stream and events over NATS. Events are ordered by their ids,
//! whichever source they come from, so the source may change at any time. This module is pure. A gap means that messages were lost, and a
//! new snapshot repairs it; any other error is the worker's fault and ends its membership.

use std::time::Duration;
use tandem_kv::{KvBatch, Snapshot};
use tandem_proto::{
    SnapshotAssembly, WireError, transfer_bytes_per_second, unknown_message,
    v1::{CacheTotals, KvEventBatch, Load, SnapshotChunk, StepTotals, WatchReply, WorkerInfo, watch_reply::Message},
};
use tokio::time::Instant;

/// How long an event may take to arrive over NATS after the stream has announced its id. The limit is one heartbeat, because a lost message
/// is noticed only at the next heartbeat. Few messages are more than a hundredth of this time late.
const LATE_MAX: Duration = Duration::from_secs(1);

/// What a message changes in the known content of the worker's cache.
#[derive(Debug, PartialEq)]
pub(crate) enum CacheUpdate {
    /// There is no change to apply yet.
    None,
    /// The snapshot replaces the known content of the worker's cache.
    Snapshot(Snapshot),
    /// The batch's events are applied first, then its load is recorded.
    Batch { batch: Box<KvBatch>, stats: ReportedStats, sent_unix_us: u64 },
    /// The cache does not change, but the worker serves these LoRAs from now on.
    Loras(Vec<String>),
}

/// The fields of a reported load that `tandem_kv::Load` does not have. Counters are `None` if the worker does not report them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ReportedStats {
    /// The bandwidth that the worker has measured for its transfers; 0 before the first transfer.
    pub(crate) transfer_bytes_per_second: f64,
    pub(crate) cache: Option<CacheTotals>,
    pub(crate) steps: Option<StepTotals>,
}

impl ReportedStats {
    fn of(load: &Load) -> Self {
        Self { transfer_bytes_per_second: transfer_bytes_per_second(load), cache: load.cache, steps: load.steps }
    }

    /// Returns the number of tokens generated since the worker's start; `None` if the worker does not report this number.
    pub(crate) fn generated(&self) -> Option<u64> {
        self.steps.map(|steps| steps.generated_tokens)
    }

    /// Returns `load` with these statistics filled in.
    pub(crate) fn fill(self, load: Load) -> Load {
        let Self { transfer_bytes_per_second, cache, steps } = self;
        Load { transfer_bytes_per_second, cache, steps, ..load }
    }
}

/// Why a subscription ends or has to start again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SubscriptionError {
    #[error("KV events after id {applied} are missing")]
    Gap { applied: u64 },
    #[error("the message is from another instance than the watched worker")]
    OtherInstance,
    #[error(
        "the worker's KV events name more blocks than its reported capacity of {capacity_blocks}; \
         restart the worker with the router's version"
    )]
    BeyondCapacity { capacity_blocks: u32 },
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl SubscriptionError {
    /// Whether a new snapshot repairs the damage of an invalid event from this source. Programs that can reach NATS may publish in a
    /// worker's name, so an invalid event from NATS does not prove that the worker is faulty. An invalid event on the worker's own stream
    /// does.
    pub(crate) fn is_repaired_by_snapshot(self, source: EventRoute) -> bool {
        match self {
            Self::Gap { .. } => true,
            Self::BeyondCapacity { .. } => source == EventRoute::Nats,
            Self::OtherInstance | Self::Wire(_) => false,
        }
    }
}

/// Where the KV events of a worker come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EventRoute {
    /// Everything comes from the `Watch` stream, in order.
    Direct,
    /// Events come from NATS. The stream announces their ids, perhaps before they arrive.
    Nats,
}

pub(crate) struct KvSubscription {
    instance_id: String,
    source: EventRoute,
    assembly: SnapshotAssembly,
    /// The id of the last event that was applied or is in the snapshot; `None` before the snapshot.
    applied: Option<u64>,
    /// The id of an announced event that has not arrived, and the time of the announcement; `None`: all announced events have arrived.
    awaited: Option<(u64, Instant)>,
    /// The last load that the stream reported.
    load: Load,
}

/// Returns the largest number of blocks that the worker may report as cached.
pub(crate) fn cached_blocks_max(info: &WorkerInfo) -> u32 {
    info.cached_blocks_max.max(info.capacity_blocks)
}

impl KvSubscription {
    /// Returns a subscription to this worker instance that waits for its snapshot.
    pub(crate) fn new(info: &WorkerInfo, source: EventRoute) -> Self {
        let assembly = SnapshotAssembly::new(cached_blocks_max(info) as usize);
        let instance_id = info.instance_id.clone();
        Self { instance_id, source, assembly, applied: None, awaited: None, load: Load::default() }
    }

    /// Processes the stream's next message.
    pub(crate) fn take(&mut self, reply: WatchReply, now: Instant) -> Result<CacheUpdate, SubscriptionError> {
        match reply.message {
            Some(Message::Snapshot(chunk)) => self.take_chunk(chunk),
            Some(Message::Batch(batch)) => {
                if let Some(load) = &batch.load {
                    self.load = Load { included_request_ids: Vec::new(), ..load.clone() };
                }
                self.take_batch(batch, now)
            }
            Some(Message::Loras(loras)) => Ok(CacheUpdate::Loras(loras.names)),
            None => {
                unknown_message("Watch");
                Ok(CacheUpdate::None)
            }
        }
    }

    /// Processes a chunk of a snapshot, from the stream or from the reply to a snapshot request.
    pub(crate) fn take_chunk(&mut self, chunk: SnapshotChunk) -> Result<CacheUpdate, SubscriptionError> {
        if chunk.instance_id != self.instance_id {
            return Err(SubscriptionError::OtherInstance);
        }
        let Some(snapshot) = self.assembly.push(chunk)? else { return Ok(CacheUpdate::None) };
        self.applied = Some(snapshot.at_event_id);
        self.awaited = None;
        Ok(CacheUpdate::Snapshot(snapshot))
    }

    /// Processes a batch from NATS, which has no load. Other programs may also publish there, so an invalid batch is skipped. If the batch
    /// did come from the worker, the ids of later events show a gap.
    ///
    /// # Errors
    /// An event is missing.
    pub(crate) fn take_published(&mut self, batch: KvEventBatch, now: Instant) -> Result<CacheUpdate, SubscriptionError> {
        match self.take_batch(KvEventBatch { load: Some(self.load.clone()), ..batch }, now) {
            Err(SubscriptionError::OtherInstance | SubscriptionError::Wire(_)) => Ok(CacheUpdate::None),
            update => update,
        }
    }

    /// Ignores all messages until the next snapshot.
    pub(crate) fn restart(&mut self) {
        self.applied = None;
        self.assembly.clear();
    }

    fn take_batch(&mut self, batch: KvEventBatch, now: Instant) -> Result<CacheUpdate, SubscriptionError> {
        if batch.instance_id != self.instance_id {
            return Err(SubscriptionError::OtherInstance);
        }
        let stats = batch.load.as_ref().map(ReportedStats::of).unwrap_or_default();
        let sent_unix_us = batch.sent_unix_us;
        let mut batch = match KvBatch::try_from(batch) {
            Ok(batch) => batch,
            // The event ids in the batch have a gap.
            Err(WireError::EventIds { after, .. }) => return Err(SubscriptionError::Gap { applied: after }),
            Err(error) => return Err(error.into()),
        };
        // The snapshot that the worker is still sending includes these events. If it does not, the next events show a gap.
        let Some(applied) = self.applied else { return Ok(CacheUpdate::None) };
        batch.events.retain(|event| event.event_id > applied);
        let announced = batch.last_event_id.max(applied);
        match batch.events.first() {
            Some(first) if first.event_id - 1 != applied => return Err(SubscriptionError::Gap { applied }),
            Some(_) => self.applied = Some(announced),
            None if announced == applied => {}
            None => self.wait_for(announced, applied, now)?,
        }
        self.awaited = self.awaited.filter(|(awaited, _)| self.applied < Some(*awaited));
        Ok(CacheUpdate::Batch { batch: Box::new(batch), stats, sent_unix_us })
    }

    /// Accepts that an announced event has not arrived yet. After [`LATE_MAX`] the event is treated as lost, which is a gap.
    fn wait_for(&mut self, announced: u64, applied: u64, now: Instant) -> Result<(), SubscriptionError> {
        let (_, since) = *self.awaited.get_or_insert((announced, now));
        let is_late = self.source == EventRoute::Direct || now.duration_since(since) >= LATE_MAX;
        if is_late { Err(SubscriptionError::Gap { applied }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_kv::{Change, KvEvent};
    use tandem_proto::{event_batch, snapshot_chunks};

    fn subscription_from(source: EventRoute) -> KvSubscription {
        KvSubscription::new(&WorkerInfo { instance_id: "i".to_owned(), capacity_blocks: 10, ..Default::default() }, source)
    }

    fn subscription() -> KvSubscription {
        subscription_from(EventRoute::Direct)
    }

    fn published(batch: KvEventBatch) -> KvEventBatch {
        KvEventBatch { load: None, ..batch }
    }

    fn batch(last_event_id: u64, ids: &[u64]) -> KvEventBatch {
        let events: Vec<KvEvent> = ids.iter().map(|id| KvEvent { event_id: *id, change: Change::Cleared }).collect();
        event_batch("i", &KvBatch { last_event_id, events, ..Default::default() }, 0)
    }

    fn on_stream(batch: KvEventBatch) -> WatchReply {
        WatchReply { message: Some(Message::Batch(batch)) }
    }

    fn snapshot_at(subscription: &mut KvSubscription, at_event_id: u64) {
        for chunk in snapshot_chunks("i", &Snapshot { at_event_id, stored: Vec::new() }) {
            let update = subscription.take(WatchReply { message: Some(Message::Snapshot(chunk)) }, Instant::now());
            assert_eq!(update, Ok(CacheUpdate::Snapshot(Snapshot { at_event_id, stored: Vec::new() })));
        }
    }

    fn ids(update: Result<CacheUpdate, SubscriptionError>) -> Vec<u64> {
        let Ok(CacheUpdate::Batch { batch, .. }) = update else { panic!("expected a batch, got {update:?}") };
        batch.events.iter().map(|event| event.event_id).collect()
    }

    #[test]
    fn events_after_the_snapshot_are_applied_once() {
        let mut subscription = subscription();
        assert_eq!(subscription.take(on_stream(batch(3, &[3])), Instant::now()), Ok(CacheUpdate::None));
        snapshot_at(&mut subscription, 4);
        assert_eq!(ids(subscription.take(on_stream(batch(5, &[3, 4, 5])), Instant::now())), [5]);
        assert_eq!(ids(subscription.take(on_stream(batch(5, &[4, 5])), Instant::now())), [0_u64; 0]);
        assert_eq!(ids(subscription.take(on_stream(batch(5, &[])), Instant::now())), [0_u64; 0]);
        // This heartbeat announces an older event than the last received event.
        assert_eq!(ids(subscription.take(on_stream(batch(2, &[])), Instant::now())), [0_u64; 0]);
        assert_eq!(ids(subscription.take(on_stream(batch(7, &[6, 7])), Instant::now())), [6, 7]);
        snapshot_at(&mut subscription, 9);
        assert_eq!(ids(subscription.take(on_stream(batch(10, &[10])), Instant::now())), [10]);
    }

    #[test]
    fn gap_is_detected_between_batches_within_a_batch_and_at_the_end() {
        for missing in [batch(6, &[6]), batch(5, &[]), KvEventBatch { events: batch(7, &[5, 7]).events, ..batch(7, &[]) }] {
            let mut subscription = subscription();
            snapshot_at(&mut subscription, 4);
            let error = subscription.take(on_stream(missing), Instant::now()).expect_err("a gap in the events is an error");
            assert!(matches!(error, SubscriptionError::Gap { .. }), "{error:?}");
        }
    }

    #[test]
    fn message_of_another_instance_or_with_a_missing_field_is_refused() {
        let other = || KvEventBatch { instance_id: "j".to_owned(), ..batch(0, &[]) };
        let cases = [
            (on_stream(other()), SubscriptionError::OtherInstance),
            (
                on_stream(KvEventBatch { load: None, ..batch(4, &[]) }),
                SubscriptionError::Wire(WireError::Missing { field: "load" }),
            ),
        ];
        for (reply, expected) in cases {
            assert_eq!(subscription().take(reply, Instant::now()), Err(expected));
        }
        assert_eq!(
            subscription().take(WatchReply { message: None }, Instant::now()),
            Ok(CacheUpdate::None),
            "an unknown kind is skipped"
        );
        let chunk = snapshot_chunks("j", &Snapshot { at_event_id: 0, stored: Vec::new() }).remove(0);
        assert_eq!(
            subscription().take(WatchReply { message: Some(Message::Snapshot(chunk)) }, Instant::now()),
            Err(SubscriptionError::OtherInstance)
        );
    }

    #[test]
    fn published_events_may_arrive_after_the_heartbeat_that_announces_them() {
        let (mut subscription, start) = (subscription_from(EventRoute::Nats), Instant::now());
        let after = |ms| start + Duration::from_millis(ms);
        assert_eq!(subscription.take_published(published(batch(3, &[3])), start), Ok(CacheUpdate::None));
        snapshot_at(&mut subscription, 4);
        // The stream is ahead of NATS: its load is applied, and the announced events may still arrive.
        let ahead = KvEventBatch { load: Some(Load { running_sequences: 7, ..Default::default() }), ..batch(6, &[]) };
        assert_eq!(ids(subscription.take(on_stream(ahead), start)), [0_u64; 0]);
        let Ok(CacheUpdate::Batch { batch: events, .. }) = subscription.take_published(published(batch(6, &[5, 6])), after(900))
        else {
            panic!("the events have arrived")
        };
        assert_eq!((events.events.len(), events.load.running_sequences), (2, 7), "the last load on the stream is used");
        // After the events have arrived, the time limit for later events starts again.
        assert_eq!(ids(subscription.take(on_stream(batch(7, &[])), after(950))), [0_u64; 0]);
        assert_eq!(ids(subscription.take(on_stream(batch(8, &[])), after(1_900))), [0_u64; 0]);
        assert_eq!(subscription.take(on_stream(batch(8, &[])), after(1_950)), Err(SubscriptionError::Gap { applied: 6 }));
        // All events before the next snapshot are ignored; later events are applied.
        subscription.restart();
        assert_eq!(subscription.take_published(published(batch(8, &[8])), after(2_000)), Ok(CacheUpdate::None));
        snapshot_at(&mut subscription, 8);
        assert_eq!(ids(subscription.take_published(published(batch(9, &[8, 9])), after(2_000))), [9]);
        assert_eq!(
            subscription.take_published(published(batch(11, &[11])), after(2_000)),
            Err(SubscriptionError::Gap { applied: 9 })
        );
    }

    #[test]
    fn events_are_applied_once_when_their_source_changes() {
        let (mut subscription, now) = (subscription_from(EventRoute::Nats), Instant::now());
        snapshot_at(&mut subscription, 0);
        assert_eq!(ids(subscription.take_published(published(batch(1, &[1])), now)), [1]);
        // The worker cannot publish and sends events on the stream; NATS delivers older events late.
        assert_eq!(ids(subscription.take(on_stream(batch(3, &[2, 3])), now)), [2, 3]);
        assert_eq!(ids(subscription.take_published(published(batch(2, &[2])), now)), [0_u64; 0]);
        assert_eq!(ids(subscription.take_published(published(batch(4, &[4])), now)), [4]);
        assert_eq!(subscription.take(on_stream(batch(6, &[6])), now), Err(SubscriptionError::Gap { applied: 4 }));
        let foreign = KvEventBatch { instance_id: "j".to_owned(), ..published(batch(5, &[5])) };
        assert_eq!(subscription.take_published(foreign, now), Ok(CacheUpdate::None));
        let malformed = KvEventBatch { events: vec![Default::default()], last_event_id: 0, ..published(batch(5, &[])) };
        assert_eq!(subscription.take_published(malformed, now), Ok(CacheUpdate::None));
    }
}
