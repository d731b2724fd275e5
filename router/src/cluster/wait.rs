//! Refuses requests that would wait too long in the queue (docs/adr/035-admission-by-wait.md).

use super::{
    placement::{PlacementDecision, Question},
    request::{PlacementError, PlacementRequest},
};
use crate::{
    places::Room,
    prefill_queue::QueueEntry,
    route::{self, ByRole, Cost, CostsByUse, RouteChoice, WorkerRole},
};
use std::{cell::OnceCell, time::Duration};
use tokio::time::Instant;

/// The assumed speed of a queue whose speed was not measured, as a fraction of its worker's prefill rate. Decoding, and the fixed times of
/// steps, take the rest of the worker's time.
const EFFICIENCY: f64 = 0.75;

/// Estimates how long a request would wait for each candidate of a decision.
struct Waits<'a> {
    decision: &'a PlacementDecision<'a>,
    request: QueueEntry,
    now: Instant,
    /// They are computed only if they are needed.
    means: OnceCell<MeanSpeeds>,
}

/// Means over all workers of a model; `None` where no worker has measured anything.
#[derive(Clone, Copy, Debug)]
pub(super) struct MeanSpeeds {
    /// The speed of the queues of prefill workers and of those of decode workers.
    pub(super) queue: ByRole<Option<f64>>,
    /// The prefill rate.
    pub(super) rate: Option<f64>,
}

/// How long the request would wait for each use of one worker, in milliseconds. The wait for a prefill worker and a decode worker is the
/// longer of the two waits, because the request waits in both queues at the same time.
#[derive(Clone, Copy)]
struct WaitByUse {
    prefill: f64,
    decode: f64,
    local: f64,
}

impl PlacementDecision<'_> {
    /// Returns how many prompt tokens the request has to compute with this choice.
    pub(super) fn new_tokens(&self, choice: RouteChoice) -> u64 {
        let computes = &self.candidates[choice.prefill.unwrap_or(choice.decode)];
        computes.new_tokens(&self.question.query, u64::from(computes.overlap_blocks) + u64::from(computes.predicted_blocks))
    }

    /// Returns the request's entry in the queue of the chosen worker.
    pub(super) fn waiting(&self, request: &PlacementRequest, choice: RouteChoice) -> QueueEntry {
        QueueEntry::new(request.account.clone(), request.priority, self.new_tokens(choice))
    }

    /// Returns the decision with its choice and the estimated wait in the queue; `None` if there is no choice, or if the wait exceeds the
    /// request's limit.
    pub(super) fn at_once(self, request: &PlacementRequest, now: Instant) -> Option<(Self, RouteChoice, Duration)> {
        let choice = self.choice.ok()?;
        let wait_ms = wait_of(choice, |at| Waits::new(&self, self.waiting(request, choice), now).by_use(at));
        (wait_ms <= max_ms(request)).then_some((self, choice, from_ms(wait_ms)))
    }

    /// Returns `choice`, the cheapest one, with the estimated wait in the queue. If that wait exceeds the request's limit, returns the
    /// cheapest choice whose wait does not.
    ///
    /// # Errors
    /// The wait exceeds the limit with every choice.
    pub(super) fn within(
        &self,
        request: &PlacementRequest,
        choice: RouteChoice,
        now: Instant,
    ) -> Result<(RouteChoice, Duration), PlacementError> {
        let waits = Waits::new(self, self.waiting(request, choice), now);
        let max_ms = max_ms(request);
        let wait_ms = wait_of(choice, |at| waits.by_use(at));
        if wait_ms <= max_ms {
            return Ok((choice, from_ms(wait_ms)));
        }
        let by_use = waits.by_uses();
        if let Some(choice) = self.cheapest(&by_use, |cost, wait_ms| (wait_ms <= max_ms).then_some(cost)) {
            return Ok((choice, from_ms(wait_of(choice, |at| by_use[at]))));
        }
        Err(self.retry_after_shortest(&by_use, max_ms))
    }

    /// Returns the error of a request that has waited in the queue for longer than `max_wait`.
    pub(super) fn overloaded(&self, request: &PlacementRequest, max_wait: Duration, now: Instant) -> PlacementError {
        let Ok(choice) = self.choice else { return PlacementError::Overloaded { retry_after: Duration::ZERO } };
        let waits = Waits::new(self, self.waiting(request, choice), now);
        self.retry_after_shortest(&waits.by_uses(), max_wait.as_secs_f64() * 1e3)
    }

    /// Returns the error of a request whose wait exceeds `max_ms` with every choice. It may be tried again after the time by which the
    /// shortest wait exceeds `max_ms`.
    fn retry_after_shortest(&self, by_use: &[WaitByUse], max_ms: f64) -> PlacementError {
        let shortest = self.cheapest(by_use, |_, wait_ms| Some(Cost { queue_ms: wait_ms, ..Cost::default() }));
        let wait_ms = shortest.map_or(0.0, |choice| wait_of(choice, |at| by_use[at]));
        PlacementError::Overloaded { retry_after: from_ms(wait_ms - max_ms) }
    }

    /// Returns the cheapest choice. For each use of a worker (prefill, decode, both), `cost` computes the cost to compare from the estimated
    /// cost and the wait, or returns `None` to exclude the use.
    fn cheapest(&self, by_use: &[WaitByUse], cost: impl Fn(Cost, f64) -> Option<Cost>) -> Option<RouteChoice> {
        let costs = self.costs.iter().zip(by_use).map(|(costs, wait)| CostsByUse {
            prefill: costs.prefill.and_then(|of_use| cost(of_use, wait.prefill)),
            decode: costs.decode.and_then(|of_use| cost(of_use, wait.decode)),
            local: costs.local.and_then(|of_use| cost(of_use, wait.local)),
        });
        route::place(&costs.collect::<Vec<_>>(), &self.question.query, &self.candidates, self.question.seed).ok()
    }
}

