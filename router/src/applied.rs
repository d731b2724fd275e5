//! Applies a worker's events to the index, without the lock of the router's state.

use crate::{
    index::{PrefixIndex, Skipped, WorkerSlot},
    subscription::SubscriptionError,
};
use std::sync::Arc;
use tandem_kv::{Change, KvEvent};

/// The blocks of one member in the index. Only the task that watches the worker changes them.
pub(crate) struct IndexedWorker {
    pub(crate) index: Arc<PrefixIndex>,
    pub(crate) slot: WorkerSlot,
    /// The most blocks that the worker can have cached.
    pub(crate) capacity_blocks: u32,
}

/// The events that were applied, by kind.
#[derive(Default)]
pub(crate) struct Applied {
    pub(crate) stored: u64,
    pub(crate) removed: u64,
    pub(crate) cleared: u64,
    pub(crate) skipped: Skipped,
    /// The number of the worker's blocks in the index.
    pub(crate) blocks: u64,
    /// Set if an event names more blocks than the worker can hold. Later events were not applied, and the worker's blocks in the index are
    /// not reliable any more.
    pub(crate) beyond_capacity: Option<SubscriptionError>,
}

/// A slice of events ends when its events name this many blocks. Applying a slice takes less than a millisecond, during which no other
/// worker's events are applied.
pub(crate) const SLICE_BLOCKS: usize = 4_096;

/// Returns the number of events in the next slice, at least 1.
pub(crate) fn slice_len(events: &[KvEvent]) -> usize {
    let mut blocks = 0;
    let last = events.iter().position(|event| {
        blocks += match &event.change {
            Change::Stored(chain) => chain.sequence_hashes.len(),
            Change::Removed(hashes) => hashes.len(),
            // A slice ends after a cleared cache, because its blocks are removed between two slices.
            Change::Cleared => SLICE_BLOCKS,
        };
        blocks >= SLICE_BLOCKS
    });
    last.map_or(events.len(), |last| last + 1)
}

impl IndexedWorker {
    pub(crate) fn apply(&self, events: &[KvEvent]) -> Applied {
        let (mut applied, capacity_blocks) = (Applied::default(), self.capacity_blocks);
        for event in events {
            let (kind, blocks) = match &event.change {
                Change::Stored(chain) => {
                    (&mut applied.stored, self.index.blocks_and_markers(self.slot) + chain.sequence_hashes.len() as u64)
                }
                Change::Removed(hashes) => (&mut applied.removed, hashes.len() as u64),
                Change::Cleared => (&mut applied.cleared, 0),
            };
            if blocks > u64::from(capacity_blocks) {
                applied.beyond_capacity = Some(SubscriptionError::BeyondCapacity { capacity_blocks });
                break;
            }
            *kind += 1;
            applied.skipped += self.index.apply(self.slot, &event.change);
        }
        applied.blocks = self.index.blocks(self.slot);
        applied
    }
}
