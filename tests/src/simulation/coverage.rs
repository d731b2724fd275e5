//! Coverage of simulations: how often they exercised what they are for.

use super::client::Seen;
use std::ops::AddAssign;
use tandem::audit::Samples;
use tandem_node::Metrics;

/// Counters over one seed or many.
#[derive(Clone, Copy, Debug, Default)]
pub struct Coverage {
    /// Requests.
    pub requests: u64,
    /// Requests with a complete answer.
    pub answered: u64,
    /// Attempts that failed before their first token.
    pub attempts_failed: u64,
    /// Answers that another worker resumed.
    pub migrations: u64,
    /// Preempted sequences.
    pub preemptions: u64,
    /// Cached prompt tokens.
    pub cached_tokens: u64,
    /// Bytes of blocks transferred between workers.
    pub transferred_bytes: u64,
}

impl Coverage {
    pub(super) fn of(seen: &[Seen], metrics: &Metrics) -> Self {
        let mut samples = Samples::default();
        samples.add(&metrics.render());
        let sum = |series, labels| samples.sum(series, labels) as u64;
        Self {
            requests: seen.len() as u64,
            answered: seen.iter().filter(|seen| seen.line().usage.is_some()).count() as u64,
            attempts_failed: sum("tandem_frontend_attempts_failed_total", ""),
            migrations: sum("tandem_frontend_migrations_total", ""),
            preemptions: sum("tandem_worker_preemptions_total", ""),
            cached_tokens: sum("tandem_frontend_cached_tokens_total", ""),
            transferred_bytes: sum("tandem_worker_kv_transfer_bytes_total", "received"),
        }
    }

    fn each(&mut self) -> [&mut u64; 7] {
        let Self { requests, answered, attempts_failed, migrations, preemptions, cached_tokens, transferred_bytes } = self;
        [requests, answered, attempts_failed, migrations, preemptions, cached_tokens, transferred_bytes]
    }

    /// Whether every counter reaches its minimum.
    pub fn covers(mut self, mut least: Self) -> bool {
        self.each().iter().zip(least.each()).all(|(coverage, least)| **coverage >= *least)
    }
}

impl AddAssign for Coverage {
    fn add_assign(&mut self, mut other: Self) {
        self.each().into_iter().zip(other.each()).for_each(|(sum, more)| *sum += *more);
    }
}
