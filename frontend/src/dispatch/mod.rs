//! Places a prompt and generates its answer: requests a placement from a router, opens the decode worker's stream, and retries on other
//! workers until the first token. A generation whose worker is lost later is resumed on another worker after the tokens generated so far.

mod attempt;
mod availability;
mod booking;
mod error;
mod losses;
pub(crate) mod placement;
mod prompt;
mod router_stream;
mod routers;

pub(crate) use attempt::{AttemptError, Facts};
pub(crate) use availability::{Unavailable, check};
pub(crate) use booking::Booking;
pub(crate) use error::{DispatchError, seconds};
pub(crate) use prompt::Prompt;
pub(crate) use routers::{MemberList, Routers};

use crate::{metrics::FrontendMetrics, settings::FrontendSettings};
use attempt::{Attempt, SHORT_WAIT, WAIT_TOLERANCE, Work};
use futures::FutureExt;
use losses::Losses;
use placement::Placement;
use std::{convert::Infallible, future::pending, sync::Arc, time::Duration};
use tandem_process::LogLimit;
use tandem_proto::{
    channel::{Channels, Network},
    v1::{ExplainReply, ExplainRequest, FailureReason, ResumedSample, Scheduled, generate_reply::Message},
};
use tokio::time::{Instant, sleep, timeout};

/// The maximum time for which a complete answer's usage waits for a late report of cached tokens. An engine sends it in the step after the
/// end of the generation.
const REPORT_WAIT_MAX: Duration = Duration::from_secs(2);

/// The pause before the third attempt of a request, twice as long before the fourth, and so on. When a server ends, attempts on its other workers
/// fail faster than the router learns that these workers are gone, too.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections to the routers and the decode workers.
pub(crate) struct Dispatcher {
    pub(crate) routers: Arc<Routers>,
    decoders: Channels,
    limits: AttemptLimits,
    metrics: Arc<FrontendMetrics>,
    resumes_logged: LogLimit,
}

/// Limits of attempts and resumes. Each field means the same as the field of this name in [`FrontendSettings`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttemptLimits {
    pub(crate) attempts: u32,
    pub(crate) attempt_timeout: Duration,
    pub(crate) first_token_timeout: Duration,
    pub(crate) resumes: u32,
}

impl AttemptLimits {
    pub(crate) fn of(settings: &FrontendSettings) -> Self {
        let &FrontendSettings { attempts, attempt_timeout, first_token_timeout, resumes, .. } = settings;
        Self { attempts, attempt_timeout, first_token_timeout, resumes }
    }
}

/// A running generation: its latest attempt and its booking. Dropping it ends the request on the workers, and ends the booking.
pub(crate) struct Generation {
    pub(crate) facts: Facts,
    attempt: Attempt,
    resumes: u32,
    losses: Losses,
    booking: Booking,
}

/// The outcome of the wait for cached tokens that a worker reports late.
pub(crate) enum LateReport {
    /// The report, which may be that the engine has no number.
    Scheduled(Scheduled),
    /// The worker was lost before it could report.
    Lost,
}

impl Dispatcher {
    /// Creates a dispatcher, which connects to a worker only when the first prompt is placed on that worker.
    pub(crate) fn new(routers: Routers, network: Network, limits: AttemptLimits, metrics: Arc<FrontendMetrics>) -> Self {
        let limits = AttemptLimits { attempts: limits.attempts.max(1), ..limits };
        let decoders = Channels::on(network);
        Self { routers: Arc::new(routers), decoders, limits, metrics, resumes_logged: LogLimit::default() }
    }

    /// Returns the placement that a router would choose for the prompt now, and the reasons for it.
    ///
    /// # Errors
    /// No router answers.
    pub(crate) async fn explain(&self, prompt: &Prompt) -> Result<ExplainReply, DispatchError> {
        let request = ExplainRequest {
            model: prompt.identity.model.clone(),
            sequence_hashes: prompt.wire_hashes(),
            prompt_tokens: prompt.tokens.len() as u32,
            prompt_logits: prompt.prompt_logprobs.is_some(),
            max_tokens: prompt.max_tokens,
            samples: prompt.samples,
            has_images: !prompt.images.is_empty(),
            endpoints: prompt.endpoints.clone(),
        };
        self.routers.explain(request).await
    }

    /// Places the prompt and waits for its first token. If an attempt fails, tries other workers. Cancel-safe: dropping the future closes
    /// all streams.
    ///
    /// # Errors
    /// No attempt generated a token.
    pub(crate) async fn start(&self, prompt: &Prompt) -> Result<Generation, DispatchError> {
        let limit = self.limits.first_token_timeout;
        let wait_max = prompt.max_wait.map(|max_wait| max_wait + WAIT_TOLERANCE);
        let work = Work { prompt, resumed: &[], requested_at: Instant::now(), wait_max };
        let starting = async {
            let (booking, placement) = Booking::open(&self.routers, prompt).await?;
            self.first_token(work, booking, placement, 1, Losses::default()).await
        };
        timeout(limit, starting).await.unwrap_or(Err(DispatchError::Timeout { limit }))
    }

