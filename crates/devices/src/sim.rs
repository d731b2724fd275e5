//! A simulated device without a model. Its tokens are deterministic, and its durations come from a cost model.
//!
//! Each slot of a block holds a hash of the sequence up to the slot's token, and the next token depends on the KV of *all* tokens before it.
//! So an incomplete, outdated or misplaced block changes the text, and a test that compares texts detects it.

use std::{collections::BTreeMap, time::Duration};
use tandem_engine::{Chunk, Engine, EngineError, EngineInfo, Logits, SampleRequest, SampledToken, SimClock, StepOutput};
use tandem_kv::{BlockId, TokenId, mix};
use tandem_model::sim::{CONTEXT_LENGTH, IM_END, VOCAB_SIZE};

/// The cost model and the memory of a simulated device.
#[derive(Clone, Copy, Debug)]
pub struct SimSettings {
    /// The number of tokens in a block.
    pub block_size: u32,
    /// The number of blocks in the KV memory.
    pub capacity_blocks: u32,
    /// The number of prompt tokens computed per second, not counting the fixed duration of a step.
    pub prefill_tokens_per_second: f64,
    /// The fixed duration of a step that computes prompt tokens.
    pub prefill_overhead: Duration,
    /// The fixed duration of a step with decoding sequences.
    pub decode_step: Duration,
    /// The additional duration of a step for each decoding sequence.
    pub decode_per_sequence: Duration,
    /// The size of a token's KV in bytes, from which the duration of a simulated transfer is computed.
    pub kv_bytes_per_token: f64,
    /// The bandwidth of simulated transfers between workers, in bytes per second.
    pub transfer_bytes_per_second: f64,
    /// All simulated durations are divided by this number.
    pub speedup: f64,
}

impl Default for SimSettings {
    fn default() -> Self {
        Self {
            block_size: 16,
            capacity_blocks: 4_096,
            prefill_tokens_per_second: 20_000.0,
            prefill_overhead: Duration::from_millis(4),
            decode_step: Duration::from_millis(6),
            decode_per_sequence: Duration::from_micros(100),
            kv_bytes_per_token: 131_072.0,
            transfer_bytes_per_second: 10e9,
            speedup: 1.0,
        }
    }
}

impl SimSettings {
    /// Returns the simulated time that the transfer of one block to another worker takes.
    pub fn block_transfer(&self) -> Duration {
        self.scaled(f64::from(self.block_size) * self.kv_bytes_per_token / self.transfer_bytes_per_second)
    }

    fn scaled(&self, seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds / self.speedup)
    }
}

/// The tokens that a simulated device generates.
#[derive(Clone, Debug)]
pub struct Vocabulary {
    /// The number of token ids in the vocabulary.
    pub size: usize,
    /// The length of the context: the maximum number of tokens in a sequence.
    pub context_length: u32,
    /// The tokens of which answers consist; there is at least one.
    pub words: Vec<TokenId>,
    /// The token that ends an answer.
    pub end: TokenId,
    /// The token with which the device ends a text inside an answer that has a constraint, as a quotation mark does in JSON.
    pub close: Option<TokenId>,
}

impl Default for Vocabulary {
    /// Returns a vocabulary in which each byte is a token. Answers consist of frequent letters.
    fn default() -> Self {
        let words = b"etaoin shrdlu etaoin cmfwyp ".map(TokenId::from).to_vec();
        Self { size: VOCAB_SIZE, context_length: CONTEXT_LENGTH, words, end: IM_END, close: Some(b'"'.into()) }
    }
}

/// A simulated device, which implements [`Engine`].
pub struct SimEngine {
    settings: SimSettings,
    vocabulary: Vocabulary,
    /// The slots of all blocks. A block has `block_size` slots, one for each token.
    slots: Vec<u64>,
    folds: Vec<Option<u64>>,
    clock: SimClock,
    real_time: bool,
    samples: bool,
}

/// After each token, an answer ends with a probability of about 1 ÷ `END_ODDS`.
const END_ODDS: u64 = 64;
/// The logit of tokens that are practically never sampled. It is a finite number.
const NO_CANDIDATE: f32 = -100.0;
const SLOT_BYTES: usize = 8;

impl SimEngine {
    /// Creates a device whose tokens are bytes.
    pub fn new(settings: SimSettings) -> Self {
        Self::with_vocabulary(settings, Vocabulary::default())
    }

    /// Creates a device that generates the tokens of this vocabulary.
    pub fn with_vocabulary(settings: SimSettings, vocabulary: Vocabulary) -> Self {
        let blocks = settings.capacity_blocks as usize;
        Self {
            settings,
            vocabulary,
            slots: vec![0; blocks * settings.block_size as usize],
            folds: vec![None; blocks],
            clock: SimClock::default(),
            real_time: false,
            samples: false,
        }
    }

    /// Makes the device sample tokens, from the few that are likely, instead of returning rows of the whole vocabulary.
    #[must_use]
    pub fn sampling(self) -> Self {
        Self { samples: true, ..self }
    }

    /// Makes each step take its simulated duration in real time, instead of adding the duration to the clock.
    #[must_use]
    pub fn in_real_time(self) -> Self {
        Self { real_time: true, ..self }
    }

