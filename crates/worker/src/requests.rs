//! The requests that a worker serves. Each is a task that sends a stream of replies to its client.
//!
//! - If the client disconnects, its task ends at the task's next await, and everything that the task owns is dropped.
//! - Every stream ends with its task's last message or with an error, so a client notices if replies are missing.
//! - While the process drains, the server accepts connections until the last request has ended, because that request's KV may still have to
//!   be transferred.

use crate::WorkerMetrics;
use futures::Stream;
use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tandem_process::Shutdown;
use tandem_proto::channel::{self, Listener};
use tokio::sync::mpsc;
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};
use tonic::{Status, service::Routes};

/// Maximum number of replies that are buffered for a slow client. While the buffer is full, the request's task waits.
const REPLIES_MAX: usize = 32;

/// Time limit for sending the last replies after the process was stopped.
const FLUSH: std::time::Duration = std::time::Duration::from_secs(1);

/// All requests of one worker. This value is cheap to clone.
#[derive(Clone)]
pub struct Requests {
    running: TaskTracker,
    shutdown: Shutdown,
}

/// The error of a reply that cannot be sent, because the client has closed the request's stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client has disconnected")]
pub struct Disconnected;

/// The sending side of a stream of replies, which the request's task owns.
#[derive(Debug)]
pub struct ReplySender<T>(mpsc::Sender<ReplyMessage<T>>);

/// A reply, or the error that ends the stream; `None` ends the stream without an error.
type ReplyMessage<T> = Option<Result<T, Status>>;

impl<T> ReplySender<T> {
    /// Sends a reply. Waits while the client is slow.
    ///
    /// # Errors
    /// Fails if the client has disconnected.
    pub async fn send(&self, reply: T) -> Result<(), Disconnected> {
        self.0.send(Some(Ok(reply))).await.map_err(|_| Disconnected)
    }

    /// Ends the stream with an error.
    ///
    /// # Errors
    /// Fails if the client has disconnected.
    pub async fn fail(&self, status: Status) -> Result<(), Disconnected> {
        self.0.send(Some(Err(status))).await.map_err(|_| Disconnected)
    }
}

/// The receiving side of a stream of replies, which the gRPC response owns. The drain waits for the request until this value is dropped.
#[derive(Debug)]
pub struct Replies<T> {
    replies: mpsc::Receiver<ReplyMessage<T>>,
    ended: bool,
    _running: Option<TaskTrackerToken>,
}

impl Requests {
    /// Returns an empty set of requests.
    pub fn new(shutdown: Shutdown) -> Self {
        let running = TaskTracker::new();
        running.close();
        Self { running, shutdown }
    }

    /// Starts a request's task. The task is dropped when the client disconnects or the process is stopped.
    pub fn start<T: Send + 'static, F>(&self, task: impl FnOnce(ReplySender<T>) -> F) -> Replies<T>
    where
        F: Future<Output = Result<(), Disconnected>> + Send + 'static,
    {
        Replies { _running: Some(self.running.token()), ..self.start_background(task) }
    }

    /// Starts a request's task, as [`Requests::start`] does, but the drain does not wait for its end.
    pub(crate) fn start_background<T: Send + 'static, F>(&self, task: impl FnOnce(ReplySender<T>) -> F) -> Replies<T>
    where
        F: Future<Output = Result<(), Disconnected>> + Send + 'static,
    {
        let (sender, replies) = mpsc::channel(REPLIES_MAX);
        let task = task(ReplySender(sender.clone()));
        self.shutdown.spawn(async move {
            let ended = tokio::select! {
                biased;
                () = sender.closed() => Err(Disconnected),
                result = task => result,
            };
            if ended.is_ok() {
                // Sending fails only if the client has disconnected meanwhile.
                let _ = sender.send(None).await;
            }
        });
        Replies { replies, ended: false, _running: None }
    }

    /// Resolves when the process drains and the last request has ended.
    pub async fn drained(&self) {
        self.shutdown.draining().await;
        self.running.wait().await;
    }

    /// Serves until the process drains and all requests have ended, or until the process is stopped.
    ///
    /// # Errors
    /// Fails if the socket cannot be served.
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
            Some(Some(Ok(reply))) => return Poll::Ready(Some(Ok(reply))),
            Some(last) => last,
            None => Some(Err(Status::unavailable("the worker is stopping; try another worker"))),
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
    async fn task_of_a_request_ends_when_its_client_disconnects() {
        let (requests, _shutdown) = requests();
        let (held, released) = oneshot::channel::<()>();
        let replies = requests.start(|replies: ReplySender<u32>| async move {
            let _held = held;
            replies.send(1).await?;
            std::future::pending().await
        });
        drop(replies);
        released.await.expect_err("values that the task owns are dropped");
    }

    #[tokio::test(start_paused = true)]
    async fn slow_client_delays_only_the_task_of_its_own_request() {
        let (requests, _shutdown) = requests();
        let (done, mut is_done) = oneshot::channel::<()>();
        let replies = requests.start(|replies: ReplySender<usize>| async move {
            for reply in 0..=REPLIES_MAX {
                replies.send(reply).await?;
            }
            done.send(()).expect("the test keeps the receiver");
            Ok(())
        });
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(is_done.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        let all: Vec<usize> = replies.map(|reply| reply.expect("the reply is not an error")).collect().await;
        assert_eq!(all, (0..=REPLIES_MAX).collect::<Vec<_>>());
        is_done.await.expect("the task continued");
    }

    #[tokio::test(start_paused = true)]
    async fn reply_stream_ends_with_its_last_reply_or_an_error() {
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
    async fn drain_waits_until_the_last_reply_stream_is_dropped() {
        let (requests, shutdown) = requests();
        let replies = requests.start(|replies: ReplySender<u32>| async move { replies.send(1).await });
        let mut drained = Box::pin(requests.drained());
        assert!(drained.as_mut().now_or_never().is_none(), "the process does not drain yet");
        shutdown.run(Duration::from_secs(1)).await;
        assert!(drained.as_mut().now_or_never().is_none(), "one reply stream is still open");
        drop(replies);
        drained.await;
    }
}
