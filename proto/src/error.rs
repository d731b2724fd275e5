//! Errors of messages that can be decoded but break the protocol.

/// A violation of the protocol by a message. Its sender is faulty or of another version, so the receiver must close the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A required field is not set.
    #[error("the field `{field}` is missing")]
    Missing {
        /// The field's name in the .proto file.
        field: &'static str,
    },
    /// A KV event names no block.
    #[error("a KV event names no block")]
    NoBlocks,
    /// The ids of a batch's events have gaps, or the last one differs from `last_event_id`.
    #[error("KV event id {found} follows id {after}, but ids must be consecutive")]
    EventIds {
        /// The id of the previous event.
        after: u64,
        /// The id that was found, or that the batch declares to be its last.
        found: u64,
    },
    /// A chunk belongs to another snapshot than the chunks before it.
    #[error("a snapshot's chunk belongs to another snapshot than the chunks before it")]
    MixedSnapshots,
    /// A snapshot has more blocks than the receiver accepts.
    #[error("the snapshot has more than {max} blocks")]
    SnapshotTooLong {
        /// The maximum number of blocks that the receiver accepts.
        max: usize,
    },
}
