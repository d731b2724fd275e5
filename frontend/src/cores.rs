//! Runs CPU work of a millisecond or more on all cores except one. That core remains free for work that must not wait, such as sending
//! tokens and answering health checks.

use crate::{admission::Client, shares::Shares};
use futures::future::OptionFuture;
use std::{sync::Arc, thread::available_parallelism, time::Duration};
use tandem_api::RequestError;
use tokio::{
    sync::Semaphore,
    task::{JoinHandle, spawn_blocking},
    time::timeout,
};

/// A request is refused after this time in the queue. The largest request needs less time on a core.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(10);

/// Limits how many tasks of one kind run at a time. Clients are served round-robin: each client has at most one task in the queue for a
/// core, and the client's other tasks wait until that task has left the queue.
pub(crate) struct Cores {
    free: Arc<Semaphore>,
    queued: Shares<Client>,
    /// Whether a client's next task also waits until the client's previous task has ended.
    one_each: bool,
}

impl Default for Cores {
    fn default() -> Self {
        let cores = available_parallelism().map_or(1, usize::from);
        Self::new(cores.saturating_sub(1).max(1))
    }
}

impl Cores {
    fn new(cores: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(cores)), queued: Shares::new(1), one_each: false }
    }

    /// Returns a limit of half of the cores, at least one, and of one running task for each client.
    pub(crate) fn one_for_each_client() -> Self {
        let cores = available_parallelism().map_or(1, usize::from);
        Self { one_each: true, ..Self::new((cores / 2).max(1)) }
    }

    /// Runs `work` on a blocking thread when a core is free. Tasks of one client start in the order of the calls, and clients are served
    /// round-robin. Dropping the future removes the task from the queue; a task that already runs continues to its end and keeps its core.
    ///
    /// # Errors
    /// The error of `work`, or [`RequestError::Busy`] after [`QUEUE_TIMEOUT`].
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        client: Option<&Client>,
        work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
    ) -> Result<T, RequestError> {
        self.start(client, work).await?.await.unwrap_or(Err(RequestError::Failed))
    }

    /// Starts `work` as [`Cores::run`] does, and returns the running task.
    ///
    /// # Errors
    /// [`RequestError::Busy`] after [`QUEUE_TIMEOUT`].
    pub(crate) async fn start<T: Send + 'static>(
        &self,
        client: Option<&Client>,
        work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
    ) -> Result<JoinHandle<Result<T, RequestError>>, RequestError> {
        let place = client.map(|client| self.queued.of(client));
        let core = async {
            let place = OptionFuture::from(place.map(Semaphore::acquire_owned)).await;
            let core = Arc::clone(&self.free).acquire_owned().await;
            (core, place.filter(|_| self.one_each))
        };
        let core = timeout(QUEUE_TIMEOUT, core).await.map_err(|_| RequestError::Busy)?;
        Ok(spawn_blocking(move || {
            let result = work();
            drop(core);
            result
        }))
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
    async fn tasks_wait_for_a_free_core() {
        let cores = Cores::new(1);
        let (release, blocked) = mpsc::channel::<()>();
        let mut first = pin!(cores.run(None, move || blocked.recv().map_err(|_| RequestError::Failed)));
        assert!(poll!(&mut first).is_pending());
        let mut second = pin!(cores.run(None, || Ok(2)));
        assert!(poll!(&mut second).is_pending(), "the first task holds the only core");
        release.send(()).expect("the first task keeps the receiver");
        first.await.expect("the first task succeeds");
        assert_eq!(second.await.ok(), Some(2));
    }

    #[tokio::test(start_paused = true)]
    async fn task_that_waits_too_long_is_refused() {
        let cores = Cores::new(0);
        assert!(matches!(cores.run(None, || Ok(())).await, Err(RequestError::Busy)));
    }

    #[tokio::test]
    async fn clients_are_served_round_robin_however_many_tasks_one_client_has() {
        let cores = Cores::new(1);
        let [flood, other] = ["flood", "other"].map(|name| Client::Account(name.to_owned()));
        let (release, blocked) = mpsc::channel::<()>();
        let mut first = pin!(cores.run(Some(&flood), move || blocked.recv().map_err(|_| RequestError::Failed)));
        let order = Arc::new(Mutex::new(Vec::new()));
        let task = |client, name: usize| {
            let order = Arc::clone(&order);
            cores.run(Some(client), move || {
                order.lock().expect("no task panics with the lock").push(name);
                Ok(())
            })
        };
        assert!(poll!(&mut first).is_pending());
        let mut flood: Vec<_> = (0..20).map(|name| Box::pin(task(&flood, name))).collect();
        for task in &mut flood {
            assert!(poll!(task).is_pending());
        }
        let mut other = pin!(task(&other, 99));
        assert!(poll!(&mut other).is_pending());
        release.send(()).expect("the first task keeps the receiver");
        first.await.expect("the first task succeeds");
        let (others, _) = tokio::join!(other, join_all(flood));
        others.expect("the task of the other client runs");
        assert_eq!(
            order.lock().expect("no task panics with the lock").iter().position(|name| *name == 99),
            Some(1),
            "only one task of the flood runs before the other client's task"
        );
    }

    #[tokio::test]
    async fn client_whose_task_runs_waits_while_another_client_is_served() {
        let cores = Cores { one_each: true, ..Cores::new(2) };
        let [slow, other] = ["slow", "other"].map(|name| Client::Account(name.to_owned()));
        let (release, blocked) = mpsc::channel::<()>();
        let first =
            cores.start(Some(&slow), move || blocked.recv().map_err(|_| RequestError::Failed)).await.expect("a core is free");
        let mut second = pin!(cores.start(Some(&slow), || Ok(())));
        assert!(poll!(&mut second).is_pending(), "the client's first task runs");
        cores.run(Some(&other), || Ok(())).await.expect("the other core serves the other client");
        release.send(()).expect("the first task keeps the receiver");
        first.await.expect("the first task does not panic").expect("it succeeds");
        second.await.expect("the place is free").await.expect("the second task does not panic").expect("it succeeds");
    }

    #[tokio::test]
    async fn panicking_task_releases_its_core() {
        let cores = Cores::new(1);
        let panics = cores.run(None, || -> Result<(), RequestError> { panic!("on purpose") }).await;
        assert!(matches!(panics, Err(RequestError::Failed)));
        assert!(cores.run(None, || Ok(())).await.is_ok());
    }
}
