//! The facts about a prompt's prefix when it is placed: which blocks the chosen worker has cached, which blocks others have, and which
//! blocks workers have removed. From these facts follows the cause of each token that is not found (docs/adr/051-why-not-cached.md).

use super::{
    booking::Prediction,
    findings::FoundBlocks,
    members::{ClusterMembers, Member},
    placement::PlacementDecision,
};
use crate::{metrics::RouterMetrics, route::RouteChoice};
use std::{cmp::Reverse, sync::Arc};
use tandem_proto::{
    Funnel,
    v1::{KnownPrefix, PrefixFacts},
};
use tokio::time::Instant;

impl PlacementDecision<'_> {
    /// Returns the facts about the prompt's prefix. `members` are all members.
    pub(super) fn facts(
        &self,
        members: &ClusterMembers,
        choice: RouteChoice,
        other_namespace_blocks: u32,
        now: Instant,
    ) -> PrefixFacts {
        let computes = choice.prefill.unwrap_or(choice.decode);
        let chosen = &self.candidates[computes];
        // The members with the most cached blocks: first the chosen member, then the first one.
        let (mut eligible, mut anywhere, mut in_flight) = (None, None, 0);
        for (at, candidate) in self.candidates.iter().enumerate() {
            in_flight = in_flight.max(candidate.known_blocks);
            let rank = Some((candidate.overlap_blocks, at == computes, Reverse(at))).filter(|(blocks, ..)| *blocks > 0);
            anywhere = rank.max(anywhere);
            if rank > eligible && self.computing(at).is_some() {
                eligible = rank;
            }
        }
        let mut facts = PrefixFacts {
            reusable_blocks: self.hashes.len() as u32,
            expected_blocks: chosen.overlap_blocks,
            held_blocks: chosen.held_blocks,
            known_blocks: chosen.known_blocks,
            other_namespace_blocks,
            ..Default::default()
        };
        let known = |(_, _, Reverse(at))| self.known_prefix(at, choice);
        let blocks = |most: Option<(u32, bool, Reverse<usize>)>| most.map(|(blocks, ..)| blocks);
        facts.eligible = eligible.map(known);
        facts.anywhere = anywhere.filter(|_| blocks(anywhere) > blocks(eligible)).map(known).or_else(|| facts.eligible.clone());
        facts.in_flight_blocks = in_flight.max(members.just_computed(self.hashes, now));
        facts.removed = members.removed(self.hashes, facts.known_prefix(), now);
        facts
    }

    /// Returns the blocks of this member, and what it would have cost to compute the prompt there instead of on the chosen workers.
    fn known_prefix(&self, at: usize, choice: RouteChoice) -> KnownPrefix {
        let computes = choice.prefill.unwrap_or(choice.decode);
        let saved_ms = self.computing(computes).zip(self.computing(at)).map_or(0.0, |(chosen, other)| chosen - other);
        KnownPrefix {
            worker_id: self.members[at].info.worker_id.clone(),
            blocks: self.candidates[at].overlap_blocks,
            more_ms: self.total(at).zip(self.total(computes)).map(|(other, chosen)| other - chosen),
            saved_ms: saved_ms.max(0.0),
            ..Default::default()
        }
    }

    /// Returns the time that the member would take to load and compute the prompt; `None` if it cannot.
    fn computing(&self, at: usize) -> Option<f64> {
        let costs = &self.costs[at];
        costs.prefill.or(costs.local).map(|cost| cost.compute_ms + cost.load_ms)
    }

    /// Returns the cost of the cheapest placement in which this member computes the prompt; `None` if there is none.
    fn total(&self, at: usize) -> Option<f64> {
        let Some(prefill) = self.costs[at].prefill else { return self.costs[at].local.map(|cost| cost.total()) };
        let decoders = self.candidates.iter().zip(&self.costs).filter(|(other, _)| other.family == self.candidates[at].family);
        let decode = decoders.filter_map(|(_, costs)| costs.decode).map(|cost| cost.total()).min_by(f64::total_cmp)?;
        Some(prefill.total() + decode)
    }
}

/// Returns the facts without the names of workers.
pub(super) fn anonymous(facts: &PrefixFacts) -> PrefixFacts {
    let without_name = |known: &Option<KnownPrefix>| {
        let &KnownPrefix { blocks, more_ms, saved_ms, removed_s, lost, .. } = known.as_ref()?;
        Some(KnownPrefix { worker_id: String::new(), blocks, more_ms, saved_ms, removed_s, lost })
    };
    let (eligible, anywhere) = (without_name(&facts.eligible), without_name(&facts.anywhere));
    PrefixFacts { eligible, anywhere, removed: without_name(&facts.removed), ..*facts }
}

/// Compares what was predicted for a prompt to the model with the `actual` tokens that the engine of the member found.
pub(super) fn compare(
    member: &mut Member,
    metrics: &RouterMetrics,
    model: &Arc<str>,
    prediction: &Prediction,
    actual: u32,
    now: Instant,
) -> Funnel {
    let Prediction { prompt_tokens, block_size, reported, facts, loads } = prediction;
    let found = actual / (*block_size).max(1);
    member.findings.add(FoundBlocks { reported: *reported, known: facts.known_blocks, found });
    member.loads.learn(loads, found, now);
    member.reused.add(actual.into(), now);
    member.export_findings();
    let Member { series, prefix_series, placements, info, .. } = member;
    let predicted = u64::from(facts.expected_blocks) * u64::from(*block_size);
    let (over, under) = (predicted.saturating_sub(actual.into()), u64::from(actual).saturating_sub(predicted));
    series.overlap_over.increment(over);
    series.overlap_under.increment(under);
    placements.overlap_over_tokens += over;
    placements.overlap_under_tokens += under;
    let funnel = Funnel::of(facts, *prompt_tokens, *block_size, actual);
    let of_model = prefix_series.entry(model.clone()).or_insert_with(|| metrics.prefix_series(&info.worker_id, model));
    of_model.count(&funnel, facts);
    funnel
}
