//! Tests of the scheduler on the simulated engine, whose text depends on every byte of KV. The text of each job is compared with its text
//! when it runs alone.

mod burst;
mod chunks;
mod fair;
mod fairness;
mod history;
mod itl;
mod masks;
mod paused;
mod priorities;
mod receiving;
mod refused;
mod resumed;
mod sending;

use super::budget::PREFILL_TOKENS_MIN;
use super::*;
use crate::sim::{SimEngine, SimSettings};
use crate::{CachedTokens, Engine, Generate, KvSource, Prefill, Refusal, Sampling, WriteRefused};
use bytes::Bytes;
use std::collections::BTreeMap;
use tandem_kv::{BlockAccess, HashKey, Namespace, Priority, Ticket, TokenId};

struct World {
    machine: Machine,
    engine: SimEngine,
    events: BTreeMap<JobId, Vec<Event>>,
    ended: Vec<JobId>,
    now: Duration,
    steps: usize,
    /// The job of each chunk of the last step, and the number of its tokens.
    chunks: Vec<(JobId, usize)>,
    /// The duration of a step with these numbers of prompt tokens and decoding sequences.
    device: fn(u32, u32) -> Duration,
    /// The duration of the last step.
    took: Duration,
    /// The number of short steps minus the number of other steps (`ShortSteps`).
    short_steps: u32,
}

const SETTINGS: EngineSettings = EngineSettings {
    chunk_budget: 64,
    itl_max: None,
    batch_max: 16,
    queue_max: 64,
    prefix_caching: true,
    hash_key: HashKey::NONE,
    max_buffered_events: 1_024,
    step_max: Duration::from_secs(60),
};

impl World {
    fn new(capacity_blocks: u32, settings: EngineSettings) -> Self {
        let engine = SimEngine::new(SimSettings { capacity_blocks, ..SimSettings::default() });
        let machine = Machine::new(engine.describe(), settings, ticket::from_seed(1));
        Self {
            machine,
            engine,
            events: BTreeMap::new(),
            ended: Vec::new(),
            now: Duration::ZERO,
            steps: 0,
            chunks: Vec::new(),
            device: |_, _| Duration::from_millis(1),
            took: Duration::ZERO,
            short_steps: 0,
        }
    }

    fn act(&mut self) {
        for action in self.machine.take_actions() {
            match action {
                Action::Emit(job, event) => self.events.entry(job).or_default().push(event),
                Action::Copy { from, to } => {
                    let payload = self.read(from);
                    self.engine.write_block(to, &payload).unwrap();
                }
                Action::ReadBlocks(job, mut blocks) => {
                    blocks.iter_mut().for_each(|block| block.content = self.read(block.block));
                    self.events.entry(job).or_default().push(Event::BlocksReady(blocks));
                }
                Action::End(job) => self.ended.push(job),
            }
        }
        self.machine.check_invariants().unwrap();
    }

    fn read(&self, block: BlockId) -> Vec<u8> {
        let mut payload = vec![0; self.engine.describe().block_bytes];
        self.engine.read_block(block, &mut payload).unwrap();
        payload
    }

    fn step(&mut self) -> bool {
        self.now += self.took.max(Duration::from_millis(1));
        let plan = self.machine.plan(self.now);
        self.act();
        let Some(plan) = plan else { return false };
        self.check_left_out(&plan);
        self.chunks = plan.chunks.iter().map(|chunk| (self.machine.running[chunk.sequence].job, chunk.len)).collect();
        let chunks = self.machine.chunks(&plan);
        assert!(chunks.len() <= self.machine.settings.batch_max as usize, "{} sequences in a step", chunks.len());
        let prefill: usize = chunks.iter().map(|chunk| chunk.tokens.len()).filter(|len| *len > 1).sum();
        let budget = self.machine.settings.chunk_budget as usize;
        assert!(prefill <= budget.max(PREFILL_TOKENS_MIN), "{prefill} prompt tokens in a step, the budget is {budget}");
        let decodes = plan.chunks.iter().filter(|chunk| self.machine.running[chunk.sequence].is_decoding()).count();
        let computed: usize = plan.chunks.iter().map(|chunk| chunk.len).sum();
        self.took = (self.device)((computed - decodes) as u32, decodes as u32);
        let output = self.engine.step(&chunks).expect("the simulator does not fail");
        self.machine.complete(&plan, output, self.took, self.now);
        self.steps += 1;
        self.act();
        true
    }

