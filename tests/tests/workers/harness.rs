//! Starts workers with simulated engines, and calls their gRPC services.

use crate::device_memory::{DeviceAccess, DeviceMemory};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tandem_decode_worker::DecodeWorkerSettings;
use tandem_devices::sim::{SimEngine, SimSettings};
use tandem_engine::{Chunk, Engine, EngineError, EngineHandle, EngineInfo, EngineSettings, StepOutput};
use tandem_kv::{BlockId, KvMemory};
use tandem_prefill_worker::PrefillWorkerSettings;
use tandem_process::{Metrics, Shutdown};
use tandem_proto::{
    channel::endpoint,
    v1::{
        DecodeStarted, DescribeRequest, Failure, FailureReason, Finished, GenerateReply, GenerateRequest, PrefillChunk,
        PromptLogprobs, Sampling, Scheduled, WorkerInfo, WorkerRef, control_client::ControlClient, decode_client::DecodeClient,
        generate_reply::Message, prefill_client::PrefillClient,
    },
};
use tandem_tests::services::{engine_settings, sim_tokens, worker_settings};
use tandem_transfer::TransferMode;
use tandem_worker::WorkerSettings;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tonic::{Streaming, transport::Channel};

/// Time limit of every wait. Only a failing test waits this long.
pub const TIMEOUT: Duration = Duration::from_secs(30);

pub const BLOCK_BYTES: u64 = 128;

#[derive(Clone)]
pub struct Setup {
    /// The number of the worker among the workers of its role.
    pub number: usize,
    pub sim: SimSettings,
    pub engine: EngineSettings,
    pub report_cached_tokens: bool,
    pub ticket_wait: Duration,
    pub receive_timeout: Duration,
    pub remote_waiting_max: usize,
    /// The access of other workers to the memory of this worker's device; `None` if they have no access.
    pub access: Option<DeviceAccess>,
    pub transfer_mode: TransferMode,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            number: 0,
            sim: SimSettings { speedup: 100.0, ..Default::default() },
            engine: EngineSettings { chunk_budget: 64, batch_max: 32, ..engine_settings() },
            report_cached_tokens: true,
            ticket_wait: TIMEOUT,
            receive_timeout: TIMEOUT,
            remote_waiting_max: 64,
            access: None,
            transfer_mode: TransferMode::Auto,
        }
    }
}

impl Setup {
    /// Returns a setup whose device is so slow that no long request ends within a test.
    pub fn slow() -> Self {
        let sim = SimSettings { prefill_tokens_per_second: 200.0, ..SimSettings::default() };
        Self { sim, ..Self::default() }
    }

    fn worker_settings(&self, role: &str) -> WorkerSettings {
        WorkerSettings {
            withhold_cached_tokens: !self.report_cached_tokens,
            ..worker_settings(&format!("{role}-{}", self.number), "sim")
        }
    }

    pub fn prefill_settings(&self) -> PrefillWorkerSettings {
        PrefillWorkerSettings {
            worker: self.worker_settings("prefill"),
            ticket_wait: self.ticket_wait,
            transfer_mode: self.transfer_mode,
        }
    }

    pub fn start(&self) -> (EngineHandle, Gate) {
        let gate = Gate::default();
        let memory = self.access.clone().map(DeviceMemory::new);
        let engine = Gated { engine: SimEngine::new(self.sim).in_real_time(), gate: gate.clone(), memory };
        (EngineHandle::start(Box::new(engine), self.engine).with_vocabulary(sim_tokens()), gate)
    }
}

/// A gate that a test closes so that threads wait at it. An engine's thread, for example, waits before its next step.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar, watch::Sender<usize>, AtomicBool)>);

impl Gate {
    pub fn close(&self) {
        *self.0.0.lock().expect("no test panics with the lock") = true;
    }

    pub fn open(&self) {
        *self.0.0.lock().expect("no test panics with the lock") = false;
        self.0.1.notify_all();
    }

    pub fn pass(&self) {
        let closed = self.0.0.lock().expect("no test panics with the lock");
        self.0.2.send_modify(|waiting| *waiting += 1);
        drop(self.0.1.wait_while(closed, |closed| *closed).expect("no test panics with the lock"));
        self.0.2.send_modify(|waiting| *waiting -= 1);
    }

