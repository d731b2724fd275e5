//! Policies. A policy estimates the cost of using a worker.

use super::candidate::{Candidate, PlacementQuery};
use crate::{
    rates::{MeanRate, Measurement},
    settings::{Costs, PolicyKind},
};
use std::{collections::BTreeMap, sync::Arc};

/// Identifies one placement of one router. It is the seed for breaking ties, and for the ranks of policies that estimate no time.
#[derive(Clone, Copy, Debug, Default)]
pub struct PlacementSeed {
    pub seed: u64,
    /// The number of placements that this router made before this one.
    pub number: u64,
}

impl PlacementSeed {
    /// Returns a pseudo-random number for this placement and the worker at `index` (SplitMix64's finaliser).
    pub(super) fn random(self, index: u64) -> u64 {
        let mut z = self.seed ^ self.number.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ index.wrapping_mul(0xD1B5_4A32_D192_ED03);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// A worker's position among the eligible workers of its role.
#[derive(Clone, Copy, Debug)]
pub struct Position {
    /// The worker's index among the eligible workers, from 0.
    pub index: u64,
    /// The number of eligible workers of this role.
    pub count: u64,
    pub placement: PlacementSeed,
}

/// The cost of using a worker, by cause, in estimated milliseconds. It includes the time to the request's first token, and the delay of
/// other requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Time until the queued prompts are computed and running sequences have released the blocks that the prompt needs.
    pub queue_ms: f64,
    /// Time to compute the tokens that are not cached.
    pub compute_ms: f64,
    /// Time by which the computation delays other requests, and time that other requests lose because their blocks are evicted from a full
    /// cache.
    pub interference_ms: f64,
    /// Time to transfer the blocks that the worker lacks.
    pub transfer_ms: f64,
    /// Fixed time of the handoff from the prefill worker to the decode worker.
    pub handoff_ms: f64,
    /// Time by which the sequences on the worker delay this request's decoding.
    pub decode_load_ms: f64,
    /// A rank without a unit. Policies that estimate no time set only this field.
    pub rank: f64,
}

impl Cost {
    /// Returns the total cost, by which workers are compared. A total that is not a number counts as infinite.
    pub fn total(&self) -> f64 {
        let Self { queue_ms, compute_ms, interference_ms, transfer_ms, handoff_ms, decode_load_ms, rank } = self;
        let total = queue_ms + compute_ms + interference_ms + transfer_ms + handoff_ms + decode_load_ms + rank;
        if total.is_nan() { f64::INFINITY } else { total }
    }

    fn rank(rank: f64) -> Self {
        Self { rank, ..Self::default() }
    }
}

/// The rates from which all costs of one placement are estimated.
#[derive(Clone, Debug)]
pub struct Rates {
    costs: Costs,
    prefill_tokens_per_second: MeanRate,
    prefill_fixed_ms: MeanRate,
    decode_step_ms: MeanRate,
    /// For each transfer family with measurements, the mean of the bandwidths that its sending workers have measured. It is used for every pair of the family,
    /// because the sender is not known when the receiver is chosen.
    transfer_bytes_per_second: BTreeMap<Option<Arc<str>>, f64>,
}

impl Rates {
    pub(super) fn new(costs: &Costs, workers: &[Candidate]) -> Self {
        let mean = |measurement: fn(&Candidate) -> Option<Measurement>, default| {
            MeanRate::of(workers.iter().filter_map(measurement), default)
        };
        let mut bandwidths = BTreeMap::<&Option<Arc<str>>, Vec<Measurement>>::new();
        for worker in workers {
            if let Some(measured) = worker.transfer_bytes_per_second {
                bandwidths.entry(&worker.family).or_default().push(measured);
            }
        }
        let mean_bandwidth = |(family, measured): (&Option<Arc<str>>, Vec<Measurement>)| {
            (family.clone(), MeanRate::of(measured.into_iter(), costs.transfer_bytes_per_second).value())
        };
        Self {
            costs: *costs,
            prefill_tokens_per_second: mean(|worker| worker.prefill_tokens_per_second, costs.prefill_tokens_per_second),
            prefill_fixed_ms: mean(|worker| worker.prefill_fixed_ms, costs.prefill_fixed_ms),
            decode_step_ms: mean(|worker| worker.decode_step_ms, costs.decode_step_ms),
            transfer_bytes_per_second: bandwidths.into_iter().map(mean_bandwidth).collect(),
        }
    }

    /// Returns the time by which the worker's sequences delay the decoding of one more sequence.
    fn decode_load_ms(&self, worker: &Candidate) -> f64 {
        f64::from(worker.sequences) * self.decode_step_ms.for_worker(worker.decode_step_ms)
    }

