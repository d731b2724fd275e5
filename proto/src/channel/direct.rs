//! Calls between the parts of one process. The caller's task runs the service itself: the messages are encoded as for a connection, but there
//! is no HTTP/2, no socket, and no task in between. A service that must work on while its caller does not wait starts a task.

use super::guard::Guarded;
use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use parking_lot::RwLock;
use std::{
    collections::HashMap,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
};
use tokio_util::{
    sync::{CancellationToken, WaitForCancellationFutureOwned},
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};
use tonic::{
    Status,
    body::Body,
    codegen::{BoxFuture, Service, StdError, http},
    service::Routes,
    transport,
};

/// The services of this process, by the addresses `host:port` at which they listen. It is cheap to clone.
#[derive(Clone, Default)]
pub(super) struct DirectCalls(Arc<RwLock<HashMap<String, DirectService>>>);

/// A service of this process.
#[derive(Clone)]
struct DirectService {
    service: Guarded<Routes>,
    calls: TaskTracker,
    stopped: CancellationToken,
}

/// A registered service. Dropping it ends all direct calls, as the end of a process breaks its connections.
pub(super) struct DirectListener {
    address: String,
    served: DirectService,
    all: DirectCalls,
}

/// Calls one address: directly if this process serves there at that time, otherwise over a connection. It is cheap to clone.
#[derive(Clone)]
pub struct Transport {
    connection: transport::Channel,
    direct: Option<(DirectCalls, Arc<str>)>,
}

/// Why a direct call has ended without an answer. It is the source of the call's status, like the error of a broken connection.
#[derive(Clone, Copy, Debug, thiserror::Error)]
enum BrokenCall {
    #[error("the part of this process that ran the call has stopped")]
    Stopped,
    #[error("the call panicked")]
    Panicked,
}

impl DirectCalls {
    /// Sends the calls of this process for `address` to the service.
    pub(super) fn serve(&self, address: String, service: Guarded<Routes>) -> DirectListener {
        let served = DirectService { service, calls: TaskTracker::new(), stopped: CancellationToken::new() };
        self.0.write().insert(address.clone(), served.clone());
        DirectListener { address, served, all: self.clone() }
    }

    pub(super) fn serves(&self, address: &str) -> bool {
        self.0.read().contains_key(address)
    }
}

impl DirectListener {
    /// Refuses further calls. Calls that run may end.
    pub(super) fn close(&self) {
        self.served.calls.close();
        let mut all = self.all.0.write();
        // Another service may listen at the address by now.
        if all.get(&self.address).is_some_and(|now| now.calls.is_closed()) {
            all.remove(&self.address);
        }
    }

    /// Resolves when the service is closed and the last call has ended.
    pub(super) async fn ended(&self) {
        self.served.calls.wait().await;
    }
}

impl Drop for DirectListener {
    fn drop(&mut self) {
        self.close();
        self.served.stopped.cancel();
    }
}

impl Transport {
    pub(super) fn new(connection: transport::Channel, direct: Option<(DirectCalls, Arc<str>)>) -> Self {
        Self { connection, direct }
    }
}

impl Service<http::Request<Body>> for Transport {
    type Response = http::Response<Body>;
    type Error = StdError;
    type Future = BoxFuture<http::Response<Body>, StdError>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        // Each call waits for the connection if it needs it.
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, call: http::Request<Body>) -> Self::Future {
        let served = self.direct.as_ref().and_then(|(all, address)| all.0.read().get(&**address).cloned());
        if let Some(served) = served {
            return Box::pin(served.call(call));
        }
        let mut connection = self.connection.clone();
        Box::pin(async move {
            poll_fn(|cx| connection.poll_ready(cx)).await?;
            Ok(connection.call(call).await?)
        })
    }
}

impl DirectService {
    async fn call(mut self, call: http::Request<Body>) -> Result<http::Response<Body>, StdError> {
        let mut running = RunningCall { stopped: Box::pin(self.stopped.cancelled_owned()), _call: self.calls.token() };
        let mut answering = pin!(self.service.call(call));
        let answer = poll_fn(|cx| running.poll(cx, |cx| answering.as_mut().poll(cx))).await?;
        Ok(answer?.map(|body| Body::new(DirectBody { body, running })))
    }
}

/// A direct call. Its service can be polled until the service stops.
struct RunningCall {
    stopped: Pin<Box<WaitForCancellationFutureOwned>>,
    _call: TaskTrackerToken,
}

impl RunningCall {
    fn poll<T>(&mut self, cx: &mut Context<'_>, poll: impl FnOnce(&mut Context<'_>) -> Poll<T>) -> Poll<Result<T, BrokenCall>> {
        // Unwinding is safe: after a panic the call is not polled again, and all state that it shares with others is behind locks.
        match catch_unwind(AssertUnwindSafe(|| poll(cx))) {
            Ok(Poll::Ready(polled)) => Poll::Ready(Ok(polled)),
            Ok(Poll::Pending) => self.stopped.as_mut().poll(cx).map(|()| Err(BrokenCall::Stopped)),
            Err(_) => Poll::Ready(Err(BrokenCall::Panicked)),
        }
    }
}

/// The stream of an answer. Dropping it drops the service's stream.
struct DirectBody {
    body: Body,
    running: RunningCall,
}

impl HttpBody for DirectBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let Self { body, running } = self.get_mut();
        let polled = ready!(running.poll(cx, |cx| Pin::new(&mut *body).poll_frame(cx)));
        Poll::Ready(polled.unwrap_or_else(|broken| {
            *body = Body::empty();
            Some(Err(Status::from_error(broken.into())))
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests;
