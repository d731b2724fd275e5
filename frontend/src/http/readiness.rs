//! Checks whether a request could be served now, and states what the operator can do if not.

use super::app::App;
use crate::dispatch::{DispatchError, MemberList};
use futures::{Stream, StreamExt};
use std::{convert::Infallible, time::Duration};
use tandem_node::discovery::Members;
use tandem_proto::{
    Difference,
    v1::{Identity, WorkersReply},
};
use tonic::Code;

/// The interval at which all routers' health is checked. A recovered router is used again after this time at the latest.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Why no request can be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotReady {
    #[error("draining")]
    Draining,
    #[error("no router is reachable; start one, or correct --router or --etcd")]
    Router,
    #[error("this frontend belongs to another cluster than the router: {0}")]
    ClusterMismatch(#[from] Difference),
    #[error("the router rejects this frontend's cluster key; give all processes the same --cluster-key-file")]
    OtherKey,
    /// The router's message about why it cannot place a request.
    #[error("{0}")]
    Cluster(String),
}

impl App {
    /// Checks the routers until one of them belongs to this frontend's cluster and could place a request.
    ///
    /// # Errors
    /// This process drains, or no router can place a request.
    pub(super) async fn readiness(&self) -> Result<(), NotReady> {
        let mut found = self.without_routers();
        if found != Err(NotReady::Draining) {
            let mut answers = std::pin::pin!(self.answers());
            while let (Err(_), Some(answer)) = (&found, answers.next().await) {
                found = better(found, answer);
            }
        }
        found
    }

    /// Requests all routers' views of the cluster, and yields for each router whether it could place a request.
    fn answers(&self) -> impl Stream<Item = Result<(), NotReady>> {
        self.dispatcher.routers.views().map(|(_, view)| self.judge(view.as_ref()))
    }

    /// Checks whether a router could place a request, according to its view of the cluster.
    ///
    /// # Errors
    /// The router is unreachable, belongs to another cluster, or has no worker for a request.
    pub(super) fn judge(&self, view: Result<&WorkersReply, &DispatchError>) -> Result<(), NotReady> {
        let view = view.map_err(|error| match error {
            DispatchError::Router(status) if status.code() == Code::Unauthenticated => NotReady::OtherKey,
            _ => NotReady::Router,
        })?;
        self.dispatcher.routers.identity.fits(view.identity.as_ref().unwrap_or(&Identity::default()))?;
        view.unavailable_reason.as_ref().map_or(Ok(()), |why| Err(NotReady::Cluster(why.clone())))
    }

    /// Combines the results of [`App::judge`] for all routers.
    ///
    /// # Errors
    /// This process drains, or no router can place a request.
    pub(super) fn judge_all(&self, answers: impl IntoIterator<Item = Result<(), NotReady>>) -> Result<(), NotReady> {
        match self.without_routers() {
            Err(NotReady::Draining) => Err(NotReady::Draining),
            first => answers.into_iter().fold(first, better),
        }
    }

    /// Returns the result of the check before any router has answered: this process drains, or no router is reachable.
    fn without_routers(&self) -> Result<(), NotReady> {
        Err(if self.admission.shutdown.is_draining() { NotReady::Draining } else { NotReady::Router })
    }

    /// Watches the list of routers and checks their health. Logs every change of this process's readiness, and updates its gauge. Never
    /// returns. Cancel-safe.
    pub(crate) async fn watch_routers(&self, mut members: Members) -> Infallible {
        let mut logged = None;
        loop {
            // All routers are checked, even while this process drains: a running request may have to be booked with a recovered router.
            let now = self.judge_all(self.answers().collect::<Vec<_>>().await);
            self.metrics.ready.set(f64::from(u8::from(now.is_ok())));
            if logged.as_ref() != Some(&now) {
                match &now {
                    Ok(()) => tracing::info!("ready: requests can be served"),
                    Err(why @ (NotReady::ClusterMismatch(_) | NotReady::OtherKey)) => tracing::warn!("not ready: {why}"),
                    Err(why) => tracing::info!("not ready: {why}"),
                }
                logged = Some(now);
            }
            tokio::select! {
                biased;
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
                () = members.changed() => {
                    let list = if members.are_advisory() { MemberList::Advisory } else { MemberList::Static };
                    self.dispatcher.routers.set_members(members.now(), list);
                }
            }
        }
    }
}

/// Returns the better of two routers' results. Of two errors, returns the more specific one.
fn better(one: Result<(), NotReady>, other: Result<(), NotReady>) -> Result<(), NotReady> {
    let rank = |answer: &Result<(), NotReady>| match answer {
        Ok(()) => 4,
        Err(NotReady::Draining) => 3,
        Err(NotReady::ClusterMismatch(_) | NotReady::OtherKey) => 2,
        Err(NotReady::Cluster(_)) => 1,
        Err(NotReady::Router) => 0,
    };
    if rank(&other) > rank(&one) { other } else { one }
}
