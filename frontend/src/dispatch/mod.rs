//! Where a prompt goes: asks the router, opens the decode worker's stream, and tries elsewhere while no token has come. A
//! generation that is lost later goes on elsewhere, from the tokens it has: its text is what it would have been.

mod route;
mod routers;

pub(crate) use routers::Routers;

use crate::metrics::FrontendMetrics;
use route::Route;
use std::{sync::Arc, time::Duration};
use tandem_kv::{Namespace, TokenId};
use tandem_node::trace::Span;
use tandem_proto::{
    channel::{Channels, InvalidAddress, MESSAGE_BYTES_MAX, Network},
    v1::{
        AttemptFailed, Candidate, DecodeStarted, ExplainReply, ExplainRequest, Failure, FailureReason, GenerateReply,
        GenerateRequest, Placement, PrefillChunk, ResumedSample, Sampling, Scheduled, decode_client::DecodeClient,
        generate_reply, worker_info::Role,
    },
};
use tokio::time::Instant;
use tonic::{Code, Status, Streaming};

/// How much later than its limit a worker's word that the limit has passed may arrive.
const LATE: Duration = Duration::from_secs(2);

/// Why a prompt got no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DispatchError {
    /// The request can never run here.
    #[error("The request cannot run here: {message}. Lower n or max_tokens, or shorten the prompt.")]
    Refused { message: String },
    #[error("No worker can take the request now ({}); try again shortly.", .reason.label())]
    NoWorker { reason: FailureReason },
    #[error("The router cannot be reached; try again shortly.")]
    Router(#[source] Box<Status>),
    #[error("This server and its cluster do not fit together; its operator has to correct that.")]
    Foreign,
    #[error("The router went away before it placed the request; try again shortly.")]
    RouterClosed,
    #[error("The request failed {attempts} times before its first token (last: {}); try again shortly.", .reason.label())]
    Attempts { attempts: u32, reason: FailureReason },
    #[error("The first token did not come within {} seconds; try again later.", .limit.as_secs_f64())]
    Timeout { limit: Duration },
    #[error("The worker was lost while it generated ({}); send the request again.", .reason.label())]
    Lost { reason: FailureReason },
    #[error("This server is shutting down; send the request again.")]
    Stopped,
}

/// One prompt, ready to be placed.
pub(crate) struct Prompt {
    /// Ours, never the client's.
    pub(crate) request_id: String,
    /// Of the span under which others put theirs.
    pub(crate) traceparent: String,
    /// The request's.
    pub(crate) span: Span,
    /// Whom it is for; empty: nobody said.
    pub(crate) account: String,
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

/// What is known when the first token is there: of the attempt that led to it. Never changes afterwards, but for the chunks.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) placement: Placement,
    pub(crate) scheduled: Option<Scheduled>,
    pub(crate) started: DecodeStarted,
    /// Empty if they were not told yet.
    pub(crate) chunks: Vec<PrefillChunk>,
    pub(crate) times: Times,
    pub(crate) first_token_at: Instant,
    /// Attempts before, each with when and why it ended.
    pub(crate) failed: Vec<(Instant, FailureReason)>,
}

/// The way to the first token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// A router was asked for the first placement.
    pub(crate) asked_at: Instant,
    /// The placement was there.
    pub(crate) placed_at: Instant,
    /// The prefill had begun.
    pub(crate) scheduled_at: Option<Instant>,
    /// The prompt's KV was where it is decoded.
    pub(crate) started_at: Option<Instant>,
}

/// A running generation: its latest attempt with both its streams. Dropping it closes them, which ends the request on the
/// workers and gives the booking back.
pub(crate) struct Attempt {
    /// Of the attempt that brought the first token, whoever goes on.
    pub(crate) facts: Facts,
    number: u32,
    resumes: u32,
    /// The decode worker's instance.
    instance_id: String,
    first: Option<generate_reply::Message>,
    replies: Streaming<GenerateReply>,
    route: Route,
}

/// An attempt that ended before its last token.
pub(crate) struct Failed {
    /// The instance to leave out.
    instance_id: String,
    reason: FailureReason,
    /// For the client if the reason is that the request is invalid.
    message: String,
}

/// What an attempt is to do: a prompt from its beginning, or what is left of it.
#[derive(Clone, Copy)]
struct Work<'a> {
    prompt: &'a Prompt,
    /// Samples that go on; empty: all begin.
    generated: &'a [ResumedSample],
}

