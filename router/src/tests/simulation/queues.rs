//! Simulation of prefill workers, each modelled as a queue, a prefix cache and a rate, with one decode worker that costs nothing.

use super::{Micros, Prompt, documents, namespace, skipped, trace};
use crate::{
    cluster::{Cluster, Excluded, MemberId, PlacementRequest},
    settings::{PolicyKind, PrefillPlace, RouterSettings},
    subscription::ReportedStats,
    worker_bookings::BookingId,
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, HashSet, VecDeque},
};
use tandem_kv::{
    BlockId, CacheSettings, Change, HashKey, KvBatch, Load, PrefixCache, SequenceHash, TokenId, Wanted, sequence_hashes,
};
use tandem_node::Metrics;
use tandem_proto::v1::{WorkerInfo, worker_info::Role};

/// The modelled cluster.
#[derive(Clone, Copy)]
struct Setup {
    policy: PolicyKind,
    workers: usize,
    capacity_blocks: u32,
    /// Time to compute a block of tokens.
    block: Micros,
    /// Fixed time to compute any prompt, in addition to its blocks.
    overhead: Micros,
    /// Time from the first token to the last.
    decode: Micros,
    /// The number of concurrent requests; `None`: each request arrives at its recorded time.
    concurrency: Option<usize>,
    seed: u64,
}

/// The outcome of a simulation.
#[derive(Debug)]
struct Outcome {
    /// The fraction of prompt blocks found in caches.
    hit_rate: f64,
    /// The number of requests of the worker with the most requests, divided by the mean of all workers.
    requests_max: f64,
    /// The compute time of the worker that computes longest, divided by the mean of all workers.
    busy_max: f64,
    /// Time to the first token, in milliseconds.
    ttft_mean_ms: f64,
    ttft_p99_ms: f64,
}

struct Worker {
    member: MemberId,
    cache: PrefixCache,
    /// Hashes of the blocks in the worker's cache.
    cached: HashSet<SequenceHash>,
    /// The requests in the queue, each with the number of tokens that the worker is expected to compute for it.
    queue: VecDeque<(usize, u64)>,
    pending_tokens: u64,
    running: Option<Running>,
    requests: u64,
    busy: Micros,
}

struct Running {
    request: usize,
    blocks: Vec<BlockId>,
    cached: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives(usize),
    Computed(usize),
    Ends(usize),
}

struct Simulation<'a> {
    setup: Setup,
    prompts: &'a [Prompt],
    router: Cluster,
    decode: MemberId,
    decoding: u32,
    workers: Vec<Worker>,
    events: BinaryHeap<Reverse<(Micros, u64, Event)>>,
    scheduled: u64,
    bookings: BTreeMap<usize, BookingId>,
    arrived: Vec<Micros>,
    first_token: Vec<Micros>,
    found: u64,
}

fn simulate(setup: Setup, prompts: &[Prompt]) -> Outcome {
    let settings = RouterSettings {
        policy: setup.policy,
        prefill: PrefillPlace::Remote,
        seed: setup.seed,
        bookings_max: usize::MAX,
        ..Default::default()
    };
    let router = Cluster::new(settings, Metrics::default());
    let join = |role: Role, number: usize| {
        let info = WorkerInfo {
            role: role.into(),
            worker_id: format!("{role:?}-{number}"),
            instance_id: format!("{role:?}-{number}"),
            model: "m".to_owned(),
            block_size: 1,
            capacity_blocks: if role == Role::Decode { u32::MAX } else { setup.capacity_blocks },
            ..Default::default()
        };
        router.lock().join_empty(info).expect("the worker may join")
    };
    let decode = join(Role::Decode, 0);
    let workers = (0..setup.workers).map(|number| Worker {
        member: join(Role::Prefill, number),
        cache: PrefixCache::new(CacheSettings {
            capacity_blocks: setup.capacity_blocks,
            block_size: 1,
            prefix_caching: true,
            hash_key: HashKey::NONE,
        }),
        cached: HashSet::new(),
        queue: VecDeque::new(),
        pending_tokens: 0,
        running: None,
        requests: 0,
        busy: 0,
    });
    let workers = workers.collect();
    let mut simulation = Simulation {
        setup,
        prompts,
        router,
        decode,
        decoding: 0,
        workers,
        events: BinaryHeap::new(),
        scheduled: 0,
        bookings: BTreeMap::new(),
        arrived: vec![0; prompts.len()],
        first_token: vec![0; prompts.len()],
        found: 0,
    };
    simulation.run();
    simulation.outcome()
}

