//! One attempt at a prompt: opens the decode worker's stream and waits for its first token.

use super::{placement::Placement, prompt::Prompt};
use std::{collections::VecDeque, time::Duration};
use tandem_kv::InstanceId;
use tandem_proto::{
    channel::{Channels, MESSAGE_BYTES_MAX},
    v1::{
        AttemptFailed, DecodeStarted, Failure, FailureReason, GenerateReply, GenerateRequest, ResumedSample, Scheduled,
        decode_client::DecodeClient, generate_reply::Message, worker_info::Role,
    },
};
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Status, Streaming};

/// The time after a limit within which the worker's own report that the limit has passed may arrive.
const REPORT_DELAY_MAX: Duration = Duration::from_secs(2);

/// The facts about the attempt that brought the first token. They never change.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) placement: Placement,
    pub(crate) scheduled: Option<Scheduled>,
    pub(crate) started: DecodeStarted,
    pub(crate) times: Times,
    /// Earlier attempts, each with the time and the reason of its end.
    pub(crate) failed: Vec<(Instant, FailureReason)>,
}

/// The times at which the stages before the first token ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    /// Time at which a router was asked for the first placement.
    pub(crate) asked_at: Instant,
    /// Time at which the placement of this attempt arrived.
    pub(crate) placed_at: Instant,
    /// Time at which the prefill began.
    pub(crate) scheduled_at: Option<Instant>,
    /// Time at which all of the prompt's KV was on the decode worker.
    pub(crate) started_at: Option<Instant>,
    pub(crate) first_token_at: Instant,
}

/// The work of an attempt: a whole prompt, or the rest of an interrupted generation.
#[derive(Clone, Copy)]
pub(super) struct Work<'a> {
    pub(super) prompt: &'a Prompt,
    /// The samples to resume, each with the tokens it has; empty: all samples begin.
    pub(super) resumed: &'a [ResumedSample],
    /// The time at which a router was asked first.
    pub(super) asked_at: Instant,
}

/// One attempt among those at a prompt.
pub(super) struct Try<'a> {
    pub(super) placement: Placement,
    /// The attempt's number, from 1; unique among the attempts at a prompt, because ledgers identify attempts by it.
    pub(super) number: u32,
    /// The time in which the prefill has to begin. `None`: it may wait in the worker's queue.
    pub(super) start_timeout: Option<Duration>,
    /// Earlier attempts, each with the time and the reason of its end.
    pub(super) failed: &'a [(Instant, FailureReason)],
}

/// An attempt that has brought a token. Dropping it ends the request on the workers.
pub(super) struct Attempt {
    pub(super) number: u32,
    /// The decode worker's instance.
    pub(super) instance_id: InstanceId,
    /// Messages of the answer that came up to the first token and were not returned to the caller yet.
    pending: VecDeque<Message>,
    replies: Streaming<GenerateReply>,
}

/// Why an attempt ended before its last token.
pub(crate) struct AttemptError {
    /// The instance to exclude from the next placement.
    pub(super) instance_id: InstanceId,
    pub(super) cause: Cause,
}

pub(super) enum Cause {
    /// The request can never run on this cluster; with the reason.
    Invalid { message: String },
    /// Anything else: another worker may succeed.
    Worker(FailureReason),
}

