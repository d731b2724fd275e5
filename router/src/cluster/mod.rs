//! The router's state: the workers that are members, their caches and loads, and the bookings on them.
//!
//! Plain data behind one mutex ([`Cluster`]); nothing here waits for I/O. [`ClusterMembers`], [`Bookings`], [`Peers`] and
//! [`UnavailableWorkers`] each keep their own invariants; [`ClusterState`] has the operations that concern several of them.

mod booking;
mod bookings;
mod explain;
mod findings;
mod loads;
mod members;
mod peers;
mod placement;
mod prefix;
mod request;
pub(crate) mod texts;
mod unavailable;
mod view;
mod virtual_router;
mod wait;
mod wanted;

pub(crate) use members::{JoinError, MemberId};
pub(crate) use peers::PeerId;
pub(crate) use request::{Excluded, PlacementError, PlacementRequest};
pub(crate) use unavailable::UnavailableWorkers;
pub use virtual_router::{VirtualBooking, VirtualPlacement, VirtualReport, VirtualRequest, VirtualRouter, VirtualWorker};

use crate::{
    applied::{SLICE_BLOCKS, slice_len},
    breaker::is_fault,
    index::{PrefixIndex, Replacement},
    metrics::RouterMetrics,
    prefill_queue::QueueEntry,
    replication::PeerUpdate,
    route::WorkerRole,
    settings::RouterSettings,
    subscription::{ReportedStats, SubscriptionError},
    wanted::{ClusterDemand, WantedWorkers},
    worker_bookings::{BookedLoad, BookingId},
};
use booking::{BookingEntry, LoadByRole, Prediction, SAMPLES_MAX};
use bookings::Bookings;
use loads::ExpectedLoads;
use members::{ClusterMembers, Member};
use parking_lot::{Mutex, MutexGuard};
use peers::Peers;
use placement::Placer;
use std::{convert::Infallible, sync::Arc, time::Duration};
use tandem_kv::{InstanceId, KvBatch, Snapshot};
use tandem_process::Metrics;
use tandem_proto::{
    Funnel,
    v1::{self, WorkerInfo},
};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

/// The router's state, shared by its tasks.
pub(crate) struct Cluster {
    pub(crate) settings: Arc<RouterSettings>,
    state: Mutex<ClusterState>,
    /// The same index as in `state`. It has its own locks, so it is used without locking `state`.
    index: Arc<PrefixIndex>,
    /// Notifies one waiter that the index has blocks to be removed. Without a waiter the notification is kept.
    blocks_left: Notify,
    /// Notifies one waiter each time that a worker leaves. Without a waiter the notification is kept.
    pub(crate) member_left: Notify,
    /// Notifies all subscribers each time that a worker leaves.
    pub(crate) departures: watch::Sender<()>,
    /// Notifies one waiter each time that a peer is removed, like `member_left`.
    pub(crate) peer_left: Notify,
}

/// The router's knowledge of workers, peers and bookings.
pub(crate) struct ClusterState {
    settings: Arc<RouterSettings>,
    pub(crate) instance_id: InstanceId,
    pub(crate) metrics: RouterMetrics,
    pub(crate) members: ClusterMembers,
    pub(crate) unavailable: UnavailableWorkers,
    pub(crate) bookings: Bookings,
    pub(crate) peers: Peers,
    placer: Placer,
    demand: ClusterDemand,
    /// How many workers are wanted, for each model and role.
    wanted: Vec<WantedWorkers>,
}

/// A request that has waited in the queue for its whole limit is placed again only where its estimated wait is at most this long. Frontends
/// allow a little more.
const SHORT_WAIT: Duration = Duration::from_millis(500);

pub(crate) type Placed = (BookingId, v1::Placement);

impl Cluster {
    pub(crate) fn new(settings: RouterSettings, metrics: Metrics) -> Self {
        let settings = Arc::new(settings);
        let state = ClusterState {
            settings: settings.clone(),
            instance_id: tandem_process::new_instance_id().into(),
            metrics: RouterMetrics::new(metrics),
            members: ClusterMembers::new(settings.seed),
            unavailable: UnavailableWorkers::default(),
            bookings: Bookings::default(),
            peers: Peers::default(),
            placer: Placer::new(settings.clone()),
            demand: ClusterDemand::default(),
            wanted: Vec::new(),
        };
        let index = state.members.index.clone();
        let state = Mutex::new(state);
        let [blocks_left, member_left, peer_left] = [const { Notify::const_new() }; 3];
        Self { settings, state, index, blocks_left, member_left, departures: watch::channel(()).0, peer_left }
    }

