//! The progress of the current exchange (request and answer) on a connection, shared by the HTTP service and the socket.

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use parking_lot::Mutex;
use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

/// The current exchange. An HTTP/1.1 connection has one exchange at a time.
#[derive(Default)]
pub(super) struct Exchange(Mutex<State>);

#[derive(Clone, Copy, Default)]
pub(super) struct State {
    pub(super) phase: Phase,
    /// Whether the client understands interim responses (HTTP/1.1).
    pub(super) interim: bool,
}

/// The phase of an exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// The connection is idle, or the head of a request is arriving.
    #[default]
    Waiting,
    /// The body of a request is arriving.
    Reading,
    /// The request is complete, and no byte of its answer has been sent.
    Answering,
    /// The answer is being sent.
    Sending,
}

impl Exchange {
    pub(super) fn state(&self) -> State {
        *self.0.lock()
    }

    /// Records that the head of a request is complete. `phase` is the phase that begins now.
    pub(super) fn begin(&self, phase: Phase, interim: bool) {
        *self.0.lock() = State { phase, interim };
    }

    /// Records that the body of the request is complete or was dropped.
    pub(super) fn request_is_read(&self) {
        self.step(Phase::Reading, Phase::Answering);
    }

    /// Records that bytes of the answer are sent.
    pub(super) fn sends(&self) {
        self.step(Phase::Answering, Phase::Sending);
    }

    /// Records that the answer's body has ended.
    pub(super) fn end(&self) {
        self.0.lock().phase = Phase::Waiting;
    }

    fn step(&self, from: Phase, to: Phase) {
        let mut state = self.0.lock();
        if state.phase == from {
            state.phase = to;
        }
    }
}

/// A body that calls `ended` when it ends or is dropped.
pub(super) struct Watched<F: FnMut()> {
    body: Body,
    ended: F,
}

impl<F: FnMut()> Watched<F> {
    pub(super) fn new<B>(body: B, ended: F) -> Self
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<axum::BoxError>,
    {
        Self { body: Body::new(body), ended }
    }
}

impl<F: FnMut() + Unpin> HttpBody for Watched<F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = self.get_mut();
        let frame = ready!(Pin::new(&mut this.body).poll_frame(cx));
        if frame.is_none() {
            (this.ended)();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<F: FnMut()> Drop for Watched<F> {
    fn drop(&mut self) {
        (self.ended)();
    }
}
