//! The gRPC edge: a `Route` stream holds a booking, and releases it however the stream ends.

use crate::{
    cluster::{Cluster, Excluded, PlacementError, PlacementRequest, texts},
    replication::{self, Message as PeerMessage},
    route::NoEligibleWorker,
    settings::RouterSettings,
    worker_bookings::BookingId,
};
use futures::{Stream, StreamExt, stream};
use std::{collections::VecDeque, pin::Pin, sync::Arc, time::Duration};
use tandem_kv::SequenceHash;
use tandem_node::{
    Shutdown,
    trace::{Span, Tracer},
};
use tandem_proto::{
    ClusterKey, TEXT_BYTES_MAX,
    v1::{
        AttemptFailed, BookingsReply, BookingsRequest, Draining, ExistingPlacement, ExplainReply, ExplainRequest, Failure,
        FailureReason, Identity, Placement, RoutePrompt, RouteReply, RouteRequest, WorkersReply, WorkersRequest, route_reply,
        route_request::Message, router_server::Router,
    },
};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tonic::{Request, Response, Status, Streaming};

/// How long changes of bookings are batched before they are sent to peers. It bounds the messages per second whatever the load,
/// and a burst of equal prompts is announced while its first request is still on its way to a worker.
const BATCH_DELAY: Duration = Duration::from_millis(5);
/// Time between two messages to a peer while nothing changes.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// The gRPC service `Router`.
pub(crate) struct RouterService {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) settings: RouterSettings,
    /// Signs the addresses of placements.
    pub(crate) key: ClusterKey,
    /// Other routers may be running, which can place what this one refuses.
    pub(crate) has_peers: bool,
    pub(crate) shutdown: Shutdown,
}

#[tonic::async_trait]
impl Router for RouterService {
    type RouteStream = Pin<Box<dyn Stream<Item = Result<RouteReply, Status>> + Send>>;

    async fn route(&self, request: Request<Streaming<RouteRequest>>) -> Result<Response<Self::RouteStream>, Status> {
        let mut requests = request.into_inner();
        let first = timeout(self.settings.prompt_wait, requests.message())
            .await
            .map_err(|_| Status::deadline_exceeded("the stream did not send its prompt in time"))??;
        let Some(Message::Prompt(prompt)) = first.and_then(|first| first.message) else {
            return Err(Status::invalid_argument("the first message of the stream must be its prompt"));
        };
        let traceparent = prompt.traceparent.clone();
        let (existing, request) = self.check(prompt)?;
        if self.shutdown.is_draining() {
            return Err(Status::unavailable(format!("{}; use another", texts::DRAINING)));
        }
        let mut booking = HeldBooking {
            cluster: self.cluster.clone(),
            tracer: self.settings.tracer.clone(),
            key: self.key.clone(),
            traceparent,
            prompt_tokens: request.prompt_tokens,
            request,
            excluded: Excluded::default(),
            attempts: 0,
            booking: None,
        };
        let first = match existing {
            Some(existing) => {
                booking.rebook(existing)?;
                None
            }
            None => {
                self.check_ready()?;
                Some(Ok(booking.place()))
            }
        };
        let route = Route { booking, requests, shutdown: self.shutdown.clone(), draining_announced: false };
        let later = stream::try_unfold(route, Route::next);
        Ok(Response::new(stream::iter(first).chain(later).boxed()))
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainReply>, Status> {
        let ExplainRequest { model, sequence_hashes, prompt_tokens, prompt_logits } = request.into_inner();
        let request_id = "explain".to_owned();
        let prompt =
            RoutePrompt { request_id, model, sequence_hashes, prompt_tokens, prompt_logits, samples: 1, ..Default::default() };
        let (_, request) = self.check(prompt)?;
        Ok(Response::new(self.cluster.lock().explain(&request)))
    }

    async fn workers(&self, _: Request<WorkersRequest>) -> Result<Response<WorkersReply>, Status> {
        let mut view = self.cluster.lock().view();
        if self.shutdown.is_draining() {
            view.unavailable_reason = Some(texts::DRAINING.to_owned());
        }
        Ok(Response::new(view))
    }

    type BookingsStream = Pin<Box<dyn Stream<Item = Result<BookingsReply, Status>> + Send>>;

    async fn bookings(&self, request: Request<BookingsRequest>) -> Result<Response<Self::BookingsStream>, Status> {
        self.check_identity("router", request.into_inner().identity)?;
        let (cluster, shutdown) = (self.cluster.clone(), self.shutdown.clone());
        let (router_instance_id, changes) = {
            let state = cluster.lock();
            (state.instance_id(), state.bookings.subscribe())
        };
        let sender = BookingSender { cluster, shutdown, router_instance_id, changes, known: None, messages: VecDeque::new() };
        Ok(Response::new(stream::unfold(sender, BookingSender::next).boxed()))
    }
}

impl RouterService {
    fn check_identity(&self, peer: &str, identity: Option<Identity>) -> Result<(), Status> {
        let fits = identity.map_or(Ok(()), |identity| identity.fits(&self.cluster.lock().identity()));
        fits.map_err(|difference| Status::failed_precondition(format!("the {peer} belongs to another cluster: {difference}")))
    }

