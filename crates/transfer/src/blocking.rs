//! Runs blocking work that must not be interrupted, such as transfers between devices.

use futures::FutureExt;
use tandem_process::Shutdown;
use tokio::{sync::oneshot, task::spawn_blocking};

/// Runs blocking work to its end, even if the returned future is dropped; the process does not exit before that end. Returns `None` if the
/// work panicked.
pub(crate) async fn run_to_end<T: Send + 'static>(shutdown: &Shutdown, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (done, result) = oneshot::channel();
    let working = spawn_blocking(move || {
        // An error means that the future returned by `run_to_end` was dropped.
        let _ = done.send(work());
    });
    shutdown.track(working.map(drop));
    result.await.ok()
}
