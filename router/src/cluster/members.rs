//! The members: the workers on which requests are placed, each with its known cache content and its bookings.
//!
//! Invariants: every member has a slot of its own in the index; the index has entries of members only; all members that serve one model
//! agree on its revision and block size, and if it is a LoRA, on its base model. A member's [`WorkerBookings`] are exactly the bookings, of
//! this router and of its peers, that name the member's instance. A booking on an instance that is not a member counts nowhere. When such
//! an instance joins, its first report is assumed to include the booked load.

mod candidate;
mod models;
mod prefix;

use super::{
    booking::{BookingEntry, LoadByRole},
    findings::Findings,
    loads::LoadTimes,
    request::PlacementError,
    texts,
};
use crate::{
    applied::{Applied, IndexedWorker},
    breaker::Breaker,
    demand::DemandSums,
    index::{PrefixIndex, Replacement, WorkerSlot},
    metrics::{PrefixSeries, WorkerSeries},
    predictions::{Predictions, UnreportedPrompts},
    prefill_queue::{Departure, PrefillQueue},
    rates::{MeasuredLogs, Measurement},
    route::{NoEligibleWorker, WorkerRole, paired_families},
    settings::PrefillPlace,
    subscription::{EventRoute, ReportedStats, cached_blocks_max},
    worker_bookings::{BookedLoad, WorkerBookings},
};
use models::{check_models, models_of};
use prefix::RemovedBy;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};
use tandem_kv::{InstanceId, Load, SequenceHash};
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
    #[error("{model} is {one} on this worker and {other} on another; give each LoRA a name that no other base model or LoRA has")]
    Ambiguous { model: String, one: String, other: String },
    #[error("this worker instance has already joined under another address; list each worker once")]
    Duplicate,
    #[error("the worker at {address} has the same id {worker_id}; give each worker its own --worker-id")]
    SameWorkerId { worker_id: String, address: String },
}

/// The id of a worker's membership. An instance that leaves and joins again gets a new id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct MemberId(u64);

pub(super) struct Member {
    pub(super) info: WorkerInfo,
    /// A copy of `info.instance_id` that is cheap to clone.
    pub(super) instance_id: InstanceId,
    /// The models that the worker serves: `info.model`, then `info.loras`.
    models: Box<[Arc<str>]>,
    pub(super) role: WorkerRole,
    /// The worker's transfer family, as in [`Candidate`](crate::route::Candidate).
    family: Option<Arc<str>>,
    pub(super) address: String,
    pub(super) slot: WorkerSlot,
    pub(super) load: Load,
    pub(super) stats: ReportedStats,
    measured: MeasuredLogs,
    /// The time of the latest report that had a new measurement of the prefill rate.
    prefilled_at: Instant,
    /// The time of the latest report that showed decoding since the previous report.
    decoded_at: Instant,
    pub(super) bookings: WorkerBookings,
    /// The prompts that this decode worker prefills itself.
    local: DemandSums<30>,
    /// The cached tokens of prompts that the worker has computed lately.
    pub(super) reused: DemandSums<REUSED_HALF_LIFE_S>,
    /// The part of the worker's time that the prompts in `local` took, as of its latest report.
    local_share: f64,
    /// The requests that the worker prefills and that wait for their first tokens.
    pub(super) queue: PrefillQueue,
    pub(super) breaker: Breaker,
    pub(super) series: WorkerSeries,
    /// The series of the worker's prompts by model, from each model's first prompt on.
    pub(super) prefix_series: HashMap<Arc<str>, PrefixSeries>,
    pub(super) findings: Findings,
    pub(super) loads: LoadTimes,
    /// The numbers of the worker's placements since it joined. They are equal to the counters in `series`.
    pub(super) placements: v1::PlacementTotals,
}

/// The age in seconds at which a reused token has half the weight of a new one.
const REUSED_HALF_LIFE_S: u64 = 240;

/// How much of a prompt a member has cached or is about to compute.
#[derive(Clone, Copy, Default)]
pub(super) struct MemberPrefix {
    /// The number of the prompt's leading blocks that the member has reported as cached, whether it can reuse them or not.
    pub(super) held_blocks: u32,
    /// The number of leading blocks that the member can reuse according to its reports, or must have cached although it reports late.
    pub(super) reported_blocks: u32,
    /// The number of leading blocks that the member has reported, or is about to compute.
    pub(super) known_blocks: u32,
    /// The number of leading blocks that the member's engine is expected to find in its cache.
    pub(super) overlap_blocks: u32,
    /// The number of leading blocks that this prompt shares with a prompt that the member is about to compute. Cached blocks that no such
    /// prompt has do not count.
    pub(super) computed_blocks: u32,
}

