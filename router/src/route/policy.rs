//! Policies. A policy estimates the cost of using a worker.

use super::candidate::{ByRole, Candidate, PlacementQuery, TierLoads, WorkerDemand, WorkerRole};
use crate::{
    rates::{MeanRate, Measurement},
    settings::{Costs, PolicyKind},
};
use std::{collections::BTreeMap, sync::Arc};
use tandem_kv::{ByTier, Tier};

/// Identifies one placement of one router. It is the seed for breaking ties.
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

/// The time to load a token from each tier, as a part of the time to compute it, until it is measured. The order is certain; the values are guesses.
const LOAD_OF_COMPUTE: ByTier<f64> = [0.0, 0.05, 0.3, 0.3];

/// The demand on a worker is assumed to be at most this part of its rate. With a demand near the rate, the queue would take forever to become empty.
const LOAD_MAX: f64 = 0.9;

/// Decode workers differ in the share of their time that they spend on prompts. This fraction of the difference is assumed to last as long
/// as an answer. The value is fitted to the simulations of docs/routing.md.
const LOCAL_PERSISTENCE: f64 = 0.3;

/// The longest time for which a difference between decode workers is assumed to last.
const LOCAL_HORIZON_MS: f64 = 5_000.0;

/// The cost of using a worker, by cause, in estimated milliseconds. It includes the time to the request's first token, and the delay of
/// other requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Time until the queued prompts that precede this one are computed and running sequences have released the blocks that the prompt
    /// needs.
    pub queue_ms: f64,
    /// Time to compute the tokens that are not cached.
    pub compute_ms: f64,
    /// Time to load the cached blocks that are not on the worker's device.
    pub load_ms: f64,
    /// Time by which the request delays others: prompts in the queue and prompts to come, running answers, and requests whose blocks are evicted from
    /// a full cache. Also the time by which prompts that are computed after this one delay its answer.
    pub interference_ms: f64,
    /// Time of the transfer of the blocks that the worker lacks, without the time that overlaps the computation.
    pub transfer_ms: f64,
    /// Fixed time of the handoff from the prefill worker to the decode worker.
    pub handoff_ms: f64,
    /// Time by which the sequences on the worker delay this request's decoding.
    pub decode_load_ms: f64,
}

impl Cost {
    /// Returns the total cost, by which workers are compared. If it is not a number, returns infinity.
    pub fn total(&self) -> f64 {
        let total = self.first_token_ms() + self.load_ms + self.interference_ms + self.decode_load_ms;
        if total.is_nan() { f64::INFINITY } else { total }
    }

    /// Returns the time to the first token without the time to load blocks.
    pub fn first_token_ms(&self) -> f64 {
        self.queue_ms + self.compute_ms + self.transfer_ms + self.handoff_ms
    }
}

/// The rates from which all costs of one placement are estimated.
#[derive(Clone, Debug)]
pub struct RouteRates {
    costs: Costs,
    demand: ByRole<WorkerDemand>,
    prefill_tokens_per_second: MeanRate,
    prefill_fixed_ms: MeanRate,
    decode_step_ms: MeanRate,
    load_ms_per_token: ByTier<MeanRate>,
    /// For each transfer family with measurements, the mean of the bandwidths that its sending workers have measured. It is used for every pair of
    /// the family, because the sender is not known when the receiver is chosen.
    transfer_bytes_per_second: BTreeMap<Option<Arc<str>>, f64>,
    /// The cheapest prefill worker of each transfer family.
    senders: BTreeMap<Option<Arc<str>>, Sender>,
}

/// A prefill worker as the sender of KV.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sender {
    /// The total cost of using this worker.
    pub(super) cost: f64,
    /// The time in which this worker computes the prompt.
    pub(super) compute_ms: f64,
    /// As [`Candidate::step_tokens`].
    pub(super) step_tokens: u32,
}

impl RouteRates {
    pub(super) fn new(costs: &Costs, demand: ByRole<WorkerDemand>, workers: &[Candidate]) -> Self {
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
        let prefill_tokens_per_second = mean(|worker| worker.prefill_tokens_per_second, costs.prefill_tokens_per_second);
        let with_tiers: Vec<&TierLoads> = workers.iter().filter_map(|worker| worker.tiers.as_deref()).collect();
        let load_ms_per_token = Tier::ALL.map(|tier| {
            let measured = with_tiers.iter().filter_map(|tiers| tiers.ms_per_token[tier.index()]);
            MeanRate::of(measured, LOAD_OF_COMPUTE[tier.index()] * 1e3 / prefill_tokens_per_second.value())
        });
        Self {
            costs: *costs,
            demand,
            senders: BTreeMap::new(),
            prefill_tokens_per_second,
            load_ms_per_token,
            prefill_fixed_ms: mean(|worker| worker.prefill_fixed_ms, costs.prefill_fixed_ms),
            decode_step_ms: mean(|worker| worker.decode_step_ms, costs.decode_step_ms),
            transfer_bytes_per_second: bandwidths.into_iter().map(mean_bandwidth).collect(),
        }
    }

