//! A model on the CPU: Llamas and Qwens, one thread.
//!
//! What a token's result is depends on the tokens, their positions and the KV before them, bit for bit: not on the chunks of a
//! step, not on where chunks begin, not on the processor. Every sum has one order (see the kernels' files), whole numbers are summed
//! exactly, and nothing comes from a mathematics library that differs between machines.

mod attention;
mod isa;
mod linear;
mod math;
mod model;
#[cfg(test)]
mod tests;
mod weights;

pub use model::CpuModel;

use crate::{Chunk, Engine, EngineError, EngineInfo, Logits, StepOutput};
use attention::{KvLayout, Queries, Scratch, attend};
use half::{f16, slice::HalfFloatSliceExt};
use isa::Isa;
use linear::{Quantised, linear, quantise};
use math::{add, add_to_rows, rms_norm, rms_norm_in_place, rotate, swiglu, turns};
use model::Layer;
use std::{sync::Arc, time::Duration};
use tandem_kv::{BlockId, TokenId};
use tandem_model::{ModelError, TensorType};

/// Why a model cannot be run, or a step not be computed.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The file is not one of a model that can be run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A weight's number format has no kernel.
    #[error("tensor {name} is stored as {kind:?}: take a Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, F16, BF16 or F32 conversion of the model")]
    WeightType {
        /// The tensor.
        name: String,
        /// How it is stored.
        kind: TensorType,
    },
    /// A weight is infinite or not a number.
    #[error("tensor {name} has a number that is not finite: the file is damaged, fetch it again")]
    NotFinite {
        /// The tensor.
        name: String,
    },
    /// A layer has a weight that no model of its family has, and which this engine would leave out.
    #[error("the model has the tensor {name}, which is not supported in its family: choose another model")]
    Unexpected {
        /// The tensor.
        name: String,
    },
    /// Blocks have at least one token, a KV memory at least one block, and it must fit the address space.
    #[error("{capacity_blocks} blocks of {block_size} tokens are no possible KV memory: choose other sizes")]
    Settings {
        /// As set.
        block_size: u32,
        /// As set.
        capacity_blocks: u32,
    },
    /// A token's id lies beyond the vocabulary.
    #[error("a token lies beyond the vocabulary of {vocab_size}")]
    BeyondVocabulary {
        /// How many tokens there are.
        vocab_size: usize,
    },
    /// A chunk is empty or ends beyond the context.
    #[error("a chunk of {tokens} tokens from position {start} is empty or ends beyond the context of {context_length}")]
    BeyondContext {
        /// Its first position.
        start: u32,
        /// Its length.
        tokens: usize,
        /// The model's limit.
        context_length: u32,
    },
    /// A chunk has no block for one of its tokens, or one that is not in the KV memory.
    #[error("a chunk lacks blocks, or has one beyond the {capacity_blocks} there are")]
    NoBlock {
        /// As set.
        capacity_blocks: u32,
    },
}

/// The KV memory of one engine.
#[derive(Clone, Copy, Debug)]
pub struct CpuSettings {
    /// Tokens in a block.
    pub block_size: u32,
    /// Blocks in the KV memory.
    pub capacity_blocks: u32,
}

/// Computes one worker's steps.
pub struct CpuEngine {
    model: Arc<CpuModel>,
    settings: CpuSettings,
    isa: Isa,
    layout: KvLayout,
    /// Half-precision bits. Pages that were never written take no memory.
    kv: Vec<u16>,
    buffers: Buffers,
}

/// Used again in every step. Rows are those of all chunks, one after the other.
#[derive(Default)]
struct Buffers {
    /// The residual stream.
    stream: Vec<f32>,
    normed: Vec<f32>,
    quantised: Quantised,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// What a sub-layer adds to the stream.
    change: Vec<f32>,
    turns: Vec<[f32; 2]>,
    scratch: Scratch,
}

impl CpuEngine {
    /// An engine with an empty KV memory.
    pub fn new(model: Arc<CpuModel>, settings: CpuSettings) -> Result<Self, CpuError> {
        Self::with_isa(model, settings, Isa::detect())
    }

