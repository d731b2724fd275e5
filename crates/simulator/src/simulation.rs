//! Runs a simulation. Its events are: a request arrives, a step ends, KV is received, a worker is lost, and a worker returns.

mod scale;

use crate::{
    RoutingRule, SimulatedCluster, SimulatedRequest, SimulatedWorker,
    faults::Draws,
    policy::Query,
    request::Arrived,
    scaling::Scaler,
    worker::{SimulatedEngine, SimulatedSequence, Stepped, micros},
};
use std::{cmp::Reverse, collections::BinaryHeap, ops::ControlFlow, rc::Rc, sync::Arc, time::Duration};
use tandem_load::report::{CachedCount, Expected, Failure, FailureClass, MeasuredAnswer, RequestOutcome};
use tandem_router::{
    Candidate, Funnel, PrefillPlace, RouterSettings, VirtualBooking, VirtualPlacement, VirtualReport, VirtualRequest,
    VirtualRouter, VirtualWorker, WorkerRole,
};

/// The maximum number of placements of a request before its first token, and the maximum number of times that one answer is continued on
/// another worker. These are the defaults of routers and frontends.
const ATTEMPTS_MAX: u32 = 3;
const RESUMES_MAX: u32 = 8;

/// The counts of a simulation that the outcomes of its requests do not contain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// The number of requests that ended with an answer or a refusal.
    pub requests: u64,
    /// The number of preemptions: sequences that gave their blocks back and were computed again.
    pub preemptions: u64,
    /// The number of losses of workers.
    pub losses: u64,
    /// The number of times that a request was placed again before it had received a token from its latest placement.
    pub retried: u64,
    /// The number of times that an answer was continued on another worker after a token.
    pub resumed: u64,
    /// The time for which all workers together were present, or started, in a cluster whose number of workers changes.
    pub paid: Duration,
    /// The number of decisions that have changed the number of workers.
    pub changes: u64,
    /// What could have been cached of the prompts that were computed, and why the rest was not.
    pub prefix: Funnel,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum SimulationEvent {
    /// A step of a worker has ended. `losses` is the number of the worker's losses before the step began. If the worker was lost during the
    /// step, the numbers differ and the event is ignored.
    Stepped {
        worker: usize,
        losses: u64,
    },
    Received {
        from: usize,
        to: usize,
        booking: VirtualBooking,
    },
    /// The worker is lost for this number of microseconds; `None`: forever.
    Lost {
        worker: usize,
        lasts: Option<u64>,
    },
    RandomLoss,
    Returned(usize),
    /// The number of workers is decided.
    Scale,
    /// A worker that was started joins.
    Started,
}

struct Simulation<'a> {
    cluster: &'a SimulatedCluster,
    router: VirtualRouter,
    workers: Vec<SimulatedEngine>,
    scaler: Option<Scaler>,
    names: Vec<Arc<str>>,
    events: BinaryHeap<Reverse<(u64, u64, SimulationEvent)>>,
    /// The number of events that were scheduled so far. It orders events that occur at the same time.
    scheduled: u64,
    arrived: u64,
    in_flight: usize,
    has_prefill_workers: bool,
    draws: Option<Draws>,
    totals: Totals,
}

/// Simulates the requests on the cluster. The requests must be in the order of their times. `each` is called with each outcome, in the order
/// in which requests end, and may abort the simulation. The times of an outcome are virtual and counted from the beginning. Memory is in
/// proportion to the workers' caches and to the requests in flight.
pub fn simulate(
    cluster: &SimulatedCluster,
    requests: impl IntoIterator<Item = SimulatedRequest>,
    each: &mut dyn FnMut(&RequestOutcome) -> ControlFlow<()>,
) -> Totals {
    let mut simulation = Simulation::new(cluster);
    let _ = simulation.run(requests.into_iter(), each);
    simulation.totals
}

