//! One attempt at a prompt: opens a stream to the decode worker, and waits for the first token.

use super::{placement::Placement, prompt::Prompt};
use std::{collections::VecDeque, time::Duration};
use tandem_proto::{
    channel::{Channel, Channels, MESSAGE_BYTES_MAX, has_ended, status_text},
    unknown_message,
    v1::{
        AttemptFailed, DecodeStarted, FailureReason, FinishRequest, GenerateReply, GenerateRequest, ResumedSample, Scheduled,
        WorkerRef, decode_client::DecodeClient, generate_reply::Message, worker_info::Role,
    },
};
use tokio::time::{Instant, timeout_at};
use tonic::{Code, Status, Streaming};

/// If a worker in whose queue the prompt waits makes no progress within `start_timeout`, the decode worker reports which worker it is. The
/// frontend waits this long for the report.
const REPORT_DELAY_MAX: Duration = Duration::from_secs(2);

/// A request may wait in the queue for this much longer than its limit, because a router only estimates its wait.
pub(super) const WAIT_TOLERANCE: Duration = Duration::from_secs(1);

/// After a request has waited for its whole limit, it may wait this long on the next worker.
pub(super) const SHORT_WAIT: Duration = Duration::from_millis(750);

/// The facts about the attempt that generated the first token. They stay those of this attempt after a resume on another worker. Only the
/// count of cached tokens may still change: this attempt may report it later.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) placement: Placement,
    pub(crate) scheduled: Option<Scheduled>,
    pub(crate) started: DecodeStarted,
    /// Time at which the first placement was requested.
    pub(crate) requested_at: Instant,
    /// Time at which the placement of this attempt arrived.
    pub(crate) placed_at: Instant,
    /// Time at which the prefill began; `None`: the decode worker did not report it.
    pub(crate) scheduled_at: Option<Instant>,
    /// Time at which all of the prompt's KV was on the decode worker; `None`: the decode worker did not report it.
    pub(crate) started_at: Option<Instant>,
    pub(crate) first_token_at: Instant,
    /// The attempts that failed before this one, each with the time and the reason of its failure.
    pub(crate) failed: Vec<(Instant, FailureReason)>,
}

/// The task of an attempt: to generate the whole answer to a prompt, or the rest of an interrupted one.
#[derive(Clone, Copy)]
pub(super) struct Work<'a> {
    pub(super) prompt: &'a Prompt,
    /// The samples to resume, each with the tokens generated so far; empty: all samples start from the prompt.
    pub(super) resumed: &'a [ResumedSample],
    /// Time at which the first placement was requested.
    pub(super) requested_at: Instant,
    /// The time for which the request may wait in the queue; `None`: there is no limit.
    pub(super) wait_max: Option<Duration>,
}

/// An attempt that has generated a token. Dropping it ends the request on the workers.
pub(super) struct Attempt {
    pub(super) number: u32,
    pub(super) placement: Placement,
    client: DecodeClient<Channel>,
    /// Received messages, up to the one with the first token, that [`Attempt::next`] has not returned yet.
    pending: VecDeque<Message>,
    replies: Streaming<GenerateReply>,
}

/// The error of an attempt that ended before its last token.
pub(crate) struct AttemptError {
    /// The id of the instance to exclude from the next placement.
    pub(super) instance_id: String,
    /// `InvalidRequest`: the request can never run on this cluster. For any other reason, another worker may succeed.
    pub(super) reason: FailureReason,
    pub(super) message: String,
}

