//! The state of a decode worker.

use crate::failure::Ended;
use std::time::Duration;
use tandem_proto::channel::Channels;
use tandem_transfer::ReceivePaths;
use tokio::sync::Semaphore;

/// The state that all requests share.
pub(crate) struct Worker {
    pub(crate) common: tandem_worker::Worker,
    /// `host:port` at which prefill workers reach this worker.
    pub(crate) address: String,
    pub(crate) transfers: ReceivePaths,
    pub(crate) channels: Channels,
    pub(crate) remote_waiting: Semaphore,
    /// The longest time from the start of a prompt's prefill until its KV is written here.
    pub(crate) receive_timeout: Duration,
}

/// Waits until a prefill has begun. After the limit the attempt fails because of the instance `culprit`.
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