impl<'a> Simulation<'a> {
    fn new(cluster: &'a SimulatedCluster) -> Self {
        let settings = RouterSettings {
            prefill: cluster.prefill,
            costs: cluster.costs,
            levels: cluster.levels,
            // The router seeds its tie-break with this number, so that equal simulations have equal results.
            seed: cluster.seed,
            ..RouterSettings::default()
        };
        let mut simulation = Self {
            router: VirtualRouter::new(settings),
            workers: Vec::new(),
            scaler: cluster.scaling.clone().map(|scaling| Scaler::new(scaling, cluster.workers.iter().map(|worker| worker.role))),
            names: cluster.worker_names().map(Arc::from).collect(),
            cluster,
            events: BinaryHeap::new(),
            scheduled: 0,
            arrived: 0,
            in_flight: 0,
            has_prefill_workers: cluster.has_prefill_workers(),
            draws: cluster.faults.random.map(|losses| Draws::new(losses, cluster.seed)),
            totals: Totals::default(),
        };
        for &SimulatedWorker { role, slower } in &cluster.workers {
            simulation.join(role, slower, 0);
        }
        for loss in &cluster.faults.losses {
            simulation.at(micros(loss.at), SimulationEvent::Lost { worker: loss.worker, lasts: loss.lasts.map(micros) });
        }
        simulation.schedule_random_loss(0);
        simulation.schedule_scaling(0);
        simulation
    }

    fn join(&mut self, role: WorkerRole, slower: f64, now: u64) {
        let (SimulatedCluster { device, block_tokens, .. }, capacity_blocks) = (self.cluster, self.cluster.capacity_blocks());
        self.router.join(VirtualWorker {
            role,
            block_size: *block_tokens as u32,
            capacity_blocks,
            block_bytes: (*block_tokens as f64 * device.kv_bytes_per_token) as u64,
            step_tokens: device.step_tokens as u32,
        });
        self.workers.push(SimulatedEngine::new(role, slower, *device, *block_tokens, capacity_blocks, now));
    }

    /// Adds a worker to a running cluster.
    fn add_worker(&mut self, role: WorkerRole, now: u64) {
        let number = self.workers.len();
        self.join(role, 1.0, now);
        self.names.push(format!("worker-{number}").into());
        self.report(number, &[]);
    }

    fn run(
        &mut self,
        requests: impl Iterator<Item = SimulatedRequest>,
        each: &mut dyn FnMut(&RequestOutcome) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let (mut requests, mut now) = (requests.peekable(), 0);
        loop {
            let due = requests.peek().and_then(|request| match self.cluster.concurrency {
                None => Some(micros(request.at).max(now)),
                Some(max) => (self.in_flight < max).then_some(now),
            });
            if due.is_none() && self.in_flight == 0 {
                // The only events that are left concern workers, so no further request can end.
                if self.scaler.is_some() {
                    self.totals.paid += self.paid_by_present(now);
                }
                break;
            }
            let next = self.events.peek().map(|Reverse((at, _, _))| *at);
            if let Some(due) = due.filter(|due| next.is_none_or(|next| *due <= next)) {
                now = due;
                self.router.set_time(Duration::from_micros(now));
                let request = requests.next().expect("it was peeked");
                self.arrives(now, &request, each)?;
            } else if let Some(Reverse((at, _, event))) = self.events.pop() {
                now = at;
                self.router.set_time(Duration::from_micros(now));
                match event {
                    SimulationEvent::Stepped { worker, losses } if losses == self.workers[worker].losses => {
                        self.stepped(now, worker, each)?
                    }
                    SimulationEvent::Stepped { .. } => {}
                    SimulationEvent::Received { from, to, booking } => self.received(now, from, to, booking),
                    SimulationEvent::Lost { worker, lasts } => self.lost(now, worker, lasts, each)?,
                    SimulationEvent::RandomLoss => self.random_loss(now, each)?,
                    SimulationEvent::Returned(worker) => self.returned(worker),
                    SimulationEvent::Scale => self.scale(now),
                    SimulationEvent::Started => self.started(now),
                }
            } else {
                unreachable!("a request in flight has an event");
            }
        }
        assert_eq!((self.router.bookings(), self.in_flight), (0, 0), "every request ends");
        assert!(self.workers.iter().all(|worker| worker.cache.counts().in_use == 0), "idle workers use no blocks");
        ControlFlow::Continue(())
    }

