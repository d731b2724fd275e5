//! Tests that blocks are transferred while later chunks are computed. They measure a prompt's handoff to a decode engine in milliseconds of
//! virtual time.

use super::*;
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tandem_devices::sim::{SimEngine, SimSettings};
use tandem_engine::{EngineHandle, EngineSettings, Generate, KvSource, Sampling};
use tandem_kv::{BlockAccess, Priority, ReadyBlock, Ticket};
use tandem_process::{Metrics, Shutdown};
use tandem_proto::{channel::Network, v1::worker_info::Role};
use tandem_transfer::{
    Lifetime, Progress, Refused, SendPath, SendPaths, SendSettings, SimulatedNetwork, SimulatedPath, TransferMode,
};
use tandem_worker::WorkerSettings;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

const BLOCK: u32 = 16;
const CHUNK: u32 = 64;
const CHUNKS: u32 = 10;
/// A prompt has ten chunks, and one more token, which the decode worker computes.
const PROMPT: u32 = CHUNK * CHUNKS + 1;
const DECODED: u32 = 24;
/// Maximum total delay of the timers. There is one timer per chunk, and each is late by less than a millisecond.
const LATE: Duration = Duration::from_millis(CHUNKS as u64);

#[derive(Clone, Copy)]
struct Pace {
    compute_ms: u32,
    transfer_ms: u32,
}

impl Pace {
    fn compute(self, chunks: u32) -> Duration {
        Duration::from_millis((self.compute_ms * chunks).into())
    }

    fn transfer(self, chunks: u32) -> Duration {
        Duration::from_millis((self.transfer_ms * chunks).into())
    }

    fn settings(self) -> SimSettings {
        SimSettings {
            prefill_tokens_per_second: f64::from(CHUNK) / f64::from(self.compute_ms) * 1e3,
            prefill_overhead: Duration::ZERO,
            kv_bytes_per_token: 1.0,
            transfer_bytes_per_second: f64::from(CHUNK) / f64::from(self.transfer_ms) * 1e3,
            ..SimSettings::default()
        }
    }
}

/// A prefill worker, and the engine of a decode worker to which it sends blocks over a simulated network.
struct Pair {
    prefill: PrefillWorker,
    decode: EngineHandle,
    written: Arc<Mutex<Vec<(u32, Instant)>>>,
    network: Arc<SimulatedNetwork>,
    alone: EngineHandle,
    _drivers: JoinSet<()>,
}

struct InProcess {
    engine: EngineHandle,
    ticket: Ticket,
    written: Arc<Mutex<Vec<(u32, Instant)>>>,
}

#[tonic::async_trait]
impl SendPath for InProcess {
    fn label(&self) -> &'static str {
        "in_process"
    }

    fn access(&self) -> BlockAccess {
        BlockAccess::Copied
    }

    async fn send(&mut self, blocks: Vec<ReadyBlock>) -> Result<Progress, TransferError> {
        for ReadyBlock { index, content, .. } in blocks {
            self.engine.write_block(self.ticket, index, content.into()).await.map_err(|_| Refused)?;
            self.written.lock().expect("no test panics with the lock").push((index, Instant::now()));
        }
        Ok(Progress::Sent)
    }

    async fn interrupted(&mut self) -> TransferError {
        std::future::pending().await
    }

    async fn finish(self: Box<Self>) -> Result<(), TransferError> {
        Ok(())
    }
}

/// The times of a handoff, counted from the submission of the prefill, and the generated tokens.
struct Handoff {
    started: Duration,
    written: Vec<(u32, Duration)>,
    tokens: Vec<u32>,
}

impl Handoff {
    fn written_by(&self, time: Duration) -> usize {
        self.written.iter().filter(|(_, written)| *written <= time).count()
    }
}