    /// Returns the time until enough blocks are available for the queued prompts, for `blocks` more blocks, and for what the answers of the
    /// requests on the worker will still take. The estimate assumes that answers end one after the other at equal intervals. So on average
    /// half of each is still to come, and a full cache is released once within the time of an answer.
    fn blocks_ms(&self, query: &PlacementQuery, worker: &Candidate, blocks: u64) -> f64 {
        let blocks_of = |tokens: u64| tokens as f64 / f64::from(query.block_size.max(1));
        let available = f64::from(worker.available_blocks);
        let capacity = available + f64::from(worker.in_use_blocks);
        let wanted = blocks_of(worker.queued_tokens) + blocks_of(worker.answer_tokens) / 2.0 + blocks as f64;
        let lacking = (wanted - available).max(0.0);
        // A worker that has not reported its blocks has no capacity.
        if capacity > 0.0 { lacking / capacity * self.costs.answer_ms } else { 0.0 }
    }
}

/// Determines the cost of using a worker; the worker with the lowest cost is chosen. Costs are comparable only within one policy.
pub trait Policy: Send + Sync {
    /// Returns the cost of using the worker as the prefill worker.
    fn prefill(&self, query: &PlacementQuery, rates: &Rates, worker: &Candidate, position: Position) -> Cost;
    /// Returns the cost of using the worker as the decode worker that receives KV.
    fn decode(&self, query: &PlacementQuery, rates: &Rates, worker: &Candidate, position: Position) -> Cost;
    /// Returns the cost of using the worker as the decode worker that also prefills.
    fn local(&self, query: &PlacementQuery, rates: &Rates, worker: &Candidate, position: Position) -> Cost;
}

/// Returns the policy of this kind.
pub fn policy(kind: PolicyKind) -> Box<dyn Policy> {
    match kind {
        PolicyKind::KvAware => Box::new(FirstToken { use_caches: true }),
        PolicyKind::LeastLoaded => Box::new(FirstToken { use_caches: false }),
        PolicyKind::RoundRobin => Box::new(Baseline { rank: distance }),
        PolicyKind::Random => Box::new(Baseline { rank: |at| at.placement.random(at.index) as f64 / u64::MAX as f64 }),
    }
}

/// Estimates the milliseconds to the first token, and the delay of other requests (docs/adr/005-routing-cost.md).
struct FirstToken {
    use_caches: bool,
}

impl FirstToken {
    fn known_blocks(&self, worker: &Candidate) -> u64 {
        if self.use_caches { u64::from(worker.overlap_blocks) + u64::from(worker.predicted_blocks) } else { 0 }
    }

    fn cache_filled(&self, worker: &Candidate) -> f64 {
        if self.use_caches { worker.cache_filled } else { 0.0 }
    }
}

impl Policy for FirstToken {
    fn prefill(&self, query: &PlacementQuery, rates: &Rates, worker: &Candidate, _: Position) -> Cost {
        let rate = rates.prefill_tokens_per_second.for_worker(worker.prefill_tokens_per_second);
        let new = worker.new_tokens(query, self.known_blocks(worker)) as f64;
        let fixed_ms = if new > 0.0 { rates.prefill_fixed_ms.for_worker(worker.prefill_fixed_ms) } else { 0.0 };
        let charged_again = new * (rates.costs.work_weight + self.cache_filled(worker) * rates.costs.displaced_weight);
        let ms = |tokens: f64| tokens / rate * 1e3;
        Cost {
            queue_ms: ms(worker.queued_tokens as f64),
            compute_ms: fixed_ms + ms(new),
            interference_ms: ms(charged_again),
            ..Cost::default()
        }
    }

    fn decode(&self, query: &PlacementQuery, rates: &Rates, worker: &Candidate, _: Position) -> Cost {
        let cached = if self.use_caches { worker.overlap_blocks } else { 0 };
        let lacking = query.prompt_tokens.saturating_sub(1).div_ceil(query.block_size).saturating_sub(cached);
        let bytes_per_second = rates.transfer_bytes_per_second.get(&worker.family);
        let bytes_per_second = bytes_per_second.copied().unwrap_or(rates.costs.transfer_bytes_per_second);
        let transfer_ms = f64::from(lacking) * worker.block_bytes as f64 / bytes_per_second * 1e3;
        Cost {
            queue_ms: rates.blocks_ms(query, worker, u64::from(lacking)),
            transfer_ms,
            handoff_ms: rates.costs.handoff_ms,
            decode_load_ms: rates.decode_load_ms(worker),
            ..Cost::default()
        }
    }

    fn local(&self, query: &PlacementQuery, rates: &Rates, worker: &Candidate, position: Position) -> Cost {
        let prefill = self.prefill(query, rates, worker, position);
        let new_blocks = worker.new_tokens(query, self.known_blocks(worker)).div_ceil(u64::from(query.block_size));
        let delayed_ms = prefill.compute_ms * f64::from(worker.running) * rates.costs.interference;
        Cost {
            queue_ms: prefill.queue_ms + rates.blocks_ms(query, worker, new_blocks),
            interference_ms: prefill.interference_ms + delayed_ms,
            decode_load_ms: rates.decode_load_ms(worker),
            ..prefill
        }
    }
}

/// The number that is added to the rank of a decode worker that would prefill the prompt itself. It exceeds the sum of the ranks of any two
/// workers, so baselines prefill on a decode worker only if no prefill worker is eligible.
const LOCAL_PENALTY: f64 = 1e9;

/// A baseline for comparison, which estimates no time and chooses the worker with the lowest rank in each role.
struct Baseline {
    rank: fn(Position) -> f64,
}

/// Returns the number of workers before this one in the round-robin order of this placement.
fn distance(Position { index, count, placement }: Position) -> f64 {
    ((index + count - placement.number % count) % count) as f64
}

impl Policy for Baseline {
    fn prefill(&self, _: &PlacementQuery, _: &Rates, _: &Candidate, position: Position) -> Cost {
        Cost::rank((self.rank)(position))
    }

    fn decode(&self, _: &PlacementQuery, _: &Rates, _: &Candidate, position: Position) -> Cost {
        // Decode workers are ranked with another seed than prefill workers. With the same seed, both ranks would always favour the same
        // index.
        let placement = PlacementSeed { seed: !position.placement.seed, ..position.placement };
        Cost::rank((self.rank)(Position { placement, ..position }))
    }

    fn local(&self, query: &PlacementQuery, rates: &Rates, worker: &Candidate, position: Position) -> Cost {
        Cost::rank(LOCAL_PENALTY + self.decode(query, rates, worker, position).rank)
    }
}