    /// Refuses to place requests while peers know more of the workers' caches.
    fn check_ready(&self) -> Result<(), Status> {
        let state = self.cluster.lock();
        match state.unavailable_reason() {
            Some(reason) if self.has_peers && state.is_starting() => Err(Status::unavailable(reason)),
            _ => Ok(()),
        }
    }

    fn check(&self, prompt: RoutePrompt) -> Result<(Option<ExistingPlacement>, PlacementRequest), Status> {
        if prompt.request_id.is_empty() {
            return Err(Status::invalid_argument("`request_id` is missing"));
        }
        if [&prompt.request_id, &prompt.traceparent, &prompt.model].iter().any(|text| text.len() > TEXT_BYTES_MAX) {
            return Err(Status::invalid_argument(format!(
                "`request_id`, `traceparent` and `model` have at most {TEXT_BYTES_MAX} bytes"
            )));
        }
        if prompt.prompt_tokens == 0 {
            return Err(Status::invalid_argument("`prompt_tokens` is at least 1"));
        }
        if prompt.existing.as_ref().is_some_and(|existing| existing.decode_instance_id.is_empty()) {
            return Err(Status::invalid_argument("`existing.decode_instance_id` is missing"));
        }
        self.check_identity("frontend", prompt.identity)?;
        let hashes_max = self.settings.hashes_max;
        if prompt.sequence_hashes.len() > hashes_max {
            return Err(Status::invalid_argument(format!("`sequence_hashes` has at most {hashes_max} items")));
        }
        let request = PlacementRequest {
            request_id: prompt.request_id.into(),
            model: prompt.model,
            hashes: prompt.sequence_hashes.into_iter().map(SequenceHash).collect(),
            prompt_tokens: prompt.prompt_tokens,
            samples: prompt.samples,
            prompt_logits: prompt.prompt_logits,
        };
        Ok((prompt.existing, request))
    }
}

/// The stream of this router's bookings to one peer.
struct BookingSender {
    cluster: Arc<Cluster>,
    shutdown: Shutdown,
    router_instance_id: Arc<str>,
    changes: watch::Receiver<u64>,
    /// The last change that the peer knows; `None` before the full state.
    known: Option<u64>,
    /// Messages still to be sent.
    messages: VecDeque<PeerMessage>,
}

impl BookingSender {
    /// Returns the next message. Ends when the router drains: its bookings move to other routers then.
    async fn next(mut self) -> Option<(Result<BookingsReply, Status>, Self)> {
        if self.messages.is_empty() {
            if self.known.is_some() {
                tokio::select! {
                    biased;
                    () = self.shutdown.draining() => return None,
                    changed = timeout(HEARTBEAT_INTERVAL, self.changes.changed()) => if changed.is_ok() { sleep(BATCH_DELAY).await },
                }
            }
            let state = self.cluster.lock();
            self.changes.mark_unchanged();
            let (messages, last) = state.bookings.messages(self.known, &state.members);
            (self.messages, self.known) = (messages.into(), Some(last));
        }
        let message = self.messages.pop_front().expect("there is at least one message, perhaps without changes");
        Some((Ok(replication::encode(&self.router_instance_id, message)), self))
    }
}

/// A `Route` stream with its booking. Dropping it releases the booking.
struct Route {
    booking: HeldBooking,
    requests: Streaming<RouteRequest>,
    shutdown: Shutdown,
    draining_announced: bool,
}

impl Route {
    /// Returns the next reply; `None` when the frontend has closed the stream.
    async fn next(mut self) -> Result<Option<(RouteReply, Self)>, Status> {
        loop {
            let request = tokio::select! {
                biased;
                () = self.shutdown.draining(), if !self.draining_announced => {
                    self.draining_announced = true;
                    return Ok(Some((RouteReply { message: Some(route_reply::Message::Draining(Draining {})) }, self)));
                }
                () = self.shutdown.stopped() => return Err(Status::unavailable("the router has stopped")),
                request = self.requests.message() => request?,
            };
            let Some(request) = request else { return Ok(None) };
            match request.message {
                Some(Message::Failed(failed)) => {
                    self.booking.exclude(failed);
                    let reply = self.booking.place();
                    return Ok(Some((reply, self)));
                }
                Some(Message::PrefillFinished(finished)) => self.booking.on_first_token(finished.cached_tokens),
                Some(Message::Prompt(_)) => return Err(Status::invalid_argument("a stream places one prompt")),
                None => return Err(Status::invalid_argument("a message of the stream is empty")),
            }
        }
    }
}

/// Instances that one request may exclude: more than a cluster loses during the longest answer. Later ones are not excluded, and
/// the limit on attempts applies all the same.
const EXCLUDED_MAX: usize = 256;

/// A request with its booking, which is released on drop.
struct HeldBooking {
    cluster: Arc<Cluster>,
    tracer: Tracer,
    key: ClusterKey,
    traceparent: String,
    request: PlacementRequest,
    /// Tokens of the prompt alone; `request.prompt_tokens` includes tokens that failed attempts have generated.
    prompt_tokens: u32,
    /// Workers that must not be used again, at most [`EXCLUDED_MAX`].
    excluded: Excluded,
    /// Attempts since the last first token.
    attempts: u32,
    booking: Option<BookingId>,
}

impl HeldBooking {
    /// Places the request again, without its previous booking.
    fn place(&mut self) -> RouteReply {
        self.attempts = self.attempts.saturating_add(1);
        let span = self.tracer.follow(&self.traceparent, "route");
        let mut state = self.cluster.lock();
        if let Some(booking) = self.booking.take() {
            state.release(booking);
        }
        let message = match state.place(&self.request, &self.excluded, self.attempts) {
            Ok((booking, placement)) => {
                self.booking = Some(booking);
                drop(state);
                describe(&span, &placement);
                route_reply::Message::Placement(placement.with_signed_addresses(&self.key))
            }
            Err(error) => {
                tracing::debug!(request_id = %self.request.request_id, attempt = self.attempts, "request not placed: {error}");
                let failure = failure(error);
                span.fail(failure.reason().label());
                route_reply::Message::Failure(failure)
            }
        };
        RouteReply { message: Some(message) }
    }

