//! Prompt in, KV out: serves `Prefill`, which computes a prompt and pushes its blocks to the worker that decodes.
//!
//! - A prompt's blocks are held from `Scheduled` until they are written on the decode worker, or until the stream closes; never longer.
//! - Every stream ends with `PrefillDone`, a `Failure` with a reason, or a gRPC error for what breaks the protocol.
//! - What was computed stays cached, whatever became of the request.

mod attempt;
mod export;
mod failure;
mod service;

use service::{Sending, Service, Worker};
use std::{sync::Arc, time::Duration};
use tandem_node::{Metrics, Shutdown};
use tandem_proto::{
    channel::{Listener, MESSAGE_BYTES_MAX},
    v1::{prefill_server::PrefillServer, worker_info::Role},
};
use tandem_transfer::{Lifetime, ReceivePaths, SendPaths, SendSettings, TransferMode};
use tandem_worker::{Backend, Direction, KvExchange, WorkerError, WorkerSettings};
use tonic::service::Routes;

/// Settings of a prefill worker.
#[derive(Clone, Debug)]
pub struct PrefillWorkerSettings {
    /// Those of every worker.
    pub worker: WorkerSettings,
    /// The longest time from the start of a prompt's prefill until its ticket comes; without a ticket the prompt's blocks are released.
    pub ticket_wait: Duration,
    /// The transfer paths that it may use.
    pub transfer_mode: TransferMode,
}

/// Serves `Prefill` and `Control` until the process drains and every request has ended.
///
/// # Errors
/// The socket cannot be served, the back end cannot give KV to other workers, or it has ended.
pub async fn run(
    listener: impl Into<Listener>,
    backend: impl Backend,
    settings: PrefillWorkerSettings,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), WorkerError> {
    let (listener, backend) = (listener.into(), Arc::new(backend));
    let worker = tandem_worker::Worker::new(Role::Prefill, backend, &settings.worker, listener.network(), &metrics, shutdown);
    let tandem_worker::Worker { info, backend, metrics, requests, ledger, shutdown, .. } = worker.clone();
    let sending = match backend.kv_exchange() {
        KvExchange::Transfers(engine) => {
            // The series exist before the first transfer.
            metrics.transfer(ReceivePaths::fallback_label(), Direction::Sent);
            let drained = requests.clone();
            Sending::Transfers(SendPaths::new(SendSettings {
                instance_id: info.instance_id.clone(),
                mode: settings.transfer_mode,
                memory: engine.kv_memory().cloned(),
                block_bytes: backend.info().block_bytes,
                network: listener.network().clone(),
                lifetime: Lifetime::new(shutdown, async move { drained.drained().await }),
            }))
        }
        KvExchange::Handles { .. } => Sending::Handles { hash_key: listener.network().key().hash_key() },
        KvExchange::None => return Err(WorkerError::NoKvExchange),
    };
    let prefill = Worker { instance_id: info.instance_id.clone(), sending, metrics, requests, ledger, backend, settings };
    let prefill = PrefillServer::new(Service(Arc::new(prefill))).max_decoding_message_size(MESSAGE_BYTES_MAX);
    worker.serve(listener, Routes::default().add_service(prefill)).await
}