impl Pair {
    fn start(pace: Pace, chunk_budget: u32) -> Self {
        let settings = EngineSettings {
            chunk_budget,
            itl_max: None,
            batch_max: 16,
            queue_max: 16,
            prefix_caching: true,
            hash_key: tandem_kv::HashKey::NONE,
            max_buffered_events: 1_024,
            step_max: Duration::from_secs(60),
        };
        let mut drivers = JoinSet::new();
        let mut start = || {
            let engine = SimEngine::new(pace.settings());
            let clock = engine.clock();
            let (engine, running) = EngineHandle::simulated(Box::new(engine), clock, settings, 7);
            drivers.spawn(running);
            engine
        };
        let (engine, decode, alone) = (start(), start(), start());
        let (network, shutdown, settings) = (Network::default(), Shutdown::default(), WorkerSettings::default());
        let transfers = SendPaths::new(SendSettings {
            instance_id: String::new(),
            mode: TransferMode::Tcp,
            memory: None,
            block_bytes: engine.info().block_bytes,
            network: network.clone(),
            lifetime: Lifetime::new(shutdown.clone(), std::future::pending()),
        });
        let engine = Arc::new(engine);
        let common = tandem_worker::Worker::new(Role::Prefill, engine, settings, &network, &Metrics::default(), shutdown);
        let prefill =
            PrefillWorker { common, sending: crate::KvSending::Transfers(transfers), ticket_wait: Duration::from_secs(10) };
        let network = Arc::new(SimulatedNetwork::new(pace.settings().block_transfer()));
        Self { prefill, decode, written: Arc::default(), network, alone, _drivers: drivers }
    }

    /// Computes a prompt on the prefill worker and continues it on the decode worker. The decode worker sends its ticket after the time
    /// `ticket_after`.
    async fn handoff(&self, prompt: Vec<u32>, ticket_after: Duration) -> Handoff {
        let submitted = Instant::now();
        let job = self.submit(prompt.clone()).await;
        sleep(ticket_after).await;
        let mut continued = self.decode.generate(generate(prompt, KvSource::Remote)).await.expect("the job fits in the cache");
        let Some(Event::Reserved { ticket, missing_blocks }) = continued.next().await else { panic!("blocks are reserved") };
        let path = InProcess { engine: self.decode.clone(), ticket, written: Arc::clone(&self.written) };
        let path = SimulatedPath::new(Box::new(path), Arc::clone(&self.network));
        let transfer = Transfer::new(Box::new(path), self.decode.info().block_bytes);
        let span = Span::default();
        let sending = async {
            let sent = send(&self.prefill, job, missing_blocks, transfer, &span).await;
            self.decode.confirm(ticket).await;
            sent
        };
        let (sent, started) = tokio::join!(sending, async {
            assert!(matches!(continued.next().await, Some(Event::Started(_))));
            submitted.elapsed()
        });
        sent.expect("all tokens are sent");
        let written = std::mem::take(&mut *self.written.lock().expect("no test panics with the lock"));
        Handoff {
            started,
            written: written.into_iter().map(|(index, written)| (index, written - submitted)).collect(),
            tokens: tokens(continued).await,
        }
    }

    async fn prefill_alone(&self, prompt: Vec<u32>) {
        let mut job = self.submit(prompt).await;
        job.send_blocks(Vec::new(), BlockAccess::Copied).await;
        assert!(matches!(job.next().await, Some(Event::Computed(_))));
    }

    async fn submit(&self, prompt: Vec<u32>) -> CountedJob {
        let instance_id = self.prefill.common.info.instance_id.clone();
        let mut start = PrefillStart { instance_id, prompt, ..PrefillStart::default() };
        let mut job = submit(&self.prefill, &mut start).await.expect("the job fits in the cache");
        assert!(matches!(job.next().await, Some(Event::Scheduled { .. })));
        job
    }
}

fn generate(prompt: Vec<u32>, kv: KvSource) -> Generate {
    Generate {
        request_id: "request".to_owned(),
        account: String::new(),
        priority: Priority::default(),
        namespace: Namespace::from_bytes(&[]),
        prompt,
        sampling: Sampling { max_tokens: Some(DECODED), ..Sampling::default() },
        samples: 1,
        kv,
        prompt_logprobs: None,
        generated: Vec::new(),
        images: [].into(),
    }
}

async fn tokens(mut job: tandem_engine::Job) -> Vec<u32> {
    let mut tokens = Vec::new();
    while let Some(event) = job.next().await {
        if let Event::Token { token, .. } = event {
            tokens.push(token);
        }
    }
    tokens
}

