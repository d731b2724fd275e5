//! Workers as their engines are: steps in which chunks of prompts and running answers share the device, blocks that are pinned until
//! the answer ends, prompts that wait for blocks, preemption. Prefill workers send what they have computed to a decode worker.

use super::{Micros, Prompt, namespace, rules::Rule};
use crate::{
    booked::BookingId,
    cluster::{Asked, Cluster, Excluded, MemberId},
    feed::Beside,
    route::Question,
    settings::{Costs, PrefillPlace, RouterSettings},
};
use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, HashSet, VecDeque},
    time::Duration,
};
use tandem_kv::{
    BlockId, CacheSettings, Change, HashKey, KvBatch, Load, PrefixCache, SequenceHash, Snapshot, TokenId, Wanted, sequence_hashes,
};
use tandem_node::Metrics;
use tandem_proto::v1::{StepTotals, WorkerInfo, worker_info::Role};
use tokio::{runtime::Runtime, time::Instant};

/// Of a block, as in the recorded trace.
const BLOCK_TOKENS: u64 = 512;
/// Prompt tokens of a step at most.
const CHUNK_TOKENS: u64 = 2_048;
const BATCH_MAX: usize = 256;
/// The simulator's default device: 20,000 tokens/s and 4 ms a step of prompts, 6 ms and 0.1 ms a sequence.
const TOKEN: f64 = 50.0;
const PREFILL_STEP: f64 = 4_000.0;
const DECODE_STEP: f64 = 6_000.0;
const DECODE_SEQUENCE: f64 = 100.0;
/// 128 KiB a token over 10 GB/s.
const TRANSFER_TOKEN: f64 = 13.1;

/// What is modelled.
#[derive(Clone)]
pub(super) struct World {
    pub(super) rule: Rule,
    pub(super) prefill: PrefillPlace,
    /// Each with its role, and how much slower than the others it is.
    pub(super) devices: Vec<(Role, f64)>,
    pub(super) capacity_blocks: u32,
    pub(super) costs: Costs,
    pub(super) seed: u64,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    /// Prompt blocks found, of all.
    pub(super) hit_rate: f64,
    /// To the first token, in seconds.
    pub(super) ttft_mean_s: f64,
    pub(super) ttft_p99_s: f64,
    /// To the last token, in seconds.
    pub(super) end_mean_s: f64,
    /// Times a sequence gave its blocks to others.
    pub(super) preemptions: u64,
}

struct Sequence {
    request: usize,
    blocks: Vec<BlockId>,
    computed: u64,
    committed: usize,
    generated: u64,
    /// Tokens it is expected to compute.
    own: u64,
    /// Its KV comes from a prefill worker.
    sent: bool,
    /// Blocks that were found when it was taken in first, until they are counted.
    cached: Option<u32>,
}

struct Worker {
    member: MemberId,
    role: Role,
    slower: f64,
    cache: PrefixCache,
    cached: HashSet<SequenceHash>,
    waiting: VecDeque<Sequence>,
    /// The oldest first.
    running: Vec<Sequence>,
    /// Computed here, and on their way to a decode worker.
    sending: Vec<Sequence>,
    /// Placed here, and computed elsewhere.
    expected: u32,
    /// Tokens of the step that runs, for each of `running`.
    step: Option<Vec<u64>>,
    step_ms: f64,
    totals: StepTotals,
    /// Steps that tell a rate.
    long_steps: u64,
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

/// Runs the prompts through the cluster, in a time of its own.
pub(super) fn simulate(world: World, prompts: &[Prompt]) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime");
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
        let empty = Snapshot { at_event_id: 0, stored: Vec::new() };
        let member = router.lock().join(info, "host:1".to_owned(), &empty).expect("it agrees with the others");
        let cache = CacheSettings {
            capacity_blocks: world.capacity_blocks,
            block_size: 1,
            prefix_caching: true,
            hash_key: HashKey::NONE,
        };
        Worker {
            member,
            role: *role,
            slower: *slower,
            cache: PrefixCache::new(cache),
            cached: HashSet::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            sending: Vec::new(),
            expected: 0,
            step: None,
            step_ms: 0.0,
            totals: StepTotals::default(),
            long_steps: 0,
        }
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

impl Sequence {
    fn new(request: usize, own: u64, sent: bool) -> Self {
        Self { request, blocks: Vec::new(), computed: 0, committed: 0, generated: 0, own, sent, cached: None }
    }

    fn target(&self, prompts: &[Prompt]) -> u64 {
        prompts[self.request].blocks.len() as u64 * BLOCK_TOKENS + self.generated
    }

    fn remaining(&self, prompts: &[Prompt]) -> u64 {
        self.target(prompts) - self.computed.min(self.target(prompts))
    }
}

fn common(one: &Prompt, other: &Prompt) -> usize {
    one.blocks.iter().zip(&*other.blocks).take_while(|(one, other)| one == other).count()
}

impl Worker {
    /// Leading blocks that are cached, or that sequences before it are to compute.
    fn known_blocks(&self, prompt: &Prompt, prompts: &[Prompt]) -> usize {
        let hashes = sequence_hashes(&HashKey::NONE, &namespace(), 1, &prompt.blocks[..prompt.blocks.len() - 1]);
        let cached = hashes.iter().take_while(|hash| self.cached.contains(hash)).count();
        let before = self.waiting.iter().chain(self.running.iter().filter(|other| other.remaining(prompts) > 0));
        before.filter(|other| !other.sent).map(|other| common(&prompts[other.request], prompt)).max().unwrap_or(0).max(cached)
    }

