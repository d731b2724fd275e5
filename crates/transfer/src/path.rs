//! The interfaces of the two halves of a transfer path.

use crate::Refused;
use std::error::Error;
use tandem_kv::{BlockAccess, InvalidTicket, ReadyBlock, Ticket};
use tandem_proto::{
    channel::InvalidAddress,
    v1::{self, PrefillDone, TransferCapabilities},
};

/// The reason why a transfer ended early. In every case some of its blocks may have been written.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The receiver has refused the blocks.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The receiver is unreachable, or closed the connection or the communicator before all blocks were written.
    #[error("the receiver is unreachable or closed the connection")]
    Closed(#[source] Option<Box<dyn Error + Send + Sync>>),
    /// The ticket cannot be used.
    #[error(transparent)]
    Ticket(#[from] TicketError),
}

/// The reason why a ticket cannot be used. The worker that sent the ticket has violated the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// The address is not signed with the cluster key, or is signed for another worker.
    #[error("the ticket's address is not signed by a decode worker of this cluster")]
    UnsignedAddress,
    /// The ticket has a wrong length.
    #[error(transparent)]
    Length(#[from] InvalidTicket),
    /// The address in the ticket is not of the form `host:port`.
    #[error("the ticket's address is not of the form host:port")]
    Address(#[from] InvalidAddress),
    /// The prefill worker does not support the transfer path that the ticket names.
    #[error("the ticket names a transfer path that the prefill worker did not offer")]
    NotOffered,
}

/// The state of the blocks when [`SendPath::send`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The path has sent the blocks of all earlier calls and is sending the blocks of this call. So the duration of all calls measures the bandwidth.
    Sent,
    /// The path has announced the blocks; the receiver copies them later.
    Announced,
}

/// The sending half of a path, for the blocks of one ticket. Dropping this value ends the transfer.
#[tonic::async_trait]
pub trait SendPath: Send {
    /// Returns the path's label in metrics and traces.
    fn label(&self) -> &'static str;

    /// Returns the form in which the path needs blocks.
    fn access(&self) -> BlockAccess;

    /// Sends blocks, in any order; waits while the receiver is busy. The blocks must not change before [`SendPath::finish`] has returned.
    ///
    /// # Errors
    /// Fails if the transfer has ended.
    async fn send(&mut self, blocks: Vec<ReadyBlock>) -> Result<Progress, TransferError>;

    /// Continues the transfer of the blocks passed to [`SendPath::send`]; returns only when the transfer ends early. While this future is not polled,
    /// the last blocks may not move until the next call of a method. This method is cancel-safe.
    async fn interrupted(&mut self) -> TransferError;

    /// Returns when the receiver has written every block that was sent.
    ///
    /// # Errors
    /// Fails if a block was not written.
    async fn finish(self: Box<Self>) -> Result<(), TransferError>;
}

/// The receiving half of a path. It decides which of a worker's tickets use the path.
#[tonic::async_trait]
pub(crate) trait ReceivePath: Send + Sync {
    /// Decides whether a ticket's blocks take this path, and sets the fields of the ticket.
    async fn offer(&self, offer: Offer<'_>) -> Decision;
}

/// The ticket for which a path makes its [`Decision`], and the prefill worker that will receive the ticket.
pub(crate) struct Offer<'a> {
    pub peer: &'a str,
    pub capabilities: &'a TransferCapabilities,
    pub secret: Ticket,
    pub ticket: &'a mut v1::Ticket,
}

/// A path's decision about one ticket.
pub(crate) enum Decision {
    /// The ticket's blocks take this path, which has the label `label` in metrics. The grant is kept until the blocks are written.
    Accepted { label: &'static str, grant: Option<Box<dyn Grant>> },
    /// The ticket's blocks take the host path; once they are written, the grant prepares this path for later tickets.
    Prepares(Box<dyn Grant>),
    /// The ticket's blocks do not take this path.
    Unavailable,
}

/// A path's resources for one ticket.
pub(crate) trait Grant: Send {
    /// Called when the prefill worker has confirmed that all of the ticket's blocks were written.
    fn confirmed(self: Box<Self>, _done: &PrefillDone) {}
}
