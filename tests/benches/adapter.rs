//! Measures the cost of the adapter: the CPU time that a decode worker in front of a vLLM server needs for a request and for a token, and
//! the time that it adds to the first token. The server is the fake one of the tests; CPU time is that of the worker's own threads.
//!
//! Machines differ by more than a factor of two, so the worker is compared with a relay, which is measured in alternation with it. The
//! relay does only the work that no adapter can avoid: for each event of the server's answer, it decodes the token ids and sends a gRPC
//! message.
//!
//!     cargo bench -p tandem-tests --bench adapter
#![expect(clippy::print_stdout, reason = "the figures are the benchmark's output")]

use anyhow::{Context, Result};
use futures::{
    FutureExt, StreamExt,
    future::try_join_all,
    stream::{self, BoxStream},
};
use serde::Deserialize;
use serde_json::json;
use std::{fs, net::SocketAddr, time::Duration};
use tandem_adapter::{
    kv_events::KvEvents,
    vllm::{VllmSettings, connect},
};
use tandem_kv::{HashKey, Namespace};
use tandem_process::{Metrics, Shutdown};
use tandem_proto::{
    channel::{self, Channel, Network, endpoint},
    v1::{
        DescribeRequest, FinishReply, FinishRequest, GenerateReply, GenerateRequest, Sampling, Token, Tokens,
        control_client::ControlClient,
        decode_client::DecodeClient,
        decode_server::{Decode, DecodeServer},
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
use tonic::Status;

/// The allocator of Tandem's binary.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// The names of the threads whose CPU time is measured.
const WORKER_THREADS: &str = "worker-threads";
const RELAY_THREADS: &str = "relay-threads";
const STREAMS: u32 = 64;
const PROMPT_TOKENS: u32 = 512;
const LONG_ANSWER: u32 = 129;
const ROUNDS: u32 = 9;

fn main() -> Result<()> {
    let (engines, clients) = (runtime("engine-threads")?, runtime("client-threads")?);
    let (workers, relays) = (runtime(WORKER_THREADS)?, runtime(RELAY_THREADS)?);
    let fake = FakeSettings { step: Duration::from_millis(10), blocks: 8_192, ..FakeSettings::default() };
    let fake = engines.block_on(engines.spawn(FakeVllm::start(fake)))??;
    let url = fake.url();
    let address = workers.block_on(workers.spawn(worker(url.clone())))??;
    let (relay, relaying) = relays.block_on(relays.spawn(relay(url.clone())))??;
    relays.spawn(relaying);
    let measured = clients.block_on(clients.spawn(measure(url, address, relay)))?;
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
        shared_store: None,
        silence_max: Duration::from_secs(60),
        server_failed: Default::default(),
        observed_at: None,
    };
    let connected = connect(settings).await?;
    let worker =
        WorkerSettings { worker_id: "decode".to_owned(), model: connected.model.id.clone(), ..WorkerSettings::default() };
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

/// A service that only forwards the tokens of the server's answers.
struct Relay {
    http: reqwest::Client,
    url: String,
}

/// One event of an answer.
#[derive(Deserialize)]
struct Answer {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    token_ids: Vec<u32>,
}

#[tonic::async_trait]
impl Decode for Relay {
    type GenerateStream = BoxStream<'static, Result<GenerateReply, Status>>;

    async fn generate(&self, request: tonic::Request<GenerateRequest>) -> Result<tonic::Response<Self::GenerateStream>, Status> {
        let GenerateRequest { prompt, sampling, .. } = request.into_inner();
        let max_tokens = sampling.and_then(|sampling| sampling.max_tokens).unwrap_or(1);
        let failed = |error: reqwest::Error| Status::unavailable(error.to_string());
        let answer = ask(&self.http, &self.url, &body(&prompt, max_tokens)).await.map_err(failed)?;
        let replies = stream::unfold((answer, Vec::new()), async |(mut answer, mut unread)| {
            loop {
                if let Some(end) = unread.windows(2).position(|bytes| bytes == b"\n\n") {
                    let event: Vec<u8> = unread.drain(..end + 2).collect();
                    // Any other line marks the end of the answer.
                    let decoded = event.strip_prefix(b"data: ").and_then(|json| serde_json::from_slice::<Answer>(json).ok());
                    let ids = decoded.into_iter().flat_map(|answer| answer.choices).flat_map(|choice| choice.token_ids);
                    let tokens = ids.map(|token| Token { token, ..Token::default() }).collect();
                    let message = Message::Tokens(Tokens { sample: 0, tokens });
                    return Some((Ok(GenerateReply { message: Some(message) }), (answer, unread)));
                }
                unread.extend_from_slice(&answer.chunk().await.ok()??);
            }
        });
        Ok(tonic::Response::new(replies.boxed()))
    }

    async fn finish(&self, _: tonic::Request<FinishRequest>) -> Result<tonic::Response<FinishReply>, Status> {
        Ok(tonic::Response::new(FinishReply {}))
    }
}

async fn relay(url: String) -> Result<(SocketAddr, impl Future<Output = ()>)> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let address = listener.local_addr()?;
    let service = DecodeServer::new(Relay { http: reqwest::Client::new(), url });
    let serving = channel::server().add_service(service).serve_with_incoming(channel::incoming(listener));
    Ok((address, serving.map(drop)))
}

/// Returns the body of a request with a streamed answer.
fn body(prompt: &[u32], max_tokens: u32) -> serde_json::Value {
    json!({
        "token_ids": prompt, "sampling_params": { "max_tokens": max_tokens, "temperature": 0.0 }, "stream": true,
        "stream_options": { "include_usage": true }, "cache_salt": "bench",
    })
}

/// Sends a request to the server. Returns when the head of the answer has arrived.
async fn ask(http: &reqwest::Client, url: &str, body: &serde_json::Value) -> reqwest::Result<reqwest::Response> {
    http.post(format!("{url}/inference/v1/generate")).json(body).send().await?.error_for_status()
}

/// The CPU time of a request with one token in milliseconds, and of each further token in microseconds.
#[derive(Clone, Copy)]
struct Cost {
    request_ms: f64,
    token_us: f64,
}

async fn measure(url: String, worker: SocketAddr, relay: SocketAddr) -> Result<()> {
    let connect = async |address: SocketAddr| anyhow::Ok(Network::default().connect(&endpoint(&address.to_string())?).await?);
    let channel = connect(worker).await?;
    let instance_id = ControlClient::new(channel.clone()).describe(DescribeRequest::default()).await?.into_inner().instance_id;
    let client =
        |channel, threads, instance_id| Client { channel, threads, instance_id, http: reqwest::Client::new(), url: url.clone() };
    let relay = client(connect(relay).await?, RELAY_THREADS, String::new());
    let client = client(channel, WORKER_THREADS, instance_id);
    client.many(0, 1).await?;
    relay.many(0, 1).await?;

    let (mut costs, mut floors) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        costs.push(client.cost(4 * round).await?);
        floors.push(relay.cost(4 * round + 2).await?);
    }
    let mut added = Vec::new();
    for seed in 0..10 * ROUNDS {
        let through = client.first_token(10_000 + 2 * seed).await?;
        let direct = client.direct_first_token(10_001 + 2 * seed).await?;
        added.push((through.as_secs_f64() - direct.as_secs_f64()) * 1e3);
    }
    println!("{STREAMS} streams, prompts of {PROMPT_TOKENS} tokens, medians of {ROUNDS} rounds:");
    for (what, unit, figure) in [
        ("a request with one token  ", "ms", (|cost| cost.request_ms) as fn(Cost) -> f64),
        ("each further token        ", "µs", |cost| cost.token_us),
    ] {
        let of = |costs: &[Cost]| costs.iter().copied().map(figure).collect::<Vec<_>>();
        let ratios = of(&costs).into_iter().zip(of(&floors)).map(|(cost, floor)| cost / floor).collect();
        let (cost, floor, ratio) = (median(of(&costs)), median(of(&floors)), median(ratios));
        println!("CPU of {what} {cost:.2} {unit}, of the relay {floor:.2} {unit}: {ratio:.2} times as much");
    }
    println!(
        "added to the first token          {:.2} ms (one stream, interleaved with requests to the server itself)",
        median(added)
    );
    Ok(())
}

