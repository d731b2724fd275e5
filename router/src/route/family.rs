//! The cheapest worker, or the cheapest pair of a prefill worker and a decode worker. Only workers of one transfer family exchange KV.

use super::{
    CostsByUse, RouteChoice,
    candidate::{Candidate, FamilyId, WorkerRole},
    policy::PlacementSeed,
};
use crate::settings::PrefillPlace;
use std::collections::BTreeSet;

/// A worker, or a pair of workers, with its cost. The lower cost wins, then the lower `tie_break`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RankedWorkers<T> {
    pub workers: T,
    pub cost: f64,
    pub tie_break: u64,
}

/// The positions of a prefill worker and of the decode worker that receives its KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerPair {
    pub prefill: usize,
    pub decode: usize,
}

/// The cheapest workers of those that were offered.
#[derive(Debug, Default)]
pub struct Cheapest {
    placement: PlacementSeed,
    /// The worker that prefills and decodes.
    alone: Option<RankedWorkers<usize>>,
    /// The prefill worker and the decode worker of each family. The cost of a pair is the sum of its workers' costs, so the cheapest pair of
    /// a family has these two, and no other pairs need to be compared.
    of_families: Vec<[Option<RankedWorkers<usize>>; 2]>,
}

impl Cheapest {
    pub fn new(placement: PlacementSeed) -> Self {
        Self { placement, ..Self::default() }
    }

    /// Offers the worker at position `at`.
    #[inline(always)]
    pub fn offer(&mut self, at: usize, family: Option<FamilyId>, costs: &CostsByUse) {
        let placement = self.placement;
        let keep = |best: &mut Option<RankedWorkers<usize>>, cost: f64| {
            // The tie-break is computed only for those that may be the best.
            let tie_break = || placement.random(at as u64);
            if best.is_none_or(|best| cost < best.cost || (cost == best.cost && tie_break() < best.tie_break)) {
                *best = Some(RankedWorkers { workers: at, cost, tie_break: tie_break() });
            }
        };
        if let Some(local) = &costs.local {
            keep(&mut self.alone, local.total());
        }
        if let (Some(FamilyId(family)), true) = (family, costs.prefill.is_some() || costs.decode.is_some()) {
            let family = usize::from(family);
            self.of_families.resize(self.of_families.len().max(family + 1), [None; 2]);
            for (best, cost) in self.of_families[family].iter_mut().zip([&costs.prefill, &costs.decode]) {
                cost.iter().for_each(|cost| keep(best, cost.total()));
            }
        }
    }

    /// Returns the cheapest decode worker of each family.
    pub fn receivers(&self) -> impl Iterator<Item = usize> {
        self.of_families.iter().filter_map(|[_, decode]| decode.map(|decode| decode.workers))
    }

    pub fn pair(&self) -> Option<RankedWorkers<WorkerPair>> {
        let pairs = self.of_families.iter().filter_map(|[prefill, decode]| {
            let (prefill, decode) = ((*prefill)?, (*decode)?);
            let workers = WorkerPair { prefill: prefill.workers, decode: decode.workers };
            Some(RankedWorkers { workers, cost: prefill.cost + decode.cost, tie_break: decode.tie_break })
        });
        pairs.min_by(|one, other| one.cost.total_cmp(&other.cost).then(one.tie_break.cmp(&other.tie_break)))
    }

    /// Returns the cheapest choice; `None` if no worker, or no pair of workers, can take the request.
    pub fn choice(&self, allowed: PrefillPlace) -> Option<RouteChoice> {
        let alone = self.alone.filter(|_| allowed != PrefillPlace::Remote);
        let pair = || {
            let is_better = |cost: f64| alone.is_none_or(|alone| allowed == PrefillPlace::Auto && cost < alone.cost);
            self.pair().filter(|pair| is_better(pair.cost)).map(|pair| pair.workers)
        };
        let remote = |WorkerPair { prefill, decode }| RouteChoice { decode, prefill: Some(prefill) };
        pair().map(remote).or(alone.map(|alone| RouteChoice { decode: alone.workers, prefill: None }))
    }
}

/// Returns the cheapest pair.
pub fn cheapest_pair(costs: &[CostsByUse], workers: &[Candidate], placement: PlacementSeed) -> Option<RankedWorkers<WorkerPair>> {
    Cheapest::of(costs, workers, placement).pair()
}

impl Cheapest {
    pub(super) fn of(costs: &[CostsByUse], workers: &[Candidate], placement: PlacementSeed) -> Self {
        let mut cheapest = Self::new(placement);
        costs.iter().zip(workers).enumerate().for_each(|(at, (costs, worker))| cheapest.offer(at, worker.family, costs));
        cheapest
    }
}

/// Returns the families in which a prefill worker can serve a decode worker. `workers` are the workers' roles and families; a worker
/// without a family never exchanges KV.
pub fn paired_families<Family: Ord>(workers: impl Iterator<Item = (WorkerRole, Option<Family>)>) -> BTreeSet<Family> {
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