    fn run(&mut self) {
        while self.step() {
            assert!(self.steps < 100_000, "the machine makes progress");
        }
    }

    fn write(&mut self, ticket: Ticket, index: u32, payload: &[u8]) -> Result<(), WriteRefused> {
        let written = self.machine.write(ticket, index, payload.len(), self.now);
        self.act();
        self.engine.write_block(written?, payload).unwrap();
        Ok(())
    }

    fn tokens(&self, job: JobId, sample: u32) -> Vec<TokenId> {
        let of_sample = |event: &Event| match event {
            Event::Token { sample: of, token, .. } if *of == sample => Some(*token),
            _ => None,
        };
        self.events[&job].iter().filter_map(of_sample).collect()
    }

    fn cached(&self, job: JobId) -> Option<u32> {
        self.events.get(&job)?.iter().find_map(|event| match event {
            Event::Scheduled { cached } => cached.map(CachedTokens::total),
            _ => None,
        })
    }

    fn reserved(&self, job: JobId) -> Option<(Ticket, Vec<u32>)> {
        self.events.get(&job)?.iter().find_map(|event| match event {
            Event::Reserved { ticket, missing_blocks } => Some((*ticket, missing_blocks.clone())),
            _ => None,
        })
    }

    fn blocks(&self, job: JobId) -> Vec<(u32, Bytes)> {
        let ready = |event: &Event| match event {
            Event::BlocksReady(blocks) => blocks.clone(),
            _ => Vec::new(),
        };
        let ready = self.events.get(&job).into_iter().flatten().flat_map(ready);
        ready.map(|block| (block.index, block.content.into())).collect()
    }

    fn assert_idle(&self) {
        self.machine.check_invariants().unwrap();
        assert_eq!(self.machine.load().in_use_blocks, 0, "an idle scheduler uses no blocks");
        assert_eq!(self.machine.load().pending_prefill_tokens, 0);
        assert!(self.machine.live.is_empty() && self.machine.waiting.is_empty() && self.machine.forking.is_empty());
        assert!(self.machine.round_robin.is_empty(), "an idle scheduler keeps no account");
    }
}

fn namespace() -> Namespace {
    Namespace::new("sim", "", "", "")
}

fn prompt(text: &str, len: usize) -> Vec<TokenId> {
    text.bytes().cycle().take(len).map(TokenId::from).collect()
}

fn prefill(prompt: Vec<TokenId>) -> Prefill {
    Prefill {
        request_id: "p".to_owned(),
        account: String::new(),
        priority: Priority::default(),
        namespace: namespace(),
        prompt,
        first_token: None,
    }
}

fn generate(prompt: Vec<TokenId>, max_tokens: u32) -> Generate {
    Generate {
        request_id: "g".to_owned(),
        account: String::new(),
        priority: Priority::default(),
        namespace: namespace(),
        prompt,
        sampling: Sampling { max_tokens: Some(max_tokens), seed: 5, ..Sampling::default() },
        samples: 1,
        kv: KvSource::Local,
        prompt_logprobs: None,
        generated: Vec::new(),
        images: [].into(),
    }
}

/// Returns the blocks of a prompt's KV, which another scheduler computes.
fn kv(prompt: &[TokenId]) -> Vec<(u32, Bytes)> {
    let mut source = World::new(4_096, SETTINGS);
    source.machine.prefill(0, prefill(prompt.to_vec()), source.now).expect("the job fits in the cache");
    source.machine.send_blocks(0, (0..prompt.len() as u32).collect(), BlockAccess::Copied);
    source.run();
    source.blocks(0)
}

/// Returns the tokens of each sample when no other job runs, nothing is cached, and the prompt is computed in one chunk.
fn alone(mut job: Generate) -> Vec<Vec<TokenId>> {
    job.kv = KvSource::Local;
    let mut world = World::new(4_096, EngineSettings { chunk_budget: 100_000, ..SETTINGS });
    let samples = job.samples;
    world.machine.generate(0, job, world.now).expect("the job fits in the cache");
    world.run();
    (0..samples).map(|sample| world.tokens(0, sample)).collect()
}

