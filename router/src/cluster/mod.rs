//! What the router knows: who is in the cluster, what they hold, how busy they are, and what was placed on them.
//!
//! Plain data behind one mutex ([`Cluster`]); nothing here waits. Invariants: every member has a slot of its own in the index;
//! a member that leaves takes its entries along, and bookings on it count nowhere from then on; all members agree on model,
//! revision and block size.

mod bookings;
mod explain;
mod members;
mod peers;

pub(crate) use members::MemberId;
pub(crate) use peers::PeerId;

use crate::{
    booked::Booked,
    breaker::Breaker,
    exchange::Journal,
    feed::{Beside, Broken, Way},
    index::{PrefixIndex, WorkerSlot},
    metrics::{RouterMetrics, WorkerSeries},
    route::{self, Policy, Role, Unplaced},
    settings::{PrefillPlace, RouterSettings},
};
use bookings::Bookings;
use members::{Member, Members};
use parking_lot::{Mutex, MutexGuard};
use peers::Peer;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tandem_kv::{Change, KvBatch, KvEvent, Load, SequenceHash, Snapshot};
use tandem_node::Metrics;
use tandem_proto::{
    Difference,
    channel::OnRefused,
    v1::{self, Identity, WorkerInfo, worker_info},
};
use tokio::{sync::Notify, time::Instant};

