//! Members as candidates for a placement.

use super::{ClusterMembers, Member, MemberPrefix};
use crate::{
    cluster::{findings::Correction, loads},
    index::WorkerSlot,
    rates::Measurement,
    route::{Candidate, TierLoads},
    settings::Costs,
};
use std::collections::{BTreeMap, BTreeSet};
use tandem_kv::{ByTier, InstanceId, SequenceHash, Tier};
use tandem_proto::v1;
use tokio::time::Instant;

/// How many leading blocks of a prompt each worker has, by its slot. Workers beyond the end of a list have none.
pub(in crate::cluster) struct Leading {
    /// Blocks that the worker has reported, as far as it can reuse them.
    reported: Vec<u32>,
    /// All blocks that the worker has reported; empty if every worker can reuse all of them.
    held: Vec<u32>,
    /// Blocks that the worker is about to compute.
    predicted: Vec<u32>,
    /// Blocks that the worker has computed, but reports late.
    unreported: Vec<u32>,
    /// Blocks in the chain of each tier; empty if no worker reports tiers.
    chains: Vec<ByTier<Option<u32>>>,
}

impl Leading {
    fn of(list: &[u32], slot: WorkerSlot) -> u32 {
        list.get(slot.0 as usize).copied().unwrap_or(0)
    }

    /// Whether the worker may have any blocks of the prompt, apart from those in a shared store.
    pub(super) fn any(&self, slot: WorkerSlot) -> bool {
        let Self { reported, held, predicted, unreported, .. } = self;
        [reported, held, predicted, unreported].into_iter().any(|list| Self::of(list, slot) > 0)
    }

    pub(in crate::cluster) fn has_tiers(&self) -> bool {
        !self.chains.is_empty()
    }
}

impl ClusterMembers {
    pub(in crate::cluster) fn leading(&self, hashes: &[SequenceHash]) -> Leading {
        let (reported, held) = self.index.lookup(hashes);
        let predicted = self.predictions.leading_blocks(hashes);
        let unreported = self.unreported.leading_blocks(hashes, self.now());
        Leading { reported, held, predicted, unreported, chains: self.index.tier_chains(hashes) }
    }

    /// Returns how much of the prompt the worker in this slot has, given the blocks in its shared store. Also returns how many leading
    /// blocks it has reported, and how many are on its device although it has not reported them.
    pub(super) fn prefix(
        &self,
        leading: &Leading,
        slot: WorkerSlot,
        correction: Correction,
        stored: u32,
    ) -> (MemberPrefix, [u32; 2]) {
        let Leading { reported, held, predicted, unreported, .. } = leading;
        let [own, late, computed] = [reported, unreported, predicted].map(|list| Leading::of(list, slot));
        // Without its reuse points, it is unknown how much of an unreported prompt a hybrid model can reuse.
        let is_known = late.max(stored) > own && !self.index.has_first(slot, SequenceHash::REUSE_POINTS);
        let (late, stored) = if is_known { (late, stored) } else { (0, 0) };
        let indexed = own.max(stored);
        let held = if held.is_empty() { indexed } else { Leading::of(held, slot).max(stored) };
        let reported = indexed.max(late);
        let prefix = MemberPrefix {
            held_blocks: held.max(reported),
            reported_blocks: reported,
            known_blocks: indexed.max(computed),
            overlap_blocks: correction.apply(reported),
            computed_blocks: computed,
        };
        (prefix, [own, late.max(computed)])
    }

    /// Returns each of these members as a candidate for a placement, in their order. A member is marked as excluded if it is in `excluded`,
    /// or if its circuit breaker is open at the time `breakers_at`. If `breakers_at` is `None`, circuit breakers are ignored.
    pub(in crate::cluster) fn candidates(
        &self,
        members: &[&Member],
        leading: &Leading,
        excluded: &BTreeSet<InstanceId>,
        breakers_at: Option<Instant>,
        costs: &Costs,
    ) -> Vec<Candidate> {
        let (now, chains) = (self.now(), &leading.chains);
        let scale = self.ages.scale(now);
        let chains_of = |member: &Member| chains.get(member.slot.0 as usize).copied().unwrap_or([None; 4]);
        let stores = if chains.is_empty() { BTreeMap::new() } else { self.store_blocks(&chains_of) };
        let candidate = |member: &&Member| {
            let excluded = excluded.contains(&member.instance_id) || breakers_at.is_some_and(|at| !member.breaker.admits(at));
            let stored = stores.get(&*member.info.shared_store).copied().unwrap_or(0);
            let (prefix, [own, on_device]) = self.prefix(leading, member.slot, member.findings.correction(), stored);
            let tiers = leading.has_tiers().then(|| {
                let blocks = loads::tier_blocks(chains_of(member), own, on_device, prefix.overlap_blocks);
                Box::new(TierLoads { blocks, ms_per_token: member.loads.measurements(now, costs) })
            });
            Candidate { excluded, tiers, ..member.candidate(prefix, Some(scale)) }
        };
        members.iter().map(candidate).collect()
    }