    /// Returns how many prompt tokens the worker computes in a second in which it also continues its running answers.
    fn rate(&self, worker: &Candidate) -> f64 {
        self.device_rate(worker) * worker.prompt_share
    }

    /// Returns how many prompt tokens the worker's device computes in a second in which it does nothing else.
    fn device_rate(&self, worker: &Candidate) -> f64 {
        self.prefill_tokens_per_second.for_worker(worker.prefill_tokens_per_second)
    }

    fn fixed_ms(&self, worker: &Candidate) -> f64 {
        self.prefill_fixed_ms.for_worker(worker.prefill_fixed_ms)
    }

    /// Returns the time to load those cached blocks of the prompt that are not on the worker's device. The engine computes other
    /// requests meanwhile, so these are not delayed.
    fn load_ms(&self, worker: &Candidate, query: &PlacementQuery) -> f64 {
        let Some(tiers) = &worker.tiers else { return 0.0 };
        let ms = |tier: Tier| {
            let tokens = f64::from(tiers.blocks[tier.index()]) * f64::from(query.block_size);
            tokens * self.load_ms_per_token[tier.index()].for_worker(tiers.ms_per_token[tier.index()])
        };
        Tier::ALL.into_iter().filter(|tier| *tier > Tier::Device && tiers.blocks[tier.index()] > 0).map(ms).sum()
    }

    /// Returns how many of `tokens` prompt tokens one step of the worker computes. If answers run, this follows from the worker's prompt share.
    fn step_tokens(&self, worker: &Candidate, tokens: f64) -> f64 {
        let most = tokens.min(f64::from(worker.step_tokens));
        let share = worker.prompt_share;
        if share >= 1.0 {
            return most;
        }
        let other_ms = self.fixed_ms(worker) + self.decode_step_ms.for_worker(worker.decode_step_ms);
        most.min(self.device_rate(worker) * other_ms / 1e3 * share / (1.0 - share))
    }

    /// Returns the cost of the delay of one answer on this worker while the worker computes `tokens` prompt tokens.
    fn own_answer_ms(&self, worker: &Candidate, tokens: f64) -> f64 {
        self.answers_ms(tokens / self.device_rate(worker) * 1e3, 1)
    }

    /// Returns the time by which the worker's sequences delay the decoding of one more sequence.
    fn decode_load_ms(&self, worker: &Candidate) -> f64 {
        f64::from(worker.sequences) * self.decode_step_ms.for_worker(worker.decode_step_ms)
    }

    /// Records a prefill worker as its family's sender if it is the cheapest so far.
    pub(super) fn add_sender(&mut self, family: &Option<Arc<str>>, sender: Sender) {
        let cheapest = self.senders.entry(family.clone()).or_insert(sender);
        if sender.cost < cheapest.cost {
            *cheapest = sender;
        }
    }

    /// Returns the time to transfer the KV of `tokens` tokens to the worker, without the part that overlaps the computation: the blocks of
    /// a step are sent while the next step is computed.
    fn transfer_ms(&self, worker: &Candidate, query: &PlacementQuery, tokens: u32) -> f64 {
        let bytes_per_second = self.transfer_bytes_per_second.get(&worker.family);
        let bytes_per_second = bytes_per_second.copied().unwrap_or(self.costs.transfer_bytes_per_second);
        let ms = |tokens: u32| f64::from(tokens.div_ceil(query.block_size)) * worker.block_bytes as f64 / bytes_per_second * 1e3;
        match self.senders.get(&worker.family) {
            Some(Sender { compute_ms, step_tokens, .. }) if *step_tokens > 0 => {
                (ms(tokens) - compute_ms).max(ms(tokens.min(*step_tokens)))
            }
            _ => ms(tokens),
        }
    }

    /// Returns the total delay that `compute_ms` of computation causes to the prompts that arrive before the worker is idle, that is,
    /// before it has computed its queue, this prompt and the prompts that arrive meanwhile. Each is delayed by at most its own duration,
    /// because a shorter prompt precedes this one.
    fn later_ms(&self, worker: &Candidate, workers: usize, compute_ms: f64) -> f64 {
        let rate = self.rate(worker);
        let (WorkerDemand { prompts, tokens }, workers) = (self.demand.of(worker.role), workers as f64);
        if prompts <= 0.0 {
            return 0.0;
        }
        let load = (tokens / workers / rate).min(LOAD_MAX);
        let busy_s = (worker.queued_tokens as f64 / rate + compute_ms / 1e3) / (1.0 - load);
        busy_s * prompts / workers * compute_ms.min(tokens / prompts / rate * 1e3)
    }

    /// Returns the cost of the delay of `sequences` answers by `prefill_ms` of prefill. It grows with their number to the power ¾. If it
    /// were proportional, placements would react to differences between workers that end before the prompts are computed (docs/routing.md).
    fn answers_ms(&self, prefill_ms: f64, sequences: u32) -> f64 {
        let root = f64::from(sequences).sqrt();
        prefill_ms * root * root.sqrt() * self.costs.answer_preference
    }

