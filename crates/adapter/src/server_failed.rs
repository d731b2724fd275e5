//! Whether the server of an engine has failed, which the workers of its data-parallel ranks tell each other.

use crate::api::EngineServer;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tandem_engine::Event;
use tokio::time::timeout;

/// Time limit of a health check after a request has failed. The failure is reported after the check.
const CHECK_TIMEOUT: Duration = Duration::from_secs(1);

/// Whether a server has failed together with a request. The workers of its data-parallel ranks share this value: a request that one rank has lost
/// must not be lost again on another rank of the same server, because after two losses a request is not sent again.
#[derive(Clone, Debug, Default)]
pub struct ServerFailed(Arc<AtomicBool>);

impl ServerFailed {
    pub(crate) fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Records that the server works.
    pub(crate) fn reset(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Checks the server if a job ends with a failure, before the failure is reported.
    pub(crate) async fn check_after(&self, end: &Event, server: &dyn EngineServer) {
        if matches!(end, Event::Failed)
            && let Ok(Err(_)) = timeout(CHECK_TIMEOUT, server.check_health()).await
        {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}
