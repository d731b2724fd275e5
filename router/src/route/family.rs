//! Pairs of a prefill worker and a decode worker. Only workers of one transfer family exchange KV.

use super::{
    CostsByUse,
    candidate::{Candidate, WorkerRole},
    policy::{Cost, PlacementSeed},
};
use std::collections::{BTreeMap, BTreeSet};

/// A worker, or a pair of workers, with its cost. The lower cost wins, then the lower `tie_break`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankedWorkers<T> {
    pub workers: T,
    pub cost: f64,
    pub tie_break: u64,
}

pub(super) fn cheapest<T>(ranked: impl Iterator<Item = RankedWorkers<T>>) -> Option<RankedWorkers<T>> {
    ranked.min_by(|one, other| one.cost.total_cmp(&other.cost).then(one.tie_break.cmp(&other.tie_break)))
}

/// Returns the worker at position `at` with its cost; `None` if `cost` is `None`, because the worker cannot be used for the request.
pub(super) fn ranked(cost: Option<Cost>, at: usize, placement: PlacementSeed) -> Option<RankedWorkers<usize>> {
    Some(RankedWorkers { workers: at, cost: cost?.total(), tie_break: placement.random(at as u64) })
}

/// The positions of a prefill worker and of the decode worker that receives its KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerPair {
    pub prefill: usize,
    pub decode: usize,
}

/// Returns the cheapest pair. The cost of a pair is the sum of its workers' costs, so the cheapest pair of a family has the family's
/// cheapest prefill worker and its cheapest decode worker, and no other pairs need to be compared.
pub fn cheapest_pair(costs: &[CostsByUse], workers: &[Candidate], placement: PlacementSeed) -> Option<RankedWorkers<WorkerPair>> {
    let mut best = BTreeMap::<&str, [Option<RankedWorkers<usize>>; 2]>::new();
    for (at, (costs, worker)) in costs.iter().zip(workers).enumerate() {
        let Some(family) = worker.family.as_deref() else { continue };
        let best = best.entry(family).or_default();
        for (best, cost) in best.iter_mut().zip([costs.prefill, costs.decode]) {
            *best = cheapest(best.take().into_iter().chain(ranked(cost, at, placement)));
        }
    }
    cheapest(best.into_values().filter_map(|[prefill, decode]| {
        let (prefill, decode) = (prefill?, decode?);
        let workers = WorkerPair { prefill: prefill.workers, decode: decode.workers };
        Some(RankedWorkers { workers, cost: prefill.cost + decode.cost, tie_break: decode.tie_break })
    }))
}

/// Returns the families in which a prefill worker can serve a decode worker. `workers` are the workers' roles and families; a worker
/// without a family never exchanges KV.
pub fn paired_families<'a>(workers: impl Iterator<Item = (WorkerRole, Option<&'a str>)>) -> BTreeSet<&'a str> {
    let (mut sending, mut receiving) = (BTreeSet::new(), BTreeSet::new());
    for (role, family) in workers {
        let of_role = match role {
            WorkerRole::Prefill => &mut sending,
            WorkerRole::Decode => &mut receiving,
        };
        of_role.extend(family);
    }
    sending.retain(|family| receiving.contains(family));
    sending
}