    /// Returns the cost of the delay of the request's answer by later prompts on its decode worker. So answers gather on workers that
    /// compute few prompts, and prompts on workers with few answers. Without remote prefills all workers compute prompts alike, so the cost
    /// is 0.
    fn prompts_to_come_ms(&self, worker: &Candidate) -> f64 {
        let [remote, local] = [WorkerRole::Prefill, WorkerRole::Decode].map(|role| self.demand.of(role).tokens);
        let remote_part = if remote > 0.0 { remote / (remote + local) } else { 0.0 };
        let answer_ms = self.costs.answer_ms.min(LOCAL_HORIZON_MS);
        self.costs.answer_preference * LOCAL_PERSISTENCE * remote_part * answer_ms * worker.local_share.min(LOAD_MAX)
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
        // Charges nothing if the worker has not reported its blocks.
        if capacity > 0.0 { lacking / capacity * self.costs.answer_ms } else { 0.0 }
    }
}

/// A policy estimates the milliseconds to the first token, and by how many milliseconds others are delayed (docs/adr/005-routing-cost.md).
/// The worker with the lowest cost is chosen. Costs are comparable only within one policy.
impl PolicyKind {
    fn uses_caches(self) -> bool {
        self == Self::KvAware
    }

    fn known_blocks(self, worker: &Candidate) -> u64 {
        if self.uses_caches() { u64::from(worker.overlap_blocks) + u64::from(worker.predicted_blocks) } else { 0 }
    }

    fn cache_filled(self, worker: &Candidate) -> f64 {
        if self.uses_caches() { worker.cache_filled } else { 0.0 }
    }

    /// Returns the cost of using the worker as the prefill worker. `workers` is the number of eligible workers of its role.
    pub(super) fn prefill(self, query: &PlacementQuery, rates: &RouteRates, worker: &Candidate, workers: usize) -> Cost {
        let rate = rates.rate(worker);
        let new = worker.new_tokens(query, self.known_blocks(worker)) as f64;
        let fixed_ms = if new > 0.0 { rates.fixed_ms(worker) } else { 0.0 };
        let ms = |tokens: f64| tokens / rate * 1e3;
        let compute_ms = fixed_ms + ms(new);
        let charged_again = rates.costs.work_weight + self.cache_filled(worker) * rates.costs.displaced_weight;
        let behind_ms = compute_ms * worker.behind_prompts as f64;
        // A step with prompts that this one precedes has probably begun. On average, half of that step is left.
        let begun = rates.step_tokens(worker, worker.behind_tokens) / 2.0;
        Cost {
            queue_ms: ms(worker.queued_tokens as f64 - worker.behind_tokens + begun),
            compute_ms,
            load_ms: if self.uses_caches() { rates.load_ms(worker, query) } else { 0.0 },
            interference_ms: ms(new) * charged_again + behind_ms + rates.later_ms(worker, workers, compute_ms),
            ..Cost::default()
        }
    }

    /// Returns the cost of using the worker as the decode worker that receives KV.
    pub(super) fn decode(self, query: &PlacementQuery, rates: &RouteRates, worker: &Candidate) -> Cost {
        // An engine that receives KV uses its own blocks only as far as they are on its device.
        let cached = if self.uses_caches() { worker.overlap_blocks.saturating_sub(worker.load_blocks()) } else { 0 };
        let lacking = query.prompt_tokens.saturating_sub(1).saturating_sub(cached.saturating_mul(query.block_size));
        let own_ms = rates.own_answer_ms(worker, worker.queued_tokens as f64);
        Cost {
            queue_ms: rates.blocks_ms(query, worker, u64::from(lacking.div_ceil(query.block_size))),
            interference_ms: own_ms + rates.prompts_to_come_ms(worker),
            transfer_ms: rates.transfer_ms(worker, query, lacking),
            handoff_ms: rates.costs.handoff_ms,
            decode_load_ms: rates.decode_load_ms(worker),
            ..Cost::default()
        }
    }

    /// Returns the cost of using the worker as the decode worker that also prefills. `workers` is the number of eligible decode workers.
    pub(super) fn local(self, query: &PlacementQuery, rates: &RouteRates, worker: &Candidate, workers: usize) -> Cost {
        let prefill = self.prefill(query, rates, worker, workers);
        let new_tokens = worker.new_tokens(query, self.known_blocks(worker));
        let new_blocks = new_tokens.div_ceil(u64::from(query.block_size));
        // Running answers wait only while the device computes the prompt, so the delay follows from the device's rate, not from the shared
        // rate.
        let fixed_ms = if new_tokens > 0 { rates.fixed_ms(worker) } else { 0.0 };
        let computed_ms = fixed_ms + new_tokens as f64 / rates.device_rate(worker) * 1e3;
        let others_ms = rates.answers_ms(computed_ms, worker.sequences);
        let own_ms = rates.own_answer_ms(worker, worker.behind_tokens);
        Cost {
            queue_ms: prefill.queue_ms + rates.blocks_ms(query, worker, new_blocks),
            interference_ms: prefill.interference_ms + others_ms + own_ms + rates.prompts_to_come_ms(worker),
            decode_load_ms: rates.decode_load_ms(worker),
            ..prefill
        }
    }
}
