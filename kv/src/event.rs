//! What a worker tells about its cache.

use crate::SequenceHash;

/// One change of a cache. Ids begin at 1 and have no gaps within one cache's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEvent {
    /// Place of this change among all of the cache's changes.
    pub event_id: u64,
    /// What changed.
    pub change: Change,
}

/// Told once per hash: a block that is already cached is not stored again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Blocks became reusable.
    Stored(StoredChain),
    /// Blocks were dropped, children before their parents.
    Removed(Vec<SequenceHash>),
    /// All blocks were dropped.
    Cleared,
}

/// Consecutive blocks under `parent` (`None`: they begin a prompt).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredChain {
    /// The block before the first of them.
    pub parent: Option<SequenceHash>,
    /// In prompt order.
    pub sequence_hashes: Vec<SequenceHash>,
}

/// A cache's content after the change with id `at_event_id`; parents come before their children.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Changes with higher ids are not in it.
    pub at_event_id: u64,
    /// Chains that together are the whole cache.
    pub stored: Vec<StoredChain>,
}
