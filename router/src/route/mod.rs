//! Chooses the workers of a request: a pure function of the request, the candidates' states, and a seed that breaks ties.
//!
//! A [`PolicyKind`] estimates costs; [`place`] finds the cheapest worker or pair. The cost of a remote placement is the prefill worker's
//! cost plus the decode worker's cost, so both are chosen independently within a transfer family instead of comparing all pairs.

mod candidate;
mod family;
mod policy;

pub use candidate::{ByRole, Candidate, PlacementQuery, TierLoads, WorkerDemand, WorkerRole};
pub use family::{WorkerPair, cheapest_pair, paired_families};
pub use policy::{Cost, PlacementSeed};

use crate::settings::{Costs, PolicyKind, PrefillPlace};
use family::{cheapest, ranked};
use policy::{RouteRates, Sender};
use std::collections::BTreeSet;

/// The chosen workers, as positions in the slice of candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteChoice {
    /// The decode worker, which owns the request.
    pub decode: usize,
    /// The prefill worker; `None`: the decode worker prefills.
    pub prefill: Option<usize>,
}

/// Why no worker can take a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoEligibleWorker {
    #[error("no decode worker has joined; start one or wait until it is up")]
    NoDecodeWorker,
    #[error(
        "no prefill worker has joined, and --prefill remote forbids prefill on decode workers; start a prefill worker, or set --prefill auto"
    )]
    NoPrefillWorker,
    #[error(
        "no prefill worker has the transfer family of a decode worker, and --prefill remote forbids prefill on decode workers; compare the engines' versions and settings (docs/engines.md, \"transfer family\"), or set --prefill auto"
    )]
    NoCommonFamily,
    #[error(
        "the engines of all decode workers compute no prompts, and no prefill worker has the transfer family of one of them; start one, or compare the engines' versions and settings"
    )]
    NoPartner,
    #[error(
        "the engines of all decode workers compute no prompts, so they return no logprobs of a prompt; leave out the prompt's logprobs, or add a worker that computes its own prompts"
    )]
    NoPromptLogprobs,
    #[error("the request has failed on every worker that could take it; try again later")]
    AllFailed,
    #[error("the prompt does not fit in the KV cache and context of any worker; shorten it")]
    PromptTooLong,
}

/// The cost of each use of one worker for a request; `None` if the worker cannot be used in that role.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CostsByUse {
    pub prefill: Option<Cost>,
    /// The cost of the worker as the decode worker that receives KV.
    pub decode: Option<Cost>,
    /// The cost of the worker as the decode worker that also prefills.
    pub local: Option<Cost>,
}

/// Chooses the cheapest workers of a request. `costs` are those of [`costs_by_use`], in the order of `workers`.
///
/// # Errors
/// No worker, or no pair of workers, that the request needs is eligible.
pub fn place(
    costs: &[CostsByUse],
    query: &PlacementQuery,
    workers: &[Candidate],
    placement: PlacementSeed,
) -> Result<RouteChoice, NoEligibleWorker> {
    let alone = || {
        let local = costs.iter().enumerate().filter_map(|(at, costs)| ranked(costs.local, at, placement));
        cheapest(local)
    };
    let pair = || cheapest_pair(costs, workers, placement);
    let remote = |WorkerPair { prefill, decode }| RouteChoice { decode, prefill: Some(prefill) };
    let local = |decode| RouteChoice { decode, prefill: None };

    match (query.allowed_prefill(), alone()) {
        (PrefillPlace::Remote, _) => Ok(remote(pair().ok_or_else(|| why_no_pair(workers, query))?.workers)),
        (PrefillPlace::Local, Some(alone)) => Ok(local(alone.workers)),
        (PrefillPlace::Auto, Some(alone)) => {
            let cheaper_pair = pair().filter(|pair| pair.cost < alone.cost);
            Ok(cheaper_pair.map_or_else(|| local(alone.workers), |pair| remote(pair.workers)))
        }
        (PrefillPlace::Local | PrefillPlace::Auto, None) => {
            Ok(remote(pair().ok_or_else(|| why_no_decode_worker(workers, query))?.workers))
        }
    }
}

