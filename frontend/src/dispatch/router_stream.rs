//! A `Route` stream to one router: while it is open, the router counts the request's load.

use super::{error::DispatchError, placement::Placement};
use futures::StreamExt;
use std::{sync::Arc, time::Duration};
use tandem_process::Woken;
use tandem_proto::{
    channel::Channel,
    unknown_message,
    v1::{
        FailureReason, RoutePrompt, RouteReply, RouteRequest, route_reply, route_request::Message, router_client::RouterClient,
    },
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

/// The maximum time for which a finished request waits for the router to read the last message.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// The maximum number of messages that wait to be sent on a stream. A request sends few: the prompt, failures, and the ends of the prefill
/// and of the answer.
const OUTGOING_MAX: usize = 8;

/// A router's address and client. Cheap to clone.
#[derive(Clone)]
pub(super) struct Router {
    pub(super) address: Arc<str>,
    pub(super) client: RouterClient<Channel>,
}

/// An open `Route` stream. Dropping it ends the booking.
pub(super) struct RouterStream {
    pub(super) address: Arc<str>,
    requests: mpsc::Sender<RouteRequest>,
    /// The replies, which would otherwise be polled at each token of the answer.
    replies: Woken<Streaming<RouteReply>>,
    /// Whether the router drains. If so, another router has to book the request.
    pub(super) draining: bool,
}

impl RouterStream {
    /// Opens a stream and resolves when the router has read the prompt.
    ///
    /// # Errors
    /// The router is unreachable, refuses the stream, or belongs to another cluster.
    pub(super) async fn open(router: &Router, prompt: RoutePrompt) -> Result<Self, DispatchError> {
        let (requests, outgoing) = mpsc::channel(OUTGOING_MAX);
        let message = Some(Message::Prompt(prompt));
        requests.send(RouteRequest { message }).await.map_err(|_| DispatchError::RouterClosed)?;
        let replies = router.client.clone().route(ReceiverStream::new(outgoing)).await;
        let replies = replies.map_err(|status| match status.code() {
            Code::FailedPrecondition | Code::Unauthenticated => DispatchError::ClusterMismatch,
            _ => status.into(),
        })?;
        Ok(Self { address: router.address.clone(), requests, replies: Woken::new(replies.into_inner()), draining: false })
    }

    /// Returns the router's answer to a prompt or to a failed attempt.
    ///
    /// # Errors
    /// The router cannot place the request, or the stream has ended.
    pub(super) async fn placement(&mut self) -> Result<Placement, DispatchError> {
        loop {
            return match self.replies.next().await.ok_or(DispatchError::RouterClosed)??.message {
                Some(route_reply::Message::Placement(placement)) => {
                    let incomplete = || Status::internal("the router sent a placement without a decode worker").into();
                    Placement::from_wire(placement).ok_or_else(incomplete)
                }
                Some(route_reply::Message::Failure(failure)) => match failure.reason() {
                    FailureReason::Overloaded => {
                        Err(DispatchError::Overloaded { retry_after: Duration::from_millis(failure.retry_after_ms.into()) })
                    }
                    FailureReason::InvalidRequest => Err(DispatchError::Refused { message: failure.message }),
                    _ => Err(DispatchError::NoWorker { message: failure.message }),
                },
                Some(route_reply::Message::Draining(_)) => {
                    self.draining = true;
                    continue;
                }
                None => {
                    unknown_message("Route");
                    continue;
                }
            };
        }
    }

    /// Sends a message. Reports no error: if the router is lost, the next wait for a reply fails.
    pub(super) async fn send(&self, message: Message) {
        self.requests.send(RouteRequest { message: Some(message) }).await.ok();
    }

    /// Resolves when the router drains or is lost. Cancel-safe.
    pub(super) async fn unusable(&mut self) {
        while !self.draining {
            match self.replies.next().await {
                Some(Ok(RouteReply { message: Some(route_reply::Message::Draining(_)) })) => self.draining = true,
                Some(Ok(_)) => {}
                None | Some(Err(_)) => return,
            }
        }
    }

    /// Ends the booking after the router has read all messages. If the stream were dropped at once, the last messages, which report the
    /// cached tokens and the answer's length, could be lost.
    pub(super) async fn close(self) {
        let Self { requests, mut replies, .. } = self;
        drop(requests);
        timeout(CLOSE_TIMEOUT, async { while let Some(Ok(_)) = replies.next().await {} }).await.ok();
    }
}
