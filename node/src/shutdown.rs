//! Shutdown of a process: announcements to drain and to stop, and one set of tasks to wait for.

use std::{future::Future, time::Duration};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Announces when the process drains and when it stops, and waits for its tasks. Cheap to clone.
#[derive(Clone, Default)]
pub struct Shutdown {
    draining: CancellationToken,
    stopped: CancellationToken,
    tasks: TaskTracker,
}

impl Shutdown {
    /// Starts a task that is dropped at its next await if it still runs at the end of the grace period.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stopped = self.stopped.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = stopped.cancelled() => {}
                () = task => {}
            }
        });
    }

    /// Starts a task that ends by itself soon after [`Shutdown::stopped`], because it has to send its last messages.
    pub fn track(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Drops a value on a thread that may block. [`Shutdown::run`] waits for it.
    pub fn drop_elsewhere(&self, value: impl Send + 'static) {
        // Without a runtime the value is dropped here, because there is no task that it could block.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let dropping = runtime.spawn_blocking(|| drop(value));
            self.tasks.spawn_on(async { drop(dropping.await) }, &runtime);
        }
    }

    /// Resolves when no new work may be accepted.
    pub async fn draining(&self) {
        self.draining.cancelled().await;
    }

    /// Whether no new work may be accepted.
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Resolves when work that still runs must end.
    pub async fn stopped(&self) {
        self.stopped.cancelled().await;
    }

    /// Stops all tasks now, without waiting for them. For use in `Drop`.
    pub fn stop(&self) {
        self.draining.cancel();
        self.tasks.close();
        self.stopped.cancel();
    }

    /// Announces that the process drains, lets running work finish for at most `grace`, then stops it. Returns when all tasks have ended.
    pub async fn run(&self, grace: Duration) {
        self.draining.cancel();
        self.tasks.close();
        if tokio::time::timeout(grace, self.tasks.wait()).await.is_err() {
            self.stopped.cancel();
            self.tasks.wait().await;
        }
        self.stopped.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn shutdown_waits_for_running_tasks_until_the_grace_period_ends() {
        let shutdown = Shutdown::default();
        let (finished, result) = tokio::sync::oneshot::channel();
        shutdown.spawn(async move {
            tokio::time::sleep(Duration::from_secs(2)).await;
            finished.send(()).expect("the test waits for it");
        });
        shutdown.spawn(std::future::pending());
        let started = tokio::time::Instant::now();
        shutdown.run(Duration::from_secs(5)).await;
        assert_eq!(started.elapsed(), Duration::from_secs(5));
        result.await.expect("work shorter than the grace period finishes");
    }
}
