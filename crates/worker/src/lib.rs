//! The parts that prefill and decode workers share: the trait of their back end ([`Backend`]), the `Control` service, the ledger, metrics, and
//! the streams of their replies.
//!
//! A worker is a [`Worker`] with the gRPC service of its role. [`Worker::serve`] adds the `Control` service and runs until the process drains.

mod backend;
mod control;
mod ledger;
mod metrics;
mod requests;
mod sampling;
mod scheduled;
mod waiting;

pub use backend::{Backend, CacheWatch, Job, KvExchange};
pub use ledger::{Ledger, LedgerEntry, LedgerLine, Outcome, ScheduledPrompt, WorkerLedger};
pub use metrics::{Direction, WorkerMetrics};
pub use requests::{Disconnected, Replies, ReplySender, Requests};
pub use sampling::{InvalidSampling, LOGPROBS_MAX, sampling};
pub use scheduled::CountedJob;
pub use waiting::first_event;

use control::ControlService;
use futures::future::OptionFuture;
use std::{pin::pin, sync::Arc};
use tandem_engine::CachedTokens;
use tandem_kv::Namespace;
use tandem_process::{Metrics, Shutdown, events::Broker, trace::Tracer};
use tandem_proto::{
    channel::{Listener, Network},
    v1::{Scheduled, WorkerInfo, control_server::ControlServer, worker_info::Role},
};
use tokio::sync::Notify;
use tonic::service::Routes;

/// Settings of a worker of either role.
#[derive(Clone, Debug, Default)]
pub struct WorkerSettings {
    /// The worker's stable name, and the label of its metrics.
    pub worker_id: String,
    /// The cluster's name. Routers of other clusters refuse the worker.
    pub cluster: String,
    /// The served model's id.
    pub model: String,
    /// The version of the model's weights.
    pub revision: String,
    /// The ledger in which prompts and outcomes are recorded.
    pub ledger: Ledger,
    /// The broker to which KV events are published in addition to the `Watch` streams; `None` if events are sent on `Watch` streams only.
    pub broker: Option<Broker>,
    /// The tracer that continues the traces of requests.
    pub tracer: Tracer,
    /// Is notified to make the worker's process drain and end; `None`: the worker refuses, because the process has other parts, or because
    /// callers are not checked.
    pub drain: Option<Arc<Notify>>,
    /// Leaves the number of cached tokens out of `Scheduled`, to test how the cluster handles a worker that does not report this number.
    pub withhold_cached_tokens: bool,
}

/// The reason why a worker ended.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The socket cannot be served.
    #[error("the worker's gRPC server failed")]
    Serve(#[from] tonic::transport::Error),
    /// The back end has ended, so the worker cannot serve.
    #[error("the worker's engine has ended; the log has the reason")]
    EngineEnded,
    /// The back end cannot send a prompt's KV to other workers.
    #[error("this engine cannot prefill for other workers; run it as a decode worker")]
    NoKvExchange,
    /// The back end only computes prompts.
    #[error("this engine only computes prompts for other engines; run it as a prefill worker")]
    OnlyPrompts,
}

/// The error of a request that names a model which the worker does not serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this worker does not serve the model {0:?}")]
pub struct NotServed(String);

/// The state that the services of one worker share. It is cheap to clone.
#[derive(Clone)]
pub struct Worker {
    /// The description of the worker at its start, with a new instance id. Only the LoRAs may change later: see [`Worker::description`].
    pub info: Arc<WorkerInfo>,
    /// The LoRAs in `info`.
    first_loras: Arc<[String]>,
    /// The back end that computes the requests.
    pub backend: Arc<dyn Backend>,
    /// The handles of the worker's metrics.
    pub metrics: Arc<WorkerMetrics>,
    /// The running requests of the worker.
    pub requests: Requests,
    /// The ledger, which adds the worker's id to each line.
    pub ledger: WorkerLedger,
    /// The shutdown of this worker's tasks. The worker stops them when its back end ends.
    pub shutdown: Shutdown,
    /// The settings from which the worker was made.
    pub settings: Arc<WorkerSettings>,
}