/// Why a worker is not routed to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("its description lacks {field}")]
    Incomplete { field: &'static str },
    #[error(transparent)]
    Differs(#[from] Difference),
    #[error("it does not take this router's cluster key; give all processes the same --cluster-key-file")]
    OtherKey,
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
pub(crate) struct Cluster {
    state: Mutex<State>,
    left: Notify,
    peer_left: Notify,
}

/// The state.
pub(crate) struct State {
    settings: RouterSettings,
    instance_id: Arc<str>,
    policy: Box<dyn Policy>,
    metrics: RouterMetrics,
    index: PrefixIndex,
    members: Members,
    /// Listed workers that are no members, by address.
    absent: BTreeMap<String, v1::UnavailableWorker>,
    /// Workers that were listed at the start, and have neither joined nor failed to yet.
    awaited: BTreeSet<String>,
    /// There are none of them any more, and will be none.
    settled: bool,
    bookings: Bookings,
    /// From a prompt's prefill to the end of its answer, on average; `None` before the first.
    answer_ms: Option<f64>,
    /// Those of other routers.
    peers: BTreeMap<PeerId, Peer>,
    journal: Journal,
    free_slots: Vec<WorkerSlot>,
    next_member: u64,
    next_booking: u64,
    next_peer: u64,
    turns: u64,
}

impl Cluster {
    pub(crate) fn new(settings: RouterSettings, metrics: Metrics) -> Self {
        let state = State {
            policy: route::policy(settings.policy),
            metrics: RouterMetrics::new(metrics),
            index: PrefixIndex::new(settings.seed),
            instance_id: tandem_node::new_instance_id().into(),
            members: Members::default(),
            absent: BTreeMap::new(),
            awaited: BTreeSet::new(),
            settled: false,
            bookings: Bookings::new(),
            answer_ms: None,
            peers: BTreeMap::new(),
            journal: Journal::default(),
            free_slots: Vec::new(),
            next_member: 0,
            next_booking: 0,
            next_peer: 0,
            turns: 0,
            settings,
        };
        Self { state: Mutex::new(state), left: Notify::new(), peer_left: Notify::new() }
    }

    /// For a moment, never across an await. A panic under the lock has been reported; what it left is still sound enough to
    /// route by.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The worker's news. A long list of events is applied in slices, between which others have the state: what a worker sends
    /// does not keep requests from being placed. Dropped between two slices, it leaves a part applied.
    ///
    /// # Errors
    /// As [`State::apply_events`].
    pub(crate) async fn apply(&self, id: MemberId, batch: KvBatch, beside: Beside) -> Result<(), Broken> {
        let mut events = batch.events.as_slice();
        loop {
            let (now, later) = events.split_at(slice_len(events));
            {
                let mut state = self.lock();
                state.apply_events(id, now)?;
                if later.is_empty() {
                    state.report(id, batch.load, beside, &batch.included_request_ids);
                    return Ok(());
                }
            }
            events = later;
            tokio::task::yield_now().await;
        }
    }

    /// The worker is gone, and with it all it held and its series.
    pub(crate) fn leave(&self, id: MemberId) {
        self.lock().leave(id);
        self.left.notify_one();
    }

    /// Resolves when a worker has left, now or since the last time. For one caller; cancel-safe.
    pub(crate) async fn left(&self) {
        self.left.notified().await;
    }

    /// The router is not followed any more; what it has booked is not known any more.
    pub(crate) fn forget_peer(&self, id: PeerId) {
        self.lock().peer_left(id);
        self.peer_left.notify_one();
    }

    /// The same as [`Cluster::left`] of a router.
    pub(crate) async fn peer_left(&self) {
        self.peer_left.notified().await;
    }
}

/// How many of these events, at least the first, are applied in one go: so many that they name [`SLICE_BLOCKS`], or up to a `Cleared`,
/// whose cost is not known from its message.
fn slice_len(events: &[KvEvent]) -> usize {
    let mut blocks = 0;
    let last = events.iter().position(|event| {
        blocks += match &event.change {
            Change::Stored(chain) => chain.sequence_hashes.len(),
            Change::Removed(hashes) => hashes.len(),
            Change::Cleared => SLICE_BLOCKS,
        };
        blocks >= SLICE_BLOCKS
    });
    last.map_or(events.len(), |last| last + 1)
}

/// Blocks after which others have the state: about a millisecond's work.
const SLICE_BLOCKS: usize = 4_096;

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

    /// To be called for each call that is refused for lack of the cluster's key.
    pub(crate) fn count_unauthenticated(&self) -> OnRefused {
        let refused = self.metrics.unauthenticated.clone();
        Arc::new(move || refused.increment(1))
    }

    /// Of this router: one run of its process.
    pub(crate) fn instance_id(&self) -> Arc<str> {
        self.instance_id.clone()
    }

    /// This worker is listed. If it is so at the start: until each of those has joined, was refused or has not answered, the
    /// router knows less than one that has been up for longer.
    pub(crate) fn await_worker(&mut self, address: &str) {
        if !self.settled {
            self.awaited.insert(address.to_owned());
            self.count_workers();
        }
    }

    /// Who has not answered by now is not waited for.
    pub(crate) fn await_nobody(&mut self) {
        self.awaited.clear();
        self.settled = true;
        self.count_workers();
    }

    fn answered(&mut self, address: &str) {
        if self.awaited.remove(address) && self.awaited.is_empty() {
            self.settled = true;
        }
    }

    /// Whether workers are still waited for.
    pub(crate) fn is_joining(&self) -> bool {
        !self.awaited.is_empty()
    }

    /// Workers whose caches the index knows, of all that are listed.
    fn read(&self) -> (usize, usize) {
        (self.members.len(), self.members.len() + self.absent.len() + self.awaited.len())
    }

    /// Why no request can be placed, if that is so.
    pub(crate) fn unready(&self) -> Option<String> {
        let has = |role| self.members.values().any(|member| member.role == role);
        if self.is_joining() {
            let (read, listed) = self.read();
            return Some(format!("the router has just started; its index: {read} of {listed} workers read"));
        }
        match self.settings.prefill {
            _ if !has(Role::Decode) => Some(Unplaced::NoDecode.to_string()),
            PrefillPlace::Remote if !has(Role::Prefill) => Some(Unplaced::NoPrefill.to_string()),
            PrefillPlace::Auto | PrefillPlace::Remote | PrefillPlace::Local => None,
        }
    }

    /// Whether a worker at this address is a member now.
    pub(crate) fn has_member_at(&self, address: &str) -> bool {
        self.members.values().any(|member| member.address == address)
    }

    /// A listed worker is not there, or must not join as it is.
    pub(crate) fn absent(&mut self, address: &str, reason: String, refused: bool) {
        self.answered(address);
        self.absent
            .insert(address.to_owned(), v1::UnavailableWorker { address: address.to_owned(), reason, incompatible: refused });
        self.count_workers();
    }

    /// The worker has joined, or is not listed any more.
    pub(crate) fn not_absent(&mut self, address: &str) {
        self.answered(address);
        self.absent.remove(address);
        self.count_workers();
    }

    fn count_workers(&self) {
        let refused = self.absent.values().filter(|worker| worker.incompatible).count();
        self.metrics.joined.set(self.members.len() as f64);
        self.metrics.refused_workers.set(refused as f64);
        self.metrics.unreachable.set((self.absent.len() - refused) as f64);
        let (read, listed) = self.read();
        self.metrics.index_complete.set(if listed == 0 { 1.0 } else { read as f64 / listed as f64 });
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
        let (beside, placed) = (Beside::default(), v1::PlacementTotals::default());
        let instance_id = info.instance_id.as_str().into();
        let address_of = address.clone();
        let (prefilled_at, decoded_at) = (Instant::now(), Instant::now());
        let member = Member {
            info,
            instance_id,
            role,
            address,
            slot,
            load,
            beside,
            prefilled_at,
            decoded_at,
            booked,
            breaker,
            series,
            placed,
        };
        self.members.insert(id, member);
        self.book_joined(id);
        self.replace(id, snapshot);
        self.not_absent(&address_of);
        Ok(id)
    }

    /// The worker is gone, and with it all it held and its series.
    pub(crate) fn leave(&mut self, id: MemberId) {
        if let Some(member) = self.members.remove(id) {
            self.index.forget(member.slot);
            self.free_slots.push(member.slot);
            self.count_workers();
        }
    }

    /// The worker holds what the snapshot says. Its word that it has taken a request in may be among what was lost before, so
    /// all bookings count as reported: one that is still on its way goes missing until the next report, none counts twice.
    pub(crate) fn replace(&mut self, id: MemberId, snapshot: &Snapshot) {
        let Some(member) = self.members.get_mut(id) else { return };
        member.booked.all_taken_in();
        let skipped = self.index.replace(member.slot, snapshot);
        member.series.orphaned.increment(skipped.orphaned_blocks);
        member.series.index_blocks.set(self.index.blocks(member.slot) as f64);
    }

    /// The worker's cache changed so, in this order.
    ///
    /// # Errors
    /// [`Broken::BeyondCapacity`] at an event that names more blocks than the worker can hold; the rest is not applied, and the
    /// worker's part of the index is not to be relied on.
    pub(crate) fn apply_events(&mut self, id: MemberId, events: &[KvEvent]) -> Result<(), Broken> {
        let Some(member) = self.members.get_mut(id) else { return Ok(()) };
        let capacity_blocks = member.info.capacity_blocks;
        let applied = events.iter().try_for_each(|event| {
            let blocks = match &event.change {
                Change::Stored(chain) => self.index.blocks(member.slot) + chain.sequence_hashes.len() as u64,
                Change::Removed(hashes) => hashes.len() as u64,
                Change::Cleared => 0,
            };
            if blocks > u64::from(capacity_blocks) {
                member.series.beyond_capacity.increment(1);
                return Err(Broken::BeyondCapacity { capacity_blocks });
            }
            let skipped = self.index.apply(member.slot, &event.change);
            member.series.event(&event.change);
            member.series.absent.increment(skipped.absent_blocks);
            member.series.orphaned.increment(skipped.orphaned_blocks);
            Ok(())
        });
        member.series.index_blocks.set(self.index.blocks(member.slot) as f64);
        applied
    }

    /// The worker's load, after all events that came with it, and the requests that the load has come to include.
    pub(crate) fn report(&mut self, id: MemberId, load: Load, beside: Beside, included_request_ids: &[String]) {
        let Some(member) = self.members.get_mut(id) else { return };
        let now = Instant::now();
        if load.prefill_measurements != member.load.prefill_measurements {
            member.prefilled_at = now;
        }
        if load.decode_step_ms != member.load.decode_step_ms || beside.generated() != member.beside.generated() {
            member.decoded_at = now;
        }
        (member.load, member.beside) = (load, beside);
        for request_id in included_request_ids {
            member.booked.included_request_ids(request_id);
        }
    }

    /// An event came so long after it was sent.
    pub(crate) fn count_lag(&self, lag: Duration) {
        self.metrics.event_lag.record(lag);
    }

    /// The worker's events come this way now.
    pub(crate) fn comes_by(&mut self, id: MemberId, way: Way) {
        if let Some(member) = self.members.get_mut(id) {
            let by_nats = way == Way::Published;
            member.series.by_nats.set(f64::from(u8::from(by_nats)));
            member.series.by_stream.set(f64::from(u8::from(!by_nats)));
        }
    }

    /// The worker's series, which are there for as long as somebody has them.
    pub(crate) fn series(&self, worker_id: &str) -> WorkerSeries {
        self.metrics.worker(worker_id)
    }

    /// Everything, for people.
    pub(crate) fn view(&self) -> v1::WorkersReply {
        let now = Instant::now();
        let workers = self.members.values().map(|member| v1::WorkerView {
            info: Some(member.info.clone()),
            address: member.address.clone(),
            indexed_blocks: self.index.blocks(member.slot),
            bookings: member.booked.bookings(),
            load: Some(member.beside.fill((&member.load).into())),
            placements: Some(member.placed),
            circuit_open: !member.breaker.admits(now),
        });
        let (read, listed) = self.read();
        v1::WorkersReply {
            workers: workers.collect(),
            bookings: self.bookings.len() as u32,
            identity: Some(self.identity()),
            unavailable_reason: self.unready(),
            unavailable: self.absent.values().cloned().collect(),
            instance_id: self.instance_id.to_string(),
            peer_bookings: self.peer_bookings() as u32,
            peers: self.peers.len() as u32,
            synced_workers: read as u32,
            known_workers: listed as u32,
        }
    }
}

#[cfg(test)]
mod tests;