    pub fn fail_next(&self) {
        self.0.3.store(true, Ordering::Relaxed);
    }

    pub async fn reached(&self) {
        let mut waiting = self.0.2.subscribe();
        tokio::time::timeout(TIMEOUT, waiting.wait_for(|waiting| *waiting > 0))
            .await
            .expect("a thread reaches the gate")
            .expect("the gate exists");
    }
}

/// A simulated device that a test can make hang or fail, and whose memory other workers may access.
struct Gated {
    engine: SimEngine,
    gate: Gate,
    memory: Option<DeviceMemory>,
}

impl Engine for Gated {
    fn describe(&self) -> EngineInfo {
        self.engine.describe()
    }

    fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, EngineError> {
        self.gate.pass();
        if self.gate.0.3.swap(false, Ordering::Relaxed) {
            return Err(EngineError::Step("the test makes this step fail".into()));
        }
        if let Some(memory) = &self.memory {
            memory.apply_peer_writes(&mut self.engine);
        }
        let output = self.engine.step(chunks);
        if let Some(memory) = &self.memory {
            memory.publish_chunks(&self.engine, chunks);
        }
        output
    }

    fn read_block(&self, block: BlockId, into: &mut [u8]) -> Result<(), EngineError> {
        match &self.memory {
            Some(memory) => memory.read_into(block, into),
            None => self.engine.read_block(block, into)?,
        }
        Ok(())
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), EngineError> {
        if let Some(memory) = &self.memory {
            memory.apply_peer_writes(&mut self.engine);
            self.engine.write_block(block, bytes)?;
            memory.publish(&self.engine, &[block]);
            return Ok(());
        }
        self.engine.write_block(block, bytes)
    }

    fn kv_memory(&self) -> Option<Arc<dyn KvMemory>> {
        self.memory.clone().map(|memory| Arc::new(memory) as Arc<dyn KvMemory>)
    }
}

/// A worker in a runtime of its own, so that a test can kill it.
pub struct Worker {
    pub info: WorkerInfo,
    pub address: String,
    pub engine: EngineHandle,
    pub gate: Gate,
    pub metrics: Metrics,
    pub shutdown: Shutdown,
    /// Receives true when `run` has returned without an error, and false when it has returned an error.
    pub ended: oneshot::Receiver<bool>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Worker {
    pub async fn prefill(setup: &Setup) -> Self {
        let settings = setup.prefill_settings();
        Self::start(setup.start(), |listener, engine, metrics, shutdown| async move {
            tandem_prefill_worker::run(listener, engine, settings, metrics, shutdown).await.is_ok()
        })
        .await
    }

    pub async fn decode(setup: &Setup) -> Self {
        let settings = DecodeWorkerSettings {
            worker: setup.worker_settings("decode"),
            advertise: None,
            remote_waiting_max: setup.remote_waiting_max,
            receive_timeout: setup.receive_timeout,
            transfer_mode: setup.transfer_mode,
        };
        Self::start(setup.start(), |listener, engine, metrics, shutdown| async move {
            tandem_decode_worker::run(listener, engine, settings, metrics, shutdown).await.is_ok()
        })
        .await
    }

    async fn start<F>(
        (engine, gate): (EngineHandle, Gate),
        run: impl FnOnce(TcpListener, EngineHandle, Metrics, Shutdown) -> F + Send + 'static,
    ) -> Self
    where
        F: Future<Output = bool> + Send + 'static,
    {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("the runtime can be built");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
        listener.set_nonblocking(true).expect("the socket supports non-blocking mode");
        let address = listener.local_addr().expect("the listener is bound").to_string();
        let (metrics, shutdown, (end, ended)) = (Metrics::default(), Shutdown::default(), oneshot::channel());
        let parts = (engine.clone(), metrics.clone(), shutdown.clone());
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).expect("the listener joins the runtime");
            let ok = run(listener, parts.0, parts.1, parts.2).await;
            // Sending fails if the test no longer waits for the result.
            let _ = end.send(ok);
        });
        let mut control = ControlClient::new(channel(&address).await);
        let info = control.describe(DescribeRequest::default()).await.expect("the worker answers").into_inner();
        Self { info, address, engine, gate, metrics, shutdown, ended, runtime: Some(runtime) }
    }

    /// Makes the worker hang until the returned value is dropped, like a process that received SIGSTOP.
    pub fn hang(&mut self) -> std::sync::mpsc::Sender<()> {
        let (hang, ended) = std::sync::mpsc::channel();
        // The task blocks the only thread of the worker's runtime.
        self.runtime.as_ref().expect("the worker runs").spawn(async move { ended.recv() });
        hang
    }

    pub fn reference(&self) -> WorkerRef {
        WorkerRef {
            worker_id: self.info.worker_id.clone(),
            instance_id: self.info.instance_id.clone(),
            address: self.address.clone(),
            ..Default::default()
        }
    }

    /// Ends the worker like a killed process: all its connections close.
    pub fn kill(&mut self) {
        self.runtime.take().expect("the worker runs").shutdown_background();
    }

    pub async fn idle(&self) {
        tandem_tests::engine_idle(&self.engine).await.unwrap_or_else(|busy| panic!("{}: {busy:#}", self.info.worker_id));
    }

    pub async fn until(&self, condition: impl FnMut(&tandem_kv::Load) -> bool) {
        tokio::time::timeout(TIMEOUT, self.engine.wait_for_load(condition)).await.expect("the load meets the condition in time");
    }

    pub fn metric(&self, series: &str) -> f64 {
        let text = self.metrics.render();
        let line = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.parse().expect("the metric's value is a number"))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

