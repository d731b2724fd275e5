//! How many prompts the workers of one role have to compute in a second, and how many tokens.

use crate::route::{ByRole, WorkerDemand, WorkerRole};
use std::time::Duration;
use tokio::time::Instant;

/// The age in seconds at which a placement has half the weight of the latest one. The sums thus include some placements even in a quiet
/// cluster, but follow a change of the load.
const HALF_LIFE: u64 = 30;

/// The latest placements of one model, by the role of the worker that computes the prompt.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Demands(ByRole<DemandSums<HALF_LIFE>>);

/// Sums over placements, in which older placements have less weight: half of it at the age of `HALF_LIFE_S` seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DemandSums<const HALF_LIFE_S: u64> {
    prompts: f64,
    tokens: f64,
    at: Option<Instant>,
}

impl Demands {
    /// Adds a prompt of which a worker of this role computes `tokens` tokens.
    pub(crate) fn add(&mut self, role: WorkerRole, tokens: u64, now: Instant) {
        self.0.of_mut(role).add(tokens, now);
    }

    pub(crate) fn per_second(&self, now: Instant) -> ByRole<WorkerDemand> {
        self.0.map(|sums| sums.per_second(now))
    }
}

impl<const HALF_LIFE_S: u64> DemandSums<HALF_LIFE_S> {
    /// Adds a prompt of which `tokens` tokens are computed.
    pub(crate) fn add(&mut self, tokens: u64, now: Instant) {
        let before = self.at(now);
        *self = Self { prompts: before.prompts + 1.0, tokens: before.tokens + tokens as f64, at: Some(now) };
    }

    pub(crate) fn per_second(&self, now: Instant) -> WorkerDemand {
        let (Self { prompts, tokens, .. }, factor) = (self.at(now), std::f64::consts::LN_2 / HALF_LIFE_S as f64);
        WorkerDemand { prompts: prompts * factor, tokens: tokens * factor }
    }

    /// Returns the sum of the tokens.
    pub(crate) fn sum(&self, now: Instant) -> f64 {
        self.at(now).tokens
    }

    fn at(self, now: Instant) -> Self {
        let age = self.at.map_or(Duration::ZERO, |at| now.duration_since(at));
        let kept = (-age.as_secs_f64() / HALF_LIFE_S as f64).exp2();
        Self { prompts: self.prompts * kept, tokens: self.tokens * kept, at: self.at }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demand_per_second_follows_the_latest_placements() {
        let (mut demands, mut now) = (Demands::default(), Instant::now());
        assert_eq!(demands.per_second(now).of(WorkerRole::Prefill), WorkerDemand::default());
        for _ in 0..3_000 {
            now += Duration::from_millis(100);
            demands.add(WorkerRole::Prefill, 500, now);
        }
        let WorkerDemand { prompts, tokens } = demands.per_second(now).of(WorkerRole::Prefill);
        assert!((9.9..10.3).contains(&prompts) && (4_950.0..5_150.0).contains(&tokens), "{prompts} {tokens}");
        assert_eq!(demands.per_second(now).of(WorkerRole::Decode), WorkerDemand::default());
        let later = demands.per_second(now + Duration::from_secs(HALF_LIFE)).of(WorkerRole::Prefill);
        assert!((later.prompts / prompts - 0.5).abs() < 1e-9 && (later.tokens / tokens - 0.5).abs() < 1e-9, "{later:?}");
    }
}
