//! Whether a request could be served now, and if not, what is to be done.

use super::App;
use std::{convert::Infallible, time::Duration};
use tandem_proto::Difference;

/// Between two questions to the router, for the log and the gauge: an operator reads them no faster.
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
    /// The router's own words.
    #[error("{0}")]
    Cluster(String),
}

impl App {
    /// Asks the router: it is there, of the same cluster, and could place a request.
    pub(super) async fn readiness(&self) -> Result<(), Unready> {
        if self.admission.is_draining() {
            return Err(Unready::Draining);
        }
        let view = self.dispatcher.workers().await.map_err(|_| Unready::Router)?;
        self.dispatcher.identity().fits(&view.identity.unwrap_or_default())?;
        view.unready.map_or(Ok(()), |why| Err(Unready::Cluster(why)))
    }

    /// Logs every change of the readiness, and keeps its gauge. Never returns; dropped, it leaves nothing behind.
    pub(crate) async fn tell_readiness(&self) -> Infallible {
        let mut told = None;
        loop {
            let now = self.readiness().await;
            self.metrics.ready.set(f64::from(u8::from(now.is_ok())));
            if told.as_ref() != Some(&now) {
                match &now {
                    Ok(()) => tracing::info!("ready: requests can be served"),
                    Err(why @ Unready::Foreign(_)) => tracing::warn!("not ready: {why}"),
                    Err(why) => tracing::info!("not ready: {why}"),
                }
                told = Some(now);
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}
