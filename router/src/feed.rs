//! What a worker says of its cache, put in order: a snapshot first, then every event above it, once.
//!
//! It comes by one way or by two: a `Watch` stream with everything, or a stream with loads and NATS with events. Events
//! count by their numbers, whichever way they come, so the way may change at any time. Pure. A gap is what comes of lost messages and
//! is healed by a new snapshot; everything else that is wrong is the worker's fault and ends its membership.

use std::time::Duration;
use tandem_kv::{KvBatch, Snapshot};
use tandem_proto::{
    SnapshotAssembly, WireError, transfer_bytes_per_second,
    v1::{CacheTotals, KvEventBatch, Load, SnapshotChunk, StepTotals, WatchReply, WorkerInfo, watch_reply::Message},
};
use tokio::time::Instant;

/// How much later than its number on the stream an event may come over NATS. As long as a heartbeat: a message is rarely late by
/// a hundredth of that, and what is missing is missed no longer.
pub(crate) const LATE_MAX: Duration = Duration::from_secs(1);

/// What to do about a message.
#[derive(Debug, PartialEq)]
pub(crate) enum News {
    /// Nothing yet.
    Nothing,
    /// Replace all that was known.
    Cache(Snapshot),
    /// Apply the events, all of them; take over the load.
    Batch { batch: KvBatch, beside: Beside, sent_unix_us: u64 },
}

/// What comes with a load and is not the cache's.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Beside {
    /// Measured; 0 before the first transfer.
    pub(crate) transfer_bytes_per_second: f64,
    /// As the worker counts; `None`: not told.
    pub(crate) cache: Option<CacheTotals>,
    /// The same of its steps.
    pub(crate) steps: Option<StepTotals>,
}

impl Beside {
    fn of(load: &Load) -> Self {
        Self { transfer_bytes_per_second: transfer_bytes_per_second(load), cache: load.cache, steps: load.steps }
    }

    /// Tokens generated since the worker's start.
    pub(crate) fn generated(&self) -> Option<u64> {
        self.steps.map(|steps| steps.generated_tokens)
    }

    /// Puts it back.
    pub(crate) fn fill(self, load: Load) -> Load {
        let Self { transfer_bytes_per_second, cache, steps } = self;
        Load { transfer_bytes_per_second, cache, steps, ..load }
    }
}

/// Why the stream cannot be followed any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    #[error("events after {applied} are missing")]
    Gap { applied: u64 },
    #[error("it speaks for another instance than the one asked for")]
    OtherInstance,
    #[error(
        "its KV events name more blocks than its reported capacity of {capacity_blocks}; restart it with the router's version"
    )]
    BeyondCapacity { capacity_blocks: u32 },
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl Broken {
    /// Whether a snapshot puts right what events that came this way have broken. Others may publish in a worker's name where
    /// they can reach NATS, so what cannot be right there says nothing about the worker; on its own stream it does.
    pub(crate) fn is_healed_by_a_snapshot(self, way: Way) -> bool {
        match self {
            Self::Gap { .. } => true,
            Self::BeyondCapacity { .. } => way == Way::Published,
            Self::OtherInstance | Self::Wire(_) => false,
        }
    }
}

/// How the events of a worker come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// All on the stream: it is in order.
    Stream,
    /// Over NATS, and the stream tells their numbers, perhaps before.
    Published,
}

/// One stream's state.
pub(crate) struct Feed {
    instance_id: String,
    way: Way,
    assembly: SnapshotAssembly,
    /// Id of the last event that is known; `None` before the snapshot.
    applied: Option<u64>,
    /// An event that the stream has told to be there and that has not come, and since when.
    awaited: Option<(u64, Instant)>,
    /// As the stream said last.
    load: Load,
}

impl Feed {
    pub(crate) fn new(info: &WorkerInfo, way: Way) -> Self {
        let assembly = SnapshotAssembly::new(info.capacity_blocks as usize);
        let instance_id = info.instance_id.clone();
        Self { instance_id, way, assembly, applied: None, awaited: None, load: Load::default() }
    }

    /// Takes the stream's next message.
    pub(crate) fn take(&mut self, reply: WatchReply, now: Instant) -> Result<News, Broken> {
        match reply.message.ok_or(WireError::Missing { field: "message" })? {
            Message::Snapshot(chunk) => self.take_chunk(chunk),
            Message::Batch(batch) => {
                if let Some(load) = &batch.load {
                    self.load = Load { included_request_ids: Vec::new(), ..load.clone() };
                }
                self.take_batch(batch, now)
            }
        }
    }

