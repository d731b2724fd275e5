//! Questions about more documents than one worker can cache: the router must send each question to the worker that has cached its
//! document, and must balance the load. The whole cluster runs over sockets, in one thread and in paused time.

use anyhow::{Context, Result};
use serde_json::json;
use std::collections::VecDeque;
use std::time::Duration;
use tandem_decode_worker::DecodeWorkerSettings;
use tandem_engine::{
    EngineHandle, EngineSettings,
    sim::{SimEngine, SimSettings},
};
use tandem_frontend::{FrontendSettings, ServedModel};
use tandem_node::{Metrics, Shutdown};
use tandem_prefill_worker::PrefillWorkerSettings;
use tandem_router::{PrefillPlace, RouterSettings};
use tandem_tests::{Client, Endpoint};
use tandem_transfer::TransferMode;
use tandem_worker::WorkerSettings;
use tokio::net::TcpListener;

const DOCUMENTS: u32 = 40;
const DOCUMENT_TOKENS: u32 = 1_500;
const QUESTIONS: u32 = 10;
const QUESTION_TOKENS: u32 = 12;
const CONCURRENCY: usize = 8;
const PREFILL_WORKERS: usize = 4;
const BLOCK_SIZE: u32 = 64;
/// The KV of fifteen documents.
const PREFILL_CAPACITY_TOKENS: u32 = 23_040;
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a future in paused time, which advances by a millisecond when no task can make progress. The runtime's own auto-advance would not
/// wait for bytes that are in flight through a socket.
fn in_paused_time<T>(scenario: impl Future<Output = T>) -> T {
    /// Yields per simulated millisecond: more than the longest chain of messages within it.
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
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        tokio::select! {
            biased;
            outcome = scenario => outcome,
            () = clock => unreachable!("the clock's loop has no end"),
        }
    })
}

/// The services of a cluster, as tasks of this thread.
struct Parts {
    metrics: Metrics,
    shutdown: Shutdown,
    prefill_workers: usize,
    prefill_capacity_tokens: u32,
}

fn sim(capacity_tokens: u32) -> SimSettings {
    SimSettings { block_size: BLOCK_SIZE, capacity_blocks: capacity_tokens / BLOCK_SIZE, ..Default::default() }
}

impl Parts {
    async fn listener() -> Result<(TcpListener, String)> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        Ok((listener, address))
    }

    fn engine(&self, capacity_tokens: u32) -> EngineHandle {
        let sim = sim(capacity_tokens);
        let settings = EngineSettings {
            chunk_budget: 512,
            batch_max: 256,
            queue_max: 64,
            prefix_caching: true,
            hash_key: tandem_kv::HashKey::NONE,
            max_buffered_events: 1_024,
            step_max: Duration::from_secs(60),
        };
        let engine = SimEngine::new(sim);
        let clock = engine.clock();
        let (engine, running) = EngineHandle::simulated(Box::new(engine), clock, settings, 7);
        self.shutdown.spawn(running);
        engine
    }

    fn run<E: std::error::Error + 'static>(&self, service: impl Future<Output = Result<(), E>> + Send + 'static) {
        self.shutdown.track(async move { service.await.expect("a service runs until it is stopped") });
    }

    async fn prefill_worker(&self, number: usize) -> Result<String> {
        let (listener, address) = Self::listener().await?;
        let settings = PrefillWorkerSettings {
            worker: WorkerSettings {
                worker_id: format!("prefill-{number}"),
                cluster: "tandem".to_owned(),
                model: "sim".to_owned(),
                revision: "sim".to_owned(),
                ..Default::default()
            },
            ticket_wait: TIMEOUT,
            transfer_mode: TransferMode::Simulated { block: sim(0).block_transfer() },
        };
        let engine = self.engine(self.prefill_capacity_tokens);
        self.run(tandem_prefill_worker::run(listener, engine, settings, self.metrics.clone(), self.shutdown.clone()));
        Ok(address)
    }

    async fn decode_worker(&self) -> Result<String> {
        let (listener, address) = Self::listener().await?;
        let settings = DecodeWorkerSettings {
            worker: WorkerSettings {
                worker_id: "decode-0".to_owned(),
                cluster: "tandem".to_owned(),
                model: "sim".to_owned(),
                revision: "sim".to_owned(),
                ..Default::default()
            },
            advertise: None,
            remote_waiting_max: 64,
            receive_timeout: TIMEOUT,
            transfer_mode: TransferMode::Tcp,
        };
        let engine = self.engine(65_536);
        self.run(tandem_decode_worker::run(listener, engine, settings, self.metrics.clone(), self.shutdown.clone()));
        Ok(address)
    }

    async fn router(&self, workers: Vec<String>, seed: u64) -> Result<String> {
        let (listener, address) = Self::listener().await?;
        let settings =
            RouterSettings { workers: workers.into_iter().collect(), prefill: PrefillPlace::Remote, seed, ..Default::default() };
        self.run(tandem_router::run(listener, settings, self.metrics.clone(), self.shutdown.clone()));
        Ok(address)
    }

    async fn frontend(&self, router: String) -> Result<Client> {
        let (listener, address) = Self::listener().await?;
        let settings = FrontendSettings { block_size: BLOCK_SIZE, ..FrontendSettings::new(router, ServedModel::sim("sim")) };
        self.run(tandem_frontend::run(listener, settings, self.metrics.clone(), self.shutdown.clone()));
        Ok(Client::new(address.parse()?))
    }

    /// Starts all services and waits until the router knows its workers.
    async fn start(&self, seed: u64) -> Result<Client> {
        let mut workers = Vec::new();
        for number in 0..self.prefill_workers {
            workers.push(self.prefill_worker(number).await?);
        }
        workers.push(self.decode_worker().await?);
        let client = self.frontend(self.router(workers, seed).await?).await?;
        let joined = || self.metrics.render().lines().filter(|line| line.starts_with("tandem_router_index_blocks{")).count();
        while joined() <= self.prefill_workers {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(client)
    }

    /// Returns the number of prompts that were placed on each prefill worker.
    async fn placed(&self, client: &Client) -> Result<Vec<f64>> {
        let mut placed = Vec::new();
        for number in 0..self.prefill_workers {
            let labels = format!("worker=\"prefill-{number}\",kind=\"prefill\"");
            placed.push(client.metric("tandem_router_placements_total", &labels).await?);
        }
        Ok(placed)
    }
}

