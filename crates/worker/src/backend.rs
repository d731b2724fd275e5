//! The back end that computes for a worker: an engine in this process, or an external engine that this process controls.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};
use tandem_engine::{EngineHandle, EngineInfo, Event, Generate, KvHandle, Prefill, Refusal};
use tandem_kv::{BlockAccess, KvBatch, Load, Snapshot};
use tandem_proto::v1::WorkerInfo;
use tokio::{sync::broadcast, time::Instant};

/// The back end of a worker. Jobs have token ids as input and output, never text. `docs/adr/022-worker-back-end.md` describes how an external
/// engine implements this trait.
#[tonic::async_trait]
pub trait Backend: Send + Sync + 'static {
    /// Returns the model's vocabulary and context, and the size of the KV memory. These never change.
    fn info(&self) -> &EngineInfo;

    /// Queues the computation of a prompt's KV, which stays pinned until the job is dropped. The job reports `Scheduled` when it begins and
    /// `Computed` when all of the KV is computed.
    ///
    /// # Errors
    /// Fails if the job is refused.
    async fn prefill(&self, prefill: Prefill) -> Result<Box<dyn Job>, Refusal>;

    /// Queues a generation. The job reports `Scheduled` (KV computed here) or `Reserved` (KV from another worker) when it begins, `Started`
    /// when the prompt's KV is complete, then tokens, and `Finished` for each sample.
    ///
    /// # Errors
    /// Fails if the job is refused.
    async fn generate(&self, generate: Generate) -> Result<Box<dyn Job>, Refusal>;

    /// Returns the current prefix cache and load, and a receiver of all later changes; `None` if the back end has ended.
    async fn watch(&self) -> Option<CacheWatch>;

    /// Resolves when the back end hangs: it has work and makes no progress. It may recover.
    async fn hung(&self);

    /// Returns when the current step began; `None` while no step runs, or if an external engine does not report its steps. A back end makes
    /// progress as long as its steps end.
    fn busy_since(&self) -> Option<Instant> {
        None
    }

    /// Returns how this back end exchanges KV with the back ends of other workers.
    fn kv_exchange(&self) -> KvExchange<'_>;

    /// Returns whether the prefix cache that [`Self::watch`] reports is derived from the requests, because the engine does not report its
    /// cache. This never changes.
    fn assumes_cache(&self) -> bool {
        false
    }

    /// Returns the names of the LoRAs that the back end serves now: the same list until they change. If the namespace of a job names a LoRA as its
    /// model, the back end computes the job with that LoRA.
    fn loras(&self) -> Arc<[String]> {
        Arc::default()
    }

    /// Resolves when [`Self::loras`] returns another list than `known`. Cancel-safe.
    async fn loras_changed(&self, _known: &Arc<[String]>) {
        std::future::pending().await
    }

    /// Returns the number of sequences that the back end computes at once; 0: not known. This never changes.
    fn sequences_max(&self) -> u32 {
        0
    }

    /// Returns the maximum number of prompt tokens in a step. The KV of a step is sent during the next step; 0: no KV is sent before the
    /// prompt is computed. This never changes.
    fn step_tokens(&self) -> u32 {
        0
    }

    /// Returns the name of the store from which the back end loads blocks that other workers have stored; empty if there is none. This never changes.
    fn shared_store(&self) -> &str {
        ""
    }

    /// Returns whether the back end reads the images of prompts. This never changes.
    fn accepts_images(&self) -> bool {
        false
    }

    /// Returns the ip:port at which gateways reach the engine, if the back end only observes it; empty if the back end computes requests. This never
    /// changes.
    fn engine_endpoint(&self) -> &str {
        ""
    }

    /// Returns the largest number of blocks that [`Self::watch`] reports as cached. This never changes.
    fn cached_blocks_max(&self) -> u32 {
        self.info().capacity_blocks
    }
}

/// The way in which a back end sends or receives the KV of prompts.
#[derive(Clone, Copy)]
pub enum KvExchange<'a> {
    /// The transfer paths read and write the KV memory of this engine.
    Transfers(&'a EngineHandle),
    /// The engines exchange KV directly. A handle names the KV of one prompt.
    Handles {
        /// Two engines exchange KV only if their families are equal. A family contains every property that must match, such as version,
        /// model and data type.
        family: &'a str,
    },
    /// The engines meet in a room, in which the engine of the prefill worker sends the KV of one prompt. Both engines get the number of the room
    /// at the same time, in the handle that [`tandem_engine::KvHandle::of_room`] makes.
    Rooms {
        /// The property that must be equal in both engines, as with handles.
        family: &'a str,
        /// host:port at which engines meet this one; `None` for an engine that only receives KV. Such an engine computes no prompts.
        address: Option<&'a str>,
    },
    /// The back end does not exchange KV: it decodes only prompts that it has prefilled itself.
    None,
}

impl KvExchange<'_> {
    /// The `transfer_family` of workers that never exchange KV.
    pub const NO_FAMILY: &'static str = WorkerInfo::NO_TRANSFER_FAMILY;

    /// Returns the `transfer_family` that the worker reports; empty for [`KvExchange::Transfers`].
    pub fn family(&self) -> &str {
        match self {
            Self::Transfers(_) => "",
            Self::Handles { family } | Self::Rooms { family, .. } => family,
            Self::None => Self::NO_FAMILY,
        }
    }

    /// Returns whether the back end generates only from the KV of prompts that other back ends have computed.
    pub fn computes_no_prompts(&self) -> bool {
        matches!(self, Self::Rooms { address: None, .. })
    }
}

/// A prefill or a generation. Dropping this value cancels the job and releases its blocks.
#[tonic::async_trait]
pub trait Job: Send {
    /// Polls for the next event; `None` after the last one. If the events end before the job is complete, the back end has ended.
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>>;

    /// Requests that a prefill reports these blocks with [`Event::BlocksReady`] as soon as they are computed. Must be called at most once
    /// per job, and only with [`KvExchange::Transfers`].
    async fn send_blocks(&mut self, _block_indices: Vec<u32>, _access: BlockAccess) {}

    /// Pulls the prompt's KV and generates. Must be called once for each job with [`tandem_engine::KvSource::Handle`], after
    /// [`Event::Submitted`], and only with [`KvExchange::Handles`] or [`KvExchange::Rooms`]. With a room, a prefill gets the handle, too, and sends
    /// the KV.
    async fn pull(&mut self, _handle: KvHandle) {}

    /// Cancels the job of an external engine. The job still reports `Scheduled`, with the cached tokens that the engine has counted by
    /// then, and ends. Dropping a job cancels it without a report.
    fn cancel(&mut self) {}
}

impl dyn Job + '_ {
    /// Returns the next event; `None` after the last one. This method is cancel-safe.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|context| self.poll_next(context)).await
    }
}

/// The prefix cache and the load of a back end at one moment, and all later changes.
pub struct CacheWatch {
    /// The blocks that are in the cache.
    pub snapshot: Snapshot,
    /// The load at the moment of the snapshot.
    pub load: Load,
    /// Later events and loads. The snapshot already includes events with ids up to [`Snapshot::at_event_id`].
    pub batches: broadcast::Receiver<Arc<KvBatch>>,
}

#[tonic::async_trait]
impl Backend for EngineHandle {
    fn info(&self) -> &EngineInfo {
        self.info()
    }

    fn sequences_max(&self) -> u32 {
        self.batch_max()
    }

    fn step_tokens(&self) -> u32 {
        self.chunk_budget()
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

    fn busy_since(&self) -> Option<Instant> {
        self.busy_since()
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