#[test]
fn repeated_prompt_finds_all_full_blocks_before_its_last_token_in_the_cache() {
    for (len, expected) in [(1, 0), (16, 0), (17, 16), (32, 16), (33, 32), (100, 96)] {
        let mut world = World::new(64, SETTINGS);
        let job = generate(prompt("the cache never changes the answer", len), 5);
        for id in 0..2 {
            world.machine.generate(id, job.clone(), world.now).expect("the job fits in the cache");
            world.run();
        }
        assert_eq!((world.cached(0), world.cached(1)), (Some(0), Some(expected)), "a prompt of {len} tokens");
        assert_eq!(world.tokens(0, 0), world.tokens(1, 0));
        assert_eq!(world.tokens(0, 0), alone(job)[0]);
        world.assert_idle();
    }
}

#[test]
fn events_of_a_job_come_in_order_and_end_with_finished() {
    let mut world = World::new(64, SETTINGS);
    let mut job = generate(prompt("order", 40), 3);
    job.sampling.stop_token_ids.clear();
    world.machine.generate(7, job, world.now).expect("the job fits in the cache");
    world.run();
    let names: Vec<String> = world.events[&7].iter().map(|event| format!("{event:?}")).collect();
    let starts = ["Scheduled", "Started", "Token", "Token", "Token", "Finished { sample: 0, reason: Length }"];
    assert_eq!(names.len(), starts.len(), "{names:?}");
    assert!(names.iter().zip(starts).all(|(name, start)| name.starts_with(start)), "{names:?}");
    assert_eq!(world.ended, [7]);
}

#[test]
fn samples_share_the_blocks_of_the_prompt_and_equal_single_requests_with_their_seeds() {
    for len in [1, 16, 17, 40, 49] {
        let mut job = generate(prompt("three samples", len), 20);
        job.samples = 3;
        let mut world = World::new(64, SETTINGS);
        world.machine.generate(0, job.clone(), world.now).expect("the job fits in the cache");
        world.run();
        let scheduled = world.events[&0].iter().filter(|event| matches!(event, Event::Scheduled { .. })).count();
        assert_eq!(scheduled, 1, "the prompt is counted once");
        for sample in 0..3 {
            let mut single = job.clone();
            single.samples = 1;
            single.sampling.seed += u64::from(sample);
            assert_eq!(world.tokens(0, sample), alone(single)[0], "sample {sample} of a prompt of {len}");
        }
        world.assert_idle();
    }
}

#[test]
fn samples_that_exceed_the_batch_limit_run_when_other_samples_have_finished() {
    let mut job = generate(prompt("seven samples", 40), 20);
    job.samples = 7;
    let mut world = World::new(64, EngineSettings { batch_max: 3, ..SETTINGS });
    world.machine.generate(0, job.clone(), world.now).expect("the job fits in the cache");
    world.run();
    for (sample, expected) in (0..).zip(alone(job)) {
        assert_eq!(world.tokens(0, sample), expected, "sample {sample}");
    }
    world.assert_idle();
}

#[test]
fn remote_prompt_generates_the_same_text_as_a_local_prompt() {
    for (len, samples, already) in [(100, 1, 0), (100, 3, 0), (33, 1, 0), (1, 1, 0), (100, 1, 64)] {
        let mut job = generate(prompt("from another worker", len), 12);
        job.samples = samples;
        let (mut source, mut destination) = (World::new(64, SETTINGS), World::new(64, SETTINGS));
        if already > 0 {
            destination
                .machine
                .generate(9, generate(job.prompt[..already].to_vec(), 1), Duration::ZERO)
                .expect("the job fits in the cache");
            destination.run();
        }
        source.machine.prefill(0, prefill(job.prompt.clone()), source.now).expect("the job fits in the cache");
        source.step();
        let remote = Generate { kv: KvSource::Remote, ..job.clone() };
        destination.machine.generate(0, remote, destination.now).expect("the job fits in the cache");
        destination.run();
        let (ticket, missing) = destination.reserved(0).expect("blocks are available");
        let held = already / 16;
        let running = destination.machine.load().running_sequences;
        assert_eq!(running, u32::from(!missing.is_empty()), "a sequence with blocks counts in the load");
        assert_eq!(missing, (held as u32..(len as u32 - 1).div_ceil(16)).collect::<Vec<_>>());
        source.machine.send_blocks(0, missing.clone(), BlockAccess::Copied);
        source.act();
        source.run();
        assert_eq!(source.blocks(0).len(), missing.len(), "only requested blocks are sent");
        assert!(matches!(source.events[&0].last(), Some(Event::Computed(_))));
        assert!(len == 1 || source.machine.load().in_use_blocks > 0, "the source keeps its blocks until they are received");
        source.machine.cancel(0);
        for (index, payload) in source.blocks(0).into_iter().rev() {
            destination.write(ticket, index, &payload).expect("the ticket allows the write");
        }
        destination.confirm(ticket);
        destination.run();
        let expected = alone(job);
        for sample in 0..samples {
            assert_eq!(destination.tokens(0, sample), expected[sample as usize]);
        }
        assert_eq!(destination.cached(0), None, "only the prefill worker reports cached tokens");
        source.assert_idle();
        destination.assert_idle();
    }
}