/// Sends a prompt, and returns its prompt tokens and cached tokens.
async fn usage_of(client: &Client, prompt: &[u32]) -> Result<(u64, u64)> {
    let body = json!({ "model": "sim", "prompt": prompt, "max_tokens": 8 });
    let answer = client.answer(Endpoint::Completions.path(), &body).await?;
    anyhow::ensure!(answer.status == 200, "{answer:?}");
    Ok((answer.usage("/prompt_tokens"), answer.cached_tokens()))
}

/// Returns pseudo-random tokens.
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

/// Sends all questions. Returns the fraction of cached prompt tokens, and the requests of the busiest prefill worker divided by the mean.
async fn run_documents(seed: u64) -> Result<(f64, f64)> {
    let parts = Parts {
        metrics: Metrics::default(),
        shutdown: Shutdown::default(),
        prefill_workers: PREFILL_WORKERS,
        prefill_capacity_tokens: PREFILL_CAPACITY_TOKENS,
    };
    let client = parts.start(seed).await?;
    let prompts = std::sync::Mutex::new(prompts(seed));
    let send_questions = || async {
        let (mut prompt_tokens, mut cached_tokens) = (0, 0);
        loop {
            let Some(prompt) = prompts.lock().expect("no holder panics").pop_front() else { break };
            let (all, cached) = usage_of(&client, &prompt).await?;
            prompt_tokens += all;
            cached_tokens += cached;
        }
        anyhow::Ok((prompt_tokens, cached_tokens))
    };
    let clients = futures::future::try_join_all((0..CONCURRENCY).map(|_| send_questions())).await?;
    let (prompt_tokens, cached_tokens) =
        clients.iter().fold((0, 0), |sum, client_sums| (sum.0 + client_sums.0, sum.1 + client_sums.1));

    let placed = parts.placed(&client).await?;
    let placed_max = placed.iter().copied().reduce(f64::max).context("there are workers")?;
    let placed_mean = placed.iter().sum::<f64>() / PREFILL_WORKERS as f64;
    assert_eq!(placed_mean * PREFILL_WORKERS as f64, f64::from(DOCUMENTS * QUESTIONS), "each prompt was placed once: {placed:?}");
    parts.shutdown.run(Duration::ZERO).await;
    Ok((cached_tokens as f64 / prompt_tokens as f64, placed_max / placed_mean))
}

/// At most 0.876 of all tokens can be cached, because the first question about each document must compute it. `--nocapture` shows the
/// figures.
#[test]
#[expect(clippy::print_stdout, reason = "the test prints measurements")]
fn documents_hit_the_cache_and_load_is_balanced() -> Result<()> {
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

/// Sends one to five prompts of two tokens, such as health checks, and then 28 prompts of 1,000 tokens. Returns how many of the 28 each of
/// two prefill workers receives.
async fn placed_after_tiny_prompts(seed: u64) -> Result<Vec<f64>> {
    let parts =
        Parts { metrics: Metrics::default(), shutdown: Shutdown::default(), prefill_workers: 2, prefill_capacity_tokens: 65_536 };
    let client = parts.start(seed).await?;
    for tiny in 0..=seed % 5 {
        usage_of(&client, &tokens(seed * 10 + tiny, 2)).await?;
    }
    let before = parts.placed(&client).await?;
    for prompt in 0..28 {
        usage_of(&client, &tokens(10_000 + seed * 100 + prompt, 1_000)).await?;
    }
    let placed = parts.placed(&client).await?.iter().zip(before).map(|(after, before)| after - before).collect();
    parts.shutdown.run(Duration::ZERO).await;
    Ok(placed)
}

#[test]
fn tiny_first_prompts_do_not_exclude_a_worker_from_later_ones() -> Result<()> {
    for seed in 1..=20 {
        let placed = in_paused_time(placed_after_tiny_prompts(seed))?;
        assert_eq!(placed.iter().sum::<f64>(), 28.0);
        assert!((placed[0] - placed[1]).abs() <= 0.2 * 14.0, "seed {seed}: {placed:?}");
    }
    Ok(())
}
