//! Which workers get a request: a pure function of the request, what is known of the workers, and a turn that breaks ties.
//!
//! A [`Policy`] gives costs; [`place`] finds the cheapest pair. A remote placement's cost is the sum of one number for each
//! side, so that the two sides are chosen apart and nobody looks at all pairs.

use crate::{
    rates::{Measured, Usual},
    settings::{Costs, PolicyKind, PrefillPlace},
};

/// What a worker is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Prompt to KV.
    Prefill,
    /// KV to tokens; may prefill, too.
    Decode,
}

/// What is to be placed.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Where it may be prefilled; the prompt itself may demand a place, too.
    pub prefill: PrefillPlace,
    /// Logits of prompt tokens are wanted.
    pub prompt_logits: bool,
}

impl Question {
    /// Where the prompt may be prefilled. A prefill worker computes all tokens but the last and makes no logits.
    fn allowed(&self) -> PrefillPlace {
        if self.prompt_logits || self.prompt_tokens <= 1 { PrefillPlace::Local } else { self.prefill }
    }
}

/// What is known of a worker when a request is placed.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// What it is for.
    pub role: Role,
    /// The request must not go there.
    pub excluded: bool,
    /// Tokens its cache holds when empty, or its context if that is shorter.
    pub tokens_max: u64,
    /// Leading blocks of the prompt that it holds.
    pub overlap_blocks: u32,
    /// More leading blocks that placed requests are about to compute there.
    pub predicted_blocks: u32,
    /// The part of its cache that holds something, what placed requests are about to store included; from 0 to 1.
    pub cache_filled: f64,
    /// Prompt tokens it has still to compute, those of placed requests it has not reported yet included.
    pub queued_tokens: u64,
    /// Sequences it runs, and those it is about to.
    pub sequences: u32,
    /// Those of them that have blocks now.
    pub running: u32,
    /// Blocks that the next prompt could take: empty ones, and cached ones that no sequence uses.
    pub available_blocks: u32,
    /// Blocks of running sequences: not available before these end.
    pub in_use_blocks: u32,
    /// Bytes of KV of one block.
    pub block_bytes: u64,
    /// Measured, if it has been.
    pub prefill_tokens_per_second: Option<Measured>,
    /// Of each step that computes prompt tokens; measured, if it has been.
    pub prefill_fixed_ms: Option<Measured>,
    /// Measured, if it has been.
    pub decode_step_ms: Option<Measured>,
    /// Measured by the sender, if it has been: decode workers do not know it.
    pub transfer_bytes_per_second: Option<Measured>,
}

/// Places of the chosen workers in the slice of candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Owns the request.
    pub decode: usize,
    /// Prefills it; `None`: decode does.
    pub prefill: Option<usize>,
}

/// Why a request cannot be placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unplaced {
    /// Nobody decodes.
    #[error("no decode worker has joined; start one or wait until it is up")]
    NoDecode,
    /// Nobody prefills, and only a prefill worker may.
    #[error("no prefill worker has joined, and the router is set to prefill remotely only; start one or allow local prefill")]
    NoPrefill,
    /// Those that there are have failed the request already.
    #[error("every worker that could take the request has failed it; try again later")]
    AllFailed,
    /// The prompt fits no worker.
    #[error("the prompt is longer than any worker's cache or context; shorten it")]
    TooLong,
}

/// Distinguishes one placement from the next.
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    /// The router's.
    pub seed: u64,
    /// Placements before this one.
    pub number: u64,
}

/// What all costs of one placement are reckoned with.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    costs: Costs,
    prefill_tokens_per_second: Usual,
    prefill_fixed_ms: Usual,
    decode_step_ms: Usual,
    /// For all: what senders measured on average. The sender is not known when the receiver is chosen.
    transfer_bytes_per_second: f64,
}

/// A worker's place among those of its role.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// From 0.
    pub place: u64,
    /// How many there are.
    pub of: u64,
    /// This placement.
    pub turn: Turn,
}

/// What using a worker costs: estimated milliseconds to the first token and what others pay, by part.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Until what waits there is computed, and until running sequences have given back blocks that the prompt lacks.
    pub queue_ms: f64,
    /// To compute the new tokens.
    pub compute_ms: f64,
    /// What others will wait for that, and lose from a full cache.
    pub interference_ms: f64,
    /// Of the blocks it lacks.
    pub transfer_ms: f64,
    /// Of the handoff itself.
    pub handoff_ms: f64,
    /// Of the sequences that run there.
    pub decode_load_ms: f64,
    /// Of policies that estimate no time.
    pub rank: f64,
}