    fn at(&mut self, when: u64, event: SimulationEvent) {
        self.scheduled += 1;
        self.events.push(Reverse((when, self.scheduled, event)));
    }

    fn arrives(
        &mut self,
        now: u64,
        request: &SimulatedRequest,
        each: &mut dyn FnMut(&RequestOutcome) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let mut arrived = Arrived::new(self.arrived, now, request);
        self.arrived += 1;
        // An answer that does not fit into the KV memory is cut short, as on a real worker.
        let capacity_tokens = u64::from(self.cluster.capacity_blocks()) * self.cluster.block_tokens;
        let headroom = capacity_tokens.saturating_sub(arrived.prompt_tokens);
        if headroom == 0 {
            self.totals.requests += 1;
            let message = format!("the prompt of {} tokens does not fit in a worker's KV memory", request.prompt_tokens);
            return each(&failed(now, &arrived, FailureClass::Status(400), &message));
        }
        arrived.answer_tokens = arrived.answer_tokens.min(headroom);
        match self.place(&arrived, 0, 1) {
            Some(placement) => {
                self.in_flight += 1;
                self.enqueue(now, SimulatedSequence::new(Rc::new(arrived), placement));
                ControlFlow::Continue(())
            }
            None => {
                self.totals.requests += 1;
                each(&failed(now, &arrived, FailureClass::Status(503), NO_WORKER))
            }
        }
    }

    /// Places a request whose answer has `generated` tokens so far. Returns `None` if no worker can take it.
    fn place(&mut self, arrived: &Arrived, generated: u64, attempt: u32) -> Option<VirtualPlacement> {
        let reusable = arrived.reusable_blocks(self.cluster.block_tokens) as usize;
        let prompt_tokens = arrived.prompt_tokens + generated;
        let virtual_request = VirtualRequest {
            id: arrived.number,
            hashes: arrived.hashes.clone(),
            prompt_tokens: prompt_tokens as u32,
            max_tokens: arrived.max_tokens,
            max_wait: self.cluster.max_wait,
            attempt,
        };
        if self.cluster.policy == RoutingRule::Tandem {
            return self.router.place(&virtual_request);
        }
        let candidates = self.router.candidates(&arrived.hashes[..reusable]);
        let choose = |role: WorkerRole, by_load: bool| {
            let of_role = candidates.iter().filter(|(_, candidate)| candidate.role == role);
            let (numbers, workers): (Vec<usize>, Vec<&Candidate>) =
                of_role.map(|(number, candidate)| (*number, candidate)).unzip();
            let query = Query {
                prompt_tokens,
                block_tokens: self.cluster.block_tokens,
                by_load,
                number: arrived.number,
                seed: self.cluster.seed,
            };
            Some(numbers[self.cluster.policy.choose(&query, &workers)?])
        };
        let decode = choose(WorkerRole::Decode, self.has_prefill_workers)?;
        let prefill = choose(WorkerRole::Prefill, false);
        Some(self.router.book(&virtual_request, decode, prefill))
    }

    /// Adds a sequence to the queue of the worker that computes it.
    fn enqueue(&mut self, now: u64, sequence: SimulatedSequence) {
        let (placement, number) = (sequence.placement, sequence.request.number);
        let computes = placement.prefill.unwrap_or(placement.decode);
        self.workers[computes].enqueue(sequence);
        if computes != placement.decode {
            self.workers[placement.decode].expected += 1;
            self.report(placement.decode, &[number]);
        }
        self.report(computes, &[number]);
        self.start(now, computes);
    }

    fn schedule_random_loss(&mut self, now: u64) {
        if let Some(draws) = &mut self.draws {
            let at = now.saturating_add(micros(draws.pause()));
            self.at(at, SimulationEvent::RandomLoss);
        }
    }

    fn random_loss(&mut self, now: u64, each: &mut dyn FnMut(&RequestOutcome) -> ControlFlow<()>) -> ControlFlow<()> {
        self.schedule_random_loss(now);
        let present: Vec<usize> = (0..self.workers.len()).filter(|worker| self.workers[*worker].present).collect();
        match &mut self.draws {
            Some(draws) if !present.is_empty() => {
                let (worker, lasts) = (present[draws.below(present.len())], draws.losses.lasts);
                self.lost(now, worker, Some(micros(lasts)), each)
            }
            _ => ControlFlow::Continue(()),
        }
    }

