//! Moves KV blocks from one worker's memory into another's.
//!
//! A sender opens a [`Push`] through a [`Transport`]; the owner of the destination decides with its [`Sink`] what is written:
//! only blocks that a ticket it gave out names, each once, each whole.
//!
//! - What is on its way is bounded: a receiver that does not write makes the sender wait.
//! - Dropping a push ends it. What has landed by then has landed; nothing is ever written in part.
//! - Blocks may stay where they are, for the receiver to take them from there ([`Push::ready`]); the sink knows how, and the push's end says
//!   that it has. Or they go over a link beside the service ([`Links`]).
//! - Whichever way they come, no block counts before the worker that computed them has confirmed it, elsewhere.

mod loopback;
mod mode;
mod push;
mod service;
mod sink;
mod tcp;

pub use loopback::{Loopback, Reachable};
pub use mode::TransferMode;
pub use push::{Piece, Push, TransferError};
pub use service::{Links, NoLinks, Receiver, TransferService};
pub use sink::{Refused, Sink};
pub use tandem_proto::v1::ReadyBlocks;
pub use tcp::Tcp;

use tandem_kv::Ticket;

/// A way to reach other workers' memory.
pub trait Transport: Send + Sync + 'static {
    /// What metrics call it.
    fn name(&self) -> &'static str;

    /// Prepares to send blocks under `ticket` to the worker at `address`. Whether the worker is there shows with the first block.
    fn open(&self, address: &str, ticket: Ticket) -> Result<Push, TransferError>;
}