struct Client {
    channel: Channel,
    /// The threads of the service that is called.
    threads: &'static str,
    instance_id: String,
    http: reqwest::Client,
    url: String,
}

impl Client {
    /// Measures the service with answers of one token and with long ones. The prompts of a round differ from those of others.
    async fn cost(&self, round: u32) -> Result<Cost> {
        let short = self.many(round, 1).await?;
        let added = self.many(round + 1, LONG_ANSWER).await?.saturating_sub(short);
        let tokens = f64::from(STREAMS * (LONG_ANSWER - 1));
        Ok(Cost { request_ms: short.as_secs_f64() * 1e3 / f64::from(STREAMS), token_us: added.as_secs_f64() * 1e6 / tokens })
    }

    /// Runs [`STREAMS`] requests at once. Returns the CPU time that the service needed for them.
    async fn many(&self, round: u32, max_tokens: u32) -> Result<Duration> {
        let before = cpu_time(self.threads)?;
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
        Ok(cpu_time(self.threads)?.saturating_sub(before))
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
        let body = body(&prompt(seed), 1);
        let started = Instant::now();
        let mut answer = ask(&self.http, &self.url, &body).await?;
        answer.chunk().await?.context("the server generated no token")?;
        let took = started.elapsed();
        while answer.chunk().await?.is_some() {}
        Ok(took)
    }
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..PROMPT_TOKENS).map(|at| (at * 31 + seed * 7 + at / 16 * seed) % 250).collect()
}

fn cpu_time(threads: &str) -> Result<Duration> {
    let mut nanoseconds = 0;
    for task in fs::read_dir("/proc/self/task")? {
        let folder = task?.path();
        if fs::read_to_string(folder.join("comm"))?.trim_end() == threads {
            // The first number is the time on a processor, in nanoseconds.
            let times = fs::read_to_string(folder.join("schedstat"))?;
            nanoseconds += times.split(' ').next().context("the file does not have three numbers")?.parse::<u64>()?;
        }
    }
    Ok(Duration::from_nanos(nanoseconds))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