/// All members, in the order in which they joined.
pub(crate) struct ClusterMembers {
    by_id: BTreeMap<MemberId, Member>,
    by_instance: HashMap<InstanceId, MemberId>,
    pub(super) index: Arc<PrefixIndex>,
    pub(super) predictions: Predictions,
    unreported: UnreportedPrompts,
    /// The prompts that any worker has computed in the last moments, whose blocks it may not have reported yet.
    just_computed: UnreportedPrompts,
    removed: RemovedBy,
    next_id: u64,
    /// The present time of a simulation; `None`: the system's clock is used.
    pub(super) virtual_time: Option<Instant>,
}

impl ClusterMembers {
    /// Returns an empty set of members. `hash_key` is only used to seed hash tables.
    pub(super) fn new(hash_key: u64) -> Self {
        Self {
            by_id: BTreeMap::new(),
            by_instance: HashMap::new(),
            index: Arc::new(PrefixIndex::new(hash_key)),
            predictions: Predictions::new(hash_key),
            unreported: UnreportedPrompts::of_late_workers(hash_key),
            just_computed: UnreportedPrompts::of_all_workers(hash_key),
            removed: RemovedBy::default(),
            next_id: 0,
            virtual_time: None,
        }
    }

    pub(super) fn now(&self) -> Instant {
        self.virtual_time.unwrap_or_else(Instant::now)
    }

    /// Returns the role of the worker that `info` describes, if the worker may join now. `cluster` returns the identity on which all
    /// processes of a model must agree.
    pub(super) fn check_joinable(&self, info: &WorkerInfo, cluster: impl Fn(&str) -> Identity) -> Result<WorkerRole, JoinError> {
        let role = match info.role() {
            worker_info::Role::Prefill => WorkerRole::Prefill,
            worker_info::Role::Decode => WorkerRole::Decode,
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
        Identity::from(info).fits(&cluster(&info.model))?;
        for Member { info: other, address, .. } in self.values() {
            if other.instance_id == info.instance_id {
                return Err(JoinError::Duplicate);
            }
            if other.worker_id == info.worker_id {
                return Err(JoinError::SameWorkerId { worker_id: info.worker_id.clone(), address: address.clone() });
            }
            check_models(info, other)?;
        }
        Ok(role)
    }

    /// Adds a member with an empty cache and no load. The `bookings` that name the instance are added to the member, but without load.
    pub(super) fn join<'a>(
        &mut self,
        info: WorkerInfo,
        role: WorkerRole,
        address: String,
        series: WorkerSeries,
        bookings: impl Iterator<Item = &'a BookingEntry>,
    ) -> MemberId {
        let (id, now) = (MemberId(self.next_id), self.now());
        self.next_id += 1;
        let instance_id = InstanceId::from(info.instance_id.as_str());
        let owner = self.removed.number(&info.worker_id);
        let (slot, mut own_bookings, mut queue) = (self.index.add_worker(), WorkerBookings::default(), PrefillQueue::new(now));
        self.index.set_owner(slot, owner);
        for booking in bookings {
            if booking.prefilling && *booking.prefills_on() == instance_id {
                queue.join(&booking.waiting, now);
            }
            for (_, prefilling) in booking.places().filter(|(on, _)| **on == instance_id) {
                own_bookings.add(booking.key.clone(), BookedLoad::default(), booking.answer_on(&instance_id));
                if prefilling {
                    self.predictions.add(slot, &booking.hashes);
                }
            }
        }
        self.by_instance.insert(instance_id.clone(), id);
        let member = Member {
            family: info.family().map(|family| self.shared(family)),
            models: models_of(&info).map(|model| self.shared(model)).collect(),
            info,
            instance_id,
            role,
            address,
            slot,
            load: Load::default(),
            stats: ReportedStats::default(),
            measured: MeasuredLogs::default(),
            prefilled_at: now,
            decoded_at: now,
            bookings: own_bookings,
            local: DemandSums::default(),
            reused: DemandSums::default(),
            local_share: 0.0,
            queue,
            breaker: Breaker::default(),
            series,
            prefix_series: HashMap::new(),
            findings: Findings::default(),
            loads: LoadTimes::default(),
            placements: v1::PlacementTotals::default(),
        };
        self.by_id.insert(id, member);
        id
    }

    /// Returns the name of a model or of a transfer family. Members with equal names share one copy, so that placements, which read the
    /// names of all members, find it in the processor's cache.
    fn shared(&self, name: &str) -> Arc<str> {
        let known = self.values().flat_map(|member| member.models.iter().chain(&member.family)).find(|known| ***known == *name);
        known.cloned().unwrap_or_else(|| Arc::from(name))
    }