    /// Takes a part of a snapshot, of the stream's or one that was asked for.
    pub(crate) fn take_chunk(&mut self, chunk: SnapshotChunk) -> Result<News, Broken> {
        if chunk.instance_id != self.instance_id {
            return Err(Broken::OtherInstance);
        }
        let Some(snapshot) = self.assembly.push(chunk)? else { return Ok(News::Nothing) };
        self.applied = Some(snapshot.at_event_id);
        self.awaited = None;
        Ok(News::Cache(snapshot))
    }

    /// Takes what NATS has brought; it says nothing about the load. Others may publish there, too: what cannot be right is left
    /// out, and missed by its number if it was the worker's.
    pub(crate) fn take_published(&mut self, batch: KvEventBatch, now: Instant) -> Result<News, Broken> {
        match self.take_batch(KvEventBatch { load: Some(self.load.clone()), ..batch }, now) {
            Err(Broken::OtherInstance | Broken::Wire(_)) => Ok(News::Nothing),
            news => news,
        }
    }

    /// Another snapshot is to come; nothing counts before it.
    pub(crate) fn restart(&mut self) {
        self.applied = None;
        self.assembly.clear();
    }

    fn take_batch(&mut self, batch: KvEventBatch, now: Instant) -> Result<News, Broken> {
        if batch.instance_id != self.instance_id {
            return Err(Broken::OtherInstance);
        }
        let beside = batch.load.as_ref().map(Beside::of).unwrap_or_default();
        let sent_unix_us = batch.sent_unix_us;
        let mut batch = match KvBatch::try_from(batch) {
            Ok(batch) => batch,
            // Events lost on the way look like this, too.
            Err(WireError::EventIds { after, .. }) => return Err(Broken::Gap { applied: after }),
            Err(error) => return Err(error.into()),
        };
        // Events before the snapshot are in it, or the gap after it shows that they are not.
        let Some(applied) = self.applied else { return Ok(News::Nothing) };
        batch.events.retain(|event| event.event_id > applied);
        let told = batch.last_event_id.max(applied);
        match batch.events.first() {
            Some(first) if first.event_id - 1 != applied => return Err(Broken::Gap { applied }),
            Some(_) => self.applied = Some(told),
            None if told == applied => {}
            None => self.wait_for(told, applied, now)?,
        }
        self.awaited = self.awaited.filter(|(awaited, _)| self.applied < Some(*awaited));
        Ok(News::Batch { batch, beside, sent_unix_us })
    }

