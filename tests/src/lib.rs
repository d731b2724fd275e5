//! Helpers for the tests in `tests/`, which use a whole cluster as clients and operators do.
#![allow(clippy::missing_errors_doc, reason = "an error of a helper fails the test that calls it")]

pub mod fake_llama_cpp;
pub mod fake_sglang;
pub mod fake_vllm;
pub mod schemas;
pub mod services;
pub mod simulation;
pub mod workspace;

use anyhow::{Context, Result};
use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tandem::Cluster;
use tandem::audit::{self, ClientLine, CountSource, ReportedUsage};
use tandem::settings::{EngineKind, PrefillPlace, UpSettings};
use tandem_engine::EngineHandle;
use tandem_proto::v1::{WorkersReply, WorkersRequest, router_client::RouterClient};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

/// A cluster that runs in the test's process, on ports of its own, with a temporary folder for its ledger and the audit's result.
pub struct TestCluster(Cluster, TempDir);

/// Time limit of every wait. Only a failing test waits this long.
const TIMEOUT: Duration = Duration::from_secs(30);
const LEDGER: &str = "ledger";
const AUDIT_RESULT: &str = "audit-result";
/// The pause between two checks of a state that cannot be awaited.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Starts a whole cluster as `tandem up` does, with a ledger.
pub async fn start(mut settings: UpSettings) -> Result<TestCluster> {
    let folder = tempfile::tempdir()?;
    settings.worker.ledger = Some(folder.path().join(LEDGER));
    settings.frontend.audit_result = Some(folder.path().join(AUDIT_RESULT));
    Ok(TestCluster(Cluster::start(settings).await?, folder))
}

/// Starts a cluster whose workers do not report cached tokens, so that the frontend answers with the router's estimates of them.
pub async fn start_without_cached_tokens(mut settings: UpSettings) -> Result<TestCluster> {
    settings.worker.withhold_cached_tokens = true;
    start(settings).await
}

/// Returns the settings of a cluster of simulated devices that run 100 times as fast as the cost model.
pub fn sim_settings() -> UpSettings {
    let mut settings = UpSettings::defaults();
    settings.model.engine = EngineKind::Sim;
    settings.common.listen = ([127, 0, 0, 1], 0).into();
    settings.worker.sim.sim_speedup = 100.0;
    settings
}

/// Returns [`sim_settings`] with this place for prefills.
pub fn sim_settings_with(prefill: PrefillPlace) -> UpSettings {
    with_prefill(prefill, sim_settings())
}

/// Returns these settings with this place for prefills.
pub fn with_prefill(prefill: PrefillPlace, mut settings: UpSettings) -> UpSettings {
    settings.router.prefill = prefill;
    settings
}

/// Returns the settings of a cluster with the real model on the CPU. Without `TANDEM_MODEL`, prints that the test is skipped and returns
/// `None`.
pub fn cpu_settings() -> Option<UpSettings> {
    let Ok(model) = std::env::var("TANDEM_MODEL") else {
        #[expect(clippy::print_stderr, reason = "a skipped test must be visible")]
        {
            eprintln!("SKIPPED: needs the default model; set TANDEM_MODEL to what `tandem model fetch` prints");
        }
        return None;
    };
    let mut settings = sim_settings();
    settings.model.model = Some(model.parse().expect("TANDEM_MODEL must be the path of a model"));
    settings.model.engine = EngineKind::Cpu;
    // On a busy machine, the model computes prompts so slowly that requests would be refused.
    settings.frontend.limits.max_wait = 0.0;
    Some(settings)
}

impl TestCluster {
    /// Returns the cluster, for access to its workers and services.
    pub fn inner(&self) -> &Cluster {
        &self.0
    }

    /// Returns the address of the cluster's OpenAI API.
    pub fn frontend(&self) -> SocketAddr {
        self.0.frontend
    }

    /// Returns the model id that clients send as `model`.
    pub fn model_id(&self) -> String {
        self.0.model_id.clone()
    }

    /// Returns the router's view of the cluster's workers.
    pub async fn view(&self) -> Result<WorkersReply> {
        let mut router = RouterClient::new(self.0.to_router());
        Ok(router.workers(WorkersRequest {}).await?.into_inner())
    }

