//! Tracks whether a request is in progress on a connection. The HTTP service and the socket share this state.

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use std::{
    pin::Pin,
    sync::atomic::{AtomicBool, Ordering},
    task::{Context, Poll, ready},
};

/// The current exchange (request and answer). An HTTP/1.1 connection has one exchange at a time.
#[derive(Default)]
pub(super) struct Exchange(AtomicBool);

impl Exchange {
    /// Returns whether the head of a request is complete and its answer has not ended.
    pub(super) fn is_under_way(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(super) fn end(&self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// A body that calls `ended` when it ends or is dropped.
pub(super) struct WatchedBody<F: FnMut()> {
    body: Body,
    ended: F,
}

impl<F: FnMut()> WatchedBody<F> {
    pub(super) fn new<B>(body: B, ended: F) -> Self
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<axum::BoxError>,
    {
        Self { body: Body::new(body), ended }
    }
}

impl<F: FnMut() + Unpin> HttpBody for WatchedBody<F> {
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

impl<F: FnMut()> Drop for WatchedBody<F> {
    fn drop(&mut self) {
        (self.ended)();
    }
}