impl Work<'_> {
    /// Runs one attempt up to its first token. Cancel-safe: dropping the future closes the stream.
    ///
    /// # Errors
    /// The attempt ended before.
    pub(super) async fn attempt(self, decoders: &Channels, one: Try<'_>) -> Result<(Attempt, Facts), AttemptError> {
        let Try { placement, number, start_timeout, failed } = one;
        let placed_at = Instant::now();
        let instance_id = placement.decode.instance_id.clone();
        let error = |reason| AttemptError::worker(&instance_id, reason);
        if !placement.decode.wire().has_signed_address(Role::Decode, decoders.network().key()) {
            tracing::warn!(instance = %instance_id, "placement ignored: its address lacks the cluster's signature");
            return Err(error(FailureReason::Unspecified));
        }
        let channel = decoders.to(&placement.decode.address).map_err(|_| error(FailureReason::Unspecified))?;
        let mut client = DecodeClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        // The worker knows which process is late and reports it; a worker that does not report in time is itself at fault.
        let deadline = start_timeout.map(|limit| placed_at + limit + REPORT_DELAY_MAX);
        let late = || error(FailureReason::Timeout);
        let opening = client.generate(self.request(&placement, number, start_timeout));
        let opened = in_time(deadline, opening).await.ok_or_else(late)?;
        let by_status = |status: Status| AttemptError::from_status(&status, &instance_id);
        let mut replies = opened.map_err(by_status)?.into_inner();
        let (mut scheduled, mut started, mut prefilled) = (None, None, None);
        loop {
            let deadline = deadline.filter(|_| scheduled.is_none());
            let reply = in_time(deadline, replies.message()).await.ok_or_else(late)?;
            let reply = reply.map_err(by_status)?.ok_or_else(|| error(FailureReason::Unspecified))?;
            match reply.message {
                Some(Message::Scheduled(message)) => scheduled = Some((message, Instant::now())),
                Some(Message::DecodeStarted(message)) => started = Some((message, Instant::now())),
                Some(message @ Message::PrefillTimeline(_)) => prefilled = Some(message),
                Some(Message::Failure(failure)) => return Err(AttemptError::from_worker(failure, &instance_id)),
                Some(first @ (Message::PromptLogprobs(_) | Message::Tokens(_) | Message::Finished(_))) => {
                    let (scheduled, scheduled_at) = scheduled.unzip();
                    let (started, started_at) = started.unzip();
                    let first_token_at = Instant::now();
                    let times = Times { asked_at: self.asked_at, placed_at, scheduled_at, started_at, first_token_at };
                    let (started, failed) = (started.unwrap_or_default(), failed.to_vec());
                    let pending = prefilled.into_iter().chain([first]).collect();
                    let attempt = Attempt { number, instance_id: instance_id.clone(), pending, replies };
                    return Ok((attempt, Facts { placement, scheduled, started, times, failed }));
                }
                // A kind of message that a later version added.
                None => {}
            }
        }
    }

    fn request(&self, placement: &Placement, attempt: u32, start_timeout: Option<Duration>) -> GenerateRequest {
        let Self { prompt, resumed, .. } = self;
        GenerateRequest {
            request_id: prompt.request_id.to_string(),
            traceparent: prompt.traceparent.clone(),
            attempt,
            instance_id: placement.decode.instance_id.to_string(),
            prompt: prompt.tokens.clone(),
            cache_namespace: prompt.namespace.as_bytes().to_vec(),
            sampling: Some(prompt.sampling.clone()),
            samples: prompt.samples,
            prefill: placement.prefill.as_ref().map(|prefill| prefill.wire()),
            // A resumed prompt's were sent before its first token.
            prompt_logprobs: prompt.prompt_logprobs.filter(|_| resumed.is_empty()),
            generated: resumed.to_vec(),
            account: prompt.account.clone(),
            prefill_start_timeout_ms: start_timeout.map(|limit| u32::try_from(limit.as_millis()).unwrap_or(u32::MAX)),
        }
    }

    /// The report of a failed attempt to the router.
    pub(super) fn failed(&self, error: &AttemptError) -> AttemptFailed {
        let generated_tokens = self.resumed.iter().map(|sample| sample.tokens.len() as u32).sum();
        AttemptFailed { instance_id: error.instance_id.to_string(), reason: error.reason().into(), generated_tokens }
    }
}

impl Attempt {
    /// Returns the next reply. There is one until every sample has ended: a worker that stops before has failed. Cancel-safe.
    ///
    /// # Errors
    /// The worker reports a failure or is lost.
    pub(super) async fn next(&mut self) -> Result<Message, AttemptError> {
        if let Some(message) = self.pending.pop_front() {
            return Ok(message);
        }
        loop {
            let reply = self.replies.message().await.map_err(|status| AttemptError::from_status(&status, &self.instance_id))?;
            match reply.ok_or_else(|| AttemptError::worker(&self.instance_id, FailureReason::Unspecified))?.message {
                Some(Message::Failure(failure)) => return Err(AttemptError::from_worker(failure, &self.instance_id)),
                Some(message) => return Ok(message),
                // A kind of message that a later version added.
                None => {}
            }
        }
    }
}

impl AttemptError {
    /// A failure that is not the request's.
    pub(super) fn worker(instance_id: &InstanceId, reason: FailureReason) -> Self {
        Self { instance_id: instance_id.clone(), cause: Cause::Worker(reason) }
    }

    fn from_status(status: &Status, instance_id: &InstanceId) -> Self {
        Self::new(instance_id.clone(), reason_of(status), status.message().to_owned())
    }

    fn from_worker(failure: Failure, decode: &InstanceId) -> Self {
        let reason = failure.reason();
        let instance_id = if failure.instance_id.is_empty() { decode.clone() } else { failure.instance_id.into() };
        Self::new(instance_id, reason, failure.message)
    }

    fn new(instance_id: InstanceId, reason: FailureReason, message: String) -> Self {
        let cause = match reason {
            FailureReason::InvalidRequest => Cause::Invalid { message },
            reason => Cause::Worker(reason),
        };
        Self { instance_id, cause }
    }

    pub(super) fn reason(&self) -> FailureReason {
        match self.cause {
            Cause::Invalid { .. } => FailureReason::InvalidRequest,
            Cause::Worker(reason) => reason,
        }
    }
}

/// Returns `None` if the deadline passes before `coming` resolves.
async fn in_time<T>(deadline: Option<Instant>, coming: impl Future<Output = T>) -> Option<T> {
    match deadline {
        None => Some(coming.await),
        Some(deadline) => timeout_at(deadline, coming).await.ok(),
    }
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
