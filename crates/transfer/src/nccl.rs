//! The NCCL path: blocks move from GPU to GPU over a communicator of two workers. NCCL does not identify the data that it moves, so a gRPC
//! stream (`NcclControl`) names the blocks of each batch; stream and communicator end together.

mod receiver;
mod sender;

pub(crate) use receiver::{NcclReceiver, PeerConnection};
pub(crate) use sender::NcclSender;

const LABEL: &str = "nccl";

/// A worker joins at most this many communicators at the same time. Each join occupies a thread until the other worker has joined, too, for at most
/// 30 seconds per GPU.
const JOINS_MAX: usize = 4;
