//! Follows one worker: who it is, what its cache holds, how busy it is, for as long as it lives, and again when it returns.
//!
//! A worker is a member from its first complete snapshot until its stream ends, breaks, falls silent or speaks for another
//! instance. A gap in its events does not end its membership: the stream is opened again, and the snapshot that comes first
//! replaces what was known.

use crate::{
    cluster::{Cluster, MemberId, Refused},
    feed::{Broken, Feed, News},
};
use std::{sync::Arc, time::Duration};
use tandem_kv::Snapshot;
use tandem_proto::{
    link,
    v1::{DescribeRequest, WatchRequest, WorkerInfo, control_client::ControlClient},
};
use tokio::time::{sleep, timeout};
use tonic::{Code, Status, transport::Channel, transport::Endpoint};

/// Pause before the first new try. Soon enough for a worker that starts with the router.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// Longest pause between tries: a worker that comes back is found within it, and one that is down costs nearly nothing.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Why the router stopped following an instance.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("it cannot be reached")]
    Unreachable(#[from] tonic::transport::Error),
    #[error("it answered with an error")]
    Failed(#[from] Status),
    #[error("it did not answer in {0:?}")]
    Silent(Duration),
    #[error("it ended the stream")]
    Ended,
    #[error("it is not admitted")]
    Refused(#[from] Refused),
    #[error("what it says cannot be right")]
    Broken(#[from] Broken),
}

/// Follows the worker at this address until dropped.
pub(crate) struct Watcher {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) address: String,
    pub(crate) endpoint: Endpoint,
    /// How long the worker may be silent.
    pub(crate) silence_max: Duration,
}

impl Watcher {
    /// Never returns. Dropped at any await, it leaves nothing behind.
    pub(crate) async fn run(self) {
        let mut tries = Tries::default();
        loop {
            let lost = match self.follow(&mut tries).await {
                Ok(never) => match never {},
                Err(lost) => lost,
            };
            self.cluster.lock().absent(&self.address, complaint(&lost), matches!(lost, Lost::Refused(_)));
            self.tell(&lost, &mut tries);
            sleep(tries.pause()).await;
        }
    }

    /// Once, until the worker was well again: the same complaint every second helps nobody.
    fn tell(&self, lost: &Lost, tries: &mut Tries) {
        let complaint = complaint(lost);
        if tries.told.as_ref() == Some(&complaint) {
            return tracing::debug!(worker = %self.address, "still not routed to: {complaint}");
        }
        match lost {
            Lost::Refused(_) | Lost::Broken(_) => tracing::warn!(worker = %self.address, "not routed to: {complaint}"),
            Lost::Unreachable(_) | Lost::Failed(_) | Lost::Silent(_) | Lost::Ended => {
                tracing::info!(worker = %self.address, "not routed to: {complaint}");
            }
        }
        tries.told = Some(complaint);
    }

    /// One connection's life.
    async fn follow(&self, tries: &mut Tries) -> Result<std::convert::Infallible, Lost> {
        let mut control = ControlClient::new(self.endpoint.connect().await?).max_decoding_message_size(link::MESSAGE_BYTES_MAX);
        let info = self.in_time(control.describe(DescribeRequest {})).await??.into_inner();
        self.cluster.lock().admits(&info)?;
        let mut member = Member { watcher: self, info, id: None };
        loop {
            self.follow_events(&mut control, &mut member, tries).await?;
            self.cluster.lock().count_gap(&member.info.worker_id);
            tracing::warn!(worker = %self.address, "its KV events have a gap; asking for its cache anew");
            sleep(tries.pause()).await;
        }
    }

    /// One stream of events; returns when it has a gap.
    async fn follow_events(
        &self,
        control: &mut ControlClient<Channel>,
        member: &mut Member<'_>,
        tries: &mut Tries,
    ) -> Result<(), Lost> {
        let request = WatchRequest { instance_id: member.info.instance_id.clone() };
        let mut replies = self.in_time(control.watch(request)).await??.into_inner();
        let mut feed = Feed::new(&member.info);
        loop {
            let reply = match self.in_time(replies.message()).await? {
                Ok(Some(reply)) => reply,
                Ok(None) => return Err(Lost::Ended),
                // The worker noticed itself that we missed events.
                Err(status) if status.code() == Code::DataLoss => return Ok(()),
                Err(status) => return Err(status.into()),
            };
            match feed.take(reply) {
                Ok(News::Nothing) => {}
                Ok(News::Cache(snapshot)) => member.replace(&snapshot)?,
                Ok(News::Batch { batch, transfer_bytes_per_second }) => {
                    member.apply(batch, transfer_bytes_per_second);
                    tries.reset();
                }
                Err(Broken::Gap { .. }) => return Ok(()),
                Err(broken) => return Err(broken.into()),
            }
        }
    }

    async fn in_time<T>(&self, answer: impl Future<Output = T>) -> Result<T, Lost> {
        timeout(self.silence_max, answer).await.map_err(|_| Lost::Silent(self.silence_max))
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.cluster.lock().not_absent(&self.address);
    }
}

/// An instance that is followed. Dropping it takes the worker and its entries out of the cluster.
struct Member<'a> {
    watcher: &'a Watcher,
    info: WorkerInfo,
    /// Set from the first snapshot on.
    id: Option<MemberId>,
}

impl Member<'_> {
    fn replace(&mut self, snapshot: &Snapshot) -> Result<(), Refused> {
        let mut state = self.watcher.cluster.lock();
        match self.id {
            Some(id) => state.replace(id, snapshot),
            None => {
                self.id = Some(state.join(self.info.clone(), self.watcher.address.clone(), snapshot)?);
                let WorkerInfo { worker_id, instance_id, .. } = &self.info;
                tracing::info!(worker_id, instance_id, address = %self.watcher.address, "worker joined");
            }
        }
        Ok(())
    }

    fn apply(&self, batch: tandem_kv::KvBatch, transfer_bytes_per_second: f64) {
        if let Some(id) = self.id {
            self.watcher.cluster.lock().apply(id, batch, transfer_bytes_per_second);
        }
    }
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.watcher.cluster.lock().leave(id);
            let WorkerInfo { worker_id, instance_id, .. } = &self.info;
            tracing::info!(worker_id, instance_id, address = %self.watcher.address, "worker left");
        }
    }
}

/// Failures since the worker was well.
struct Tries {
    next_pause: Duration,
    told: Option<String>,
}

impl Default for Tries {
    fn default() -> Self {
        Self { next_pause: PAUSE_MIN, told: None }
    }
}

impl Tries {
    /// How long to wait now; longer the next time.
    fn pause(&mut self) -> Duration {
        let now = self.next_pause;
        self.next_pause = (now * 2).min(PAUSE_MAX);
        now
    }

    fn reset(&mut self) {
        *self = Self::default();
    }
}

/// An error with what caused it, in one line.
fn complaint(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}
