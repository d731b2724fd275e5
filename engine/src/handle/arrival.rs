//! Blocks that are written beside the steps.

use parking_lot::Mutex;
use std::sync::Arc;
use tandem_kv::{BlockId, Ticket};
use tokio::sync::Notify;

/// Ticket, indices, and whether all of them are there.
type End = (Ticket, Vec<u32>, bool);

/// Writes that have ended, for the engine's thread.
#[derive(Clone, Default)]
pub(super) struct Ended(Arc<Mutex<Vec<End>>>);

impl Ended {
    pub fn take(&self) -> Vec<End> {
        std::mem::take(&mut self.0.lock())
    }
}

/// Blocks that their holder writes, by way of the engine's [`crate::KvMemory`]. They stay in use until it is dropped, whatever becomes of
/// the ticket; it must not be dropped before the last write has ended.
#[must_use = "the blocks are in use as long as this is held"]
pub struct Arrival {
    ticket: Ticket,
    indices: Vec<u32>,
    blocks: Vec<BlockId>,
    whole: bool,
    ended: Ended,
    wake: Arc<Notify>,
}

impl Arrival {
    pub(super) fn new(ticket: Ticket, indices: Vec<u32>, blocks: Vec<BlockId>, ended: Ended, wake: Arc<Notify>) -> Self {
        Self { ticket, indices, blocks, whole: false, ended, wake }
    }

    /// Where the indices that were asked for are to be written, in their order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// All of them are there.
    pub fn landed(mut self) {
        self.whole = true;
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        let end = (self.ticket, std::mem::take(&mut self.indices), self.whole);
        self.ended.0.lock().push(end);
        self.wake.notify_one();
    }
}