/// Connections to the routers and the decode workers.
pub(crate) struct Dispatcher {
    routers: Arc<Routers>,
    decoders: Channels,
    limits: Limits,
    metrics: Arc<FrontendMetrics>,
}

/// How long, and how often, the frontend tries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Placements before a request is given up, and again for each time it goes on elsewhere.
    pub(crate) attempts: u32,
    /// An attempt that is not the last begins its prefill, and goes on from token to token, within this time.
    pub(crate) attempt_timeout: Duration,
    /// All attempts together have brought a token within this time.
    pub(crate) first_token_timeout: Duration,
    /// Times a generation goes on elsewhere.
    pub(crate) resumes: u32,
}

impl Dispatcher {
    /// Connects to workers when they are first used.
    pub(crate) fn new(routers: Routers, network: Network, limits: Limits, metrics: Arc<FrontendMetrics>) -> Self {
        let limits = Limits { attempts: limits.attempts.max(1), ..limits };
        Self { routers: Arc::new(routers), decoders: Channels::on(network), limits, metrics }
    }

    pub(crate) fn routers(&self) -> &Routers {
        &self.routers
    }

    /// Where a router would place the prompt now, and why.
    pub(crate) async fn explain(&self, prompt: &Prompt) -> Result<ExplainReply, DispatchError> {
        let request = ExplainRequest {
            model: prompt.model.clone(),
            sequence_hashes: prompt.sequence_hashes.clone(),
            prompt_tokens: prompt.tokens.len() as u32,
            prompt_logits: prompt.prompt_logprobs.is_some(),
        };
        self.routers.explain(request).await
    }

    /// Places the prompt and waits for its first token; tries other placements while there is none. Cancel-safe: dropping
    /// the future closes all streams.
    pub(crate) async fn start(&self, prompt: &Prompt) -> Result<Attempt, DispatchError> {
        let limit = self.limits.first_token_timeout;
        let starting = async {
            let asked_at = Instant::now();
            let (route, placement) = Route::open(&self.routers, prompt).await?;
            let mut attempt = self.begin(Work { prompt, generated: &[] }, route, placement, &mut 1).await?;
            attempt.facts.times.asked_at = asked_at;
            Ok(attempt)
        };
        tokio::time::timeout(limit, starting).await.unwrap_or(Err(DispatchError::Timeout { limit }))
    }

    /// Goes on elsewhere after `failed` with the samples that have not ended, from what each has generated. What the first
    /// attempt has said of the prompt stays. Cancel-safe as [`Dispatcher::start`] is.
    pub(crate) async fn resume(
        &self,
        lost: Attempt,
        failed: Failed,
        prompt: &Prompt,
        generated: &[ResumedSample],
    ) -> Result<Attempt, DispatchError> {
        let Attempt { facts, number, resumes, replies, mut route, .. } = lost;
        // A worker that only seemed lost must not go on beside its successor.
        drop(replies);
        let reason = failed.reason;
        tracing::debug!(request_id = %prompt.request_id, number, reason = reason.label(), instance = %failed.instance_id, "stream lost");
        prompt.span.event("worker lost", &[("tandem.attempt", number.into()), ("error.type", reason.label().into())]);
        if resumes >= self.limits.resumes {
            return Err(DispatchError::Lost { reason });
        }
        let work = Work { prompt, generated };
        let mut number = number + 1;
        let resuming = async {
            let placement = route.place_anew(prompt, work.failed(failed)).await?;
            self.begin(work, route, placement, &mut number).await
        };
        match tokio::time::timeout(self.limits.first_token_timeout, resuming).await {
            Ok(Ok(attempt)) => {
                self.metrics.migrations.increment(1);
                Ok(Attempt { facts, resumes: resumes + 1, ..attempt })
            }
            Ok(Err(error)) => {
                tracing::debug!(request_id = %prompt.request_id, %error, "not resumed");
                Err(DispatchError::Lost { reason })
            }
            Err(_) => Err(DispatchError::Lost { reason }),
        }
    }