    fn rebook(&mut self, existing: ExistingPlacement) -> Result<(), Status> {
        let booked = self.cluster.lock().rebook(&self.request, existing);
        self.booking = Some(booked.map_err(|error| Status::resource_exhausted(error.to_string()))?);
        Ok(())
    }

    /// Excludes the instance that has failed the attempt from the next ones.
    fn exclude(&mut self, failed: AttemptFailed) {
        self.request.prompt_tokens = self.prompt_tokens.saturating_add(failed.generated_tokens);
        if failed.instance_id.is_empty() || self.booking.is_none() || self.excluded.failed.len() >= EXCLUDED_MAX {
            return;
        }
        if let Some(booking) = self.booking {
            self.cluster.lock().on_failure(booking, &failed.instance_id, failed.reason());
        }
        if !matches!(failed.reason(), FailureReason::AtCapacity | FailureReason::Timeout | FailureReason::WriteRefused) {
            self.excluded.suspect.insert(failed.instance_id.clone());
        }
        self.excluded.failed.insert(failed.instance_id);
    }

    /// The attempt has produced its first token. If it fails later, that is a resume with a fresh number of attempts.
    fn on_first_token(&mut self, cached_tokens: Option<u32>) {
        self.attempts = 0;
        if let Some(booking) = self.booking {
            let mut state = self.cluster.lock();
            state.on_first_token(booking);
            state.on_prefilled(booking, cached_tokens);
        }
    }
}

impl Drop for HeldBooking {
    fn drop(&mut self) {
        if let Some(booking) = self.booking {
            self.cluster.lock().release(booking);
        }
    }
}

/// Sets the placement's attributes on its span.
fn describe(span: &Span, placement: &Placement) {
    if !span.is_sampled() {
        return;
    }
    for (key, candidate) in [("tandem.decode_worker", &placement.decode), ("tandem.prefill_worker", &placement.prefill)] {
        if let Some(worker) = candidate.as_ref().and_then(|candidate| candidate.worker.as_ref()) {
            span.set(key, worker.worker_id.clone());
        }
    }
    if let Some(computes) = placement.prefill.as_ref().or(placement.decode.as_ref()) {
        span.set("tandem.overlap_blocks", computes.overlap_blocks);
        span.set("tandem.predicted_blocks", computes.predicted_blocks);
    }
    span.set("tandem.block_size", placement.block_size);
}

/// The one table from placement errors to wire failures.
fn failure(error: PlacementError) -> Failure {
    let reason = match error {
        PlacementError::NoEligibleWorker(
            NoEligibleWorker::NoDecodeWorker | NoEligibleWorker::NoPrefillWorker | NoEligibleWorker::AllFailed,
        )
        | PlacementError::TooManyBookings
        | PlacementError::TooManyAttempts => FailureReason::AtCapacity,
        PlacementError::NoEligibleWorker(NoEligibleWorker::PromptTooLong) | PlacementError::OtherModel => {
            FailureReason::InvalidRequest
        }
    };
    Failure { reason: reason.into(), message: error.to_string(), instance_id: String::new() }
}
