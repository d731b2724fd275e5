//! What a worker's `Watch` stream says, put in order: a snapshot first, then every event above it, once.
//!
//! Pure. A gap is what comes of lost messages and is healed by watching again; everything else that is wrong is the worker's
//! fault and ends its membership.

use tandem_kv::{KvBatch, Snapshot};
use tandem_proto::{
    SnapshotAssembly, WireError,
    v1::{KvEventBatch, WatchReply, WorkerInfo, watch_reply::Message},
};

/// What to do about a message.
#[derive(Debug, PartialEq)]
pub(crate) enum News {
    /// Nothing yet.
    Nothing,
    /// Replace all that was known.
    Cache(Snapshot),
    /// Apply the events, all of them; take over the load.
    Batch { batch: KvBatch, transfer_bytes_per_second: f64 },
}

/// Why the stream cannot be followed any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Broken {
    #[error("events after {applied} are missing")]
    Gap { applied: u64 },
    #[error("it speaks for another instance than the one asked for")]
    OtherInstance,
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// One stream's state.
pub(crate) struct Feed {
    instance_id: String,
    assembly: SnapshotAssembly,
    /// Id of the last event that is known; `None` before the snapshot.
    applied: Option<u64>,
}

impl Feed {
    pub(crate) fn new(info: &WorkerInfo) -> Self {
        let assembly = SnapshotAssembly::new(info.capacity_blocks as usize);
        Self { instance_id: info.instance_id.clone(), assembly, applied: None }
    }

    /// Takes the next message.
    pub(crate) fn take(&mut self, reply: WatchReply) -> Result<News, Broken> {
        match reply.message.ok_or(WireError::Missing { field: "message" })? {
            Message::Snapshot(chunk) => {
                if chunk.instance_id != self.instance_id {
                    return Err(Broken::OtherInstance);
                }
                let Some(snapshot) = self.assembly.push(chunk)? else { return Ok(News::Nothing) };
                self.applied = Some(snapshot.at_event_id);
                Ok(News::Cache(snapshot))
            }
            Message::Batch(batch) => {
                if batch.instance_id != self.instance_id {
                    return Err(Broken::OtherInstance);
                }
                self.take_batch(batch)
            }
        }
    }

    fn take_batch(&mut self, batch: KvEventBatch) -> Result<News, Broken> {
        let transfer_bytes_per_second = batch.load.as_ref().map_or(0.0, |load| load.transfer_bytes_per_second);
        let mut batch = match KvBatch::try_from(batch) {
            Ok(batch) => batch,
            // Events lost on the way look like this, too.
            Err(WireError::EventIds { after, .. }) => return Err(Broken::Gap { applied: after }),
            Err(error) => return Err(error.into()),
        };
        // Events before the snapshot are in it, or the gap after it shows that they are not.
        let Some(applied) = self.applied else { return Ok(News::Nothing) };
        batch.events.retain(|event| event.event_id > applied);
        let next = batch.events.first().map_or(batch.last_event_id.max(applied), |first| first.event_id - 1);
        if next != applied {
            return Err(Broken::Gap { applied });
        }
        self.applied = Some(batch.last_event_id.max(applied));
        Ok(News::Batch { batch, transfer_bytes_per_second })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_kv::{Change, KvEvent};
    use tandem_proto::{event_batch, snapshot_chunks};

    fn feed() -> Feed {
        Feed::new(&WorkerInfo { instance_id: "i".to_owned(), capacity_blocks: 10, ..Default::default() })
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
            let news = feed.take(WatchReply { message: Some(Message::Snapshot(chunk)) });
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
        assert_eq!(feed.take(said(batch(3, &[3]))), Ok(News::Nothing));
        snapshot_at(&mut feed, 4);
        assert_eq!(ids(feed.take(said(batch(5, &[3, 4, 5])))), [5]);
        assert_eq!(ids(feed.take(said(batch(5, &[4, 5])))), [0_u64; 0]);
        assert_eq!(ids(feed.take(said(batch(5, &[])))), [0_u64; 0]);
        // A heartbeat that was on its way.
        assert_eq!(ids(feed.take(said(batch(2, &[])))), [0_u64; 0]);
        assert_eq!(ids(feed.take(said(batch(7, &[6, 7])))), [6, 7]);
        snapshot_at(&mut feed, 9);
        assert_eq!(ids(feed.take(said(batch(10, &[10])))), [10]);
    }

    #[test]
    fn every_kind_of_gap_is_noticed() {
        for missing in [batch(6, &[6]), batch(5, &[]), KvEventBatch { events: batch(7, &[5, 7]).events, ..batch(7, &[]) }] {
            let mut feed = feed();
            snapshot_at(&mut feed, 4);
            let broken = feed.take(said(missing)).expect_err("there is a gap");
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
            assert_eq!(feed().take(reply), Err(expected));
        }
        let chunk = snapshot_chunks("j", &Snapshot { at_event_id: 0, stored: Vec::new() }).remove(0);
        assert_eq!(feed().take(WatchReply { message: Some(Message::Snapshot(chunk)) }), Err(Broken::OtherInstance));
    }
}
