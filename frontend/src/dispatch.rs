//! Where a prompt goes: asks the router, opens the decode worker's stream, and tries elsewhere while no token has come.

use crate::{error::reason_label, metrics::FrontendMetrics};
use std::{sync::Arc, time::Duration};
use tandem_kv::{Namespace, TokenId};
use tandem_proto::{
    link::{Channels, InvalidAddress, MESSAGE_BYTES_MAX, endpoint},
    v1::{
        AttemptFailed, Candidate, ExplainReply, ExplainRequest, Failure, GenerateReply, GenerateRequest, Placement,
        PrefillReleased, Reason, RoutePrompt, RouteReply, RouteRequest, Sampling, Scheduled, Started, WorkersReply,
        WorkersRequest, decode_client::DecodeClient, generate_reply, route_reply, route_request, router_client::RouterClient,
    },
};
use tokio::{sync::mpsc, time::Instant};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming, transport::Channel};

/// How long the end of an answer may wait for the router to have heard all of it.
const ROUTE_CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a question about the cluster's state may take.
const WORKERS_TIMEOUT: Duration = Duration::from_secs(2);

/// Why a prompt got no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DispatchError {
    /// The request can never run here.
    #[error("The request cannot run here: {message}. Lower n or max_tokens, or shorten the prompt.")]
    Refused { message: String },
    #[error("No worker can take the request now ({}); try again shortly.", reason_label(*.reason))]
    NoWorker { reason: Reason },
    #[error("The router cannot be reached; try again shortly.")]
    Router(#[source] Box<Status>),
    #[error("The router went away before it placed the request; try again shortly.")]
    RouterClosed,
    #[error("The request failed {attempts} times before its first token (last: {}); try again shortly.", reason_label(*.reason))]
    Attempts { attempts: u32, reason: Reason },
    #[error("The first token did not come within {} seconds; try again later.", .limit.as_secs_f64())]
    Timeout { limit: Duration },
    #[error("The worker was lost while it generated ({}); send the request again.", reason_label(*.reason))]
    Lost { reason: Reason },
    #[error("This server is shutting down; send the request again.")]
    Stopped,
}

/// One prompt, ready to be placed.
pub(crate) struct Prompt {
    /// Ours, never the client's.
    pub(crate) request_id: String,
    pub(crate) traceparent: String,
    pub(crate) model: String,
    pub(crate) tokens: Vec<TokenId>,
    pub(crate) sequence_hashes: Vec<u64>,
    pub(crate) namespace: Namespace,
    pub(crate) sampling: Sampling,
    pub(crate) samples: u32,
    /// New tokens at most, for the router's estimate.
    pub(crate) max_tokens: u32,
    pub(crate) prompt_logprobs: Option<u32>,
}

/// What is known when the first token is there: of the attempt that led to it. Never changes afterwards.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) placement: Placement,
    pub(crate) scheduled: Option<Scheduled>,
    pub(crate) started: Started,
    pub(crate) first_token_at: Instant,
}

/// A running generation: the attempt that brought the first token, with both its streams. Dropping it closes them, which ends
/// the request on the workers and gives the booking back.
pub(crate) struct Attempt {
    pub(crate) facts: Facts,
    first: Option<generate_reply::Message>,
    replies: Streaming<GenerateReply>,
    route: Route,
}

/// The held `Route` stream.
struct Route {
    requests: mpsc::Sender<RouteRequest>,
    replies: Streaming<RouteReply>,
}

/// An attempt that ended before its first token.
struct Failed {
    /// The instance to leave out.
    instance_id: String,
    reason: Reason,
    /// For the client if the reason is that the request is invalid.
    message: String,
}

/// Connections to the router and the decode workers.
pub(crate) struct Dispatcher {
    router: RouterClient<Channel>,
    decoders: Channels,
    attempts: u32,
    first_token_timeout: Duration,
    metrics: Arc<FrontendMetrics>,
}

impl Dispatcher {
    /// Connects when it is first used.
    pub(crate) fn new(
        router: &str,
        attempts: u32,
        first_token_timeout: Duration,
        metrics: Arc<FrontendMetrics>,
    ) -> Result<Self, InvalidAddress> {
        let router = RouterClient::new(endpoint(router)?.connect_lazy());
        Ok(Self { router, decoders: Channels::default(), attempts: attempts.max(1), first_token_timeout, metrics })
    }