#[test]
fn write_with_a_spent_ticket_is_refused_and_no_block_is_written() {
    let mut world = World::new(64, SETTINGS);
    let remote = Generate { kv: KvSource::Remote, ..generate(prompt("late", 50), 4) };
    world.machine.generate(0, remote, world.now).expect("the job fits in the cache");
    world.run();
    let (ticket, _) = world.reserved(0).expect("blocks are available");
    world.machine.cancel(0);
    let job = generate(prompt("another client", 60), 20);
    world.machine.generate(1, job.clone(), world.now).expect("the job fits in the cache");
    world.step();
    let block = vec![7; world.engine.describe().block_bytes];
    assert_eq!(world.write(ticket, 0, &block), Err(WriteRefused::SpentTicket));
    world.run();
    assert_eq!(world.tokens(1, 0), alone(job)[0]);
    world.assert_idle();
}

#[test]
fn reservations_are_revoked_before_a_running_sequence_is_preempted() {
    let mut world = World::new(7, SETTINGS);
    let job = generate(prompt("runs", 47), 40);
    world.machine.generate(0, job.clone(), world.now).expect("the job fits in the cache");
    world.step();
    let remote = Generate { kv: KvSource::Remote, ..generate(prompt("reserved", 40), 4) };
    world.machine.generate(1, remote, world.now).expect("the job fits in the cache");
    world.run();
    assert!(matches!(world.events[&1].last(), Some(Event::Revoked)), "{:?}", world.events[&1]);
    assert_eq!(world.machine.preemptions, 0);
    assert_eq!(world.tokens(0, 0), alone(job)[0]);
    world.assert_idle();
}

#[test]
fn sequence_that_would_be_preempted_immediately_is_not_admitted() {
    let mut world = World::new(4, SETTINGS);
    for id in 0..2 {
        // A prompt of 17 tokens has one full block, and its last token begins a second one.
        world
            .machine
            .generate(id, generate(prompt(["first", "second"][id as usize], 17), 30), world.now)
            .expect("the job fits in the cache");
        world.step();
        world.step();
    }
    world.run();
    assert_eq!(world.machine.preemptions, 0);
    world.assert_idle();
}

#[test]
fn preempted_sequence_generates_the_same_text() {
    let mut world = World::new(8, SETTINGS);
    let jobs: Vec<Generate> = (0..4).map(|i| generate(prompt(["a", "bc", "def", "ghij"][i], 20 + i), 50)).collect();
    for (id, job) in (0..).zip(&jobs) {
        let mut job = job.clone();
        job.sampling.seed = id;
        world.machine.generate(id, job, world.now).expect("the job fits in the cache");
    }
    world.run();
    assert!(world.machine.preemptions > 0, "four growing sequences do not fit into eight blocks");
    for (id, job) in (0..).zip(jobs) {
        let mut job = job.clone();
        job.sampling.seed = id;
        assert_eq!(world.tokens(id, 0), alone(job)[0], "job {id}");
        let scheduled = world.events[&id].iter().filter(|event| matches!(event, Event::Scheduled { .. })).count();
        assert_eq!(scheduled, 1, "the count of cached tokens is sent once");
        assert_eq!(world.cached(id), Some(0));
    }
    world.assert_idle();
}

