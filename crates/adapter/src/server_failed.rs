//! Whether the server of an engine has failed, which the workers of its data-parallel ranks tell each other.

use crate::api::EngineServer;
use std::{sync::Arc, time::Duration};
use tandem_engine::Event;
use tokio::{sync::watch, time::timeout};

/// Time limit of a health check after a request has failed. The failure is reported after the check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// Whether a server has failed together with a request. The workers of its data-parallel ranks share this value, and all end then: a request that
/// one rank has lost must not be lost again on another rank of the same server, because after two losses a request is not sent again.
#[derive(Clone, Debug, Default)]
pub struct ServerFailed(Arc<watch::Sender<bool>>);

impl ServerFailed {
    pub(crate) fn get(&self) -> bool {
        *self.0.borrow()
    }

    /// Resolves when the server has failed.
    pub(crate) async fn happened(&self) {
        // The sender lives as long as this value.
        drop(self.0.subscribe().wait_for(|failed| *failed).await);
    }

    /// Records that the server works, because a worker has connected to it.
    pub(crate) fn reset(&self) {
        self.0.send_replace(false);
    }

    /// Checks the server if a job ends with a failure, before the failure is reported.
    pub(crate) async fn check_after(&self, end: &Event, server: &dyn EngineServer) {
        if matches!(end, Event::Failed)
            && let Ok(Err(_)) = timeout(CHECK_TIMEOUT, server.check_health()).await
        {
            self.0.send_replace(true);
        }
    }
}