    /// The router's view of the cluster.
    pub(crate) async fn workers(&self) -> Result<WorkersReply, DispatchError> {
        let mut router = self.router.clone();
        match tokio::time::timeout(WORKERS_TIMEOUT, router.workers(WorkersRequest {})).await {
            Ok(reply) => Ok(reply.map_err(|status| DispatchError::Router(Box::new(status)))?.into_inner()),
            Err(_) => Err(DispatchError::Timeout { limit: WORKERS_TIMEOUT }),
        }
    }

    /// Where the router would place the prompt now, and why.
    pub(crate) async fn explain(&self, prompt: &Prompt) -> Result<ExplainReply, DispatchError> {
        let request = ExplainRequest {
            model: prompt.model.clone(),
            sequence_hashes: prompt.sequence_hashes.clone(),
            prompt_tokens: prompt.tokens.len() as u32,
            prompt_logits: prompt.prompt_logprobs.is_some(),
        };
        let mut router = self.router.clone();
        match tokio::time::timeout(WORKERS_TIMEOUT, router.explain(request)).await {
            Ok(reply) => Ok(reply.map_err(|status| DispatchError::Router(Box::new(status)))?.into_inner()),
            Err(_) => Err(DispatchError::Timeout { limit: WORKERS_TIMEOUT }),
        }
    }

    /// Places the prompt and waits for its first token; tries other placements while there is none. Cancel-safe: dropping
    /// the future closes all streams.
    pub(crate) async fn start(&self, prompt: &Prompt) -> Result<Attempt, DispatchError> {
        let limit = self.first_token_timeout;
        tokio::time::timeout(limit, self.attempt_until_started(prompt)).await.unwrap_or(Err(DispatchError::Timeout { limit }))
    }

    async fn attempt_until_started(&self, prompt: &Prompt) -> Result<Attempt, DispatchError> {
        let mut route = self.open_route(prompt).await?;
        let mut number = 1;
        loop {
            let placement = route.placement().await?;
            let failed = match self.attempt(prompt, placement, number).await {
                Ok((facts, first, replies)) => {
                    let cached_tokens = facts.scheduled.as_ref().and_then(|scheduled| scheduled.cached_tokens);
                    route.tell(route_request::Message::PrefillReleased(PrefillReleased { cached_tokens })).await;
                    return Ok(Attempt { facts, first: Some(first), replies, route });
                }
                Err(failed) => failed,
            };
            self.metrics.attempt_failed(failed.reason);
            let request_id = &prompt.request_id;
            tracing::debug!(%request_id, number, reason = reason_label(failed.reason), instance = %failed.instance_id, "attempt failed");
            if failed.reason == Reason::Invalid {
                return Err(DispatchError::Refused { message: failed.message });
            }
            if number >= self.attempts {
                return Err(DispatchError::Attempts { attempts: number, reason: failed.reason });
            }
            number += 1;
            let failed = AttemptFailed { instance_id: failed.instance_id, reason: failed.reason.into() };
            route.tell(route_request::Message::Failed(failed)).await;
        }
    }

    async fn open_route(&self, prompt: &Prompt) -> Result<Route, DispatchError> {
        // Room for all one request can say: its prompt, a failure an attempt, the release.
        let (requests, outgoing) = mpsc::channel(self.attempts as usize + 2);
        let first = RoutePrompt {
            request_id: prompt.request_id.clone(),
            traceparent: prompt.traceparent.clone(),
            model: prompt.model.clone(),
            sequence_hashes: prompt.sequence_hashes.clone(),
            prompt_tokens: prompt.tokens.len() as u32,
            max_tokens: prompt.max_tokens,
            samples: prompt.samples,
            prompt_logits: prompt.prompt_logprobs.is_some(),
        };
        let message = Some(route_request::Message::Prompt(first));
        requests.send(RouteRequest { message }).await.map_err(|_| DispatchError::RouterClosed)?;
        let replies = self.router.clone().route(ReceiverStream::new(outgoing)).await;
        let replies = replies.map_err(|status| DispatchError::Router(Box::new(status)))?.into_inner();
        Ok(Route { requests, replies })
    }