    /// Simulates the loss of a worker. Frontends notice this at once, because the worker's connections break, and place its requests again.
    fn lost(
        &mut self,
        now: u64,
        number: usize,
        lasts: Option<u64>,
        each: &mut dyn FnMut(&RequestOutcome) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        if !self.workers[number].present {
            return ControlFlow::Continue(());
        }
        self.totals.losses += 1;
        self.router.leave(number);
        let mut lost = self.workers[number].lose();
        // The decode worker of a sequence that is lost on a prefill worker no longer expects it.
        for sequence in lost.iter().filter(|sequence| sequence.placement.decode != number) {
            self.workers[sequence.placement.decode].expected -= 1;
        }
        for other in 0..self.workers.len() {
            let cancelled = self.workers[other].cancel(number);
            if !cancelled.is_empty() {
                lost.extend(cancelled);
                self.start(now, other);
            }
            self.report(other, &[]);
        }
        if let Some(lasts) = lasts {
            self.at(now.saturating_add(lasts), SimulationEvent::Returned(number));
        }
        lost.sort_by_key(|sequence| sequence.request.number);
        lost.into_iter().try_for_each(|sequence| self.place_again(now, sequence, each))
    }

    /// Places a request again after one of its workers was lost. Its answer continues after the tokens that the client has received.
    fn place_again(
        &mut self,
        now: u64,
        mut sequence: SimulatedSequence,
        each: &mut dyn FnMut(&RequestOutcome) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        self.router.release(sequence.placement.booking);
        if sequence.has_token {
            (sequence.attempt, sequence.resumes) = (1, sequence.resumes + 1);
            self.totals.resumed += 1;
        } else {
            sequence.attempt += 1;
            self.totals.retried += 1;
        }
        let may_resume = sequence.attempt <= ATTEMPTS_MAX && sequence.resumes <= RESUMES_MAX;
        match may_resume.then(|| self.place(&sequence.request, sequence.sampled, sequence.attempt)).flatten() {
            Some(placement) => {
                self.enqueue(now, sequence.placed_again(placement));
                ControlFlow::Continue(())
            }
            None => {
                self.in_flight -= 1;
                self.totals.requests += 1;
                let class = if sequence.sampled > 0 { FailureClass::ErrorEvent } else { FailureClass::Status(503) };
                each(&failed(now, &sequence.request, class, NO_WORKER))
            }
        }
    }

    fn returned(&mut self, number: usize) {
        self.workers[number].present = true;
        self.router.rejoin(number);
        self.report(number, &[]);
    }

    fn start(&mut self, now: u64, number: usize) {
        let (time, preempted) = self.workers[number].begin_step(now);
        self.totals.preemptions += preempted;
        if let Some(time) = time {
            let losses = self.workers[number].losses;
            self.at(now + time, SimulationEvent::Stepped { worker: number, losses });
        }
    }

    fn stepped(&mut self, now: u64, number: usize, each: &mut dyn FnMut(&RequestOutcome) -> ControlFlow<()>) -> ControlFlow<()> {
        let Stepped { first, ended } = self.workers[number].end_step(now);
        for (placement, cached_blocks) in first {
            let cached_tokens = cached_blocks.map(|blocks| blocks * self.cluster.block_tokens as u32);
            if let Some(funnel) = self.router.on_prefilled(placement.booking, cached_tokens) {
                self.totals.prefix += funnel;
            }
        }
        for mut sequence in ended {
            if self.workers[number].role == WorkerRole::Prefill {
                self.send(now, number, sequence);
                continue;
            }
            self.workers[number].release(&mut sequence);
            self.in_flight -= 1;
            self.totals.requests += 1;
            self.router.on_answered(sequence.placement.booking, sequence.sampled);
            self.router.release(sequence.placement.booking);
            each(&self.outcome(now, sequence))?;
        }
        self.start(now, number);
        self.report(number, &[]);
        self.end_if_drained(now, number);
        ControlFlow::Continue(())
    }

