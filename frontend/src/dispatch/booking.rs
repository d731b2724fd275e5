//! The booking of one request: the load that a router counts for the request while its `Route` stream is open.
//!
//! When the stream fails or the router drains, another router books the request on the workers where it runs. While no router can book
//! it, the request continues without a booking.

use super::{
    error::DispatchError,
    placement::Placement,
    prompt::Prompt,
    router_stream::RouterStream,
    routers::{Health, Routers, in_time},
};
use futures::{FutureExt, future::BoxFuture};
use std::{convert::Infallible, sync::Arc};
use tandem_proto::v1::{
    AnswerFinished, AttemptFailed, ExistingPlacement, FailureReason, PrefillFinished, route_request::Message,
};

/// A request's booking. It ends when this value is dropped.
pub(crate) struct Booking {
    routers: Arc<Routers>,
    /// The open `Route` stream; `None`: the router was lost.
    stream: Option<RouterStream>,
    /// Books the request with another router and resolves to the stream to that router; `None` unless the current router was lost or
    /// drains.
    rebooking: Option<BoxFuture<'static, RouterStream>>,
    /// The placement that another router has to book if the current router is lost.
    existing: ExistingPlacement,
}

impl Booking {
    /// Requests a placement for the prompt. If its request has an equal prompt before it, first waits for the placement of that prompt.
    ///
    /// # Errors
    /// No router can place it.
    pub(crate) async fn open(routers: &Arc<Routers>, prompt: &Prompt) -> Result<(Self, Placement), DispatchError> {
        let equal_prompt = prompt.equal_placement().await;
        let (stream, placement) = routers.place(prompt, equal_prompt.as_ref()).await?;
        prompt.placed_on(&placement);
        let existing = before_first_token(&placement);
        Ok((Self { routers: Arc::clone(routers), stream: Some(stream), rebooking: None, existing }, placement))
    }

    /// Requests another placement after a failed attempt, from another router if the booking's own router was lost or drains.
    ///
    /// # Errors
    /// No router can place it.
    pub(super) async fn reroute(&mut self, prompt: &Prompt, failed: AttemptFailed) -> Result<Placement, DispatchError> {
        self.rebooking = None;
        let mut error = DispatchError::RouterClosed;
        for _ in 0..=self.routers.len() {
            let mut stream = match self.stream.take() {
                Some(stream) if !stream.draining => stream,
                draining => {
                    // The router was lost or drains. Another router first books the previous placement, so that it excludes the failed
                    // instance from the next placement.
                    let existing = self.existing_prompt(prompt);
                    match draining {
                        Some(draining) => self.routers.book(&existing).await.unwrap_or(draining),
                        None => self.routers.book_soon(&existing).await?,
                    }
                }
            };
            stream.send(Message::Failed(failed.clone())).await;
            let placing = stream.placement();
            let placed = if self.routers.len() > 1 { in_time(placing).await } else { placing.await };
            match placed {
                Ok(placement) => {
                    (self.stream, self.existing) = (Some(stream), before_first_token(&placement));
                    return Ok(placement);
                }
                Err(lost) if lost.is_router_lost() => {
                    self.routers.set_health(&stream.address, Health::Unhealthy);
                    error = lost;
                }
                Err(refused) => return Err(refused),
            }
        }
        Err(error)
    }

    /// Reports the attempt's first token to the router, which then releases the prompt's prefill load.
    pub(crate) async fn prefill_finished(&mut self, cached_tokens: Option<u32>) {
        self.existing.prefilling = false;
        // A rebooking that has already begun would count the prefill's load, although the prefill has ended.
        self.rebooking = None;
        self.send_prefill_finished(cached_tokens).await;
    }

    /// Reports the number of cached tokens, which the worker has reported after the first token. If the router was lost meanwhile, the
    /// number is not reported to another router instead: only the router that placed the request compares the number with its prediction.
    pub(crate) async fn cached_tokens_reported(&mut self, cached_tokens: u32) {
        self.send_prefill_finished(Some(cached_tokens)).await;
    }

    async fn send_prefill_finished(&mut self, cached_tokens: Option<u32>) {
        self.send(Message::PrefillFinished(PrefillFinished { cached_tokens })).await;
    }

    /// Books the request on another worker, because a gateway has sent it to this worker's engine. Does nothing if it is booked there.
    pub(crate) fn moved_to(&mut self, instance_id: &str) {
        if self.existing.decode_instance_id == instance_id {
            return;
        }
        instance_id.clone_into(&mut self.existing.decode_instance_id);
        (self.stream, self.rebooking) = (None, None);
    }

    /// Keeps the request booked: books it with another router whenever its router is lost or drains. Never returns. Cancel-safe: a later
    /// call continues.
    pub(crate) async fn maintain(&mut self, prompt: &Prompt) -> Infallible {
        loop {
            match &mut self.stream {
                Some(stream) if !stream.draining => {
                    stream.unusable().await;
                    self.routers.set_health(&stream.address, Health::Unhealthy);
                    self.stream.take_if(|stream| !stream.draining);
                }
                _ => {
                    if self.rebooking.is_none() {
                        let existing = self.existing_prompt(prompt);
                        self.rebooking = Some(Arc::clone(&self.routers).book_when_possible(existing).boxed());
                    }
                    if let Some(rebooking) = &mut self.rebooking {
                        (self.stream, self.rebooking) = (Some(rebooking.await), None);
                    }
                }
            }
        }
    }

    /// Ends the booking of a request whose answer is complete. The answer has this number of tokens, in all samples together.
    pub(crate) async fn close(mut self, generated_tokens: u64) {
        self.answer_finished(generated_tokens).await;
        self.end().await;
    }

    /// Reports the number of the complete answer's tokens, in all samples together.
    pub(crate) async fn answer_finished(&mut self, generated_tokens: u64) {
        self.send(Message::AnswerFinished(AnswerFinished { generated_tokens })).await;
    }

    /// Reports that a gateway could not get the request answered by its engine.
    pub(crate) async fn engine_failed(&mut self) {
        let (instance_id, reason) = (self.existing.decode_instance_id.clone(), FailureReason::EngineFailed.into());
        self.send(Message::Failed(AttemptFailed { instance_id, reason, ..Default::default() })).await;
    }

    /// Ends the booking after the router has read what was reported.
    pub(crate) async fn end(self) {
        if let Some(stream) = self.stream {
            stream.close().await;
        }
    }

    async fn send(&mut self, message: Message) {
        if let Some(stream) = &self.stream {
            stream.send(message).await;
        }
    }

    fn existing_prompt(&self, prompt: &Prompt) -> tandem_proto::v1::RoutePrompt {
        prompt.route_prompt(Some(self.existing.clone()), None)
    }
}

/// Converts a placement to the message with which another router books it. The prompt counts as not yet prefilled.
fn before_first_token(placement: &Placement) -> ExistingPlacement {
    ExistingPlacement {
        decode_instance_id: placement.decode.worker.instance_id.clone(),
        prefill_instance_id: placement.prefill.as_ref().map(|prefill| prefill.worker.instance_id.clone()),
        prefilling: true,
    }
}
