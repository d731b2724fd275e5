//! The gRPC edge: a `Route` stream holds a booking, and lets go of it however it ends.

use crate::{
    booked::BookingId,
    cluster::{Asked, Cluster, Excluded, NotPlaced},
    exchange::{self, News},
    route::Unplaced,
    settings::RouterSettings,
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

/// Changes of bookings are gathered for so long before other routers hear of them: hundreds of requests a second cost no more
/// messages than this allows, and a burst of equal prompts is told of while its first is on its way to a worker.
const GATHER: Duration = Duration::from_millis(5);
/// Between two messages to a router when nothing changes.
const HEARTBEAT: Duration = Duration::from_secs(1);

/// The service.
pub(crate) struct RouterService {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) settings: RouterSettings,
    /// Vouches for the addresses of placements.
    pub(crate) key: ClusterKey,
    /// No other router is known: what this one refuses, nobody can place.
    pub(crate) alone: bool,
    pub(crate) shutdown: Shutdown,
}

#[tonic::async_trait]
impl Router for RouterService {
    type RouteStream = Pin<Box<dyn Stream<Item = Result<RouteReply, Status>> + Send>>;

    async fn route(&self, request: Request<Streaming<RouteRequest>>) -> Result<Response<Self::RouteStream>, Status> {
        let mut requests = request.into_inner();
        let first = timeout(self.settings.prompt_wait, requests.message())
            .await
            .map_err(|_| Status::deadline_exceeded("the stream did not bring its prompt in time"))??;
        let Some(Message::Prompt(prompt)) = first.and_then(|first| first.message) else {
            return Err(Status::invalid_argument("the first message of the stream is to be its prompt"));
        };
        let traceparent = prompt.traceparent.clone();
        let (existing, asked) = self.check(prompt)?;
        if self.shutdown.is_draining() {
            return Err(Status::unavailable("the router is leaving; ask another"));
        }
        let mut held = Held {
            cluster: self.cluster.clone(),
            tracer: self.settings.tracer.clone(),
            key: self.key.clone(),
            traceparent,
            prompt_tokens: asked.prompt_tokens,
            asked,
            excluded: Excluded::default(),
            attempts: 0,
            booking: None,
        };
        let first = match existing {
            Some(existing) => {
                held.rebook(existing)?;
                None
            }
            None => {
                self.may_place()?;
                Some(Ok(held.place()))
            }
        };
        let route = Route { held, requests, shutdown: self.shutdown.clone(), leaving_told: false };
        let later = stream::try_unfold(route, Route::next);
        Ok(Response::new(stream::iter(first).chain(later).boxed()))
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<Response<ExplainReply>, Status> {
        let ExplainRequest { model, sequence_hashes, prompt_tokens, prompt_logits } = request.into_inner();
        let request_id = "explain".to_owned();
        let prompt =
            RoutePrompt { request_id, model, sequence_hashes, prompt_tokens, prompt_logits, samples: 1, ..Default::default() };
        let (_, asked) = self.check(prompt)?;
        Ok(Response::new(self.cluster.lock().explain(&asked)))
    }

    async fn workers(&self, _: Request<WorkersRequest>) -> Result<Response<WorkersReply>, Status> {
        let mut view = self.cluster.lock().view();
        if self.shutdown.is_draining() {
            view.unavailable_reason = Some("the router is leaving".to_owned());
        }
        Ok(Response::new(view))
    }

    type BookingsStream = Pin<Box<dyn Stream<Item = Result<BookingsReply, Status>> + Send>>;

    async fn bookings(&self, request: Request<BookingsRequest>) -> Result<Response<Self::BookingsStream>, Status> {
        self.belongs("router", request.into_inner().identity)?;
        let (cluster, shutdown) = (self.cluster.clone(), self.shutdown.clone());
        let (router_instance_id, changes) = {
            let state = cluster.lock();
            (state.instance_id(), state.changes())
        };
        let teller = Teller { cluster, shutdown, router_instance_id, changes, known: None, news: VecDeque::new() };
        Ok(Response::new(stream::unfold(teller, Teller::next).boxed()))
    }
}

impl RouterService {
    fn belongs(&self, who: &str, identity: Option<Identity>) -> Result<(), Status> {
        let fits = identity.map_or(Ok(()), |identity| identity.fits(&self.cluster.lock().identity()));
        fits.map_err(|difference| Status::failed_precondition(format!("the {who} is not of this cluster: {difference}")))
    }

