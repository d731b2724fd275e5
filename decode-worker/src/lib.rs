//! The decode worker: serves `Decode`, which owns a request from its placement to its last token.
//!
//! - The request exists while its `Generate` stream is open: closing the stream ends the request here and on the prefill worker.
//! - The first message to the client is `Scheduled`. If this worker prefills the prompt, it makes the message itself; otherwise it forwards
//!   the prefill worker's message unchanged.
//! - No process writes into this worker's memory without a ticket; the engine's thread checks every written block, and uses none of these
//!   blocks before the prefill worker has sent `PrefillDone` on the stream that this worker opened.

mod client;
mod convert;
mod failure;
mod finishing;
mod forward;
mod handles;
mod memory;
mod prefill;
mod pull;
mod remote;
mod room;
mod service;
mod worker;

use finishing::Finishing;
use handles::Handles;
use memory::EngineMemory;
use service::DecodeService;
use std::{net::SocketAddr, sync::Arc, time::Duration};
use tandem_process::{Metrics, Shutdown};
use tandem_proto::{
    channel::{Channels, Listener, MESSAGE_BYTES_MAX, PeerRole},
    v1::{decode_server::DecodeServer, worker_info::Role},
};
use tandem_transfer::{Lifetime, ReceivePaths, TransferMode};
use tandem_worker::{Backend, Direction, KvExchange, WorkerError, WorkerSettings};
use tokio::sync::Semaphore;
use tonic::service::Routes;
use worker::{DecodeWorker, Receiving};

/// Settings of a decode worker.
#[derive(Clone, Debug)]
pub struct DecodeWorkerSettings {
    /// The settings of workers of either role.
    pub worker: WorkerSettings,
    /// The address, `host:port`, at which prefill workers reach this worker; `None` for the address of the listener.
    pub advertise: Option<String>,
    /// Maximum number of requests that wait for a prefill on another worker; further requests are refused. A waiting request keeps its prompt and a
    /// stream, but no blocks.
    pub remote_waiting_max: usize,
    /// Maximum time from the start of a prompt's prefill until all of the prompt's KV is written on this worker.
    pub receive_timeout: Duration,
    /// The transfer paths that the worker may use.
    pub transfer_mode: TransferMode,
}

/// The reason why a decode worker ended.
#[derive(Debug, thiserror::Error)]
pub enum DecodeWorkerError {
    /// The worker cannot serve, or its back end has ended.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// The address of the socket cannot be read.
    #[error("the address of the decode worker's socket cannot be read")]
    Socket(#[from] std::io::Error),
    /// The worker listens on all addresses, and no address is advertised.
    #[error(
        "the decode worker listens on {0}, which other hosts cannot connect to; set --advertise to the host:port at which they reach this worker"
    )]
    NoAdvertisedAddress(SocketAddr),
}

/// Serves `Decode`, `Transfer` and `Control` until the process drains and every request has ended.
///
/// # Errors
/// Fails if the worker has no address for prefill workers, if the socket cannot be served, or if the back end has ended.
pub async fn run(
    listener: impl Into<Listener>,
    backend: impl Backend,
    settings: DecodeWorkerSettings,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), DecodeWorkerError> {
    let listener = listener.into();
    let address = match settings.advertise.clone() {
        Some(address) => address,
        None => own_address(listener.local_addr()?)?,
    };
    let (backend, network) = (Arc::new(backend), listener.network().clone());
    let common = tandem_worker::Worker::new(Role::Decode, backend, settings.worker, &network, &metrics, shutdown);
    let mut routes = Routes::default();
    let receiving = match common.backend.kv_exchange() {
        KvExchange::Transfers(engine) => {
            let requests = common.requests.clone();
            let lifetime = Lifetime::new(common.shutdown.clone(), async move { requests.drained().await });
            let destination = EngineMemory::new(engine.clone(), Arc::clone(&common.metrics));
            let transfers = ReceivePaths::new(destination, engine.kv_memory().cloned(), settings.transfer_mode, lifetime);
            routes = routes.add_service(transfers.service());
            // The transfer metrics must be exported before the first transfer.
            drop(common.metrics.transfer(ReceivePaths::fallback_label(), Direction::Received));
            Receiving::Transfers(transfers)
        }
        KvExchange::Handles { .. } => Receiving::Handles(Handles::new(network.key().hash_key())),
        KvExchange::Rooms { address: Some(_), .. } => return Err(WorkerError::OnlyPrompts.into()),
        KvExchange::Rooms { address: None, .. } => Receiving::Rooms(network.key().hash_key()),
        KvExchange::None => Receiving::None,
    };
    let worker = DecodeWorker {
        common: common.clone(),
        address,
        receiving,
        finishing: Finishing::default(),
        channels: Channels::on(network.expecting(&[PeerRole::PrefillWorker])),
        remote_waiting: Semaphore::new(settings.remote_waiting_max.min(Semaphore::MAX_PERMITS)),
        receive_timeout: settings.receive_timeout,
    };
    let decode = DecodeServer::new(DecodeService(Arc::new(worker))).max_decoding_message_size(MESSAGE_BYTES_MAX);
    Ok(common.serve(listener, routes.add_service(decode)).await?)
}

fn own_address(address: SocketAddr) -> Result<String, DecodeWorkerError> {
    if address.ip().is_unspecified() { Err(DecodeWorkerError::NoAdvertisedAddress(address)) } else { Ok(address.to_string()) }
}
