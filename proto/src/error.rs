//! What can be wrong with a message that decodes.

/// A message breaks the protocol: its sender is faulty or of another version. The connection is to be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A field that must be set is not.
    #[error("the field `{field}` is missing")]
    Missing {
        /// As in the .proto file.
        field: &'static str,
    },
    /// A chain or a removal names no block.
    #[error("a change of the cache names no block")]
    NoBlocks,
    /// The ids of a batch's events have gaps, or do not end with `last_event_id`.
    #[error("the event after {after} has the id {found}")]
    EventIds {
        /// The id before it.
        after: u64,
        /// The id it has, or the batch says to be the last.
        found: u64,
    },
    /// A chunk belongs to another snapshot than the chunks before it.
    #[error("the chunks of two snapshots are mixed")]
    MixedSnapshots,
    /// A snapshot is longer than the receiver can take.
    #[error("the snapshot has more than {max} blocks")]
    SnapshotTooLong {
        /// The receiver's bound.
        max: usize,
    },
}