impl Cost {
    /// What the choice is made by. Numbers that cannot be added cost more than any other.
    pub fn total(&self) -> f64 {
        let total = self.queue_ms
            + self.compute_ms
            + self.interference_ms
            + self.transfer_ms
            + self.handoff_ms
            + self.decode_load_ms
            + self.rank;
        if total.is_nan() { f64::INFINITY } else { total }
    }

    fn rank(rank: f64) -> Self {
        Self { rank, ..Self::default() }
    }
}

/// What each use of a worker costs; `None` where it cannot be used so.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Uses {
    /// As the prefill worker.
    pub prefill: Option<Cost>,
    /// As the decode worker that receives KV.
    pub decode: Option<Cost>,
    /// As the decode worker that prefills, too.
    pub local: Option<Cost>,
}

/// Costs of using a worker; the lowest wins. They need to be comparable with each other only.
pub trait Policy: Send + Sync {
    /// As the prefill worker.
    fn prefill(&self, question: &Question, rates: &Rates, worker: &Candidate, standing: Standing) -> Cost;
    /// As the decode worker that receives KV.
    fn decode(&self, question: &Question, rates: &Rates, worker: &Candidate, standing: Standing) -> Cost;
    /// As the decode worker that prefills, too.
    fn local(&self, question: &Question, rates: &Rates, worker: &Candidate, standing: Standing) -> Cost;
}

/// The policy of this kind.
pub fn policy(kind: PolicyKind) -> Box<dyn Policy> {
    match kind {
        PolicyKind::KvAware => Box::new(FirstToken { caches_count: true }),
        PolicyKind::LeastLoaded => Box::new(FirstToken { caches_count: false }),
        PolicyKind::RoundRobin => Box::new(RoundRobin),
        PolicyKind::Random => Box::new(Random),
    }
}

/// Chooses the workers of a request.
pub fn place(
    policy: &dyn Policy,
    costs: &Costs,
    question: &Question,
    workers: &[Candidate],
    turn: Turn,
) -> Result<Choice, Unplaced> {
    let uses = uses(policy, costs, question, workers, turn);
    let cheapest = |cost: fn(&Uses) -> Option<Cost>| {
        let costs = uses.iter().enumerate().filter_map(|(at, uses)| Some((at, cost(uses)?.total())));
        costs.min_by(|(a, cost_a), (b, cost_b)| {
            cost_a.total_cmp(cost_b).then_with(|| turn.draw(*a as u64).cmp(&turn.draw(*b as u64)))
        })
    };
    let local = || cheapest(|uses| uses.local);
    let decode = || cheapest(|uses| uses.decode);
    let prefill = || cheapest(|uses| uses.prefill);
    let no_decode = || why_none(workers, Role::Decode, question);

    match question.allowed() {
        PrefillPlace::Local => {
            let (decode, _) = local().ok_or_else(no_decode)?;
            Ok(Choice { decode, prefill: None })
        }
        PrefillPlace::Remote => {
            let (decode, _) = decode().ok_or_else(no_decode)?;
            let (prefill, _) = prefill().ok_or_else(|| why_none(workers, Role::Prefill, question))?;
            Ok(Choice { decode, prefill: Some(prefill) })
        }
        PrefillPlace::Auto => {
            let (alone, alone_cost) = local().ok_or_else(no_decode)?;
            let (decode, decode_cost) = decode().ok_or_else(no_decode)?;
            match prefill() {
                Some((prefill, prefill_cost)) if prefill_cost + decode_cost < alone_cost => {
                    Ok(Choice { decode, prefill: Some(prefill) })
                }
                _ => Ok(Choice { decode: alone, prefill: None }),
            }
        }
    }
}

