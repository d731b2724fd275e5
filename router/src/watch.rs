//! The loop that keeps a connection to one worker or peer router, and reconnects when it is lost.

use crate::{
    cluster::{Cluster, JoinError},
    replication::ReplicationError,
    subscription::SubscriptionError,
};
use std::{convert::Infallible, error::Error, sync::Arc, time::Duration};
use tandem_process::{Backoff, retry::error_chain};
use tandem_proto::{
    channel::{Channel, Network},
    v1::FailureReason,
};
use tokio::time::{sleep, timeout};
use tonic::{Status, transport::Endpoint};

/// The first pause between attempts to connect: short, because a process may be starting together with the router.
const PAUSE_MIN: Duration = Duration::from_millis(50);

/// The longest pause between attempts to connect. A restarted process is found within this time. Attempts at this interval cost almost
/// nothing.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The pause after an address turned out to be this router's own. The address is tried again, because another router may have it some day.
const ITSELF_PAUSE: Duration = Duration::from_secs(30);

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectionEnd {
    #[error("the router cannot connect to the remote process")]
    Unreachable(#[from] tonic::transport::Error),
    #[error("the connection ended, as when the process is killed, or its host or the network fails")]
    Broken(#[source] Status),
    #[error("the remote process answered with an error")]
    Failed(#[source] Status),
    /// The end of a worker that was a member.
    #[error(transparent)]
    Lost(Box<LostMember>),
    #[error("the remote process did not answer within {0:?}")]
    Silent(Duration),
    #[error("the remote process closed the stream")]
    Closed,
    #[error("the worker cannot join the cluster")]
    Incompatible(#[from] JoinError),
    #[error("the worker sent an invalid message")]
    InvalidEvents(#[from] SubscriptionError),
    #[error("the peer router sent an invalid message")]
    InvalidBookings(#[from] ReplicationError),
    #[error("the address is this router's own")]
    Itself,
}

/// A worker that was a member until its connection ended.
#[derive(Debug, thiserror::Error)]
#[error("{end}")]
pub(crate) struct LostMember {
    pub(crate) worker_id: String,
    pub(crate) instance_id: String,
    #[source]
    pub(crate) end: ConnectionEnd,
}

impl From<Status> for ConnectionEnd {
    fn from(status: Status) -> Self {
        // A status with a cause is from the failed connection; any other is the answer of the process.
        if status.source().is_some() { Self::Broken(status) } else { Self::Failed(status) }
    }
}

impl ConnectionEnd {
    /// Whether the process ends as planned: it finishes its work, and takes no more.
    pub(crate) fn is_planned(&self) -> bool {
        matches!(self, Self::Failed(status) if FailureReason::of_refusal(status) == Some(FailureReason::Draining))
    }
}

/// A worker or peer router to connect to.
pub(crate) struct RemoteProcess {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) network: Network,
    pub(crate) address: String,
    pub(crate) endpoint: Endpoint,
}

impl RemoteProcess {
    pub(crate) async fn connect(&self) -> Result<Channel, ConnectionEnd> {
        Ok(self.network.connect(&self.endpoint).await?)
    }

    /// Waits for an answer of the remote process, for at most `silence_max`.
    pub(crate) async fn in_time<T>(&self, answer: impl Future<Output = T>) -> Result<T, ConnectionEnd> {
        let silence_max = self.cluster.settings.silence_max;
        timeout(silence_max, answer).await.map_err(|_| ConnectionEnd::Silent(silence_max))
    }
}

/// The reason why a connection was lost, in words.
pub(crate) struct Reason {
    pub(crate) text: String,
    /// Whether this reason differs from that of the previous failed attempt, or the connection has worked in the meantime.
    pub(crate) is_new: bool,
}

/// Watches one worker or peer router.
pub(crate) trait Watch {
    fn cluster(&self) -> &Cluster;

    /// Receives messages until the connection is lost. Resets `backoff` once the connection works.
    async fn receive(&self, backoff: &mut Backoff) -> Result<Infallible, ConnectionEnd>;

    fn on_lost(&self, lost: &ConnectionEnd, reason: Reason);

    /// Connects again and again, and never returns. Cancel-safe: dropping the future closes the connection and removes the process's state.
    async fn run(self) -> Infallible
    where
        Self: Sized,
    {
        let mut backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
        loop {
            let mut departures = self.cluster().departures.subscribe();
            let Err(lost) = self.receive(&mut backoff).await;
            let text = error_chain(&lost);
            self.on_lost(&lost, Reason { is_new: backoff.is_new_error(&text), text });
            let pause = if matches!(lost, ConnectionEnd::Itself) { ITSELF_PAUSE } else { backoff.next_delay() };
            tokio::select! {
                () = sleep(pause) => {}
                // A worker that leaves may have been the reason why this one could not join, for example because both have the same id.
                Ok(()) = departures.changed(), if matches!(lost, ConnectionEnd::Incompatible(_)) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::RouterSettings;
    use tandem_process::Metrics;
    use tandem_proto::v1::{WorkerInfo, worker_info::Role};
    use tokio::{
        sync::mpsc::{UnboundedSender, unbounded_channel},
        time::Instant,
    };

    fn instance(instance_id: &str) -> WorkerInfo {
        WorkerInfo {
            role: Role::Decode.into(),
            worker_id: "same".to_owned(),
            instance_id: instance_id.to_owned(),
            model: "m".to_owned(),
            block_size: 16,
            capacity_blocks: 1,
            ..Default::default()
        }
    }

    /// A worker that can be reached, and joins when its id is free.
    struct Reachable(Arc<Cluster>, UnboundedSender<Instant>);

    impl Watch for Reachable {
        fn cluster(&self) -> &Cluster {
            &self.0
        }

        async fn receive(&self, _: &mut Backoff) -> Result<Infallible, ConnectionEnd> {
            self.0.lock().join_empty(instance("new"))?;
            self.1.send(Instant::now()).expect("the test runs");
            std::future::pending().await
        }

        fn on_lost(&self, _: &ConnectionEnd, _: Reason) {}
    }

    #[tokio::test(start_paused = true)]
    async fn worker_with_a_duplicate_id_joins_at_once_when_the_other_worker_leaves() {
        let cluster = Arc::new(Cluster::new(RouterSettings::default(), Metrics::default()));
        let old = cluster.lock().join_empty(instance("old")).expect("the id is free");
        let (joined, mut joins) = unbounded_channel();
        let leaving = async {
            // By now the pauses between the attempts have reached `PAUSE_MAX`.
            sleep(Duration::from_secs(10)).await;
            cluster.leave(old);
            let left_at = Instant::now();
            assert_eq!(joins.recv().await, Some(left_at));
        };
        tokio::select! {
            biased;
            never = Reachable(cluster.clone(), joined).run() => match never {},
            () = leaving => {}
        }
    }
}