    /// Returns the number of a prompt's leading blocks in each store that workers share: what one of its workers has reported in it.
    fn store_blocks(&self, chains_of: &impl Fn(&Member) -> ByTier<Option<u32>>) -> BTreeMap<&str, u32> {
        let mut stores = BTreeMap::new();
        for member in self.values().filter(|member| !member.info.shared_store.is_empty()) {
            let blocks = stores.entry(&*member.info.shared_store).or_insert(0);
            *blocks = chains_of(member)[Tier::Store.index()].unwrap_or(0).max(*blocks);
        }
        stores
    }
}

impl Member {
    /// Returns the member as a candidate for a placement. `scale` is the present scale of the weights of its measurements; `None`: the
    /// weights are stamps.
    pub(in crate::cluster) fn candidate(&self, prefix: MemberPrefix, scale: Option<f64>) -> Candidate {
        let Self { load, bookings, info, measured, .. } = self;
        let measurement = |log: Option<f64>, stamp| {
            let measured = Measurement::new(log?, stamp);
            Some(scale.map_or(measured, |scale| measured.aged(scale)))
        };
        let capacity = u64::from(info.capacity_blocks) * u64::from(info.block_size);
        let context = if info.context_length == 0 { u64::MAX } else { u64::from(info.context_length) };
        let filled =
            f64::from(load.cached_blocks) + f64::from(load.in_use_blocks) + bookings.tokens as f64 / f64::from(info.block_size);
        let sequences = u64::from(load.running_sequences) + u64::from(load.waiting_requests) + bookings.sequences;
        Candidate {
            role: self.role,
            family: self.family.clone(),
            needs_prefill_worker: info.needs_prefill_worker,
            excluded: false,
            tokens_max: capacity.min(context),
            held_blocks: prefix.held_blocks,
            reported_blocks: prefix.reported_blocks,
            known_blocks: prefix.known_blocks,
            overlap_blocks: prefix.overlap_blocks,
            tiers: None,
            predicted_blocks: prefix.predicted_blocks(),
            cache_filled: (filled / f64::from(info.capacity_blocks)).min(1.0),
            queued_tokens: load.pending_prefill_tokens.saturating_add(bookings.tokens),
            behind_tokens: 0.0,
            behind_prompts: 0,
            sequences: u32::try_from(sequences).unwrap_or(u32::MAX),
            running: load.running_sequences,
            available_blocks: load.free_blocks.saturating_add(load.cached_blocks),
            in_use_blocks: load.in_use_blocks,
            answer_tokens: bookings.answer_tokens,
            step_tokens: info.step_tokens,
            local_share: self.local_share,
            block_bytes: info.block_bytes,
            prefill_tokens_per_second: measurement(measured.prefill_tokens_per_second, self.prefilled),
            prefill_fixed_ms: measurement(measured.prefill_fixed_ms, self.prefilled),
            decode_step_ms: measurement(measured.decode_step_ms, self.decoded),
            prompt_share: if load.prompt_share > 0.0 { load.prompt_share } else { 1.0 },
            transfer_bytes_per_second: measured.transfer_bytes_per_second.map(|log| Measurement::new(log, 1.0)),
        }
    }

    /// Returns the tiers in which the member holds blocks; none if it holds them on its device only.
    pub(in crate::cluster) fn tiers(&self) -> Vec<v1::TierView> {
        let tiers = Tier::ALL.into_iter().zip(self.load.tier_blocks);
        let view = |(tier, blocks): (Tier, u32)| v1::TierView {
            tier: tier.name().to_owned(),
            blocks,
            load_ms_per_token: self.loads.ms_per_token(tier),
        };
        tiers.map(view).filter(|tier| tier.blocks > 0 || tier.load_ms_per_token.is_some()).collect()
    }

    /// Records how many of the member's blocks are in the index.
    pub(in crate::cluster) fn on_indexed(&mut self, blocks: u64) {
        self.series.index_blocks.set(blocks as f64);
        if blocks > 0 && self.findings.reports() {
            self.export_findings();
        }
    }

    /// Exports what was learned from the latest prompts as metrics.
    pub(in crate::cluster) fn export_findings(&self) {
        self.series.findings.index_excess.set(self.findings.correction().blocks());
        for tier in Tier::ALL {
            if let Some(ms) = self.loads.ms_per_token(tier) {
                self.series.show_load_ms(&self.info.worker_id, tier.name(), ms);
            }
        }
        self.series.findings.reports_nothing.set(f64::from(u8::from(self.findings.is_silent())));
    }
}

impl MemberPrefix {
    /// Returns how many blocks after those that the engine will find are about to be computed.
    pub(super) fn predicted_blocks(self) -> u32 {
        self.computed_blocks.saturating_sub(self.overlap_blocks)
    }
}
