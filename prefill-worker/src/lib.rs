//! Prompt in, KV out: serves `Prefill`, which computes a prompt and pushes its blocks to the worker that decodes.
//!
//! - A prompt's blocks are pinned from `Scheduled` until they have been read out, or until the stream closes; never longer.
//! - Every stream ends with `PrefillDone`, a `Failure` with a reason, or a gRPC error for what breaks the protocol.
//! - What was computed stays cached, whatever became of the request.

mod attempt;
mod failure;
mod link;
mod service;
mod ways;

use futures::{FutureExt, future::OptionFuture};
use link::Link;
use service::{Service, Worker};
use std::{sync::Arc, time::Duration};
use tandem_engine::{EngineHandle, EngineInfo};
use tandem_node::{
    Metrics, Shutdown,
    events::Broker,
    trace::Tracer,
    worker::{ControlService, Direction, Ledger, Requests, Watch, Watched, WorkerMetrics},
};
use tandem_proto::{
    ClusterKey,
    channel::{Listener, MESSAGE_BYTES_MAX},
    v1::{WorkerInfo, prefill_server::PrefillServer, worker_info::Role},
};
use tandem_transfer::{Tcp, TransferMode, Transport};
use tonic::service::Routes;
use ways::Ways;

/// What a prefill worker is told by its operator.
#[derive(Clone, Debug)]
pub struct PrefillWorkerSettings {
    /// The worker's stable name, and the label of its metrics.
    pub worker_id: String,
    /// The operator's name of the cluster; a router of another does not route here.
    pub cluster: String,
    /// The served model's id.
    pub model: String,
    /// What its weights are.
    pub revision: String,
    /// Where every prompt is accounted for.
    pub ledger: Ledger,
    /// Where changes of the cache are published, beside the streams of those who watch.
    pub broker: Option<Broker>,
    /// Goes on with the traces of requests.
    pub tracer: Tracer,
    /// Off: `Scheduled` says nothing about cached tokens. Only to test what a cluster makes of such a worker.
    pub report_cached_tokens: bool,
    /// A computed prompt is let go when the decode worker has not said by then where its blocks may go.
    pub ticket_wait: Duration,
    /// The transfer paths that it may use.
    pub transfer_mode: TransferMode,
}

/// Why a prefill worker ended.
#[derive(Debug, thiserror::Error)]
pub enum PrefillWorkerError {
    /// The socket cannot be served.
    #[error("the prefill worker cannot serve its socket")]
    Serve(#[from] tonic::transport::Error),
    /// The engine's thread has ended.
    #[error("the prefill worker's engine is gone; the log says why")]
    EngineGone,
}

/// Serves `Prefill` and `Control` until the process drains and every request has ended.
pub async fn run(
    listener: impl Into<Listener>,
    engine: EngineHandle,
    settings: PrefillWorkerSettings,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), PrefillWorkerError> {
    let listener = listener.into();
    let info = worker_info(&settings, engine.info(), listener.network().key());
    tracing::info!(worker = info.worker_id, instance = info.instance_id, model = info.model, "prefill worker starts");
    let ledger = settings.ledger.of(&settings.worker_id, &settings.model, &metrics);
    let metrics = Arc::new(WorkerMetrics::new(&metrics, &settings.worker_id));
    metrics.set_capacity(engine.info().capacity_blocks);
    let requests = Requests::new(shutdown.clone());
    let watch = watch(&engine);
    let watched = (watch.start)().await.ok_or(PrefillWorkerError::EngineGone)?;
    let (broker, changes) = (settings.broker.clone(), watched.batches.resubscribe());
    let published = broker.clone().map(|broker| broker.publish_all(info.instance_id.clone(), changes));
    let transport = Tcp::on(listener.network().clone());
    // Its series are there before its first transfer.
    metrics.transfer(transport.name(), Direction::Sent);
    let worker = Worker {
        instance_id: info.instance_id.clone(),
        key: listener.network().key().clone(),
        ways: Ways::new(
            engine.kv_memory().filter(|_| settings.transfer_mode == TransferMode::Auto).cloned(),
            listener.network().clone(),
            requests.clone(),
            shutdown.clone(),
        ),
        link: Link::new(match settings.transfer_mode {
            TransferMode::Simulated { block } => block,
            TransferMode::Auto | TransferMode::Tcp => Duration::ZERO,
        }),
        transport: Box::new(transport),
        metrics: metrics.clone(),
        requests: requests.clone(),
        ledger,
        engine: engine.clone(),
        settings,
    };
    let control = ControlService::new(info, watch, metrics.clone(), requests.clone(), shutdown, broker);
    let prefill = PrefillServer::new(Service(Arc::new(worker))).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let routes = Routes::default().add_service(control.into_server()).add_service(prefill);
    tokio::select! {
        biased;
        served = requests.serve(listener, routes, &metrics) => Ok(served?),
        () = metrics.follow(watched) => Err(PrefillWorkerError::EngineGone),
        Some(()) = OptionFuture::from(published) => Err(PrefillWorkerError::EngineGone),
    }
}

fn worker_info(settings: &PrefillWorkerSettings, engine: &EngineInfo, key: &ClusterKey) -> WorkerInfo {
    WorkerInfo {
        role: Role::Prefill.into(),
        worker_id: settings.worker_id.clone(),
        instance_id: tandem_node::new_instance_id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        model: settings.model.clone(),
        revision: settings.revision.clone(),
        block_size: engine.block_size,
        capacity_blocks: engine.capacity_blocks,
        context_length: engine.context_length,
        block_bytes: engine.block_bytes as u64,
        cluster: settings.cluster.clone(),
        key_fingerprint: key.fingerprint().to_owned(),
    }
}

fn watch(engine: &EngineHandle) -> Watch {
    let start = {
        let engine = engine.clone();
        Arc::new(move || {
            let engine = engine.clone();
            async move {
                let (snapshot, batches) = engine.watch().await?;
                Some(Watched { snapshot, load: engine.load(), batches })
            }
            .boxed()
        })
    };
    let engine = engine.clone();
    let hung = Arc::new(move || {
        let engine = engine.clone();
        async move { engine.hung().await }.boxed()
    });
    Watch { start, hung }
}
