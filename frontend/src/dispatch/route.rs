//! The booking of one request: a `Route` stream held open with whichever router has it.
//!
//! The booking outlives its router: when the stream breaks, or the router says that it leaves, another one is asked to book the
//! request where it runs. While there is none the request goes on without.

use super::{DispatchError, Prompt, Routers, routers::Router};
use futures::{FutureExt, future::BoxFuture};
use std::{convert::Infallible, sync::Arc, time::Duration};
use tandem_proto::v1::{
    AttemptFailed, ExistingPlacement, FailureReason, Placement, PrefillFinished, RoutePrompt, RouteReply, RouteRequest,
    route_reply, route_request::Message,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

/// How long the end of an answer may wait for the router to have heard all of it.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Room for what is said to one router before it reads any of it: a prompt, a few failures, the release.
const UNREAD_MAX: usize = 8;

/// A request's booking. Dropping it gives it back.
pub(super) struct Route {
    routers: Arc<Routers>,
    /// `None`: its router is gone.
    held: Option<Held>,
    /// Resolves to who has the booking then.
    moving: Option<BoxFuture<'static, Held>>,
    /// Where the request is.
    existing: ExistingPlacement,
}

/// The stream.
pub(super) struct Held {
    address: Arc<str>,
    requests: mpsc::Sender<RouteRequest>,
    replies: Streaming<RouteReply>,
    leaving: bool,
}

impl Route {
    /// Has the prompt placed.
    pub(super) async fn open(routers: &Arc<Routers>, prompt: &Prompt) -> Result<(Self, Placement), DispatchError> {
        let (held, placement) = routers.place(prompt).await?;
        let existing = existing(&placement);
        Ok((Self { routers: Arc::clone(routers), held: Some(held), moving: None, existing }, placement))
    }

    /// Has the prompt placed anew after a failure; by another router if its own is gone.
    pub(super) async fn place_anew(&mut self, prompt: &Prompt, failed: AttemptFailed) -> Result<Placement, DispatchError> {
        self.moving = None;
        let mut error = DispatchError::RouterClosed;
        for _ in 0..=self.routers.len() {
            let mut held = match self.held.take() {
                Some(held) if !held.leaving => held,
                leaving => {
                    // Whoever books it first learns where it was, and so what to leave out.
                    let anew = self.routers.book(&self.routers.prompt(prompt, Some(self.existing.clone()))).await;
                    anew.or_else(|error| leaving.ok_or(error))?
                }
            };
            held.tell(Message::Failed(failed.clone())).await;
            let placing = held.placement();
            let placed = if self.routers.len() > 1 { self.routers.in_time(placing).await } else { placing.await };
            match placed {
                Ok(placement) => {
                    (self.held, self.existing) = (Some(held), existing(&placement));
                    return Ok(placement);
                }
                Err(gone @ (DispatchError::Router(_) | DispatchError::RouterClosed)) => {
                    self.routers.found(&held.address, false);
                    error = gone;
                }
                Err(refused) => return Err(refused),
            }
        }
        Err(error)
    }

    /// The attempt's first token is there.
    pub(super) async fn release_prefill(&mut self, cached_tokens: Option<u32>) {
        self.existing.prefilling = false;
        // It would be booked as it was.
        self.moving = None;
        if let Some(held) = &self.held {
            held.tell(Message::PrefillFinished(PrefillFinished { cached_tokens })).await;
        }
    }

    /// Keeps the request booked, with one router or another. Never returns. Cancel-safe: called again, it goes on where it was.
    pub(super) async fn keep(&mut self, prompt: &Prompt) -> Infallible {
        loop {
            if self.moving.is_none() && self.held.as_ref().is_none_or(|held| held.leaving) {
                let prompt = self.routers.prompt(prompt, Some(self.existing.clone()));
                self.moving = Some(Arc::clone(&self.routers).book_sometime(prompt).boxed());
            }
            let (moving, held) = (&mut self.moving, &mut self.held);
            tokio::select! {
                biased;
                moved = async { moving.as_mut().expect("it moves").await }, if moving.is_some() => {
                    (self.held, self.moving) = (Some(moved), None);
                }
                told = async { held.as_mut().expect("it is held").replies.message().await }, if held.is_some() => {
                    self.told(told);
                }
            }
        }
    }

    /// Nobody has asked for anything.
    fn told(&mut self, told: Result<Option<RouteReply>, Status>) {
        let Some(held) = &mut self.held else { return };
        match told {
            Ok(Some(RouteReply { message: Some(route_reply::Message::Draining(_)) })) => held.leaving = true,
            Ok(Some(_)) => return,
            Ok(None) | Err(_) => {
                let held = self.held.take().expect("it was a moment ago");
                return self.routers.found(&held.address, false);
            }
        }
        self.routers.found(&held.address, false);
    }

    /// The request has ended: gives the booking back in order. Merely dropped, the last message (what was reported cached) could
    /// be lost with the stream.
    pub(super) async fn close(self) {
        let Some(Held { requests, mut replies, .. }) = self.held else { return };
        drop(requests);
        tokio::time::timeout(CLOSE_TIMEOUT, async { while let Ok(Some(_)) = replies.message().await {} }).await.ok();
    }
}

impl Held {
    /// Resolves when the router has read the prompt.
    pub(super) async fn open(router: &Router, prompt: RoutePrompt) -> Result<Self, DispatchError> {
        let (requests, outgoing) = mpsc::channel(UNREAD_MAX);
        let message = Some(Message::Prompt(prompt));
        requests.send(RouteRequest { message }).await.map_err(|_| DispatchError::RouterClosed)?;
        let replies = router.client.clone().route(ReceiverStream::new(outgoing)).await;
        let replies = replies.map_err(|status| match status.code() {
            Code::FailedPrecondition | Code::Unauthenticated => DispatchError::Foreign,
            _ => DispatchError::Router(Box::new(status)),
        })?;
        Ok(Self { address: router.address.clone(), requests, replies: replies.into_inner(), leaving: false })
    }

    /// The answer to a prompt or a failure.
    pub(super) async fn placement(&mut self) -> Result<Placement, DispatchError> {
        loop {
            let reply = self.replies.message().await.map_err(|status| DispatchError::Router(Box::new(status)))?;
            return match reply.ok_or(DispatchError::RouterClosed)?.message {
                Some(route_reply::Message::Placement(placement)) => Ok(placement),
                Some(route_reply::Message::Failure(failure)) => match failure.reason() {
                    FailureReason::InvalidRequest => Err(DispatchError::Refused { message: failure.message }),
                    reason => Err(DispatchError::NoWorker { reason }),
                },
                Some(route_reply::Message::Draining(_)) => {
                    self.leaving = true;
                    continue;
                }
                None => Err(DispatchError::RouterClosed),
            };
        }
    }

    /// A router that is gone hears nothing; what waits for its answer notices.
    async fn tell(&self, message: Message) {
        self.requests.send(RouteRequest { message: Some(message) }).await.ok();
    }
}

/// A request whose first token is still to come.
fn existing(placement: &Placement) -> ExistingPlacement {
    let instance = |candidate: &Option<tandem_proto::v1::Candidate>| {
        candidate.as_ref().and_then(|candidate| candidate.worker.as_ref()).map(|worker| worker.instance_id.clone())
    };
    ExistingPlacement {
        decode_instance_id: instance(&placement.decode).unwrap_or_default(),
        prefill_instance_id: instance(&placement.prefill),
        prefilling: true,
    }
}
