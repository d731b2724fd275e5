//! A connection's socket with HTTP's timeouts. A request's head and the pause between requests have separate timeouts. hyper's
//! `header_read_timeout` would apply to the head and to the pause alike.
//!
//! A FIN means that the client has disconnected, as with most servers: a client that closes only its sending half gets no answer.

use super::exchange::Exchange;
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};
use tokio_io_timeout::TimeoutWriter;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// The maximum time from the opening of a connection, or from the first byte of a later request, to the end of the headers.
const HEAD_MAX: Duration = Duration::from_secs(10);
/// The maximum time between two requests. Load balancers close an idle connection after 60 s. They must close it before this process does,
/// because a request that is sent while the process closes the connection would fail.
const IDLE_MAX: Duration = Duration::from_secs(75);
/// When and how connections end because the process drains.
#[derive(Clone)]
pub struct Drain {
    /// Cancelled when the process drains. The next answer on each connection is then the last one and has the header `Connection: close`.
    pub begun: CancellationToken,
    /// The maximum time that an idle connection stays open while the process drains.
    pub idle_max: Duration,
}

/// A socket that reports end of file when the client is too slow or has disconnected.
pub(super) struct Timed<S> {
    /// The socket. Its writes fail when the client reads none of the buffered bytes for `unread_max`.
    io: Pin<Box<TimeoutWriter<S>>>,
    exchange: Arc<Exchange>,
    clock: Pin<Box<Sleep>>,
    drain: Drain,
    /// Resolves when the process drains.
    draining: Pin<Box<WaitForCancellationFutureOwned>>,
    /// The kind of wait that `clock` measures; `None` if `clock` is not set.
    armed: Option<Wait>,
    /// Whether bytes of the next request have arrived.
    head_began: bool,
    /// Whether all written bytes were handed to the socket.
    flushed: bool,
    /// Whether the client has closed its sending half.
    ended: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    Head,
    Idle,
    /// The process drains and waits for the last request on the connection.
    Last,
}

impl<S: AsyncRead + AsyncWrite> Timed<S> {
    pub(super) fn new(io: S, exchange: Arc<Exchange>, unread_max: Duration, drain: Drain) -> Self {
        let mut io = TimeoutWriter::new(io);
        io.set_timeout(Some(unread_max));
        Self {
            io: Box::pin(io),
            exchange,
            clock: Box::pin(sleep(HEAD_MAX)),
            draining: Box::pin(drain.begun.clone().cancelled_owned()),
            drain,
            armed: Some(Wait::Head),
            head_began: true,
            flushed: true,
            ended: false,
        }
    }

    /// Returns ready once `time` has passed since the first call for this wait.
    fn poll_wait(&mut self, wait: Wait, time: Duration, cx: &mut Context<'_>) -> Poll<()> {
        if self.armed != Some(wait) {
            self.armed = Some(wait);
            self.clock.as_mut().reset(Instant::now() + time);
        }
        self.clock.as_mut().poll(cx)
    }

    /// Returns ready when the connection has to be closed because no request is under way on it.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.drain.begun.is_cancelled() || self.draining.as_mut().poll(cx).is_ready() {
            // The client does not know that the process drains, and may just be sending a request.
            self.poll_wait(Wait::Last, self.drain.idle_max, cx)
        } else {
            self.poll_wait(Wait::Idle, IDLE_MAX, cx)
        }
    }
}

impl<S: AsyncRead + AsyncWrite> AsyncRead for Timed<S> {
    /// Reports end of file if the connection has to be closed.
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.ended {
            let before = buffer.filled().len();
            match this.io.as_mut().poll_read(cx, buffer) {
                Poll::Ready(Ok(())) if buffer.filled().len() == before => this.ended = true,
                Poll::Ready(Ok(())) => {
                    this.head_began = true;
                    return Poll::Ready(Ok(()));
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {}
            }
        }
        match this.exchange.is_under_way() {
            // The wait for the next request begins only after the previous answer has been flushed.
            false if !this.flushed => return Poll::Pending,
            _ if this.ended => {}
            true => return Poll::Pending,
            false if this.head_began => ready!(this.poll_wait(Wait::Head, HEAD_MAX, cx)),
            false => ready!(this.poll_idle(cx)),
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite> AsyncWrite for Timed<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.note_write();
        this.io.as_mut().poll_write(cx, bytes)
    }

    fn poll_write_vectored(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        this.note_write();
        this.io.as_mut().poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.io.as_mut().poll_flush(cx))?;
        if !std::mem::replace(&mut this.flushed, true) && !this.exchange.is_under_way() {
            // The next kind of wait begins now. Waking the task makes the next `poll_read` set the clock for it.
            cx.waker().wake_by_ref();
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().io.as_mut().poll_shutdown(cx)
    }
}

impl<S> Timed<S> {
    /// Records that hyper writes an answer. The request has been read by then, so the next bytes that arrive belong to another request.
    fn note_write(&mut self) {
        (self.flushed, self.head_began, self.armed) = (false, false, None);
    }
}