    /// Runs attempts from the `number`th on until one brings a token. No two of a prompt have the same number: they are accounted
    /// for by it.
    async fn begin(
        &self,
        work: Work<'_>,
        mut route: Route,
        mut placement: Placement,
        number: &mut u32,
    ) -> Result<Attempt, DispatchError> {
        let last = *number + self.limits.attempts - 1;
        let mut failures = Vec::new();
        loop {
            let limit = (*number < last).then_some(self.limits.attempt_timeout);
            let attempt = tokio::select! {
                biased;
                attempt = self.attempt(work, placement, *number, limit) => attempt,
                never = route.keep(work.prompt) => match never {},
            };
            let failed = match attempt {
                Ok((mut facts, first, replies)) => {
                    facts.failed = failures;
                    // A resumed prompt is longer than what the router foresaw; only the first start can be held against it.
                    let reported = facts.scheduled.as_ref().and_then(|scheduled| scheduled.cached_tokens);
                    let cached_tokens = reported.filter(|_| work.generated.is_empty());
                    route.release_prefill(cached_tokens).await;
                    let instance_id = decode_instance(&facts.placement);
                    return Ok(Attempt { facts, number: *number, resumes: 0, instance_id, first: Some(first), replies, route });
                }
                Err(failed) => failed,
            };
            self.metrics.attempt_failed(failed.reason);
            failures.push((Instant::now(), failed.reason));
            work.prompt
                .span
                .event("attempt failed", &[("tandem.attempt", (*number).into()), ("error.type", failed.reason.label().into())]);
            let request_id = &work.prompt.request_id;
            tracing::debug!(%request_id, number, reason = failed.reason.label(), instance = %failed.instance_id, "attempt failed");
            if failed.reason == FailureReason::InvalidRequest {
                return Err(DispatchError::Refused { message: failed.message });
            }
            if *number >= last {
                return Err(DispatchError::Attempts { attempts: self.limits.attempts, reason: failed.reason });
            }
            *number += 1;
            placement = route.place_anew(work.prompt, work.failed(failed)).await?;
        }
    }

    async fn attempt(
        &self,
        work: Work<'_>,
        placement: Placement,
        number: u32,
        limit: Option<Duration>,
    ) -> Result<(Facts, generate_reply::Message, Streaming<GenerateReply>), Failed> {
        let prompt = work.prompt;
        let now = Instant::now();
        let mut times = Times { asked_at: now, placed_at: now, scheduled_at: None, started_at: None };
        let decode = placement.decode.as_ref().and_then(|candidate| candidate.worker.as_ref());
        let Some(decode) = decode else {
            return Err(Failed { instance_id: String::new(), reason: FailureReason::Unspecified, message: String::new() });
        };
        let instance_id = decode.instance_id.clone();
        if !decode.is_vouched(Role::Decode, self.decoders.network().key()) {
            tracing::warn!(instance = %instance_id, "a placement's address lacks the cluster's signature; it is ignored");
            return Err(Failed { instance_id, reason: FailureReason::Unspecified, message: String::new() });
        }
        let unreachable =
            || Failed { instance_id: instance_id.clone(), reason: FailureReason::Unspecified, message: String::new() };
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
            // They were told before the first token.
            prompt_logprobs: prompt.prompt_logprobs.filter(|_| work.generated.is_empty()),
            generated: work.generated.to_vec(),
            account: prompt.account.clone(),
            prefill_start_timeout_ms: limit.map(|limit| u32::try_from(limit.as_millis()).unwrap_or(u32::MAX)),
        };
        let channel = self.decoders.to(&decode.address).map_err(|_: InvalidAddress| unreachable())?;
        let mut client = DecodeClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let failed = |status: Status| failed_by(&status, &instance_id);
        let silent = || Failed { instance_id: instance_id.clone(), reason: FailureReason::Timeout, message: String::new() };
        // The worker knows who is late, and says so; if it does not, it is the culprit.
        let begins_by = limit.map(|limit| Instant::now() + limit + LATE);
        let opening = in_time(begins_by, client.generate(request)).await.ok_or_else(silent)?;
        let mut replies = opening.map_err(failed)?.into_inner();
        let (mut scheduled, mut started, mut chunks) = (None, None, Vec::new());
        loop {
            let begins_by = begins_by.filter(|_| scheduled.is_none());
            let reply = in_time(begins_by, replies.message()).await.ok_or_else(silent)?;
            match reply.map_err(failed)?.ok_or_else(unreachable)?.message {
                Some(generate_reply::Message::Scheduled(message)) => {
                    (scheduled, times.scheduled_at) = (Some(message), Some(Instant::now()));
                }
                Some(generate_reply::Message::DecodeStarted(message)) => {
                    (started, times.started_at) = (Some(message), Some(Instant::now()));
                }
                Some(generate_reply::Message::PrefillTimeline(message)) => chunks = message.chunks,
                Some(generate_reply::Message::Failure(failure)) => return Err(Failed::by_worker(failure, &instance_id)),
                Some(
                    first @ (generate_reply::Message::PromptLogprobs(_)
                    | generate_reply::Message::Tokens(_)
                    | generate_reply::Message::Finished(_)),
                ) => {
                    let started = started.unwrap_or_default();
                    let (first_token_at, failed) = (Instant::now(), Vec::new());
                    let facts = Facts { placement, scheduled, started, chunks, times, first_token_at, failed };
                    return Ok((facts, first, replies));
                }
                // Of a kind that came after this build.
                None => {}
            }
        }
    }
}

