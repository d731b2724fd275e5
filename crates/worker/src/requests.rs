//! The requests that a worker serves. Each is a task that sends a stream of replies to its client, or a part of that stream.
//!
//! - If the client disconnects, its request ends at the next await, and everything that the request owns is dropped.
//! - Every stream ends with its request's last message or with an error, so a client notices if replies are missing.
//! - While the process drains, the server accepts connections until the last request has ended, because that request's KV may still have to
//!   be transferred.

use crate::WorkerMetrics;
use futures::{FutureExt, Stream, future::BoxFuture};
use parking_lot::Mutex;
use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, ready},
    time::Duration,
};
use tandem_process::{Shutdown, Woken};
use tandem_proto::channel::{self, Listener};
use tokio::{
    sync::{mpsc, oneshot},
    time::sleep,
};
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};
use tonic::{Status, service::Routes};

/// Maximum number of replies that are buffered for a slow client. While the buffer is full, the request's task waits.
const REPLIES_MAX: usize = 32;

/// The minimum time for which a request rests, although there is something to do, until it gets a task.
const REST_MAX: Duration = Duration::from_secs(1);

/// Time limit for sending the last replies after the process was stopped.
const FLUSH: Duration = Duration::from_secs(1);

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

/// The sending side of a stream of replies, which the request owns.
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
    /// The request, if it began without a task.
    polled: Option<PolledRequest>,
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

    /// Returns the replies of a request that works while they are polled, which saves a task for each reply. If they are not polled for some
    /// time, because the client is slow, a task continues. The request is dropped when the client disconnects or the process is stopped.
    pub fn poll<T: Send + 'static, F>(&self, request: impl FnOnce(ReplySender<T>) -> F) -> Replies<T>
    where
        F: Future<Output = Result<(), Disconnected>> + Send + 'static,
    {
        let (sender, replies) = mpsc::channel(REPLIES_MAX);
        let request = to_its_end(request(ReplySender(sender.clone())), sender);
        let shutdown = self.shutdown.clone();
        let request = async move {
            tokio::select! {
                biased;
                () = request => {}
                () = shutdown.stopped() => {}
            }
        };
        let polled = Some(PolledRequest::new(request.boxed(), &self.shutdown));
        Replies { replies, polled, ended: false, _running: Some(self.running.token()) }
    }

    /// Starts a request's task, as [`Requests::start`] does, but the drain does not wait for its end.
    pub(crate) fn start_background<T: Send + 'static, F>(&self, task: impl FnOnce(ReplySender<T>) -> F) -> Replies<T>
    where
        F: Future<Output = Result<(), Disconnected>> + Send + 'static,
    {
        let (sender, replies) = mpsc::channel(REPLIES_MAX);
        let task = to_its_end(task(ReplySender(sender.clone())), sender.clone());
        self.shutdown.spawn(async move {
            tokio::select! {
                biased;
                () = sender.closed() => {}
                () = task => {}
            }
        });
        Replies { replies, polled: None, ended: false, _running: None }
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
                sleep(FLUSH).await;
            } => Ok(()),
        }
    }
}

/// A request that works while its replies are polled.
#[derive(Debug)]
struct PolledRequest {
    /// `None` once it has ended or has a task.
    request: Arc<Mutex<Option<WokenRequest>>>,
    /// Dropped when the request has ended. Until then, the process has a task for the request, for which its shutdown waits.
    running: Option<oneshot::Sender<()>>,
}

type WokenRequest = Woken<BoxFuture<'static, ()>>;

impl PolledRequest {
    fn new(request: BoxFuture<'static, ()>, shutdown: &Shutdown) -> Self {
        let request = Arc::new(Mutex::new(Some(Woken::new(request))));
        let (rested, (running, ended)) = (Arc::downgrade(&request), oneshot::channel());
        shutdown.spawn(async move {
            tokio::select! {
                biased;
                _ = ended => {}
                () = take_over(rested) => {}
            }
        });
        Self { request, running: Some(running) }
    }

    /// Polls the request. Ready if it has ended or has a task.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let mut request = self.request.lock();
        if request.take_if(|request| request.poll_unpin(context).is_ready()).is_some() {
            self.running = None;
        }
        if request.is_some() { Poll::Pending } else { Poll::Ready(()) }
    }
}

/// Waits until a request has rested for too long, and runs it then.
async fn take_over(rested: Weak<Mutex<Option<WokenRequest>>>) {
    loop {
        sleep(REST_MAX).await;
        let Some(request) = rested.upgrade() else { return };
        // If it is locked, it is being polled.
        let taken = request.try_lock().and_then(|mut request| request.take_if(|request| request.is_woken()));
        drop(request);
        if let Some(request) = taken {
            return request.await;
        }
    }
}

/// Runs a request, and then ends the stream of its replies.
async fn to_its_end<T>(request: impl Future<Output = Result<(), Disconnected>>, replies: mpsc::Sender<ReplyMessage<T>>) {
    if request.await.is_ok() {
        // Sending fails only if the client has disconnected meanwhile.
        let _ = replies.send(None).await;
    }
}

impl<T> Stream for Replies<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let Self { replies, polled, .. } = &mut *self;
        // A request that is polled here sends its replies while it is polled, so nothing has to wake this task for them.
        let next = if polled.as_mut().is_some_and(|polled| polled.poll(context).is_pending()) {
            let Ok(next) = replies.try_recv() else { return Poll::Pending };
            Some(next)
        } else {
            ready!(replies.poll_recv(context))
        };
        let item = match next {
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
    async fn request_that_nothing_polls_gets_a_task_after_a_second() {
        let (requests, _shutdown) = requests();
        let (send, wake) = oneshot::channel::<()>();
        let (done, mut is_done) = oneshot::channel::<()>();
        let mut replies = requests.poll(|replies: ReplySender<u32>| async move {
            replies.send(1).await?;
            wake.await.expect("the test keeps the sender");
            replies.send(2).await?;
            done.send(()).expect("the test keeps the receiver");
            Ok(())
        });
        assert!(matches!(replies.next().await, Some(Ok(1))));
        assert!(replies.next().now_or_never().is_none());
        tokio::time::sleep(10 * REST_MAX).await;
        send.send(()).expect("the request waits");
        assert_eq!(is_done.try_recv(), Err(oneshot::error::TryRecvError::Empty), "it works only while it is polled");
        tokio::time::sleep(REST_MAX).await;
        assert_eq!(is_done.try_recv(), Ok(()));
        assert!(matches!(replies.next().await, Some(Ok(2))) && replies.next().await.is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn request_that_rests_ends_with_its_client_or_its_process() {
        for stops in [false, true] {
            let (requests, shutdown) = requests();
            let (held, released) = oneshot::channel::<()>();
            let mut replies = requests.poll(|_: ReplySender<u32>| async move {
                let _held = held;
                std::future::pending().await
            });
            assert!(replies.next().now_or_never().is_none());
            if stops {
                let before = tokio::time::Instant::now();
                shutdown.run(10 * REST_MAX).await;
                assert_eq!(before.elapsed(), 10 * REST_MAX, "the process waits for the request");
                assert!(matches!(replies.next().await, Some(Err(status)) if status.code() == tonic::Code::Unavailable));
                released.await.expect_err("values that the request owns are dropped");
            } else {
                drop(replies);
                released.now_or_never().expect("it is dropped at once").expect_err("values that the request owns are dropped");
            }
        }
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
