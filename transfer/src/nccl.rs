//! The NCCL path: blocks go from GPU to GPU over a communicator of two workers. NCCL has no names for what it moves, so a gRPC stream
//! (`NcclControl`) says for each batch of blocks which they are; stream and communicator end together.

mod receiver;
mod sender;

pub(crate) use receiver::{Connection, NcclReceiver};
pub(crate) use sender::NcclSender;

const LABEL: &str = "nccl";

/// Communicators that a worker joins at a time: each takes a thread until the other end has joined, 30 seconds per GPU at most.
const JOINS_MAX: usize = 4;
