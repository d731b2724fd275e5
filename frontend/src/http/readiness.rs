//! Whether a request could be served now, and if not, what is to be done.

use super::App;
use crate::dispatch::DispatchError;
use futures::{Stream, StreamExt};
use std::{convert::Infallible, time::Duration};
use tandem_node::discovery::Members;
use tandem_proto::{
    Difference,
    v1::{Identity, WorkersReply},
};
use tonic::Code;

/// Between two questions to the routers, for the log, the gauge, and who is to be asked for placements: an operator reads them
/// no faster, and a router that is back is found within it.
const LOOK: Duration = Duration::from_secs(1);

/// Why no request could be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Unready {
    #[error("draining")]
    Draining,
    #[error("router unreachable; start it, or set --router to where it is")]
    Router,
    #[error("this frontend is not of the router's cluster: {0}")]
    Foreign(#[from] Difference),
    #[error("the router does not take this frontend's cluster key; give all processes the same --cluster-key-file")]
    OtherKey,
    /// The router's own words.
    #[error("{0}")]
    Cluster(String),
}

impl App {
    /// Asks the routers: one is there, of the same cluster, and could place a request.
    pub(super) async fn readiness(&self) -> Result<(), Unready> {
        let mut found = self.nobody();
        if found != Err(Unready::Draining) {
            let mut answers = std::pin::pin!(self.answers());
            while let (Err(_), Some(answer)) = (&found, answers.next().await) {
                found = better(found, answer);
            }
        }
        found
    }

    /// What each router says.
    fn answers(&self) -> impl Stream<Item = Result<(), Unready>> {
        self.dispatcher.routers().views().map(|(_, view)| self.judge(view.as_ref()))
    }

    /// Whether this router could place a request.
    pub(super) fn judge(&self, view: Result<&WorkersReply, &DispatchError>) -> Result<(), Unready> {
        let view = view.map_err(|error| match error {
            DispatchError::Router(status) if status.code() == Code::Unauthenticated => Unready::OtherKey,
            _ => Unready::Router,
        })?;
        self.dispatcher.routers().identity().fits(view.identity.as_ref().unwrap_or(&Identity::default()))?;
        view.unavailable_reason.as_ref().map_or(Ok(()), |why| Err(Unready::Cluster(why.clone())))
    }

    /// What all routers' answers come to.
    pub(super) fn judge_all(&self, answers: impl IntoIterator<Item = Result<(), Unready>>) -> Result<(), Unready> {
        match self.nobody() {
            Err(Unready::Draining) => Err(Unready::Draining),
            nobody => answers.into_iter().fold(nobody, better),
        }
    }

    /// Before any router has answered.
    fn nobody(&self) -> Result<(), Unready> {
        Err(if self.admission.is_draining() { Unready::Draining } else { Unready::Router })
    }

    /// Follows the routers: who is listed, and who of them is well. Logs every change of the readiness, and keeps its gauge. Never
    /// returns; dropped, it leaves nothing behind.
    pub(crate) async fn follow(&self, mut listed: Members) -> Infallible {
        let mut told = None;
        loop {
            // All of them, while a client is content with the first: those that were lost are found here, also by one that drains and
            // has answers to book with another.
            let now = self.judge_all(self.answers().collect::<Vec<_>>().await);
            self.metrics.ready.set(f64::from(u8::from(now.is_ok())));
            if told.as_ref() != Some(&now) {
                match &now {
                    Ok(()) => tracing::info!("ready: requests can be served"),
                    Err(why @ (Unready::Foreign(_) | Unready::OtherKey)) => tracing::warn!("not ready: {why}"),
                    Err(why) => tracing::info!("not ready: {why}"),
                }
                told = Some(now);
            }
            tokio::select! {
                biased;
                () = tokio::time::sleep(LOOK) => {}
                () = listed.changed() => self.dispatcher.routers().list(listed.now(), listed.are_hints()),
            }
        }
    }
}

/// The better news; of bad news, that which says more of what is to be done.
fn better(one: Result<(), Unready>, other: Result<(), Unready>) -> Result<(), Unready> {
    let worth = |answer: &Result<(), Unready>| match answer {
        Ok(()) => 4,
        Err(Unready::Draining) => 3,
        Err(Unready::Foreign(_) | Unready::OtherKey) => 2,
        Err(Unready::Cluster(_)) => 1,
        Err(Unready::Router) => 0,
    };
    if worth(&other) > worth(&one) { other } else { one }
}
