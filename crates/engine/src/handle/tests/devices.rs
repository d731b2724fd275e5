//! Tests with devices that sample tokens themselves, or that fail during a copy. The simulated engine does neither.

use super::*;
use crate::{Chunk, Logits, Prefill, StepOutput};

/// A device that samples tokens itself. If `broken` is true, every read and write of a block fails. If `lost` is true, every step fails.
/// The logits of the token after position `nans_after` are NaNs.
struct Device {
    sim: SimEngine,
    broken: bool,
    lost: bool,
    nans_after: Option<u32>,
    memory: Memory,
}

/// Memory that is freed slowly.
#[derive(Default)]
struct Memory(Arc<()>);

impl Drop for Memory {
    fn drop(&mut self) {
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Device {
    fn new() -> Self {
        Self {
            sim: SimEngine::new(SimSettings::default()),
            broken: false,
            lost: false,
            nans_after: None,
            memory: Memory::default(),
        }
    }

    fn copies(&self) -> Result<(), EngineError> {
        if self.broken { Err(EngineError::Step("the test's device fails".into())) } else { Ok(()) }
    }
}

impl Engine for Device {
    fn describe(&self) -> EngineInfo {
        self.sim.describe()
    }
    fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, EngineError> {
        if self.lost {
            return Err(EngineError::Lost("an illegal address".into()));
        }
        let all = self.sim.step(chunks)?.into_logits();
        let mut rows = all.chunks(self.sim.describe().vocab_size);
        let (mut tokens, mut logits) = (Vec::new(), Vec::new());
        for chunk in chunks {
            match chunk.logits {
                Logits::None => {}
                Logits::Last => logits.extend_from_slice(rows.next().expect("the model returned a row for each position")),
                Logits::All => rows.by_ref().take(chunk.tokens.len()).for_each(|row| logits.extend_from_slice(row)),
                Logits::Sample(request) => {
                    let mut row = rows.next().expect("the model returned a row for each position").to_vec();
                    if self.nans_after == Some(chunk.start + chunk.tokens.len() as u32 - 1) {
                        row.fill(f32::NAN);
                    }
                    tokens.push(request.on_host(&row));
                }
            }
        }
        Ok(StepOutput::Sampled { tokens, logits })
    }
    fn read_block(&self, block: BlockId, into: &mut [u8]) -> Result<(), EngineError> {
        self.copies()?;
        self.sim.read_block(block, into)
    }
    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), EngineError> {
        self.copies()?;
        self.sim.write_block(block, bytes)
    }
}

/// Returns a job that uses all inputs of sampling: several samples, penalties, and logprobs of the prompt and of the answer.
fn demanding() -> Generate {
    let sampling = Sampling {
        max_tokens: Some(40),
        frequency_penalty: 0.8,
        repetition_penalty: 1.2,
        top_k: 3,
        logprobs: Some(2),
        seed: 5,
        ..Sampling::default()
    };
    Generate { sampling, samples: 3, prompt_logprobs: Some(1), ..generate(0) }
}

async fn events(engine: &EngineHandle, generate: Generate) -> Vec<String> {
    let mut job = engine.generate(generate).await.expect("the job fits in the cache");
    let mut events = Vec::new();
    while let Some(event) = job.next().await {
        // `Started` contains durations, which may differ between two runs.
        if !matches!(event, Event::Started(_)) {
            events.push(format!("{event:?}"));
        }
    }
    events
}

#[tokio::test(start_paused = true)]
async fn device_samples_the_same_tokens_as_the_host() {
    let (device, host) = (start_device(Device::new()), start());
    let (drawn, expected) = tokio::join!(events(&device, demanding()), events(&host, demanding()));
    assert_eq!(drawn, expected);
    assert!(drawn.len() > 60, "{} events", drawn.len());
}

/// The engine must end, so that the supervisor restarts the process. Otherwise every later request would fail on the lost device, too.
#[tokio::test(start_paused = true)]
async fn engine_ends_when_its_device_is_lost() {
    let engine = start_device(Device { lost: true, ..Device::new() });
    let mut job = engine.generate(generate(3)).await.expect("the job fits in the cache");
    let mut last = None;
    while let Some(event) = job.next().await {
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Failed)), "{last:?}");
    assert!(engine.generate(generate(3)).await.is_err(), "the engine has ended");
}

#[tokio::test(start_paused = true)]
async fn failed_block_read_fails_all_jobs() {
    let engine = start_device(Device { broken: true, ..Device::new() });
    let prefill = Prefill {
        request_id: "request".to_owned(),
        account: String::new(),
        priority: Priority::default(),
        namespace: generate(1).namespace,
        prompt: (0..100).collect(),
        first_token: None,
    };
    let mut job = engine.prefill(prefill).await.expect("the job fits in the cache");
    job.send_blocks(vec![0, 1, 2], BlockAccess::Copied).await;
    let mut last = None;
    while let Some(event) = job.next().await {
        assert!(!matches!(event, Event::BlocksReady(_)), "a block that was not read is not sent");
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Failed)), "{last:?}");
    engine.wait_for_load(|load| load.in_use_blocks == 0).await;
}

#[tokio::test(start_paused = true)]
async fn failed_block_write_is_refused_and_fails_all_jobs() {
    let engine = start_device(Device { broken: true, ..Device::new() });
    let mut job =
        engine.generate(Generate { kv: crate::KvSource::Remote, ..generate(3) }).await.expect("the job fits in the cache");
    let Some(Event::Reserved { ticket, missing_blocks }) = job.next().await else { panic!("blocks are reserved first") };
    let payload = vec![0; engine.info().block_bytes].into();
    assert_eq!(engine.write_block(ticket, missing_blocks[0], payload).await, Err(WriteRefused::EngineEnded));
    let mut last = None;
    while let Some(event) = job.next().await {
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Failed)), "{last:?}");
    engine.wait_for_load(|load| load.in_use_blocks == 0).await;
}

#[tokio::test(start_paused = true)]
async fn request_whose_logits_are_nans_fails_and_others_continue() {
    // The first prompt has 100 tokens, the second one 40, so that only the first request computes position 104.
    let engine = start_device(Device { nans_after: Some(104), ..Device::new() });
    let short = Generate { prompt: (0..40).collect(), ..generate(30) };
    let mut jobs = [
        engine.generate(generate(30)).await.expect("the job fits in the cache"),
        engine.generate(short).await.expect("the job fits in the cache"),
    ];
    let mut ends = Vec::new();
    for job in &mut jobs {
        let (mut tokens, mut last) = (0, None);
        while let Some(event) = job.next().await {
            tokens += usize::from(matches!(event, Event::Token { .. }));
            last = Some(event);
        }
        ends.push((tokens, last));
    }
    assert!(matches!(ends[0], (5, Some(Event::Failed))), "{:?}", ends[0]);
    assert!(matches!(ends[1], (30, Some(Event::Finished { .. }))), "{:?}", ends[1]);
    engine.wait_for_load(|load| load.in_use_blocks == 0).await;
}

#[tokio::test]
async fn released_engine_has_freed_its_memory() {
    let device = Device::new();
    let memory = Arc::downgrade(&device.memory.0);
    let engine = EngineHandle::start(Box::new(device), SETTINGS);
    let mut job = engine.generate(generate(3)).await.expect("the job fits in the cache");
    while job.next().await.is_some() {}
    drop(job);
    engine.release().await;
    assert_eq!(memory.strong_count(), 0);
}
