//! Chooses the workers of a request: a pure function of the request, the candidates' states, and a seed that breaks ties.
//!
//! A [`PolicyKind`] estimates costs; [`place`] finds the cheapest worker or pair. The cost of a remote placement is the prefill worker's
//! cost plus the decode worker's cost, so both are chosen independently within a transfer family instead of comparing all pairs.

mod candidate;
mod family;
mod numbers;
mod policy;

pub use candidate::{ByRole, Candidate, FamilyId, PlacementQuery, TierLoads, WorkerDemand, WorkerRole};
pub use family::{Cheapest, WorkerPair, cheapest_pair, paired_families};
pub use numbers::{OfPrompt, WorkerNumbers};
pub use policy::{Cost, PlacementSeed, RouteRates};

use crate::settings::{Costs, PolicyKind, PrefillPlace};
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
    let allowed = query.allowed_prefill();
    let choice = Cheapest::of(costs, workers, placement).choice(allowed);
    choice.ok_or_else(|| match allowed {
        PrefillPlace::Remote => why_no_pair(workers, query),
        PrefillPlace::Local | PrefillPlace::Auto => why_no_decode_worker(workers, query),
    })
}

/// Returns the cost of each use of each worker, in the order of `workers`.
pub fn costs_by_use(
    policy: PolicyKind,
    costs: &Costs,
    demand: ByRole<WorkerDemand>,
    query: &PlacementQuery,
    workers: &[Candidate],
) -> Vec<CostsByUse> {
    let numbers: Vec<WorkerNumbers> = workers.iter().map(Into::into).collect();
    let eligible = workers.iter().map(|worker| worker.is_eligible(query));
    let tiers = workers.iter().filter_map(|worker| worker.tiers.as_deref());
    let mut rates = RouteRates::new(policy, (costs, 1.0), demand, query, numbers.iter().zip(eligible), tiers);
    let mut by_use = vec![CostsByUse::default(); workers.len()];
    for role in [WorkerRole::Prefill, WorkerRole::Decode] {
        let of_role = |worker: &Candidate| worker.role == role && worker.is_eligible(query);
        for (by_use, worker) in by_use.iter_mut().zip(workers).filter(|(_, worker)| of_role(worker)) {
            *by_use = rates.costs(worker);
        }
    }
    by_use
}

/// Returns [`paired_families`] of the workers for which `is_one` is true.
fn families(workers: &[Candidate], is_one: impl Fn(&Candidate) -> bool) -> BTreeSet<FamilyId> {
    paired_families(workers.iter().filter(|worker| is_one(worker)).map(|worker| (worker.role, worker.family)))
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