    async fn attempt(
        &self,
        prompt: &Prompt,
        placement: Placement,
        number: u32,
    ) -> Result<(Facts, generate_reply::Message, Streaming<GenerateReply>), Failed> {
        let decode = placement.decode.as_ref().and_then(|candidate| candidate.worker.as_ref());
        let Some(decode) = decode else {
            return Err(Failed { instance_id: String::new(), reason: Reason::Unspecified, message: String::new() });
        };
        let instance_id = decode.instance_id.clone();
        let unreachable = || Failed { instance_id: instance_id.clone(), reason: Reason::Unspecified, message: String::new() };
        let request = GenerateRequest {
            request_id: prompt.request_id.clone(),
            traceparent: prompt.traceparent.clone(),
            attempt: number,
            instance_id: instance_id.clone(),
            prompt: prompt.tokens.clone(),
            cache_namespace: prompt.namespace.as_bytes().to_vec(),
            sampling: Some(prompt.sampling.clone()),
            samples: prompt.samples,
            prefill: placement.prefill.as_ref().and_then(|candidate: &Candidate| candidate.worker.clone()),
            prompt_logprobs: prompt.prompt_logprobs,
        };
        let channel = self.decoders.to(&decode.address).map_err(|_: InvalidAddress| unreachable())?;
        let mut client = DecodeClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let failed = |status: Status| failed_by(&status, &instance_id);
        let mut replies = client.generate(request).await.map_err(failed)?.into_inner();
        let (mut scheduled, mut started) = (None, None);
        loop {
            match replies.message().await.map_err(failed)?.and_then(|reply| reply.message) {
                Some(generate_reply::Message::Scheduled(message)) => scheduled = Some(message),
                Some(generate_reply::Message::Started(message)) => started = Some(message),
                Some(generate_reply::Message::Failure(failure)) => return Err(Failed::by_worker(failure, &instance_id)),
                Some(
                    first @ (generate_reply::Message::PromptLogprobs(_)
                    | generate_reply::Message::Tokens(_)
                    | generate_reply::Message::Finished(_)),
                ) => {
                    let started = started.unwrap_or_default();
                    let facts = Facts { placement, scheduled, started, first_token_at: Instant::now() };
                    return Ok((facts, first, replies));
                }
                None => return Err(unreachable()),
            }
        }
    }
}

impl Route {
    async fn placement(&mut self) -> Result<Placement, DispatchError> {
        let reply = self.replies.message().await.map_err(|status| DispatchError::Router(Box::new(status)))?;
        match reply.ok_or(DispatchError::RouterClosed)?.message {
            Some(route_reply::Message::Placement(placement)) => Ok(placement),
            Some(route_reply::Message::Failure(failure)) => match failure.reason() {
                Reason::Invalid => Err(DispatchError::Refused { message: failure.message }),
                reason => Err(DispatchError::NoWorker { reason }),
            },
            None => Err(DispatchError::RouterClosed),
        }
    }

    /// A router that is gone hears nothing; what waits for its answer notices.
    async fn tell(&self, message: route_request::Message) {
        self.requests.send(RouteRequest { message: Some(message) }).await.ok();
    }
}

impl Attempt {
    /// The next reply; `None` when the worker has said all.
    pub(crate) async fn next(&mut self) -> Result<Option<generate_reply::Message>, DispatchError> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first));
        }
        let reply = self.replies.message().await.map_err(|status| DispatchError::Lost { reason: reason_of(&status) })?;
        Ok(reply.and_then(|reply| reply.message))
    }

    /// The answer is whole: lets go of the generation, whatever decode computes ahead, and then of the booking in order.
    /// Merely dropped, the route's last message (what was reported cached) could be lost with its stream.
    pub(crate) async fn close(self) {
        let Self { replies, route: Route { requests, replies: mut told }, .. } = self;
        drop((replies, requests));
        tokio::time::timeout(ROUTE_CLOSE_TIMEOUT, async { while let Ok(Some(_)) = told.message().await {} }).await.ok();
    }
}

impl Failed {
    fn by_worker(failure: Failure, decode: &str) -> Self {
        let reason = failure.reason();
        let instance_id = if failure.instance_id.is_empty() { decode.to_owned() } else { failure.instance_id };
        Self { instance_id, reason, message: failure.message }
    }
}

fn failed_by(status: &Status, instance_id: &str) -> Failed {
    Failed { instance_id: instance_id.to_owned(), reason: reason_of(status), message: status.message().to_owned() }
}

fn reason_of(status: &Status) -> Reason {
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange => Reason::Invalid,
        Code::ResourceExhausted => Reason::Full,
        Code::FailedPrecondition => Reason::WrongInstance,
        Code::DeadlineExceeded => Reason::Timeout,
        Code::Internal | Code::DataLoss => Reason::Engine,
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::Aborted
        | Code::Unimplemented
        | Code::Unavailable
        | Code::Unauthenticated => Reason::Unspecified,
    }
}
