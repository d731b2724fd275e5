//! Measures the cost of the adapter: the CPU time that a decode worker in front of a vLLM server needs for a request and for a token, and the time
//! that it adds to the first token. The server is the fake one of the tests; CPU time is that of the worker's own threads.
//!
//!     cargo bench -p tandem-tests --bench adapter
#![expect(clippy::print_stdout, reason = "the figures are the benchmark's output")]

use anyhow::{Context, Result};
use futures::{StreamExt, future::try_join_all};
use serde_json::json;
use std::{fs, net::SocketAddr, time::Duration};
use tandem_adapter::vllm::{KvEvents, VllmSettings, connect};
use tandem_kv::{HashKey, Namespace};
use tandem_node::{Metrics, Shutdown};
use tandem_proto::{
    channel::{Channel, Network, endpoint},
    v1::{
        DescribeRequest, GenerateReply, GenerateRequest, Sampling, control_client::ControlClient, decode_client::DecodeClient,
        generate_reply::Message,
    },
};
use tandem_tests::fake_vllm::{FakeSettings, FakeVllm};
use tandem_transfer::TransferMode;
use tandem_worker::WorkerSettings;
use tokio::{
    net::TcpListener,
    runtime::{Builder, Runtime},
    time::Instant,
};

/// The allocator of Tandem's binary.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// The name of the threads whose CPU time is measured.
const WORKER_THREADS: &str = "worker-threads";
const STREAMS: u32 = 64;
const PROMPT_TOKENS: u32 = 512;
const LONG_ANSWER: u32 = 129;
const ROUNDS: u32 = 9;

fn main() -> Result<()> {
    let (engines, workers, clients) = (runtime("engine-threads")?, runtime(WORKER_THREADS)?, runtime("client-threads")?);
    let fake = FakeSettings { step: Duration::from_millis(10), blocks: 8_192, ..FakeSettings::default() };
    let fake = engines.block_on(engines.spawn(FakeVllm::start(fake)))??;
    let url = fake.url();
    let address = workers.block_on(workers.spawn(worker(url.clone())))??;
    let measured = clients.block_on(clients.spawn(measure(url, address)))?;
    drop(fake);
    measured
}

fn runtime(name: &str) -> Result<Runtime> {
    Ok(Builder::new_multi_thread().worker_threads(2).thread_name(name).enable_all().build()?)
}

async fn worker(url: String) -> Result<SocketAddr> {
    let settings = VllmSettings {
        url,
        key: None,
        ca: None,
        rank: None,
        events: KvEvents::Discover,
        block_size: Some(16),
        hash_key: HashKey::NONE,
        running_max: 256,
        waiting_max: 1_024,
        nixl: false,
        kv_lease: Duration::from_secs(30),
        silence_max: Duration::from_secs(60),
    };
    let connected = connect(settings).await?;
    let worker = WorkerSettings { worker_id: "decode".to_owned(), model: connected.model.clone(), ..WorkerSettings::default() };
    let (adapter, follower) = connected.into_parts();
    let shutdown = Shutdown::default();
    shutdown.spawn(async move {
        let _ended = follower.await;
    });
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let address = listener.local_addr()?;
    let settings = tandem_decode_worker::DecodeWorkerSettings {
        worker,
        advertise: None,
        remote_waiting_max: 1,
        receive_timeout: Duration::from_secs(60),
        transfer_mode: TransferMode::Tcp,
    };
    let run = tandem_decode_worker::run(listener, adapter, settings, Metrics::default(), shutdown.clone());
    shutdown.track(async move { drop(run.await) });
    Ok(address)
}

async fn measure(url: String, address: SocketAddr) -> Result<()> {
    let channel = Network::default().connect(&endpoint(&address.to_string())?).await?;
    let instance_id = ControlClient::new(channel.clone()).describe(DescribeRequest {}).await?.into_inner().instance_id;
    let client = Client { channel, instance_id, http: reqwest::Client::new(), url };
    client.many(0, 1).await?;

    let (mut requests, mut tokens) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        let short = client.many(2 * round, 1).await?;
        let long = client.many(2 * round + 1, LONG_ANSWER).await?;
        requests.push(short.as_secs_f64() * 1e3 / f64::from(STREAMS));
        let added = long.saturating_sub(short);
        tokens.push(added.as_secs_f64() * 1e6 / f64::from(STREAMS * (LONG_ANSWER - 1)));
    }
    let mut added = Vec::new();
    for seed in 0..10 * ROUNDS {
        let through = client.first_token(10_000 + 2 * seed).await?;
        let direct = client.direct_first_token(10_001 + 2 * seed).await?;
        added.push((through.as_secs_f64() - direct.as_secs_f64()) * 1e3);
    }
    println!("{STREAMS} streams, prompts of {PROMPT_TOKENS} tokens, medians of {ROUNDS} rounds:");
    println!("CPU of a request with one token   {:.3} ms", median(requests));
    println!("CPU of each further token         {:.1} µs", median(tokens));
    println!(
        "added to the first token          {:.2} ms (one stream, interleaved with requests to the server itself)",
        median(added)
    );
    Ok(())
}

