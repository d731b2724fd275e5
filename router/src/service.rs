//! The gRPC service: a `Route` stream owns a booking, which is released however the stream ends.

use crate::{
    cluster::{Cluster, Excluded, Placed, PlacementError, PlacementRequest, texts},
    route::NoEligibleWorker,
    worker_bookings::BookingId,
};
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use std::{collections::VecDeque, sync::Arc, time::Duration};
use tandem_kv::SequenceHash;
use tandem_process::{Shutdown, discovery::MemberSource, trace::Span};
use tandem_proto::{
    ClusterKey, TEXT_BYTES_MAX, unknown_message,
    v1::{
        AttemptFailed, BookingsReply, BookingsRequest, Draining, ExistingPlacement, ExplainReply, ExplainRequest, Failure,
        FailureReason, Identity, Placement, RoutePrompt, RouteReply, RouteRequest, WorkersReply, WorkersRequest, bookings_reply,
        route_reply, route_request::Message, router_server::Router,
    },
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

/// How long changes of bookings are collected before they are sent to peers. The delay bounds the messages per second at any load. It is
/// short enough that a burst of equal prompts is announced before the first of them has reached a worker.
const BATCH_DELAY: Duration = Duration::from_millis(5);
/// Interval of messages to a peer while nothing changes.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// For this time after its start, a router without peers places no request while listed workers have not answered. Workers answer within
/// milliseconds, and a request placed without them could not use what they have cached. This is half of the time for which frontends wait.
const ALONE_WAIT: Duration = Duration::from_secs(1);

/// The gRPC service `Router`. Cheap to clone.
#[derive(Clone)]
pub(crate) struct RouterService {
    pub(crate) cluster: Arc<Cluster>,
    /// The key with which the addresses in placements are signed.
    pub(crate) key: ClusterKey,
    /// The time at which the router started.
    pub(crate) since: Instant,
    pub(crate) shutdown: Shutdown,
    /// Cancelled when this router drains and is connected to no other router that could book its requests.
    pub(crate) released: CancellationToken,
}

#[tonic::async_trait]
impl Router for RouterService {
    type RouteStream = BoxStream<'static, Result<RouteReply, Status>>;

    async fn route(&self, request: Request<Streaming<RouteRequest>>) -> Result<Response<Self::RouteStream>, Status> {
        let mut requests = request.into_inner();
        let first = timeout(self.cluster.settings.prompt_wait, requests.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no prompt arrived on the stream in time"))??;
        let Some(Message::Prompt(prompt)) = first.and_then(|first| first.message) else {
            return Err(Status::invalid_argument("the first message of the stream must be its prompt"));
        };
        let traceparent = prompt.traceparent.clone();
        let (existing, request) = self.check(prompt)?;
        if self.shutdown.is_draining() {
            return Err(FailureReason::Draining.refusal(texts::DRAINING));
        }
        let mut route = Route {
            service: self.clone(),
            requests,
            draining_announced: false,
            traceparent,
            prompt_tokens: request.prompt_tokens,
            max_wait: request.max_wait,
            has_waited: false,
            request,
            excluded: Excluded::default(),
            attempts: 0,
            booking: None,
        };
        let first = match existing {
            Some(existing) => {
                route.rebook(existing)?;
                None
            }
            None => {
                self.check_ready()?;
                let reply = route.place();
                self.check_started(&reply)?;
                Some(Ok(reply))
            }
        };
        let later = stream::try_unfold(route, Route::next);
        Ok(Response::new(stream::iter(first).chain(later).boxed()))
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainReply>, Status> {
        let ExplainRequest { model, sequence_hashes, prompt_tokens, prompt_logits, max_tokens, samples, has_images, endpoints } =
            request.into_inner();
        let prompt = RoutePrompt {
            request_id: "explain".to_owned(),
            model,
            sequence_hashes,
            prompt_tokens,
            max_tokens,
            samples,
            prompt_logits,
            has_images,
            endpoints,
            ..Default::default()
        };
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

    type BookingsStream = BoxStream<'static, Result<BookingsReply, Status>>;

    async fn bookings(&self, request: Request<BookingsRequest>) -> Result<Response<Self::BookingsStream>, Status> {
        self.check_identity("router", request.into_inner().identity)?;
        let (router_instance_id, changes) = {
            let state = self.cluster.lock();
            (state.instance_id.to_string(), state.bookings.subscribe())
        };
        let messages = VecDeque::new();
        let sender = BookingSender { service: self.clone(), router_instance_id, changes, known: None, messages };
        Ok(Response::new(stream::unfold(sender, BookingSender::next).boxed()))
    }
}

impl RouterService {
    fn check_identity(&self, peer: &str, identity: Option<Identity>) -> Result<(), Status> {
        let fits = identity.map_or(Ok(()), |identity| identity.fits(&self.cluster.lock().identity_of(&identity.model)));
        fits.map_err(|difference| Status::failed_precondition(format!("the {peer} belongs to another cluster: {difference}")))
    }

    /// Refuses to place requests while this router is starting, because it does not know all workers' caches yet. A router without peers
    /// refuses them for [`ALONE_WAIT`] at most, because no other router could place them.
    fn check_ready(&self) -> Result<(), Status> {
        let is_alone = matches!(&self.cluster.settings.peers, MemberSource::List(list) if list.is_empty());
        match self.cluster.lock().starting_reason() {
            Some(reason) if !is_alone || self.since.elapsed() < ALONE_WAIT => Err(FailureReason::Starting.refusal(reason)),
            _ => Ok(()),
        }
    }

    /// Refuses a request that could not be placed because its worker has not joined yet.
    fn check_started(&self, reply: &RouteReply) -> Result<(), Status> {
        let lacks_worker =
            matches!(&reply.message, Some(route_reply::Message::Failure(failure)) if failure.reason() == FailureReason::NoWorker);
        match self.cluster.lock().starting_reason() {
            Some(reason) if lacks_worker => Err(FailureReason::Starting.refusal(reason)),
            _ => Ok(()),
        }
    }

    fn check(&self, prompt: RoutePrompt) -> Result<(Option<ExistingPlacement>, PlacementRequest), Status> {
        if prompt.request_id.is_empty() {
            return Err(Status::invalid_argument("`request_id` is missing"));
        }
        let texts = [&prompt.request_id, &prompt.traceparent, &prompt.model, &prompt.account];
        if texts.iter().any(|text| text.len() > TEXT_BYTES_MAX) {
            return Err(Status::invalid_argument(format!(
                "`request_id`, `traceparent`, `model` and `account` may have at most {TEXT_BYTES_MAX} bytes each"
            )));
        }
        if prompt.prompt_tokens == 0 {
            return Err(Status::invalid_argument("`prompt_tokens` must be at least 1"));
        }
        if prompt.existing.as_ref().is_some_and(|existing| existing.decode_instance_id.is_empty()) {
            return Err(Status::invalid_argument("`existing.decode_instance_id` is missing"));
        }
        self.check_identity("frontend", prompt.identity)?;
        let hashes_max = self.cluster.settings.hashes_max;
        if prompt.sequence_hashes.len() > hashes_max {
            return Err(Status::invalid_argument(format!("`sequence_hashes` may have at most {hashes_max} items")));
        }
        let request = PlacementRequest {
            request_id: prompt.request_id.into(),
            model: prompt.model,
            hashes: prompt.sequence_hashes.into_iter().map(SequenceHash).collect(),
            prompt_tokens: prompt.prompt_tokens,
            samples: prompt.samples,
            min_tokens: prompt.min_tokens,
            max_tokens: prompt.max_tokens,
            prompt_logits: prompt.prompt_logits,
            has_images: prompt.has_images,
            account: prompt.account.into(),
            priority: prompt.priority.unwrap_or_default().into(),
            max_wait: (prompt.max_wait_ms > 0).then(|| Duration::from_millis(prompt.max_wait_ms.into())),
            equal_prompt: prompt.equal_prompt,
            other_namespace_blocks: prompt.other_namespace_blocks,
            endpoints: prompt.endpoints.map(|mut wanted| {
                wanted.listed.sort_unstable();
                wanted
            }),
        };
        Ok((prompt.existing, request))
    }
}

/// The state of a `Bookings` stream, on which this router sends its bookings to one peer.
struct BookingSender {
    service: RouterService,
    router_instance_id: String,
    changes: watch::Receiver<u64>,
    /// The number of the last change that the peer knows; `None` before the full state.
    known: Option<u64>,
    /// Messages still to be sent.
    messages: VecDeque<bookings_reply::Message>,
}

impl BookingSender {
    /// Returns the next message; `None` when the router drains, because its bookings then move to other routers.
    async fn next(mut self) -> Option<(Result<BookingsReply, Status>, Self)> {
        if self.messages.is_empty() {
            if self.known.is_some() {
                tokio::select! {
                    biased;
                    () = self.service.shutdown.draining() => return None,
                    changed = timeout(HEARTBEAT_INTERVAL, self.changes.changed()) => if changed.is_ok() { sleep(BATCH_DELAY).await },
                }
            }
            let state = self.service.cluster.lock();
            self.changes.mark_unchanged();
            let (messages, last) = state.bookings.messages(self.known, &state.members);
            (self.messages, self.known) = (messages.into(), Some(last));
        }
        let message = self.messages.pop_front();
        Some((Ok(BookingsReply { router_instance_id: self.router_instance_id.clone(), message }), self))
    }
}

/// The most instances that one request may exclude: more than a cluster loses during the longest answer. Further failed instances are not
/// excluded, but the limit on attempts still applies.
const EXCLUDED_MAX: usize = 256;

/// A `Route` stream with its booking. Dropping it releases the booking.
struct Route {
    service: RouterService,
    requests: Streaming<RouteRequest>,
    draining_announced: bool,
    traceparent: String,
    /// The request. Its `max_wait` is removed when it is placed, because only the first placement may be refused for its wait.
    request: PlacementRequest,
    /// The request's original limit on the wait in the queue.
    max_wait: Option<Duration>,
    /// Whether the request has waited in the queue for its whole limit, and has been placed again.
    has_waited: bool,
    /// Tokens in the client's prompt. `request.prompt_tokens` also includes the tokens that failed attempts have generated.
    prompt_tokens: u32,
    /// Instances that have failed the request, at most [`EXCLUDED_MAX`].
    excluded: Excluded,
    /// Attempts since the request's latest first token.
    attempts: u32,
    booking: Option<BookingId>,
}

impl Route {
    /// Returns the next reply; `None` when the frontend has closed the stream, or when no router can take over the booking.
    async fn next(mut self) -> Result<Option<(RouteReply, Self)>, Status> {
        loop {
            let request = tokio::select! {
                biased;
                () = self.service.shutdown.draining(), if !self.draining_announced => {
                    self.draining_announced = true;
                    return Ok(Some((RouteReply { message: Some(route_reply::Message::Draining(Draining {})) }, self)));
                }
                () = self.service.shutdown.stopped() => return Err(FailureReason::Draining.refusal("the router has stopped")),
                request = self.requests.message() => request?,
                () = self.service.released.cancelled() => return Ok(None),
            };
            let Some(request) = request else { return Ok(None) };
            match request.message {
                Some(Message::Failed(failed)) => {
                    let has_waited = failed.reason() == FailureReason::Overloaded;
                    self.exclude(failed);
                    let reply = if has_waited { self.place_at_once() } else { self.place() };
                    return Ok(Some((reply, self)));
                }
                Some(Message::PrefillFinished(finished)) => self.on_first_token(finished.cached_tokens),
                Some(Message::AnswerFinished(finished)) => {
                    if let Some(booking) = self.booking {
                        self.service.cluster.lock().on_answered(booking, finished.generated_tokens);
                    }
                }
                Some(Message::Prompt(_)) => return Err(Status::invalid_argument("a stream may have only one prompt")),
                None => unknown_message("Route"),
            }
        }
    }

    /// Places the request. Its previous booking, if any, is released first, so that the booking's load adds no cost.
    fn place(&mut self) -> RouteReply {
        self.attempts = self.attempts.saturating_add(1);
        let mut state = self.service.cluster.lock();
        if let Some(booking) = self.booking.take() {
            state.release(booking);
        }
        let placed = state.place(&self.request, &self.excluded, self.attempts);
        drop(state);
        self.reply(placed)
    }

    /// Places a request that has waited in the queue for its whole limit again, on a worker with a short wait, but only once; otherwise
    /// refuses it.
    fn place_at_once(&mut self) -> RouteReply {
        self.attempts = self.attempts.saturating_add(1);
        let mut state = self.service.cluster.lock();
        if let Some(booking) = self.booking.take() {
            state.release(booking);
        }
        let again = (!std::mem::replace(&mut self.has_waited, true)).then_some((&self.excluded, self.attempts));
        let placed = state.place_at_once(&self.request, again, self.max_wait);
        drop(state);
        self.reply(placed)
    }

    fn reply(&mut self, placed: Result<Placed, PlacementError>) -> RouteReply {
        let span = self.service.cluster.settings.tracer.follow(&self.traceparent, "route");
        let message = match placed {
            Ok((booking, placement)) => {
                self.booking = Some(booking);
                self.request.max_wait = None;
                describe(&span, &placement);
                route_reply::Message::Placement(placement.with_signed_addresses(&self.service.key))
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
        let booked = self.service.cluster.lock().rebook(&self.request, existing);
        self.booking = Some(booked.map_err(|error| Status::resource_exhausted(error.to_string()))?);
        self.request.max_wait = None;
        Ok(())
    }

    /// Excludes the instance that has failed this attempt from further attempts.
    fn exclude(&mut self, failed: AttemptFailed) {
        self.request.prompt_tokens = self.prompt_tokens.saturating_add(failed.generated_tokens);
        let Some(booking) = self.booking else { return };
        if failed.instance_id.is_empty() || self.excluded.failed.len() >= EXCLUDED_MAX {
            return;
        }
        self.service.cluster.lock().on_failure(booking, &failed.instance_id, failed.reason());
        if !matches!(failed.reason(), FailureReason::AtCapacity | FailureReason::Timeout | FailureReason::WriteRefused) {
            self.excluded.suspect.insert(failed.instance_id.as_str().into());
        }
        self.excluded.failed.insert(failed.instance_id.into());
    }

    /// Records that the attempt has produced its first token. If it fails later, the request is resumed, and its attempts are counted from
    /// 0 again.
    fn on_first_token(&mut self, cached_tokens: Option<u32>) {
        self.attempts = 0;
        if let Some(booking) = self.booking {
            let mut state = self.service.cluster.lock();
            state.on_first_token(booking);
            state.on_prefilled(booking, cached_tokens);
        }
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        if let Some(booking) = self.booking {
            self.service.cluster.lock().release(booking);
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

fn failure(error: PlacementError) -> Failure {
    let reason = match error {
        PlacementError::NoEligibleWorker(
            NoEligibleWorker::NoDecodeWorker
            | NoEligibleWorker::NoPrefillWorker
            | NoEligibleWorker::NoCommonFamily
            | NoEligibleWorker::NoPartner
            | NoEligibleWorker::AllFailed,
        )
        | PlacementError::NoWorkerOfModel
        | PlacementError::TooManyAttempts => FailureReason::NoWorker,
        PlacementError::TooManyBookings => FailureReason::AtCapacity,
        PlacementError::NoEligibleWorker(NoEligibleWorker::PromptTooLong | NoEligibleWorker::NoPromptLogprobs)
        | PlacementError::NoModelNamed => FailureReason::InvalidRequest,
        PlacementError::Overloaded { .. } => FailureReason::Overloaded,
    };
    let retry_after_ms = match error {
        PlacementError::Overloaded { retry_after } => u32::try_from(retry_after.as_millis()).unwrap_or(u32::MAX).max(1),
        _ => 0,
    };
    Failure { reason: reason.into(), message: error.to_string(), instance_id: String::new(), retry_after_ms }
}
