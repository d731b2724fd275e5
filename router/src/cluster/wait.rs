//! Refuses requests that would wait too long in line (docs/adr/035-admission-by-wait.md).

use super::{
    members::Member,
    placement::Decision,
    request::{PlacementError, PlacementRequest},
};
use crate::{
    line::Waiting,
    route::{self, Choice, Cost, CostsByUse, Role},
};
use std::time::Duration;
use tokio::time::Instant;

/// The speed that a line without a measured one is assumed to have, as a fraction of its worker's prefill rate. Decoding, and the fixed times of steps,
/// take the rest.
const EFFICIENCY: f64 = 0.75;

/// Estimates how long a request would wait for each candidate of a decision.
struct Waits<'a> {
    decision: &'a Decision<'a>,
    request: Waiting,
    now: Instant,
    /// The mean speed of the lines of prefill workers and of those of decode workers; `None`: the speed of no line is known.
    prefill_speed: Option<f64>,
    decode_speed: Option<f64>,
    /// The mean prefill rate of the workers that have measured one; `None`: no worker has.
    mean_rate: Option<f64>,
}

/// How long the request would wait for each use of one worker, in milliseconds. The wait for a pair is the longer one of its two workers, because the
/// request waits for both at the same time.
#[derive(Clone, Copy)]
struct WaitByUse {
    prefill: f64,
    decode: f64,
    local: f64,
}

impl Decision<'_> {
    /// Returns how many prompt tokens the request has to compute with this choice.
    pub(super) fn new_tokens(&self, choice: Choice) -> u64 {
        let computes = &self.candidates[choice.prefill.unwrap_or(choice.decode)];
        computes.new_tokens(&self.query, u64::from(computes.overlap_blocks) + u64::from(computes.predicted_blocks))
    }

    /// Returns the request's entry in the line of the chosen worker.
    pub(super) fn waiting(&self, request: &PlacementRequest, choice: Choice) -> Waiting {
        Waiting::new(request.account.clone(), request.priority, self.new_tokens(choice))
    }

    /// Returns `choice`, the cheapest one, with the estimated wait in line. If that is longer than `max_wait`, returns the cheapest choice with
    /// which it is not.
    ///
    /// # Errors
    /// The request would wait for longer with every choice.
    pub(super) fn within(
        &self,
        request: &PlacementRequest,
        choice: Choice,
        max_wait: Option<Duration>,
        now: Instant,
    ) -> Result<(Choice, Duration), PlacementError> {
        let waits = Waits::new(self, self.waiting(request, choice), now);
        let max_ms = max_wait.map_or(f64::INFINITY, |max_wait| max_wait.as_secs_f64() * 1e3);
        if waits.of(choice) <= max_ms {
            return Ok((choice, from_ms(waits.of(choice))));
        }
        let by_use: Vec<WaitByUse> = (0..self.members.len()).map(|at| waits.by_use(at)).collect();
        let cheapest = |cost: &dyn Fn(Cost, f64) -> Option<Cost>| {
            let costs = self.costs.iter().zip(&by_use).map(|(costs, wait)| CostsByUse {
                prefill: costs.prefill.and_then(|of_use| cost(of_use, wait.prefill)),
                decode: costs.decode.and_then(|of_use| cost(of_use, wait.decode)),
                local: costs.local.and_then(|of_use| cost(of_use, wait.local)),
            });
            let costs: Vec<CostsByUse> = costs.collect();
            route::place(&costs, &self.query, &self.candidates, self.seed).ok()
        };
        if let Some(choice) = cheapest(&|cost, wait_ms| (wait_ms <= max_ms).then_some(cost)) {
            return Ok((choice, from_ms(waits.of(choice))));
        }
        let shortest = cheapest(&|_, wait_ms| Some(Cost { queue_ms: wait_ms, ..Cost::default() })).unwrap_or(choice);
        Err(PlacementError::Overloaded { retry_after: from_ms(waits.of(shortest) - max_ms) })
    }
}

impl<'a> Waits<'a> {
    fn new(decision: &'a Decision<'a>, request: Waiting, now: Instant) -> Self {
        let mean = |role: Role| {
            let of_role = decision.members.iter().filter(|member| member.role == role);
            average(of_role.filter_map(|member| member.line.speed(now)))
        };
        let rate = |member: &&Member| Some(member.load.prefill_tokens_per_second).filter(|rate| *rate > 0.0);
        Self {
            decision,
            request,
            now,
            prefill_speed: mean(Role::Prefill),
            decode_speed: mean(Role::Decode),
            mean_rate: average(decision.members.iter().filter_map(rate)),
        }
    }

    /// Estimates the waits for one candidate. A line whose speed is not known is assumed to have the mean speed of the other lines of its role. If
    /// none is known, the queued tokens are divided by a part of the worker's rate. The estimate of the cost, which
    /// includes the wait for blocks, is used as well once an answer has ended. A cluster that has measured nothing refuses nothing.
    fn by_use(&self, at: usize) -> WaitByUse {
        let (member, costs) = (self.decision.members[at], self.decision.costs[at]);
        let mean = if member.role == Role::Prefill { self.prefill_speed } else { self.decode_speed };
        let speed = member.line.speed(self.now).or(mean);
        let line_ms = speed.map(|speed| member.line.wait(&self.request, speed).as_secs_f64() * 1e3);
        let measured = self.decision.answers_measured && self.mean_rate.is_some();
        let estimate = |cost: Option<Cost>| cost.filter(|_| measured).map_or(0.0, |cost| cost.queue_ms);
        let queue_ms = || self.queue_ms(at);
        WaitByUse {
            prefill: line_ms.unwrap_or_else(|| estimate(costs.prefill).max(queue_ms())),
            // The line of a prefill worker moves only as fast as decode workers take its prompts.
            decode: if self.prefill_speed.is_some() { 0.0 } else { estimate(costs.decode) },
            local: line_ms.unwrap_or_else(|| estimate(costs.local).max(queue_ms())),
        }
    }

    /// Returns the time in which the queue of one candidate would be computed, at a part of the worker's rate or of the mean of the others. Zero before
    /// any worker has measured a rate.
    fn queue_ms(&self, at: usize) -> f64 {
        let own = self.decision.members[at].load.prefill_tokens_per_second;
        let Some(rate) = Some(own).filter(|rate| *rate > 0.0).or(self.mean_rate) else { return 0.0 };
        self.decision.candidates[at].queued_tokens as f64 / (rate * EFFICIENCY) * 1e3
    }

    fn of(&self, choice: Choice) -> f64 {
        match choice.prefill {
            None => self.by_use(choice.decode).local,
            Some(prefill) => self.by_use(prefill).prefill.max(self.by_use(choice.decode).decode),
        }
    }
}

fn average(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), value| (sum + value, count + 1.0));
    (count > 0.0).then(|| sum / count)
}

/// Converts milliseconds; absurd estimates become the longest duration, and negative ones the shortest.
fn from_ms(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms.max(0.0) / 1e3).unwrap_or(Duration::MAX)
}
