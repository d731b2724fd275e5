//! Measures the overhead of an engine step without the device's time: `cargo bench -p tandem-devices --bench step_loop`. 64 sequences are
//! decoded on a simulated device whose steps take no time; one task for each sequence reads its events, as on a worker. The overhead is the
//! time from the end of one device step to the beginning of the next: applying results, sampling, sending events to every job, publishing
//! load and cache events, planning. Each round has a median over its steps; the benchmark prints the median of seven rounds. The overhead is
//! measured with two vocabularies. The simulator's vocabulary is small, and only four of its tokens are likely; the goal applies to this
//! vocabulary. The other vocabulary has the size of SmolLM2's. Every token may be sampled, as with a model, so sampling takes most of the
//! time.
#![expect(clippy::print_stdout, clippy::disallowed_methods, reason = "the benchmark measures real time and prints measurements")]

use std::{
    sync::mpsc,
    time::{Duration, Instant},
};
use tandem_devices::sim::{SimEngine, SimSettings, Vocabulary};
use tandem_engine::{
    Chunk, Engine, EngineError, EngineHandle, EngineInfo, EngineSettings, Generate, KvSource, Sampling, StepOutput,
};
use tandem_kv::{BlockId, HashKey, Namespace, Priority};

const ROUNDS: usize = 7;
const BATCH: u32 = 64;
const PROMPT: u32 = 128;
const STEPS: usize = 100;
const VOCABULARY: usize = 49_152;
/// The goal for the overhead of a step with the simulator's vocabulary.
const GOAL: Duration = Duration::from_micros(50);

fn main() {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let random = Sampling::default();
    let filtered = Sampling { top_p: 0.9, top_k: 40, ..Sampling::default() };
    for size in [Vocabulary::default().size, VOCABULARY] {
        for (sampling, how) in
            [(&greedy, "greedy"), (&random, "temperature 1"), (&filtered, "temperature 1, top-k 40, top-p 0.9")]
        {
            let mut rounds: Vec<Duration> = (0..ROUNDS).map(|_| round(size, sampling)).collect();
            rounds.sort_unstable();
            let (median, low, high) = (rounds[ROUNDS / 2], rounds[0], rounds[ROUNDS - 1]);
            println!("{size} tokens, {how}: median {median:.1?} a step (from {low:.1?} to {high:.1?})");
        }
    }
    println!("goal: below {GOAL:?} with the simulator's vocabulary");
}

fn round(vocabulary_size: usize, sampling: &Sampling) -> Duration {
    let (gaps, measured) = mpsc::channel();
    let settings = SimSettings { speedup: f64::INFINITY, capacity_blocks: 1 << 20, ..SimSettings::default() };
    let vocabulary = Vocabulary { size: vocabulary_size, ..Vocabulary::default() };
    let engine = Measured { engine: SimEngine::with_vocabulary(settings, vocabulary), ended: None, gaps };
    let settings = EngineSettings {
        chunk_budget: 512,
        itl_max: None,
        batch_max: BATCH,
        queue_max: BATCH,
        prefix_caching: true,
        hash_key: HashKey::NONE,
        max_buffered_events: 1_024,
        step_max: Duration::from_secs(60),
    };
    let engine = EngineHandle::start(Box::new(engine), settings);
    let listeners = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().expect("the runtime can be built");
    for number in 0..BATCH {
        let generate = Generate {
            request_id: number.to_string(),
            account: String::new(),
            priority: Priority::default(),
            namespace: Namespace::new("bench", "", "", ""),
            prompt: (0..PROMPT).map(|position| (number * 31 + position * 7) % 250).collect(),
            sampling: Sampling { max_tokens: None, seed: u64::from(number), ..sampling.clone() },
            samples: 1,
            kv: KvSource::Local,
            prompt_logprobs: None,
            generated: Vec::new(),
            images: [].into(),
        };
        let engine = engine.clone();
        listeners.spawn(async move {
            let mut job = engine.generate(generate).await.expect("the engine has capacity");
            while job.next().await.is_some() {}
        });
    }
    let mut gaps: Vec<Duration> = measured.iter().take(STEPS).collect();
    assert_eq!(gaps.len(), STEPS, "the engine makes all steps");
    *gaps.select_nth_unstable(STEPS / 2).1
}

/// A device whose steps take no time. It reports how long it was idle before each step of a full batch.
struct Measured {
    engine: SimEngine,
    /// The time at which the last step ended; `None` if that step had no full batch.
    ended: Option<Instant>,
    gaps: mpsc::Sender<Duration>,
}

impl Engine for Measured {
    fn describe(&self) -> EngineInfo {
        self.engine.describe()
    }

    fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, EngineError> {
        let decodes = chunks.len() == BATCH as usize && chunks.iter().all(|chunk| chunk.tokens.len() == 1);
        if let (true, Some(ended)) = (decodes, self.ended) {
            // Sending fails after the last measured step, because the receiver is closed.
            let _ = self.gaps.send(ended.elapsed());
        }
        let mut logits = self.engine.step(chunks)?.into_logits();
        if self.engine.describe().vocab_size == VOCABULARY {
            for (token, logit) in logits.iter_mut().enumerate() {
                // Each unlikely token becomes between e^-24 and e^-8 times as likely as the likeliest token.
                *logit = logit.max(-4.0 - (token * 7 % 17) as f32);
            }
        }
        self.ended = decodes.then(Instant::now);
        Ok(StepOutput::Logits(logits))
    }

    fn read_block(&self, block: BlockId, into: &mut [u8]) -> Result<(), EngineError> {
        self.engine.read_block(block, into)
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), EngineError> {
        self.engine.write_block(block, bytes)
    }
}
