//! The memory into which received blocks are written. The owner of the memory checks every write.

use bytes::Bytes;
use tandem_kv::{BlockWrite, Ticket};
use tonic::Status;

/// The ticket does not allow this write. Either the ticket is unknown, spent or revoked, or it does not name the block, or the block was
/// already written, or the content has the wrong size. The owner of the memory does not reveal to the sender which of these reasons
/// applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ticket does not allow this write")]
pub struct Refused;

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        Status::permission_denied(refused.to_string())
    }
}

/// The owner of the memory into which blocks are written. A refused write ends the ticket's reservation, if there is one.
#[tonic::async_trait]
pub trait Destination: Send + Sync + 'static {
    /// Writes one block, completely or not at all. Returns when the block is in the memory. `index` is the block's position in the prompt, from
    /// 0.
    ///
    /// # Errors
    /// Fails if the ticket does not allow the write.
    async fn write(&self, ticket: Ticket, index: u32, content: Bytes) -> Result<(), Refused>;

    /// Begins a write of all these blocks. The returned value permits other threads or devices to write them.
    ///
    /// # Errors
    /// Fails if the ticket does not allow the writes.
    async fn begin_write(&self, ticket: Ticket, indices: Vec<u32>) -> Result<Box<dyn BlockWrite>, Refused>;

    /// Reports to the owner of the memory that the worker which computed the ticket's blocks has written all of them.
    async fn confirm(&self, ticket: Ticket);

    /// Refuses blocks that the sender has announced for a copy from its own memory, because the ticket names no path for such copies.
    async fn refuse(&self, ticket: Ticket) -> Refused;

    /// Reports to the owner of the memory that a path to a peer could not be used, so that the peer's blocks take another path. `path` and `reason`
    /// are labels of metrics.
    fn path_refused(&self, path: &'static str, reason: &'static str);
}
