//! The state of a decode worker.

use crate::{DecodeWorkerSettings, failure::Ended, finishing::Finishing, pull::Handles};
use std::{sync::Arc, time::Duration};
use tandem_proto::channel::Channels;
use tandem_transfer::ReceivePaths;
use tandem_worker::{Backend, Requests, WorkerLedger, WorkerMetrics};
use tokio::sync::Semaphore;

/// The parts that all requests share.
pub(crate) struct Worker {
    pub(crate) instance_id: String,
    /// `host:port` at which prefill workers reach this worker.
    pub(crate) address: String,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) settings: DecodeWorkerSettings,
    pub(crate) metrics: Arc<WorkerMetrics>,
    pub(crate) receiving: Receiving,
    pub(crate) finishing: Finishing,
    pub(crate) requests: Requests,
    pub(crate) ledger: WorkerLedger,
    pub(crate) channels: Channels,
    pub(crate) remote_waiting: Semaphore,
}

/// How KV of other workers gets here.
pub(crate) enum Receiving {
    /// Block by block, into the engine's memory.
    Transfers(ReceivePaths),
    /// The engine pulls it with a handle.
    Handles(Handles),
    /// Not at all.
    None,
}

/// Waits until a prefill has begun. After the limit the attempt fails, and `culprit` is the instance to blame.
pub(crate) async fn in_time<T>(
    limit: Option<Duration>,
    starting: impl Future<Output = Result<T, Ended>>,
    culprit: &str,
) -> Result<T, Ended> {
    match limit {
        None => starting.await,
        Some(limit) => {
            tokio::time::timeout(limit, starting).await.unwrap_or_else(|_| Err(Ended::NotStarted { culprit: culprit.to_owned() }))
        }
    }
}