    /// Removes the member with its index entries and metric series.
    pub(super) fn leave(&mut self, id: MemberId) {
        if let Some(member) = self.by_id.remove(&id) {
            self.by_instance.remove(&member.instance_id);
            self.index.remove_worker(member.slot);
            self.predictions.forget(member.slot);
            self.unreported.forget(member.slot);
            self.just_computed.forget(member.slot);
        }
    }

    /// Replaces the member's blocks in the index by those of a snapshot. A snapshot follows lost messages, and one of these may have
    /// reported a booked request. Therefore all bookings are now treated as included in the reported load. So no request is counted twice,
    /// but a request that has not reached the worker yet is missing in the load until the next report.
    pub(crate) fn replace(&mut self, id: MemberId, content: Replacement<'_>) {
        let Some(member) = self.by_id.get_mut(&id) else { return };
        member.bookings.on_all_included();
        let skipped = content.complete(member.slot);
        member.series.count_skipped(skipped);
        member.on_indexed(self.index.blocks(member.slot));
    }

    /// Returns where the member's blocks are in the index; `None` if it is not a member any more.
    pub(super) fn indexed(&self, id: MemberId) -> Option<IndexedWorker> {
        let Member { slot, info, .. } = self.by_id.get(&id)?;
        self.index.set_time(self.seconds(self.now()));
        Some(IndexedWorker { index: self.index.clone(), slot: *slot, capacity_blocks: cached_blocks_max(info) })
    }

    /// Counts the events that were applied to the member's blocks in the index.
    pub(super) fn on_applied(&mut self, id: MemberId, applied: &Applied) {
        let Some(member) = self.by_id.get_mut(&id) else { return };
        member.series.count_applied(applied);
        member.on_indexed(applied.blocks);
    }

    /// Records the member's load. The caller must have applied all events that came with the load. `included` has the ids of the requests
    /// that this load includes for the first time.
    pub(super) fn report(&mut self, id: MemberId, load: Load, stats: ReportedStats, included: &[String]) {
        let now = self.now();
        let Some(member) = self.by_id.get_mut(&id) else { return };
        if load.prefill_measurements != member.load.prefill_measurements {
            member.prefilled_at = now;
            member.queue.on_prefilling(now);
        }
        if load.decode_step_ms != member.load.decode_step_ms || stats.generated() != member.stats.generated() {
            member.decoded_at = now;
        }
        member.measured = MeasuredLogs {
            prefill_tokens_per_second: Measurement::log(load.prefill_tokens_per_second),
            prefill_fixed_ms: Measurement::log(load.prefill_fixed_ms),
            decode_step_ms: Measurement::log(load.decode_step_ms),
            transfer_bytes_per_second: Measurement::log(stats.transfer_bytes_per_second),
        };
        let rate = load.prefill_tokens_per_second;
        member.local_share = if rate > 0.0 { member.local.per_second(now).tokens / rate } else { 0.0 };
        (member.load, member.stats) = (load, stats);
        for request_id in included {
            member.bookings.on_included(request_id);
        }
    }

    /// Sets the metrics that show whether the member's events come over NATS or on its own stream.
    pub(crate) fn set_event_source(&mut self, id: MemberId, source: EventRoute) {
        if let Some(member) = self.by_id.get_mut(&id) {
            let over_nats = source == EventRoute::Nats;
            member.series.over_nats.set(f64::from(u8::from(over_nats)));
            member.series.direct.set(f64::from(u8::from(!over_nats)));
        }
    }

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

    /// Whether the member's index is approximate: its engine publishes no KV events, or has layers whose rule for reuse is unknown.
    pub(super) fn has_approximate_index(&self, member: &Member) -> bool {
        member.info.approximate_index || self.index.has_first(member.slot, SequenceHash::UNFOLLOWED_LAYERS)
    }

