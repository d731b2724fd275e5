//! The two halves of a transfer path.

use crate::Refused;
use std::error::Error;
use tandem_kv::{BlockAccess, InvalidTicket, ReadyBlock, Ticket};
use tandem_proto::{
    channel::InvalidAddress,
    v1::{self, PrefillDone, TransferCapabilities},
};

/// The reason that a transfer ended early. In every case some of its blocks may have been written.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The receiver refuses these blocks.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The receiver is unreachable, or closed the connection or the communicator before all blocks were written.
    #[error("the receiver closed the connection")]
    Closed(#[source] Option<Box<dyn Error + Send + Sync>>),
    /// The ticket cannot be used.
    #[error(transparent)]
    Ticket(#[from] TicketError),
}

/// The reason that a ticket cannot be used: its sender does not keep to the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TicketError {
    /// The address is not signed with the cluster key, or for another worker.
    #[error("the ticket's address is not signed by a decode worker of this cluster")]
    UnsignedAddress,
    /// The ticket itself.
    #[error(transparent)]
    Length(#[from] InvalidTicket),
    /// The address.
    #[error("the ticket's address is not of the form host:port")]
    Address(#[from] InvalidAddress),
    /// The path.
    #[error("the ticket names a transfer path that was not offered")]
    NotOffered,
}

/// What a path has done with blocks when [`SendPath::send`] returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It sends them, and has sent those before: the time of the call is time of transfer.
    Sent,
    /// It has announced them: the receiver copies them meanwhile.
    Announced,
}

/// The sending half of a path, for the blocks of one ticket. Dropping it ends the transfer.
#[tonic::async_trait]
pub trait SendPath: Send {
    /// Returns the path's label in metrics and traces.
    fn label(&self) -> &'static str;

    /// Returns how the path needs blocks.
    fn access(&self) -> BlockAccess;

    /// Sends blocks, in any order; waits while the receiver is busy. Blocks must not change before [`SendPath::finish`] has returned.
    ///
    /// # Errors
    /// The transfer has ended.
    async fn send(&mut self, blocks: Vec<ReadyBlock>) -> Result<Progress, TransferError>;

    /// Drives blocks that were sent; returns only when the transfer ends early. Without it the last blocks sent may not move before the next
    /// call. Cancel-safe.
    async fn interrupted(&mut self) -> TransferError;

    /// Returns when every block that was sent is written.
    ///
    /// # Errors
    /// A block was not written.
    async fn finish(self: Box<Self>) -> Result<(), TransferError>;
}

/// The receiving half of a path, for all tickets of one worker: what a ticket says about it. How blocks are received is the path's own.
#[tonic::async_trait]
pub(crate) trait ReceivePath: Send + Sync {
    /// Returns the path's label in metrics.
    fn label(&self) -> &'static str;

    /// Decides whether a ticket's blocks take this path, and sets the fields of the ticket.
    async fn offer(&self, offer: Offer<'_>) -> Decision;
}

/// The subject of a decision: a ticket for a peer.
pub(crate) struct Offer<'a> {
    /// The prefill worker's instance.
    pub peer: &'a str,
    /// What it offers.
    pub capabilities: &'a TransferCapabilities,
    pub secret: Ticket,
    /// To be sent to it.
    pub ticket: &'a mut v1::Ticket,
}

/// A path's decision about one ticket.
pub(crate) enum Decision {
    /// The ticket's blocks take this path. The grant, if there is one, is held until they are written.
    Accepted(Option<Box<dyn Grant>>),
    /// The ticket's blocks take the host path; once they are written, the grant prepares this path for later tickets.
    Prepares(Box<dyn Grant>),
    /// Not this path.
    Unavailable,
}

/// What a path holds for one ticket.
pub(crate) trait Grant: Send {
    /// The prefill worker has confirmed that all of the ticket's blocks were written.
    fn confirmed(self: Box<Self>, done: &PrefillDone);
}