/// Returns the cost of each use of each worker, in the order of `workers`.
pub fn costs_by_use(
    policy: PolicyKind,
    costs: &Costs,
    demand: ByRole<WorkerDemand>,
    query: &PlacementQuery,
    workers: &[Candidate],
) -> Vec<CostsByUse> {
    let mut rates = RouteRates::new(costs, demand, workers);
    let allowed = query.allowed_prefill();
    let is_eligible = |worker: &Candidate| !worker.excluded && worker.fits(query);
    let paired = match allowed {
        PrefillPlace::Local if query.prompt_logits => BTreeSet::new(),
        // Decode workers that compute no prompts need a prefill worker for every request.
        PrefillPlace::Local => {
            families(workers, |worker| is_eligible(worker) && (worker.role == WorkerRole::Prefill || worker.needs_prefill_worker))
        }
        PrefillPlace::Auto | PrefillPlace::Remote => families(workers, is_eligible),
    };
    let is_paired = |worker: &Candidate| worker.family.as_deref().is_some_and(|family| paired.contains(family));
    let mut by_use = vec![CostsByUse::default(); workers.len()];
    let estimate = |by_use: &mut [CostsByUse],
                    role,
                    is_usable: &dyn Fn(&Candidate) -> bool,
                    set: &dyn Fn(&mut CostsByUse, &Candidate, usize)| {
        let is_eligible = |at: &usize| workers[*at].role == role && is_eligible(&workers[*at]) && is_usable(&workers[*at]);
        let eligible: Vec<usize> = (0..workers.len()).filter(is_eligible).collect();
        eligible.iter().for_each(|at| set(&mut by_use[*at], &workers[*at], eligible.len()));
    };
    estimate(&mut by_use, WorkerRole::Prefill, &is_paired, &|costs, worker, count| {
        costs.prefill = Some(policy.prefill(query, &rates, worker, count));
    });
    let senders = by_use.iter().zip(workers).filter_map(|(costs, worker)| Some((costs.prefill?, worker)));
    for (cost, worker) in senders {
        let sender = Sender { cost: cost.total(), compute_ms: cost.compute_ms, step_tokens: worker.step_tokens };
        rates.add_sender(&worker.family, sender);
    }
    estimate(&mut by_use, WorkerRole::Decode, &is_paired, &|costs, worker, _| {
        costs.decode = Some(policy.decode(query, &rates, worker));
    });
    if allowed != PrefillPlace::Remote {
        estimate(&mut by_use, WorkerRole::Decode, &|worker| !worker.needs_prefill_worker, &|costs, worker, count| {
            costs.local = Some(policy.local(query, &rates, worker, count));
        });
    }
    by_use
}

/// Returns [`paired_families`] of the workers for which `is_one` is true.
fn families(workers: &[Candidate], is_one: impl Fn(&Candidate) -> bool) -> BTreeSet<&str> {
    paired_families(workers.iter().filter(|worker| is_one(worker)).map(|worker| (worker.role, worker.family.as_deref())))
}

fn has_role(workers: &[Candidate], role: WorkerRole) -> bool {
    workers.iter().any(|worker| worker.role == role)
}

fn why_no_decode_worker(workers: &[Candidate], query: &PlacementQuery) -> NoEligibleWorker {
    let mut alone = workers.iter().filter(|worker| worker.role == WorkerRole::Decode && !worker.needs_prefill_worker).peekable();
    let has_pair = |is_one: &dyn Fn(&Candidate) -> bool| !query.prompt_logits && !families(workers, is_one).is_empty();
    if !has_role(workers, WorkerRole::Decode) {
        NoEligibleWorker::NoDecodeWorker
    } else if alone.peek().is_none() && query.prompt_logits {
        NoEligibleWorker::NoPromptLogprobs
    } else if alone.peek().is_none() && !has_pair(&|_| true) {
        NoEligibleWorker::NoPartner
    } else if alone.any(|worker| worker.fits(query)) || has_pair(&|worker| worker.fits(query)) {
        NoEligibleWorker::AllFailed
    } else {
        NoEligibleWorker::PromptTooLong
    }
}

/// Returns why no prefill worker with a decode worker of its family is eligible.
fn why_no_pair(workers: &[Candidate], query: &PlacementQuery) -> NoEligibleWorker {
    if !has_role(workers, WorkerRole::Decode) {
        NoEligibleWorker::NoDecodeWorker
    } else if !has_role(workers, WorkerRole::Prefill) {
        NoEligibleWorker::NoPrefillWorker
    } else if families(workers, |_| true).is_empty() {
        NoEligibleWorker::NoCommonFamily
    } else if families(workers, |worker| worker.fits(query)).is_empty() {
        NoEligibleWorker::PromptTooLong
    } else {
        NoEligibleWorker::AllFailed
    }
}

#[cfg(test)]
mod tests;
