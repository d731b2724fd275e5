//! The state that all requests of a decode worker share.

use crate::{convert::Request, failure::Ended, finishing::Finishing, handles::Handles};
use std::time::Duration;
use tandem_proto::{
    channel::Channels,
    v1::{PrefillStart, WorkerRef},
};
use tandem_transfer::ReceivePaths;
use tokio::sync::{Semaphore, SemaphorePermit};

pub(crate) struct Worker {
    pub(crate) common: tandem_worker::Worker,
    pub(crate) address: String,
    pub(crate) receiving: Receiving,
    pub(crate) finishing: Finishing,
    pub(crate) channels: Channels,
    pub(crate) remote_waiting: Semaphore,
    pub(crate) receive_timeout: Duration,
}

/// The way in which this worker receives KV from other workers.
pub(crate) enum Receiving {
    /// Blocks are written one by one into the engine's memory.
    Transfers(ReceivePaths),
    /// The engine pulls the KV of each prompt with a handle.
    Handles(Handles),
    /// The worker receives no KV.
    None,
}

pub(crate) struct RemotePrompt<'a> {
    pub(crate) request: Request,
    pub(crate) start: PrefillStart,
    pub(crate) prefill: WorkerRef,
    /// The request's permit to wait for a prefill on another worker.
    pub(crate) waiting: SemaphorePermit<'a>,
}

/// Waits until a prefill has begun. If this takes longer than `limit` (`None` sets no limit), the attempt fails, and the failure names the instance
/// `culprit`.
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