pub async fn channel(address: &str) -> Channel {
    let connecting = async {
        let endpoint = endpoint(address).expect("the address has a host and a port");
        loop {
            if let Ok(channel) = endpoint.connect().await {
                return channel;
            }
        }
    };
    tokio::time::timeout(TIMEOUT, connecting).await.expect("the server listens")
}

pub struct Cluster {
    pub prefill: Worker,
    pub decode: Worker,
    pub client: DecodeClient<Channel>,
    pub to_prefill: PrefillClient<Channel>,
}

impl Cluster {
    pub async fn start(prefill: Setup, decode: Setup) -> Self {
        let (prefill, decode) = (Worker::prefill(&prefill).await, Worker::decode(&decode).await);
        let client = DecodeClient::new(channel(&decode.address).await);
        let to_prefill = PrefillClient::new(channel(&prefill.address).await);
        Self { prefill, decode, client, to_prefill }
    }

    pub async fn idle(&self) {
        self.prefill.idle().await;
        self.decode.idle().await;
    }

    /// Returns a request that is prefilled on the decode worker.
    pub fn local(&self, prompt: Vec<u32>, max_tokens: u32) -> GenerateRequest {
        GenerateRequest {
            request_id: "request".to_owned(),
            attempt: 1,
            instance_id: self.decode.info.instance_id.clone(),
            prompt,
            cache_namespace: b"sim".to_vec(),
            sampling: Some(Sampling {
                max_tokens: Some(max_tokens),
                temperature: 1.0,
                top_p: 1.0,
                repetition_penalty: 1.0,
                seed: 7,
                ..Default::default()
            }),
            samples: 1,
            ..Default::default()
        }
    }

    /// Returns a request that is prefilled on the prefill worker.
    pub fn remote(&self, prompt: Vec<u32>, max_tokens: u32) -> GenerateRequest {
        GenerateRequest { prefill: Some(self.prefill.reference()), ..self.local(prompt, max_tokens) }
    }

    pub async fn open(&self, request: GenerateRequest) -> Replies {
        Replies(self.client.clone().generate(request).await.expect("the request is accepted").into_inner())
    }

    pub async fn answer(&self, request: GenerateRequest) -> Answer {
        self.open(request).await.answer().await
    }

    /// Runs a request that must fail, and returns the reason and the instance that the failure names.
    pub async fn failure(&self, request: GenerateRequest) -> (FailureReason, String) {
        let failure = self.answer(request).await.failure.expect("the request fails");
        (failure.reason(), failure.instance_id)
    }
}

pub struct Replies(pub Streaming<GenerateReply>);

