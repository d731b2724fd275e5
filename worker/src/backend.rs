//! The back end that computes for a worker: an engine in this process, or one that this process drives.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};
use tandem_engine::{EngineHandle, EngineInfo, Event, Generate, KvHandle, Prefill, Refusal};
use tandem_kv::{BlockAccess, KvBatch, Load, Snapshot};
use tokio::sync::broadcast;

/// The back end of a worker. Jobs take token ids and give token ids; text is the frontend's. `docs/adr/022-worker-back-end.md` says how
/// an external engine implements it.
#[tonic::async_trait]
pub trait Backend: Send + Sync + 'static {
    /// The model's vocabulary and context, and the size of the KV memory. These never change.
    fn info(&self) -> &EngineInfo;

    /// Queues the computation of a prompt's KV, which is held until the job is dropped. The job reports `Scheduled` when it begins and
    /// `Computed` when all of the KV is there.
    ///
    /// # Errors
    /// The job is not accepted; nothing is held.
    async fn prefill(&self, prefill: Prefill) -> Result<Box<dyn Job>, Refusal>;

    /// Queues a generation. The job reports `Scheduled` (KV computed here) or `Reserved` (KV from another worker) when it begins, `Started`
    /// when the prompt's KV is complete, then tokens, and `Finished` for each sample.
    ///
    /// # Errors
    /// The job is not accepted; nothing is held.
    async fn generate(&self, generate: Generate) -> Result<Box<dyn Job>, Refusal>;

    /// The prefix cache and the load now, and every change from now on. `None`: the back end has ended.
    async fn watch(&self) -> Option<CacheWatch>;

    /// Resolves when the back end makes no progress with work that it has, immediately if that is so now. It may recover.
    async fn hung(&self);

    /// How KV gets from a prefill worker's back end to a decode worker's.
    fn kv_exchange(&self) -> KvExchange<'_>;
}

/// How a back end sends or receives the KV of prompts.
#[derive(Clone, Copy)]
pub enum KvExchange<'a> {
    /// The transfer paths read and write the KV memory of this engine.
    Transfers(&'a EngineHandle),
    /// The engines move KV themselves, with handles.
    Handles {
        /// Engines exchange KV only if their families are equal: it has all that must be equal, such as version, model and data type.
        family: &'a str,
    },
    /// The back end does not exchange KV: it prefills what it decodes.
    None,
}

impl KvExchange<'_> {
    /// The `transfer_family` of workers that never exchange KV.
    pub const NO_FAMILY: &'static str = "none";

    /// Returns the `transfer_family` that the worker reports.
    pub fn family(&self) -> &str {
        match self {
            Self::Transfers(_) => "",
            Self::Handles { family } => family,
            Self::None => Self::NO_FAMILY,
        }
    }
}

/// A prefill or a generation. Dropping it cancels it and releases all that it holds.
#[tonic::async_trait]
pub trait Job: Send {
    /// Polls for the next event; `None` after the last. A job that ends without an event of its own has lost its back end.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>>;

    /// Prefill: reports these blocks with [`Event::BlocksReady`] as soon as they are computed. To be called once per job, and only with
    /// [`KvExchange::Transfers`].
    async fn send_blocks(&mut self, _block_indices: Vec<u32>, _access: BlockAccess) {}

    /// Generation with [`tandem_engine::KvSource::Handle`]: pulls the prompt's KV and generates. To be called once per job, after
    /// [`Event::Submitted`], and only with [`KvExchange::Handles`].
    async fn pull(&mut self, _handle: KvHandle) {}

    /// External engines: cancels the job, which still reports `Scheduled` with what the engine has counted by then, and ends. Dropping a job
    /// cancels it without a report.
    fn cancel(&mut self) {}
}

impl dyn Job + '_ {
    /// The next event; `None` after the last. Cancel-safe.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|context| self.poll_next(context)).await
    }
}

/// A prefix cache and a load at one moment, and their changes from then on.
pub struct CacheWatch {
    /// The blocks in the cache at that moment.
    pub snapshot: Snapshot,
    /// The load at that moment.
    pub load: Load,
    /// Later events and loads. Events with ids up to the snapshot's are included in the snapshot.
    pub batches: broadcast::Receiver<Arc<KvBatch>>,
}

#[tonic::async_trait]
impl Backend for EngineHandle {
    fn info(&self) -> &EngineInfo {
        self.info()
    }

    async fn prefill(&self, prefill: Prefill) -> Result<Box<dyn Job>, Refusal> {
        Ok(Box::new(self.prefill(prefill).await?))
    }

    async fn generate(&self, generate: Generate) -> Result<Box<dyn Job>, Refusal> {
        Ok(Box::new(self.generate(generate).await?))
    }

    async fn watch(&self) -> Option<CacheWatch> {
        let (snapshot, batches) = self.watch().await?;
        Some(CacheWatch { snapshot, load: self.load(), batches })
    }

    async fn hung(&self) {
        self.hung().await;
    }

    fn kv_exchange(&self) -> KvExchange<'_> {
        KvExchange::Transfers(self)
    }
}

#[tonic::async_trait]
impl Job for tandem_engine::Job {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.poll_next(context)
    }

    async fn send_blocks(&mut self, block_indices: Vec<u32>, access: BlockAccess) {
        tandem_engine::Job::send_blocks(self, block_indices, access).await;
    }
}
