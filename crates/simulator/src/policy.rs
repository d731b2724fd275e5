//! The rules by which this router and others choose workers. The rules of other routers are implemented from their documentation, and receive
//! the same input as this router's own rule.

use clap::ValueEnum;
use tandem_kv::mix;
use tandem_router::Candidate;

/// A rule that chooses workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoutingRule {
    /// The rule of this router: the lowest cost, that is the estimated time to the first token and by how much others are delayed
    Tandem,
    /// One worker after the other
    RoundRobin,
    /// A random worker
    Random,
    /// The worker with the fewest requests
    FewestRequests,
    /// Dynamo's: the least `max(0, (active prefill tokens + prompt tokens) / block size - overlap) + decode blocks`
    Dynamo,
    /// llm-d's scorers: the highest weighted score, 3 for the cached prefix, 2 for the queue, 2 for free KV
    #[value(name = "llm-d")]
    LlmD,
    /// SGLang's: the longest cached prefix if that is more than half of the prompt and the cluster is balanced, or else the fewest
    /// requests
    Sglang,
}

/// The properties of a request that a routing rule can use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Query {
    pub(crate) prompt_tokens: u64,
    pub(crate) block_tokens: u64,
    /// Whether only the load counts and the cached prefix is ignored. Other routers do so when they choose the decode worker of a pair.
    pub(crate) by_load: bool,
    /// The number of the request, on which the rotation and random choices depend.
    pub(crate) number: u64,
    pub(crate) seed: u64,
}

/// SGLang's thresholds. A cluster is imbalanced if its highest load exceeds its lowest load by more than the first number, and also exceeds
/// the lowest load times the second number.
const IMBALANCE: (u32, f64) = (32, 1.000_1);

impl Query {
    fn overlap(&self, worker: &Candidate) -> f64 {
        if self.by_load { 0.0 } else { f64::from(worker.overlap_blocks) }
    }

    fn blocks(&self, tokens: u64) -> f64 {
        tokens as f64 / self.block_tokens as f64
    }

    /// Returns a pseudo-random number for this request and the worker at the position `at`.
    fn random(&self, at: usize) -> u64 {
        mix(mix(self.seed ^ self.number.wrapping_mul(0x9E37_79B9_7F4A_7C15)) ^ at as u64)
    }

    /// Returns the position of the worker for which `of` is lowest. If several workers are equal, chooses a random one of them.
    fn least(&self, workers: &[&Candidate], of: impl Fn(&Candidate) -> f64) -> Option<usize> {
        let ranked = workers.iter().enumerate().map(|(at, worker)| (of(worker), self.random(at), at));
        let least = ranked.min_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1)));
        least.map(|(_, _, at)| at)
    }
}