impl Replies {
    pub async fn next(&mut self) -> Option<Message> {
        let reply =
            tokio::time::timeout(TIMEOUT, self.0.message()).await.expect("a message arrives").expect("the stream has no error");
        reply.map(|reply| reply.message.expect("messages are not empty"))
    }

    pub async fn scheduled(&mut self) -> Scheduled {
        match self.next().await {
            Some(Message::Scheduled(scheduled)) => scheduled,
            other => panic!("expected Scheduled, received {other:?}"),
        }
    }

    pub async fn started(&mut self) -> DecodeStarted {
        match self.next().await {
            Some(Message::DecodeStarted(started)) => started,
            other => panic!("expected DecodeStarted, received {other:?}"),
        }
    }

    pub async fn tokens(&mut self) -> Vec<u32> {
        let mut tokens = Vec::new();
        while let Some(message) = self.next().await {
            if let Message::Tokens(chunk) = message {
                tokens.extend(chunk.tokens.into_iter().map(|token| token.token));
            }
        }
        tokens
    }

    pub async fn answer(mut self) -> Answer {
        let mut answer = Answer::default();
        while let Some(message) = self.next().await {
            assert!(answer.failure.is_none(), "a failure is the last message");
            match message {
                Message::Waiting(_) => {}
                Message::Scheduled(scheduled) => {
                    assert!(
                        answer.scheduled.is_none() && answer.started.is_none(),
                        "Scheduled is sent once, as the first message"
                    );
                    answer.scheduled = Some(scheduled);
                }
                Message::DecodeStarted(started) => {
                    assert!(
                        answer.scheduled.is_some() && answer.started.is_none(),
                        "DecodeStarted is sent once, after Scheduled"
                    );
                    answer.started = Some(started);
                }
                Message::PrefillTimeline(prefilled) => {
                    assert!(
                        answer.started.is_some() && answer.chunks.is_none(),
                        "PrefillTimeline is sent once, after DecodeStarted"
                    );
                    answer.chunks = Some(prefilled.chunks);
                }
                Message::PromptLogprobs(logprobs) => {
                    assert!(answer.started.is_some() && answer.tokens.is_empty(), "PromptLogprobs is sent before any token");
                    answer.prompt_logprobs = Some(logprobs);
                }
                Message::Tokens(tokens) => {
                    assert!(answer.started.is_some(), "tokens are sent after DecodeStarted");
                    assert!(!tokens.tokens.is_empty(), "no message is empty");
                    assert!(!answer.finished.contains_key(&tokens.sample), "a finished sample has no more tokens");
                    answer.tokens.entry(tokens.sample).or_default().extend(tokens.tokens.iter().map(|token| token.token));
                }
                Message::Finished(finished) => {
                    assert!(answer.started.is_some(), "no sample finishes before DecodeStarted");
                    assert!(answer.finished.insert(finished.sample, finished).is_none(), "a sample finishes once");
                }
                Message::Failure(failure) => answer.failure = Some(failure),
            }
        }
        answer
    }
}

#[derive(Debug, Default)]
pub struct Answer {
    pub scheduled: Option<Scheduled>,
    pub started: Option<DecodeStarted>,
    pub chunks: Option<Vec<PrefillChunk>>,
    pub prompt_logprobs: Option<PromptLogprobs>,
    pub tokens: BTreeMap<u32, Vec<u32>>,
    pub finished: BTreeMap<u32, Finished>,
    pub failure: Option<Failure>,
}

impl Answer {
    pub fn cached_tokens(&self) -> Option<u32> {
        self.scheduled.as_ref().expect("Scheduled was sent").cached_tokens
    }

    pub fn prefilled_tokens(&self) -> u32 {
        self.chunks.iter().flatten().map(|chunk| chunk.tokens).sum()
    }

    pub fn kv_transfer_bytes(&self) -> u64 {
        self.started.as_ref().expect("DecodeStarted was sent").kv_transfer_bytes
    }
}

/// Returns a prompt of `len` tokens. Prompts with different numbers have no block in common.
pub fn prompt(number: u32, len: u32) -> Vec<u32> {
    (0..len).map(|position| (number * 31 + position * 7) % 250).collect()
}
