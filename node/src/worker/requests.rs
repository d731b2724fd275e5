//! The requests a worker is serving: each is a task whose client holds a stream of replies.
//!
//! - A client that goes away ends its task at the task's next await; what the task held is dropped with it.
//! - Every stream ends with what its task said last, or with an error: never silently in the middle.
//! - While the process drains, running requests keep their worker reachable (blocks may still have to arrive).

use super::WorkerMetrics;
use crate::Shutdown;
use futures::Stream;
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tandem_proto::channel::{self, Listener};
use tokio::sync::mpsc;
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};
use tonic::{Status, service::Routes};

/// Replies that wait for a slow client. When these are full its task waits, and nobody else.
const REPLIES_MAX: usize = 32;

/// How long the last replies have to leave the process after it was told to stop.
const FLUSH: std::time::Duration = std::time::Duration::from_secs(1);

/// All requests of one worker. Cheap to clone.
#[derive(Clone)]
pub struct Requests {
    running: TaskTracker,
    shutdown: Shutdown,
}

/// The client does not listen any more; there is nobody to do anything for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client is gone")]
pub struct ClientGone;

/// A task's side of a stream of replies.
#[derive(Debug)]
pub struct ReplySender<T>(mpsc::Sender<Message<T>>);

impl<T> Clone for ReplySender<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

#[derive(Debug)]
enum Message<T> {
    Reply(T),
    Error(Status),
    End,
}

impl<T> ReplySender<T> {
    /// Waits while the client is slow.
    pub async fn send(&self, reply: T) -> Result<(), ClientGone> {
        self.0.send(Message::Reply(reply)).await.map_err(|_| ClientGone)
    }

    /// Ends the stream with an error.
    pub async fn fail(&self, status: Status) -> Result<(), ClientGone> {
        self.0.send(Message::Error(status)).await.map_err(|_| ClientGone)
    }

    /// Resolves when nobody listens any more.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}

/// The client's side of a stream of replies. The request counts as running until this is dropped.
#[derive(Debug)]
pub struct Replies<T> {
    replies: mpsc::Receiver<Message<T>>,
    ended: bool,
    _running: Option<TaskTrackerToken>,
}

impl Requests {
    /// None yet.
    pub fn new(shutdown: Shutdown) -> Self {
        let running = TaskTracker::new();
        running.close();
        Self { running, shutdown }
    }

    /// Whether new requests are to be refused.
    pub fn is_draining(&self) -> bool {
        self.shutdown.is_draining()
    }

    /// Starts a request's task. It is dropped when the client goes away or the process must stop.
    pub fn start<T: Send + 'static, F>(&self, task: impl FnOnce(ReplySender<T>) -> F) -> Replies<T>
    where
        F: Future<Output = Result<(), ClientGone>> + Send + 'static,
    {
        self.stream(task, Some(self.running.token()))
    }

    /// Starts a stream that nobody waits for when the process drains.
    pub(super) fn start_background<T: Send + 'static, F>(&self, task: impl FnOnce(ReplySender<T>) -> F) -> Replies<T>
    where
        F: Future<Output = Result<(), ClientGone>> + Send + 'static,
    {
        self.stream(task, None)
    }

    fn stream<T: Send + 'static, F>(
        &self,
        task: impl FnOnce(ReplySender<T>) -> F,
        running: Option<TaskTrackerToken>,
    ) -> Replies<T>
    where
        F: Future<Output = Result<(), ClientGone>> + Send + 'static,
    {
        let (sender, replies) = mpsc::channel(REPLIES_MAX);
        let task = task(ReplySender(sender.clone()));
        self.shutdown.spawn(async move {
            let listened_to = tokio::select! {
                biased;
                () = sender.closed() => Err(ClientGone),
                result = task => result,
            };
            if listened_to.is_ok() {
                // A failure means that the client left just now, with everything.
                let _ = sender.send(Message::End).await;
            }
        });
        Replies { replies, ended: false, _running: running }
    }

    /// Resolves when the process drains and no request runs any more.
    pub async fn drained(&self) {
        self.shutdown.draining().await;
        self.running.wait().await;
    }

    /// Serves until all requests have ended after draining began, or the process must stop.
    ///
    /// # Errors
    /// The server failed.
    pub async fn serve(
        &self,
        listener: Listener,
        routes: Routes,
        metrics: &WorkerMetrics,
    ) -> Result<(), tonic::transport::Error> {
        let serving = listener.serve(channel::server(), routes, metrics.count_unauthenticated(), self.drained());
        tokio::select! {
            biased;
            result = serving => result,
            () = async {
                self.shutdown.stopped().await;
                tokio::time::sleep(FLUSH).await;
            } => Ok(()),
        }
    }
}

impl<T> Stream for Replies<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let item = match ready!(self.replies.poll_recv(context)) {
            Some(Message::Reply(reply)) => return Poll::Ready(Some(Ok(reply))),
            Some(Message::Error(status)) => Some(Err(status)),
            Some(Message::End) => None,
            None => Some(Err(Status::unavailable("the worker is stopping; try another"))),
        };
        self.ended = true;
        Poll::Ready(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{FutureExt, StreamExt};
    use std::time::Duration;
    use tokio::sync::oneshot;

    fn requests() -> (Requests, Shutdown) {
        let shutdown = Shutdown::default();
        (Requests::new(shutdown.clone()), shutdown)
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_goes_away_ends_the_task() {
        let (requests, _shutdown) = requests();
        let (held, released) = oneshot::channel::<()>();
        let replies = requests.start(|replies: ReplySender<u32>| async move {
            let _held = held;
            replies.send(1).await?;
            std::future::pending().await
        });
        drop(replies);
        released.await.expect_err("what the task held is dropped");
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_makes_its_own_task_wait() {
        let (requests, _shutdown) = requests();
        let (done, mut is_done) = oneshot::channel::<()>();
        let replies = requests.start(|replies: ReplySender<usize>| async move {
            for reply in 0..=REPLIES_MAX {
                replies.send(reply).await?;
            }
            done.send(()).expect("the test waits for it");
            Ok(())
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(is_done.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        let all: Vec<usize> = replies.map(|reply| reply.expect("no error")).collect().await;
        assert_eq!(all, (0..=REPLIES_MAX).collect::<Vec<_>>());
        is_done.await.expect("it went on");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_never_ends_silently_in_the_middle() {
        let (requests, shutdown) = requests();
        let mut whole = requests.start(|replies: ReplySender<u32>| async move { replies.send(1).await });
        assert!(matches!(whole.next().await, Some(Ok(1))));
        assert!(whole.next().await.is_none());

        let mut failed = requests.start(|replies: ReplySender<u32>| async move { replies.fail(Status::aborted("no")).await });
        assert!(matches!(failed.next().await, Some(Err(status)) if status.code() == tonic::Code::Aborted));
        assert!(failed.next().await.is_none());

        let mut cut = requests.start(|_replies: ReplySender<u32>| std::future::pending());
        shutdown.run(Duration::from_secs(1)).await;
        assert!(matches!(cut.next().await, Some(Err(status)) if status.code() == tonic::Code::Unavailable));
        assert!(cut.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn draining_waits_for_the_last_reply_to_be_taken() {
        let (requests, shutdown) = requests();
        let replies = requests.start(|replies: ReplySender<u32>| async move { replies.send(1).await });
        let mut drained = Box::pin(requests.drained());
        assert!(drained.as_mut().now_or_never().is_none(), "nobody drains yet");
        shutdown.run(Duration::from_secs(1)).await;
        assert!(drained.as_mut().now_or_never().is_none(), "a reply has not left");
        drop(replies);
        drained.await;
    }
}
