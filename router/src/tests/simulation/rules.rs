//! The rules by which other routers choose workers, according to their documentation and sources, for comparison. Each rule gets the same
//! input as this router's own rule.

use super::Lcg;
use crate::route::{Candidate, PlacementQuery};
use std::cmp::Reverse;

/// A rule that chooses a worker which prefills and decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// The rule of this router.
    Tandem,
    /// Chooses the worker with the least `max(0, (active prefill tokens + prompt tokens) / block size - overlap) + decode blocks`.
    Dynamo,
    /// Chooses the worker with the longest cached prefix if that is more than half of the prompt and the cluster is balanced, or else the
    /// worker with the fewest requests.
    Sglang,
    /// Chooses the worker with the highest weighted score: 3 for the cached prefix, 2 for the queue, 2 for free KV.
    LlmD,
    FewestRequests,
    RoundRobin,
}

/// All rules except this router's own rule.
pub(super) const OTHER_RULES: [Rule; 5] = [Rule::Dynamo, Rule::Sglang, Rule::LlmD, Rule::FewestRequests, Rule::RoundRobin];

/// SGLang's thresholds. The cluster is imbalanced if the highest load exceeds the lowest by more than the first number and is more than the
/// second number times the lowest.
const IMBALANCE: (u32, f64) = (32, 1.000_1);

impl Rule {
    /// Returns the position of the chosen worker; `None`: the router itself chooses.
    pub(super) fn choose(self, query: &PlacementQuery, workers: &[Candidate], turn: u64) -> Option<usize> {
        let blocks = |tokens: u64| tokens as f64 / f64::from(query.block_size);
        let prompt_blocks = blocks(u64::from(query.prompt_tokens));
        match self {
            Self::Tandem => None,
            _ if workers.is_empty() => None,
            Self::RoundRobin => Some(turn as usize % workers.len()),
            Self::FewestRequests => Some(least(workers, turn, |worker| f64::from(worker.sequences))),
            Self::Dynamo => Some(least(workers, turn, |worker| {
                let queued = blocks(worker.queued_tokens);
                let prefill = (queued + prompt_blocks - f64::from(worker.overlap_blocks)).max(0.0);
                prefill + f64::from(worker.in_use_blocks) + queued
            })),
            Self::Sglang => {
                let load = |worker: &Candidate| worker.sequences;
                let (min, max) = (workers.iter().map(load).min()?, workers.iter().map(load).max()?);
                let balanced = max - min <= IMBALANCE.0 || f64::from(max) <= IMBALANCE.1 * f64::from(min);
                let longest = least(workers, turn, |worker| -f64::from(worker.overlap_blocks));
                let matches = f64::from(workers[longest].overlap_blocks) > prompt_blocks / 2.0;
                if balanced && matches { Some(longest) } else { Self::FewestRequests.choose(query, workers, turn) }
            }
            Self::LlmD => {
                let queue = |worker: &Candidate| f64::from(worker.sequences - worker.running);
                let longest = workers.iter().map(queue).fold(0.0, f64::max).max(1.0);
                Some(least(workers, turn, |worker| {
                    let prefix = f64::from(worker.overlap_blocks) / prompt_blocks;
                    let total = f64::from((worker.in_use_blocks + worker.available_blocks).max(1));
                    let used = f64::from(worker.in_use_blocks) / total;
                    -(3.0 * prefix + 2.0 * (1.0 - queue(worker) / longest) + 2.0 * (1.0 - used))
                }))
            }
        }
    }
}

/// Returns the worker with the least value. Chooses one at random if several workers have this value.
fn least(workers: &[Candidate], turn: u64, of: impl Fn(&Candidate) -> f64) -> usize {
    let random = |at: usize| Lcg(turn.wrapping_mul(0x9E37_79B9) + at as u64 * 7_919).below(1 << 20);
    let all = workers.iter().enumerate();
    let (at, _) = all
        .min_by(|(a, one), (b, other)| of(one).total_cmp(&of(other)).then_with(|| Reverse(random(*a)).cmp(&Reverse(random(*b)))))
        .expect("the world has workers");
    at
}