    /// Resumes, on another worker, the samples that have not ended, each after the tokens generated so far. The generation keeps the facts
    /// of the attempt that generated the first token. If that attempt had not reported its cached tokens, they stay unreported: a later
    /// attempt's report would also count the blocks that the first one stored. Cancel-safe like [`Dispatcher::start`].
    ///
    /// # Errors
    /// The failed attempt's worker has found that no worker can continue the answer, the generation may not be resumed again, or no attempt
    /// generated a token.
    pub(crate) async fn resume(
        &self,
        lost: Generation,
        error: AttemptError,
        prompt: &Prompt,
        resumed: &[ResumedSample],
    ) -> Result<Generation, DispatchError> {
        let Generation { mut facts, attempt, resumes, mut losses, mut booking } = lost;
        facts.lose_cached_tokens();
        let number = attempt.number;
        let worker = attempt.placement.name_of(&error.instance_id).to_owned();
        // End the old attempt first: its worker may be slow but not lost, and two workers must not generate the same answer at the same
        // time.
        drop(attempt);
        let reason = error.reason;
        if reason == FailureReason::InvalidRequest {
            tracing::debug!(request_id = %prompt.request_id, number, instance = %error.instance_id, "the worker refused to continue");
            prompt.span.event("attempt failed", &[("tandem.attempt", number.into()), ("error.type", reason.label().into())]);
            return Err(DispatchError::Refused { message: error.message });
        }
        tracing::debug!(
            request_id = %prompt.request_id,
            number,
            reason = reason.label(),
            instance = %error.instance_id,
            "the stream from the decode worker was lost"
        );
        prompt.span.event("worker lost", &[("tandem.attempt", number.into()), ("error.type", reason.label().into())]);
        // The answer was admitted before, so its wait has no limit.
        let work = Work { prompt, resumed, requested_at: Instant::now(), wait_max: None };
        self.check_losses(&mut losses, work, reason, &worker)?;
        if resumes >= self.limits.resumes {
            return Err(DispatchError::Lost { reason, worker });
        }
        let resuming = async {
            let placement = booking.reroute(prompt, work.failed(&error)).await?;
            self.first_token(work, booking, placement, number + 1, losses).await
        };
        let limit = self.limits.first_token_timeout;
        match timeout(limit, resuming).await.unwrap_or(Err(DispatchError::Timeout { limit })) {
            Ok(generation) => {
                self.metrics.migrations.increment(1);
                self.log_resumed(work, reason, &worker, &generation.attempt.placement);
                Ok(Generation { facts, resumes: resumes + 1, ..generation })
            }
            Err(error @ DispatchError::EndsWorkers { .. }) => Err(error),
            Err(error) => {
                tracing::debug!(request_id = %prompt.request_id, %error, "the request could not be resumed");
                Err(DispatchError::Lost { reason, worker })
            }
        }
    }

    /// Runs attempts until one generates a token. `number` is the number of the first attempt.
    async fn first_token(
        &self,
        mut work: Work<'_>,
        mut booking: Booking,
        mut placement: Placement,
        mut number: u32,
        mut losses: Losses,
    ) -> Result<Generation, DispatchError> {
        let (first, last) = (number, number + self.limits.attempts - 1);
        let mut failed = Vec::new();
        loop {
            let start_timeout = (number < last).then_some(self.limits.attempt_timeout);
            let attempt = tokio::select! {
                biased;
                attempt = work.attempt(&self.decoders, &placement, number, start_timeout) => attempt,
                never = booking.maintain(work.prompt) => match never {},
            };
            let error = match attempt {
                Ok((attempt, mut facts)) => {
                    facts.failed = failed;
                    // A resume reports no cached tokens: it also prefills generated tokens, which the router's prediction of cached tokens
                    // does not include.
                    let reported = facts.scheduled.as_ref().and_then(|scheduled| scheduled.cached_tokens);
                    booking.prefill_finished(reported.filter(|_| work.resumed.is_empty())).await;
                    return Ok(Generation { facts, attempt, resumes: 0, losses, booking });
                }
                Err(error) => error,
            };
            let reason = error.reason;
            self.metrics.attempt_failed(reason);
            failed.push((Instant::now(), reason));
            let request_id = &work.prompt.request_id;
            work.prompt.span.event("attempt failed", &[("tandem.attempt", number.into()), ("error.type", reason.label().into())]);
            tracing::debug!(%request_id, number, reason = reason.label(), instance = %error.instance_id, "attempt failed");
            if reason == FailureReason::InvalidRequest {
                return Err(DispatchError::Refused { message: error.message });
            }
            let worker = placement.name_of(&error.instance_id);
            self.check_losses(&mut losses, work, reason, worker)?;
            // This request has waited for its whole limit. So the router may place it only on a worker with a short wait, or replies when
            // to retry.
            if reason == FailureReason::Overloaded {
                work.wait_max = work.wait_max.map(|_| SHORT_WAIT);
            }
            let not_served = reason == FailureReason::ModelNotServed;
            if number >= last && not_served {
                return Err(DispatchError::NotServed);
            }
            if number >= last && reason != FailureReason::Overloaded {
                return Err(DispatchError::Attempts { attempts: self.limits.attempts, reason, worker: worker.to_owned() });
            }
            if !matches!(reason, FailureReason::Overloaded | FailureReason::AtCapacity) {
                sleep(ATTEMPT_PAUSE * (number - first)).await;
            }
            number += 1;
            placement = booking.reroute(work.prompt, work.failed(&error)).await.map_err(|none| match none {
                DispatchError::NoWorker { .. } if not_served => DispatchError::NotServed,
                none => none,
            })?;
        }
    }
}