    /// Waits until the router's index has, for every worker, as many blocks as that worker has cached. The workers must be idle.
    pub async fn settle_events(&self) -> Result<()> {
        wait_until("the index follows the workers", async || {
            let view = self.view().await?;
            Ok(self.0.workers.iter().all(|worker| {
                let known = view.workers.iter().find(|known| known.info.as_ref().is_some_and(|info| info.worker_id == worker.id));
                let Some(engine) = &worker.engine else { return known.is_some() };
                let load = engine.load();
                known.is_some_and(|known| known.indexed_blocks == u64::from(load.cached_blocks) && load.in_use_blocks == 0)
            }))
        })
        .await
    }

    /// Asserts that no resource is in use in an idle cluster: no blocks, no bookings, no permits.
    pub async fn assert_idle(&self) -> Result<()> {
        for worker in &self.0.workers {
            let Some(engine) = &worker.engine else { continue };
            engine_idle(engine).await.with_context(|| worker.id.clone())?;
        }
        wait_until("the router has no bookings", async || {
            let view = self.view().await?;
            Ok(view.bookings == 0 && view.workers.iter().all(|worker| worker.bookings == 0))
        })
        .await?;
        let client = Client::new(self.frontend());
        wait_until("the frontend has no requests in flight", async || {
            Ok(client.metric("tandem_frontend_inflight_requests", "").await? == 0.0)
        })
        .await
    }

    /// Waits until the cluster is idle, and asserts that three counts of usage agree: the usage that `client` received, the workers'
    /// ledger, and the metrics. `client` must have sent all requests of the cluster.
    pub async fn assert_usage_reconciles(&self, client: &Client) -> Result<audit::Checked> {
        self.assert_idle().await?;
        let mut last = Vec::new();
        for _ in 0..200 {
            let mut evidence = audit::read(&[], &[self.1.path().join(LEDGER)], &[])?;
            evidence.client = client.lines();
            evidence.metrics.add(&client.get("/metrics").await?.1);
            let (checked, findings) = audit::check(&evidence);
            self.write_audit_result(checked, findings.len())?;
            if findings.is_empty() {
                return Ok(checked);
            }
            last = findings;
            // The ledger's thread may not have written the last lines yet.
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        let findings: Vec<String> = last.iter().map(ToString::to_string).collect();
        anyhow::bail!("usage does not reconcile:\n{}", findings.join("\n"))
    }

    /// Writes the file from which the frontend reads the result of `tandem audit check --result`.
    pub fn write_audit_result(&self, checked: audit::Checked, findings: usize) -> Result<()> {
        Ok(checked.result(findings).now().write(&self.1.path().join(AUDIT_RESULT))?)
    }

    /// Stops the cluster.
    pub async fn stop(self) {
        self.0.stop().await;
    }
}

/// Waits until the engine is idle and all its blocks are free or cached.
pub async fn engine_idle(engine: &EngineHandle) -> Result<()> {
    let idle = engine.wait_for_load(|load| {
        load.in_use_blocks == 0 && load.running_sequences == 0 && load.waiting_requests == 0 && load.pending_prefill_tokens == 0
    });
    let busy = || format!("the engine does not become idle: {:?}", engine.load());
    tokio::time::timeout(TIMEOUT, idle).await.with_context(busy)?;
    let load = engine.load();
    anyhow::ensure!(load.free_blocks + load.cached_blocks == engine.info().capacity_blocks, "the engine lost blocks: {load:?}");
    Ok(())
}

/// Polls until `holds` returns true. `what` describes the awaited state, such as "the index follows the workers".
pub async fn wait_until<F: Future<Output = Result<bool>>>(what: &str, holds: impl Fn() -> F) -> Result<()> {
    let polling = async {
        while !holds().await? {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        Ok(())
    };
    tokio::time::timeout(TIMEOUT, polling).await.with_context(|| format!("timed out waiting until {what}"))?
}

/// A client of one frontend's OpenAI API.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    base: String,
    /// Every request that was sent, with its usage and its number of prompts. All clones of the client add to this log.
    log: Arc<Mutex<Vec<(ClientLine, usize)>>>,
}

/// A complete answer: one JSON body, or the frames of a stream.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The HTTP status of the answer.
    pub status: u16,
    /// The frames of a stream, without `[DONE]`. An answer that is not streamed has its JSON body as the only frame.
    pub frames: Vec<Value>,
    /// Whether the stream ended with `[DONE]`; always true for an answer that is not streamed.
    pub done: bool,
    /// The time at which each chunk of the body arrived.
    pub arrivals: Vec<Instant>,
}

/// One of the two endpoints that generate text. A test that has this type as its parameter runs for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// The endpoint `/v1/chat/completions`.
    Chat,
    /// The endpoint `/v1/completions`.
    Completions,
}

