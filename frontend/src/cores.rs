//! Runs CPU work that takes milliseconds or more on one thread fewer than there are cores. The remaining core is for everything that
//! must not wait, such as other requests' tokens and health checks.

use crate::{admission::Client, error::ApiError, shares::Shares};
use std::{sync::Arc, thread::available_parallelism, time::Duration};
use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};

/// A request is refused when it has waited this long for its turn. The work of the largest request takes less.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// A bound on how many pieces of one kind of work run at a time. Clients take turns: each has one piece at most in the queue for a core,
/// and its others wait for that one.
pub(crate) struct Cores {
    free: Arc<Semaphore>,
    queueing: Shares,
}

impl Default for Cores {
    fn default() -> Self {
        let cores = available_parallelism().map_or(1, usize::from);
        Self::new(cores.saturating_sub(1).max(1))
    }
}

impl Cores {
    fn new(cores: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(cores)), queueing: Shares::new(1) }
    }

    /// Runs `work` on a blocking thread when its turn comes: the turns of one client come in the order of its calls, and clients take
    /// turns. Dropped while it waits, it leaves the queue; dropped later, the work goes on to its end and keeps its core until then.
    ///
    /// # Errors
    /// The error of `work`, or [`ApiError::Overloaded`] after [`WAIT_MAX`].
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        client: Option<&Client>,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let turn = client.map(|client| self.queueing.of(client));
        let core = async {
            let _in_queue = match turn {
                Some(turn) => Some(turn.acquire_owned().await),
                None => None,
            };
            Arc::clone(&self.free).acquire_owned().await
        };
        let core = timeout(WAIT_MAX, core).await.map_err(|_| ApiError::Overloaded)?;
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
    use futures::{future::join_all, poll};
    use std::{
        pin::pin,
        sync::{Mutex, mpsc},
    };

    #[tokio::test]
    async fn work_takes_turns_and_leaves_one_core_to_others() {
        let cores = Cores::new(1);
        let (go, wait) = mpsc::channel::<()>();
        let mut first = pin!(cores.run(None, move || wait.recv().map_err(|_| ApiError::Internal)));
        assert!(poll!(&mut first).is_pending());
        let mut second = pin!(cores.run(None, || Ok(2)));
        assert!(poll!(&mut second).is_pending(), "the first holds the only core");
        go.send(()).expect("the first waits for it");
        first.await.expect("it succeeds");
        assert_eq!(second.await.ok(), Some(2));
    }

    #[tokio::test(start_paused = true)]
    async fn work_that_waits_too_long_is_refused() {
        let cores = Cores::new(0);
        assert!(matches!(cores.run(None, || Ok(())).await, Err(ApiError::Overloaded)));
    }

    #[tokio::test]
    async fn clients_take_turns_however_much_one_of_them_sends() {
        let cores = Cores::new(1);
        let [flood, other] = ["flood", "other"].map(|name| Client::Account(name.to_owned()));
        let (go, wait) = mpsc::channel::<()>();
        let mut first = pin!(cores.run(Some(&flood), move || wait.recv().map_err(|_| ApiError::Internal)));
        let order = Arc::new(Mutex::new(Vec::new()));
        let piece = |client, name: usize| {
            let order = Arc::clone(&order);
            cores.run(Some(client), move || {
                order.lock().expect("no panic").push(name);
                Ok(())
            })
        };
        assert!(poll!(&mut first).is_pending());
        let mut flood: Vec<_> = (0..20).map(|name| Box::pin(piece(&flood, name))).collect();
        for piece in &mut flood {
            assert!(poll!(piece).is_pending());
        }
        let mut other = pin!(piece(&other, 99));
        assert!(poll!(&mut other).is_pending());
        go.send(()).expect("the first waits for it");
        first.await.expect("it succeeds");
        let (others, _) = tokio::join!(other, join_all(flood));
        others.expect("it has its turn");
        assert_eq!(order.lock().expect("no panic").iter().position(|name| *name == 99), Some(1), "one of the flood goes first");
    }

    #[tokio::test]
    async fn work_that_panics_gives_its_core_back() {
        let cores = Cores::new(1);
        let panics = cores.run(None, || -> Result<(), ApiError> { panic!("on purpose") }).await;
        assert!(matches!(panics, Err(ApiError::Internal)));
        assert!(cores.run(None, || Ok(())).await.is_ok());
    }
}
