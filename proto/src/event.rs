//! Conversions of KV events and of the batches that carry them.

use crate::{WireError, v1};
use prost::Message;
use tandem_kv::{Change, KvBatch, KvEvent, Load, SequenceHash, StoredChain};

pub(crate) fn stored(parent: Option<SequenceHash>, hashes: &[SequenceHash]) -> v1::Stored {
    v1::Stored { parent: parent.map(|parent| parent.0), sequence_hashes: numbers(hashes) }
}

pub(crate) fn chain(stored: v1::Stored) -> Result<StoredChain, WireError> {
    Ok(StoredChain { parent: stored.parent.map(SequenceHash), sequence_hashes: hashes(stored.sequence_hashes)? })
}

impl From<&KvEvent> for v1::KvEvent {
    fn from(event: &KvEvent) -> Self {
        use v1::kv_event::Change as Wire;
        let change = match &event.change {
            Change::Stored(chain) => Wire::Stored(stored(chain.parent, &chain.sequence_hashes)),
            Change::Removed(removed) => Wire::Removed(v1::Removed { sequence_hashes: numbers(removed) }),
            Change::Cleared => Wire::Cleared(v1::Cleared {}),
        };
        Self { event_id: event.event_id, change: Some(change) }
    }
}

fn event(event: v1::KvEvent) -> Result<KvEvent, WireError> {
    use v1::kv_event::Change as Wire;
    let change = match event.change.ok_or(WireError::Missing { field: "change" })? {
        Wire::Stored(stored) => Change::Stored(chain(stored)?),
        Wire::Removed(removed) => Change::Removed(hashes(removed.sequence_hashes)?),
        Wire::Cleared(v1::Cleared {}) => Change::Cleared,
    };
    Ok(KvEvent { event_id: event.event_id, change })
}

/// Returns the wire form of a batch, with only those events whose ids are above `above`.
pub fn event_batch(instance_id: &str, batch: &KvBatch, above: u64) -> v1::KvEventBatch {
    v1::KvEventBatch {
        instance_id: instance_id.to_owned(),
        last_event_id: batch.last_event_id.max(above),
        events: batch.events.iter().filter(|event| event.event_id > above).map(Into::into).collect(),
        load: Some(v1::Load { included_request_ids: batch.included_request_ids.clone(), ..(&batch.load).into() }),
        sent_unix_us: 0,
    }
}

/// Splits a batch into batches of at most `bytes_max` encoded bytes. An event that is longer by itself becomes a batch without events: its
/// `last_event_id` shows the receiver that an event is missing.
pub fn split_batch(mut batch: v1::KvEventBatch, bytes_max: usize) -> Vec<v1::KvEventBatch> {
    if batch.encoded_len() <= bytes_max {
        return vec![batch];
    }
    let events = std::mem::take(&mut batch.events);
    let without_events = |last_event_id| v1::KvEventBatch { last_event_id, ..batch.clone() };
    let empty = without_events(u64::MAX).encoded_len();
    let (mut batches, mut capacity) = (Vec::<v1::KvEventBatch>::new(), 0);
    for event in events {
        let (event_id, bytes) = (event.event_id, event.encoded_len() + ITEM_BYTES_MAX);
        let fits = empty + bytes <= bytes_max;
        if batches.is_empty() || !fits || bytes > capacity {
            batches.push(without_events(event_id));
            capacity = bytes_max.saturating_sub(empty);
        }
        let last = batches.last_mut().expect("the list has a batch");
        last.last_event_id = event_id;
        if fits {
            last.events.push(event);
            capacity -= bytes;
        } else {
            capacity = 0;
        }
    }
    if batches.is_empty() {
        batches.push(without_events(batch.last_event_id));
    }
    batches
}

/// Maximum number of bytes that an item of a list takes in addition to its content, for its tag and its length.
const ITEM_BYTES_MAX: usize = 6;

/// Checks that the event ids within the batch have no gap. Only the receiver can check for a gap before the first event. The result has no
/// `step`, because the wire format has no such field.
impl TryFrom<v1::KvEventBatch> for KvBatch {
    type Error = WireError;

    fn try_from(batch: v1::KvEventBatch) -> Result<Self, WireError> {
        let load = batch.load.ok_or(WireError::Missing { field: "load" })?;
        let events = batch.events.into_iter().map(event).collect::<Result<Vec<_>, _>>()?;
        for pair in events.windows(2) {
            let (after, found) = (pair[0].event_id, pair[1].event_id);
            if after.checked_add(1) != Some(found) {
                return Err(WireError::EventIds { after, found });
            }
        }
        if let Some(last) = events.last()
            && last.event_id != batch.last_event_id
        {
            return Err(WireError::EventIds { after: last.event_id, found: batch.last_event_id });
        }
        Ok(Self {
            last_event_id: batch.last_event_id,
            events,
            load: Load::from(&load),
            included_request_ids: load.included_request_ids,
            step: None,
        })
    }
}

