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
pub use sampling::{Draw, Drawn, Sampling, TokenLogprob, TokenLogprobs};
pub use ticket::WriteRefused;

use std::{pin::Pin, sync::Arc};
use tandem_kv::{BlockId, KvMemory, TokenId};

/// A device that holds a model and the KV memory of one worker.
pub trait Engine: Send + 'static {
    /// What it is; never changes.
    fn describe(&self) -> EngineInfo;

    /// Computes the KV of every chunk's tokens (writing it into the chunk's blocks) and the logits that were asked for.
    ///
    /// What a chunk's result is must depend on its tokens, their positions and the KV before them, and on nothing else:
    /// not on the other chunks of the step nor on where chunks begin (bit for bit on [`cpu`] and [`sim`]).
    fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, EngineError>;

    /// The same for devices that draw tokens themselves. Of a chunk that has a draw (`draws` has a place for each chunk) and wants the logits
    /// of its last token, the output has the token that was drawn instead, in the order of the chunks. Other devices give the logits.
    fn step_and_draw(&mut self, chunks: &[Chunk<'_>], _draws: &[Option<Draw<'_>>]) -> Result<StepOutput, EngineError> {
        self.step(chunks)
    }

    /// Resolves when the device has completed the last step, if that is later than the return of `step`. Only the simulator, whose steps
    /// take time without computing, has to wait.
    fn completed(&self) -> Completion {
        Box::pin(std::future::ready(()))
    }

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

/// The end of a step; see [`Engine::completed`].
pub type Completion = Pin<Box<dyn Future<Output = ()> + Send>>;

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
    /// For which of the tokens.
    pub logits: Logits,
}

/// For which tokens of a chunk logits are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// For none.
    None,
    /// For the last.
    Last,
    /// For each.
    All,
}

/// What a step brings.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// Rows of `vocab_size`, in the order of the chunks and of the tokens that wanted them.
    pub logits: Vec<f32>,
    /// Of a device that draws: the tokens it has drawn.
    pub drawn: Vec<Drawn>,
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
