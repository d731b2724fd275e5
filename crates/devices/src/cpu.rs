//! The CPU back end for models of the Llama and Qwen families.
//!
//! The result for a token depends, bit for bit, only on the tokens up to it, their positions and their KV. It does not depend on the chunks
//! of a step, on the position at which a chunk begins, on the processor, or on the number of threads. For this purpose, every
//! floating-point sum has a fixed order, which the file of its kernel describes. Integers are summed exactly, and no mathematics library is
//! used that differs between machines (ADR 003).

mod attention;
mod isa;
mod linear;
mod math;
pub(crate) mod model;
mod simd;
mod step;
#[cfg(test)]
pub(crate) mod tests;
mod threads;
pub(crate) mod weights;

pub use isa::Isa;
pub use model::CpuModel;

use attention::KvLayout;
use std::sync::Arc;
use step::{Buffers, Step};
use tandem_engine::{Chunk, Engine, EngineError, EngineInfo, StepOutput};
use tandem_kv::BlockId;
use tandem_model::{ModelError, TensorType};
use threads::Threads;

/// The reason why a model cannot be loaded or an engine cannot be created.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages describe the fields")]
pub enum CpuError {
    /// The file is not a supported model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// There is no kernel for a weight's number format.
    #[error(
        "tensor {name} is stored as {kind:?}, which the CPU engine does not support: \
         use a Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, F16, BF16 or F32 conversion of the model"
    )]
    WeightType { name: String, kind: TensorType },
    /// A weight is infinite or not a number.
    #[error("tensor {name} has a number that is not finite: the file is damaged, fetch it again")]
    NotFinite { name: String },
    /// A layer has a weight that models of its family do not have. The kernels would ignore it and compute wrong results.
    #[error("the model has the tensor {name}, which is not supported in models of its family: use another model")]
    Unexpected { name: String },
    /// The KV memory would be empty, or larger than the address space.
    #[error(
        "a KV memory of {capacity_blocks} blocks of {block_size} tokens is empty or larger than the address space: choose other sizes"
    )]
    Settings { block_size: u32, capacity_blocks: u32 },
    /// The threads could not be started.
    #[error("the engine cannot start {count} threads: choose fewer with --threads")]
    Threads { count: usize, source: std::io::Error },
}

/// The settings of one engine: the size of its KV memory, and the threads and instruction set that its steps use.
#[derive(Clone, Copy, Debug)]
pub struct CpuSettings {
    /// The number of tokens in a block.
    pub block_size: u32,
    /// The number of blocks in the KV memory.
    pub capacity_blocks: u32,
    /// The number of threads that compute a step, including the thread that calls the engine; 0 counts as 1.
    pub threads: usize,
    /// The instruction set of the kernels.
    pub isa: Isa,
}

/// An engine that computes a model on the CPU.
pub struct CpuEngine {
    model: Arc<CpuModel>,
    settings: CpuSettings,
    threads: Threads,
    layout: KvLayout,
    /// The KV of all blocks, as half-precision bits in the order of [`KvLayout`]. Pages that were never written take no memory.
    kv: Vec<u16>,
    buffers: Buffers,
}

impl CpuEngine {
    /// Creates an engine with an empty KV memory.
    ///
    /// # Errors
    /// Returns [`CpuError::Settings`] if the KV memory would be empty or too large, and [`CpuError::Threads`] if the threads cannot be started.
    pub fn new(model: Arc<CpuModel>, settings: CpuSettings) -> Result<Self, CpuError> {
        let CpuSettings { block_size, capacity_blocks, threads: count, .. } = settings;
        let config = &model.config;
        let layout = KvLayout {
            layers: config.layers,
            block_size: block_size as usize,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        let len = [block_size, capacity_blocks]
            .into_iter()
            .try_fold(layout.row_len() * 2 * layout.layers, |len, count| len.checked_mul(count as usize));
        let kv = match len {
            Some(len @ 1..) if len <= isize::MAX as usize / 4 => vec![0; len + KvLayout::PADDING],
            _ => return Err(CpuError::Settings { block_size, capacity_blocks }),
        };
        let threads = Threads::new(count).map_err(|source| CpuError::Threads { count, source })?;
        Ok(Self { model, settings, threads, layout, kv, buffers: Buffers::default() })
    }

    fn block_range(&self, block: BlockId) -> std::ops::Range<usize> {
        let len = self.layout.block_len();
        block.0 as usize * len..(block.0 as usize + 1) * len
    }
}

impl Engine for CpuEngine {
    fn describe(&self) -> EngineInfo {
        EngineInfo {
            vocab_size: self.model.config.vocab_size,
            context_length: self.model.config.context_length,
            block_size: self.settings.block_size,
            capacity_blocks: self.settings.capacity_blocks,
            block_bytes: self.layout.block_len() * size_of::<u16>(),
        }
    }

    fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, EngineError> {
        let info = self.describe();
        for chunk in chunks {
            info.check_chunk(chunk).map_err(|error| EngineError::Step(Box::new(error)))?;
        }
        let Self { model, settings, threads, layout, kv, buffers } = self;
        let step = Step { model, isa: settings.isa, threads, layout, kv, buffers };
        Ok(StepOutput::Logits(step.run(chunks)))
    }

    fn read_block(&self, block: BlockId, into: &mut [u8]) -> Result<(), EngineError> {
        let halves = &self.kv[self.block_range(block)];
        assert_eq!(into.len(), size_of_val(halves), "the buffer has the size of a block");
        for (into, half) in into.as_chunks_mut::<2>().0.iter_mut().zip(halves) {
            *into = half.to_le_bytes();
        }
        Ok(())
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), EngineError> {
        let range = self.block_range(block);
        let halves = &mut self.kv[range];
        assert_eq!(bytes.len(), size_of_val(halves), "the payload has the size of a block");
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *half = u16::from_le_bytes(*bytes);
        }
        Ok(())
    }
}