    /// Returns the clock to which steps add their simulated durations.
    pub fn clock(&self) -> SimClock {
        self.clock.clone()
    }

    fn slot(&self, blocks: &[BlockId], position: usize) -> usize {
        let size = self.settings.block_size as usize;
        blocks[position / size].0 as usize * size + position % size
    }

    fn state(&mut self, blocks: &[BlockId], len: usize) -> u64 {
        let size = self.settings.block_size as usize;
        let mut state = 0;
        for block in &blocks[..len / size] {
            let block = block.0 as usize;
            let fold = *self.folds[block].get_or_insert_with(|| fold(&self.slots[block * size..][..size]));
            state = mix(state ^ fold);
        }
        if !len.is_multiple_of(size) {
            let start = self.slot(blocks, len - len % size);
            state = mix(state ^ fold(&self.slots[start..][..len % size]));
        }
        state
    }
}

impl Engine for SimEngine {
    fn describe(&self) -> EngineInfo {
        let s = &self.settings;
        EngineInfo {
            vocab_size: self.vocabulary.size,
            context_length: self.vocabulary.context_length,
            block_size: s.block_size,
            capacity_blocks: s.capacity_blocks,
            block_bytes: s.block_size as usize * SLOT_BYTES,
        }
    }

    fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, EngineError> {
        let (mut logits, mut sampled) = (Vec::new(), Vec::new());
        let (mut prefill_tokens, mut decodes) = (0, 0u32);
        for chunk in chunks {
            match chunk.tokens.len() {
                1 => decodes += 1,
                more => prefill_tokens += more,
            }
            let start = chunk.start as usize;
            let mut hash = if start == 0 { 0 } else { self.slots[self.slot(chunk.blocks, start - 1)] };
            for (i, token) in chunk.tokens.iter().enumerate() {
                hash = mix(hash ^ u64::from(*token));
                let slot = self.slot(chunk.blocks, start + i);
                self.slots[slot] = hash;
                self.folds[slot / self.settings.block_size as usize] = None;
                let wanted = match chunk.logits {
                    Logits::None => false,
                    Logits::Last | Logits::Sample(_) => i + 1 == chunk.tokens.len(),
                    Logits::All => true,
                };
                if wanted {
                    let state = self.state(chunk.blocks, start + i + 1);
                    match chunk.logits {
                        Logits::Sample(request) if self.samples => sampled.push(self.vocabulary.sample(state, &request)),
                        _ => self.vocabulary.push_logits(&mut logits, state),
                    }
                }
            }
        }
        let s = &self.settings;
        let mut seconds = 0.0;
        if prefill_tokens > 0 {
            seconds += s.prefill_overhead.as_secs_f64() + prefill_tokens as f64 / s.prefill_tokens_per_second;
        }
        if decodes > 0 {
            seconds += s.decode_step.as_secs_f64() + f64::from(decodes) * s.decode_per_sequence.as_secs_f64();
        }
        self.clock.add(s.scaled(seconds));
        if self.real_time
            && let Some(duration) = self.clock.take()
        {
            std::thread::sleep(duration);
        }
        Ok(if self.samples { StepOutput::Sampled { tokens: sampled, logits } } else { StepOutput::Logits(logits) })
    }

    fn read_block(&self, block: BlockId, into: &mut [u8]) -> Result<(), EngineError> {
        let size = self.settings.block_size as usize;
        let slots = &self.slots[block.0 as usize * size..][..size];
        for (bytes, slot) in into.chunks_exact_mut(SLOT_BYTES).zip(slots) {
            bytes.copy_from_slice(&slot.to_le_bytes());
        }
        Ok(())
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), EngineError> {
        let size = self.settings.block_size as usize;
        let slots = &mut self.slots[block.0 as usize * size..][..size];
        for (slot, bytes) in slots.iter_mut().zip(bytes.chunks_exact(SLOT_BYTES)) {
            *slot = u64::from_le_bytes(bytes.try_into().expect("chunks have the size of a slot"));
        }
        self.folds[block.0 as usize] = None;
        Ok(())
    }
}

fn fold(slots: &[u64]) -> u64 {
    slots.iter().fold(0, |fold, slot| mix(fold ^ slot))
}

impl Vocabulary {
    /// Returns the likely tokens and their logits, at most six. Up to four of them are words, so that temperature and seed change the
    /// sampled token. In some rows the end token is the likeliest. If a constraint bars the end token, the token that closes a text is the
    /// likeliest instead.
    fn candidates(&self, state: u64) -> BTreeMap<TokenId, f32> {
        let word = |candidate: u64| {
            let draw = mix(state ^ (candidate << 32));
            (self.words[(draw % self.words.len() as u64) as usize], 4.0 - candidate as f32)
        };
        let mut candidates: BTreeMap<_, _> = (0..4).rev().map(word).collect();
        if state.is_multiple_of(END_ODDS) {
            candidates.insert(self.end, 8.0);
            candidates.extend(self.close.map(|close| (close, 4.0)));
        }
        candidates
    }