impl Endpoint {
    /// Returns the path of the endpoint.
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }

    /// Returns the body of a request whose prompt, or only message, is `text`. The fields of `options` are added to the body.
    pub fn request(self, model: &str, text: &str, options: Value) -> Value {
        let mut request = match self {
            Self::Chat => serde_json::json!({ "model": model, "messages": [{ "role": "user", "content": text }] }),
            Self::Completions => serde_json::json!({ "model": model, "prompt": text }),
        };
        if let (Value::Object(request), Value::Object(options)) = (&mut request, options) {
            request.extend(options);
        }
        request
    }
}

impl Client {
    /// Returns a client of the frontend at this address.
    pub fn new(frontend: SocketAddr) -> Self {
        let http = reqwest::Client::builder().no_proxy().build().expect("a plain client needs nothing from the system");
        Self { http, base: format!("http://{frontend}"), log: Arc::default() }
    }

    /// Sends a request. Returns the response when its head has arrived; the body is not read.
    pub async fn send(&self, path: &str, body: &Value) -> Result<reqwest::Response> {
        Ok(self.send_logged(path, body).await?.0)
    }

    async fn send_logged(&self, path: &str, body: &Value) -> Result<(reqwest::Response, usize)> {
        let entry = {
            let mut log = self.log();
            let prompts = match &body["prompt"] {
                Value::Array(prompts) if !prompts.iter().all(Value::is_u64) => prompts.len(),
                _ => 1,
            };
            log.push((ClientLine { request_id: None, usage: None }, prompts));
            log.len() - 1
        };
        let request = self.http.post(format!("{}{path}", self.base)).header("x-tandem-details", "true");
        let response = request.json(body).send().await?;
        let id = response.headers().get("x-request-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
        self.log()[entry].0.request_id = id;
        Ok((response, entry))
    }

    /// Sends a request and disconnects when the frontend has admitted it, without reading the answer.
    pub async fn send_and_disconnect(&self, path: &str, body: &Value) -> Result<()> {
        let body = serde_json::to_vec(body)?;
        let address = self.base.trim_start_matches("http://");
        let mut stream = TcpStream::connect(address).await?;
        // The frontend sends "100 Continue" when it has admitted the request and begins to read its body.
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\nexpect: 100-continue\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
        let mut answer = [0; CONTINUE.len()];
        stream.read_exact(&mut answer).await?;
        anyhow::ensure!(answer == CONTINUE, "not admitted: {}", String::from_utf8_lossy(&answer));
        stream.write_all(&body).await?;
        self.log().push((ClientLine { request_id: None, usage: None }, 1));
        Ok(())
    }

    fn log(&self) -> MutexGuard<'_, Vec<(ClientLine, usize)>> {
        self.log.lock()
    }

    /// Returns the usage of all requests so far, for an audit.
    pub fn lines(&self) -> Vec<ClientLine> {
        self.log().iter().map(|(line, _)| line.clone()).collect()
    }

    /// Sends a request and reads the complete answer. Checks the format of a stream.
    pub async fn answer(&self, path: &str, body: &Value) -> Result<Answer> {
        let (mut response, entry) = self.send_logged(path, body).await?;
        let status = response.status().as_u16();
        let streamed =
            response.headers().get("content-type").is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        let (mut bytes, mut arrivals) = (Vec::new(), Vec::new());
        while let Some(chunk) = response.chunk().await? {
            // A comment in an SSE stream is not part of the answer.
            if !chunk.starts_with(b": ") {
                arrivals.push(Instant::now());
            }
            bytes.extend_from_slice(&chunk);
        }
        let answer = Answer { arrivals, ..Answer::read(status, streamed, &String::from_utf8(bytes)?)? };
        let line = &mut self.log()[entry];
        line.0.usage = answer.reported_usage(line.1);
        Ok(answer)
    }

    /// Returns the router's explanation: where it would place the request now, and why. The request does not run.
    pub async fn explain(&self, path: &str, body: &Value) -> Result<Value> {
        let request = self.http.post(format!("{}{path}", self.base)).header("x-tandem-explain", "true");
        Ok(request.json(body).send().await?.json().await?)
    }

    /// Sends a GET request. Returns the status and the body of the response.
    pub async fn get(&self, path: &str) -> Result<(u16, String)> {
        let response = self.http.get(format!("{}{path}", self.base)).send().await?;
        Ok((response.status().as_u16(), response.text().await?))
    }

    /// Returns the sum of a metric over its series whose labels contain `labels`.
    pub async fn metric(&self, name: &str, labels: &str) -> Result<f64> {
        Ok(sum(&self.get("/metrics").await?.1, name, labels))
    }
}

