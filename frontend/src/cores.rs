//! Work that takes milliseconds or more, on as many threads as there are cores but one: the last is for everything that must
//! not wait, such as other requests' tokens and health checks.

use crate::error::ApiError;
use std::{sync::Arc, thread::available_parallelism, time::Duration};
use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};

/// A request that has waited so long for its turn is refused. Longer than the largest request's own work takes.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// A bound on how many pieces of one kind of work run at a time.
pub(crate) struct Cores(Arc<Semaphore>);

impl Default for Cores {
    fn default() -> Self {
        let cores = available_parallelism().map_or(1, usize::from);
        Self(Arc::new(Semaphore::new(cores.saturating_sub(1).max(1))))
    }
}

impl Cores {
    /// Runs `work` on a blocking thread when its turn comes; turns come in the order of the calls. Dropped while it waits, it
    /// leaves the queue; dropped later, the work goes on to its end and keeps its core until then.
    ///
    /// # Errors
    /// Its own, or [`ApiError::Overloaded`] after [`WAIT_MAX`].
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let core = timeout(WAIT_MAX, Arc::clone(&self.0).acquire_owned()).await.map_err(|_| ApiError::Overloaded)?;
        let work = move || {
            let result = work();
            drop(core);
            result
        };
        spawn_blocking(work).await.unwrap_or(Err(ApiError::Internal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::poll;
    use std::{pin::pin, sync::mpsc};

    #[tokio::test]
    async fn work_takes_turns_and_leaves_one_core_to_others() {
        let cores = Cores(Arc::new(Semaphore::new(1)));
        let (go, wait) = mpsc::channel::<()>();
        let mut first = pin!(cores.run(move || wait.recv().map_err(|_| ApiError::Internal)));
        assert!(poll!(&mut first).is_pending());
        let mut second = pin!(cores.run(|| Ok(2)));
        assert!(poll!(&mut second).is_pending(), "the first holds the only core");
        go.send(()).expect("the first waits for it");
        first.await.expect("it succeeds");
        assert_eq!(second.await.ok(), Some(2));
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_waits_too_long_is_refused() {
        let cores = Cores(Arc::new(Semaphore::new(0)));
        assert!(matches!(cores.run(|| Ok(())).await, Err(ApiError::Overloaded)));
    }

    #[tokio::test]
    async fn work_that_panics_gives_its_core_back() {
        let cores = Cores(Arc::new(Semaphore::new(1)));
        let panics = cores.run(|| -> Result<(), ApiError> { panic!("on purpose") }).await;
        assert!(matches!(panics, Err(ApiError::Internal)));
        assert!(cores.run(|| Ok(())).await.is_ok());
    }
}