impl Work<'_> {
    /// Runs one attempt up to its first token. `number` is 1 for a prompt's first attempt; ledgers identify attempts by it. Until the
    /// prefill begins, the decode worker must report once within each `start_timeout` that the engine in whose queue the prompt waits makes
    /// progress; `None`: no report is required. Cancel-safe: dropping the future closes the stream.
    ///
    /// # Errors
    /// The attempt ended before its first token.
    pub(super) async fn attempt(
        self,
        decoders: &Channels,
        placement: &Placement,
        number: u32,
        start_timeout: Option<Duration>,
    ) -> Result<(Attempt, Facts), AttemptError> {
        let placed_at = Instant::now();
        let WorkerRef { instance_id, address, .. } = &placement.decode.worker;
        let error = |reason| AttemptError::new(instance_id, reason);
        if !placement.decode.worker.has_signed_address(Role::Decode, decoders.network().key()) {
            tracing::warn!(
                instance = %instance_id,
                "placement ignored, because its address is not signed with the cluster key; \
                 give all processes the same --cluster-key-file"
            );
            return Err(error(FailureReason::Unspecified));
        }
        let channel = decoders.to(address).map_err(|_| error(FailureReason::Unspecified))?;
        let mut client = DecodeClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
        // If an engine makes no progress, the decode worker reports which of the two workers is at fault. Without a report in time, the
        // decode worker itself is at fault.
        let deadline = || start_timeout.map(|limit| Instant::now() + limit + REPORT_DELAY_MAX);
        let late = || error(FailureReason::Timeout);
        let opening = client.generate(self.request(placement, number, start_timeout));
        let opened = in_time(deadline(), opening).await.ok_or_else(late)?;
        let mut replies = opened.map_err(|status| AttemptError::from_status(&status, instance_id))?.into_inner();
        let (mut scheduled, mut started, mut prefilled) = (None, None, None);
        loop {
            let deadline = deadline().filter(|_| scheduled.is_none());
            match in_time(deadline, next_message(&mut replies, instance_id)).await.ok_or_else(late)?? {
                Message::Scheduled(message) => match &mut scheduled {
                    None => scheduled = Some((message, Instant::now())),
                    Some((first, _)) => {
                        report_later(first, message);
                    }
                },
                // Each message restarts the deadline.
                Message::Waiting(_) => {
                    let begins = placed_at + placement.wait;
                    self.prompt.queued.send_modify(|last| *last = (*last).max(Some(begins)));
                }
                Message::DecodeStarted(message) => started = Some((message, Instant::now())),
                message @ Message::PrefillTimeline(_) => prefilled = Some(message),
                first => {
                    let (scheduled, scheduled_at) = scheduled.unzip();
                    let (started, started_at) = started.unzip();
                    let pending = prefilled.into_iter().chain([first]).collect();
                    let attempt = Attempt { number, placement: placement.clone(), client, pending, replies };
                    let facts = Facts {
                        placement: placement.clone(),
                        scheduled,
                        started: started.unwrap_or_default(),
                        requested_at: self.requested_at,
                        placed_at,
                        scheduled_at,
                        started_at,
                        first_token_at: Instant::now(),
                        failed: Vec::new(),
                    };
                    return Ok((attempt, facts));
                }
            }
        }
    }

    fn request(&self, placement: &Placement, attempt: u32, start_timeout: Option<Duration>) -> GenerateRequest {
        let Self { prompt, resumed, .. } = self;
        GenerateRequest {
            request_id: prompt.request_id.to_string(),
            traceparent: prompt.traceparent.clone(),
            attempt,
            instance_id: placement.decode.worker.instance_id.clone(),
            prompt: prompt.tokens.clone(),
            cache_namespace: prompt.namespace.as_bytes().to_vec(),
            sampling: Some(prompt.sampling.clone()),
            samples: prompt.samples,
            prefill: placement.prefill.as_ref().map(|prefill| prefill.worker.clone()),
            // An interrupted attempt has already sent the logprobs of the prompt, so a resume does not request them.
            prompt_logprobs: prompt.prompt_logprobs.filter(|_| resumed.is_empty()),
            generated: resumed.to_vec(),
            account: prompt.account.clone(),
            priority: Some(prompt.priority.into()),
            prefill_start_timeout_ms: start_timeout.map(millis),
            wait_max_ms: self.wait_max.map(millis),
            images: prompt.images.clone(),
        }
    }

    /// Returns the number of tokens generated so far in the longest sample.
    pub(super) fn generated(&self) -> usize {
        self.resumed.iter().map(|sample| sample.tokens.len()).max().unwrap_or_default()
    }

    /// Returns the message that reports a failed attempt to the router.
    pub(super) fn failed(&self, error: &AttemptError) -> AttemptFailed {
        let generated_tokens = self.resumed.iter().map(|sample| sample.tokens.len() as u32).sum();
        AttemptFailed { instance_id: error.instance_id.clone(), reason: error.reason.into(), generated_tokens }
    }
}