impl Worker {
    /// Returns how many leading blocks of a prompt are cached, or will be computed by prompts that are queued or running.
    fn known_blocks(&self, blocks: &[TokenId], prompts: &[Prompt]) -> usize {
        let hashes = sequence_hashes(&HashKey::NONE, &namespace(), 1, &blocks[..blocks.len() - 1]);
        let cached = hashes.iter().take_while(|hash| self.cached.contains(hash)).count();
        let before = self.queue.iter().map(|(request, _)| *request).chain(self.running.iter().map(|running| running.request));
        let common = |request: usize| prompts[request].blocks.iter().zip(blocks).take_while(|(one, other)| one == other).count();
        before.map(common).max().unwrap_or(0).max(cached)
    }
}

impl Simulation<'_> {
    fn run(&mut self) {
        let first = self.setup.concurrency.unwrap_or(usize::MAX).min(self.prompts.len());
        let mut next = first;
        for request in 0..first {
            let at = if self.setup.concurrency.is_some() { 0 } else { self.prompts[request].at };
            self.at(at, Event::Arrives(request));
        }
        while let Some(Reverse((now, _, event))) = self.events.pop() {
            match event {
                Event::Arrives(request) => self.arrives(now, request),
                Event::Computed(worker) => self.computed(now, worker),
                Event::Ends(request) => {
                    self.decoding -= 1;
                    self.router.lock().release(self.bookings.remove(&request).expect("the request was placed"));
                    self.report_decode(vec![]);
                    if next < self.prompts.len() {
                        self.at(now, Event::Arrives(next));
                        next += 1;
                    }
                }
            }
        }
        assert!(self.bookings.is_empty());
        assert_eq!(self.router.lock().view().bookings, 0);
    }

    fn at(&mut self, when: Micros, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((when, self.scheduled, event)));
    }

    fn name(request: usize) -> String {
        format!("r{request}")
    }

    fn arrives(&mut self, now: Micros, request: usize) {
        self.arrived[request] = now;
        let blocks = &self.prompts[request].blocks;
        let placement_request = PlacementRequest {
            request_id: Self::name(request).into(),
            model: String::new(),
            hashes: sequence_hashes(&HashKey::NONE, &namespace(), 1, blocks).into(),
            prompt_tokens: blocks.len() as u32,
            samples: 1,
            max_tokens: 0,
            prompt_logits: false,
            account: "".into(),
            max_wait: None,
        };
        let (booking, placement) =
            self.router.lock().place(&placement_request, &Excluded::default(), 1).expect("a worker is eligible");
        self.bookings.insert(request, booking);
        let prefill = placement.prefill.and_then(|candidate| candidate.worker).expect("every placement has a prefill worker");
        let number = self.workers.len();
        let chosen = (0..number)
            .find(|at| prefill.worker_id == format!("{:?}-{at}", Role::Prefill))
            .expect("the placement names a simulated worker");
        let worker = &mut self.workers[chosen];
        worker.requests += 1;
        let new = (blocks.len() - worker.known_blocks(blocks, self.prompts)) as u64;
        worker.pending_tokens += new;
        worker.queue.push_back((request, new));
        self.start(now, chosen);
        self.report(chosen, vec![Self::name(request)]);
        self.decoding += 1;
        self.report_decode(vec![Self::name(request)]);
    }

    /// Starts the next prompt in the queue, if the worker is idle.
    fn start(&mut self, now: Micros, number: usize) {
        let worker = &mut self.workers[number];
        if worker.running.is_some() {
            return;
        }
        let Some((request, expected)) = worker.queue.pop_front() else { return };
        let tokens = &self.prompts[request].blocks;
        let len_blocks = tokens.len() as u32;
        let wanted = Wanted { reuse_max_blocks: len_blocks - 1, len_blocks, spare_blocks: 0 };
        let acquired = worker.cache.acquire(&namespace(), tokens, wanted).expect("the cache can hold one prompt");
        let cached = acquired.cached_blocks as usize;
        self.found += cached as u64;
        worker.pending_tokens = worker.pending_tokens + (tokens.len() - cached) as u64 - expected;
        let duration = self.setup.overhead + self.setup.block * (tokens.len() - cached) as Micros;
        worker.busy += duration;
        worker.running = Some(Running { request, blocks: acquired.blocks, cached });
        self.at(now + duration, Event::Computed(number));
    }

    fn computed(&mut self, now: Micros, number: usize) {
        let worker = &mut self.workers[number];
        let Running { request, mut blocks, cached } = worker.running.take().expect("a prompt was being computed");
        let tokens = &self.prompts[request].blocks;
        worker.pending_tokens -= (tokens.len() - cached) as u64;
        // Each token stands for a block. The last one stands for the incomplete block at the prompt's end, which is not cached.
        for at in 0..tokens.len() - 1 {
            let parent = at.checked_sub(1).map(|parent| blocks[parent]);
            blocks[at] = worker.cache.commit(&namespace(), parent, blocks[at], &tokens[at..=at]);
        }
        for block in blocks.into_iter().rev() {
            worker.cache.release(block);
        }
        self.first_token[request] = now;
        self.start(now, number);
        self.report(number, vec![]);
        self.router.lock().on_prefilled(self.bookings[&request], Some(cached as u32));
        self.at(now + self.setup.decode, Event::Ends(request));
    }

    fn report(&mut self, number: usize, included_request_ids: Vec<String>) {
        let rate = 1e6 / self.setup.block as f64;
        let worker = &mut self.workers[number];
        let counts = worker.cache.counts();
        let load = Load {
            running_sequences: u32::from(worker.running.is_some()),
            waiting_requests: worker.queue.len() as u32,
            pending_prefill_tokens: worker.pending_tokens,
            free_blocks: counts.free,
            cached_blocks: counts.cached,
            in_use_blocks: counts.in_use,
            prefill_tokens_per_second: rate,
            ..Default::default()
        };
        let events = worker.cache.take_events();
        for event in &events {
            match &event.change {
                Change::Stored(chain) => worker.cached.extend(&chain.sequence_hashes),
                Change::Removed(hashes) => worker.cached.retain(|hash| !hashes.contains(hash)),
                Change::Cleared => worker.cached.clear(),
            }
        }
        let batch = KvBatch { last_event_id: worker.cache.last_event_id(), events, load, included_request_ids, step: None };
        self.router.lock().apply(worker.member, batch, ReportedStats::default());
    }

    fn report_decode(&self, included_request_ids: Vec<String>) {
        let load = Load { running_sequences: self.decoding, ..Default::default() };
        self.router.lock().apply(
            self.decode,
            KvBatch { load, included_request_ids, ..Default::default() },
            ReportedStats::default(),
        );
    }

    fn outcome(self) -> Outcome {
        let blocks: usize = self.prompts.iter().map(|prompt| prompt.blocks.len()).sum();
        let by_mean = |of: fn(&Worker) -> u64| {
            let sum: u64 = self.workers.iter().map(of).sum();
            let max = self.workers.iter().map(of).max().expect("the world has workers");
            max as f64 * self.workers.len() as f64 / sum as f64
        };
        let mut waits: Vec<f64> = self.first_token.iter().zip(&self.arrived).map(|(to, from)| (to - from) as f64 / 1e3).collect();
        waits.sort_by(f64::total_cmp);
        Outcome {
            hit_rate: self.found as f64 / blocks as f64,
            requests_max: by_mean(|worker| worker.requests),
            busy_max: by_mean(|worker| worker.busy),
            ttft_mean_ms: waits.iter().sum::<f64>() / waits.len() as f64,
            ttft_p99_ms: waits[waits.len() * 99 / 100],
        }
    }
}

