//! KV in, tokens out: serves `Decode`, which owns a request from its placement to its last token.
//!
//! - The stream of `Generate` is the request: closing it ends the request here and on the prefill worker.
//! - `Scheduled` comes first and is the word of the worker that prefills: this one's for a local prefill, else the prefill
//!   worker's, unchanged.
//! - Nothing writes into this worker's memory without a ticket; the engine's own thread checks every block, and uses none of them before the
//!   prefill worker has said `PrefillDone` on the stream that this worker opened.

mod convert;
mod failure;
mod forward;
mod prefill;
mod remote;
mod service;
mod ways;

use futures::{FutureExt, future::OptionFuture};
use service::{Service, Worker};
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tandem_engine::{EngineHandle, EngineInfo};
use tandem_node::{
    Metrics, Shutdown,
    events::Broker,
    trace::Tracer,
    worker::{ControlService, Direction, Ledger, Requests, Watch, Watched, WorkerMetrics},
};
use tandem_proto::{
    ClusterKey,
    channel::{Channels, Listener, MESSAGE_BYTES_MAX},
    v1::{TransferPath, WorkerInfo, decode_server::DecodeServer, worker_info::Role},
};
use tandem_transfer::{TransferMode, TransferService};
use tokio::sync::Semaphore;
use tonic::service::Routes;
use ways::Ways;

/// What a decode worker is told by its operator.
#[derive(Clone, Debug)]
pub struct DecodeWorkerSettings {
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
    /// host:port at which prefill workers reach this worker; absent: where it listens.
    pub advertise: Option<String>,
    /// Off: `Scheduled` of local prefills says nothing about cached tokens. Only to test what a cluster makes of such a worker.
    pub report_cached_tokens: bool,
    /// Requests that wait for a prefill elsewhere; more are refused. Each costs this worker a prompt and a stream, but no blocks.
    pub remote_waiting_max: usize,
    /// A prompt's KV must have landed this long after its prefill began.
    pub landing_wait: Duration,
    /// The transfer paths that it may use.
    pub transfer_mode: TransferMode,
}

/// Why a decode worker ended.
#[derive(Debug, thiserror::Error)]
pub enum DecodeWorkerError {
    /// The socket cannot be served.
    #[error("the decode worker cannot serve its socket")]
    Serve(#[from] tonic::transport::Error),
    /// The socket has no address.
    #[error("the decode worker's socket has no address")]
    Socket(#[from] std::io::Error),
    /// It listens on all addresses and none was said to be the one for others.
    #[error(
        "the decode worker listens on {0}, which nobody can connect to; say with --advertise at which host:port others reach it"
    )]
    NoAdvertisedAddress(SocketAddr),
    /// The engine's thread has ended.
    #[error("the decode worker's engine is gone; the log says why")]
    EngineGone,
}

/// Serves `Decode`, `Transfer` and `Control` until the process drains and every request has ended.
pub async fn run(
    listener: impl Into<Listener>,
    engine: EngineHandle,
    settings: DecodeWorkerSettings,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), DecodeWorkerError> {
    let listener = listener.into();
    let address = match settings.advertise.clone() {
        Some(address) => address,
        None => own_address(listener.local_addr()?)?,
    };
    let info = worker_info(&settings, engine.info(), listener.network().key());
    tracing::info!(worker = info.worker_id, instance = info.instance_id, model = info.model, "decode worker starts");
    let ledger = settings.ledger.of(&settings.worker_id, &settings.model, &metrics);
    let metrics = Arc::new(WorkerMetrics::new(&metrics, &settings.worker_id));
    metrics.set_capacity(engine.info().capacity_blocks);
    let requests = Requests::new(shutdown.clone());
    let watch = watch(&engine);
    let watched = (watch.start)().await.ok_or(DecodeWorkerError::EngineGone)?;
    let (broker, changes) = (settings.broker.clone(), watched.batches.resubscribe());
    let published = broker.clone().map(|broker| broker.publish_all(info.instance_id.clone(), changes));
    let ways = Ways::new(
        engine.clone(),
        settings.transfer_mode == TransferMode::Auto,
        metrics.clone(),
        requests.clone(),
        shutdown.clone(),
    );
    // Its series are there before its first transfer.
    metrics.transfer(ways::name(TransferPath::Tcp), Direction::Received);
    let worker = Worker {
        instance_id: info.instance_id.clone(),
        address,
        engine: engine.clone(),
        metrics: metrics.clone(),
        ways: ways.clone(),
        requests: requests.clone(),
        ledger,
        channels: Channels::on(listener.network().clone()),
        remote_waiting: Semaphore::new(settings.remote_waiting_max.min(Semaphore::MAX_PERMITS)),
        settings,
    };
    let control = ControlService::new(info, watch, metrics.clone(), requests.clone(), shutdown, broker);
    let decode = DecodeServer::new(Service(Arc::new(worker))).max_decoding_message_size(MESSAGE_BYTES_MAX);
    let routes = Routes::default()
        .add_service(control.into_server())
        .add_service(decode)
        .add_service(TransferService::server(ways.sink(), ways));
    tokio::select! {
        biased;
        served = requests.serve(listener, routes, &metrics) => Ok(served?),
        () = metrics.follow(watched) => Err(DecodeWorkerError::EngineGone),
        Some(()) = OptionFuture::from(published) => Err(DecodeWorkerError::EngineGone),
    }
}

fn own_address(address: SocketAddr) -> Result<String, DecodeWorkerError> {
    if address.ip().is_unspecified() { Err(DecodeWorkerError::NoAdvertisedAddress(address)) } else { Ok(address.to_string()) }
}

fn worker_info(settings: &DecodeWorkerSettings, engine: &EngineInfo, key: &ClusterKey) -> WorkerInfo {
    WorkerInfo {
        role: Role::Decode.into(),
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
