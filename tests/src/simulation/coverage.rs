//! Counts of the events that simulations must exercise, such as preemptions.

use super::client::Outcome;
use std::ops::AddAssign;
use tandem::audit::MetricSamples;
use tandem_process::Metrics;

/// Counters of the events that one simulation, or several of them, exercised.
#[derive(Clone, Copy, Debug, Default)]
pub struct Coverage {
    /// The number of requests that were sent.
    pub requests: u64,
    /// The number of requests with a complete answer.
    pub answered: u64,
    /// The number of attempts that failed before their first token.
    pub attempts_failed: u64,
    /// The number of answers that another worker resumed.
    pub migrations: u64,
    /// The number of preempted sequences.
    pub preemptions: u64,
    /// The number of prompt tokens that were found in a cache.
    pub cached_tokens: u64,
    /// The number of bytes of blocks that were transferred between workers.
    pub transferred_bytes: u64,
}

impl Coverage {
    pub(super) fn count(outcomes: &[Outcome], metrics: &Metrics) -> Self {
        let mut samples = MetricSamples::default();
        samples.add(&metrics.render());
        let sum = |series, labels| samples.sum(series, labels) as u64;
        Self {
            requests: outcomes.len() as u64,
            answered: outcomes.iter().filter(|outcome| outcome.line().usage.is_some()).count() as u64,
            attempts_failed: sum("tandem_frontend_attempts_failed_total", ""),
            migrations: sum("tandem_frontend_migrations_total", ""),
            preemptions: sum("tandem_worker_preemptions_total", ""),
            cached_tokens: sum("tandem_frontend_cached_tokens_total", ""),
            transferred_bytes: sum("tandem_worker_kv_transfer_bytes_total", "received"),
        }
    }

    fn counters(&mut self) -> [&mut u64; 7] {
        let Self { requests, answered, attempts_failed, migrations, preemptions, cached_tokens, transferred_bytes } = self;
        [requests, answered, attempts_failed, migrations, preemptions, cached_tokens, transferred_bytes]
    }

    /// Returns whether every counter reaches its minimum.
    pub fn reaches(mut self, mut minimum: Self) -> bool {
        self.counters().iter().zip(minimum.counters()).all(|(count, minimum)| **count >= *minimum)
    }
}

impl AddAssign for Coverage {
    fn add_assign(&mut self, mut other: Self) {
        self.counters().into_iter().zip(other.counters()).for_each(|(sum, more)| *sum += *more);
    }
}