    /// Locks the state. The lock must be held only briefly and never across an await.
    pub(crate) fn lock(&self) -> MutexGuard<'_, ClusterState> {
        self.state.lock()
    }

    /// Applies a worker's events, then records its load. The state is not locked while events are applied. A long list of events is applied
    /// in slices, between which other tasks run. If the future is dropped between two slices, the remaining events are not applied.
    ///
    /// # Errors
    /// [`SubscriptionError::BeyondCapacity`] if an event names more blocks than the worker can hold.
    pub(crate) async fn apply(&self, id: MemberId, batch: KvBatch, stats: ReportedStats) -> Result<(), SubscriptionError> {
        let Some(worker) = self.lock().members.indexed(id) else { return Ok(()) };
        let mut events = batch.events.as_slice();
        loop {
            let (now, later) = events.split_at(slice_len(events));
            let applied = worker.apply(now);
            {
                let mut state = self.lock();
                if !now.is_empty() {
                    state.members.on_applied(id, &applied);
                }
                if applied.cleared > 0 {
                    self.blocks_left.notify_one();
                }
                if let Some(error) = applied.beyond_capacity {
                    return Err(error);
                }
                if later.is_empty() {
                    state.members.report(id, batch.load, stats, &batch.included_request_ids);
                    return Ok(());
                }
            }
            events = later;
            tokio::task::yield_now().await;
        }
    }

    /// Reads the snapshot into the index, in slices, between which other tasks run. Lookups do not see the content before
    /// [`ClusterState::join`] or [`Self::replace`] makes all of it visible at once.
    pub(crate) async fn load(&self, snapshot: &Snapshot) -> Replacement<'_> {
        let (mut content, mut blocks) = (self.index.replacement(), 0);
        for chain in &snapshot.stored {
            content.store(chain);
            blocks += chain.sequence_hashes.len();
            if blocks >= SLICE_BLOCKS {
                blocks = 0;
                tokio::task::yield_now().await;
            }
        }
        content
    }

    /// Replaces the known content of the member's cache.
    pub(crate) fn replace(&self, id: MemberId, content: Replacement<'_>) {
        self.lock().members.replace(id, content);
        self.blocks_left.notify_one();
    }

    /// Removes a worker that is not connected any more.
    pub(crate) fn leave(&self, id: MemberId) {
        self.lock().leave(id);
        self.member_left.notify_one();
        self.departures.send_replace(());
        self.blocks_left.notify_one();
    }

    /// Removes the blocks of workers that have left, and of caches that were cleared or replaced, from the index, in slices.
    pub(crate) async fn sweep(&self) -> Infallible {
        loop {
            self.blocks_left.notified().await;
            while self.index.sweep() {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Removes a peer that is not connected any more, with its bookings.
    pub(crate) fn remove_peer(&self, id: PeerId) {
        self.lock().remove_peer(id);
        self.peer_left.notify_one();
    }
}

/// Methods for the membership of workers.
impl ClusterState {
    /// Checks whether a worker with this description may join now. Returns its role.
    pub(crate) fn check_joinable(&self, info: &WorkerInfo) -> Result<WorkerRole, JoinError> {
        self.members.check_joinable(info, |model| self.identity_of(model))
    }

    /// Adds a worker whose cache has this content.
    pub(crate) fn join(&mut self, info: WorkerInfo, address: String, content: Replacement<'_>) -> Result<MemberId, JoinError> {
        let role = self.check_joinable(&info)?;
        let series = self.metrics.worker(&info.worker_id);
        series.describe(&info);
        let bookings = self.bookings.by_id.values().chain(self.peers.bookings());
        self.unavailable.remove(&address);
        let id = self.members.join(info, role, address, series, bookings);
        self.members.replace(id, content);
        self.show_workers();
        Ok(id)
    }

    fn leave(&mut self, id: MemberId) {
        self.members.leave(id);
        self.show_workers();
    }

    /// Calls `update` to change the list of unavailable workers.
    pub(crate) fn update_unavailable(&mut self, update: impl FnOnce(&mut UnavailableWorkers)) {
        update(&mut self.unavailable);
        self.show_workers();
    }

    /// Returns the number of workers whose caches the index holds, and the number of all listed workers.
    fn synced_of_known(&self) -> (usize, usize) {
        (self.members.len(), self.members.len() + self.unavailable.len())
    }

    fn show_workers(&self) {
        let incompatible = self.unavailable.values().filter(|worker| worker.incompatible).count();
        self.metrics.joined.set(self.members.len() as f64);
        self.metrics.incompatible.set(incompatible as f64);
        self.metrics.unreachable.set((self.unavailable.values().len() - incompatible) as f64);
        let (synced, known) = self.synced_of_known();
        self.metrics.index_complete.set(if known == 0 { 1.0 } else { synced as f64 / known as f64 });
    }
}

/// Methods for the bookings of this router.
impl ClusterState {
    /// Places the request and books it until [`ClusterState::release`]. `attempt` is the number of this placement of the request, from 1.
    pub(crate) fn place(
        &mut self,
        request: &PlacementRequest,
        excluded: &Excluded,
        attempt: u32,
    ) -> Result<Placed, PlacementError> {
        let started = Instant::now();
        let placed = self.try_place(request, excluded, attempt);
        if let Err(error) = &placed {
            self.metrics.refused.increment(1);
            self.metrics.overloaded.increment(u64::from(matches!(error, PlacementError::Overloaded { .. })));
        }
        self.metrics.route_duration.record(started.elapsed());
        placed
    }

    /// Places a request that has waited in the queue for its limit `max_wait` again, on a worker with a wait of at most [`SHORT_WAIT`].
    /// `again` has the excluded instances and the number of this placement; `None`: the request is refused.
    ///
    /// # Errors
    /// The request would wait longer than [`SHORT_WAIT`] on every worker. The error says when to try again.
    pub(crate) fn place_at_once(
        &mut self,
        request: &PlacementRequest,
        again: Option<(&Excluded, u32)>,
        max_wait: Option<Duration>,
    ) -> Result<Placed, PlacementError> {
        let at_once = PlacementRequest { max_wait: Some(SHORT_WAIT), ..request.clone() };
        let placed = again.and_then(|(excluded, attempt)| self.try_place(&at_once, excluded, attempt).ok());
        placed.ok_or_else(|| {
            self.metrics.refused.increment(1);
            self.metrics.overloaded.increment(1);
            match self.placer.preview(&self.members, request) {
                Ok(decision) => decision.overloaded(request, max_wait.unwrap_or_default(), self.members.now()),
                Err(error) => error,
            }
        })
    }

    fn try_place(&mut self, request: &PlacementRequest, excluded: &Excluded, attempt: u32) -> Result<Placed, PlacementError> {
        if attempt > self.settings.attempts_max {
            return Err(PlacementError::TooManyAttempts);
        }
        self.check_capacity()?;
        let decision = self.placer.decide(&self.members, request, excluded, attempt)?;
        let now = self.members.now();
        let answer = self.placer.answer(&decision.model, request, None);
        if attempt == 1 && self.settings.levels.is_set() {
            decision.add_to(&mut self.demand, decision.choice?, &answer, now);
        }
        let (choice, wait) = decision.within(request, decision.choice?, now)?;
        let facts = decision.facts(&self.members, choice, request.other_namespace_blocks, now);
        let computes = &decision.candidates[choice.prefill.unwrap_or(choice.decode)];
        let overlap_blocks = computes.overlap_blocks;
        let full = BookedLoad { tokens: decision.new_tokens(choice), sequences: request.samples.clamp(1, SAMPLES_MAX) };
        let load = match choice.prefill {
            None => LoadByRole { decode: full, ..LoadByRole::default() },
            Some(_) => LoadByRole { decode: BookedLoad { tokens: 0, ..full }, prefill: BookedLoad { sequences: 1, ..full } },
        };
        let instance = |at: usize| decision.members[at].instance_id.clone();
        let booking = BookingEntry {
            key: self.bookings.new_key(request.request_id.clone()),
            decode: instance(choice.decode),
            prefill: choice.prefill.map(instance),
            model: decision.model.clone(),
            prefilling: true,
            answering_since: None,
            hashes: decision.hashes.into(),
            prediction: Some(Prediction {
                prompt_tokens: request.prompt_tokens,
                block_size: decision.query.block_size,
                reported: computes.reported_blocks,
                facts: prefix::anonymous(&facts),
                loads: ExpectedLoads::new(
                    &decision.candidates,
                    choice,
                    decision.first_token_ms(choice),
                    decision.query.block_size,
                    now,
                ),
            }),
            answer,
            waiting: decision.waiting(request, choice),
        };
        let mut placement = decision.placement(choice, wait, facts);
        if let Some(wanted) = &request.endpoints {
            placement.endpoints = decision.endpoints(choice, wanted.alternatives);
        }
        self.metrics.estimated_wait.record(wait);
        let role = if choice.prefill.is_some() { WorkerRole::Prefill } else { WorkerRole::Decode };
        let (model, tokens) = (decision.model.clone(), full.tokens);
        self.placer.on_placed(&model, role, tokens, now);
        self.count_placement(&booking, overlap_blocks);
        Ok((self.book(booking, load), placement))
    }

    /// Books a request that another router has placed, until [`ClusterState::release`]. The reports of the request's workers already
    /// include the request, so the booking adds no load. The workers need not be members yet.
    pub(crate) fn rebook(
        &mut self,
        request: &PlacementRequest,
        existing: v1::ExistingPlacement,
    ) -> Result<BookingId, PlacementError> {
        self.check_capacity()?;
        let v1::ExistingPlacement { decode_instance_id: decode, prefill_instance_id: prefill, prefilling } = existing;
        let since = (!prefilling).then(|| self.members.now());
        let answer = self.placer.answer(&request.model, request, since);
        let booking = BookingEntry {
            key: self.bookings.new_key(request.request_id.clone()),
            prefill: prefill.filter(|prefill| *prefill != decode).map(Into::into),
            decode: decode.into(),
            model: request.model.as_str().into(),
            prefilling,
            answering_since: None,
            hashes: if prefilling && !request.prompt_logits { request.hashes.clone() } else { [].into() },
            prediction: None,
            answer,
            waiting: QueueEntry::default(),
        };
        self.metrics.rebooked.increment(1);
        Ok(self.book(booking, LoadByRole::default()))
    }

    /// Records that the prompt has been prefilled, so its prefill is no longer part of the load. `cached_tokens` may be known only in a
    /// later call. The first known number is compared with the overlap that the placement predicted. Returns the result of this comparison.
    pub(crate) fn on_prefilled(&mut self, id: BookingId, cached_tokens: Option<u32>) -> Option<Funnel> {
        let now = self.members.now();
        let booking = self.bookings.on_prefilled(id, &mut self.members)?;
        booking.prediction.iter_mut().for_each(|prediction| prediction.loads.on_first_token(now));
        let actual = cached_tokens?;
        let prediction = booking.prediction.take()?;
        let member = self.members.of_mut(booking.prefills_on())?;
        Some(prefix::compare(member, &self.metrics, &booking.model, &prediction, actual, now))
    }

    /// Closes the circuit breakers of the request's workers, because it has its first token.
    pub(crate) fn on_first_token(&mut self, id: BookingId) {
        self.for_each_worker(id, |member| member.breaker.on_success());
    }

    /// Counts a fault at the circuit breaker of `instance_id`, on which the request was placed, if the reason suggests that the worker is broken.
    pub(crate) fn on_failure(&mut self, id: BookingId, instance_id: &str, reason: v1::FailureReason) {
        if !is_fault(reason) {
            return;
        }
        let now = self.members.now();
        self.for_each_worker(id, |member| {
            if member.info.instance_id == instance_id && member.breaker.on_fault(id, now) {
                tracing::warn!(worker_id = member.info.worker_id, instance_id, ?reason, "circuit breaker opened");
                member.series.breaker_opened.increment(1);
            }
        });
    }

    /// Records that the answer is complete, with this number of tokens in all samples together.
    pub(crate) fn on_answered(&mut self, id: BookingId, generated_tokens: u64) {
        let Some(BookingEntry { model, answer, .. }) = self.bookings.by_id.get(&id) else { return };
        let tokens = generated_tokens as f64 / f64::from(answer.samples.max(1));
        self.placer.on_answered(model, answer.length.max, tokens);
    }

    /// Removes the booking and its load.
    pub(crate) fn release(&mut self, id: BookingId) {
        self.for_each_worker(id, |member| member.breaker.on_released(id));
        if let Some((model, answering_since)) = self.bookings.release(id, &mut self.members) {
            self.placer.on_released(&model, self.members.now().duration_since(answering_since));
        }
        self.metrics.bookings.set(self.bookings.by_id.len() as f64);
    }

    /// Returns where the request would be placed now, and why; books nothing.
    pub(crate) fn explain(&self, request: &PlacementRequest) -> v1::ExplainReply {
        match self.placer.preview(&self.members, request) {
            Ok(decision) => explain::reply(&self.members, &decision, self.settings.costs.prefill_tokens_per_second),
            Err(error) => v1::ExplainReply { explanation: error.to_string(), ..Default::default() },
        }
    }

    fn check_capacity(&self) -> Result<(), PlacementError> {
        if self.bookings.by_id.len() >= self.settings.bookings_max { Err(PlacementError::TooManyBookings) } else { Ok(()) }
    }

    fn book(&mut self, booking: BookingEntry, load: LoadByRole) -> BookingId {
        let id = self.bookings.add(booking, load, &mut self.members);
        self.metrics.bookings.set(self.bookings.by_id.len() as f64);
        id
    }

    fn for_each_worker(&mut self, id: BookingId, mut action: impl FnMut(&mut Member)) {
        let Some(booking) = self.bookings.by_id.get(&id) else { return };
        for instance_id in [Some(&booking.decode), booking.prefill.as_ref()].into_iter().flatten() {
            self.members.of_mut(instance_id).into_iter().for_each(&mut action);
        }
    }

    fn count_placement(&mut self, booking: &BookingEntry, overlap_blocks: u32) {
        let id = booking.key.1;
        for (instance_id, _) in booking.places() {
            let Some(Member { breaker, series, placements, .. }) = self.members.of_mut(instance_id) else { continue };
            breaker.on_placed(id);
            let (counter, total) = match (*instance_id == booking.decode, &booking.prefill) {
                (true, None) => (&series.placed_local, &mut placements.local),
                (true, Some(_)) => (&series.placed_decode, &mut placements.decode),
                (false, _) => (&series.placed_prefill, &mut placements.prefill),
            };
            counter.increment(1);
            *total += 1;
            if instance_id == booking.prefills_on() {
                series.overlap_blocks.record(f64::from(overlap_blocks));
                placements.overlap_blocks += u64::from(overlap_blocks);
            }
        }
    }
}

/// Methods for the bookings of peers.
impl ClusterState {
    /// Adds a peer router that has connected.
    pub(crate) fn add_peer(&mut self, address: &str) -> PeerId {
        let id = self.peers.add(address);
        self.show_peers();
        id
    }

    fn remove_peer(&mut self, id: PeerId) {
        self.peers.remove(id, &mut self.members);
        self.show_peers();
    }

    pub(crate) fn update_peer(&mut self, id: PeerId, update: PeerUpdate) {
        let (demand, is_counted) = (&mut self.demand, self.settings.levels.is_set());
        let placed = |members: &ClusterMembers, booking: &BookingEntry, load| {
            if is_counted {
                wanted::add_of_peer(demand, members, booking, load);
            }
        };
        self.peers.update(id, update, &mut self.members, &mut self.bookings, self.settings.bookings_max, placed);
        self.show_peers();
    }

    fn show_peers(&self) {
        self.metrics.peers.set(self.peers.len() as f64);
        self.metrics.peer_bookings.set(self.peers.count_bookings() as f64);
    }
}

#[cfg(test)]
mod tests;
