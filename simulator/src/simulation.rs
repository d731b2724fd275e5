//! The events of a simulation: requests arrive, steps end, and KV is received.

use crate::{
    Cluster, Policy, Request,
    policy::Query,
    request::Arrived,
    worker::{Engine, Sequence, Stepped},
};
use std::{cmp::Reverse, collections::BinaryHeap, ops::ControlFlow, rc::Rc, sync::Arc, time::Duration};
use tandem_load::report::{Answer, Cached, Expected, Failure, FailureClass, Outcome};
use tandem_router::{
    Candidate, PrefillPlace, Role, RouterSettings, VirtualPlacement, VirtualReport, VirtualRequest, VirtualRouter, VirtualWorker,
};

/// What a simulation counts besides the outcomes of requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// The requests that ended, answered or refused.
    pub requests: u64,
    /// The sequences that gave their blocks back and were computed again.
    pub preemptions: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Stepped(usize),
    Received { from: usize, to: usize, request: u64 },
}

struct Simulation<'a> {
    cluster: &'a Cluster,
    router: VirtualRouter,
    workers: Vec<Engine>,
    names: Vec<Arc<str>>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    /// The number of events so far, which orders events of one time.
    scheduled: u64,
    arrived: u64,
    in_flight: usize,
    has_prefill_workers: bool,
    totals: Totals,
}

/// Simulates the requests, which are in the order of their times, on the cluster. `each` is called for each outcome, in the order of
/// their ends; it may abort the simulation. Its times are from the beginning, in virtual time. Memory is in proportion to the workers'
/// caches and to the requests in flight.
pub fn simulate(
    cluster: &Cluster,
    requests: impl IntoIterator<Item = Request>,
    each: &mut dyn FnMut(&Outcome) -> ControlFlow<()>,
) -> Totals {
    let mut simulation = Simulation::new(cluster);
    let _ = simulation.run(requests.into_iter(), each);
    simulation.totals
}

impl<'a> Simulation<'a> {
    fn new(cluster: &'a Cluster) -> Self {
        let settings = RouterSettings {
            prefill: cluster.prefill,
            costs: cluster.costs,
            // The router seeds its tie-break with this number, so that equal simulations have equal results.
            seed: cluster.seed,
            ..RouterSettings::default()
        };
        let (mut router, capacity_blocks) = (VirtualRouter::new(settings), cluster.capacity_blocks());
        let block_bytes = (cluster.block_tokens as f64 * cluster.device.kv_bytes_per_token) as u64;
        let workers = cluster.workers.iter().map(|worker| {
            router.join(VirtualWorker {
                role: worker.role,
                block_size: cluster.block_tokens as u32,
                capacity_blocks,
                block_bytes,
            });
            Engine::new(worker.role, worker.slower, cluster.device, cluster.block_tokens, capacity_blocks)
        });
        Self {
            workers: workers.collect(),
            names: cluster.worker_names().map(Arc::from).collect(),
            cluster,
            router,
            events: BinaryHeap::new(),
            scheduled: 0,
            arrived: 0,
            in_flight: 0,
            has_prefill_workers: cluster.has_prefill_workers(),
            totals: Totals::default(),
        }
    }

