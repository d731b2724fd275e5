//! The shutdown of a process: it announces the drain, drains, and stops. This module also tracks the tasks that the shutdown waits for, and
//! restarts endless tasks that panic.

use crate::Backoff;
use futures::FutureExt;
use std::{convert::Infallible, future::Future, panic::AssertUnwindSafe, time::Duration};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// The shutdown of a process. It announces to tasks that the process drains or stops, and waits for them. It is cheap to clone.
#[derive(Clone, Default)]
pub struct Shutdown {
    announced: CancellationToken,
    draining: CancellationToken,
    stopped: CancellationToken,
    tasks: TaskTracker,
}

impl Shutdown {
    /// Returns the shutdown of a part of the process that may end before the process does. The part drains and stops with the process, and
    /// has its own tasks.
    pub fn child(&self) -> Self {
        Self {
            announced: self.announced.child_token(),
            draining: self.draining.child_token(),
            stopped: self.stopped.child_token(),
            tasks: TaskTracker::new(),
        }
    }

    /// Starts a task. If it still runs at the end of the grace period, it is dropped at its next await.
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

    /// Starts a task that is never dropped, so that it can send its last messages. [`Shutdown::run`] waits for it without a limit, so it
    /// must end by itself soon after [`Shutdown::stopped`] resolves.
    pub fn track(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(task);
    }

    /// Drops a value on a thread that may block. [`Shutdown::run`] waits until the value is dropped.
    pub fn drop_elsewhere(&self, value: impl Send + 'static) {
        // Without a runtime, the value is dropped on this thread: there is no task that the drop could block.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let dropping = runtime.spawn_blocking(|| drop(value));
            self.tasks.spawn_on(async { drop(dropping.await) }, &runtime);
        }
    }

    /// Announces that the process will drain soon. Until then it accepts work, but its readiness check fails, so that load balancers send the
    /// work elsewhere.
    pub fn announce(&self) {
        self.announced.cancel();
    }

    /// Returns whether the process drains or has announced that it will drain.
    pub fn is_announced(&self) -> bool {
        self.announced.is_cancelled() || self.is_draining()
    }

    /// Resolves when the process drains: from then on it must accept no new work.
    pub async fn draining(&self) {
        self.draining.cancelled().await;
    }

    /// Returns whether the process drains. A draining process must accept no new work.
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Resolves when the process stops: work that still runs must end.
    pub async fn stopped(&self) {
        self.stopped.cancelled().await;
    }

    /// Stops all tasks now, without waiting for their end. Implementations of `Drop` may call it.
    pub fn stop(&self) {
        self.draining.cancel();
        self.tasks.close();
        self.stopped.cancel();
    }

    /// Announces that the process drains, gives running tasks at most `grace` to finish, and then stops them. Returns when all tasks have
    /// ended.
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

/// The limits of the backoff between the panic of a task and its restart.
const RESTART_PAUSES: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(10)];

/// Runs a task that has no end. If it panics, the log names it, and `start` starts it again after a pause. Cancel-safe: dropping the future
/// ends the task.
pub async fn supervise<F: Future<Output = Infallible> + Send>(what: &str, mut start: impl FnMut() -> F + Send) -> Infallible {
    let mut backoff = Backoff::new(RESTART_PAUSES[0], RESTART_PAUSES[1]);
    loop {
        // Unwinding is safe: the task that panicked is dropped, and all state that it shares with others is behind locks.
        let Err(panic) = AssertUnwindSafe(async { start().await }).catch_unwind().await;
        let reason = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref().copied());
        tracing::error!("the task \"{what}\" panicked, and is started again: {}", reason.unwrap_or("no reason is known"));
        tokio::time::sleep(backoff.next_delay()).await;
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
            finished.send(()).expect("the work keeps the receiver");
        });
        shutdown.spawn(std::future::pending());
        let started = tokio::time::Instant::now();
        shutdown.run(Duration::from_secs(5)).await;
        assert_eq!(started.elapsed(), Duration::from_secs(5));
        result.await.expect("work shorter than the grace period is not cancelled");
    }

    #[tokio::test(start_paused = true)]
    async fn child_shutdown_drains_and_stops_alone_or_with_its_process() {
        let process = Shutdown::default();
        let (first, second) = (process.child(), process.child());
        first.spawn(std::future::pending());
        first.run(Duration::ZERO).await;
        assert!(first.is_draining() && !process.is_draining() && !second.is_draining());
        second.spawn(std::future::pending());
        process.run(Duration::ZERO).await;
        second.stopped().await;
        second.run(Duration::MAX).await;
    }

    #[tokio::test(start_paused = true)]
    async fn supervised_task_is_restarted_after_a_panic() {
        let mut starts = 0;
        let (works, working) = tokio::sync::oneshot::channel();
        let mut works = Some(works);
        let supervised = supervise("test", || {
            starts += 1;
            assert_ne!(starts, 1, "the start itself may panic");
            let works = if starts == 3 { works.take() } else { None };
            async move {
                works.expect("the second run panics").send(()).expect("the test waits");
                std::future::pending().await
            }
        });
        tokio::select! {
            never = supervised => match never {},
            done = working => done.expect("the third run works"),
        }
    }
}
