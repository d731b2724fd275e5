//! Moves KV blocks from a prefill worker's memory into a decode worker's.
//!
//! The prefill worker opens a [`Transfer`] for each ticket ([`SendPaths::open`]). The decode worker chooses the path that the ticket names
//! ([`ReceivePaths::negotiate`]) and serves [`ReceivePaths::service`].
//!
//! | Path | How blocks move | Preparation |
//! |---|---|---|
//! | `host` | in the messages of a gRPC stream, through the memory of both hosts | none |
//! | `ipc` | the decode worker copies them from the prefill worker's GPU | an IPC handle, from an earlier `PrefillDone` |
//! | `nccl` | GPU to GPU over a communicator of the two workers | joined after an earlier prompt's blocks were written |
//! | `simulated` | as `host`, at the bandwidth of a simulated network | none |
//!
//! Each path is one file: its sending half implements [`SendPath`], its receiving half `ReceivePath`. What holds on all of them:
//! - The owner of the memory ([`Destination`]) decides about every block: only those that a ticket names are written, each once and whole.
//! - What is in flight is bounded: a receiver that does not write makes the sender wait.
//! - Dropping a transfer ends it. Blocks written by then stay written; no block counts as written in part.
//! - No block counts before the worker that computed it has confirmed it (`PrefillDone`), whatever its path.
//! - A prefill worker connects only to a signed address. It gives out its IPC handle, and joins a communicator, only for
//!   a ticket under which blocks were written.

mod blocking;
mod destination;
mod host;
mod ipc;
mod lifetime;
mod mode;
mod nccl;
mod negotiate;
mod path;
mod push;
mod send;
mod service;
mod simulated;

pub use destination::{Destination, Refused};
pub use lifetime::Lifetime;
pub use mode::TransferMode;
pub use negotiate::{Negotiated, ReceivePaths};
pub use path::{Progress, SendPath, TicketError, TransferError};
pub use send::{SendPaths, SendSettings, Sent, Transfer};
pub use service::TransferService;
pub use simulated::{SimulatedNetwork, SimulatedPath};