impl Dispatcher {
    /// Records the failure of an attempt.
    ///
    /// # Errors
    /// Too many workers have ended while they ran the request, so it must not be sent to another one.
    fn check_losses(
        &self,
        losses: &mut Losses,
        work: Work<'_>,
        reason: FailureReason,
        worker: &str,
    ) -> Result<(), DispatchError> {
        if losses.add(reason, worker, work.generated()) {
            return Ok(());
        }
        self.metrics.ended_workers.increment(1);
        Err(DispatchError::EndsWorkers { workers: losses.to_string() })
    }

    fn log_resumed(&self, work: Work<'_>, reason: FailureReason, lost: &str, now: &Placement) {
        if let Some(left_out) = self.resumes_logged.admit() {
            tracing::info!(
                request_id = %work.prompt.request_id,
                client_request_id = work.prompt.client_request_id.as_deref(),
                lost_worker = lost,
                worker = now.decode.worker.worker_id,
                generated_tokens = work.generated(),
                reason = reason.label(),
                left_out,
                "answer resumed on another worker"
            );
        }
    }
}

impl Generation {
    /// Returns the name of the decode worker on which the generation runs now.
    pub(crate) fn decode_worker(&self) -> &str {
        &self.attempt.placement.decode.worker.worker_id
    }

    /// Returns the worker's next message, and keeps the request booked during the wait. `Scheduled` is returned only if it reports cached
    /// tokens that were announced for later. The router receives these cached tokens, too. Cancel-safe, unless the router's stream is full
    /// when that report arrives.
    ///
    /// # Errors
    /// The attempt failed. The generation can be resumed.
    pub(crate) async fn next(&mut self, prompt: &Prompt) -> Result<Message, AttemptError> {
        loop {
            let message = tokio::select! {
                biased;
                reply = self.attempt.next() => reply?,
                never = self.booking.maintain(prompt) => match never {},
            };
            if let Message::Scheduled(scheduled) = &message {
                if !self.facts.report_later(scheduled) {
                    continue;
                }
                if let Some(cached_tokens) = scheduled.cached_tokens {
                    self.booking.cached_tokens_reported(cached_tokens).await;
                }
            }
            return Ok(message);
        }
    }

    /// Called when all samples have ended. If their cached tokens are still to be reported, ends the generation on the worker and waits for
    /// the report, but no longer than [`REPORT_WAIT_MAX`]. `None`: there is nothing to report, or the worker has not reported in time.
    pub(crate) async fn late_report(&mut self, prompt: &Prompt) -> Option<LateReport> {
        if !self.facts.awaits_cached_tokens() {
            return None;
        }
        let finish = self.attempt.finish(prompt);
        let report = async {
            loop {
                match self.next(prompt).await {
                    Ok(Message::Scheduled(scheduled)) => return LateReport::Scheduled(scheduled),
                    Ok(_) => {}
                    Err(_) => return LateReport::Lost,
                }
            }
        };
        let report = tokio::select! {
            biased;
            report = timeout(REPORT_WAIT_MAX, report) => report.ok(),
            never = finish.then(|()| pending::<Infallible>()) => match never {},
        };
        if !matches!(report, Some(LateReport::Scheduled(_))) {
            tracing::debug!(request_id = %prompt.request_id, "the worker has not reported the cached tokens");
        }
        // The cached tokens of an answer are reported only once, so no further report is awaited.
        self.facts.lose_cached_tokens();
        report
    }

    /// Returns the error for the current attempt if a reply of its decode worker is invalid or reports a failure.
    pub(crate) fn failed(&self, reason: FailureReason) -> AttemptError {
        AttemptError::new(self.attempt.instance_id(), reason)
    }

    /// Ends the generation on the workers, then the booking. All samples have ended, with this number of tokens together.
    pub(crate) async fn close(self, generated_tokens: u64) {
        drop(self.attempt);
        self.booking.close(generated_tokens).await;
    }
}