    /// Returns the members that serve the model, in the order in which they joined.
    pub(super) fn of_model<'a>(&'a self, model: &str) -> impl Iterator<Item = &'a Member> {
        // Equal names are usually one shared copy, so the addresses are compared before the texts.
        let is_it = move |served: &Arc<str>| std::ptr::eq(&**served, model) || **served == *model;
        self.values().filter(move |member| member.models.iter().any(is_it))
    }

    /// Returns the models that members serve, in the order of their ids.
    pub(super) fn models(&self) -> BTreeSet<&Arc<str>> {
        self.values().flat_map(|member| &member.models).collect()
    }

    /// Returns the model that a request names, or the only model if the request names none.
    ///
    /// # Errors
    /// No member serves the model, or the request names none of several models.
    pub(super) fn requested_model(&self, requested: &str) -> Result<Arc<str>, PlacementError> {
        let mut served = self.values().flat_map(|member| &member.models);
        let first = served.next().ok_or(NoEligibleWorker::NoDecodeWorker)?;
        match requested {
            "" if served.all(|model| model == first) => Ok(first.clone()),
            "" => Err(PlacementError::NoModelNamed),
            model if **first == *model => Ok(first.clone()),
            model => served.find(|served| ***served == *model).cloned().ok_or(PlacementError::NoWorkerOfModel),
        }
    }

    /// Returns why no request for the model can be placed at present; `None` if requests can be placed.
    pub(super) fn unavailable_reason(&self, model: &str, prefill: PrefillPlace) -> Option<NoEligibleWorker> {
        let has = |role| self.of_model(model).any(|member| member.role == role);
        let need_partners = || self.of_model(model).all(|of| of.role == WorkerRole::Prefill || of.info.needs_prefill_worker);
        let has_pair = || !paired_families(self.of_model(model).map(|member| (member.role, member.info.family()))).is_empty();
        match prefill {
            _ if !has(WorkerRole::Decode) => Some(NoEligibleWorker::NoDecodeWorker),
            PrefillPlace::Remote if !has(WorkerRole::Prefill) => Some(NoEligibleWorker::NoPrefillWorker),
            PrefillPlace::Remote if !has_pair() => Some(NoEligibleWorker::NoCommonFamily),
            PrefillPlace::Auto | PrefillPlace::Local if need_partners() && !has_pair() => Some(NoEligibleWorker::NoPartner),
            PrefillPlace::Auto | PrefillPlace::Remote | PrefillPlace::Local => None,
        }
    }

    /// Returns the reason if the member is unpaired: it is a prefill worker, and no decode worker has its transfer family. An unpaired
    /// member receives no placements.
    pub(super) fn unpaired_reason(&self, member: &Member) -> Option<String> {
        let decode_workers = || self.of_model(&member.info.model).filter(|other| other.role == WorkerRole::Decode);
        let is_paired = || member.family.is_some() && decode_workers().any(|other| other.family == member.family);
        if member.role == WorkerRole::Decode || is_paired() {
            return None;
        }
        Some(texts::unpaired(member.family.as_deref(), decode_workers().map(|other| other.family.as_deref())))
    }

    /// Adds the booking, with its load, to its decode worker and its prefill worker, as far as they are members.
    pub(super) fn book(&mut self, booking: &BookingEntry, load: LoadByRole) {
        for (instance_id, prefilling) in booking.places() {
            let load = if *instance_id == booking.decode { load.decode } else { load.prefill };
            let Some(member) = self.of_mut(instance_id) else { continue };
            member.bookings.add(booking.key.clone(), load, booking.answer_on(instance_id));
            let slot = member.slot;
            if prefilling {
                self.predictions.add(slot, &booking.hashes);
            }
        }
        let now = self.now();
        if let Some(member) = self.of_mut(booking.prefills_on()).filter(|_| booking.prefilling) {
            member.queue.join(&booking.waiting, now);
            if booking.prefill.is_none() {
                member.local.add(load.decode.tokens, now);
            }
        }
    }

    /// Ends the booking's prefill: it is no longer part of the load, and the request leaves the worker's queue. Returns false if the
    /// prefill had already ended.
    pub(super) fn on_prefilled(&mut self, booking: &mut BookingEntry, left: Departure) -> bool {
        let (was_prefilling, now, index) = (std::mem::take(&mut booking.prefilling), self.now(), self.index.clone());
        if let Some(member) = self.of_mut(booking.prefills_on()).filter(|_| was_prefilling) {
            member.queue.leave(&booking.waiting, left, now);
            member.bookings.on_prefilled(&booking.key);
            if booking.prefill.is_some() {
                member.bookings.remove(&booking.key);
            }
            let (slot, is_late) = (member.slot, member.findings.is_late());
            if left == Departure::Served {
                let tokens = booking.hashes.len() as u64 * u64::from(member.info.block_size);
                member.findings.computed(tokens, index.blocks(slot));
                member.export_findings();
            }
            self.predictions.remove(slot, &booking.hashes);
            if left == Departure::Served {
                self.just_computed.add(slot, &booking.hashes, now);
                if is_late {
                    self.unreported.add(slot, &booking.hashes, now);
                }
            }
        }
        self.unreported.expire(now);
        self.just_computed.expire(now);
        if left == Departure::Served && was_prefilling {
            booking.answer.since = Some(now);
            if let Some(member) = self.of_mut(&booking.decode) {
                member.bookings.on_answering(&booking.key, now);
            }
        }
        was_prefilling
    }

    /// Removes the booking from its workers.
    pub(super) fn release(&mut self, mut booking: BookingEntry) {
        self.on_prefilled(&mut booking, Departure::Abandoned);
        if let Some(member) = self.of_mut(&booking.decode) {
            member.bookings.remove(&booking.key);
        }
    }

    /// Returns the load of the booking that its workers have not reported yet.
    pub(super) fn unreported(&self, booking: &BookingEntry) -> LoadByRole {
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
}
