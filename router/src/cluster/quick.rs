//! Chooses the workers of a request in one pass over the members' rows (docs/adr/058-placement-rows.md).
//!
//! [`Placer::weigh`] computes the same choice readably, for all members, and is the reference in the tests. Costs are computed by the same
//! functions from the same numbers in the same order, so that even ties are equal.

use super::{
    members::{ClusterMembers, Member, MemberPrefix},
    placement::{PlacementDecision, Placer, Question},
    request::{Excluded, PlacementRequest},
};
use crate::route::{Cheapest, CostsByUse, RouteChoice, RouteRates, WorkerRole};

impl Placer {
    /// Returns the decision with only those members that matter for what follows from it: the chosen workers, those with the most blocks of
    /// the prompt, and the receivers that would be chosen with these. Returns `None` if the rows do not suffice, or if no worker is eligible.
    pub(super) fn quick<'a>(
        &self,
        all: &'a ClusterMembers,
        question: &Question<'a>,
        request: &'a PlacementRequest,
        excluded: &Excluded,
    ) -> Option<PlacementDecision<'a>> {
        let &Question { query, costs, demand, seed, .. } = question;
        let leading = all.leading(question.hashes);
        if leading.has_tiers() || question.equal.is_some() {
            return None;
        }
        let rows = all.rows(&question.model, query, request, &leading, &excluded.failed);
        let mut seen: Vec<(MemberPrefix, bool)> = Vec::with_capacity(rows.len());
        let workers = rows.iter().map(|(number, row)| {
            let (prefix, is_eligible) = rows.see(number, row);
            seen.push((prefix, is_eligible));
            (&row.numbers, is_eligible)
        });
        let weights = (&costs, rows.scale());
        let mut rates = RouteRates::new(self.settings.policy, weights, demand, &query, workers, std::iter::empty());
        let (mut cheapest, mut most) = (Cheapest::new(seed), [None; 3]);
        for role in [WorkerRole::Prefill, WorkerRole::Decode] {
            if role == WorkerRole::Prefill && !rates.has_pairs() {
                continue;
            }
            for (number, row) in rows.iter() {
                let (prefix, is_eligible) = seen[number];
                if row.numbers.role == role && is_eligible {
                    let costs = rates.costs_of(&row.numbers, rows.of_prompt(number, row, prefix), None);
                    cheapest.offer(number, row.numbers.family, &costs);
                    if costs.prefill.is_some() || costs.local.is_some() {
                        keep_most(&mut most[0], number, prefix.overlap_blocks);
                    }
                }
            }
        }
        for (number, (prefix, _)) in seen.iter().enumerate() {
            keep_most(&mut most[1], number, prefix.overlap_blocks);
            keep_most(&mut most[2], number, prefix.known_blocks);
        }
        let RouteChoice { decode, prefill } = cheapest.choice(query.allowed_prefill())?;
        let most = most.into_iter().flatten().map(|(number, _)| number);
        let mut numbers: Vec<usize> = most.chain([decode]).chain(prefill).chain(cheapest.receivers()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let members: Vec<&Member> = numbers.iter().map(|number| rows.member(*number)).collect();
        let candidates = question.candidates(all, &members, &leading, request, (&excluded.failed, Some(all.now())));
        let mut rates = rates.with_present_weights();
        let costs =
            candidates.iter().map(|worker| if worker.is_eligible(&query) { rates.costs(worker) } else { CostsByUse::default() });
        let costs = costs.collect();
        let at = |number: usize| numbers.binary_search(&number).expect("the choice matters");
        let choice = Ok(RouteChoice { decode: at(decode), prefill: prefill.map(at) });
        Some(PlacementDecision { question: question.clone(), all, members, candidates, costs, choice })
    }
}

/// Keeps the first worker with the most blocks, if any has some.
fn keep_most(most: &mut Option<(usize, u32)>, number: usize, blocks: u32) {
    let (first, kept) = most.unwrap_or((usize::MAX, 0));
    if blocks > kept || (blocks == kept && number < first && blocks > 0) {
        *most = Some((number, blocks));
    }
}
