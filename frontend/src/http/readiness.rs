//! Checks whether a request could be served now, for each model, and states what the operator can do if not.

use super::app::App;
use crate::{
    dispatch::{DispatchError, MemberList, Unavailable, check},
    models::Served,
};
use futures::StreamExt;
use std::convert::Infallible;
use tandem_process::discovery::Members;
use tandem_proto::{Difference, v1::WorkersReply};
use tonic::Code;

/// Why no request can be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NotReady {
    #[error("draining")]
    Draining,
    #[error("no router is reachable{at}; start one, or correct --router, --etcd or the certificates (--cluster-cert)")]
    Router { at: String },
    #[error("this frontend belongs to another cluster than the router: {0}")]
    ClusterMismatch(Difference),
    #[error("the router rejects this frontend's cluster key, or the lack of one; give all processes the same --cluster-key-file")]
    OtherKey,
    /// The router's message about why it cannot place a request.
    #[error("{0}")]
    Cluster(String),
}

impl From<Unavailable> for NotReady {
    fn from(why: Unavailable) -> Self {
        match why {
            Unavailable::ClusterMismatch(difference) => Self::ClusterMismatch(difference),
            Unavailable::Cluster(reason) => Self::Cluster(reason),
        }
    }
}

/// Whether a request could be served, for each served model in the order of the settings.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Readiness(pub(super) Vec<Result<(), NotReady>>);

impl Readiness {
    /// Whether a request for at least one model could be served.
    ///
    /// # Errors
    /// The most specific reason.
    pub(super) fn of_any(&self) -> Result<(), NotReady> {
        self.0.iter().cloned().reduce(better).expect("there is a model")
    }

    /// Combines this result with that of another router.
    fn or(self, other: Self) -> Self {
        Self(self.0.into_iter().zip(other.0).map(|(one, other)| better(one, other)).collect())
    }
}

impl App {
    /// Checks routers until requests for all models could be placed, or no router is left.
    pub(super) async fn readiness(&self) -> Readiness {
        let mut found = self.without_routers();
        if !self.admission.shutdown.is_announced() {
            let mut views = std::pin::pin!(self.dispatcher.routers.views());
            while found.0.iter().any(Result::is_err) {
                let Some((_, view)) = views.next().await else { break };
                view.iter().for_each(|view| self.models.add_loras(view));
                found = found.or(self.judge(view.as_ref()));
            }
        }
        found
    }

    /// Determines from a router's view for which models the router could place a request.
    pub(super) fn judge(&self, view: Result<&WorkersReply, &DispatchError>) -> Readiness {
        let view = view.map_err(|error| match error {
            DispatchError::Router(status) if status.code() == Code::Unauthenticated => NotReady::OtherKey,
            _ => self.no_router(),
        });
        let judge = |served: &Served| -> Result<(), NotReady> {
            let view = view.clone()?;
            check(&served.identity, view)?;
            let kind = if self.alternatives.is_some() { "with" } else { "without" };
            let missing = || NotReady::Cluster(format!("no decode worker of {} runs {kind} --observe", served.model.id));
            if served.is_out_of_reach(view, self.alternatives) { Err(missing()) } else { Ok(()) }
        };
        Readiness(self.models.iter().map(judge).collect())
    }

    /// Combines the results of [`App::judge`] for all routers.
    pub(super) fn judge_all(&self, answers: impl IntoIterator<Item = Readiness>) -> Readiness {
        let first = self.without_routers();
        if self.admission.shutdown.is_announced() { first } else { answers.into_iter().fold(first, Readiness::or) }
    }

    /// Returns the result of the check before any router has answered: this process drains or will soon, or no router is reachable.
    fn without_routers(&self) -> Readiness {
        let why = if self.admission.shutdown.is_announced() { NotReady::Draining } else { self.no_router() };
        Readiness(vec![Err(why); self.models.len()])
    }

    fn no_router(&self) -> NotReady {
        let addresses = self.dispatcher.routers.addresses().join(", ");
        NotReady::Router { at: if addresses.is_empty() { addresses } else { format!(" at {addresses}") } }
    }

    /// Watches the list of routers and checks their health. Logs every change of a model's readiness, and updates the process's gauge.
    /// Never returns. Cancel-safe.
    pub(crate) async fn watch_routers(&self, mut members: Members) -> Infallible {
        let mut logged = None;
        loop {
            // All routers are checked, even while this process drains: a running request may have to be booked with a recovered router.
            let views: Vec<_> = self.dispatcher.routers.views().map(|(_, view)| view).collect().await;
            let answered: Vec<&WorkersReply> = views.iter().flatten().collect();
            answered.iter().for_each(|view| self.models.add_loras(view));
            self.models.remove_loras(&answered);
            self.models.learn_from(&answered);
            let now = self.judge_all(views.iter().map(|view| self.judge(view.as_ref())));
            self.metrics.ready.set(f64::from(u8::from(now.of_any().is_ok())));
            for (at, (served, now)) in self.models.iter().zip(&now.0).enumerate() {
                if logged.as_ref().is_some_and(|Readiness(before)| before[at] == *now) {
                    continue;
                }
                let model = &served.model.id;
                match now {
                    Ok(()) => tracing::info!(model, "ready: requests can be served"),
                    Err(why @ (NotReady::ClusterMismatch(_) | NotReady::OtherKey)) => tracing::warn!(model, "not ready: {why}"),
                    Err(why) => tracing::info!(model, "not ready: {why}"),
                }
            }
            logged = Some(now);
            tokio::select! {
                biased;
                () = self.dispatcher.routers.check_is_due() => {}
                () = members.changed() => {
                    let list = if members.are_advisory() { MemberList::Advisory } else { MemberList::Static };
                    self.dispatcher.routers.set_members(members.now(), list);
                }
            }
        }
    }
}

/// Returns the better of two results. Of two errors, returns the more specific one.
fn better(one: Result<(), NotReady>, other: Result<(), NotReady>) -> Result<(), NotReady> {
    let rank = |answer: &Result<(), NotReady>| match answer {
        Ok(()) => 4,
        Err(NotReady::Draining) => 3,
        Err(NotReady::ClusterMismatch(_) | NotReady::OtherKey) => 2,
        Err(NotReady::Cluster(_)) => 1,
        Err(NotReady::Router { .. }) => 0,
    };
    if rank(&other) > rank(&one) { other } else { one }
}
