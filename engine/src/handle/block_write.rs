//! Blocks of a reservation that other threads or devices write while the engine runs steps.

use parking_lot::Mutex;
use std::sync::Arc;
use tandem_kv::{BlockId, BlockWrite, Ticket};
use tokio::sync::Notify;

/// A write that has ended.
pub(super) struct EndedWrite {
    pub ticket: Ticket,
    pub indices: Vec<u32>,
    /// Whether all blocks were written; otherwise none counts.
    pub complete: bool,
}

/// Writes that have ended, for the engine's thread. Bounded by the blocks in use: each write has at least one of its own.
#[derive(Clone, Default)]
pub(super) struct EndedWrites(Arc<Mutex<Vec<EndedWrite>>>);

impl EndedWrites {
    pub fn take(&self) -> Vec<EndedWrite> {
        std::mem::take(&mut self.0.lock())
    }
}

/// A write under way. On drop it is reported to the engine's thread as ended.
pub(super) struct ReservedWrite {
    ticket: Ticket,
    indices: Vec<u32>,
    blocks: Vec<BlockId>,
    complete: bool,
    ended: EndedWrites,
    wake: Arc<Notify>,
}

impl ReservedWrite {
    pub fn new(ticket: Ticket, indices: Vec<u32>, blocks: Vec<BlockId>, ended: EndedWrites, wake: Arc<Notify>) -> Self {
        Self { ticket, indices, blocks, complete: false, ended, wake }
    }
}

impl BlockWrite for ReservedWrite {
    fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    fn complete(mut self: Box<Self>) {
        self.complete = true;
    }
}

impl Drop for ReservedWrite {
    fn drop(&mut self) {
        let (ticket, indices, complete) = (self.ticket, std::mem::take(&mut self.indices), self.complete);
        self.ended.0.lock().push(EndedWrite { ticket, indices, complete });
        self.wake.notify_one();
    }
}
