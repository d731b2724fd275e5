//! Runs batches of token chunks on a device, and decides which chunks run when.
//!
//! [`Engine`] is the device: [`cpu`], [`cuda`] and [`sim`] implement it. Everything above it is shared: the step machine (which chunks
//! make a step), sampling, and the thread that owns both ([`EngineHandle`]).

mod chunk;
pub mod cpu;
pub mod cuda;
mod event;
mod handle;
mod machine;
mod request;
mod sampling;
pub mod sim;
mod ticket;

pub use chunk::ChunkError;
pub use event::{Event, FinishReason, PrefillChunk, Started};
pub use handle::{EngineHandle, EngineSettings, Job};
pub use request::{Generate, Generated, KvSource, Prefill, Refusal};
pub use sampling::{SampleRequest, SampledToken, Sampling, TokenLogprob, TokenLogprobs};
pub use ticket::WriteRefused;

use std::sync::Arc;
use tandem_kv::{BlockId, KvMemory, TokenId};

/// A device that holds a model and the KV memory of one worker.
pub trait Engine: Send + 'static {
    /// What it is; never changes.
    fn describe(&self) -> EngineInfo;

    /// Computes the KV of every chunk's tokens, writes it into the chunk's blocks, and returns what the chunks' [`Logits`] ask for.
    ///
    /// The result of a chunk must depend only on its tokens, their positions and the KV before them: not on the other chunks of the step,
    /// nor on where chunks begin (bit for bit on [`cpu`] and [`sim`]).
    ///
    /// # Errors
    ///
    /// [`EngineError::Step`] if this step failed: the KV of its chunks is undefined. [`EngineError::Lost`] if the device cannot be used again.
    fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, EngineError>;

    /// Copies one block's KV out. `into` has `block_bytes`.
    fn read_block(&self, block: BlockId, into: &mut [u8]) -> Result<(), EngineError>;

    /// Copies one block's KV in. `bytes` has `block_bytes`.
    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), EngineError>;

    /// Returns the KV memory for transfers that run beside the steps, if the device has such: blocks that no step computes on may be read and
    /// written by way of it. `None`: blocks pass through the host.
    fn kv_memory(&self) -> Option<Arc<dyn KvMemory>> {
        None
    }

    /// Copies one block's KV to another.
    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), EngineError> {
        let mut bytes = vec![0; self.describe().block_bytes];
        self.read_block(from, &mut bytes)?;
        self.write_block(to, &bytes)
    }
}

/// The constants of an engine.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// Logits of one position.
    pub vocab_size: usize,
    /// The longest sequence the model takes, in tokens.
    pub context_length: u32,
    /// Tokens in a block.
    pub block_size: u32,
    /// Blocks in the KV memory.
    pub capacity_blocks: u32,
    /// Bytes of one block.
    pub block_bytes: usize,
}

/// Consecutive tokens of one sequence, computed in one step.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// At least one.
    pub tokens: &'a [TokenId],
    /// Position of the first of them.
    pub start: u32,
    /// The sequence's blocks from its position 0; they hold the KV before `start` and have room for these tokens.
    pub blocks: &'a [BlockId],
    /// Which of its tokens' logits the step returns.
    pub logits: Logits<'a>,
}

/// Which logits of a chunk a step returns.
#[derive(Clone, Copy, Debug)]
pub enum Logits<'a> {
    /// None: only the KV is computed.
    None,
    /// Those of the last token.
    Last,
    /// Those of every token.
    All,
    /// A device that samples returns the next token in place of the last token's logits; any other device returns these logits.
    Sample(SampleRequest<'a>),
}

/// What a step returns. Logits are rows of `vocab_size` numbers, in the order of the chunks and of their tokens.
#[derive(Clone, Debug)]
pub enum StepOutput {
    /// From a device that does not sample: all rows that the chunks ask for.
    Logits(Vec<f32>),
    /// From a device that samples.
    Sampled {
        /// One for each chunk with [`Logits::Sample`], in the order of the chunks.
        tokens: Vec<SampledToken>,
        /// The rows that all other chunks ask for.
        logits: Vec<f32>,
    },
}

impl StepOutput {
    /// The rows of logits, without sampled tokens.
    pub fn into_logits(self) -> Vec<f32> {
        match self {
            Self::Logits(logits) | Self::Sampled { logits, .. } => logits,
        }
    }
}

/// The device failed; what runs on it is lost.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// At this; the next step may go well.
    #[error("the engine failed: {0}")]
    Step(#[from] Box<dyn std::error::Error + Send + Sync>),
    /// For good: its thread ends, so that whoever runs the process starts it anew.
    #[error("the device is lost: {0}")]
    Lost(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// SplitMix64's finaliser: every input bit moves every output bit.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}