fn prompt(number: u32) -> Vec<u32> {
    (0..PROMPT).map(|position| (number * 31 + position * 7) % 250).collect()
}

#[tokio::test(start_paused = true)]
async fn handoff_time_is_the_longer_of_computation_and_transfer_plus_one_chunk_of_the_shorter() {
    for (compute_ms, transfer_ms) in [(100, 4), (100, 60), (100, 100), (60, 100), (4, 100)] {
        let pace = Pace { compute_ms, transfer_ms };
        let pair = Pair::start(pace, CHUNK);
        let handoff = pair.handoff(prompt(1), Duration::ZERO).await;
        let (compute, transfer) = (pace.compute(CHUNKS), pace.transfer(CHUNKS));
        let expected = compute.max(transfer) + pace.compute(1).min(pace.transfer(1));
        let of = format!("{:?} for {compute:?} of compute and {transfer:?} of transfer", handoff.started);
        assert!((expected..=expected + LATE).contains(&handoff.started), "{of}");
        assert_eq!(handoff.written.len() as u32, PROMPT / BLOCK, "{of}");
        let alone = pair.alone.generate(generate(prompt(1), KvSource::Local)).await.expect("the job fits in the cache");
        assert_eq!(handoff.tokens, tokens(alone).await, "{of}");
    }
}

#[tokio::test(start_paused = true)]
async fn each_chunk_is_written_before_the_chunk_after_it_is_computed() {
    let pace = Pace { compute_ms: 100, transfer_ms: 80 };
    let handoff = Pair::start(pace, CHUNK).handoff(prompt(1), Duration::ZERO).await;
    for chunk in 1..CHUNKS {
        let written = handoff.written_by(pace.compute(chunk + 1)) as u32;
        assert_eq!(written, chunk * CHUNK / BLOCK, "all blocks before chunk {chunk} are written when it is computed");
    }
    assert!(handoff.written.is_sorted(), "blocks are written in order: {:?}", handoff.written);
}

/// The prompt is one chunk, so there is no later chunk whose computation could overlap the transfer.
#[tokio::test(start_paused = true)]
async fn prompt_in_one_chunk_is_computed_before_it_is_sent() {
    let pace = Pace { compute_ms: 100, transfer_ms: 80 };
    let handoff = Pair::start(pace, PROMPT).handoff(prompt(1), Duration::ZERO).await;
    let (compute, transfer) = (pace.compute(CHUNKS), pace.transfer(CHUNKS));
    assert_eq!(handoff.written_by(compute), 0);
    assert!((compute + transfer..=compute + transfer + LATE).contains(&handoff.started), "{:?}", handoff.started);
}

#[tokio::test(start_paused = true)]
async fn late_ticket_does_not_delay_the_handoff_if_the_transfer_is_fast_enough() {
    let pace = Pace { compute_ms: 100, transfer_ms: 40 };
    let ticket_after = pace.compute(CHUNKS / 2);
    let handoff = Pair::start(pace, CHUNK).handoff(prompt(1), ticket_after).await;
    assert_eq!(handoff.written_by(ticket_after), 0, "no block is written without a ticket");
    let expected = pace.compute(CHUNKS) + pace.transfer(1);
    assert!((expected..=expected + LATE).contains(&handoff.started), "{:?}", handoff.started);
}

#[tokio::test(start_paused = true)]
async fn cached_blocks_are_transferred_while_new_chunks_compute() {
    let pace = Pace { compute_ms: 100, transfer_ms: 10 };
    let pair = Pair::start(pace, CHUNK);
    let cached_chunks = CHUNKS / 2;
    let beginning = prompt(1)[..=(cached_chunks * CHUNK) as usize].to_vec();
    pair.prefill_alone(beginning).await;
    let handoff = pair.handoff(prompt(1), Duration::ZERO).await;
    // The engine reads a ticket between two steps; the first step is running when the ticket arrives.
    assert_eq!(handoff.written_by(pace.compute(2)) as u32, (cached_chunks + 1) * CHUNK / BLOCK);
    let expected = pace.compute(CHUNKS - cached_chunks) + pace.transfer(1);
    assert!((expected..=expected + LATE).contains(&handoff.started), "{:?}", handoff.started);
}
