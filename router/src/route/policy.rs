//! Policies. A policy estimates the cost of using a worker.

use super::{
    CostsByUse,
    candidate::{ByRole, Candidate, PlacementQuery, TierLoads, WorkerDemand, WorkerRole},
    numbers::{OfPrompt, WorkerNumbers},
};
use crate::{
    rates::{MeanRate, Measurement, RateSums},
    settings::{Costs, PolicyKind, PrefillPlace},
};
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

/// What the costs of all workers in one placement have in common: the request, the mean rates, and which workers can be used.
#[derive(Clone, Debug)]
pub struct RouteRates {
    policy: PolicyKind,
    query: PlacementQuery,
    costs: Costs,
    demand: ByRole<WorkerDemand>,
    /// The scale of the weights of measurements ([`Ages`](crate::rates::Ages)).
    scale: f64,
    prefill_tokens_per_second: MeanRate,
    prefill_fixed_ms: MeanRate,
    decode_step_ms: MeanRate,
    load_ms_per_token: ByTier<MeanRate>,
    families: Vec<Family>,
    /// The number of eligible prefill workers in families that have eligible decode workers.
    prefill_workers: usize,
    /// The number of eligible decode workers that can prefill.
    local_workers: usize,
}

/// The workers of one transfer family.
#[derive(Clone, Copy, Debug, Default)]
struct Family {
    /// The bandwidths that its sending workers have measured. Their mean is used for every pair of the family, because the sender is not
    /// known when the receiver is chosen.
    bandwidths: RateSums,
    /// The number of its eligible prefill workers.
    senders: usize,
    has_receiver: bool,
    /// Its cheapest prefill worker.
    sender: Option<Sender>,
}

/// The rates to assume for one worker.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkerRates {
    /// The milliseconds in which the worker's device computes a prompt token while it does nothing else.
    device_ms: f64,
    /// The milliseconds for a prompt token while the worker also continues its running answers.
    shared_ms: f64,
    /// The fixed time of a step that computes prompt tokens.
    fixed_ms: f64,
    /// The time of a decode step.
    step_ms: f64,
}

/// A worker as the formulas see it.
struct WorkerView<'a> {
    worker: &'a WorkerNumbers,
    prompt: OfPrompt,
    rates: WorkerRates,
    tiers: Option<&'a TierLoads>,
}

/// A prefill worker as the sender of KV.
#[derive(Clone, Copy, Debug)]
struct Sender {
    /// The total cost of using this worker.
    cost: f64,
    /// The time in which this worker computes the prompt.
    compute_ms: f64,
    /// As [`Candidate::step_tokens`].
    step_tokens: u32,
}

impl RouteRates {
    /// `workers` are all workers, and whether each is eligible; `tiers` are the loads of those that report tiers. `scale` is 1 if the weights of their measurements are those of the present.
    pub(crate) fn new<'a>(
        policy: PolicyKind,
        (costs, scale): (&Costs, f64),
        demand: ByRole<WorkerDemand>,
        query: &PlacementQuery,
        workers: impl Iterator<Item = (&'a WorkerNumbers, bool)>,
        tiers: impl Iterator<Item = &'a TierLoads>,
    ) -> Self {
        let mut sums = [RateSums::default(); 3];
        let mut loads = ByTier::<RateSums>::default();
        let (mut families, mut local_workers) = (Vec::<Family>::new(), 0);
        for (worker, is_eligible) in workers {
            let measured = [worker.prefill_tokens_per_second, worker.prefill_fixed_ms, worker.decode_step_ms];
            for (sums, measured) in sums.iter_mut().zip(measured) {
                sums.add(measured.aged(scale));
            }
            let prefills = worker.role == WorkerRole::Prefill;
            local_workers += usize::from(is_eligible && !prefills && !worker.needs_prefill_worker);
            let Some(family) = worker.family.map(|family| usize::from(family.0)) else { continue };
            if family >= families.len() {
                families.resize(family + 1, Family::default());
            }
            let family = &mut families[family];
            family.bandwidths.add(worker.transfer_bytes_per_second);
            let may_pair = is_eligible
                && match query.allowed_prefill() {
                    // Decode workers that compute no prompts need a prefill worker for every request.
                    PrefillPlace::Local => !query.prompt_logits && (prefills || worker.needs_prefill_worker),
                    PrefillPlace::Auto | PrefillPlace::Remote => true,
                };
            family.senders += usize::from(may_pair && prefills);
            family.has_receiver |= may_pair && !prefills;
        }
        for tiers in tiers {
            for (loads, measured) in loads.iter_mut().zip(tiers.ms_per_token) {
                loads.add(measured.unwrap_or_default());
            }
        }
        let [prefill_rate, fixed_ms, step_ms] = sums;
        let prefill_tokens_per_second = prefill_rate.mean(costs.prefill_tokens_per_second);
        let load_ms = |tier: Tier| LOAD_OF_COMPUTE[tier.index()] * 1e3 / prefill_tokens_per_second.value();
        Self {
            policy,
            query: *query,
            costs: *costs,
            demand,
            scale,
            prefill_tokens_per_second,
            prefill_fixed_ms: fixed_ms.mean(costs.prefill_fixed_ms),
            decode_step_ms: step_ms.mean(costs.decode_step_ms),
            load_ms_per_token: Tier::ALL.map(|tier| loads[tier.index()].mean(load_ms(tier))),
            prefill_workers: families.iter().filter(|family| family.has_receiver).map(|family| family.senders).sum(),
            families,
            local_workers,
        }
    }