/// Returns the cluster of the documents benchmark: 20,000 tokens/s, blocks of 64 tokens, workers that can cache 15 documents.
fn small_workers() -> Setup {
    Setup {
        policy: PolicyKind::KvAware,
        workers: 4,
        capacity_blocks: 360,
        block: 3_200,
        overhead: 4_000,
        decode: 50_000,
        concurrency: Some(8),
        seed: 1,
    }
}

#[test]
fn documents_hit_the_cache_and_load_is_balanced_at_any_concurrency() {
    // 23 of a prompt's 24 blocks are shared, and nine of ten requests can find them cached.
    let possible = 0.9 * 23.0 / 24.0;
    for (concurrency, capacity_blocks) in [(1, 360), (8, 360), (16, 360), (32, 360), (8, 240)] {
        for seed in 1..=3 {
            let setup = Setup { concurrency: Some(concurrency), capacity_blocks, seed, ..small_workers() };
            let outcome = simulate(setup, &documents(40, 23, 10, seed));
            let case = format!("{concurrency} at a time, {capacity_blocks} blocks, seed {seed}: {outcome:?}");
            assert!(outcome.hit_rate > 0.98 * possible, "{case}");
            assert!(outcome.requests_max <= 1.15 && outcome.busy_max <= 1.15, "{case}");
        }
    }
}