fn numbers(hashes: &[SequenceHash]) -> Vec<u64> {
    hashes.iter().map(|hash| hash.0).collect()
}

fn hashes(numbers: Vec<u64>) -> Result<Vec<SequenceHash>, WireError> {
    if numbers.is_empty() {
        return Err(WireError::NoBlocks);
    }
    Ok(numbers.into_iter().map(SequenceHash).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};

    fn change() -> impl Strategy<Value = Change> {
        let hashes = || vec(any::<u64>().prop_map(SequenceHash), 1..20);
        prop_oneof![
            (any::<Option<u64>>(), hashes()).prop_map(|(parent, sequence_hashes)| {
                Change::Stored(StoredChain { parent: parent.map(SequenceHash), sequence_hashes })
            }),
            hashes().prop_map(Change::Removed),
            Just(Change::Cleared),
        ]
    }

    fn batch() -> impl Strategy<Value = KvBatch> {
        (vec(change(), 0..10), 0..u64::MAX / 2, vec("[a-z]{0,8}", 0..3)).prop_map(|(changes, before, included_request_ids)| {
            let events: Vec<KvEvent> =
                changes.into_iter().zip(before + 1..).map(|(change, event_id)| KvEvent { event_id, change }).collect();
            let last_event_id = before + events.len() as u64;
            KvBatch { last_event_id, events, included_request_ids, ..Default::default() }
        })
    }

    proptest! {
        #[test]
        fn event_batch_round_trips(batch in batch()) {
            prop_assert_eq!(KvBatch::try_from(event_batch("i", &batch, 0)), Ok(batch));
        }

        #[test]
        fn event_batch_omits_exactly_the_events_up_to_the_snapshot(batch in batch(), into in 0..12_u64) {
            let above = (batch.last_event_id - batch.events.len() as u64) + into;
            let wire = event_batch("i", &batch, above);
            prop_assert_eq!(wire.events.len() as u64, (batch.events.len() as u64).saturating_sub(into));
            prop_assert!(wire.events.iter().all(|event| event.event_id > above));
            prop_assert!(KvBatch::try_from(wire).is_ok());
        }
    }

    proptest! {
        #[test]
        fn split_batches_are_bounded_and_contain_every_event_once(batch in batch(), bytes_max in 40..900_usize) {
            let wire = v1::KvEventBatch { load: None, ..event_batch("i", &batch, 0) };
            let batches = split_batch(wire.clone(), bytes_max);
            let mut wanted = wire.events.iter();
            for batch in &batches {
                prop_assert!(batch.encoded_len() <= bytes_max, "{} bytes, {bytes_max} are allowed", batch.encoded_len());
                if batch.events.is_empty() && let Some(missed) = wanted.next() {
                    prop_assert_eq!(missed.event_id, batch.last_event_id);
                    prop_assert!(missed.encoded_len() + 40 > bytes_max);
                }
                for event in &batch.events {
                    prop_assert_eq!(Some(event), wanted.next());
                }
                let whole = v1::KvEventBatch { load: Some(v1::Load::default()), ..batch.clone() };
                prop_assert!(KvBatch::try_from(whole).is_ok());
            }
            prop_assert_eq!(wanted.next(), None);
            prop_assert_eq!(batches.last().map(|batch| batch.last_event_id), Some(wire.last_event_id));
        }
    }

    #[test]
    fn malformed_batches_are_refused() {
        let cleared = |event_id| v1::KvEvent { event_id, change: Some(v1::kv_event::Change::Cleared(v1::Cleared {})) };
        let batch = |last_event_id, events: &[v1::KvEvent]| v1::KvEventBatch {
            instance_id: "i".to_owned(),
            last_event_id,
            events: events.to_vec(),
            load: Some(v1::Load::default()),
            sent_unix_us: 0,
        };
        let error = |wire| KvBatch::try_from(wire).expect_err("the batch breaks the protocol");
        assert_eq!(error(batch(3, &[cleared(1), cleared(3)])), WireError::EventIds { after: 1, found: 3 });
        assert_eq!(error(batch(2, &[cleared(2), cleared(1)])), WireError::EventIds { after: 2, found: 1 });
        assert_eq!(error(batch(9, &[cleared(1)])), WireError::EventIds { after: 1, found: 9 });
        assert_eq!(error(batch(0, &[cleared(u64::MAX), cleared(0)])), WireError::EventIds { after: u64::MAX, found: 0 });
        assert_eq!(error(v1::KvEventBatch { load: None, ..batch(0, &[]) }), WireError::Missing { field: "load" });
        let event = v1::KvEvent { event_id: 1, change: None };
        assert_eq!(error(batch(1, &[event])), WireError::Missing { field: "change" });
        for change in [v1::kv_event::Change::Stored(v1::Stored::default()), v1::kv_event::Change::Removed(v1::Removed::default())]
        {
            assert_eq!(error(batch(1, &[v1::KvEvent { event_id: 1, change: Some(change) }])), WireError::NoBlocks);
        }
    }
}