    /// Returns the same for candidates whose measurements have the weights of the present.
    pub(crate) fn with_present_weights(self) -> Self {
        Self { scale: 1.0, ..self }
    }

    /// Whether a prefill worker can serve the request.
    pub(crate) fn has_pairs(&self) -> bool {
        self.prefill_workers > 0
    }

    fn family(&self, worker: &WorkerNumbers) -> Option<&Family> {
        self.families.get(usize::from(worker.family?.0))
    }

    /// Returns the cost of each use of an eligible worker. The costs of prefill workers must be computed first: those of decode workers
    /// depend on the cheapest sender.
    pub(crate) fn costs(&mut self, worker: &Candidate) -> CostsByUse {
        self.costs_of(&worker.into(), worker.into(), worker.tiers.as_deref())
    }

    /// Returns the same as [`Self::costs`].
    #[inline(always)]
    pub(crate) fn costs_of(&mut self, worker: &WorkerNumbers, prompt: OfPrompt, tiers: Option<&TierLoads>) -> CostsByUse {
        let (policy, query) = (self.policy, self.query);
        let on = WorkerView { worker, prompt, rates: self.rates_of(worker), tiers };
        let is_paired = self.family(worker).is_some_and(|family| family.senders > 0 && family.has_receiver);
        if worker.role == WorkerRole::Prefill {
            let prefill = is_paired.then(|| policy.prefill(&query, self, &on, self.prefill_workers));
            if let (Some(cost), Some(family)) = (prefill, worker.family) {
                let sender = Sender { cost: cost.total(), compute_ms: cost.compute_ms, step_tokens: worker.step_tokens };
                let cheapest = &mut self.families[usize::from(family.0)].sender;
                *cheapest = cheapest.take().filter(|cheapest| cheapest.cost <= sender.cost).or(Some(sender));
            }
            return CostsByUse { prefill, ..CostsByUse::default() };
        }
        let can_prefill = query.allowed_prefill() != PrefillPlace::Remote && !worker.needs_prefill_worker;
        CostsByUse {
            prefill: None,
            decode: is_paired.then(|| policy.decode(&query, self, &on)),
            local: can_prefill.then(|| policy.local(&query, self, &on, self.local_workers)),
        }
    }

    /// Returns the rates to assume for the worker.
    #[inline(always)]
    fn rates_of(&self, worker: &WorkerNumbers) -> WorkerRates {
        let assumed = |mean: &MeanRate, own: Measurement| mean.for_worker(own.aged(self.scale));
        let device_ms = 1e3 / assumed(&self.prefill_tokens_per_second, worker.prefill_tokens_per_second);
        WorkerRates {
            device_ms,
            shared_ms: device_ms / worker.prompt_share,
            fixed_ms: assumed(&self.prefill_fixed_ms, worker.prefill_fixed_ms),
            step_ms: assumed(&self.decode_step_ms, worker.decode_step_ms),
        }
    }

    /// Returns the time to load those cached blocks of the prompt that are not on the worker's device. The engine computes other
    /// requests meanwhile, so these are not delayed.
    fn load_ms(&self, tiers: &TierLoads, query: &PlacementQuery) -> f64 {
        let ms = |tier: Tier| {
            let tokens = f64::from(tiers.blocks[tier.index()]) * f64::from(query.block_size);
            tokens * self.load_ms_per_token[tier.index()].for_worker(tiers.ms_per_token[tier.index()].unwrap_or_default())
        };
        Tier::ALL.into_iter().filter(|tier| *tier > Tier::Device && tiers.blocks[tier.index()] > 0).map(ms).sum()
    }

