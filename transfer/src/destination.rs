//! The memory that blocks are written into, and its owner's decision about each of them.

use bytes::Bytes;
use tandem_kv::{BlockWrite, Ticket};
use tonic::Status;

/// The ticket does not allow this write: it is unknown, spent or revoked, or the block is not one it names, was written
/// before, or has another size. The sender is not told which: only the owner of the memory knows, counts and acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ticket does not allow this write")]
pub struct Refused;

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        Status::permission_denied(refused.to_string())
    }
}

/// The owner of the memory that blocks are written into. A refused write ends the ticket's reservation, if that is live.
#[tonic::async_trait]
pub trait Destination: Send + Sync + 'static {
    /// Writes one block, whole or not at all; returns when it is in the memory. `index` counts from the prompt's start.
    ///
    /// # Errors
    /// The ticket does not allow the write.
    async fn write(&self, ticket: Ticket, index: u32, content: Bytes) -> Result<(), Refused>;

    /// Returns the right to write blocks from other threads or devices: all of them, or none.
    ///
    /// # Errors
    /// As for [`Destination::write`].
    async fn begin_write(&self, ticket: Ticket, indices: Vec<u32>) -> Result<Box<dyn BlockWrite>, Refused>;

    /// Confirms that the worker which computed the ticket's blocks has written all of them.
    async fn confirm(&self, ticket: Ticket);

    /// Refuses a write of blocks that the sender announced in its memory, because the ticket does not name a path on which they can be copied.
    async fn refuse(&self, ticket: Ticket) -> Refused;
}
