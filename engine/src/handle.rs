//! The thread that owns an engine and its step machine, and the handles to it.

use crate::{Engine, EngineInfo, Event, Generate, Prefill, Refusal};
use bytes::Bytes;
use tandem_kv::{KvBatch, Load, Snapshot};
use tokio::sync::broadcast;

/// How a worker's steps are made.
#[derive(Clone, Copy, Debug)]
pub struct EngineSettings {
    /// Tokens computed in one step.
    pub chunk_budget: u32,
    /// Sequences in one step.
    pub batch_max: u32,
    /// Jobs that wait for blocks.
    pub queue_max: u32,
    /// Off: nothing is reused and 0 is reported.
    pub prefix_caching: bool,
}

/// The block was not written: the ticket is unknown or spent, or the block is not one that is missing, or its size is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ticket does not allow this write")]
pub struct WriteRefused;

/// A cheap handle to the thread that owns an engine. The thread ends when the last handle and job are gone.
#[derive(Clone)]
pub struct EngineHandle {}

/// One job on the engine. Dropping it cancels the job at the next step and gives back all it holds.
pub struct Job {}

#[expect(unused_variables, clippy::todo)]
impl EngineHandle {
    /// Starts the thread.
    pub fn start(engine: Box<dyn Engine>, settings: EngineSettings) -> Self {
        todo!()
    }

    /// What the engine is.
    pub fn info(&self) -> &EngineInfo {
        todo!()
    }

    /// Queues a prefill.
    pub async fn prefill(&self, prefill: Prefill) -> Result<Job, Refusal> {
        todo!()
    }

    /// Queues a generation.
    pub async fn generate(&self, generate: Generate) -> Result<Job, Refusal> {
        todo!()
    }

    /// Writes one block under a ticket; returns when it is in the engine's memory.
    pub async fn write_block(&self, ticket: u64, block_index: u32, payload: Bytes) -> Result<(), WriteRefused> {
        todo!()
    }

    /// The cache as it is, and every batch after it: a batch's events with ids up to the snapshot's are in the snapshot.
    pub async fn watch(&self) -> (Snapshot, broadcast::Receiver<std::sync::Arc<KvBatch>>) {
        todo!()
    }

    /// The load as of the last step.
    pub fn load(&self) -> Load {
        todo!()
    }
}

#[expect(unused_variables, clippy::todo)]
impl Job {
    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<Event> {
        todo!()
    }

    /// Prefill: tells these blocks as [`Event::Block`] as soon as each is computed. Once a job.
    pub async fn send_blocks(&self, block_indices: Vec<u32>) {
        todo!()
    }
}