impl RoutingRule {
    /// Returns the name of the rule on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tandem => "tandem",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::FewestRequests => "fewest-requests",
            Self::Dynamo => "dynamo",
            Self::LlmD => "llm-d",
            Self::Sglang => "sglang",
        }
    }

    /// Returns the position of the chosen worker. Returns `None` if there are no workers, and for [`RoutingRule::Tandem`], whose choice the
    /// real router makes.
    pub(crate) fn choose(self, query: &Query, workers: &[&Candidate]) -> Option<usize> {
        match self {
            Self::Tandem => None,
            _ if workers.is_empty() => None,
            Self::RoundRobin => Some((query.number % workers.len() as u64) as usize),
            Self::Random => query.least(workers, |_| 0.0),
            Self::FewestRequests => query.least(workers, |worker| f64::from(worker.sequences)),
            Self::Dynamo => query.least(workers, |worker| {
                let queued = query.blocks(worker.queued_tokens);
                let prefill = (queued + query.blocks(query.prompt_tokens) - query.overlap(worker)).max(0.0);
                prefill + f64::from(worker.in_use_blocks) + queued
            }),
            Self::Sglang => {
                let load = |worker: &&Candidate| worker.sequences;
                let (min, max) = (workers.iter().map(load).min()?, workers.iter().map(load).max()?);
                let balanced = max - min <= IMBALANCE.0 || f64::from(max) <= IMBALANCE.1 * f64::from(min);
                let longest = query.least(workers, |worker| -query.overlap(worker))?;
                let matches = query.overlap(workers[longest]) > query.blocks(query.prompt_tokens) / 2.0;
                if balanced && matches { Some(longest) } else { Self::FewestRequests.choose(query, workers) }
            }
            Self::LlmD => {
                let queue = |worker: &Candidate| f64::from(worker.sequences.saturating_sub(worker.running));
                let longest = workers.iter().map(|worker| queue(worker)).fold(1.0, f64::max);
                query.least(workers, |worker| {
                    let prefix = query.overlap(worker) / query.blocks(query.prompt_tokens);
                    let total = f64::from((worker.in_use_blocks + worker.available_blocks).max(1));
                    let used = f64::from(worker.in_use_blocks) / total;
                    -(3.0 * prefix + 2.0 * (1.0 - queue(worker) / longest) + 2.0 * (1.0 - used))
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_router::{RouterSettings, VirtualRouter, VirtualWorker, WorkerRole};

    /// Returns idle workers with caches of 100 blocks, changed by `change`.
    fn workers(count: usize, change: impl Fn(usize, &mut Candidate)) -> Vec<Candidate> {
        let mut router = VirtualRouter::new(RouterSettings::default());
        for _ in 0..count {
            router.join(VirtualWorker {
                role: WorkerRole::Decode,
                block_size: 16,
                capacity_blocks: 100,
                block_bytes: 1,
                step_tokens: 0,
            });
        }
        let mut workers: Vec<Candidate> = router.candidates(&[]).into_iter().map(|(_, candidate)| candidate).collect();
        for (at, worker) in workers.iter_mut().enumerate() {
            worker.available_blocks = 100;
            change(at, worker);
        }
        workers
    }

    fn choose(policy: RoutingRule, workers: &[Candidate], number: u64, by_load: bool) -> Option<usize> {
        let query = Query { prompt_tokens: 160, block_tokens: 16, by_load, number, seed: 1 };
        policy.choose(&query, &workers.iter().collect::<Vec<_>>())
    }

    #[test]
    fn rules_choose_by_their_own_criteria() {
        // Worker 0 has cached 8 of the prompt's 10 blocks, and has a queue of 10 requests. Worker 1 has cached 4 of them. Worker 2 has cached
        // none, and its memory is nearly full.
        let busy = workers(3, |at, worker| match at {
            0 => (worker.overlap_blocks, worker.sequences, worker.running, worker.queued_tokens) = (8, 12, 2, 320),
            1 => (worker.overlap_blocks, worker.sequences, worker.running) = (4, 2, 2),
            _ => (worker.in_use_blocks, worker.available_blocks, worker.sequences, worker.running) = (90, 10, 1, 1),
        });
        for (policy, by_load, expected) in [
            (RoutingRule::Tandem, false, None),
            (RoutingRule::FewestRequests, false, Some(2)),
            // The scores are 20 + 10 - 8 + 20 = 42 for worker 0, 10 - 4 = 6 for worker 1, and 10 + 90 = 100 for worker 2.
            (RoutingRule::Dynamo, false, Some(1)),
            (RoutingRule::Dynamo, true, Some(1)),
            // Worker 0 has cached more than half of the prompt, and the loads differ by less than 32.
            (RoutingRule::Sglang, false, Some(0)),
            (RoutingRule::Sglang, true, Some(2)),
            // The scores are 2.4 + 0 + 2 = 4.4 for worker 0, 1.2 + 2 + 2 = 5.2 for worker 1, and 0 + 2 + 0.2 = 2.2 for worker 2.
            (RoutingRule::LlmD, false, Some(1)),
        ] {
            assert_eq!(choose(policy, &busy, 7, by_load), expected, "{policy:?}");
        }
    }

    #[test]
    fn sglang_rule_ignores_cached_prefixes_if_loads_differ_too_much() {
        let far = workers(2, |at, worker| {
            if at == 0 {
                (worker.overlap_blocks, worker.sequences) = (10, 33);
            }
        });
        assert_eq!(choose(RoutingRule::Sglang, &far, 1, false), Some(1));
    }

    #[test]
    fn round_robin_alternates_and_random_reaches_all_workers() {
        let idle = workers(3, |_, _| {});
        let chosen: Vec<_> = (0..6).filter_map(|number| choose(RoutingRule::RoundRobin, &idle, number, false)).collect();
        assert_eq!(chosen, [0, 1, 2, 0, 1, 2]);
        for policy in [RoutingRule::Random, RoutingRule::FewestRequests, RoutingRule::Dynamo, RoutingRule::LlmD] {
            let mut counts = [0; 3];
            (0..300).filter_map(|number| choose(policy, &idle, number, false)).for_each(|at| counts[at] += 1);
            assert!(counts.iter().all(|count| (60..140).contains(count)), "{policy:?}: {counts:?}");
        }
    }

    #[test]
    fn no_rule_chooses_without_workers() {
        for policy in RoutingRule::value_variants() {
            assert_eq!(choose(*policy, &[], 1, false), None);
        }
    }

    #[test]
    fn rule_names_equal_the_names_on_the_command_line() {
        for policy in RoutingRule::value_variants() {
            assert_eq!(policy.to_possible_value().expect("no variant is hidden").get_name(), policy.name());
        }
    }
}
