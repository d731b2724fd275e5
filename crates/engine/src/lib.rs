//! Schedules token chunks into steps and runs them on a device.
//!
//! [`Engine`] is the device, which another crate implements. This crate is the same for all devices: the scheduler, which decides which
//! chunks make a step; sampling; and the thread that owns device and scheduler ([`EngineHandle`]).

mod chunk;
mod clock;
mod event;
mod handle;
mod machine;
mod request;
mod sampling;
#[cfg(test)]
#[path = "../../devices/src/sim.rs"]
pub mod sim;
mod ticket;

/// The scheduler's tests compile the simulated device's source (`sim.rs`) into this crate. That source imports this crate by its name, as the
/// crate `devices` does.
#[cfg(test)]
extern crate self as tandem_engine;

pub use chunk::ChunkError;
pub use clock::SimClock;
pub use event::{CachedTokens, Event, FinishReason, KvHandle, PrefillChunk, Started};
pub use handle::{EngineHandle, EngineSettings, Job};
pub use request::{Generate, Generated, KvSource, Prefill, PromptImage, Refusal};
pub use sampling::{Adjustment, BadWord, NO_TOKEN, SampleRequest, SampledToken, Sampler, Sampling, TokenLogprob, TokenLogprobs};
pub use ticket::{WriteRefused, new_room};

use std::sync::Arc;
use tandem_kv::{BlockId, KvMemory, TokenId};

/// A device that holds a model and the KV memory of one worker.
pub trait Engine: Send + 'static {
    /// Returns the engine's constants.
    fn describe(&self) -> EngineInfo;

    /// Computes the KV of every chunk's tokens, writes the KV into the chunk's blocks, and returns the results that the chunks' [`Logits`] request.
    ///
    /// The result of a chunk must depend only on its tokens, their positions and the KV before them: not on the other chunks of the step, nor on the
    /// positions at which chunks begin (bit for bit on `cpu` and `sim`).
    ///
    /// # Errors
    /// Returns [`EngineError::Step`] if this step failed; the KV of its chunks is then undefined. Returns [`EngineError::Lost`] if the device cannot
    /// be used again.
    fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, EngineError>;

    /// Copies one block's KV into a buffer of `block_bytes` bytes.
    ///
    /// # Errors
    /// Fails if the device fails.
    fn read_block(&self, block: BlockId, into: &mut [u8]) -> Result<(), EngineError>;

    /// Overwrites one block's KV with `block_bytes` bytes.
    ///
    /// # Errors
    /// Fails if the device fails. The block's content is then undefined.
    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), EngineError>;

    /// Returns the KV memory, or `None` if other threads cannot access it. While steps run, other threads may copy to and from the blocks
    /// that no step uses.
    fn kv_memory(&self) -> Option<Arc<dyn KvMemory>> {
        None
    }

    /// Returns how many CUDA graphs the driver has refused since the engine's start. Steps run without them, but more slowly.
    fn refused_graphs(&self) -> u64 {
        0
    }

    /// Copies one block's KV to another block.
    ///
    /// # Errors
    /// Fails if the device fails. The content of `to` is then undefined.
    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), EngineError> {
        let mut bytes = vec![0; self.describe().block_bytes];
        self.read_block(from, &mut bytes)?;
        self.write_block(to, &bytes)
    }
}

/// The constants of an engine: the sizes of its model and of its KV memory.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// The number of tokens in the vocabulary, which is the number of logits of one position.
    pub vocab_size: usize,
    /// The longest sequence that the model supports, in tokens.
    pub context_length: u32,
    /// The number of tokens in a block.
    pub block_size: u32,
    /// The number of blocks in the KV memory.
    pub capacity_blocks: u32,
    /// The size of one block's KV in bytes.
    pub block_bytes: usize,
}

/// Consecutive tokens of one sequence, computed in one step.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// The token ids; there is at least one.
    pub tokens: &'a [TokenId],
    /// The position of the first token in the sequence.
    pub start: u32,
    /// The sequence's blocks from position 0. They hold the KV before `start`, and the step writes the KV of `tokens` to them.
    pub blocks: &'a [BlockId],
    /// The logits of the chunk that the step must return.
    pub logits: Logits<'a>,
}

/// The logits of a chunk that a step must return.
#[derive(Clone, Copy, Debug)]
pub enum Logits<'a> {
    /// No logits are returned: the step only computes the KV.
    None,
    /// The logits of the last token are returned.
    Last,
    /// The logits of every token are returned.
    All,
    /// The next token is returned by a device that samples. Any other device returns the logits of the last token.
    Sample(SampleRequest<'a>),
}

/// The result of a step. Logits are rows of `vocab_size` numbers, in the order of the chunks and of their tokens.
#[derive(Clone, Debug)]
pub enum StepOutput {
    /// The output of a device that does not sample: all rows that the chunks request.
    Logits(Vec<f32>),
    /// The output of a device that samples.
    Sampled {
        /// One token for each chunk with [`Logits::Sample`], in the order of the chunks.
        tokens: Vec<SampledToken>,
        /// The rows of logits that all other chunks request.
        logits: Vec<f32>,
    },
}

impl StepOutput {
    /// Returns the rows of logits, without sampled tokens.
    pub fn into_logits(self) -> Vec<f32> {
        match self {
            Self::Logits(logits) | Self::Sampled { logits, .. } => logits,
        }
    }
}

/// A failure of the device. All running requests are lost.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// An operation of the device failed; later operations may succeed.
    #[error("the engine failed: {0}")]
    Step(#[from] Box<dyn std::error::Error + Send + Sync>),
    /// The device cannot be used again: the engine's thread ends, so that the supervisor restarts the process.
    #[error("the device is lost: {0}")]
    Lost(#[source] Box<dyn std::error::Error + Send + Sync>),
}
