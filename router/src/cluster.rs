//! What the router knows: who is in the cluster, what they hold, how busy they are, and what was placed on them.
//!
//! Plain data behind one mutex ([`Cluster`]); nothing here waits. Invariants: every member has a slot of its own in the index;
//! a member that leaves takes its entries along, and bookings on it count nowhere from then on; all members agree on model,
//! revision and block size.

use crate::{
    booked::{Booked, BookingId, BookingKey, Share},
    breaker::{Breaker, is_fault},
    index::{PrefixIndex, WorkerSlot},
    metrics::{RouterMetrics, WorkerSeries},
    route::{self, Candidate, Policy, Question, Role, Turn, Unplaced},
    settings::{PrefillPlace, RouterSettings},
};
use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tandem_kv::{KvBatch, Load, SequenceHash, Snapshot};
use tandem_node::Metrics;
use tandem_proto::{
    Difference,
    v1::{self, Identity, WorkerInfo, worker_info},
};
use tokio::time::Instant;

/// One instance's time in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct MemberId(u64);

/// Why a worker is not routed to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("its description lacks {field}")]
    Incomplete { field: &'static str },
    #[error(transparent)]
    Differs(#[from] Difference),
    #[error("the same instance has joined under another address; list each worker once")]
    Twice,
    #[error("the worker at {address} is called {worker_id}, too; give each a --worker-id of its own")]
    SameName { worker_id: String, address: String },
}

/// Why a request is not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotPlaced {
    #[error(transparent)]
    Unplaced(#[from] Unplaced),
    #[error("the workers serve another model than the one asked for")]
    OtherModel,
    #[error("the router has placed as many requests as it may; try again later")]
    TooManyBookings,
    #[error("the request has failed as often as it may; try again later")]
    TooManyAttempts,
}

/// A request as it asks to be placed.
pub(crate) struct Asked {
    pub(crate) request_id: Arc<str>,
    /// Empty: not checked.
    pub(crate) model: String,
    pub(crate) hashes: Arc<[SequenceHash]>,
    pub(crate) prompt_tokens: u32,
    pub(crate) samples: u32,
    pub(crate) prompt_logits: bool,
}

/// Instances that have failed a request.
#[derive(Debug, Default)]
pub(crate) struct Excluded {
    /// All of them: they are left out while others can take the request.
    pub(crate) failed: BTreeSet<String>,
    /// Those that may be broken: they are left out in any case. The others were merely full or late.
    pub(crate) lost: BTreeSet<String>,
}

/// The state, shared.
pub(crate) struct Cluster(Mutex<State>);

/// The state.
pub(crate) struct State {
    settings: RouterSettings,
    policy: Box<dyn Policy>,
    metrics: RouterMetrics,
    index: PrefixIndex,
    members: BTreeMap<MemberId, Member>,
    /// Listed workers that are no members, by address.
    absent: BTreeMap<String, v1::AbsentWorker>,
    bookings: HashMap<BookingId, Booking>,
    free_slots: Vec<WorkerSlot>,
    next_member: u64,
    next_booking: u64,
    turns: u64,
}

struct Member {
    info: WorkerInfo,
    role: Role,
    address: String,
    slot: WorkerSlot,
    load: Load,
    transfer_bytes_per_second: f64,
    booked: Booked,
    breaker: Breaker,
    series: WorkerSeries,
}

struct Booking {
    key: BookingKey,
    decode: MemberId,
    prefill: Option<MemberId>,
    /// Not after the prompt's prefill was released.
    computing: bool,
    /// Those that a worker may reuse.
    hashes: Arc<[SequenceHash]>,
    overlap_tokens: u64,
}

impl Cluster {
    pub(crate) fn new(settings: RouterSettings, metrics: Metrics) -> Self {
        Self(Mutex::new(State {
            policy: route::policy(settings.policy),
            metrics: RouterMetrics::new(metrics),
            index: PrefixIndex::new(settings.seed),
            members: BTreeMap::new(),
            absent: BTreeMap::new(),
            bookings: HashMap::new(),
            free_slots: Vec::new(),
            next_member: 0,
            next_booking: 0,
            turns: 0,
            settings,
        }))
    }

    /// For a moment, never across an await. A panic under the lock has been reported; what it left is still sound enough to
    /// route by.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether a worker that describes itself so may join now.
    pub(crate) fn admits(&self, info: &WorkerInfo) -> Result<Role, Refused> {
        let role = match info.role() {
            worker_info::Role::Prefill => Role::Prefill,
            worker_info::Role::Decode => Role::Decode,
            worker_info::Role::Unspecified => return Err(Refused::Incomplete { field: "a role" }),
        };
        for (field, missing) in [
            ("a worker_id", info.worker_id.is_empty()),
            ("an instance_id", info.instance_id.is_empty()),
            ("a model", info.model.is_empty()),
            ("a block_size", info.block_size == 0),
            ("a capacity", info.capacity_blocks == 0),
        ] {
            if missing {
                return Err(Refused::Incomplete { field });
            }
        }
        Identity::from(info).fits(&self.identity())?;
        for Member { info: other, address, .. } in self.members.values() {
            if other.instance_id == info.instance_id {
                return Err(Refused::Twice);
            }
            if other.worker_id == info.worker_id {
                return Err(Refused::SameName { worker_id: info.worker_id.clone(), address: address.clone() });
            }
        }
        Ok(role)
    }

    /// What every process must agree with: what the operator says, then what the members do, who all agree.
    pub(crate) fn identity(&self) -> Identity {
        let decided = self.settings.identity.clone();
        match self.members.values().next() {
            Some(first) => decided.or(&(&first.info).into()),
            None => decided,
        }
    }

    /// Why no request can be placed, if that is so.
    fn unready(&self) -> Option<Unplaced> {
        let has = |role| self.members.values().any(|member| member.role == role);
        match self.settings.prefill {
            _ if !has(Role::Decode) => Some(Unplaced::NoDecode),
            PrefillPlace::Remote if !has(Role::Prefill) => Some(Unplaced::NoPrefill),
            PrefillPlace::Auto | PrefillPlace::Remote | PrefillPlace::Local => None,
        }
    }

    /// A listed worker is not there, or must not join as it is.
    pub(crate) fn absent(&mut self, address: &str, reason: String, refused: bool) {
        self.absent.insert(address.to_owned(), v1::AbsentWorker { address: address.to_owned(), reason, refused });
        self.count_workers();
    }

    /// The worker has joined, or is not listed any more.
    pub(crate) fn not_absent(&mut self, address: &str) {
        self.absent.remove(address);
        self.count_workers();
    }

    fn count_workers(&self) {
        let refused = self.absent.values().filter(|worker| worker.refused).count();
        self.metrics.joined.set(self.members.len() as f64);
        self.metrics.refused_workers.set(refused as f64);
        self.metrics.unreachable.set((self.absent.len() - refused) as f64);
    }

    /// The worker is routed to from now on, and holds what the snapshot says.
    pub(crate) fn join(&mut self, info: WorkerInfo, address: String, snapshot: &Snapshot) -> Result<MemberId, Refused> {
        let role = self.admits(&info)?;
        let id = MemberId(self.next_member);
        self.next_member += 1;
        let slot = self.free_slots.pop().unwrap_or(WorkerSlot(self.members.len() as u32));
        let series = self.metrics.worker(&info.worker_id);
        let booked = Booked::new(self.settings.seed);
        let (load, breaker) = (Load::default(), Breaker::default());
        let transfer_bytes_per_second = 0.0;
        let member =
            Member { info, role, address: address.clone(), slot, load, transfer_bytes_per_second, booked, breaker, series };
        self.members.insert(id, member);
        self.replace(id, snapshot);
        self.not_absent(&address);
        Ok(id)
    }

    /// The worker is gone, and with it all it held.
    pub(crate) fn leave(&mut self, id: MemberId) {
        if let Some(member) = self.members.remove(&id) {
            self.index.forget(member.slot);
            self.free_slots.push(member.slot);
            member.series.index_blocks.set(0.0);
            self.count_workers();
        }
    }

    /// The worker holds what the snapshot says. Its word that it has taken a request in may be among what was lost before, so
    /// all bookings count as reported: one that is still on its way goes missing until the next report, none counts twice.
    pub(crate) fn replace(&mut self, id: MemberId, snapshot: &Snapshot) {
        let Some(member) = self.members.get_mut(&id) else { return };
        member.booked.all_taken_in();
        let skipped = self.index.replace(member.slot, snapshot);
        member.series.orphaned.increment(skipped.orphaned_blocks);
        member.series.index_blocks.set(self.index.blocks(member.slot) as f64);
    }

    /// The worker's news: events in their order, none twice, and its load after them.
    pub(crate) fn apply(&mut self, id: MemberId, batch: KvBatch, transfer_bytes_per_second: f64) {
        let Some(member) = self.members.get_mut(&id) else { return };
        for event in &batch.events {
            let skipped = self.index.apply(member.slot, &event.change);
            member.series.event(&event.change);
            member.series.absent.increment(skipped.absent_blocks);
            member.series.orphaned.increment(skipped.orphaned_blocks);
        }
        member.series.index_blocks.set(self.index.blocks(member.slot) as f64);
        member.load = batch.load;
        member.transfer_bytes_per_second = transfer_bytes_per_second;
        for request_id in &batch.taken_in {
            member.booked.taken_in(request_id);
        }
    }

    /// The worker's events have a gap.
    pub(crate) fn count_gap(&self, worker_id: &str) {
        self.metrics.worker(worker_id).gaps.increment(1);
    }

    /// Places the request (for the `attempt`th time, from 1) and books its load until [`State::release`].
    pub(crate) fn place(
        &mut self,
        asked: &Asked,
        excluded: &Excluded,
        attempt: u32,
    ) -> Result<(BookingId, v1::Placement), NotPlaced> {
        let started = Instant::now();
        let placed = self.choose_and_book(asked, excluded, attempt);
        if placed.is_err() {
            self.metrics.refused.increment(1);
        }
        self.metrics.route_duration.record(started.elapsed());
        placed
    }

    /// The prompt is computed: its prefill counts nowhere any more. What the worker says to have found in its cache, if it
    /// does, is held against what was foreseen.
    pub(crate) fn release_prefill(&mut self, id: BookingId, cached_tokens: Option<u32>) {
        let Some(booking) = self.bookings.get_mut(&id) else { return };
        if !std::mem::take(&mut booking.computing) {
            return;
        }
        let Some(member) = self.members.get_mut(&booking.prefill.unwrap_or(booking.decode)) else { return };
        member.booked.prefilled(&booking.key, &booking.hashes);
        if booking.prefill.is_some() {
            member.booked.remove(&booking.key);
        }
        if let Some(real) = cached_tokens.map(u64::from) {
            member.series.overlap_over.increment(booking.overlap_tokens.saturating_sub(real));
            member.series.overlap_under.increment(real.saturating_sub(booking.overlap_tokens));
        }
    }

    /// The request has its first token: who brought it works.
    pub(crate) fn worked(&mut self, id: BookingId) {
        self.each_breaker(id, |member| member.breaker.worked());
    }

    /// The request failed because of an instance it was placed on.
    pub(crate) fn failed(&mut self, id: BookingId, instance_id: &str, reason: v1::Reason) {
        if !is_fault(reason) {
            return;
        }
        let now = Instant::now();
        self.each_breaker(id, |member| {
            if member.info.instance_id == instance_id && member.breaker.failed(id, now) {
                let worker_id = &member.info.worker_id;
                tracing::warn!(worker_id, instance_id, ?reason, "requests fail on this worker; it is left alone for a while");
                member.series.breaker_opened.increment(1);
            }
        });
    }

    fn each_breaker(&mut self, id: BookingId, mut of: impl FnMut(&mut Member)) {
        let Some(booking) = self.bookings.get(&id) else { return };
        for worker in [Some(booking.decode), booking.prefill].into_iter().flatten() {
            self.members.get_mut(&worker).into_iter().for_each(&mut of);
        }
    }

    /// The booking counts nowhere any more.
    pub(crate) fn release(&mut self, id: BookingId) {
        self.release_prefill(id, None);
        self.each_breaker(id, |member| member.breaker.ended(id));
        let Some(booking) = self.bookings.remove(&id) else { return };
        if let Some(member) = self.members.get_mut(&booking.decode) {
            member.booked.remove(&booking.key);
        }
        self.metrics.bookings.set(self.bookings.len() as f64);
    }

    /// Everything, for people.
    pub(crate) fn view(&self) -> v1::WorkersReply {
        let workers = self.members.values().map(|member| v1::WorkerView {
            info: Some(member.info.clone()),
            address: member.address.clone(),
            indexed_blocks: self.index.blocks(member.slot),
            bookings: member.booked.bookings(),
            load: Some(v1::Load { transfer_bytes_per_second: member.transfer_bytes_per_second, ..(&member.load).into() }),
        });
        v1::WorkersReply {
            workers: workers.collect(),
            bookings: self.bookings.len() as u32,
            identity: Some(self.identity()),
            unready: self.unready().map(|why| why.to_string()),
            absent: self.absent.values().cloned().collect(),
        }
    }

    /// What is to be placed, and the hashes of the blocks that a worker may reuse.
    fn question<'a>(&self, asked: &'a Asked, attempt: u32) -> Result<(Question, &'a [SequenceHash]), NotPlaced> {
        let Some(first) = self.members.values().next() else { return Err(Unplaced::NoDecode.into()) };
        if !asked.model.is_empty() && asked.model != first.info.model {
            return Err(NotPlaced::OtherModel);
        }
        let block_size = first.info.block_size;
        // Only blocks that a worker may reuse: one token is always computed, and logits are never cached.
        let reusable = if asked.prompt_logits { 0 } else { asked.prompt_tokens.saturating_sub(1) / block_size };
        let hashes = &asked.hashes[..asked.hashes.len().min(reusable as usize)];
        let prefill = match self.settings.prefill {
            PrefillPlace::Auto if attempt > 1 && attempt == self.settings.attempts_max => PrefillPlace::Local,
            place => place,
        };
        Ok((Question { prompt_tokens: asked.prompt_tokens, block_size, prefill, prompt_logits: asked.prompt_logits }, hashes))
    }

    /// What is known of each member, in their order. At a time, those whose breakers are open then are excluded too.
    fn candidates(&self, hashes: &[SequenceHash], excluded: &BTreeSet<String>, breakers_at: Option<Instant>) -> Vec<Candidate> {
        let leading = self.index.overlap(hashes);
        let candidate = |member: &Member| {
            let overlap_blocks = leading.get(member.slot.0 as usize).copied().unwrap_or(0);
            let mut candidate = member.candidate(hashes, overlap_blocks, excluded);
            candidate.excluded |= breakers_at.is_some_and(|now| !member.breaker.admits(now));
            candidate
        };
        self.members.values().map(candidate).collect()
    }

    /// Where the request would be placed now, and why. The next one asked may differ where costs are equal.
    pub(crate) fn explain(&self, asked: &Asked) -> v1::ExplainReply {
        let (question, hashes) = match self.question(asked, 1) {
            Ok(found) => found,
            Err(why) => return v1::ExplainReply { verdict: why.to_string(), ..Default::default() },
        };
        let candidates = self.candidates(hashes, &BTreeSet::new(), Some(Instant::now()));
        let turn = Turn { seed: self.settings.seed, number: self.turns };
        let uses = route::uses(&*self.policy, &self.settings.costs, &question, &candidates, turn);
        let choice = route::place(&*self.policy, &self.settings.costs, &question, &candidates, turn);
        let members: Vec<&Member> = self.members.values().collect();
        explain::reply(&members, &candidates, &uses, choice, question.block_size)
    }

    fn choose_and_book(
        &mut self,
        asked: &Asked,
        excluded: &Excluded,
        attempt: u32,
    ) -> Result<(BookingId, v1::Placement), NotPlaced> {
        if attempt > self.settings.attempts_max {
            return Err(NotPlaced::TooManyAttempts);
        }
        if self.bookings.len() >= self.settings.bookings_max {
            return Err(NotPlaced::TooManyBookings);
        }
        let (question, hashes) = self.question(asked, attempt)?;
        let block_size = question.block_size;
        let turn = Turn { seed: self.settings.seed, number: self.turns };
        self.turns += 1;
        let members: Vec<(MemberId, &Member)> = self.members.iter().map(|(id, member)| (*id, member)).collect();
        let now = Instant::now();
        let candidates = |excluded: &BTreeSet<String>, breakers: Option<Instant>| self.candidates(hashes, excluded, breakers);
        let place = |candidates: &[Candidate]| route::place(&*self.policy, &self.settings.costs, &question, candidates, turn);
        let mut candidates_now = candidates(&excluded.failed, Some(now));
        let mut choice = place(&candidates_now);
        if choice == Err(Unplaced::AllFailed) {
            candidates_now = candidates(&excluded.lost, None);
            choice = place(&candidates_now);
        }
        let (choice, candidates) = (choice?, candidates_now);

        let describe = |at: usize| members[at].1.describe(&candidates[at]);
        let placement =
            v1::Placement { decode: Some(describe(choice.decode)), prefill: choice.prefill.map(describe), block_size };
        let computes = &candidates[choice.prefill.unwrap_or(choice.decode)];
        let known_blocks = u64::from(computes.overlap_blocks) + u64::from(computes.predicted_blocks);
        let booking = Booking {
            key: (asked.request_id.clone(), BookingId(self.next_booking)),
            decode: members[choice.decode].0,
            prefill: choice.prefill.map(|at| members[at].0),
            computing: true,
            hashes: hashes.into(),
            overlap_tokens: u64::from(computes.overlap_blocks) * u64::from(block_size),
        };
        let (tokens, overlap_blocks) = (computes.new_tokens(&question, known_blocks), computes.overlap_blocks);
        let sequences = asked.samples.clamp(1, SAMPLES_MAX);
        Ok((self.book(booking, Share { tokens, sequences }, overlap_blocks), placement))
    }

    fn book(&mut self, booking: Booking, share: Share, overlap_blocks: u32) -> BookingId {
        let on_decode = if booking.prefill.is_some() { Share { tokens: 0, ..share } } else { share };
        for id in [Some(booking.decode), booking.prefill].into_iter().flatten() {
            let Member { booked, breaker, series, .. } = self.members.get_mut(&id).expect("a booking is made on members");
            breaker.placed(booking.key.1);
            let key = booking.key.clone();
            match (id == booking.decode, booking.prefill) {
                (true, None) => {
                    booked.add(key, on_decode, &booking.hashes);
                    series.placed_local.increment(1);
                    series.overlap_blocks.record(f64::from(overlap_blocks));
                }
                (true, Some(_)) => {
                    booked.add(key, on_decode, &[]);
                    series.placed_decode.increment(1);
                }
                (false, _) => {
                    booked.add(key, Share { sequences: 1, ..share }, &booking.hashes);
                    series.placed_prefill.increment(1);
                    series.overlap_blocks.record(f64::from(overlap_blocks));
                }
            }
        }
        let id = booking.key.1;
        self.next_booking += 1;
        self.bookings.insert(id, booking);
        self.metrics.bookings.set(self.bookings.len() as f64);
        id
    }
}