    /// Fails while others know more of the workers' caches.
    fn may_place(&self) -> Result<(), Status> {
        let state = self.cluster.lock();
        match state.unready() {
            Some(why) if !self.alone && state.is_joining() => Err(Status::unavailable(why)),
            _ => Ok(()),
        }
    }

    fn check(&self, prompt: RoutePrompt) -> Result<(Option<ExistingPlacement>, Asked), Status> {
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
        self.belongs("frontend", prompt.identity)?;
        let hashes_max = self.settings.hashes_max;
        if prompt.sequence_hashes.len() > hashes_max {
            return Err(Status::invalid_argument(format!("`sequence_hashes` has at most {hashes_max} items")));
        }
        let asked = Asked {
            request_id: prompt.request_id.into(),
            model: prompt.model,
            hashes: prompt.sequence_hashes.into_iter().map(SequenceHash).collect(),
            prompt_tokens: prompt.prompt_tokens,
            samples: prompt.samples,
            prompt_logits: prompt.prompt_logits,
        };
        Ok((prompt.existing, asked))
    }
}

/// One router's stream of this one's bookings.
struct Teller {
    cluster: Arc<Cluster>,
    shutdown: Shutdown,
    router_instance_id: Arc<str>,
    changes: watch::Receiver<u64>,
    /// The last change it knows; `None` before the full state.
    known: Option<u64>,
    /// Still to be sent: what one look at the bookings makes.
    news: VecDeque<News>,
}

impl Teller {
    /// Ends when the router drains: what it has booked moves to others then.
    async fn next(mut self) -> Option<(Result<BookingsReply, Status>, Self)> {
        if self.news.is_empty() {
            if self.known.is_some() {
                tokio::select! {
                    biased;
                    () = self.shutdown.draining() => return None,
                    changed = timeout(HEARTBEAT, self.changes.changed()) => if changed.is_ok() { sleep(GATHER).await },
                }
            }
            let state = self.cluster.lock();
            self.changes.mark_unchanged();
            let (news, last) = state.news(self.known);
            (self.news, self.known) = (news.into(), Some(last));
        }
        let news = self.news.pop_front().expect("a look at the bookings makes a message");
        Some((Ok(exchange::encode(&self.router_instance_id, news)), self))
    }
}

/// A stream and what it holds. Whoever drops it, for whatever reason, drops the booking.
struct Route {
    held: Held,
    requests: Streaming<RouteRequest>,
    shutdown: Shutdown,
    leaving_told: bool,
}

impl Route {
    /// The next reply, when there is one to give; `None` when the frontend has closed the stream.
    async fn next(mut self) -> Result<Option<(RouteReply, Self)>, Status> {
        loop {
            let request = tokio::select! {
                biased;
                () = self.shutdown.draining(), if !self.leaving_told => {
                    self.leaving_told = true;
                    return Ok(Some((RouteReply { message: Some(route_reply::Message::Draining(Draining {})) }, self)));
                }
                () = self.shutdown.stopped() => return Err(Status::unavailable("the router has stopped")),
                request = self.requests.message() => request?,
            };
            let Some(request) = request else { return Ok(None) };
            match request.message {
                Some(Message::Failed(failed)) => {
                    self.held.exclude(failed);
                    let reply = self.held.place();
                    return Ok(Some((reply, self)));
                }
                Some(Message::PrefillFinished(released)) => self.held.release_prefill(released.cached_tokens),
                Some(Message::Prompt(_)) => return Err(Status::invalid_argument("a stream places one prompt")),
                None => return Err(Status::invalid_argument("a message of the stream is empty")),
            }
        }
    }
}

/// Instances one request may leave out: more than a cluster loses during the longest answer. Later ones are not left out, and
/// the bound on attempts holds all the same.
const EXCLUDED_MAX: usize = 256;

/// A request with its booking.
struct Held {
    cluster: Arc<Cluster>,
    tracer: Tracer,
    key: ClusterKey,
    traceparent: String,
    asked: Asked,
    /// Of the prompt alone.
    prompt_tokens: u32,
    /// At most [`EXCLUDED_MAX`].
    excluded: Excluded,
    /// Since the last first token.
    attempts: u32,
    booking: Option<BookingId>,
}

impl Held {
    fn place(&mut self) -> RouteReply {
        self.attempts = self.attempts.saturating_add(1);
        let span = self.tracer.follow(&self.traceparent, "route");
        let mut state = self.cluster.lock();
        if let Some(booking) = self.booking.take() {
            state.release(booking);
        }
        let message = match state.place(&self.asked, &self.excluded, self.attempts) {
            Ok((booking, placement)) => {
                self.booking = Some(booking);
                drop(state);
                describe(&span, &placement);
                route_reply::Message::Placement(placement.vouched(&self.key))
            }
            Err(not_placed) => {
                tracing::debug!(request_id = %self.asked.request_id, attempt = self.attempts, "not placed: {not_placed}");
                let failure = failure(not_placed);
                span.fail(failure.reason().label());
                route_reply::Message::Failure(failure)
            }
        };
        RouteReply { message: Some(message) }
    }