impl<'a> Waits<'a> {
    fn new(decision: &'a PlacementDecision<'a>, request: QueueEntry, now: Instant) -> Self {
        Self { decision, request, now, means: OnceCell::new() }
    }

    fn means(&self) -> &MeanSpeeds {
        self.means.get_or_init(|| self.decision.all.mean_speeds(&self.decision.question.model, self.now))
    }

    /// Estimates the waits for one candidate. If the speed of its queue is not known, the mean speed of the queues of its role is assumed.
    /// If no speed is known, the wait is [`Self::queue_ms`]. So a cluster that has measured nothing, and whose requests do not wait,
    /// refuses no request.
    fn by_use(&self, at: usize) -> WaitByUse {
        let member = self.decision.members[at];
        let speed = member.queue.speed(self.now).or_else(|| self.means().queue.of(member.role));
        let queue = member.queue.wait(&self.request, speed.unwrap_or(f64::INFINITY), self.now);
        let line_ms = (queue.as_secs_f64() * 1e3).max(if speed.is_some() { 0.0 } else { self.queue_ms(at) });
        let place_ms = if member.role == WorkerRole::Decode { self.place(at).as_secs_f64() * 1e3 } else { 0.0 };
        WaitByUse { prefill: line_ms, decode: place_ms, local: line_ms.max(place_ms) }
    }

    /// Estimates how long the request waits for a place in the batch and for blocks on this decode worker.
    fn place(&self, at: usize) -> Duration {
        let Self { decision: PlacementDecision { members, candidates, question, .. }, request, now, .. } = self;
        let Question { query, pace, .. } = question;
        let candidate = &candidates[at];
        let known = u64::from(candidate.overlap_blocks);
        let room = Room {
            sequences_max: members[at].info.sequences_max,
            sequences: candidate.sequences,
            running: candidate.running,
            in_use_blocks: candidate.in_use_blocks,
            available_blocks: candidate.available_blocks,
            wanted_blocks: u32::try_from(candidate.new_tokens(query, known).div_ceil(query.block_size.into()))
                .unwrap_or(u32::MAX),
            samples_yield: members[at].info.transfer_family.is_empty(),
        };
        room.wait(members[at].bookings.answers(), request.owner(), *pace, *now)
    }

    fn by_uses(&self) -> Vec<WaitByUse> {
        (0..self.decision.members.len()).map(|at| self.by_use(at)).collect()
    }

    /// Returns the time to compute the candidate's queued tokens at [`EFFICIENCY`] times its prefill rate, or times the mean rate if it has
    /// measured none. Returns 0 before any worker has measured a rate.
    fn queue_ms(&self, at: usize) -> f64 {
        let own = self.decision.members[at].load.prefill_tokens_per_second;
        let Some(rate) = Some(own).filter(|rate| *rate > 0.0).or_else(|| self.means().rate) else { return 0.0 };
        self.decision.candidates[at].queued_tokens as f64 / (rate * EFFICIENCY) * 1e3
    }
}

/// Returns how long the request may wait.
fn max_ms(request: &PlacementRequest) -> f64 {
    request.max_wait.map_or(f64::INFINITY, |max_wait| max_wait.as_secs_f64() * 1e3)
}

/// Returns the wait for a choice in milliseconds. `by_use` returns the waits for one candidate.
fn wait_of(choice: RouteChoice, by_use: impl Fn(usize) -> WaitByUse) -> f64 {
    match choice.prefill {
        None => by_use(choice.decode).local,
        Some(prefill) => by_use(prefill).prefill.max(by_use(choice.decode).decode),
    }
}

/// Converts milliseconds; absurd estimates become the longest duration, and negative ones the shortest.
fn from_ms(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms.max(0.0) / 1e3).unwrap_or(Duration::MAX)
}