#[test]
fn documents_larger_than_all_caches_hit_more_often_than_with_least_loaded() {
    let setup = Setup { capacity_blocks: 160, ..small_workers() };
    let prompts = documents(40, 23, 10, 1);
    let (aware, blind) = (simulate(setup, &prompts), simulate(Setup { policy: PolicyKind::LeastLoaded, ..setup }, &prompts));
    assert!(aware.hit_rate > 3.0 * blind.hit_rate && aware.ttft_mean_ms < 0.7 * blind.ttft_mean_ms, "{aware:?} {blind:?}");
    assert!(aware.requests_max < 1.2 && aware.busy_max < 1.2, "{aware:?}");
}

/// All requests have the first block in common, and most have nothing else in common: overlap must not outweigh load.
#[test]
fn recorded_conversations_wait_less_than_with_baselines_and_load_is_balanced() {
    let Some(prompts) = trace(1_500, 1.5) else {
        return skipped();
    };
    // `block` is the time of a block of 512 tokens, as in the trace.
    let setup =
        Setup { workers: 8, capacity_blocks: 2_048, block: 51_200 / 2, decode: 3_000_000, concurrency: None, ..small_workers() };
    let [aware, loaded, round_robin] = [PolicyKind::KvAware, PolicyKind::LeastLoaded, PolicyKind::RoundRobin]
        .map(|policy| simulate(Setup { policy, ..setup }, &prompts));
    let all = format!("{aware:?} {loaded:?} {round_robin:?}");
    assert!(aware.hit_rate > 2.0 * loaded.hit_rate.max(round_robin.hit_rate), "{all}");
    assert!(aware.ttft_mean_ms < loaded.ttft_mean_ms && aware.ttft_mean_ms < round_robin.ttft_mean_ms, "{all}");
    assert!(aware.ttft_p99_ms < loaded.ttft_p99_ms && aware.ttft_p99_ms < round_robin.ttft_p99_ms, "{all}");
    assert!(aware.requests_max < 1.2 && aware.busy_max < 1.1, "{all}");
}

#[test]
fn prompts_without_common_prefix_wait_no_longer_than_with_least_loaded() {
    let setup = Setup { concurrency: Some(16), ..small_workers() };
    let prompts = documents(400, 23, 1, 7);
    let (aware, blind) = (simulate(setup, &prompts), simulate(Setup { policy: PolicyKind::LeastLoaded, ..setup }, &prompts));
    assert!(aware.hit_rate == 0.0 && aware.busy_max < 1.02, "{aware:?}");
    assert!(aware.ttft_mean_ms < 1.02 * blind.ttft_mean_ms, "{aware:?} {blind:?}");
}