    fn rebook(&mut self, existing: ExistingPlacement) -> Result<(), Status> {
        let booked = self.cluster.lock().rebook(&self.asked, existing);
        self.booking = Some(booked.map_err(|refused| Status::resource_exhausted(refused.to_string()))?);
        Ok(())
    }

    fn exclude(&mut self, failed: AttemptFailed) {
        self.asked.prompt_tokens = self.prompt_tokens.saturating_add(failed.generated_tokens);
        if failed.instance_id.is_empty() || self.booking.is_none() || self.excluded.failed.len() >= EXCLUDED_MAX {
            return;
        }
        if let Some(booking) = self.booking {
            self.cluster.lock().failed(booking, &failed.instance_id, failed.reason());
        }
        if !matches!(failed.reason(), FailureReason::AtCapacity | FailureReason::Timeout | FailureReason::WriteRefused) {
            self.excluded.lost.insert(failed.instance_id.clone());
        }
        self.excluded.failed.insert(failed.instance_id);
    }

    /// The attempt has brought a token: what may fail from now on is another attempt's, with as many tries.
    fn release_prefill(&mut self, cached_tokens: Option<u32>) {
        self.attempts = 0;
        if let Some(booking) = self.booking {
            let mut state = self.cluster.lock();
            state.worked(booking);
            state.release_prefill(booking, cached_tokens);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(booking) = self.booking {
            self.cluster.lock().release(booking);
        }
    }
}

/// Where it goes, and how much of it is there.
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

/// The one table from why a request is not placed to what the frontend hears.
fn failure(not_placed: NotPlaced) -> Failure {
    let reason = match not_placed {
        NotPlaced::Unplaced(Unplaced::NoDecode | Unplaced::NoPrefill | Unplaced::AllFailed)
        | NotPlaced::TooManyBookings
        | NotPlaced::TooManyAttempts => FailureReason::AtCapacity,
        NotPlaced::Unplaced(Unplaced::TooLong) | NotPlaced::OtherModel => FailureReason::InvalidRequest,
    };
    Failure { reason: reason.into(), message: not_placed.to_string(), instance_id: String::new() }
}
