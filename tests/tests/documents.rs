//! Tests with questions about more documents than one worker can cache: the router must send each question to the worker that has cached
//! its document, and must balance the load. The whole cluster runs over sockets, in one thread and in paused time.

use anyhow::{Context, Result};
use serde_json::json;
use std::{collections::VecDeque, time::Duration};
use tandem_devices::sim::{SimEngine, SimSettings};
use tandem_engine::EngineHandle;
use tandem_frontend::FrontendSettings;
use tandem_router::{PrefillPlace, RouterSettings};
use tandem_tests::{
    Client, Endpoint,
    services::{Services, engine_settings, worker_settings},
};
use tandem_text::ServedModel;

const DOCUMENTS: u32 = 40;
const DOCUMENT_TOKENS: u32 = 1_500;
const QUESTIONS: u32 = 10;
const QUESTION_TOKENS: u32 = 12;
const CONCURRENCY: usize = 8;
const PREFILL_WORKERS: usize = 4;
const BLOCK_SIZE: u32 = 64;
/// The capacity of each prefill worker in tokens: the KV of fifteen documents.
const PREFILL_CAPACITY_TOKENS: u32 = 23_040;

/// Runs a future in paused time, which advances by a millisecond when no task can make progress. The runtime's own auto-advance would not
/// wait for bytes that are in flight through a socket.
fn in_paused_time<T>(scenario: impl Future<Output = T>) -> T {
    /// In each simulated millisecond, the clock yields to other tasks this many times: more than the longest chain of messages within a
    /// millisecond.
    const YIELDS: usize = 40;
    let clock = async {
        tokio::time::pause();
        loop {
            for _ in 0..YIELDS {
                tokio::task::yield_now().await;
            }
            tokio::time::advance(Duration::from_millis(1)).await;
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("the runtime can be built");
    runtime.block_on(async {
        tokio::select! {
            biased;
            outcome = scenario => outcome,
            () = clock => unreachable!("the clock runs until the scenario ends"),
        }
    })
}

struct Cluster {
    services: Services,
    client: Client,
    prefill_workers: usize,
}

fn sim(capacity_tokens: u32) -> SimSettings {
    SimSettings { block_size: BLOCK_SIZE, capacity_blocks: capacity_tokens / BLOCK_SIZE, ..Default::default() }
}

impl Cluster {
    async fn start(prefill_workers: usize, prefill_capacity_tokens: u32, seed: u64) -> Result<Self> {
        let services = Services::default();
        let start_engine = |capacity_tokens| {
            let engine = SimEngine::new(sim(capacity_tokens));
            let clock = engine.clock();
            let (engine, running) = EngineHandle::simulated(Box::new(engine), clock, engine_settings(), 7);
            services.shutdown.spawn(running);
            engine
        };
        let mut workers = Vec::new();
        for number in 0..prefill_workers {
            let (settings, engine) =
                (worker_settings(&format!("prefill-{number}"), "sim"), start_engine(prefill_capacity_tokens));
            workers.push(services.prefill_worker(settings, engine, &sim(0)).await?.to_string());
        }
        workers.push(services.decode_worker(worker_settings("decode-0", "sim"), start_engine(65_536)).await?.to_string());
        let workers = workers.into_iter().collect();
        let settings = RouterSettings { workers, prefill: PrefillPlace::Remote, seed, ..Default::default() };
        let router = services.router(settings).await?.to_string();
        let settings = FrontendSettings { block_size: BLOCK_SIZE, ..FrontendSettings::new(router, ServedModel::sim("sim")) };
        let client = Client::new(services.frontend(settings).await?);
        services.ready(prefill_workers + 1, &client).await?;
        Ok(Self { services, client, prefill_workers })
    }

    async fn placed(&self) -> Result<Vec<f64>> {
        let mut placed = Vec::new();
        for number in 0..self.prefill_workers {
            let labels = format!("worker=\"prefill-{number}\",kind=\"prefill\"");
            placed.push(self.client.metric("tandem_router_placements_total", &labels).await?);
        }
        Ok(placed)
    }
}

/// Sends a prompt. Returns the number of its prompt tokens and the number of its cached tokens.
async fn usage_of(client: &Client, prompt: &[u32]) -> Result<(u64, u64)> {
    let body = json!({ "model": "sim", "prompt": prompt, "max_tokens": 8 });
    let answer = client.answer(Endpoint::Completions.path(), &body).await?;
    anyhow::ensure!(answer.status == 200, "{answer:?}");
    Ok((answer.usage("/prompt_tokens"), answer.cached_tokens()))
}

fn tokens(seed: u64, count: u32) -> Vec<u32> {
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut token = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u32 % 250
    };
    (0..count).map(|_| token()).collect()
}

/// Returns all questions as prompts, in an order determined by `seed`.
fn prompts(seed: u64) -> VecDeque<Vec<u32>> {
    let all = (0..u64::from(DOCUMENTS)).flat_map(|document| (0..u64::from(QUESTIONS)).map(move |question| (document, question)));
    let mut prompts: Vec<Vec<u32>> = all
        .map(|(document, question)| {
            let mut prompt = tokens(document, DOCUMENT_TOKENS);
            prompt.extend(tokens(1_000 + document * 100 + question, QUESTION_TOKENS));
            prompt
        })
        .collect();
    for (place, random) in tokens(seed ^ 0xD0C5, prompts.len() as u32 * 2).chunks(2).enumerate().skip(1) {
        prompts.swap(place, (random[0] * 250 + random[1]) as usize % (place + 1));
    }
    prompts.into()
}

/// Sends all questions. Returns the fraction of prompt tokens that were cached, and the number of requests of the busiest prefill worker
/// divided by the mean of all prefill workers.
async fn run_documents(seed: u64) -> Result<(f64, f64)> {
    let cluster = Cluster::start(PREFILL_WORKERS, PREFILL_CAPACITY_TOKENS, seed).await?;
    let prompts = std::sync::Mutex::new(prompts(seed));
    let send_questions = || async {
        let (mut prompt_tokens, mut cached_tokens) = (0, 0);
        loop {
            let Some(prompt) = prompts.lock().expect("no test panics with the lock").pop_front() else { break };
            let (all, cached) = usage_of(&cluster.client, &prompt).await?;
            prompt_tokens += all;
            cached_tokens += cached;
        }
        anyhow::Ok((prompt_tokens, cached_tokens))
    };
    let clients = futures::future::try_join_all((0..CONCURRENCY).map(|_| send_questions())).await?;
    let (prompt_tokens, cached_tokens) =
        clients.iter().fold((0, 0), |sum, client_sums| (sum.0 + client_sums.0, sum.1 + client_sums.1));

    let placed = cluster.placed().await?;
    let placed_max = placed.iter().copied().reduce(f64::max).context("the metrics have no workers")?;
    let placed_mean = placed.iter().sum::<f64>() / PREFILL_WORKERS as f64;
    assert_eq!(placed_mean * PREFILL_WORKERS as f64, f64::from(DOCUMENTS * QUESTIONS), "each prompt was placed once: {placed:?}");
    cluster.services.shutdown.run(Duration::ZERO).await;
    Ok((cached_tokens as f64 / prompt_tokens as f64, placed_max / placed_mean))
}

/// At most 0.876 of all prompt tokens can be cached, because each document is computed for the first question about it. `--nocapture` shows
/// the measured shares.
#[test]
#[expect(clippy::print_stdout, reason = "the test prints measurements")]
fn questions_about_documents_hit_the_cache_and_load_is_balanced() -> Result<()> {
    for seed in 1..=3 {
        let (hit_rate, busiest) = in_paused_time(run_documents(seed))?;
        println!(
            "seed {seed}: {hit_rate:.3} of all prompt tokens were cached; the busiest worker had {busiest:.2} times the mean"
        );
        assert!(hit_rate >= 0.86, "seed {seed}: {hit_rate:.3} of all prompt tokens were cached");
        assert!(busiest <= 1.2, "seed {seed}: the busiest worker had {busiest:.2} times the mean");
    }
    Ok(())
}

/// Sends one to five prompts of two tokens, such as health checks, and then 28 prompts of 1,000 tokens. Returns how many of the 28 prompts
/// each of the two prefill workers receives.
async fn placed_after_tiny_prompts(seed: u64) -> Result<Vec<f64>> {
    let cluster = Cluster::start(2, 65_536, seed).await?;
    for tiny in 0..=seed % 5 {
        usage_of(&cluster.client, &tokens(seed * 10 + tiny, 2)).await?;
    }
    let before = cluster.placed().await?;
    for prompt in 0..28 {
        usage_of(&cluster.client, &tokens(10_000 + seed * 100 + prompt, 1_000)).await?;
    }
    let placed = cluster.placed().await?.iter().zip(before).map(|(after, before)| after - before).collect();
    cluster.services.shutdown.run(Duration::ZERO).await;
    Ok(placed)
}

#[test]
fn worker_receives_prompts_although_its_first_prompts_were_tiny() -> Result<()> {
    for seed in 1..=20 {
        let placed = in_paused_time(placed_after_tiny_prompts(seed))?;
        assert_eq!(placed.iter().sum::<f64>(), 28.0);
        assert!((placed[0] - placed[1]).abs() <= 0.2 * 14.0, "seed {seed}: {placed:?}");
    }
    Ok(())
}