    fn run(
        &mut self,
        requests: impl Iterator<Item = Request>,
        each: &mut dyn FnMut(&Outcome) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        let (mut requests, mut now) = (requests.peekable(), 0);
        loop {
            let due = requests.peek().and_then(|request| match self.cluster.concurrency {
                None => Some((request.at.as_micros() as u64).max(now)),
                Some(max) => (self.in_flight < max).then_some(now),
            });
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
                    Event::Stepped(worker) => self.stepped(now, worker, each)?,
                    Event::Received { from, to, request } => self.received(now, from, to, request),
                }
            } else {
                break;
            }
        }
        assert_eq!((self.router.bookings(), self.in_flight), (0, 0), "every request ends");
        assert!(self.workers.iter().all(|worker| worker.cache.counts().in_use == 0), "idle workers use no blocks");
        ControlFlow::Continue(())
    }

    fn at(&mut self, when: u64, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((when, self.scheduled, event)));
    }

    fn arrives(&mut self, now: u64, request: &Request, each: &mut dyn FnMut(&Outcome) -> ControlFlow<()>) -> ControlFlow<()> {
        let mut arrived = Arrived::new(self.arrived, now, request);
        self.arrived += 1;
        // An answer that does not fit is shorter, as on a real worker.
        let capacity_tokens = u64::from(self.cluster.capacity_blocks()) * self.cluster.block_tokens;
        let headroom = capacity_tokens.saturating_sub(arrived.prompt_tokens);
        if headroom == 0 {
            self.totals.requests += 1;
            return each(&refused(now, request));
        }
        arrived.answer_tokens = arrived.answer_tokens.min(headroom);
        let arrived = Rc::new(arrived);
        let placement = self.place(&arrived, request);
        let computes = placement.prefill.unwrap_or(placement.decode);
        let own = self.workers[computes].own_tokens(&arrived);
        let number = arrived.number;
        self.workers[computes].waiting.push_back(Sequence::new(arrived, placement, own));
        self.in_flight += 1;
        if computes != placement.decode {
            self.workers[placement.decode].expected += 1;
            self.report(placement.decode, &[number]);
        }
        self.report(computes, &[number]);
        self.start(now, computes);
        ControlFlow::Continue(())
    }

    fn place(&mut self, arrived: &Arrived, request: &Request) -> VirtualPlacement {
        let reusable = arrived.reusable_blocks(self.cluster.block_tokens) as usize;
        let virtual_request = VirtualRequest {
            id: arrived.number,
            hashes: arrived.hashes.clone(),
            prompt_tokens: request.prompt_tokens,
            max_tokens: request.max_tokens,
        };
        if self.cluster.policy == Policy::Tandem {
            return self.router.place(&virtual_request).expect("the prompt fits on every worker");
        }
        let candidates = self.router.candidates(&arrived.hashes[..reusable]);
        let choose = |role: Role, by_load: bool| {
            let numbers: Vec<usize> = (0..candidates.len()).filter(|at| candidates[*at].role == role).collect();
            let workers: Vec<&Candidate> = numbers.iter().map(|at| &candidates[*at]).collect();
            let query = Query {
                prompt_tokens: arrived.prompt_tokens,
                block_tokens: self.cluster.block_tokens,
                by_load,
                number: arrived.number,
                seed: self.cluster.seed,
            };
            Some(numbers[self.cluster.policy.choose(&query, &workers)?])
        };
        let prefill = choose(Role::Prefill, false);
        let decode = choose(Role::Decode, self.has_prefill_workers).expect("every cluster has a decode worker");
        self.router.book(&virtual_request, decode, prefill)
    }

    fn start(&mut self, now: u64, number: usize) {
        let (time, preempted) = self.workers[number].begin_step(now);
        self.totals.preemptions += preempted;
        if let Some(time) = time {
            self.at(now + time, Event::Stepped(number));
        }
    }

    fn stepped(&mut self, now: u64, number: usize, each: &mut dyn FnMut(&Outcome) -> ControlFlow<()>) -> ControlFlow<()> {
        let Stepped { first, ended } = self.workers[number].end_step(now);
        for (placement, cached_blocks) in first {
            self.router.on_prefilled(placement.booking, cached_blocks * self.cluster.block_tokens as u32);
        }
        for mut sequence in ended {
            if self.workers[number].role == Role::Prefill {
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
        ControlFlow::Continue(())
    }

    /// Sends the KV of a prompt that is computed. Blocks are sent while later chunks are computed, so at most the transfer of the last
    /// chunk remains, unless transfers are slower than the computation. Blocks that the decode worker has cached are not sent.
    fn send(&mut self, now: u64, from: usize, sequence: Sequence) {
        let (device, to) = (&self.cluster.device, sequence.placement.decode);
        let has = u64::from(self.workers[to].cached_blocks(&sequence.request)) * self.cluster.block_tokens;
        let lacking = sequence.request.prompt_tokens - has;
        let time = |tokens: u64| {
            let bytes = tokens as f64 * device.kv_bytes_per_token;
            (bytes / device.transfer_bytes_per_second * 1e6).round() as u64
        };
        let rest = time(lacking).saturating_sub(now - sequence.admitted);
        let wait = rest.max(time(lacking.min(sequence.step_tokens)));
        let request = sequence.request.number;
        self.workers[from].has_sent = true;
        self.workers[from].sending.push(sequence);
        self.at(now + wait, Event::Received { from, to, request });
    }

    fn received(&mut self, now: u64, from: usize, to: usize, request: u64) {
        let worker = &mut self.workers[from];
        let at = worker.sending.iter().position(|sequence| sequence.request.number == request);
        let mut sequence = worker.sending.remove(at.expect("the sequence is being sent"));
        worker.release(&mut sequence);
        self.report(from, &[]);
        self.start(now, from);
        let worker = &mut self.workers[to];
        worker.expected -= 1;
        worker.waiting.push_back(sequence.received());
        self.report(to, &[]);
        self.start(now, to);
    }

    fn report(&mut self, number: usize, included: &[u64]) {
        let worker = &mut self.workers[number];
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

    fn outcome(&self, now: u64, sequence: Sequence) -> Outcome {
        let Sequence { request, placement, cached_blocks, sampled, times, .. } = sequence;
        let cached = u64::from(cached_blocks.expect("the request was computed")) * self.cluster.block_tokens;
        let name = |number: usize| Some(self.names[number].clone());
        let answer = Answer {
            first_token: times.first.map(Duration::from_micros),
            gaps: times.gaps,
            prompt_tokens: Some(request.prompt_tokens),
            output_tokens: sampled,
            cached: Cached::Counted(cached),
            prefill_worker: name(placement.prefill.unwrap_or(placement.decode)),
            decode_worker: name(placement.decode),
        };
        let due = Duration::from_micros(request.at);
        Outcome { due, sent: due, ended: Duration::from_micros(now), expected: Expected::default(), result: Ok(answer) }
    }
}

fn refused(now: u64, request: &Request) -> Outcome {
    let due = Duration::from_micros(now);
    let message = format!("the prompt of {} tokens does not fit in a worker's KV memory", request.prompt_tokens);
    let failure = Failure { class: FailureClass::Status(400), message };
    Outcome { due, sent: due, ended: due, expected: Expected::default(), result: Err(failure) }
}

/// Whether the router needs prefill workers that the cluster lacks.
pub(crate) fn lacks_prefill_workers(cluster: &Cluster) -> bool {
    cluster.policy == Policy::Tandem && cluster.prefill == PrefillPlace::Remote && !cluster.has_prefill_workers()
}