impl Work<'_> {
    fn failed(&self, failed: Failed) -> AttemptFailed {
        let generated_tokens = self.generated.iter().map(|generated| generated.tokens.len() as u32).sum();
        let Failed { instance_id, reason, .. } = failed;
        AttemptFailed { instance_id, reason: reason.into(), generated_tokens }
    }
}

impl Attempt {
    /// The next reply to the prompt, which stays booked meanwhile. There is always one until every sample has ended: a worker that
    /// stops before has failed.
    pub(crate) async fn next(&mut self, prompt: &Prompt) -> Result<generate_reply::Message, Failed> {
        if let Some(first) = self.first.take() {
            return Ok(first);
        }
        loop {
            let reply = tokio::select! {
                biased;
                reply = self.replies.message() => reply.map_err(|status| failed_by(&status, &self.instance_id))?,
                never = self.route.keep(prompt) => match never {},
            };
            match reply.ok_or_else(|| self.failed(FailureReason::Unspecified))?.message {
                Some(generate_reply::Message::Failure(failure)) => return Err(Failed::by_worker(failure, &self.instance_id)),
                Some(message) => return Ok(message),
                // Of a kind that came after this build.
                None => {}
            }
        }
    }

    /// This attempt is no use any more, because of its decode worker.
    pub(crate) fn failed(&self, reason: FailureReason) -> Failed {
        Failed { instance_id: self.instance_id.clone(), reason, message: String::new() }
    }

    /// The answer is whole: lets go of the generation, whatever decode computes ahead, and then of the booking in order.
    pub(crate) async fn close(self) {
        drop(self.replies);
        self.route.close().await;
    }
}

impl Failed {
    fn by_worker(failure: Failure, decode: &str) -> Self {
        let reason = failure.reason();
        let instance_id = if failure.instance_id.is_empty() { decode.to_owned() } else { failure.instance_id };
        Self { instance_id, reason, message: failure.message }
    }
}

fn decode_instance(placement: &Placement) -> String {
    let worker = placement.decode.as_ref().and_then(|candidate| candidate.worker.as_ref());
    worker.map(|worker| worker.instance_id.clone()).unwrap_or_default()
}

/// `None`: it did not come by then.
async fn in_time<T>(deadline: Option<Instant>, coming: impl Future<Output = T>) -> Option<T> {
    match deadline {
        None => Some(coming.await),
        Some(deadline) => tokio::time::timeout_at(deadline, coming).await.ok(),
    }
}

fn failed_by(status: &Status, instance_id: &str) -> Failed {
    Failed { instance_id: instance_id.to_owned(), reason: reason_of(status), message: status.message().to_owned() }
}

fn reason_of(status: &Status) -> FailureReason {
    match status.code() {
        Code::InvalidArgument | Code::OutOfRange => FailureReason::InvalidRequest,
        Code::ResourceExhausted => FailureReason::AtCapacity,
        Code::FailedPrecondition => FailureReason::WrongInstance,
        Code::DeadlineExceeded => FailureReason::Timeout,
        Code::Internal | Code::DataLoss => FailureReason::EngineFailed,
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::Aborted
        | Code::Unimplemented
        | Code::Unavailable
        | Code::Unauthenticated => FailureReason::Unspecified,
    }
}