struct Client {
    channel: Channel,
    instance_id: String,
    http: reqwest::Client,
    url: String,
}

impl Client {
    /// Runs [`STREAMS`] requests at once. Returns the CPU time that the worker needed for them.
    async fn many(&self, round: u32, max_tokens: u32) -> Result<Duration> {
        let before = cpu_time()?;
        let runs = (0..STREAMS).map(|stream| async move {
            let mut replies = self.generate(round * STREAMS + stream, max_tokens).await?;
            while let Some(reply) = replies.next().await.transpose()? {
                anyhow::ensure!(!matches!(reply.message, Some(Message::Failure(_))), "the worker failed: {reply:?}");
            }
            anyhow::Ok(())
        });
        try_join_all(runs).await?;
        // Work that follows the last reply, such as KV events, is part of the measured cost.
        tokio::time::sleep(Duration::from_millis(100)).await;
        Ok(cpu_time()?.saturating_sub(before))
    }

    async fn generate(&self, seed: u32, max_tokens: u32) -> Result<tonic::Streaming<GenerateReply>> {
        let request = GenerateRequest {
            request_id: format!("request-{seed}"),
            attempt: 1,
            instance_id: self.instance_id.clone(),
            prompt: prompt(seed),
            cache_namespace: Namespace::new("fake", "", "", "").as_bytes().to_vec(),
            sampling: Some(Sampling { max_tokens: Some(max_tokens), top_p: 1.0, repetition_penalty: 1.0, ..Sampling::default() }),
            samples: 1,
            ..GenerateRequest::default()
        };
        Ok(DecodeClient::new(self.channel.clone()).generate(request).await?.into_inner())
    }

    async fn first_token(&self, seed: u32) -> Result<Duration> {
        let started = Instant::now();
        let mut replies = self.generate(seed, 1).await?;
        while let Some(reply) = replies.next().await.transpose()? {
            if let Some(Message::Failure(failure)) = &reply.message {
                anyhow::bail!("the worker failed: {failure:?}");
            }
            if matches!(reply.message, Some(Message::Tokens(_))) {
                let took = started.elapsed();
                while replies.next().await.transpose()?.is_some() {}
                return Ok(took);
            }
        }
        anyhow::bail!("the worker generated no token")
    }

    async fn direct_first_token(&self, seed: u32) -> Result<Duration> {
        let body = json!({
            "token_ids": prompt(seed), "sampling_params": { "max_tokens": 1, "temperature": 0.0 }, "stream": true,
            "stream_options": { "include_usage": true }, "cache_salt": "bench",
        });
        let started = Instant::now();
        let answer = self.http.post(format!("{}/inference/v1/generate", self.url)).json(&body).send().await?;
        let mut answer = answer.error_for_status()?;
        answer.chunk().await?.context("the server generated no token")?;
        let took = started.elapsed();
        while answer.chunk().await?.is_some() {}
        Ok(took)
    }
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..PROMPT_TOKENS).map(|at| (at * 31 + seed * 7 + at / 16 * seed) % 250).collect()
}

fn cpu_time() -> Result<Duration> {
    let mut nanoseconds = 0;
    for task in fs::read_dir("/proc/self/task")? {
        let folder = task?.path();
        if fs::read_to_string(folder.join("comm"))?.trim_end() == WORKER_THREADS {
            // The first number is the time on a processor, in nanoseconds.
            let times = fs::read_to_string(folder.join("schedstat"))?;
            nanoseconds += times.split(' ').next().context("the file has three numbers")?.parse::<u64>()?;
        }
    }
    Ok(Duration::from_nanos(nanoseconds))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
