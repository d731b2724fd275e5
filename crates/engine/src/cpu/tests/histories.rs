//! Tests that a request's tokens and probabilities have the same bits, whatever other requests the worker computes.

use super::*;
use crate::{
    CachedTokens, EngineSettings, Event, Generate, KvSource, Sampling,
    machine::{Action, JobId, Machine},
};
use proptest::{prelude::*, test_runner::TestRunner};
use std::{cell::Cell, collections::BTreeMap, time::Duration};
use tandem_kv::{HashKey, Namespace, Priority};

struct Worker {
    machine: Machine,
    engine: CpuEngine,
    events: BTreeMap<JobId, Vec<Event>>,
    now: Duration,
}

impl Worker {
    fn new(engine: CpuEngine, settings: EngineSettings) -> Self {
        let machine = Machine::new(engine.describe(), settings, crate::ticket::from_seed(1));
        Self { machine, engine, events: BTreeMap::new(), now: Duration::ZERO }
    }

    fn act(&mut self) {
        for action in self.machine.take_actions() {
            match action {
                Action::Emit(job, event) => self.events.entry(job).or_default().push(event),
                Action::Copy { from, to } => {
                    let mut payload = vec![0; self.engine.describe().block_bytes];
                    self.engine.read_block(from, &mut payload).unwrap();
                    self.engine.write_block(to, &payload).unwrap();
                }
                Action::ReadBlocks(..) | Action::End(_) => {}
            }
        }
        self.machine.check_invariants().unwrap();
    }

    fn step(&mut self) -> bool {
        self.now += Duration::from_millis(1);
        let plan = self.machine.plan(self.now);
        self.act();
        let Some(plan) = plan else { return false };
        let output = self.engine.step(&self.machine.chunks(&plan)).expect("the step runs");
        self.machine.complete(&plan, output, Duration::from_millis(1), self.now);
        self.act();
        true
    }

    fn generated(&self, job: JobId) -> Vec<(u32, TokenId, Vec<u32>)> {
        let token = |event: &Event| match event {
            Event::Token { sample, token, logprobs: Some(logprobs) } => {
                let top = logprobs.top.iter().flat_map(|top| [top.token, top.logprob.to_bits()]);
                Some((*sample, *token, [logprobs.logprob.to_bits()].into_iter().chain(top).collect()))
            }
            _ => None,
        };
        let mut generated: Vec<_> = self.events.get(&job).into_iter().flatten().filter_map(token).collect();
        generated.sort_by_key(|(sample, ..)| *sample);
        generated
    }

    fn cached(&self, job: JobId) -> u32 {
        let cached = |event: &Event| match event {
            Event::Scheduled { cached } => cached.map(CachedTokens::total),
            _ => None,
        };
        self.events[&job].iter().find_map(cached).expect("every job gets a Scheduled event")
    }
}

#[derive(Clone, Debug)]
struct Request {
    /// Requests with the same number have prompts with a common prefix.
    family: u64,
    len: usize,
    max_tokens: u32,
    samples: u32,
    greedy: bool,
    /// The number of steps before the next request arrives.
    steps: usize,
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let request = (0..2u64, 1..64usize, 1..16u32, 1..3u32, any::<bool>(), 0..6usize);
    let request = request.prop_map(|(family, len, max_tokens, samples, greedy, steps)| Request {
        family,
        len,
        max_tokens,
        samples,
        greedy,
        steps,
    });
    prop::collection::vec(request, 2..8)
}

fn generate(request: &Request, vocab: u32) -> Generate {
    let sampling = Sampling {
        max_tokens: Some(request.max_tokens),
        temperature: if request.greedy { 0.0 } else { 1.0 },
        logprobs: Some(3),
        seed: request.len as u64,
        ..Sampling::default()
    };
    Generate {
        request_id: "g".to_owned(),
        account: String::new(),
        priority: Priority::default(),
        namespace: Namespace::new("random", "", "", ""),
        prompt: tokens(request.family, request.len, vocab),
        sampling,
        samples: request.samples,
        kv: KvSource::Local,
        prompt_logprobs: None,
        generated: Vec::new(),
    }
}

const SETTINGS: EngineSettings = EngineSettings {
    chunk_budget: 100_000,
    itl_max: None,
    batch_max: 64,
    queue_max: 64,
    prefix_caching: true,
    hash_key: HashKey::NONE,
    max_buffered_events: 1_024,
    step_max: std::time::Duration::from_secs(60),
};

/// Compares two runs of the same requests. In the first run each request runs alone, without a cache and in one chunk. In the second run
/// requests are cached, computed in chunks of any budget and in batches of any composition, preempted for lack of blocks, and run on any
/// number of threads.
#[test]
fn requests_in_any_history_give_the_same_bits_as_single_requests() {
    let (preemptions, cached_tokens) = (Cell::new(0), Cell::new(0));
    let models: Vec<_> = [QUANTISED, BLOCKS, QWEN3].map(|sizes| (model(sizes), sizes.vocab)).into();
    let mut runner = TestRunner::new(ProptestConfig { cases: 256, ..ProptestConfig::default() });
    let history = (requests(), 0..models.len(), 24..40u32, 1..70u32, 1..3usize);
    let outcome = runner.run(&history, |(requests, which, capacity_blocks, chunk_budget, threads)| {
        let (model, vocab) = &models[which];
        let engine = engine_with(model, CpuSettings { capacity_blocks, threads, ..settings() });
        let mut worker = Worker::new(engine, EngineSettings { chunk_budget, batch_max: 6, ..SETTINGS });
        for (job, request) in (0..).zip(&requests) {
            let _ = worker.machine.generate(job, generate(request, *vocab), worker.now);
            for _ in 0..request.steps {
                worker.step();
            }
        }
        while worker.step() {}
        preemptions.set(preemptions.get() + worker.machine.load().preemptions);
        for (job, request) in (0..).zip(&requests).filter(|(job, _)| worker.events.contains_key(job)) {
            let mut alone = Worker::new(engine_with(model, settings()), SETTINGS);
            alone.machine.generate(0, generate(request, *vocab), alone.now).expect("the job fits in the cache");
            while alone.step() {}
            prop_assert_eq!(alone.generated(0).len() as u32, request.max_tokens * request.samples);
            prop_assert_eq!(worker.generated(job), alone.generated(0), "job {}", job);
            cached_tokens.set(cached_tokens.get() + worker.cached(job));
        }
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(preemptions.get() > 20, "{} preemptions: the caches are too large", preemptions.get());
    assert!(cached_tokens.get() > 1_000, "{} cached tokens: the prompts share too little", cached_tokens.get());
}
