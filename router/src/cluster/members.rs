//! The workers that are routed to, and what is booked on each.
//!
//! Invariant: a member's [`Booked`] has exactly the bookings, of this router and of others, that name its instance. Bookings on
//! instances that are no members count nowhere; when such an instance joins, its own report is taken to include them.

use super::bookings::Booking;
use crate::{
    booked::{Booked, Share},
    breaker::Breaker,
    feed::Beside,
    index::WorkerSlot,
    metrics::WorkerSeries,
    rates::Measured,
    route::{Candidate, Role},
    settings::Costs,
};
use std::{
    collections::{BTreeMap, HashMap},
    ops::Index,
    sync::Arc,
};
use tandem_kv::{Load, SequenceHash};
use tandem_proto::v1::{self, WorkerInfo};
use tokio::time::Instant;

/// One instance's time in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct MemberId(pub(super) u64);

pub(super) struct Member {
    pub(super) info: WorkerInfo,
    /// As in its description.
    pub(super) instance_id: Arc<str>,
    pub(super) role: Role,
    pub(super) address: String,
    pub(super) slot: WorkerSlot,
    pub(super) load: Load,
    pub(super) beside: Beside,
    /// When a report last said that a long step had renewed the prefill rate.
    pub(super) prefilled_at: Instant,
    /// When a report last said that it had continued sequences.
    pub(super) decoded_at: Instant,
    pub(super) booked: Booked,
    pub(super) breaker: Breaker,
    pub(super) series: WorkerSeries,
    /// What `series` counts of placements, since it joined.
    pub(super) placed: v1::PlacementTotals,
}

/// All of them, in the order in which they joined.
#[derive(Default)]
pub(super) struct Members {
    by_id: BTreeMap<MemberId, Member>,
    by_instance: HashMap<Arc<str>, MemberId>,
}

/// What a request adds to its workers' reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shares {
    pub(super) decode: Share,
    pub(super) prefill: Share,
}

impl Members {
    pub(super) fn insert(&mut self, id: MemberId, member: Member) {
        self.by_instance.insert(member.instance_id.clone(), id);
        self.by_id.insert(id, member);
    }

    pub(super) fn remove(&mut self, id: MemberId) -> Option<Member> {
        let member = self.by_id.remove(&id)?;
        self.by_instance.remove(&member.instance_id);
        Some(member)
    }

    pub(super) fn get_mut(&mut self, id: MemberId) -> Option<&mut Member> {
        self.by_id.get_mut(&id)
    }

    pub(super) fn of(&self, instance_id: &str) -> Option<&Member> {
        self.by_id.get(self.by_instance.get(instance_id)?)
    }

    pub(super) fn of_mut(&mut self, instance_id: &str) -> Option<&mut Member> {
        self.by_id.get_mut(self.by_instance.get(instance_id)?)
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Member> {
        self.by_id.values()
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (&MemberId, &Member)> {
        self.by_id.iter()
    }

    /// The booking counts on those of its workers that are members.
    pub(super) fn book(&mut self, booking: &Booking, shares: Shares) {
        for (instance_id, computing) in booking.places() {
            let share = if *instance_id == booking.decode { shares.decode } else { shares.prefill };
            if let Some(member) = self.of_mut(instance_id) {
                member.booked.add(booking.key.clone(), share, computing);
            }
        }
    }

    /// The same for a member that has just joined, whose report includes the booking by now.
    pub(super) fn book_on(&mut self, joined: &str, booking: &Booking) {
        for (instance_id, computing) in booking.places().filter(|(instance_id, _)| ***instance_id == *joined) {
            if let Some(member) = self.of_mut(instance_id) {
                member.booked.add(booking.key.clone(), Share::default(), computing);
            }
        }
    }

    /// The booking's prompt is computed: where it was counts no prefill any more. `None`: it was before.
    pub(super) fn prefilled(&mut self, booking: &mut Booking) -> Option<()> {
        std::mem::take(&mut booking.computing).then_some(())?;
        let computed_on = booking.prefill.as_ref().unwrap_or(&booking.decode);
        if let Some(member) = self.of_mut(computed_on) {
            member.booked.prefilled(&booking.key, &booking.hashes);
            if booking.prefill.is_some() {
                member.booked.remove(&booking.key);
            }
        }
        Some(())
    }

    /// The booking counts nowhere any more.
    pub(super) fn release(&mut self, mut booking: Booking) {
        self.prefilled(&mut booking);
        if let Some(member) = self.of_mut(&booking.decode) {
            member.booked.remove(&booking.key);
        }
    }

    /// What of the booking is not in its workers' reports yet.
    pub(super) fn unreported(&self, booking: &Booking) -> Shares {
        let on =
            |instance_id: &str| self.of(instance_id).map(|member| member.booked.unreported(&booking.key)).unwrap_or_default();
        Shares { decode: on(&booking.decode), prefill: booking.prefill.as_deref().map(on).unwrap_or_default() }
    }
}

impl Index<&MemberId> for Members {
    type Output = Member;

    fn index(&self, id: &MemberId) -> &Member {
        &self.by_id[id]
    }
}

impl Member {
    /// Not vouched for: that is done where a placement leaves the router.
    pub(super) fn reference(&self) -> v1::WorkerRef {
        v1::WorkerRef {
            worker_id: self.info.worker_id.clone(),
            instance_id: self.info.instance_id.clone(),
            address: self.address.clone(),
            signature: Vec::new(),
        }
    }

    pub(super) fn describe(&self, candidate: &Candidate) -> v1::Candidate {
        let Candidate { overlap_blocks, predicted_blocks, .. } = *candidate;
        v1::Candidate { worker: Some(self.reference()), overlap_blocks, predicted_blocks }
    }

    /// What is known of it now. Measurements count less with their age.
    pub(super) fn candidate(&self, hashes: &[SequenceHash], overlap_blocks: u32, now: Instant, costs: &Costs) -> Candidate {
        let Self { load, booked, info, .. } = self;
        let measured = |value, at: Instant| Measured::new(value, now.duration_since(at), costs);
        let capacity = u64::from(info.capacity_blocks) * u64::from(info.block_size);
        let context = if info.context_length == 0 { u64::MAX } else { u64::from(info.context_length) };
        let filled =
            f64::from(load.cached_blocks) + f64::from(load.in_use_blocks) + booked.tokens() as f64 / f64::from(info.block_size);
        let sequences = u64::from(load.running_sequences) + u64::from(load.waiting_requests) + booked.sequences();
        Candidate {
            role: self.role,
            excluded: false,
            tokens_max: capacity.min(context),
            overlap_blocks,
            predicted_blocks: booked.predicted_blocks(hashes, overlap_blocks),
            cache_filled: (filled / f64::from(info.capacity_blocks)).min(1.0),
            queued_tokens: load.pending_prefill_tokens.saturating_add(booked.tokens()),
            sequences: u32::try_from(sequences).unwrap_or(u32::MAX),
            running: load.running_sequences,
            available_blocks: load.free_blocks.saturating_add(load.cached_blocks),
            in_use_blocks: load.in_use_blocks,
            block_bytes: info.block_bytes,
            prefill_tokens_per_second: measured(load.prefill_tokens_per_second, self.prefilled_at),
            prefill_fixed_ms: measured(load.prefill_fixed_ms, self.prefilled_at),
            decode_step_ms: measured(load.decode_step_ms, self.decoded_at),
            transfer_bytes_per_second: measured(self.beside.transfer_bytes_per_second, now),
        }
    }
}