    /// Returns how many of `tokens` prompt tokens one step of the worker computes. If answers run, this follows from the worker's prompt share.
    fn step_tokens(WorkerView { worker, rates: of, .. }: &WorkerView<'_>, tokens: f64) -> f64 {
        let most = tokens.min(f64::from(worker.step_tokens));
        let share = worker.prompt_share;
        if share >= 1.0 || most <= 0.0 {
            return most;
        }
        most.min((of.fixed_ms + of.step_ms) / of.device_ms * share / (1.0 - share))
    }

    /// Returns the cost of the delay of one answer on this worker while the worker computes `tokens` prompt tokens.
    fn own_answer_ms(&self, of: &WorkerRates, tokens: f64) -> f64 {
        self.answers_ms(tokens * of.device_ms, 1)
    }

    /// Returns the time by which the worker's sequences delay the decoding of one more sequence.
    fn decode_load_ms(WorkerView { worker, rates: of, .. }: &WorkerView<'_>) -> f64 {
        f64::from(worker.sequences) * of.step_ms
    }

    /// Returns the time to transfer the KV of `tokens` tokens to the worker, without the part that overlaps the computation: the blocks of
    /// a step are sent while the next step is computed.
    fn transfer_ms(&self, worker: &WorkerNumbers, query: &PlacementQuery, tokens: u32) -> f64 {
        let family = self.family(worker).copied().unwrap_or_default();
        let bytes_per_second = family.bandwidths.mean(self.costs.transfer_bytes_per_second).value();
        let ms = |tokens: u32| f64::from(tokens.div_ceil(query.block_size)) * worker.block_bytes as f64 / bytes_per_second * 1e3;
        match family.sender {
            Some(Sender { compute_ms, step_tokens, .. }) if step_tokens > 0 => {
                (ms(tokens) - compute_ms).max(ms(tokens.min(step_tokens)))
            }
            _ => ms(tokens),
        }
    }

