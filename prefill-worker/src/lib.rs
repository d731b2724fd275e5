//! The prefill worker: serves `Prefill`, which computes the KV of a prompt and sends its blocks to the decode worker.
//!
//! - A prompt's blocks are pinned from `Scheduled` until they are written on the decode worker or the stream closes, but not longer.
//! - Every stream ends with `PrefillDone`, with a `Failure` that has a reason, or with a gRPC error if the client breaks the protocol.
//! - Computed blocks stay cached, even if the request fails.

mod attempt;
mod export;
mod failure;
mod room;
mod service;

use service::PrefillService;
use std::{sync::Arc, time::Duration};
use tandem_kv::HashKey;
use tandem_process::{Metrics, Shutdown};
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
    /// The settings that prefill workers and decode workers have in common.
    pub worker: WorkerSettings,
    /// The time within which a prompt's ticket or room must arrive after its prefill has started. Without one, the prompt's blocks are released.
    pub ticket_wait: Duration,
    /// The transfer paths that the worker may use.
    pub transfer_mode: TransferMode,
}

struct PrefillWorker {
    common: tandem_worker::Worker,
    sending: KvSending,
    ticket_wait: Duration,
}

/// The form in which this worker gives the KV of a prompt to decode workers.
enum KvSending {
    /// The blocks are sent one by one into the reservation that a ticket names.
    Transfers(SendPaths),
    /// A handle for the prompt's KV is sent. `hash_key` is the key of the prompt digest that the handle carries.
    Handles { hash_key: HashKey },
    /// The engine sends the KV in a room, at `address`. `hash_key` is the key of the prompt digest that the decode worker sends.
    Rooms { hash_key: HashKey, address: String },
}

/// Serves `Prefill` and `Control` until the process drains and every request has ended.
///
/// # Errors
/// Fails if the socket cannot be served, if the back end cannot send KV to other workers, or if the back end has ended.
pub async fn run(
    listener: impl Into<Listener>,
    backend: impl Backend,
    settings: PrefillWorkerSettings,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), WorkerError> {
    let (listener, backend) = (listener.into(), Arc::new(backend));
    let PrefillWorkerSettings { worker: settings, ticket_wait, transfer_mode } = settings;
    let common = tandem_worker::Worker::new(Role::Prefill, backend, settings, listener.network(), &metrics, shutdown);
    let sending = match common.backend.kv_exchange() {
        KvExchange::Transfers(engine) => {
            // The transfer metrics must be exported before the first transfer.
            drop(common.metrics.transfer(ReceivePaths::fallback_label(), Direction::Sent));
            let requests = common.requests.clone();
            KvSending::Transfers(SendPaths::new(SendSettings {
                instance_id: common.info.instance_id.clone(),
                mode: transfer_mode,
                memory: engine.kv_memory().cloned(),
                block_bytes: common.backend.info().block_bytes,
                network: listener.network().clone(),
                lifetime: Lifetime::new(common.shutdown.clone(), async move { requests.drained().await }),
            }))
        }
        KvExchange::Handles { .. } => KvSending::Handles { hash_key: listener.network().key().hash_key() },
        KvExchange::Rooms { address: Some(address), .. } => {
            KvSending::Rooms { hash_key: listener.network().key().hash_key(), address: address.to_owned() }
        }
        KvExchange::None | KvExchange::Rooms { address: None, .. } => return Err(WorkerError::NoKvExchange),
    };
    let service = PrefillService(Arc::new(PrefillWorker { common: common.clone(), sending, ticket_wait }));
    let service = PrefillServer::new(service).max_decoding_message_size(MESSAGE_BYTES_MAX);
    common.serve(listener, Routes::default().add_service(service)).await
}
