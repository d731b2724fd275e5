//! KV memory that moves without passing through the host: read by a neighbour on the same host, or sent over a link between two devices.
//!
//! All calls block; they are for threads that may. Blocks named here are in use by somebody who keeps them until the call has returned.

use std::{error::Error, sync::Arc};
use tandem_kv::BlockId;

/// The KV memory of one engine.
pub trait KvMemory: Send + Sync {
    /// Under which others on this host find it.
    fn handle(&self) -> Result<Vec<u8>, MoveError>;

    /// Another engine's memory, by its handle.
    fn open(&self, handle: &[u8]) -> Result<Arc<dyn PeerMemory>, MoveError>;

    /// Devices that would take part in a link, which must be as many at both ends; 0: there can be none.
    fn link_devices(&self) -> u32;

    /// The name of a link that is still to be made.
    fn name_link(&self) -> Result<Vec<u8>, MoveError>;

    /// Makes a link; returns when the other end has been made, too.
    fn link(&self, name: &[u8], end: LinkEnd) -> Result<Arc<dyn Link>, MoveError>;
}

/// Another engine's memory, as long as this is held.
pub trait PeerMemory: Send + Sync {
    /// Copies blocks of it to blocks of ours; returns when they are there.
    fn pull(&self, blocks: &[(BlockId, BlockId)]) -> Result<(), MoveError>;
}

/// A way between the memories of two engines. What one end sends the other receives, in the same order and as many blocks at a time.
pub trait Link: Send + Sync {
    /// Returns when the other end has received the blocks.
    fn send(&self, blocks: &[BlockId]) -> Result<(), MoveError>;

    /// Returns when the blocks are there. Those that are to go nowhere are received all the same.
    fn receive(&self, blocks: &[Option<BlockId>]) -> Result<(), MoveError>;
}

/// Which end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkEnd {
    /// Where blocks come from.
    Sends,
    /// Where they go.
    Receives,
}

/// Blocks cannot go this way. The engine goes on all the same.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    /// Never: it is elsewhere, or not of the same kind.
    #[error("the other worker's memory cannot be reached so: {0}")]
    Unreachable(String),
    /// It broke.
    #[error("blocks were lost on the way from device to device")]
    Broken(#[source] Box<dyn Error + Send + Sync>),
}