    /// The worker has made an event that is not there.
    fn wait_for(&mut self, told: u64, applied: u64, now: Instant) -> Result<(), Broken> {
        let (_, since) = *self.awaited.get_or_insert((told, now));
        if self.way == Way::Stream || now.duration_since(since) >= LATE_MAX { Err(Broken::Gap { applied }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_kv::{Change, KvEvent};
    use tandem_proto::{event_batch, snapshot_chunks};

    fn feed_by(way: Way) -> Feed {
        Feed::new(&WorkerInfo { instance_id: "i".to_owned(), capacity_blocks: 10, ..Default::default() }, way)
    }

    fn feed() -> Feed {
        feed_by(Way::Stream)
    }

    fn published(batch: KvEventBatch) -> KvEventBatch {
        KvEventBatch { load: None, ..batch }
    }

    fn batch(last_event_id: u64, ids: &[u64]) -> KvEventBatch {
        let events: Vec<KvEvent> = ids.iter().map(|id| KvEvent { event_id: *id, change: Change::Cleared }).collect();
        event_batch("i", &KvBatch { last_event_id, events, ..Default::default() }, 0)
    }

    fn said(batch: KvEventBatch) -> WatchReply {
        WatchReply { message: Some(Message::Batch(batch)) }
    }

    fn snapshot_at(feed: &mut Feed, at_event_id: u64) {
        for chunk in snapshot_chunks("i", &Snapshot { at_event_id, stored: Vec::new() }) {
            let news = feed.take(WatchReply { message: Some(Message::Snapshot(chunk)) }, Instant::now());
            assert_eq!(news, Ok(News::Cache(Snapshot { at_event_id, stored: Vec::new() })));
        }
    }

    fn ids(news: Result<News, Broken>) -> Vec<u64> {
        let Ok(News::Batch { batch, .. }) = news else { panic!("expected a batch, got {news:?}") };
        batch.events.iter().map(|event| event.event_id).collect()
    }

    #[test]
    fn events_above_the_snapshot_are_applied_once_each() {
        let mut feed = feed();
        assert_eq!(feed.take(said(batch(3, &[3])), Instant::now()), Ok(News::Nothing));
        snapshot_at(&mut feed, 4);
        assert_eq!(ids(feed.take(said(batch(5, &[3, 4, 5])), Instant::now())), [5]);
        assert_eq!(ids(feed.take(said(batch(5, &[4, 5])), Instant::now())), [0_u64; 0]);
        assert_eq!(ids(feed.take(said(batch(5, &[])), Instant::now())), [0_u64; 0]);
        // A heartbeat that was on its way.
        assert_eq!(ids(feed.take(said(batch(2, &[])), Instant::now())), [0_u64; 0]);
        assert_eq!(ids(feed.take(said(batch(7, &[6, 7])), Instant::now())), [6, 7]);
        snapshot_at(&mut feed, 9);
        assert_eq!(ids(feed.take(said(batch(10, &[10])), Instant::now())), [10]);
    }

    #[test]
    fn every_kind_of_gap_is_noticed() {
        for missing in [batch(6, &[6]), batch(5, &[]), KvEventBatch { events: batch(7, &[5, 7]).events, ..batch(7, &[]) }] {
            let mut feed = feed();
            snapshot_at(&mut feed, 4);
            let broken = feed.take(said(missing), Instant::now()).expect_err("there is a gap");
            assert!(matches!(broken, Broken::Gap { .. }), "{broken:?}");
        }
    }

    #[test]
    fn other_instances_and_nonsense_are_refused() {
        let other = || KvEventBatch { instance_id: "j".to_owned(), ..batch(0, &[]) };
        let cases = [
            (WatchReply { message: None }, Broken::Wire(WireError::Missing { field: "message" })),
            (said(other()), Broken::OtherInstance),
            (said(KvEventBatch { load: None, ..batch(4, &[]) }), Broken::Wire(WireError::Missing { field: "load" })),
        ];
        for (reply, expected) in cases {
            assert_eq!(feed().take(reply, Instant::now()), Err(expected));
        }
        let chunk = snapshot_chunks("j", &Snapshot { at_event_id: 0, stored: Vec::new() }).remove(0);
        assert_eq!(
            feed().take(WatchReply { message: Some(Message::Snapshot(chunk)) }, Instant::now()),
            Err(Broken::OtherInstance)
        );
    }

    #[test]
    fn events_that_are_published_may_come_after_their_number() {
        let (mut feed, start) = (feed_by(Way::Published), Instant::now());
        let after = |ms| start + Duration::from_millis(ms);
        assert_eq!(feed.take_published(published(batch(3, &[3])), start), Ok(News::Nothing));
        snapshot_at(&mut feed, 4);
        // The stream is ahead: its load counts, and the events are waited for.
        let ahead = KvEventBatch { load: Some(Load { running_sequences: 7, ..Default::default() }), ..batch(6, &[]) };
        assert_eq!(ids(feed.take(said(ahead), start)), [0_u64; 0]);
        let Ok(News::Batch { batch: news, .. }) = feed.take_published(published(batch(6, &[5, 6])), after(900)) else {
            panic!("they are there")
        };
        assert_eq!((news.events.len(), news.load.running_sequences), (2, 7), "the load is what the stream said last");
        // They have come: a later one is waited for as long.
        assert_eq!(ids(feed.take(said(batch(7, &[])), after(950))), [0_u64; 0]);
        assert_eq!(ids(feed.take(said(batch(8, &[])), after(1_900))), [0_u64; 0]);
        assert_eq!(feed.take(said(batch(8, &[])), after(1_950)), Err(Broken::Gap { applied: 6 }));
        // While a snapshot is on its way nothing counts, and afterwards what is above it.
        feed.restart();
        assert_eq!(feed.take_published(published(batch(8, &[8])), after(2_000)), Ok(News::Nothing));
        snapshot_at(&mut feed, 8);
        assert_eq!(ids(feed.take_published(published(batch(9, &[8, 9])), after(2_000))), [9]);
        assert_eq!(feed.take_published(published(batch(11, &[11])), after(2_000)), Err(Broken::Gap { applied: 9 }));
    }

    #[test]
    fn events_may_change_their_way_at_any_time() {
        let (mut feed, now) = (feed_by(Way::Published), Instant::now());
        snapshot_at(&mut feed, 0);
        assert_eq!(ids(feed.take_published(published(batch(1, &[1])), now)), [1]);
        // The worker cannot publish and tells them itself; NATS brings late what it had.
        assert_eq!(ids(feed.take(said(batch(3, &[2, 3])), now)), [2, 3]);
        assert_eq!(ids(feed.take_published(published(batch(2, &[2])), now)), [0_u64; 0]);
        assert_eq!(ids(feed.take_published(published(batch(4, &[4])), now)), [4]);
        assert_eq!(feed.take(said(batch(6, &[6])), now), Err(Broken::Gap { applied: 4 }));
        let of_another = KvEventBatch { instance_id: "j".to_owned(), ..published(batch(5, &[5])) };
        assert_eq!(feed.take_published(of_another, now), Ok(News::Nothing));
        let nonsense = KvEventBatch { events: vec![Default::default()], last_event_id: 0, ..published(batch(5, &[])) };
        assert_eq!(feed.take_published(nonsense, now), Ok(News::Nothing));
    }
}