    /// Sends the KV of a prompt that is computed. Blocks are sent while later chunks are computed, so at most the transfer of the last
    /// chunk remains, unless transfers are slower than the computation. Blocks that the decode worker has cached are not sent.
    fn send(&mut self, now: u64, from: usize, sequence: SimulatedSequence) {
        let (device, to) = (&self.cluster.device, sequence.placement.decode);
        let has = u64::from(self.workers[to].cached_blocks(&sequence.request)) * self.cluster.block_tokens;
        let lacking = sequence.target() - has;
        let time = |tokens: u64| {
            let bytes = tokens as f64 * device.kv_bytes_per_token;
            (bytes / device.transfer_bytes_per_second * 1e6).round() as u64
        };
        let rest = time(lacking).saturating_sub(now - sequence.admitted);
        let wait = rest.max(time(lacking.min(sequence.step_tokens)));
        let booking = sequence.placement.booking;
        self.workers[from].has_sent = true;
        self.workers[from].sending.push(sequence);
        self.at(now + wait, SimulationEvent::Received { from, to, booking });
    }

    fn received(&mut self, now: u64, from: usize, to: usize, booking: VirtualBooking) {
        let worker = &mut self.workers[from];
        // If one of the sequence's two workers was lost meanwhile, the sequence is not in `sending` any more.
        let Some(at) = worker.sending.iter().position(|sequence| sequence.placement.booking == booking) else { return };
        let mut sequence = worker.sending.remove(at);
        worker.release(&mut sequence);
        self.report(from, &[]);
        self.start(now, from);
        self.end_if_drained(now, from);
        let worker = &mut self.workers[to];
        worker.expected -= 1;
        worker.enqueue(sequence.received());
        self.report(to, &[]);
        self.start(now, to);
    }

    fn report(&mut self, number: usize, included: &[u64]) {
        let worker = &mut self.workers[number];
        if !worker.present || worker.drains {
            return;
        }
        let transfer_bytes_per_second = if worker.has_sent { self.cluster.device.transfer_bytes_per_second } else { 0.0 };
        let report = VirtualReport {
            events: worker.take_events(),
            load: worker.load(),
            included,
            generated_tokens: worker.generated_tokens,
            transfer_bytes_per_second,
        };
        self.router.report(number, report);
    }

    fn outcome(&self, now: u64, sequence: SimulatedSequence) -> RequestOutcome {
        let SimulatedSequence { request, begun_with, cached_blocks, sampled, times, .. } = sequence;
        let placement = begun_with.expect("the answer has a token");
        let cached = u64::from(cached_blocks.expect("the request was computed")) * self.cluster.block_tokens;
        let name = |number: usize| Some(self.names[number].clone());
        let answer = MeasuredAnswer {
            first_token: times.first.map(Duration::from_micros),
            gaps: times.gaps,
            prompt_tokens: Some(request.prompt_tokens),
            output_tokens: sampled,
            cached: CachedCount::Counted(cached),
            // The sums are in the totals.
            prefix: None,
            prefill_worker: name(placement.prefill.unwrap_or(placement.decode)),
            decode_worker: name(placement.decode),
        };
        let due = Duration::from_micros(request.at);
        RequestOutcome { due, sent: due, ended: Duration::from_micros(now), expected: Expected::default(), result: Ok(answer) }
    }
}

/// The message of a request that no worker can take.
const NO_WORKER: &str = "no worker can take the request";

fn failed(now: u64, request: &Arrived, class: FailureClass, message: &str) -> RequestOutcome {
    let due = Duration::from_micros(request.at);
    let failure = Failure { class, message: message.to_owned() };
    RequestOutcome { due, sent: due, ended: Duration::from_micros(now), expected: Expected::default(), result: Err(failure) }
}

/// Returns whether the router needs prefill workers and the cluster has none.
pub(crate) fn lacks_prefill_workers(cluster: &SimulatedCluster) -> bool {
    cluster.policy == RoutingRule::Tandem && cluster.prefill == PrefillPlace::Remote && !cluster.has_prefill_workers()
}
