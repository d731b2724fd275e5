//! A placement explained: what each worker would have cost, by part, and why one won.

use super::{Asked, Member, State};
use crate::route::{self, Candidate, Choice, Cost, Role, Turn, Unplaced, Uses};
use std::collections::BTreeSet;
use tandem_proto::v1::{self, worker_info};
use tokio::time::Instant;

impl State {
    /// Where the request would be placed now, and why. The next one asked may differ where costs are equal.
    pub(crate) fn explain(&self, asked: &Asked) -> v1::ExplainReply {
        let (question, hashes) = match self.question(asked, 1) {
            Ok(found) => found,
            Err(why) => return v1::ExplainReply { explanation: why.to_string(), ..Default::default() },
        };
        let candidates = self.candidates(hashes, &BTreeSet::new(), Some(Instant::now()));
        let turn = Turn { seed: self.settings.seed, number: self.turns };
        let costs = self.costs();
        let uses = route::uses(&*self.policy, &costs, &question, &candidates, turn);
        let choice = route::place(&*self.policy, &costs, &question, &candidates, turn);
        let members: Vec<&Member> = self.members.values().collect();
        reply(&members, &candidates, &uses, choice, question.block_size)
    }
}

/// The reply for what was weighed and chosen. All slices are in the order of the members.
fn reply(
    members: &[&Member],
    candidates: &[Candidate],
    uses: &[Uses],
    choice: Result<Choice, Unplaced>,
    block_size: u32,
) -> v1::ExplainReply {
    let workers = members.iter().zip(candidates).zip(uses).map(|((member, candidate), uses)| v1::ExplainedWorker {
        worker: Some(member.reference()),
        role: match candidate.role {
            Role::Prefill => worker_info::Role::Prefill.into(),
            Role::Decode => worker_info::Role::Decode.into(),
        },
        overlap_blocks: candidate.overlap_blocks,
        predicted_blocks: candidate.predicted_blocks,
        queued_tokens: candidate.queued_tokens,
        sequences: candidate.sequences,
        cache_filled: candidate.cache_filled,
        as_prefill: uses.prefill.map(cost),
        as_decode: uses.decode.map(cost),
        alone: uses.local.map(cost),
    });
    let describe = |at: usize| members[at].describe(&candidates[at]);
    let (placement, explanation) = match choice {
        Ok(Choice { decode, prefill }) => {
            let placement = v1::Placement { decode: Some(describe(decode)), prefill: prefill.map(describe), block_size };
            (Some(placement), explanation(members, uses, decode, prefill))
        }
        Err(why) => (None, why.to_string()),
    };
    v1::ExplainReply { workers: workers.collect(), block_size, placement, explanation }
}

fn cost(cost: Cost) -> v1::Cost {
    let Cost { queue_ms, compute_ms, interference_ms, transfer_ms, handoff_ms, decode_load_ms, rank } = cost;
    v1::Cost { total_ms: cost.total(), queue_ms, compute_ms, interference_ms, transfer_ms, handoff_ms, decode_load_ms, rank }
}

/// The chosen way, and the best of the other ways.
fn explanation(members: &[&Member], uses: &[Uses], decode: usize, prefill: Option<usize>) -> String {
    let name = |at: usize| members[at].info.worker_id.as_str();
    let total = |cost: Option<Cost>| cost.as_ref().map(Cost::total);
    let least = |use_of: fn(&Uses) -> Option<Cost>, but: usize| {
        let others = uses.iter().enumerate().filter(|(at, _)| *at != but);
        others.filter_map(|(at, uses)| Some((at, total(use_of(uses))?))).min_by(|a, b| a.1.total_cmp(&b.1))
    };
    let sum = |one: Option<f64>, other: Option<f64>| Some(one? + other?);
    let remote = |prefill: usize| sum(total(uses[prefill].prefill), least(|uses| uses.decode, usize::MAX).map(|(_, ms)| ms));
    let (chosen, ms, mut others) = match prefill {
        None => {
            let other = least(|uses| uses.local, decode).map(|(at, ms)| (format!("{} alone", name(at)), ms));
            let handed = least(|uses| uses.prefill, usize::MAX)
                .and_then(|(at, _)| Some((format!("a prefill on {}", name(at)), remote(at)?)));
            (format!("{} alone", name(decode)), total(uses[decode].local), vec![other, handed])
        }
        Some(prefill) => {
            let own = total(uses[decode].decode);
            let other =
                least(|uses| uses.prefill, prefill).and_then(|(at, ms)| Some((format!("a prefill on {}", name(at)), ms + own?)));
            let alone = least(|uses| uses.local, usize::MAX).map(|(at, ms)| (format!("{} alone", name(at)), ms));
            (
                format!("a prefill on {} for {}", name(prefill), name(decode)),
                sum(total(uses[prefill].prefill), own),
                vec![other, alone],
            )
        }
    };
    others.sort_by_key(Option::is_none);
    let others: Vec<String> = others.into_iter().flatten().map(|(what, ms)| format!("{what} {ms:.1} ms")).collect();
    let than = if others.is_empty() { "there is no other way".to_owned() } else { others.join(", ") };
    format!("{chosen} is cheapest with {:.1} ms; {than}", ms.unwrap_or_default())
}
