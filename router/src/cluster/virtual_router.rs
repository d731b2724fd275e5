//! The router in virtual time, for simulations of clusters: the same index, bookings, predictions and costs as in the service, without
//! sockets and tasks. The caller sets the time.

use super::*;
use crate::route::Candidate;
use std::{collections::BTreeSet, time::Duration};
use tandem_kv::{KvEvent, Load, Priority, SequenceHash};
use tandem_proto::v1::worker_info;

/// The model that all workers of a [`VirtualRouter`] serve.
const MODEL: &str = "m";

/// A router in virtual time. Its workers are numbered from 0, in the order in which they join for the first time.
pub struct VirtualRouter {
    state: ClusterState,
    workers: Vec<Joined>,
    /// The number of instances that have joined.
    instances: u64,
    began: Instant,
}

/// A worker that has joined, perhaps several times.
struct Joined {
    worker: VirtualWorker,
    /// Its latest membership.
    member: MemberId,
    /// The id of its latest instance.
    instance_id: String,
}

/// A worker that joins a [`VirtualRouter`] with an empty cache.
#[derive(Clone, Copy, Debug)]
pub struct VirtualWorker {
    /// The role.
    pub role: WorkerRole,
    /// Tokens per block, the same for all workers.
    pub block_size: u32,
    /// The capacity of the worker's cache in blocks.
    pub capacity_blocks: u32,
    /// Bytes of KV per block.
    pub block_bytes: u64,
    /// The most prompt tokens of a step.
    pub step_tokens: u32,
}

/// A request to a [`VirtualRouter`].
#[derive(Clone, Debug)]
pub struct VirtualRequest {
    /// The request's id, by which workers report it.
    pub id: u64,
    /// Sequence hashes of the prompt's full blocks.
    pub hashes: Arc<[SequenceHash]>,
    /// The number of tokens of the prompt, plus the tokens that failed attempts have generated.
    pub prompt_tokens: u32,
    /// The most tokens that the answer may have; 0: not known.
    pub max_tokens: u32,
    /// The longest estimated wait with which the request is placed; `None`: any wait.
    pub max_wait: Option<Duration>,
    /// The number of this placement since the request's latest first token, from 1.
    pub attempt: u32,
}

/// Identifies a booking: a request's load on the workers on which it is placed, until [`VirtualRouter::release`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VirtualBooking(BookingId);

/// The workers on which a request is placed, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtualPlacement {
    /// The booking.
    pub booking: VirtualBooking,
    /// The decode worker.
    pub decode: usize,
    /// The prefill worker; `None`: the decode worker prefills.
    pub prefill: Option<usize>,
}

/// What a worker reports.
#[derive(Clone, Debug, Default)]
pub struct VirtualReport<'a> {
    /// The changes of its cache since the last report.
    pub events: Vec<KvEvent>,
    /// Its load.
    pub load: Load,
    /// The requests that the load includes for the first time.
    pub included: &'a [u64],
    /// The tokens that it has generated since the beginning.
    pub generated_tokens: u64,
    /// The bandwidth of its transfers; 0: not measured.
    pub transfer_bytes_per_second: f64,
}

impl VirtualRouter {
    /// Returns a router without workers, at time 0.
    pub fn new(settings: RouterSettings) -> Self {
        let settings = RouterSettings { bookings_max: usize::MAX, ..settings };
        let mut state = Cluster::new(settings, Metrics::default()).state.into_inner();
        let began = Instant::now();
        state.members.virtual_time = Some(began);
        Self { state, workers: Vec::new(), instances: 0, began }
    }

    /// Sets the time since the beginning.
    pub fn set_time(&mut self, now: Duration) {
        self.state.members.virtual_time = Some(self.began + now);
    }

    /// Adds a worker.
    pub fn join(&mut self, worker: VirtualWorker) {
        let number = self.workers.len();
        let (member, instance_id) = self.join_as(number, worker);
        self.workers.push(Joined { worker, member, instance_id });
    }

    /// Removes a worker that was lost, and its blocks from the index. Its bookings remain until they are released.
    pub fn leave(&mut self, number: usize) {
        self.state.leave(self.workers[number].member);
        while self.state.members.index.sweep() {}
    }

    /// Adds a worker that has left, as a new instance with an empty cache.
    pub fn rejoin(&mut self, number: usize) {
        let worker = self.workers[number].worker;
        let (member, instance_id) = self.join_as(number, worker);
        self.workers[number] = Joined { worker, member, instance_id };
    }

    fn join_as(&mut self, number: usize, worker: VirtualWorker) -> (MemberId, String) {
        let VirtualWorker { role, block_size, capacity_blocks, block_bytes, step_tokens } = worker;
        let instance_id = format!("{number}-{}", self.instances);
        self.instances += 1;
        let info = WorkerInfo {
            role: worker_info::Role::from(role).into(),
            worker_id: number.to_string(),
            instance_id: instance_id.clone(),
            model: MODEL.to_owned(),
            block_size,
            capacity_blocks,
            block_bytes,
            step_tokens,
            ..Default::default()
        };
        let member = self.state.join_empty(info).expect("the workers are described completely and alike");
        (member, instance_id)
    }

