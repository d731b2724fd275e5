//! Access to a worker's KV memory for other workers and for transfer paths: traits that an engine implements and the transfer layer calls.
//!
//! All calls block, so they must be made on threads that may block. The caller must keep the blocks that it names in use until the call has
//! returned.

use crate::BlockId;
use std::{error::Error, sync::Arc};

/// The form in which a prefill passes its computed blocks to a transfer path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockAccess {
    /// The prefill copies each block's content as soon as the block is computed. If the transfer path read it later, it would have to wait for a
    /// step.
    Copied,
    /// The prefill copies nothing. The transfer path reads the blocks from the KV memory.
    InPlace,
}

/// A computed block of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadyBlock {
    /// The block's position in the prompt, from 0.
    pub index: u32,
    /// The block's index in the KV memory.
    pub block: BlockId,
    /// A copy of the block's bytes if the job uses [`BlockAccess::Copied`]; otherwise empty.
    pub content: Vec<u8>,
}

/// Blocks of a reservation that a thread or device writes while the engine runs steps. They stay in use until this value is dropped, even
/// if the reservation ends earlier, so it must not be dropped before the last write has ended.
pub trait BlockWrite: Send {
    /// Returns the blocks to write, in the order of the requested indices.
    fn blocks(&self) -> &[BlockId];

    /// Ends the write successfully. Must be called only after every block was written. Without this call, the engine treats all blocks as not
    /// written.
    fn complete(self: Box<Self>);
}

/// The KV memory of one engine.
pub trait KvMemory: Send + Sync {
    /// Returns the handle with which another worker of this host opens the memory ([`KvMemory::open_peer`]).
    ///
    /// # Errors
    /// Fails if the device cannot share its memory.
    fn ipc_handle(&self) -> Result<Vec<u8>, DeviceTransferError>;

    /// Opens another engine's memory.
    ///
    /// # Errors
    /// Fails if the memory is on another host, if its blocks have another layout, or if the driver refuses to map it.
    fn open_peer(&self, ipc_handle: &[u8]) -> Result<Arc<dyn PeerMemory>, DeviceTransferError>;

    /// Returns the number of the engine's NCCL ranks, one for each device; the two engines of a communicator need the same number. Returns 0 if the
    /// engine has no NCCL.
    fn nccl_ranks(&self) -> u32;

    /// Creates the id of a new communicator, which two engines may then join.
    ///
    /// # Errors
    /// Fails if NCCL fails.
    fn new_communicator_id(&self) -> Result<Vec<u8>, DeviceTransferError>;

    /// Joins a communicator; returns when the other end has joined, too.
    ///
    /// # Errors
    /// Fails if the id is for another number of devices, or if the other end did not join in time.
    fn join(&self, communicator_id: &[u8], end: CommunicatorEnd) -> Result<Arc<dyn KvCommunicator>, DeviceTransferError>;
}

/// Another engine's KV memory, open while this value exists.
pub trait PeerMemory: Send + Sync {
    /// Copies blocks of the peer (first of each pair) into blocks of this engine (second); returns when all copies have ended.
    ///
    /// # Errors
    /// Fails if the peer has no such block, or if the device fails. Some blocks may have been written in part.
    fn copy(&self, blocks: &[(BlockId, BlockId)]) -> Result<(), DeviceTransferError>;
}

/// One end of a communicator between two engines. The other end must call `receive` in the order of the calls of `send`, with as many blocks each.
pub trait KvCommunicator: Send + Sync {
    /// Sends blocks; returns when the device has sent them.
    ///
    /// # Errors
    /// Fails if the communicator is broken.
    fn send(&self, blocks: &[BlockId]) -> Result<(), DeviceTransferError>;

    /// Receives blocks; returns when they are written. For an entry that is `None`, a block is received and discarded.
    ///
    /// # Errors
    /// Fails if the communicator is broken.
    fn receive(&self, blocks: &[Option<BlockId>]) -> Result<(), DeviceTransferError>;
}

/// One end of a communicator. Blocks move from the sender to the receiver only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommunicatorEnd {
    /// The end of the communicator that sends blocks.
    Sender,
    /// The end of the communicator that receives blocks.
    Receiver,
}

/// The reason why blocks cannot move from device to device. The engine itself continues.
#[derive(Debug, thiserror::Error)]
pub enum DeviceTransferError {
    /// The other worker is on another host, whose memory this path cannot reach.
    #[error("the other worker is on another host")]
    OtherHost,
    /// Blocks cannot move from device to device between these two workers.
    #[error("the other worker's KV memory cannot be reached: {0}")]
    Unreachable(String),
    /// The device or the communicator failed.
    #[error("the transfer from device to device failed")]
    Failed(#[source] Box<dyn Error + Send + Sync>),
}