/// Sequences one request may add to a worker's load: OpenAI's bound of `n`. More is somebody else's to refuse.
const SAMPLES_MAX: u32 = 128;

impl Member {
    fn reference(&self) -> v1::WorkerRef {
        v1::WorkerRef {
            worker_id: self.info.worker_id.clone(),
            instance_id: self.info.instance_id.clone(),
            address: self.address.clone(),
        }
    }

    fn describe(&self, candidate: &Candidate) -> v1::Candidate {
        let Candidate { overlap_blocks, predicted_blocks, .. } = *candidate;
        v1::Candidate { worker: Some(self.reference()), overlap_blocks, predicted_blocks }
    }

    fn candidate(&self, hashes: &[SequenceHash], overlap_blocks: u32, excluded: &BTreeSet<String>) -> Candidate {
        let measured = |value: f64| (value > 0.0).then_some(value);
        let capacity = u64::from(self.info.capacity_blocks) * u64::from(self.info.block_size);
        let context = if self.info.context_length == 0 { u64::MAX } else { u64::from(self.info.context_length) };
        let filled = f64::from(self.load.cached_blocks)
            + f64::from(self.load.in_use_blocks)
            + self.booked.tokens() as f64 / f64::from(self.info.block_size);
        let sequences = u64::from(self.load.running_sequences) + u64::from(self.load.waiting_requests) + self.booked.sequences();
        Candidate {
            role: self.role,
            excluded: excluded.contains(&self.info.instance_id),
            tokens_max: capacity.min(context),
            overlap_blocks,
            predicted_blocks: self.booked.predicted_blocks(hashes, overlap_blocks),
            cache_filled: (filled / f64::from(self.info.capacity_blocks)).min(1.0),
            queued_tokens: self.load.pending_prefill_tokens.saturating_add(self.booked.tokens()),
            sequences: u32::try_from(sequences).unwrap_or(u32::MAX),
            block_bytes: self.info.block_bytes,
            prefill_tokens_per_second: measured(self.load.prefill_tokens_per_second),
            decode_step_ms: measured(self.load.decode_step_ms),
            transfer_bytes_per_second: measured(self.transfer_bytes_per_second),
        }
    }
}

#[path = "explain.rs"]
mod explain;

#[cfg(test)]
#[path = "cluster_tests.rs"]
mod tests;