    /// Appends a row with the logits of all tokens.
    fn push_logits(&self, logits: &mut Vec<f32>, state: u64) {
        let row = logits.len();
        logits.resize(row + self.size, NO_CANDIDATE);
        self.candidates(state).into_iter().for_each(|(token, logit)| logits[row + token as usize] = logit);
    }

    fn sample(&self, state: u64, request: &SampleRequest<'_>) -> SampledToken {
        let candidates: Vec<(TokenId, f32)> = self.candidates(state).into_iter().collect();
        request.among(&candidates).unwrap_or_else(|| {
            let mut row = Vec::new();
            self.push_logits(&mut row, state);
            request.on_host(&row)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_engine::{Sampler, Sampling};

    const BLOCKS: [BlockId; 3] = [BlockId(5), BlockId(0), BlockId(2)];

    fn engine() -> SimEngine {
        SimEngine::new(SimSettings { capacity_blocks: 8, ..SimSettings::default() })
    }

    fn compute(engine: &mut SimEngine, tokens: &[TokenId], blocks: &[BlockId], budget: usize) -> Vec<f32> {
        let mut last = Vec::new();
        for (i, tokens) in tokens.chunks(budget).enumerate() {
            let chunk = Chunk { tokens, start: (i * budget) as u32, blocks, logits: Logits::Last };
            last = engine.step(&[chunk]).expect("the simulator does not fail").into_logits();
        }
        last
    }

    #[test]
    fn logits_depend_on_every_token_but_not_on_chunks_or_blocks() {
        let tokens: Vec<TokenId> = (0..40).collect();
        let whole = compute(&mut engine(), &tokens, &BLOCKS, 40);
        assert_eq!(whole, compute(&mut engine(), &tokens, &BLOCKS, 7));
        assert_eq!(whole, compute(&mut engine(), &tokens, &[BlockId(1), BlockId(3), BlockId(4)], 16));
        let mut other = tokens.clone();
        other[3] = 99;
        assert_ne!(whole, compute(&mut engine(), &other, &BLOCKS, 40));
    }

    #[test]
    fn copied_blocks_give_equal_logits_and_incomplete_blocks_do_not() {
        let tokens: Vec<TokenId> = (0..40).collect();
        let whole = compute(&mut engine(), &tokens, &BLOCKS, 40);
        let mut source = engine();
        compute(&mut source, &tokens[..39], &BLOCKS, 39);
        for torn in [false, true] {
            let mut destination = engine();
            let mut bytes = vec![0; source.describe().block_bytes];
            for block in BLOCKS {
                source.read_block(block, &mut bytes).unwrap();
                if torn && block == BLOCKS[0] {
                    bytes[64..].fill(0);
                }
                destination.write_block(block, &bytes).unwrap();
            }
            let last = Chunk { tokens: &tokens[39..], start: 39, blocks: &BLOCKS, logits: Logits::Last };
            let logits = destination.step(&[last]).expect("the simulator does not fail").into_logits();
            assert_eq!(logits == whole, !torn);
        }
    }

    #[test]
    fn device_samples_the_tokens_that_the_host_samples_from_its_logits() {
        let vocabulary = Vocabulary::default();
        let plain = Sampling::default();
        let cases = [
            plain.clone(),
            Sampling { temperature: 0.0, ..plain.clone() },
            Sampling { temperature: 0.3, top_p: 0.7, ..plain.clone() },
            Sampling { top_k: 2, min_p: 0.05, ..plain.clone() },
            Sampling { temperature: 2.0, ..plain.clone() },
            Sampling { min_tokens: 1, stop_token_ids: vec![IM_END], ..plain.clone() },
            Sampling { logprobs: Some(2), ..plain.clone() },
            Sampling { logit_bias: [(7, 50.0)].into(), ..plain.clone() },
            Sampling { presence_penalty: 1.0, ..plain.clone() },
            Sampling { allowed_token_ids: [7, 9].into(), ..plain },
        ];
        for (case, sampling) in cases.into_iter().enumerate() {
            for state in 0..300 {
                let sampler = Sampler::new(Sampling { seed: state, ..sampling.clone() }, &[]);
                let request = sampler.request(state as u32);
                let mut row = Vec::new();
                vocabulary.push_logits(&mut row, state);
                assert_eq!(vocabulary.sample(state, &request), request.on_host(&row), "case {case}, state {state}");
            }
        }
    }

    #[test]
    fn simulated_time_follows_the_cost_model() {
        let mut engine = SimEngine::new(SimSettings { speedup: 10.0, ..SimSettings::default() });
        let tokens = vec![1; 2_000];
        let blocks: Vec<BlockId> = (0..125).map(BlockId).collect();
        let chunk = Chunk { tokens: &tokens, start: 0, blocks: &blocks, logits: Logits::None };
        engine.step(&[chunk]).expect("the simulator does not fail");
        assert_eq!(engine.clock().take(), Some(Duration::from_micros(10_400)));
        // A block has 16 tokens of 128 KiB each. Its transfer at 10 GB/s is simulated ten times as fast.
        assert_eq!(engine.settings.block_transfer().as_micros(), 20);
    }
}
