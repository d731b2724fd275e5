//! Tests that a request's tokens and probabilities have the same bits, whatever other requests the worker computes.

use super::*;
use proptest::{prelude::*, test_runner::TestRunner};
use std::{cell::Cell, time::Duration};
use tandem_engine::{CachedTokens, EngineHandle, EngineSettings, Event, Generate, KvSource, Sampling, SimClock};
use tandem_kv::{HashKey, Load, Namespace, Priority};
use tokio::{task, time};

/// Runs the requests on one engine. Returns the events of each request (an empty list if the engine refuses the request), and the load of the
/// engine when it is idle again.
async fn run(engine: CpuEngine, settings: EngineSettings, requests: &[Request], vocab: u32) -> (Vec<Vec<Event>>, Load) {
    let (engine, running) = EngineHandle::simulated(Box::new(engine), SimClock::default(), settings, 1);
    let mut driver = task::JoinSet::new();
    driver.spawn(running);
    let mut jobs = Vec::new();
    for request in requests {
        jobs.push(engine.generate(generate(request, vocab)).await.ok());
        for _ in 0..request.steps {
            task::yield_now().await;
        }
    }
    let mut histories = vec![Vec::new(); jobs.len()];
    for (job, events) in jobs.iter_mut().zip(&mut histories) {
        while let Some(event) = match job {
            Some(job) => job.next().await,
            None => None,
        } {
            events.push(event);
        }
    }
    // The engine checks its invariants when it is idle, and again after ten seconds.
    time::sleep(Duration::from_secs(11)).await;
    drop(jobs);
    time::sleep(Duration::from_secs(1)).await;
    (histories, engine.load())
}

fn generated(events: &[Event]) -> Vec<(u32, TokenId, Vec<u32>)> {
    let token = |event: &Event| match event {
        Event::Token { sample, token, logprobs: Some(logprobs) } => {
            let top = logprobs.top.iter().flat_map(|top| [top.token, top.logprob.to_bits()]);
            Some((*sample, *token, [logprobs.logprob.to_bits()].into_iter().chain(top).collect()))
        }
        _ => None,
    };
    let mut generated: Vec<_> = events.iter().filter_map(token).collect();
    generated.sort_by_key(|(sample, ..)| *sample);
    generated
}

fn cached(events: &[Event]) -> u32 {
    let cached = |event: &Event| match event {
        Event::Scheduled { cached } => cached.map(CachedTokens::total),
        _ => None,
    };
    events.iter().find_map(cached).expect("every job gets a Scheduled event")
}

#[derive(Clone, Debug)]
struct Request {
    /// Requests with equal numbers have prompts with a common prefix.
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
        images: [].into(),
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
    step_max: Duration::from_secs(60),
};

/// Compares two runs of the same requests. In the first run each request runs alone, without a cache and in one chunk. In the second run
/// prompts are cached, computed in chunks of any budget and in batches of any composition, preempted for lack of blocks, and run on any
/// number of threads.
#[test]
fn request_gives_the_same_bits_alone_and_among_any_other_requests() {
    let (preemptions, cached_tokens) = (Cell::new(0), Cell::new(0));
    let models: Vec<_> = [QUANTISED, BLOCKS, QWEN3].map(|sizes| (model(sizes), sizes.vocab)).into();
    let mut runner = TestRunner::new(ProptestConfig { cases: 256, ..ProptestConfig::default() });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let history = (requests(), 0..models.len(), 24..40u32, 1..70u32, 1..3usize);
    let outcome = runner.run(&history, |(requests, which, capacity_blocks, chunk_budget, threads)| {
        let (model, vocab) = &models[which];
        let engine = engine_with(model, CpuSettings { capacity_blocks, threads, ..settings() });
        let settings_together = EngineSettings { chunk_budget, batch_max: 6, ..SETTINGS };
        let (together, load) = runtime.block_on(run(engine, settings_together, &requests, *vocab));
        prop_assert_eq!((load.invariant_violations, load.in_use_blocks), (0, 0));
        preemptions.set(preemptions.get() + load.preemptions);
        for (request, events) in requests.iter().zip(&together).filter(|(_, events)| !events.is_empty()) {
            let alone = run(engine_with(model, settings()), SETTINGS, std::slice::from_ref(request), *vocab);
            let alone = generated(&runtime.block_on(alone).0[0]);
            prop_assert_eq!(alone.len() as u32, request.max_tokens * request.samples);
            prop_assert_eq!(generated(events), alone);
            cached_tokens.set(cached_tokens.get() + cached(events));
        }
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
    assert!(preemptions.get() > 20, "{} preemptions: the caches are too large", preemptions.get());
    assert!(cached_tokens.get() > 1_000, "{} cached tokens: the prompts share too little", cached_tokens.get());
}
