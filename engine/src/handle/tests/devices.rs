//! What real devices do and the simulator does not: they draw tokens themselves, and fail in the middle of a copy.

use super::*;
use crate::{Chunk, Draw, Logits, Prefill, StepOutput};

/// Draws by itself where it is asked to; reads and writes blocks until it is `broken`, and computes until it is `lost`.
struct Device {
    sim: SimEngine,
    broken: bool,
    lost: bool,
}

impl Device {
    fn new() -> Self {
        Self { sim: SimEngine::new(SimSettings::default()), broken: false, lost: false }
    }

    fn copies(&self) -> Result<(), EngineError> {
        if self.broken { Err(EngineError::Step("the device is on fire".into())) } else { Ok(()) }
    }
}

impl Engine for Device {
    fn describe(&self) -> EngineInfo {
        self.sim.describe()
    }
    fn step(&mut self, _: &[Chunk<'_>]) -> Result<StepOutput, EngineError> {
        unreachable!("who drives a device says how tokens are drawn")
    }
    fn step_and_draw(&mut self, chunks: &[Chunk<'_>], draws: &[Option<Draw<'_>>]) -> Result<StepOutput, EngineError> {
        assert_eq!(chunks.len(), draws.len(), "a place for each chunk");
        if self.lost {
            return Err(EngineError::Lost("an illegal address".into()));
        }
        let all = self.sim.step(chunks)?;
        let mut rows = all.logits.chunks(self.sim.describe().vocab_size);
        let mut output = StepOutput { logits: Vec::new(), ..all.clone() };
        for (chunk, draw) in chunks.iter().zip(draws) {
            match (draw, chunk.logits) {
                (Some(draw), Logits::Last) => output.drawn.push(draw.on_host(rows.next().expect("a row for each"))),
                (Some(_), _) => unreachable!("only a last token is followed by a drawn one"),
                (None, Logits::None) => {}
                (None, Logits::Last) => output.logits.extend_from_slice(rows.next().expect("a row for each")),
                (None, Logits::All) => {
                    rows.by_ref().take(chunk.tokens.len()).for_each(|row| output.logits.extend_from_slice(row))
                }
            }
        }
        Ok(output)
    }
    fn completed(&self) -> crate::Completion {
        self.sim.completed()
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

/// Samples, penalties, logprobs of prompt and answer: everything that a draw depends on.
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
    let mut job = engine.generate(generate).await.expect("it fits");
    let mut events = Vec::new();
    while let Some(event) = job.next().await {
        // How long it took to start is another matter.
        if !matches!(event, Event::Started(_)) {
            events.push(format!("{event:?}"));
        }
    }
    events
}

#[tokio::test(start_paused = true)]
async fn what_a_device_draws_is_what_the_host_would_have_drawn() {
    let (device, host) = (start_engine(Device::new()), start());
    let (drawn, expected) = tokio::join!(events(&device, demanding()), events(&host, demanding()));
    assert_eq!(drawn, expected);
    assert!(drawn.len() > 60, "{} events", drawn.len());
}

/// Whoever runs the process starts it anew: on a device that refuses everything no other request would go better.
#[tokio::test(start_paused = true)]
async fn a_device_that_is_lost_ends_its_engine() {
    let engine = start_engine(Device { lost: true, ..Device::new() });
    let mut job = engine.generate(generate(3)).await.expect("it fits");
    let mut last = None;
    while let Some(event) = job.next().await {
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Failed)), "{last:?}");
    assert!(engine.generate(generate(3)).await.is_err(), "it is gone");
}

#[tokio::test(start_paused = true)]
async fn a_block_that_cannot_be_read_ends_its_jobs() {
    let engine = start_engine(Device { broken: true, ..Device::new() });
    let prefill = Prefill {
        request_id: "request".to_owned(),
        account: String::new(),
        namespace: generate(1).namespace,
        prompt: (0..100).collect(),
    };
    let mut job = engine.prefill(prefill).await.expect("it fits");
    job.send_blocks(vec![0, 1, 2], BlockAccess::Copied).await;
    let mut last = None;
    while let Some(event) = job.next().await {
        assert!(!matches!(event, Event::BlocksReady(_)), "no block that was not read is reported");
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Failed)), "{last:?}");
    engine.wait_for_load(|load| load.in_use_blocks == 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_block_that_cannot_be_written_is_refused_and_ends_its_jobs() {
    let engine = start_engine(Device { broken: true, ..Device::new() });
    let mut job = engine.generate(Generate { kv: crate::KvSource::Remote, ..generate(3) }).await.expect("it fits");
    let Some(Event::Reserved { ticket, missing_blocks }) = job.next().await else { panic!("blocks are reserved first") };
    let payload = vec![0; engine.info().block_bytes].into();
    assert_eq!(engine.write_block(ticket, missing_blocks[0], payload).await, Err(WriteRefused::EngineGone));
    let mut last = None;
    while let Some(event) = job.next().await {
        last = Some(event);
    }
    assert!(matches!(last, Some(Event::Failed)), "{last:?}");
    engine.wait_for_load(|load| load.in_use_blocks == 0).await;
}