    /// Returns all workers that have joined and not left: the number of each, and its state as a candidate for a prompt with these hashes.
    pub fn candidates(&self, hashes: &[SequenceHash]) -> Vec<(usize, Candidate)> {
        let numbers = self.state.members.values().map(|member| member.info.worker_id.parse().expect("it is a number"));
        numbers.zip(self.state.candidates(hashes)).collect()
    }

    /// Decides how many workers of each role are wanted. Returns for each role the number, and the worker that is cheapest to lose. It is to
    /// be called every [`WANTED_INTERVAL`](crate::WANTED_INTERVAL).
    pub fn wanted(&mut self) -> Vec<(WorkerRole, usize, Option<usize>)> {
        self.state.plan_workers();
        let number = |worker_id: &String| worker_id.parse().expect("it is a number");
        self.state.wanted.iter().map(|of| (of.role, of.wanted, of.cheapest_to_lose.as_ref().map(number))).collect()
    }

    /// Places the request. Returns `None` if no worker can take it.
    pub fn place(&mut self, request: &VirtualRequest) -> Option<VirtualPlacement> {
        let placed = self.state.place(&placement_request(request), &Excluded::default(), request.attempt);
        let (booking, placement) = placed.ok()?;
        let number = |candidate: v1::Candidate| candidate.worker.and_then(|worker| worker.worker_id.parse().ok());
        let decode = number(placement.decode?).expect("a placement names a worker of this router");
        Some(VirtualPlacement { booking: VirtualBooking(booking), decode, prefill: placement.prefill.and_then(number) })
    }

    /// Books a request on workers that the caller has chosen. The booking adds no load, so the workers' next reports must include the
    /// request.
    pub fn book(&mut self, request: &VirtualRequest, decode: usize, prefill: Option<usize>) -> VirtualPlacement {
        let instance = |number: usize| self.workers[number].instance_id.clone();
        let existing = v1::ExistingPlacement {
            decode_instance_id: instance(decode),
            prefill_instance_id: prefill.map(instance),
            prefilling: true,
        };
        let booking = self.state.rebook(&placement_request(request), existing).expect("the number of bookings is not bounded");
        VirtualPlacement { booking: VirtualBooking(booking), decode, prefill }
    }

    /// Records what a worker reports. A report of a worker that has left is ignored.
    pub fn report(&mut self, worker: usize, report: VirtualReport<'_>) {
        let VirtualReport { events, load, included, generated_tokens, transfer_bytes_per_second } = report;
        let steps = Some(v1::StepTotals { generated_tokens, ..Default::default() });
        let stats = ReportedStats { transfer_bytes_per_second, steps, ..Default::default() };
        let included_request_ids = included.iter().map(u64::to_string).collect();
        self.state.apply(
            self.workers[worker].member,
            KvBatch { events, load, included_request_ids, ..Default::default() },
            stats,
        );
    }

    /// Records that the prompt has been prefilled, and how many of its tokens were cached; `None` for an answer that is continued. Returns
    /// why the other tokens were not cached; `None` if this router has not placed the request, or knows it already.
    pub fn on_prefilled(&mut self, booking: VirtualBooking, cached_tokens: Option<u32>) -> Option<Funnel> {
        self.state.on_prefilled(booking.0, cached_tokens)
    }

    /// Records that the answer is complete, with this number of tokens.
    pub fn on_answered(&mut self, booking: VirtualBooking, generated_tokens: u64) {
        self.state.on_answered(booking.0, generated_tokens);
    }

    /// Removes the booking and its load.
    pub fn release(&mut self, booking: VirtualBooking) {
        self.state.release(booking.0);
    }

    /// Returns the number of bookings.
    pub fn bookings(&self) -> usize {
        self.state.bookings.by_id.len()
    }
}

fn placement_request(request: &VirtualRequest) -> PlacementRequest {
    PlacementRequest {
        request_id: request.id.to_string().into(),
        model: MODEL.to_owned(),
        hashes: request.hashes.clone(),
        prompt_tokens: request.prompt_tokens,
        samples: 1,
        min_tokens: 0,
        max_tokens: request.max_tokens,
        prompt_logits: false,
        has_images: false,
        account: "".into(),
        priority: Priority::default(),
        max_wait: request.max_wait,
        equal_prompt: None,
        other_namespace_blocks: 0,
        endpoints: None,
    }
}

/// Operations that the service does in slices, each in one step.
impl ClusterState {
    /// Applies all events of the batch, and then its load.
    pub(crate) fn apply(&mut self, id: MemberId, batch: KvBatch, stats: ReportedStats) {
        if let Some(worker) = self.members.indexed(id).filter(|_| !batch.events.is_empty()) {
            let applied = worker.apply(&batch.events);
            assert_eq!(applied.beyond_capacity, None, "a simulated worker caches no more blocks than it has");
            self.members.on_applied(id, &applied);
        }
        self.members.report(id, batch.load, stats, &batch.included_request_ids);
    }

    pub(crate) fn join_empty(&mut self, info: WorkerInfo) -> Result<MemberId, JoinError> {
        let index = self.members.index.clone();
        self.join(info, "host:1".to_owned(), index.replacement())
    }

    /// Returns each member as a candidate for a placement. No member is excluded.
    pub(crate) fn candidates(&self, hashes: &[SequenceHash]) -> Vec<Candidate> {
        let members: Vec<&Member> = self.members.values().collect();
        self.members.candidates(&members, hashes, &BTreeSet::new(), None, &self.settings.costs)
    }
}