impl Worker {
    /// Makes a new instance of the worker `settings.worker_id`. It belongs to the cluster of `network`'s key.
    pub fn new(
        role: Role,
        backend: Arc<dyn Backend>,
        settings: WorkerSettings,
        network: &Network,
        metrics: &Metrics,
        shutdown: Shutdown,
    ) -> Self {
        let (engine, first_loras) = (backend.info(), backend.loras());
        let info = WorkerInfo {
            role: role.into(),
            worker_id: settings.worker_id.clone(),
            instance_id: tandem_process::new_instance_id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: settings.model.clone(),
            revision: settings.revision.clone(),
            block_size: engine.block_size,
            capacity_blocks: engine.capacity_blocks,
            context_length: engine.context_length,
            block_bytes: engine.block_bytes as u64,
            cluster: settings.cluster.clone(),
            key_fingerprint: network.key().fingerprint().to_owned(),
            transfer_family: backend.kv_exchange().family().to_owned(),
            approximate_index: backend.assumes_cache(),
            cached_blocks_max: backend.cached_blocks_max(),
            sequences_max: backend.sequences_max(),
            step_tokens: backend.step_tokens(),
            loras: first_loras.to_vec(),
            shared_store: backend.shared_store().to_owned(),
            engine_endpoint: backend.engine_endpoint().to_owned(),
            needs_prefill_worker: backend.kv_exchange().computes_no_prompts(),
            accepts_images: backend.accepts_images(),
        };
        let ledger = settings.ledger.of(&settings.worker_id, metrics);
        let metrics = Arc::new(WorkerMetrics::new(metrics, &settings.worker_id, info.capacity_blocks));
        let requests = Requests::new(shutdown.clone());
        Self { info: info.into(), first_loras, backend, metrics, requests, ledger, shutdown, settings: settings.into() }
    }

    /// Returns the description of the worker that other processes read.
    pub fn description(&self) -> WorkerInfo {
        WorkerInfo { loras: self.backend.loras().to_vec(), ..(*self.info).clone() }
    }

    /// Returns the model that a request's namespace names, or the worker's own model if the namespace names none.
    ///
    /// # Errors
    /// Fails if the worker does not serve the model. If it computed the request with its own model, it would store the KV in the namespace of another
    /// model.
    pub fn model_of<'a>(&'a self, namespace: &'a Namespace) -> Result<&'a str, NotServed> {
        let own = &*self.info.model;
        let named = namespace.model().unwrap_or(own);
        if named == own || self.backend.loras().iter().any(|lora| lora == named) {
            Ok(named)
        } else {
            Err(NotServed(named.to_owned()))
        }
    }

    /// Returns the message that reports a prompt's cached tokens. If `cached` is `None`, the message has no count, which is not the same as
    /// a count of 0.
    pub fn scheduled(&self, cached: Option<CachedTokens>) -> Scheduled {
        let reported = cached.filter(|_| !self.settings.withhold_cached_tokens);
        Scheduled {
            cached_tokens: reported.map(CachedTokens::total),
            cached_tokens_by_tier: ledger::by_tier(reported).into_iter().collect(),
            reported_later: false,
        }
    }

    /// Serves `Control` and the services in `routes` until the process drains and every request has ended.
    ///
    /// # Errors
    /// Fails if the socket cannot be served, or if the back end has ended.
    pub async fn serve(self, listener: Listener, routes: Routes) -> Result<(), WorkerError> {
        let info = &self.info;
        tracing::info!(
            role = info.role().name(),
            worker = info.worker_id,
            instance = info.instance_id,
            model = info.model,
            "worker started"
        );
        let watch = self.backend.watch().await.ok_or(WorkerError::EngineEnded)?;
        let batches = watch.batches.resubscribe();
        let published = self.settings.broker.clone().map(|broker| broker.publish_all(info.instance_id.clone(), batches));
        let routes = routes.add_service(ControlServer::new(ControlService::new(self.clone())));
        let mut serving = pin!(self.requests.serve(listener, routes, &self.metrics));
        tokio::select! {
            biased;
            served = &mut serving => return Ok(served?),
            () = self.metrics.follow(watch) => {}
            Some(()) = OptionFuture::from(published) => {}
        }
        // All connections are closed now, so that no client takes a later instance at this address for this one.
        self.shutdown.stop();
        serving.await?;
        Err(WorkerError::EngineEnded)
    }
}