impl Facts {
    /// Whether the worker will report the cached tokens of this attempt later.
    pub(crate) fn awaits_cached_tokens(&self) -> bool {
        self.scheduled.as_ref().is_some_and(|scheduled| scheduled.reported_later)
    }

    /// Accepts a `Scheduled` message that arrives after the attempt's first token. Returns whether it is the report of cached tokens that
    /// the worker announced.
    pub(super) fn report_later(&mut self, later: &Scheduled) -> bool {
        self.scheduled.as_mut().is_some_and(|first| report_later(first, later.clone()))
    }

    /// Stops waiting for the report of cached tokens, because the attempt was lost.
    pub(super) fn lose_cached_tokens(&mut self) {
        if let Some(scheduled) = &mut self.scheduled {
            scheduled.reported_later = false;
        }
    }
}

/// Replaces an attempt's first `Scheduled` message with `later`, if the first one announced it. Returns whether it did.
///
/// Any other second `Scheduled` message is ignored, and the first count stays valid. An error instead would cost the client a correct
/// answer because of a redundant message.
fn report_later(first: &mut Scheduled, later: Scheduled) -> bool {
    let announced = first.reported_later;
    if announced {
        *first = Scheduled { reported_later: false, ..later };
    }
    announced
}

impl Attempt {
    /// Returns the instance id of the decode worker.
    pub(super) fn instance_id(&self) -> &str {
        &self.placement.decode.worker.instance_id
    }

    /// Asks the worker to end the generation now and to report the cached tokens on the attempt's stream, if it has announced this report.
    /// A failure of the call is no error: the stream then ends, or delivers the report when the generation ends without this call.
    pub(super) fn finish(&self, prompt: &Prompt) -> impl Future<Output = ()> + use<> {
        let (request_id, instance_id) = (prompt.request_id.to_string(), self.instance_id().to_owned());
        let request = FinishRequest { instance_id, request_id, attempt: self.number };
        let mut client = self.client.clone();
        async move {
            if let Err(status) = client.finish(request).await {
                tracing::debug!("the worker does not end a generation early: {}", status_text(&status));
            }
        }
    }

    /// Returns the next message. After every sample has ended, only a later `Scheduled` can follow. Cancel-safe.
    ///
    /// # Errors
    /// The worker reports a failure or is lost, or no message follows.
    pub(super) async fn next(&mut self) -> Result<Message, AttemptError> {
        match self.pending.pop_front() {
            Some(message) => Ok(message),
            None => next_message(&mut self.replies, &self.placement.decode.worker.instance_id).await,
        }
    }
}

impl AttemptError {
    pub(super) fn new(instance_id: &str, reason: FailureReason) -> Self {
        Self { instance_id: instance_id.to_owned(), reason, message: String::new() }
    }

    fn from_status(status: &Status, instance_id: &str) -> Self {
        Self { message: status.message().to_owned(), ..Self::new(instance_id, reason_of(status)) }
    }
}

/// Returns the next message of the decode worker.
///
/// # Errors
/// The worker reports a failure, or the stream ends.
async fn next_message(replies: &mut Streaming<GenerateReply>, instance_id: &str) -> Result<Message, AttemptError> {
    loop {
        let reply = replies.message().await.map_err(|status| AttemptError::from_status(&status, instance_id))?;
        match reply.ok_or_else(|| AttemptError::new(instance_id, FailureReason::Unspecified))?.message {
            Some(Message::Failure(failure)) => {
                let reason = failure.reason();
                let instance_id = if failure.instance_id.is_empty() { instance_id.to_owned() } else { failure.instance_id };
                return Err(AttemptError { instance_id, reason, message: failure.message });
            }
            Some(message) => return Ok(message),
            None => unknown_message("Generate"),
        }
    }
}

fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

/// Returns the output of `coming`, or `None` if the deadline passes before `coming` resolves.
async fn in_time<T>(deadline: Option<Instant>, coming: impl Future<Output = T>) -> Option<T> {
    match deadline {
        None => Some(coming.await),
        Some(deadline) => timeout_at(deadline, coming).await.ok(),
    }
}

fn reason_of(status: &Status) -> FailureReason {
    match status.code() {
        _ if has_ended(status) => FailureReason::WorkerEnded,
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
