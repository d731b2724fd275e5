//! Events that report the changes of a worker's cache.

use crate::SequenceHash;
use std::cell::Cell;

/// One change of a cache. Ids begin at 1 and have no gaps within one cache's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEvent {
    /// The number of this change among all changes of the cache.
    pub event_id: u64,
    /// The change of the set of cached hashes.
    pub change: Change,
}

/// A change of the set of cached hashes. A block whose hash is cached already is not stored again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Blocks were stored in the cache and may be reused.
    Stored(StoredChain),
    /// The cache dropped these blocks, children before their parents.
    Removed(Vec<SequenceHash>),
    /// The cache dropped all blocks.
    Cleared,
}

/// Consecutive blocks of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredChain {
    /// The hash of the block before the first stored block; `None` if the stored blocks begin a prompt.
    pub parent: Option<SequenceHash>,
    /// The hashes of the blocks, in the order of the prompt.
    pub sequence_hashes: Vec<SequenceHash>,
}

/// A cache's content after the change with id `at_event_id`; parents come before their children.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The id of the last change that the snapshot includes.
    pub at_event_id: u64,
    /// Chains of blocks. Together they are the complete content of the cache.
    pub stored: Vec<StoredChain>,
}

/// Changes that have not been taken yet. Successive changes of one kind are merged into one event.
#[derive(Debug, Default)]
pub struct EventLog {
    last_id: u64,
    pending: Vec<KvEvent>,
    /// Whether [`Self::last_id`] has returned the id of the last event. Later changes must then not be merged into that event.
    last_id_returned: Cell<bool>,
}

impl EventLog {
    /// Records that the block with this hash was stored under `parent`, which is `None` if the block begins a prompt.
    pub fn stored(&mut self, parent: Option<SequenceHash>, hash: SequenceHash) {
        if let Some(Change::Stored(chain)) = self.last_mutable()
            && parent.as_ref() == chain.sequence_hashes.last()
        {
            return chain.sequence_hashes.push(hash);
        }
        self.push(Change::Stored(StoredChain { parent, sequence_hashes: vec![hash] }));
    }

    /// Records that the block with this hash was dropped.
    pub fn removed(&mut self, hash: SequenceHash) {
        if let Some(Change::Removed(hashes)) = self.last_mutable() {
            return hashes.push(hash);
        }
        self.push(Change::Removed(vec![hash]));
    }

    /// Records that all blocks were dropped.
    pub fn cleared(&mut self) {
        self.push(Change::Cleared);
    }

    /// Returns the events that were recorded since the last call, in the order of their ids.
    pub fn take(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.pending)
    }

    /// Returns the id of the last change, 0 before the first. Later changes get higher ids.
    pub fn last_id(&self) -> u64 {
        self.last_id_returned.set(true);
        self.last_id
    }

    fn last_mutable(&mut self) -> Option<&mut Change> {
        let last = self.pending.last_mut().filter(|_| !self.last_id_returned.get());
        last.map(|event| &mut event.change)
    }

    fn push(&mut self, change: Change) {
        self.last_id += 1;
        self.last_id_returned.set(false);
        self.pending.push(KvEvent { event_id: self.last_id, change });
    }
}
