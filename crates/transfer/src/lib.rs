//! Moves KV blocks from a prefill worker's memory into a decode worker's memory.
//!
//! The prefill worker opens a [`Transfer`] for each ticket ([`SendPaths::open`]). The decode worker chooses the path that the ticket names
//! ([`ReceivePaths::negotiate`]) and serves [`ReceivePaths::service`].
//!
//! | Path | How blocks move | Preparation | Sending half | Receiving half |
//! |---|---|---|---|---|
//! | host | in the messages of a gRPC stream, through the memory of both hosts | none | `push` | `service` |
//! | CUDA IPC | the decode worker copies them from the prefill worker's GPU | an IPC handle, from an earlier `PrefillDone` | `push` | `ipc` |
//! | NCCL | from GPU to GPU over a communicator of the two workers | joined after an earlier prompt's blocks were written | `nccl::sender` | `nccl::receiver` |
//! | simulated | as on the host path, at the bandwidth of a simulated network | none | `simulated` | `service` |
//!
//! On every path:
//! - The owner of the memory ([`Destination`]) checks every block: only blocks that a ticket names are written, each once and completely.
//! - The blocks in flight are bounded: a receiver that does not write makes the sender wait.
//! - Dropping a transfer ends it. Blocks that were written stay written; a block that was written in part is treated as missing.
//! - No block is used before the worker that computed it has confirmed it (`PrefillDone`).
//! - A prefill worker connects only to addresses signed with the cluster key. It sends its IPC handle, and joins a communicator, only for a
//!   ticket under which blocks were written.

mod backoff;
mod blocking;
mod destination;
mod ipc;
mod lifetime;
mod mode;
mod nccl;
mod negotiate;
mod path;
mod push;
mod send;
mod service;
mod share;
mod simulated;

pub use destination::{Destination, Refused};
pub use lifetime::Lifetime;
pub use mode::TransferMode;
pub use negotiate::{Negotiated, ReceivePaths};
pub use path::{Progress, SendPath, TicketError, TransferError};
pub use send::{SendPaths, SendSettings, Sent, Transfer};
pub use service::TransferService;
pub use simulated::{SimulatedNetwork, SimulatedPath};
