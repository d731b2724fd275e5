//! Ownership and content of KV blocks: sequence hashes, the block pool, the prefix cache and its events, tickets for writing, and access to
//! engines' KV memory.
//!
//! Pure: no async, no I/O, no clock. One [`PrefixCache`] belongs to one engine thread.

mod cache;
mod event;
mod hash;
mod id;
mod memory;
mod mix;
mod priority;
mod report;
mod salt;
mod ticket;
mod tier;

pub use cache::{Acquired, CacheSettings, Counts, Full, PrefixCache, Violation, Wanted, ensure};
pub use event::{Change, EventLog, KvEvent, Snapshot, StoredChain};
pub use hash::{HashKey, ImageId, ImageStart, Namespace, SequenceHash, child_hashes, prompt_digest, sequence_hashes};
pub use id::{InstanceId, RequestId, WorkerId};
pub use memory::{
    BlockAccess, BlockWrite, CommunicatorEnd, DeviceTransferError, KvCommunicator, KvMemory, PeerMemory, ReadyBlock,
};
pub use mix::mix;
pub use priority::Priority;
pub use report::{KvBatch, Load, StepStats};
pub use salt::{cache_salt, root_hash};
pub use ticket::{InvalidTicket, Ticket};
pub use tier::{ByTier, Tier};

/// A token's number in the model's vocabulary.
pub type TokenId = u32;

/// The index of a block in a worker's KV memory, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);
