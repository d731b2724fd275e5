//! Clusters of workers with models of engines ([`super::engine`]). Prefill workers transfer the KV of their prompts to a decode worker.

use super::{
    Micros, Prompt,
    engine::{BLOCK_TOKENS, Sequence, Worker},
    namespace,
    rules::Rule,
};
use crate::{
    cluster::{Cluster, Excluded, PlacementRequest},
    route::{self, Candidate, PlacementQuery},
    settings::{Costs, PrefillPlace, RouterSettings},
    subscription::ReportedStats,
    worker_bookings::BookingId,
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    time::Duration,
};
use tandem_kv::{HashKey, KvBatch, sequence_hashes};
use tandem_node::Metrics;
use tandem_proto::v1::{WorkerInfo, worker_info::Role};
use tokio::{runtime::Runtime, time::Instant};

/// The time to transfer the KV of one token, in microseconds: 128 KiB at 10 GB/s.
const TRANSFER_TOKEN_US: f64 = 13.1;

/// The simulated cluster.
#[derive(Clone)]
pub(super) struct World {
    pub(super) rule: Rule,
    pub(super) prefill: PrefillPlace,
    /// The role of each worker, and the factor by which its device is slower than the default.
    pub(super) devices: Vec<(Role, f64)>,
    pub(super) capacity_blocks: u32,
    pub(super) costs: Costs,
    pub(super) seed: u64,
}

/// The outcome of a simulation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    /// The fraction of prompt blocks found in caches.
    pub(super) hit_rate: f64,
    /// The mean time to the first token, in seconds.
    pub(super) ttft_mean_s: f64,
    pub(super) ttft_p99_s: f64,
    /// The mean time to the last token, in seconds.
    pub(super) end_mean_s: f64,
    /// Number of preempted sequences.
    pub(super) preemptions: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives(usize),
    Stepped(usize),
    Sent { from: usize, to: usize, request: usize },
}

struct Request {
    booking: BookingId,
    decode: usize,
    cached: u32,
    first_token: Option<Micros>,
}

struct Simulation<'a> {
    world: World,
    prompts: &'a [Prompt],
    router: Cluster,
    runtime: &'a Runtime,
    began: Instant,
    workers: Vec<Worker>,
    events: BinaryHeap<Reverse<(Micros, u64, Event)>>,
    scheduled: u64,
    requests: BTreeMap<usize, Request>,
    turns: u64,
    found: u64,
    ttft_s: Vec<f64>,
    end_s: f64,
    preemptions: u64,
}

/// Simulates requests with these prompts on the cluster `world`, in simulated time.
pub(super) fn simulate(world: World, prompts: &[Prompt]) -> Outcome {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("the runtime can be built");
    let _entered = runtime.enter();
    let settings = RouterSettings {
        prefill: world.prefill,
        costs: world.costs,
        seed: world.seed,
        bookings_max: usize::MAX,
        ..Default::default()
    };
    let router = Cluster::new(settings, Metrics::default());
    let workers = world.devices.iter().enumerate().map(|(number, (role, slower))| {
        let info = WorkerInfo {
            role: (*role).into(),
            worker_id: number.to_string(),
            instance_id: number.to_string(),
            model: "m".to_owned(),
            block_size: BLOCK_TOKENS as u32,
            capacity_blocks: world.capacity_blocks,
            block_bytes: BLOCK_TOKENS * 131_072,
            ..Default::default()
        };
        let member = router.lock().join_empty(info).expect("the worker may join");
        Worker::new(member, *role, *slower, world.capacity_blocks)
    });
    let mut simulation = Simulation {
        workers: workers.collect(),
        world,
        prompts,
        router,
        runtime: &runtime,
        began: Instant::now(),
        events: BinaryHeap::new(),
        scheduled: 0,
        requests: BTreeMap::new(),
        turns: 0,
        found: 0,
        ttft_s: Vec::new(),
        end_s: 0.0,
        preemptions: 0,
    };
    simulation.run();
    simulation.outcome()
}