/// Returns the sum of a metric in a scraped text over its series whose labels contain `labels`.
pub fn sum(metrics: &str, name: &str, labels: &str) -> f64 {
    let series = metrics.lines().filter_map(|line| {
        let (series, value) = line.rsplit_once(' ')?;
        let rest = series.strip_prefix(name)?;
        ((rest.is_empty() || rest.starts_with('{')) && rest.contains(labels)).then(|| value.parse::<f64>().ok()).flatten()
    });
    series.sum()
}

impl Answer {
    /// Parses the body of an answer. If the answer is streamed, checks the stream's format.
    fn read(status: u16, streamed: bool, text: &str) -> Result<Self> {
        if !streamed {
            let body = serde_json::from_str(text).with_context(|| format!("status {status}, not JSON: {text}"))?;
            return Ok(Self { status, frames: vec![body], done: true, arrivals: Vec::new() });
        }
        let mut answer = Self { status, frames: Vec::new(), done: false, arrivals: Vec::new() };
        // A comment in an SSE stream only keeps the connection open.
        for frame in text.split_terminator("\n\n").filter(|frame| !frame.starts_with(": ")) {
            let data = frame.strip_prefix("data: ").with_context(|| format!("a frame without data: {frame:?}"))?;
            anyhow::ensure!(!answer.done, "a frame after [DONE]: {data}");
            match data {
                "[DONE]" => answer.done = true,
                data => answer.frames.push(serde_json::from_str(data).with_context(|| format!("not JSON: {data:?}"))?),
            }
        }
        Ok(answer)
    }

    /// Returns the usage; `None` if the answer is not complete or has no usage. `prompts` is the request's number of prompts.
    fn reported_usage(&self, prompts: usize) -> Option<ReportedUsage> {
        let usage = &self.frames.last().filter(|_| self.done)?["usage"];
        let prompt_tokens = usage["prompt_tokens"].as_u64()?;
        let details = self.details();
        let of_prompts = details["prompts"].as_array().map_or(std::slice::from_ref(details), Vec::as_slice);
        let estimate = of_prompts.iter().any(|prompt| prompt["cached_tokens_source"] != "worker");
        let source = if estimate { CountSource::RouterEstimate } else { CountSource::Worker };
        Some(ReportedUsage { prompts, prompt_tokens, cached_tokens: self.cached_tokens(), source })
    }

    /// Returns the object that has the usage: the body, or the last frame of a stream.
    pub fn last(&self) -> &Value {
        self.frames.last().expect("an answer has a body")
    }

    /// Returns the number at `pointer` (a JSON pointer, such as `/prompt_tokens`) in the answer's usage.
    pub fn usage(&self, pointer: &str) -> u64 {
        let usage = &self.last()["usage"];
        usage.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("no usage{pointer} in {self:?}"))
    }

    /// Returns the number of cached tokens in the answer's usage (`prompt_tokens_details.cached_tokens`).
    pub fn cached_tokens(&self) -> u64 {
        self.usage("/prompt_tokens_details/cached_tokens")
    }

    /// Returns the text of choice `index`. Works for streamed and other answers of both endpoints.
    pub fn text(&self, index: u64) -> String {
        let choices = self.frames.iter().flat_map(|frame| frame["choices"].as_array().into_iter().flatten());
        let texts = choices.filter(|choice| choice["index"] == index).filter_map(|choice| {
            [&choice["text"], &choice["message"]["content"], &choice["delta"]["content"]].into_iter().find_map(Value::as_str)
        });
        texts.collect()
    }

    /// Returns the object `tandem`, which extends OpenAI's format; null if the answer has none.
    pub fn details(&self) -> &Value {
        let of_frame = |frame: &'_ &Value| !frame["tandem"].is_null();
        self.frames.iter().rev().find(of_frame).map(|frame| &frame["tandem"]).unwrap_or(&Value::Null)
    }
}

/// Returns a text of about `tokens` tokens. Texts with different salts share no block.
pub fn prose(salt: &str, tokens: usize) -> String {
    const WORDS: [&str; 16] = [
        "river", "stone", "lamp", "garden", "letter", "window", "harbour", "orange", "music", "winter", "bridge", "paper",
        "cloud", "market", "silver", "evening",
    ];
    let mut state =
        salt.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let mut text = format!("{state:016x} {salt}:");
    for _ in 0..tokens {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push(' ');
        text.push_str(WORDS[(state >> 60) as usize]);
    }
    text
}