    fn release(&mut self, sequence: &mut Sequence) {
        for block in sequence.blocks.drain(..).rev() {
            self.cache.release(block);
        }
    }

    /// A block for each sequence whose next token needs one; if there is none, the youngest gives its own. How many did.
    fn grow(&mut self, prompts: &[Prompt]) -> u64 {
        let (mut at, mut preempted) = (0, 0);
        while at < self.running.len() {
            let sequence = &mut self.running[at];
            let full = sequence.blocks.len() as u64 * BLOCK_TOKENS <= sequence.target(prompts);
            if self.role == Role::Prefill || sequence.remaining(prompts) > 0 || !full {
                at += 1;
            } else if let Ok(block) = self.cache.allocate() {
                sequence.blocks.push(block);
            } else {
                let mut youngest = self.running.pop().expect("one runs");
                self.release(&mut youngest);
                (youngest.computed, youngest.committed, youngest.sent) = (0, 0, false);
                youngest.own = youngest.target(prompts);
                self.waiting.push_front(youngest);
                preempted += 1;
            }
        }
        preempted
    }

    /// Takes in what has blocks, in its order; those whose next block is being computed for another let others go first.
    fn admit(&mut self, prompts: &[Prompt]) {
        let mut at = 0;
        while at < self.waiting.len() && self.running.len() < BATCH_MAX {
            let sequence = &self.waiting[at];
            let prompt = &prompts[sequence.request];
            let reuse_max_blocks = prompt.blocks.len() as u32 - 1;
            let cached = self.cache.overlap(&namespace(), &prompt.blocks, reuse_max_blocks) as usize;
            let computes = |other: &&Sequence| other.committed < common(&prompts[other.request], prompt);
            let twin = self.running.iter().filter(|other| other.remaining(prompts) > 0).filter(computes);
            if !sequence.sent && twin.map(|other| common(&prompts[other.request], prompt)).any(|blocks| blocks > cached) {
                at += 1;
                continue;
            }
            let growing = self.running.iter().filter(|other| other.remaining(prompts) == 0).count();
            let len_blocks = sequence.target(prompts).div_ceil(BLOCK_TOKENS) as u32;
            let wanted = Wanted { reuse_max_blocks, len_blocks, spare_blocks: growing as u32 + 1 };
            let Ok(acquired) = self.cache.acquire(&namespace(), &prompt.blocks, wanted) else { break };
            let mut sequence = self.waiting.remove(at).expect("it is there");
            sequence.blocks = acquired.blocks;
            sequence.committed = acquired.cached_blocks as usize;
            sequence.computed = u64::from(acquired.cached_blocks) * BLOCK_TOKENS;
            if sequence.sent {
                sequence.computed = sequence.target(prompts);
            } else if sequence.generated == 0 {
                sequence.cached = Some(acquired.cached_blocks);
            }
            let place = self.running.partition_point(|other| other.request < sequence.request);
            self.running.insert(place, sequence);
        }
    }

    /// Tokens of the next step for each running sequence, and how long it takes.
    fn plan(&mut self, prompts: &[Prompt]) -> Option<(Vec<u64>, f64)> {
        let (mut budget, mut decodes) = (CHUNK_TOKENS, 0);
        let tokens = self.running.iter().map(|sequence| match sequence.remaining(prompts) {
            0 => {
                decodes += 1;
                1
            }
            remaining => {
                let tokens = remaining.min(budget);
                budget -= tokens;
                tokens
            }
        });
        let tokens: Vec<u64> = tokens.collect();
        let prefilled = CHUNK_TOKENS - budget;
        let mut time = if prefilled > 0 { PREFILL_STEP + prefilled as f64 * TOKEN } else { 0.0 };
        if decodes > 0 {
            let decode = (DECODE_STEP + f64::from(decodes) * DECODE_SEQUENCE) * self.slower;
            self.step_ms = decode / 1e3;
            time += decode / self.slower;
        }
        self.totals.prefilled_tokens += prefilled;
        self.long_steps += u64::from(prefilled >= 64);
        self.totals.generated_tokens += u64::from(decodes as u32);
        (time > 0.0).then_some((tokens, time * self.slower))
    }

    /// Offers the prompt's blocks that are computed to the cache.
    fn commit(&mut self, at: usize, prompts: &[Prompt]) {
        let sequence = &mut self.running[at];
        let tokens: &[TokenId] = &prompts[sequence.request].blocks;
        // The last one stands for what is not a full block.
        let full = (sequence.computed / BLOCK_TOKENS).min(tokens.len() as u64 - 1) as usize;
        for at in sequence.committed..full {
            let parent = at.checked_sub(1).map(|parent| sequence.blocks[parent]);
            sequence.blocks[at] = self.cache.commit(&namespace(), parent, sequence.blocks[at], &tokens[at..=at]);
        }
        sequence.committed = sequence.committed.max(full);
    }