/// What each worker's uses cost that the request may make of it.
pub fn uses(policy: &dyn Policy, costs: &Costs, question: &Question, workers: &[Candidate], turn: Turn) -> Vec<Uses> {
    let rates = Rates::new(costs, workers);
    let place = question.allowed();
    let mut uses = vec![Uses::default(); workers.len()];
    for role in [Role::Decode, Role::Prefill] {
        let able = able(workers, role, question);
        for (number, at) in able.iter().enumerate() {
            let (worker, standing) = (&workers[*at], Standing { place: number as u64, of: able.len() as u64, turn });
            let remote = place != PrefillPlace::Local;
            uses[*at] = match role {
                Role::Prefill => {
                    Uses { prefill: remote.then(|| policy.prefill(question, &rates, worker, standing)), ..Uses::default() }
                }
                Role::Decode => Uses {
                    prefill: None,
                    decode: remote.then(|| policy.decode(question, &rates, worker, standing)),
                    local: (place != PrefillPlace::Remote).then(|| policy.local(question, &rates, worker, standing)),
                },
            };
        }
    }
    uses
}

/// Those that can take the request.
fn able(workers: &[Candidate], role: Role, question: &Question) -> Vec<usize> {
    let can = |worker: &Candidate| worker.role == role && !worker.excluded && worker.fits(question);
    (0..workers.len()).filter(|at| can(&workers[*at])).collect()
}

/// Why nobody of this role can take the request.
fn why_none(workers: &[Candidate], role: Role, question: &Question) -> Unplaced {
    let mut of_role = workers.iter().filter(|worker| worker.role == role).peekable();
    match role {
        Role::Decode if of_role.peek().is_none() => Unplaced::NoDecode,
        Role::Prefill if of_role.peek().is_none() => Unplaced::NoPrefill,
        Role::Decode | Role::Prefill if of_role.any(|worker| worker.fits(question)) => Unplaced::AllFailed,
        Role::Decode | Role::Prefill => Unplaced::TooLong,
    }
}

impl Candidate {
    fn fits(&self, question: &Question) -> bool {
        u64::from(question.prompt_tokens) <= self.tokens_max
    }

    /// Tokens of the prompt that would be computed here.
    pub(crate) fn new_tokens(&self, question: &Question, known_blocks: u64) -> u64 {
        let last_is_computed_elsewhere = u64::from(self.role == Role::Prefill);
        let needed = u64::from(question.prompt_tokens).saturating_sub(last_is_computed_elsewhere);
        needed.saturating_sub(known_blocks * u64::from(question.block_size))
    }
}

