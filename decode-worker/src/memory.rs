//! The engine's KV memory, as the destination of transfers.

use bytes::Bytes;
use std::sync::Arc;
use tandem_engine::{EngineHandle, WriteRefused};
use tandem_kv::{BlockWrite, Ticket};
use tandem_transfer::{Destination, Refused};
use tandem_worker::WorkerMetrics;

/// The KV memory of the engine. The engine's thread allows or refuses each write of a block; refused writes are counted by their reason.
pub(crate) struct EngineMemory {
    engine: EngineHandle,
    metrics: Arc<WorkerMetrics>,
}

impl EngineMemory {
    pub(crate) fn new(engine: EngineHandle, metrics: Arc<WorkerMetrics>) -> Self {
        // The counters must be exported before the first write is refused.
        WriteRefused::REASONS.iter().for_each(|(_, reason)| drop(metrics.refused_writes(reason)));
        Self { engine, metrics }
    }

    fn count(&self, refused: WriteRefused) -> Refused {
        if let Some(reason) = refused.reason() {
            self.metrics.refused_writes(reason).increment(1);
        }
        Refused
    }
}

#[tonic::async_trait]
impl Destination for EngineMemory {
    async fn write(&self, ticket: Ticket, index: u32, content: Bytes) -> Result<(), Refused> {
        self.engine.write_block(ticket, index, content).await.map_err(|refused| self.count(refused))
    }

    async fn begin_write(&self, ticket: Ticket, indices: Vec<u32>) -> Result<Box<dyn BlockWrite>, Refused> {
        self.engine.begin_write(ticket, indices).await.map_err(|refused| self.count(refused))
    }

    async fn confirm(&self, ticket: Ticket) {
        self.engine.confirm(ticket).await;
    }

    async fn refuse(&self, ticket: Ticket) -> Refused {
        self.count(self.engine.refuse(ticket, WriteRefused::WrongPath).await)
    }

    fn path_refused(&self, path: &'static str, reason: &'static str) {
        self.metrics.refused_paths(path, reason).increment(1);
    }
}
