//! The state that all requests of a decode worker share.

use crate::{client::ClientStream, convert::DecodeRequest, failure::DecodeEnd, finishing::Finishing, handles::Handles};
use std::time::Duration;
use tandem_engine::Generate;
use tandem_kv::HashKey;
use tandem_proto::{
    channel::Channels,
    v1::{PrefillStart, Waiting, WorkerRef, generate_reply::Message},
};
use tandem_transfer::ReceivePaths;
use tandem_worker::Job;
use tokio::{
    sync::{Semaphore, SemaphorePermit},
    time::{Instant, timeout_at},
};

pub(crate) struct DecodeWorker {
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
    /// The engine receives the KV of each prompt in a room. The hash key is that of the prompt digest.
    Rooms(HashKey),
    /// The worker receives no KV.
    None,
}

pub(crate) struct RemotePrompt<'a> {
    pub(crate) request: DecodeRequest,
    pub(crate) start: PrefillStart,
    pub(crate) prefill: WorkerRef,
    /// The request's permit to wait for a prefill on another worker.
    pub(crate) waiting: SemaphorePermit<'a>,
}

impl DecodeWorker {
    /// Passes a request to the engine, which first compiles its constraint. The compilation may have to wait for those of other requests.
    ///
    /// # Errors
    /// Fails if the engine refuses the request, or if the request still waits in the queue at `wait_until`.
    pub(crate) async fn generate(&self, generate: Generate, wait_until: Option<Instant>) -> Result<Box<dyn Job>, DecodeEnd> {
        in_queue(wait_until, async { Ok(self.common.backend.generate(generate).await?) }).await
    }

    /// Waits for the first event of a job of this worker. While the job waits in the queue, reports this to the client.
    ///
    /// # Errors
    /// Fails if the engine makes no progress for `limit` (`None` sets no limit), or if the client has disconnected.
    pub(crate) async fn first_event<T>(
        &self,
        limit: Option<Duration>,
        first: impl Future<Output = T>,
        client: &ClientStream,
    ) -> Result<T, DecodeEnd> {
        let report = || client.send(Message::Waiting(Waiting {}));
        let first = tandem_worker::first_event(&*self.common.backend, limit, first, report).await?;
        first.ok_or_else(|| DecodeEnd::NotStarted { culprit: self.common.info.instance_id.clone() })
    }
}

/// Waits for a message of a prefill worker. If this takes longer than `limit` (`None` sets no limit), the attempt fails, and the failure names the
/// instance `culprit`.
pub(crate) async fn in_time<T>(
    limit: Option<Duration>,
    message: impl Future<Output = Result<T, DecodeEnd>>,
    culprit: &str,
) -> Result<T, DecodeEnd> {
    match limit {
        None => message.await,
        Some(limit) => tokio::time::timeout(limit, message)
            .await
            .unwrap_or_else(|_| Err(DecodeEnd::NotStarted { culprit: culprit.to_owned() })),
    }
}

/// Waits in the queue until the time `until` at the latest (`None` sets no limit).
///
/// # Errors
/// Fails if `wait` has not ended by then, or ends with an error.
pub(crate) async fn in_queue<T>(
    until: Option<Instant>,
    wait: impl Future<Output = Result<T, DecodeEnd>>,
) -> Result<T, DecodeEnd> {
    match until {
        None => wait.await,
        Some(until) => timeout_at(until, wait).await.unwrap_or(Err(DecodeEnd::Overloaded)),
    }
}