#[test]
fn request_for_prompt_logprobs_reads_no_cache_and_covers_every_token() {
    let mut world = World::new(64, SETTINGS);
    let mut job = generate(prompt("echo", 100), 2);
    world.machine.generate(0, job.clone(), world.now).expect("the job fits in the cache");
    world.run();
    job.prompt_logprobs = Some(2);
    job.sampling.max_tokens = Some(0);
    world.machine.generate(1, job, world.now).expect("the job fits in the cache");
    world.run();
    assert_eq!(world.cached(1), Some(0));
    let rows = world.events[&1].iter().find_map(|event| match event {
        Event::PromptLogprobs(rows) => Some(rows),
        _ => None,
    });
    let rows = rows.expect("the job requested prompt logprobs");
    assert_eq!(rows.len(), 100);
    assert!(rows[0].is_none() && rows[1..].iter().all(|row| row.as_ref().is_some_and(|row| row.top.len() == 2)));
    assert!(world.tokens(1, 0).is_empty());
    assert!(matches!(world.events[&1].last(), Some(Event::Finished { reason: FinishReason::Length, .. })));
    world.assert_idle();
}

#[test]
fn zero_cached_tokens_are_reported_without_prefix_caching() {
    let mut world = World::new(64, EngineSettings { prefix_caching: false, ..SETTINGS });
    for id in 0..2 {
        world.machine.generate(id, generate(prompt("off", 100), 2), world.now).expect("the job fits in the cache");
        world.run();
        assert_eq!(world.cached(id), Some(0));
    }
    assert!(world.machine.take_batch(None).events.is_empty());
    world.assert_idle();
}

#[test]
fn request_that_can_never_run_is_refused_immediately() {
    let mut world = World::new(8, EngineSettings { queue_max: 1, ..SETTINGS });
    let refusal =
        |world: &mut World, job: Generate| world.machine.generate(0, job, world.now).expect_err("the cache cannot hold the job");
    assert_eq!(refusal(&mut world, generate(vec![], 1)), Refusal::Empty);
    let too_long = refusal(&mut world, generate(prompt("x", 100), 100));
    assert_eq!(too_long, Refusal::BeyondCapacity { needed_blocks: 13, capacity_blocks: 8 });
    let context_length = tandem_model::sim::CONTEXT_LENGTH;
    let too_long = refusal(&mut world, generate(prompt("x", 100), context_length));
    assert_eq!(too_long, Refusal::BeyondContext { needed: context_length + 100, context_length });
    world.machine.generate(1, generate(prompt("x", 10), 1), world.now).expect("the job fits in the cache");
    assert_eq!(refusal(&mut world, generate(prompt("x", 10), 1)), Refusal::Full);
    world.run();
    world.assert_idle();
}

#[test]
fn sample_without_max_tokens_ends_at_the_cache_capacity() {
    let mut world = World::new(8, SETTINGS);
    let mut job = generate(prompt("endless", 40), 0);
    job.sampling.max_tokens = None;
    job.samples = 2;
    world.machine.generate(0, job, world.now).expect("the job fits in the cache");
    world.run();
    // The two samples share two full blocks, and each has three blocks of its own.
    assert_eq!([world.tokens(0, 0).len(), world.tokens(0, 1).len()], [40, 40]);
    world.assert_idle();
}

#[test]
fn engine_failure_ends_every_job_and_clears_the_cache() {
    let mut world = World::new(16, SETTINGS);
    world.machine.generate(0, generate(prompt("first", 40), 2), world.now).expect("the job fits in the cache");
    world.run();
    for id in 1..4 {
        world.machine.generate(id, generate(prompt("fails", 100), 9), world.now).expect("the job fits in the cache");
    }
    world.step();
    world.machine.fail();
    world.act();
    world.assert_idle();
    assert!((1..4).all(|id| matches!(world.events[&id].last(), Some(Event::Failed))));
    assert_eq!(world.machine.load().free_blocks, 16);
}

#[test]
fn audit_counts_violations_of_the_invariants() {
    let mut world = World::new(64, SETTINGS);
    world.machine.generate(0, generate(prompt("runs", 40), 9), world.now).expect("the job fits in the cache");
    world.step();
    world.machine.audit();
    assert_eq!(world.machine.load().invariant_violations, 0);
    world.machine.live.clear();
    world.machine.audit();
    assert_eq!(world.machine.load().invariant_violations, 1);
}
