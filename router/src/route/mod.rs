//! Chooses the workers of a request: a pure function of the request, the candidates' states, and a seed that breaks ties.
//!
//! A [`Policy`] estimates costs; [`place`] finds the cheapest pair. The cost of a remote placement is the prefill worker's cost plus the
//! decode worker's cost, so each is chosen independently instead of comparing all pairs.

mod candidate;
mod policy;

pub use candidate::{Candidate, PlacementQuery, Role};
pub use policy::{Cost, PlacementSeed, Policy, policy};

use crate::settings::{Costs, PrefillPlace};
use policy::{Position, Rates};

/// The chosen workers, as positions in the slice of candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
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
        "no prefill worker has joined, and --prefill remote forbids prefill on decode workers; start one, or set --prefill auto"
    )]
    NoPrefillWorker,
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
/// No worker of a role that the request needs is eligible.
pub fn place(
    costs: &[CostsByUse],
    query: &PlacementQuery,
    workers: &[Candidate],
    placement: PlacementSeed,
) -> Result<Choice, NoEligibleWorker> {
    let cheapest = |cost: fn(&CostsByUse) -> Option<Cost>| {
        let totals = costs.iter().enumerate().filter_map(|(at, costs)| Some((at, cost(costs)?.total())));
        totals.min_by(|(a, cost_a), (b, cost_b)| {
            cost_a.total_cmp(cost_b).then_with(|| placement.random(*a as u64).cmp(&placement.random(*b as u64)))
        })
    };
    let local = || cheapest(|costs| costs.local).ok_or_else(|| why_none(workers, Role::Decode, query));
    let decode = || cheapest(|costs| costs.decode).ok_or_else(|| why_none(workers, Role::Decode, query));
    let prefill = || cheapest(|costs| costs.prefill).ok_or_else(|| why_none(workers, Role::Prefill, query));

    match query.allowed_prefill() {
        PrefillPlace::Local => Ok(Choice { decode: local()?.0, prefill: None }),
        PrefillPlace::Remote => Ok(Choice { decode: decode()?.0, prefill: Some(prefill()?.0) }),
        PrefillPlace::Auto => {
            let ((local, local_cost), (decode, decode_cost)) = (local()?, decode()?);
            match prefill() {
                Ok((prefill, prefill_cost)) if prefill_cost + decode_cost < local_cost => {
                    Ok(Choice { decode, prefill: Some(prefill) })
                }
                _ => Ok(Choice { decode: local, prefill: None }),
            }
        }
    }
}

/// Returns the cost of each use of each worker, in the order of `workers`.
pub fn costs_by_use(
    policy: &dyn Policy,
    costs: &Costs,
    query: &PlacementQuery,
    workers: &[Candidate],
    placement: PlacementSeed,
) -> Vec<CostsByUse> {
    let rates = Rates::new(costs, workers);
    let allowed = query.allowed_prefill();
    let (remote, local) = (allowed != PrefillPlace::Local, allowed != PrefillPlace::Remote);
    let mut by_use = vec![CostsByUse::default(); workers.len()];
    for role in [Role::Decode, Role::Prefill] {
        let is_eligible = |worker: &Candidate| worker.role == role && !worker.excluded && worker.fits(query);
        let eligible: Vec<usize> = (0..workers.len()).filter(|at| is_eligible(&workers[*at])).collect();
        for (index, at) in eligible.iter().enumerate() {
            let worker = &workers[*at];
            let position = Position { index: index as u64, count: eligible.len() as u64, placement };
            by_use[*at] = match role {
                Role::Prefill => CostsByUse {
                    prefill: remote.then(|| policy.prefill(query, &rates, worker, position)),
                    ..CostsByUse::default()
                },
                Role::Decode => CostsByUse {
                    prefill: None,
                    decode: remote.then(|| policy.decode(query, &rates, worker, position)),
                    local: local.then(|| policy.local(query, &rates, worker, position)),
                },
            };
        }
    }
    by_use
}

/// Returns why no worker of this role is eligible.
fn why_none(workers: &[Candidate], role: Role, query: &PlacementQuery) -> NoEligibleWorker {
    let mut of_role = workers.iter().filter(|worker| worker.role == role).peekable();
    match role {
        Role::Decode if of_role.peek().is_none() => NoEligibleWorker::NoDecodeWorker,
        Role::Prefill if of_role.peek().is_none() => NoEligibleWorker::NoPrefillWorker,
        Role::Decode | Role::Prefill if of_role.any(|worker| worker.fits(query)) => NoEligibleWorker::AllFailed,
        Role::Decode | Role::Prefill => NoEligibleWorker::PromptTooLong,
    }
}

#[cfg(test)]
mod tests;
