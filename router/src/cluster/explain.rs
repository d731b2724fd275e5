//! Explains a placement: the cost of each worker by cause, and the reason for the choice of the workers.

use super::{members::ClusterMembers, placement::PlacementDecision, texts};
use crate::route::Cost;
use std::{collections::HashMap, time::Duration};
use tandem_proto::{tier_names, v1};

/// Returns the reply that explains a decision. `members` are all members. `assumed_rate` is the prefill rate of workers if none has measured
/// one.
pub(super) fn reply(members: &ClusterMembers, decision: &PlacementDecision<'_>, assumed_rate: f64) -> v1::ExplainReply {
    let PlacementDecision { query, candidates, costs, choice, .. } = decision;
    let workers = decision.members.iter().zip(candidates).zip(costs).map(|((member, candidate), costs)| v1::ExplainedWorker {
        worker: Some(member.reference()),
        role: member.info.role,
        overlap_blocks: candidate.overlap_blocks,
        predicted_blocks: candidate.predicted_blocks,
        overlap_by_tier: if candidate.load_blocks() > 0 { tier_names(candidate.tier_blocks()) } else { HashMap::new() },
        queued_tokens: candidate.queued_tokens,
        sequences: candidate.sequences,
        cache_filled: candidate.cache_filled,
        as_prefill: costs.prefill.map(cost),
        as_decode: costs.decode.map(cost),
        alone: costs.local.map(cost),
        transfer_family: member.info.transfer_family.clone(),
        unpaired_reason: members.unpaired_reason(member),
        index_note: member.findings.note(),
        approximate_index: members.has_approximate_index(member),
    });
    let (placement, explanation) = match choice {
        Ok(choice) => {
            let name = |at: usize| decision.members[at].info.worker_id.as_str();
            let facts = decision.facts(members, *choice, 0, members.now());
            let explanation = texts::explanation(*choice, costs, candidates, name) + &texts::assumed(candidates, assumed_rate);
            (Some(decision.placement(*choice, Duration::ZERO, facts)), explanation)
        }
        Err(error) => (None, error.to_string()),
    };
    let model = decision.model.to_string();
    v1::ExplainReply { workers: workers.collect(), block_size: query.block_size, placement, explanation, model }
}

fn cost(cost: Cost) -> v1::Cost {
    let Cost { queue_ms, compute_ms, load_ms, interference_ms, transfer_ms, handoff_ms, decode_load_ms } = cost;
    v1::Cost { total_ms: cost.total(), queue_ms, compute_ms, load_ms, interference_ms, transfer_ms, handoff_ms, decode_load_ms }
}
