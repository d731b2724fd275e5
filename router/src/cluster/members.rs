//! The members: the workers on which requests are placed, each with its known cache content and its bookings.
//!
//! Invariants: every member has a slot of its own in the index; the index has entries of members only; all members that serve one model
//! agree on its revision and block size. A member's [`WorkerBookings`] are exactly the bookings, of this router and of its peers, that name
//! the member's instance. A booking on an instance that is not a member counts nowhere. When such an instance joins, its first report is
//! assumed to include the booked load.

use super::{
    booking::{Booking, LoadByRole},
    request::PlacementError,
    texts,
};
use crate::{
    breaker::Breaker,
    index::{PrefixIndex, WorkerSlot},
    metrics::WorkerSeries,
    rates::Measurement,
    route::{Candidate, NoEligibleWorker, Role, paired_families},
    settings::{Costs, PrefillPlace},
    subscription::{EventSource, ReportedStats, SubscriptionError, cached_blocks_max},
    worker_bookings::{BookedLoad, WorkerBookings},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};
use tandem_kv::{Change, InstanceId, KvEvent, Load, SequenceHash, Snapshot};
use tandem_proto::{
    Difference,
    v1::{self, Identity, WorkerInfo, worker_info},
};
use tokio::time::Instant;

/// Why a worker must not join.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum JoinError {
    #[error("the worker's description lacks {field}; start the worker with the router's version")]
    Incomplete { field: &'static str },
    #[error(transparent)]
    Differs(#[from] Difference),
    #[error("the worker rejects this router's cluster key; give all processes the same --cluster-key-file")]
    OtherKey,
    #[error("this worker instance has already joined under another address; list each worker once")]
    Duplicate,
    #[error("the worker at {address} has the same id {worker_id}; give each worker its own --worker-id")]
    SameWorkerId { worker_id: String, address: String },
}

/// The id of one membership. An instance that leaves and joins again gets a new id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct MemberId(u64);

pub(super) struct Member {
    pub(super) info: WorkerInfo,
    /// Equal to `info.instance_id`.
    pub(super) instance_id: InstanceId,
    /// Equal to `info.model`.
    pub(super) model: Arc<str>,
    pub(super) role: Role,
    /// The worker's transfer family, as in [`Candidate`].
    family: Option<Arc<str>>,
    pub(super) address: String,
    pub(super) slot: WorkerSlot,
    pub(super) load: Load,
    pub(super) stats: ReportedStats,
    /// The time of the latest report that had a new measurement of the prefill rate.
    prefilled_at: Instant,
    /// The time of the latest report that showed decoding since the previous report.
    decoded_at: Instant,
    pub(super) bookings: WorkerBookings,
    pub(super) breaker: Breaker,
    pub(super) series: WorkerSeries,
    /// The numbers of the worker's placements since it joined. They are equal to the counters in `series`.
    pub(super) placements: v1::PlacementTotals,
}

/// All members, in the order in which they joined.
pub(crate) struct Members {
    by_id: BTreeMap<MemberId, Member>,
    by_instance: HashMap<InstanceId, MemberId>,
    index: PrefixIndex,
    free_slots: Vec<WorkerSlot>,
    next_id: u64,
    hash_key: u64,
}

impl Members {
    /// Returns an empty set of members. `hash_key` is only used to seed hash tables.
    pub(super) fn new(hash_key: u64) -> Self {
        Self {
            by_id: BTreeMap::new(),
            by_instance: HashMap::new(),
            index: PrefixIndex::new(hash_key),
            free_slots: Vec::new(),
            next_id: 0,
            hash_key,
        }
    }

    /// Returns the role of the worker that `info` describes, if the worker may join now. `cluster` is the identity on which all processes of
    /// its model must agree.
    pub(super) fn check_joinable(&self, info: &WorkerInfo, cluster: &Identity) -> Result<Role, JoinError> {
        let role = match info.role() {
            worker_info::Role::Prefill => Role::Prefill,
            worker_info::Role::Decode => Role::Decode,
            worker_info::Role::Unspecified => return Err(JoinError::Incomplete { field: "a role" }),
        };
        for (field, missing) in [
            ("a worker_id", info.worker_id.is_empty()),
            ("an instance_id", info.instance_id.is_empty()),
            ("a model", info.model.is_empty()),
            ("a block_size", info.block_size == 0),
            ("a capacity", info.capacity_blocks == 0),
        ] {
            if missing {
                return Err(JoinError::Incomplete { field });
            }
        }
        Identity::from(info).fits(cluster)?;
        for Member { info: other, address, .. } in self.values() {
            if other.instance_id == info.instance_id {
                return Err(JoinError::Duplicate);
            }
            if other.worker_id == info.worker_id {
                return Err(JoinError::SameWorkerId { worker_id: info.worker_id.clone(), address: address.clone() });
            }
        }
        Ok(role)
    }

    /// Adds a member with an empty cache and no load. Those of `bookings` that name the instance are counted on the member, but add no load
    /// to it.
    pub(super) fn join<'a>(
        &mut self,
        info: WorkerInfo,
        role: Role,
        address: String,
        series: WorkerSeries,
        bookings: impl Iterator<Item = &'a Booking>,
    ) -> MemberId {
        let (id, now) = (MemberId(self.next_id), Instant::now());
        self.next_id += 1;
        let instance_id = InstanceId::from(info.instance_id.as_str());
        let mut own_bookings = WorkerBookings::new(self.hash_key);
        for booking in bookings {
            for (_, prefilling) in booking.places().filter(|(on, _)| **on == instance_id) {
                own_bookings.add(booking.key.clone(), BookedLoad::default(), prefilling);
            }
        }
        self.by_instance.insert(instance_id.clone(), id);
        let member = Member {
            family: info.family().map(Arc::from),
            model: info.model.as_str().into(),
            info,
            instance_id,
            role,
            address,
            slot: self.free_slots.pop().unwrap_or(WorkerSlot(self.by_id.len() as u32)),
            load: Load::default(),
            stats: ReportedStats::default(),
            prefilled_at: now,
            decoded_at: now,
            bookings: own_bookings,
            breaker: Breaker::default(),
            series,
            placements: v1::PlacementTotals::default(),
        };
        self.by_id.insert(id, member);
        id
    }

    /// Removes the member with its index entries and metric series.
    pub(super) fn leave(&mut self, id: MemberId) {
        if let Some(member) = self.by_id.remove(&id) {
            self.by_instance.remove(&member.instance_id);
            self.index.forget(member.slot);
            self.free_slots.push(member.slot);
        }
    }

    /// Replaces the member's blocks in the index by those of the snapshot. A snapshot follows lost messages, and one of these may have
    /// reported a booked request. Therefore all bookings now count as included in the reported load. So no request is counted twice, but a
    /// request that has not reached the worker yet is missing in the load until the next report.
    pub(crate) fn replace(&mut self, id: MemberId, snapshot: &Snapshot) {
        let Some(member) = self.by_id.get_mut(&id) else { return };
        member.bookings.on_all_included();
        let skipped = self.index.replace(member.slot, snapshot);
        member.series.orphaned.increment(skipped.orphaned_blocks);
        member.series.index_blocks.set(self.index.blocks(member.slot) as f64);
    }

    /// Applies the changes of the member's cache, in the order of `events`.
    ///
    /// # Errors
    /// [`SubscriptionError::BeyondCapacity`] if an event names more blocks than the worker can hold. Later events are then not applied, and
    /// the member's index entries are not reliable any more.
    pub(super) fn apply_events(&mut self, id: MemberId, events: &[KvEvent]) -> Result<(), SubscriptionError> {
        let Some(member) = self.by_id.get_mut(&id) else { return Ok(()) };
        let capacity_blocks = cached_blocks_max(&member.info);
        let applied = events.iter().try_for_each(|event| {
            let blocks = match &event.change {
                Change::Stored(chain) => self.index.blocks(member.slot) + chain.sequence_hashes.len() as u64,
                Change::Removed(hashes) => hashes.len() as u64,
                Change::Cleared => 0,
            };
            if blocks > u64::from(capacity_blocks) {
                member.series.beyond_capacity.increment(1);
                return Err(SubscriptionError::BeyondCapacity { capacity_blocks });
            }
            let skipped = self.index.apply(member.slot, &event.change);
            member.series.count_event(&event.change);
            member.series.absent.increment(skipped.absent_blocks);
            member.series.orphaned.increment(skipped.orphaned_blocks);
            Ok(())
        });
        member.series.index_blocks.set(self.index.blocks(member.slot) as f64);
        applied
    }

    /// Records the member's load. The caller must have applied all events that came with the load. `included` has the ids of the requests
    /// that this load includes for the first time.
    pub(super) fn report(&mut self, id: MemberId, load: Load, stats: ReportedStats, included: &[String]) {
        let Some(member) = self.by_id.get_mut(&id) else { return };
        let now = Instant::now();
        if load.prefill_measurements != member.load.prefill_measurements {
            member.prefilled_at = now;
        }
        if load.decode_step_ms != member.load.decode_step_ms || stats.generated() != member.stats.generated() {
            member.decoded_at = now;
        }
        (member.load, member.stats) = (load, stats);
        for request_id in included {
            member.bookings.on_included(request_id);
        }
    }

    /// Sets the metrics that show whether the member's events come over NATS or on its own stream.
    pub(crate) fn set_event_source(&mut self, id: MemberId, source: EventSource) {
        if let Some(member) = self.by_id.get_mut(&id) {
            let over_nats = source == EventSource::Nats;
            member.series.over_nats.set(f64::from(u8::from(over_nats)));
            member.series.direct.set(f64::from(u8::from(!over_nats)));
        }
    }

    /// Whether a worker at this address is a member.
    pub(crate) fn is_member(&self, address: &str) -> bool {
        self.values().any(|member| member.address == address)
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

    /// Returns all members, in the order in which they joined.
    pub(super) fn values(&self) -> impl Iterator<Item = &Member> {
        self.by_id.values()
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (&MemberId, &Member)> {
        self.by_id.iter()
    }

    /// Returns how many blocks of the member are in the index.
    pub(super) fn indexed_blocks(&self, member: &Member) -> u64 {
        self.index.blocks(member.slot)
    }

    /// Returns the members that serve the model, in the order in which they joined.
    pub(super) fn of_model<'a>(&'a self, model: &'a str) -> impl Iterator<Item = &'a Member> {
        self.values().filter(move |member| *member.model == *model)
    }

    /// Returns the models that members serve, in the order of their ids.
    pub(super) fn models(&self) -> BTreeSet<&Arc<str>> {
        self.values().map(|member| &member.model).collect()
    }

    /// Returns the model that a request names, or the only model if the request names none.
    ///
    /// # Errors
    /// No member serves the model, or the request names none of several models.
    pub(super) fn requested_model(&self, requested: &str) -> Result<Arc<str>, PlacementError> {
        let Some(first) = self.values().next() else { return Err(NoEligibleWorker::NoDecodeWorker.into()) };
        match requested {
            "" if self.values().all(|member| member.model == first.model) => Ok(first.model.clone()),
            "" => Err(PlacementError::NoModelNamed),
            model => self.of_model(model).next().map(|member| member.model.clone()).ok_or(PlacementError::NoWorkerOfModel),
        }
    }

    /// Returns why no request for the model can be placed at present; `None` if requests can be placed.
    pub(super) fn unavailable_reason(&self, model: &str, prefill: PrefillPlace) -> Option<NoEligibleWorker> {
        let has = |role| self.of_model(model).any(|member| member.role == role);
        let has_pair = || !paired_families(self.of_model(model).map(|member| (member.role, member.info.family()))).is_empty();
        match prefill {
            _ if !has(Role::Decode) => Some(NoEligibleWorker::NoDecodeWorker),
            PrefillPlace::Remote if !has(Role::Prefill) => Some(NoEligibleWorker::NoPrefillWorker),
            PrefillPlace::Remote if !has_pair() => Some(NoEligibleWorker::NoCommonFamily),
            PrefillPlace::Auto | PrefillPlace::Remote | PrefillPlace::Local => None,
        }
    }

    /// Returns the reason if the member is unpaired: it is a prefill worker, and no decode worker has its transfer family. An unpaired
    /// member receives no placements.
    pub(super) fn unpaired_reason(&self, member: &Member) -> Option<String> {
        let decode_workers = || self.of_model(&member.model).filter(|other| other.role == Role::Decode);
        let is_paired = || member.family.is_some() && decode_workers().any(|other| other.family == member.family);
        if member.role == Role::Decode || is_paired() {
            return None;
        }
        Some(texts::unpaired(member.family.as_deref(), decode_workers().map(|other| other.family.as_deref())))
    }

    /// Returns each of these members as a candidate for a placement, in their order. A member is marked as excluded if it is in `excluded`, or
    /// if its circuit breaker is open at the time `breakers_at`. If `breakers_at` is `None`, circuit breakers are ignored.
    pub(super) fn candidates(
        &self,
        members: &[&Member],
        hashes: &[SequenceHash],
        excluded: &BTreeSet<InstanceId>,
        breakers_at: Option<Instant>,
        costs: &Costs,
    ) -> Vec<Candidate> {
        let (overlaps, now) = (self.index.overlap(hashes), Instant::now());
        let candidate = |member: &&Member| {
            let overlap_blocks = overlaps.get(member.slot.0 as usize).copied().unwrap_or(0);
            let mut candidate = member.candidate(hashes, overlap_blocks, now, costs);
            candidate.excluded =
                excluded.contains(&member.instance_id) || breakers_at.is_some_and(|at| !member.breaker.admits(at));
            candidate
        };
        members.iter().map(candidate).collect()
    }

    /// Adds the booking to those of its workers that are members.
    pub(super) fn book(&mut self, booking: &Booking, load: LoadByRole) {
        for (instance_id, prefilling) in booking.places() {
            let load = if *instance_id == booking.decode { load.decode } else { load.prefill };
            if let Some(member) = self.of_mut(instance_id) {
                member.bookings.add(booking.key.clone(), load, prefilling);
            }
        }
    }

    /// Records that the booking's prompt has been prefilled, so that its prefill no longer counts as load. Returns false if this was
    /// already recorded.
    pub(super) fn on_prefilled(&mut self, booking: &mut Booking) -> bool {
        let was_prefilling = std::mem::take(&mut booking.prefilling);
        if let Some(member) = self.of_mut(booking.prefills_on()).filter(|_| was_prefilling) {
            member.bookings.on_prefilled(&booking.key, &booking.hashes);
            if booking.prefill.is_some() {
                member.bookings.remove(&booking.key);
            }
        }
        was_prefilling
    }

    /// Removes the booking from its workers.
    pub(super) fn release(&mut self, mut booking: Booking) {
        self.on_prefilled(&mut booking);
        if let Some(member) = self.of_mut(&booking.decode) {
            member.bookings.remove(&booking.key);
        }
    }

    /// Returns the load of the booking that its workers have not reported yet.
    pub(super) fn unreported(&self, booking: &Booking) -> LoadByRole {
        let on =
            |instance_id: &str| self.of(instance_id).map(|member| member.bookings.unreported(&booking.key)).unwrap_or_default();
        LoadByRole { decode: on(&booking.decode), prefill: booking.prefill.as_deref().map(on).unwrap_or_default() }
    }
}

impl Member {
    /// Returns a reference to the member without a signature. It is signed when a placement is sent.
    pub(super) fn reference(&self) -> v1::WorkerRef {
        v1::WorkerRef {
            worker_id: self.info.worker_id.clone(),
            instance_id: self.info.instance_id.clone(),
            address: self.address.clone(),
            signature: Vec::new(),
        }
    }

    /// Returns the member as a candidate for a placement. The older its measurements are, the less weight they have.
    pub(super) fn candidate(&self, hashes: &[SequenceHash], overlap_blocks: u32, now: Instant, costs: &Costs) -> Candidate {
        let Self { load, bookings, info, .. } = self;
        let measured = |value, at: Instant| Measurement::new(value, now.duration_since(at), costs);
        let capacity = u64::from(info.capacity_blocks) * u64::from(info.block_size);
        let context = if info.context_length == 0 { u64::MAX } else { u64::from(info.context_length) };
        let filled =
            f64::from(load.cached_blocks) + f64::from(load.in_use_blocks) + bookings.tokens as f64 / f64::from(info.block_size);
        let sequences = u64::from(load.running_sequences) + u64::from(load.waiting_requests) + bookings.sequences;
        Candidate {
            role: self.role,
            family: self.family.clone(),
            excluded: false,
            tokens_max: capacity.min(context),
            overlap_blocks,
            predicted_blocks: bookings.predicted_blocks(hashes, overlap_blocks),
            cache_filled: (filled / f64::from(info.capacity_blocks)).min(1.0),
            queued_tokens: load.pending_prefill_tokens.saturating_add(bookings.tokens),
            sequences: u32::try_from(sequences).unwrap_or(u32::MAX),
            running: load.running_sequences,
            available_blocks: load.free_blocks.saturating_add(load.cached_blocks),
            in_use_blocks: load.in_use_blocks,
            block_bytes: info.block_bytes,
            prefill_tokens_per_second: measured(load.prefill_tokens_per_second, self.prefilled_at),
            prefill_fixed_ms: measured(load.prefill_fixed_ms, self.prefilled_at),
            decode_step_ms: measured(load.decode_step_ms, self.decoded_at),
            transfer_bytes_per_second: measured(self.stats.transfer_bytes_per_second, now),
        }
    }
}
