//! Writes to the blocks of a reservation, which other threads or devices make while the engine runs steps.

use crate::machine::EndedWrite;
use parking_lot::Mutex;
use std::sync::Arc;
use tandem_kv::{BlockId, BlockWrite, Ticket};
use tokio::sync::Notify;

/// The ended writes that the engine's thread has not handled yet. Each has at least one block that no other write has, so there are at most as many
/// as blocks in use.
#[derive(Clone, Default)]
pub(super) struct EndedWrites(Arc<Mutex<Vec<EndedWrite>>>);

impl EndedWrites {
    pub fn take(&self) -> Vec<EndedWrite> {
        std::mem::take(&mut self.0.lock())
    }
}

/// A running write. Dropping this value reports to the engine's thread that the write has ended.
pub(super) struct ReservedWrite {
    pub ticket: Ticket,
    pub indices: Vec<u32>,
    pub blocks: Vec<BlockId>,
    pub complete: bool,
    pub ended: EndedWrites,
    pub wake: Arc<Notify>,
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