impl Turn {
    /// A number that nobody can tell from a random one.
    fn draw(self, of: u64) -> u64 {
        let mut z = self.seed ^ self.number.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ of.wrapping_mul(0xD1B5_4A32_D192_ED03);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

impl Rates {
    fn new(costs: &Costs, workers: &[Candidate]) -> Self {
        let usual =
            |measured: fn(&Candidate) -> Option<Measured>, otherwise| Usual::of(workers.iter().filter_map(measured), otherwise);
        Self {
            costs: *costs,
            prefill_tokens_per_second: usual(|worker| worker.prefill_tokens_per_second, costs.prefill_tokens_per_second),
            prefill_fixed_ms: usual(|worker| worker.prefill_fixed_ms, costs.prefill_fixed_ms),
            decode_step_ms: usual(|worker| worker.decode_step_ms, costs.decode_step_ms),
            transfer_bytes_per_second: usual(|worker| worker.transfer_bytes_per_second, costs.transfer_bytes_per_second).value(),
        }
    }

    /// What the worker's sequences cost the next one.
    fn decode_load_ms(&self, worker: &Candidate) -> f64 {
        f64::from(worker.sequences) * self.decode_step_ms.for_worker(worker.decode_step_ms)
    }

    /// Until running sequences have given back what the worker lacks for these blocks, after what waits there has taken its own.
    /// They end one after the other: in the time of an answer, all of their blocks come back.
    fn blocks_ms(&self, question: &Question, worker: &Candidate, blocks: u64) -> f64 {
        let queued = worker.queued_tokens / u64::from(question.block_size.max(1));
        let lacking = queued.saturating_add(blocks).saturating_sub(u64::from(worker.available_blocks));
        if worker.in_use_blocks == 0 { 0.0 } else { lacking as f64 / f64::from(worker.in_use_blocks) * self.costs.answer_ms }
    }
}

/// Estimated milliseconds to the first token, and what it costs others.
struct FirstToken {
    caches_count: bool,
}

impl FirstToken {
    fn known_blocks(&self, worker: &Candidate) -> u64 {
        if self.caches_count { u64::from(worker.overlap_blocks) + u64::from(worker.predicted_blocks) } else { 0 }
    }

    fn cache_filled(&self, worker: &Candidate) -> f64 {
        if self.caches_count { worker.cache_filled } else { 0.0 }
    }
}

impl Policy for FirstToken {
    fn prefill(&self, question: &Question, rates: &Rates, worker: &Candidate, _: Standing) -> Cost {
        let rate = rates.prefill_tokens_per_second.for_worker(worker.prefill_tokens_per_second);
        let new = worker.new_tokens(question, self.known_blocks(worker)) as f64;
        let fixed_ms = if new > 0.0 { rates.prefill_fixed_ms.for_worker(worker.prefill_fixed_ms) } else { 0.0 };
        let others = new * (rates.costs.work_weight + self.cache_filled(worker) * rates.costs.displaced_weight);
        let ms = |tokens: f64| tokens / rate * 1e3;
        Cost {
            queue_ms: ms(worker.queued_tokens as f64),
            compute_ms: fixed_ms + ms(new),
            interference_ms: ms(others),
            ..Cost::default()
        }
    }

    fn decode(&self, question: &Question, rates: &Rates, worker: &Candidate, _: Standing) -> Cost {
        let held = if self.caches_count { worker.overlap_blocks } else { 0 };
        let lacking = question.prompt_tokens.saturating_sub(1).div_ceil(question.block_size).saturating_sub(held);
        let transfer_ms = f64::from(lacking) * worker.block_bytes as f64 / rates.transfer_bytes_per_second * 1e3;
        Cost {
            queue_ms: rates.blocks_ms(question, worker, u64::from(lacking)),
            transfer_ms,
            handoff_ms: rates.costs.handoff_ms,
            decode_load_ms: rates.decode_load_ms(worker),
            ..Cost::default()
        }
    }

    fn local(&self, question: &Question, rates: &Rates, worker: &Candidate, standing: Standing) -> Cost {
        let prefill = self.prefill(question, rates, worker, standing);
        let new_blocks = worker.new_tokens(question, self.known_blocks(worker)).div_ceil(u64::from(question.block_size));
        let held_up_ms = prefill.compute_ms * f64::from(worker.running) * rates.costs.interference;
        Cost {
            queue_ms: prefill.queue_ms + rates.blocks_ms(question, worker, new_blocks),
            interference_ms: prefill.interference_ms + held_up_ms,
            decode_load_ms: rates.decode_load_ms(worker),
            ..prefill
        }
    }
}

/// One after the other. Decode workers prefill only when there is nobody else to.
struct RoundRobin;

impl RoundRobin {
    fn distance(standing: Standing) -> f64 {
        ((standing.place + standing.of - standing.turn.number % standing.of) % standing.of) as f64
    }
}

impl Policy for RoundRobin {
    fn prefill(&self, _: &Question, _: &Rates, _: &Candidate, standing: Standing) -> Cost {
        Cost::rank(Self::distance(standing))
    }

    fn decode(&self, _: &Question, _: &Rates, _: &Candidate, standing: Standing) -> Cost {
        Cost::rank(Self::distance(standing))
    }

    fn local(&self, _: &Question, _: &Rates, _: &Candidate, standing: Standing) -> Cost {
        Cost::rank(ONLY_IF_ALONE + Self::distance(standing))
    }
}

/// Any. Decode workers prefill only when there is nobody else to.
struct Random;

impl Policy for Random {
    fn prefill(&self, _: &Question, _: &Rates, _: &Candidate, standing: Standing) -> Cost {
        Cost::rank(standing.turn.draw(standing.place) as f64 / u64::MAX as f64)
    }

    fn decode(&self, question: &Question, rates: &Rates, worker: &Candidate, standing: Standing) -> Cost {
        // Another draw than the prefill side's, or the two sides would always be chosen alike.
        let turn = Turn { seed: !standing.turn.seed, ..standing.turn };
        self.prefill(question, rates, worker, Standing { turn, ..standing })
    }

    fn local(&self, question: &Question, rates: &Rates, worker: &Candidate, standing: Standing) -> Cost {
        Cost::rank(ONLY_IF_ALONE + self.decode(question, rates, worker, standing).rank)
    }
}

/// More than any pair of the policies that do not estimate.
const ONLY_IF_ALONE: f64 = 1e9;

#[cfg(test)]
#[path = "route_tests.rs"]
mod tests;