    /// Returns the total delay that `compute_ms` of computation causes to the prompts that arrive before the worker is idle, that is,
    /// before it has computed its queue, this prompt and the prompts that arrive meanwhile. Each is delayed by at most its own duration,
    /// because a shorter prompt precedes this one.
    fn later_ms(&self, WorkerView { worker, prompt, rates: of, .. }: &WorkerView<'_>, workers: usize, compute_ms: f64) -> f64 {
        let (WorkerDemand { prompts, tokens }, workers) = (self.demand.of(worker.role), workers as f64);
        if prompts <= 0.0 {
            return 0.0;
        }
        let load = (tokens / workers / 1e3 * of.shared_ms).min(LOAD_MAX);
        let busy_ms = (prompt.queued_tokens as f64 * of.shared_ms + compute_ms) / (1.0 - load);
        busy_ms * (prompts / workers / 1e3) * compute_ms.min(tokens / prompts * of.shared_ms)
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
    fn prompts_to_come_ms(&self, worker: &WorkerNumbers) -> f64 {
        let [remote, local] = [WorkerRole::Prefill, WorkerRole::Decode].map(|role| self.demand.of(role).tokens);
        let remote_part = if remote > 0.0 { remote / (remote + local) } else { 0.0 };
        let answer_ms = self.costs.answer_ms.min(LOCAL_HORIZON_MS);
        self.costs.answer_preference * LOCAL_PERSISTENCE * remote_part * answer_ms * worker.local_share.min(LOAD_MAX)
    }

    /// Returns the time until enough blocks are available for the queued prompts, for `blocks` more blocks, and for what the answers of the
    /// requests on the worker will still take. The estimate assumes that answers end one after the other at equal intervals. So on average
    /// half of each is still to come, and a full cache is released once within the time of an answer.
    fn blocks_ms(&self, query: &PlacementQuery, WorkerView { worker, prompt, .. }: &WorkerView<'_>, blocks: u64) -> f64 {
        let blocks_of_token = 1.0 / f64::from(query.block_size.max(1));
        let available = f64::from(worker.available_blocks);
        let capacity = available + f64::from(worker.in_use_blocks);
        let wanted = (prompt.queued_tokens as f64 + worker.answer_tokens as f64 / 2.0) * blocks_of_token + blocks as f64;
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

    fn known_blocks(self, prompt: &OfPrompt) -> u64 {
        if self.uses_caches() { u64::from(prompt.overlap_blocks) + u64::from(prompt.predicted_blocks) } else { 0 }
    }

    fn cache_filled(self, worker: &WorkerNumbers) -> f64 {
        if self.uses_caches() { worker.cache_filled } else { 0.0 }
    }

    /// Returns the cost of using the worker as the prefill worker. `workers` is the number of eligible workers of its role.
    #[inline(always)]
    fn prefill(self, query: &PlacementQuery, rates: &RouteRates, on: &WorkerView<'_>, workers: usize) -> Cost {
        let WorkerView { worker, prompt, rates: of, .. } = on;
        let new = query.new_tokens(worker.role, self.known_blocks(prompt)) as f64;
        let fixed_ms = if new > 0.0 { of.fixed_ms } else { 0.0 };
        let ms = |tokens: f64| tokens * of.shared_ms;
        let compute_ms = fixed_ms + ms(new);
        let charged_again = rates.costs.work_weight + self.cache_filled(worker) * rates.costs.displaced_weight;
        let behind_ms = compute_ms * prompt.behind_prompts as f64;
        // A step with prompts that this one precedes has probably begun. On average, half of that step is left.
        let begun = RouteRates::step_tokens(on, prompt.behind_tokens) / 2.0;
        Cost {
            queue_ms: ms(prompt.queued_tokens as f64 - prompt.behind_tokens + begun),
            compute_ms,
            load_ms: on.tiers.filter(|_| self.uses_caches()).map_or(0.0, |tiers| rates.load_ms(tiers, query)),
            interference_ms: ms(new) * charged_again + behind_ms + rates.later_ms(on, workers, compute_ms),
            ..Cost::default()
        }
    }

    /// Returns the cost of using the worker as the decode worker that receives KV.
    #[inline(always)]
    fn decode(self, query: &PlacementQuery, rates: &RouteRates, on: &WorkerView<'_>) -> Cost {
        let WorkerView { worker, prompt, rates: of, .. } = on;
        // An engine that receives KV uses its own blocks only as far as they are on its device.
        let cached = if self.uses_caches() { prompt.overlap_blocks.saturating_sub(prompt.load_blocks) } else { 0 };
        let lacking = query.prompt_tokens.saturating_sub(1).saturating_sub(cached.saturating_mul(query.block_size));
        let own_ms = rates.own_answer_ms(of, prompt.queued_tokens as f64);
        Cost {
            queue_ms: rates.blocks_ms(query, on, u64::from(lacking.div_ceil(query.block_size))),
            interference_ms: own_ms + rates.prompts_to_come_ms(worker),
            transfer_ms: rates.transfer_ms(worker, query, lacking),
            handoff_ms: rates.costs.handoff_ms,
            decode_load_ms: RouteRates::decode_load_ms(on),
            ..Cost::default()
        }
    }

    /// Returns the cost of using the worker as the decode worker that also prefills. `workers` is the number of eligible decode workers.
    #[inline(always)]
    fn local(self, query: &PlacementQuery, rates: &RouteRates, on: &WorkerView<'_>, workers: usize) -> Cost {
        let WorkerView { worker, prompt, rates: of, .. } = on;
        let prefill = self.prefill(query, rates, on, workers);
        let new_tokens = query.new_tokens(worker.role, self.known_blocks(prompt));
        let new_blocks = new_tokens.div_ceil(u64::from(query.block_size));
        // Running answers wait only while the device computes the prompt, so the delay follows from the device's rate, not from the shared
        // rate.
        let fixed_ms = if new_tokens > 0 { of.fixed_ms } else { 0.0 };
        let computed_ms = fixed_ms + new_tokens as f64 * of.device_ms;
        let others_ms = rates.answers_ms(computed_ms, worker.sequences);
        let own_ms = rates.own_answer_ms(of, prompt.behind_tokens);
        Cost {
            queue_ms: prefill.queue_ms + rates.blocks_ms(query, on, new_blocks),
            interference_ms: prefill.interference_ms + others_ms + own_ms + rates.prompts_to_come_ms(worker),
            decode_load_ms: RouteRates::decode_load_ms(on),
            ..prefill
        }
    }
}