    fn load(&self, prompts: &[Prompt]) -> Load {
        let counts = self.cache.counts();
        let pending = self.waiting.iter().filter(|sequence| !sequence.sent).map(|sequence| sequence.own);
        let running = self.running.iter().map(|sequence| sequence.remaining(prompts));
        Load {
            running_sequences: self.running.len() as u32,
            waiting_requests: self.waiting.len() as u32 + self.expected,
            pending_prefill_tokens: pending.chain(running).sum(),
            free_blocks: counts.free,
            cached_blocks: counts.cached,
            in_use_blocks: counts.in_use,
            prefill_tokens_per_second: if self.totals.prefilled_tokens > 0 { 1e6 / TOKEN / self.slower } else { 0.0 },
            prefill_measurements: self.long_steps,
            prefill_fixed_ms: PREFILL_STEP / 1e3 * self.slower,
            decode_step_ms: self.step_ms,
            ..Default::default()
        }
    }
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
        let asked = Asked {
            request_id: request.to_string().into(),
            model: String::new(),
            hashes: sequence_hashes(&HashKey::NONE, &namespace(), 1, &prompt.blocks).into(),
            prompt_tokens: (prompt.blocks.len() as u64 * BLOCK_TOKENS) as u32,
            samples: 1,
            prompt_logits: false,
        };
        let excluded = self.all_but_the_rules(&asked);
        let (booking, placement) = self.router.lock().place(&asked, &excluded, 1).expect("it fits");
        let number = |candidate: tandem_proto::v1::Candidate| -> usize {
            candidate.worker.and_then(|worker| worker.worker_id.parse().ok()).expect("a worker of ours")
        };
        let decode = number(placement.decode.expect("one decodes"));
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

    /// A rule that is not the router's: all workers but the one that it chooses.
    fn all_but_the_rules(&mut self, asked: &Asked) -> Excluded {
        let candidates = self.router.lock().candidates(&asked.hashes, &Default::default(), None);
        let question = Question {
            prompt_tokens: asked.prompt_tokens,
            block_size: BLOCK_TOKENS as u32,
            prefill: self.world.prefill,
            prompt_logits: false,
        };
        self.turns += 1;
        let chosen = self.world.rule.choose(&question, &candidates, self.turns);
        let all = chosen.into_iter().flat_map(|chosen| (0..candidates.len()).filter(move |at| *at != chosen));
        Excluded { failed: all.map(|at| at.to_string()).collect(), ..Default::default() }
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
        let step = worker.step.take().expect("it was at a step");
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
            let request = self.requests.get_mut(&sequence.request).expect("it is running");
            if let Some(cached) = cached {
                request.cached = cached;
                self.found += u64::from(cached);
            }
            let first = worker.role != Role::Prefill && sequence.remaining(self.prompts) == 0 && request.first_token.is_none();
            if first {
                request.first_token = Some(now);
                self.ttft_s.push((now - self.prompts[sequence.request].at) as f64 / 1e6);
                self.router.lock().release_prefill(request.booking, Some(request.cached));
            }
        }
        for request in ended {
            self.ends(now, number, request);
        }
        self.start(now, number);
        self.report(number, vec![]);
    }

    /// The sequence has computed what it was to compute here.
    fn ends(&mut self, now: Micros, number: usize, request: usize) {
        let worker = &mut self.workers[number];
        let at = worker.running.iter().position(|sequence| sequence.request == request).expect("it is running");
        let mut sequence = worker.running.remove(at);
        if worker.role == Role::Prefill {
            let time = sequence.blocks.len() as f64 * BLOCK_TOKENS as f64 * TRANSFER_TOKEN;
            worker.sending.push(sequence);
            let to = self.requests[&request].decode;
            return self.at(now + time as Micros, Event::Sent { from: number, to, request });
        }
        worker.release(&mut sequence);
        self.end_s += (now - self.prompts[request].at) as f64 / 1e6;
        let request = self.requests.remove(&request).expect("it is running");
        self.router.lock().release(request.booking);
    }

    fn sent(&mut self, now: Micros, from: usize, to: usize, request: usize) {
        let worker = &mut self.workers[from];
        let at = worker.sending.iter().position(|sequence| sequence.request == request).expect("it is being sent");
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
        let events = worker.cache.take_events();
        for event in &events {
            match &event.change {
                Change::Stored(chain) => worker.cached.extend(&chain.sequence_hashes),
                Change::Removed(hashes) => hashes.iter().for_each(|hash| {
                    worker.cached.remove(hash);
                }),
                Change::Cleared => worker.cached.clear(),
            }
        }
        let batch = KvBatch { last_event_id: worker.cache.last_event_id(), events, load, included_request_ids, step: None };
        let beside = Beside { steps: Some(worker.totals), ..Beside::default() };
        self.router.lock().apply(worker.member, batch, beside);
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