    fn with_isa(model: Arc<CpuModel>, settings: CpuSettings, isa: Isa) -> Result<Self, CpuError> {
        let CpuSettings { block_size, capacity_blocks } = settings;
        let config = &model.config;
        let layout = KvLayout {
            layers: config.layers,
            block_size: block_size as usize,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
        };
        let refused = CpuError::Settings { block_size, capacity_blocks };
        let len = (layout.row_len() * 2 * layout.layers)
            .checked_mul(block_size as usize)
            .and_then(|len| len.checked_mul(capacity_blocks as usize));
        let kv = match len {
            Some(len @ 1..) if len <= isize::MAX as usize / 2 => vec![0; len],
            _ => return Err(refused),
        };
        Ok(Self { model, settings, isa, layout, kv, buffers: Buffers::default() })
    }

    fn check(&self, chunk: &Chunk<'_>) -> Result<(), CpuError> {
        let (vocab_size, context_length) = (self.model.config.vocab_size, self.model.config.context_length);
        let tokens = chunk.tokens.len();
        let end = chunk.start as usize + tokens;
        if tokens == 0 || end > context_length as usize {
            return Err(CpuError::BeyondContext { start: chunk.start, tokens, context_length });
        }
        if chunk.tokens.iter().any(|token| *token as usize >= vocab_size) {
            return Err(CpuError::BeyondVocabulary { vocab_size });
        }
        let capacity_blocks = self.settings.capacity_blocks;
        match chunk.blocks.get(..end.div_ceil(self.layout.block_size)) {
            Some(blocks) if blocks.iter().all(|block| block.0 < capacity_blocks) => Ok(()),
            _ => Err(CpuError::NoBlock { capacity_blocks }),
        }
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
            simulated_block_transfer: Duration::ZERO,
        }
    }

    fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, EngineError> {
        for chunk in chunks {
            self.check(chunk).map_err(|error| EngineError(Box::new(error)))?;
        }
        let Self { model, isa, layout, kv, buffers, .. } = self;
        let mut step = Step { model, isa: *isa, layout, kv, buffers, chunks };
        step.embed();
        for (index, layer) in model.layers.iter().enumerate() {
            step.attention(index, layer);
            step.feed_forward(layer);
        }
        Ok(StepOutput { logits: step.logits(), simulated: Duration::ZERO })
    }

    fn read_block(&self, block: BlockId, into: &mut [u8]) {
        let halves = &self.kv[self.block_range(block)];
        assert_eq!(into.len(), size_of_val(halves), "a block is read into as many bytes as it has");
        for (into, half) in into.as_chunks_mut::<2>().0.iter_mut().zip(halves) {
            *into = half.to_le_bytes();
        }
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) {
        let range = self.block_range(block);
        let halves = &mut self.kv[range];
        assert_eq!(bytes.len(), size_of_val(halves), "a block is written from as many bytes as it has");
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *half = u16::from_le_bytes(*bytes);
        }
    }
}

/// One step under way.
struct Step<'a> {
    model: &'a CpuModel,
    isa: Isa,
    layout: &'a KvLayout,
    kv: &'a mut [u16],
    buffers: &'a mut Buffers,
    chunks: &'a [Chunk<'a>],
}