impl Simulation<'_> {
    fn run(&mut self) {
        for (request, prompt) in self.prompts.iter().enumerate() {
            self.at(prompt.at, Event::Arrives(request));
        }
        while let Some(Reverse((now, _, event))) = self.events.pop() {
            let until = self.began + Duration::from_micros(now);
            if until > Instant::now() {
                self.runtime.block_on(tokio::time::advance(until - Instant::now()));
            }
            match event {
                Event::Arrives(request) => self.arrives(now, request),
                Event::Stepped(worker) => self.stepped(now, worker),
                Event::Sent { from, to, request } => self.sent(now, from, to, request),
            }
        }
        assert_eq!(self.ttft_s.len(), self.prompts.len(), "every prompt is answered");
        assert_eq!(self.router.lock().view().bookings, 0);
        assert!(self.workers.iter().all(|worker| worker.cache.counts().in_use == 0));
    }

    fn at(&mut self, when: Micros, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((when, self.scheduled, event)));
    }

    fn arrives(&mut self, now: Micros, request: usize) {
        let prompt = &self.prompts[request];
        let placement_request = PlacementRequest {
            request_id: request.to_string().into(),
            model: String::new(),
            hashes: sequence_hashes(&HashKey::NONE, &namespace(), 1, &prompt.blocks).into(),
            prompt_tokens: (prompt.blocks.len() as u64 * BLOCK_TOKENS) as u32,
            samples: 1,
            max_tokens: prompt.max_tokens,
            prompt_logits: false,
            account: "".into(),
            max_wait: None,
        };
        let excluded = self.exclude_by_rule(&placement_request);
        let (booking, placement) = self.router.lock().place(&placement_request, &excluded, 1).expect("a worker is eligible");
        let number = |candidate: tandem_proto::v1::Candidate| -> usize {
            candidate.worker.and_then(|worker| worker.worker_id.parse().ok()).expect("the placement names a simulated worker")
        };
        let decode = number(placement.decode.expect("every placement has a decode worker"));
        let computes = placement.prefill.map_or(decode, number);
        self.requests.insert(request, Request { booking, decode, cached: 0, first_token: None });
        let worker = &mut self.workers[computes];
        let own = (prompt.blocks.len() - worker.known_blocks(prompt, self.prompts)) as u64 * BLOCK_TOKENS;
        worker.waiting.push_back(Sequence::new(request, own, false));
        if computes != decode {
            self.workers[decode].expected += 1;
            self.report(decode, vec![request.to_string()]);
        }
        self.report(computes, vec![request.to_string()]);
        self.start(now, computes);
    }

    /// Excludes all workers but those that the simulated rule chooses, one of each role. If the rule is the router's own, excludes none.
    fn exclude_by_rule(&mut self, placement_request: &PlacementRequest) -> Excluded {
        let candidates = self.router.lock().candidates(&placement_request.hashes);
        let query = PlacementQuery {
            prompt_tokens: placement_request.prompt_tokens,
            block_size: BLOCK_TOKENS as u32,
            prefill: self.world.prefill,
            prompt_logits: false,
        };
        self.turns += 1;
        let has_prefill_workers = candidates.iter().any(|worker| worker.role == route::Role::Prefill);
        let mut failed = BTreeSet::new();
        for role in [route::Role::Prefill, route::Role::Decode] {
            let positions: Vec<usize> = (0..candidates.len()).filter(|at| candidates[*at].role == role).collect();
            let mut of_role: Vec<Candidate> = positions.iter().map(|at| candidates[*at].clone()).collect();
            if role == route::Role::Decode && has_prefill_workers {
                // These rules choose the decode worker of a pair by its load alone.
                of_role.iter_mut().for_each(|worker| worker.overlap_blocks = 0);
            }
            if let Some(chosen) = self.world.rule.choose(&query, &of_role, self.turns) {
                failed.extend(positions.iter().filter(|at| **at != positions[chosen]).map(|at| at.to_string().into()));
            }
        }
        Excluded { failed, ..Default::default() }
    }

    fn start(&mut self, now: Micros, number: usize) {
        let worker = &mut self.workers[number];
        if worker.step.is_some() {
            return;
        }
        self.preemptions += worker.grow(self.prompts);
        worker.admit(self.prompts);
        self.preemptions += worker.grow(self.prompts);
        if let Some((step, time)) = worker.plan(self.prompts) {
            worker.step = Some(step);
            self.at(now + time as Micros, Event::Stepped(number));
        }
    }

    fn stepped(&mut self, now: Micros, number: usize) {
        let worker = &mut self.workers[number];
        let step = worker.step.take().expect("a step was running");
        let mut ended = Vec::new();
        for (at, tokens) in step.into_iter().enumerate() {
            let prefills = worker.running[at].remaining(self.prompts) > 0;
            let sequence = &mut worker.running[at];
            sequence.computed += tokens;
            if prefills {
                worker.commit(at, self.prompts);
            } else {
                worker.running[at].generated += 1;
            }
            let cached = worker.running[at].cached.take();
            let sequence = &worker.running[at];
            let answer_tokens = self.prompts[sequence.request].answer_tokens;
            let done = if worker.role == Role::Prefill {
                sequence.remaining(self.prompts) == 0
            } else {
                !prefills && sequence.generated >= answer_tokens
            };
            if done {
                ended.push(sequence.request);
            }
            let request = self.requests.get_mut(&sequence.request).expect("the request is running");
            if let Some(cached) = cached {
                request.cached = cached;
                self.found += u64::from(cached);
            }
            let first = worker.role != Role::Prefill && sequence.remaining(self.prompts) == 0 && request.first_token.is_none();
            if first {
                request.first_token = Some(now);
                self.ttft_s.push((now - self.prompts[sequence.request].at) as f64 / 1e6);
                self.router.lock().on_prefilled(request.booking, Some(request.cached));
            }
        }
        for request in ended {
            self.ends(now, number, request);
        }
        self.start(now, number);
        self.report(number, vec![]);
    }

    /// Ends the request's sequence on worker `number`, which has completed its share of the request.
    fn ends(&mut self, now: Micros, number: usize, request: usize) {
        let worker = &mut self.workers[number];
        let at = worker.running.iter().position(|sequence| sequence.request == request).expect("the sequence is running");
        let mut sequence = worker.running.remove(at);
        if worker.role == Role::Prefill {
            let time = sequence.blocks.len() as f64 * BLOCK_TOKENS as f64 * TRANSFER_TOKEN_US;
            worker.sending.push(sequence);
            let to = self.requests[&request].decode;
            return self.at(now + time as Micros, Event::Sent { from: number, to, request });
        }
        worker.release(&mut sequence);
        self.end_s += (now - self.prompts[request].at) as f64 / 1e6;
        let answer_tokens = self.prompts[request].answer_tokens;
        let request = self.requests.remove(&request).expect("the request is running");
        let mut router = self.router.lock();
        router.on_answered(request.booking, answer_tokens);
        router.release(request.booking);
    }

    fn sent(&mut self, now: Micros, from: usize, to: usize, request: usize) {
        let worker = &mut self.workers[from];
        let at = worker.sending.iter().position(|sequence| sequence.request == request).expect("the sequence is being sent");
        let mut sequence = worker.sending.remove(at);
        worker.release(&mut sequence);
        self.report(from, vec![]);
        self.start(now, from);
        let worker = &mut self.workers[to];
        worker.expected -= 1;
        worker.waiting.push_back(Sequence::new(request, 0, true));
        self.report(to, vec![]);
        self.start(now, to);
    }

    fn report(&mut self, number: usize, included_request_ids: Vec<String>) {
        let worker = &mut self.workers[number];
        let load = worker.load(self.prompts);
        let events = worker.take_events();
        let batch = KvBatch { last_event_id: worker.cache.last_event_id(), events, load, included_request_ids, step: None };
        let stats = ReportedStats { steps: Some(worker.totals), ..ReportedStats::default() };
        self.router.lock().apply(worker.member, batch, stats);
    }

    fn outcome(mut self) -> Outcome {
        let blocks: usize = self.prompts.iter().map(|prompt| prompt.blocks.len()).sum();
        let count = self.ttft_s.len();
        self.ttft_s.sort_by(f64::total_cmp);
        Outcome {
            hit_rate: self.found as f64 / blocks as f64,
            ttft_mean_s: self.ttft_s.iter().sum::<f64>() / count as f64,
            ttft_p99_s: self.ttft_s[count * 99 / 100],
            end_mean_s: self.end_s / count as f64,
            preemptions: self.preemptions,
        }
    }
}