impl Step<'_> {
    /// Token ids to the first state of the stream, and positions to their turns.
    fn embed(&mut self) {
        let config = &self.model.config;
        let Buffers { stream, normed, change, queries, attended, keys, values, gate, up, turns: angles, .. } = &mut *self.buffers;
        let tokens: Vec<TokenId> = self.chunks.iter().flat_map(|chunk| chunk.tokens).copied().collect();
        let rows = tokens.len();
        for (buffer, width) in [
            (&mut *stream, config.width),
            (normed, config.width),
            (change, config.width),
            (queries, config.heads * config.head_dim),
            (attended, config.heads * config.head_dim),
            (keys, self.layout.row_len()),
            (values, self.layout.row_len()),
            (gate, config.ffn),
            (up, config.ffn),
        ] {
            buffer.resize(rows * width, 0.0);
        }
        for (token, into) in tokens.iter().zip(stream.chunks_exact_mut(config.width)) {
            self.model.embedding.row(*token as usize, into);
        }
        angles.clear();
        for chunk in self.chunks {
            for position in (chunk.start..).take(chunk.tokens.len()) {
                turns(position, &config.rope, angles);
            }
        }
    }

    fn attention(&mut self, index: usize, layer: &Layer) {
        let (config, isa, layout) = (&self.model.config, self.isa, self.layout);
        let Buffers { stream, normed, change, quantised, queries, keys, values, attended, turns, scratch, .. } =
            &mut *self.buffers;
        rms_norm(isa, stream, &layer.attention_norm, config.eps, normed);
        quantise(isa, normed, config.width, quantised);
        linear(isa, &layer.query, normed, quantised, queries);
        linear(isa, &layer.key, normed, quantised, keys);
        linear(isa, &layer.value, normed, quantised, values);
        if let Some(biases) = &layer.qkv_biases {
            add_to_rows(isa, queries, &biases.query);
            add_to_rows(isa, keys, &biases.key);
            add_to_rows(isa, values, &biases.value);
        }
        if let Some(norms) = &layer.qk_norms {
            rms_norm_in_place(isa, queries, &norms.query, config.eps);
            rms_norm_in_place(isa, keys, &norms.key, config.eps);
        }
        let query_len = config.heads * config.head_dim;
        rotate(isa, queries, query_len, turns, &config.rope, 1.0 / (config.head_dim as f32).sqrt());
        rotate(isa, keys, layout.row_len(), turns, &config.rope, 1.0);
        store_kv(layout, self.kv, self.chunks, index, keys, values);
        let mut row = 0;
        for chunk in self.chunks {
            let range = row * query_len..(row + chunk.tokens.len()) * query_len;
            let chunk_queries =
                Queries { queries: &queries[range.clone()], start: chunk.start as usize, layer: index, blocks: chunk.blocks };
            attend(isa, layout, self.kv, chunk_queries, scratch, &mut attended[range]);
            row += chunk.tokens.len();
        }
        quantise(isa, attended, query_len, quantised);
        linear(isa, &layer.attention_out, attended, quantised, change);
        add(isa, stream, change);
    }

    fn feed_forward(&mut self, layer: &Layer) {
        let (config, isa) = (&self.model.config, self.isa);
        let Buffers { stream, normed, change, quantised, gate, up, .. } = &mut *self.buffers;
        rms_norm(isa, stream, &layer.ffn_norm, config.eps, normed);
        quantise(isa, normed, config.width, quantised);
        linear(isa, &layer.gate, normed, quantised, gate);
        linear(isa, &layer.up, normed, quantised, up);
        swiglu(isa, gate, up);
        quantise(isa, gate, config.ffn, quantised);
        linear(isa, &layer.down, gate, quantised, change);
        add(isa, stream, change);
    }

    /// The head, for the rows that want it.
    fn logits(&mut self) -> Vec<f32> {
        let (config, isa) = (&self.model.config, self.isa);
        let Buffers { stream, normed, change: wanted, quantised, .. } = &mut *self.buffers;
        wanted.clear();
        let mut row = 0;
        for chunk in self.chunks {
            let end = row + chunk.tokens.len();
            let rows = match chunk.logits {
                Logits::None => end..end,
                Logits::Last => end - 1..end,
                Logits::All => row..end,
            };
            wanted.extend_from_slice(&stream[rows.start * config.width..rows.end * config.width]);
            row = end;
        }
        let normed = &mut normed[..wanted.len()];
        rms_norm(isa, wanted, &self.model.norm, config.eps, normed);
        quantise(isa, normed, config.width, quantised);
        let mut logits = vec![0.0; wanted.len() / config.width * config.vocab_size];
        linear(isa, self.model.head(), normed, quantised, &mut logits);
        logits
    }
}

/// Writes every row's keys and values into its block, rounded to half precision.
fn store_kv(layout: &KvLayout, kv: &mut [u16], chunks: &[Chunk<'_>], layer: usize, keys: &mut [f32], values: &mut [f32]) {
    let len = layout.row_len();
    let mut halves = vec![f16::ZERO; len];
    let mut rows = keys.chunks_exact_mut(len).zip(values.chunks_exact_mut(len));
    for chunk in chunks {
        let start = chunk.start as usize;
        for (position, (keys, values)) in (start..start + chunk.tokens.len()).zip(&mut rows) {
            let (keys_at, values_at) = layout.keys_and_values(chunk.blocks, layer, position);
            for (at, numbers) in [(keys_at, keys), (values_at, values)] {
                // What lies beyond half precision would become infinite, and attention over it not a number.
                numbers.iter_mut().for_each(|number| *number = number.clamp(f16::MIN.to_f32_const(), f16::MAX.to_f32_const()));
                halves.convert_from_f32_slice(numbers);
                for (into, half) in kv[at..at + len].iter_mut().zip(&halves) {
                    *into = half.to_bits();
                }
            }
        }
    }
}
