//! A model's weights in device memory, or one rank's shard of them.

use super::{
    CudaError,
    device::{Device, Memory},
    shape::Shape,
    shard::Shard,
    weights::{self, MatrixSlice, Origin},
};
use crate::cpu::{self, CpuError, weights::vector};
use std::sync::Arc;
use tandem_model::{ModelConfig, ModelFile};

/// The weights on one device. A rank holds its shard of heads and feed-forward, and all of the embedding and the norms.
pub(super) struct Model<D: Device> {
    pub shape: Shape,
    pub shard: Shard,
    pub context_length: u32,
    pub eps: f32,
    pub magnitude: f64,
    pub device: Arc<D>,
    /// The number of bytes of device memory that are free after loading the weights.
    pub free_bytes: usize,
    /// RoPE frequencies: radians per position for each pair of dimensions, as 64-bit floats.
    pub frequencies: Memory<D>,
    pub embedding: Memory<D>,
    pub layers: Vec<Layer<D>>,
    pub norm: Memory<D>,
    /// The output head. `None` if the embedding is also the head, and on all ranks except the first: only the first rank computes logits.
    head: Option<Memory<D>>,
}

/// The weights of one layer: matrices are row-major 16-bit floats, vectors 32-bit floats.
pub(super) struct Layer<D: Device> {
    pub attention_norm: Memory<D>,
    /// The projections to queries, keys and values, concatenated for one GEMM.
    pub qkv: Memory<D>,
    pub qkv_biases: Option<Memory<D>>,
    pub query_norm: Option<Memory<D>>,
    pub key_norm: Option<Memory<D>>,
    pub attention_out: Memory<D>,
    pub ffn_norm: Memory<D>,
    /// The gate and up projections, concatenated for one GEMM.
    pub gates: Memory<D>,
    pub down: Memory<D>,
}

impl<D: Device> Model<D> {
    /// Reads and checks a rank's weights and copies them to the device that `open` returns for the model's shape. `shared_max` is the
    /// shared memory of a thread block in bytes. Fails if the model is not supported, a weight cannot be read, or the device fails.
    pub fn load(
        file: &dyn ModelFile,
        block_size: usize,
        shared_max: usize,
        shard: Shard,
        origin: Origin,
        open: impl FnOnce(&Shape) -> Result<D, CudaError>,
    ) -> Result<Self, CudaError> {
        let config = file.config()?;
        let half = weights::half_of(file)?;
        let shape = Shape::new(&config, half, block_size, shared_max, shard)?;
        cpu::model::refuse_unread(file, &config)?;
        let device = Arc::new(open(&shape)?);
        let ModelConfig { width, ffn, vocab_size, head_dim, .. } = config;
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let pattern = match origin {
            Origin::File => None,
            Origin::Drawn => Some(Memory::of(&device, &weights::drawn(half))?),
        };
        let matrix = |slices: &[MatrixSlice]| match &pattern {
            None => Memory::of(&device, &weights::rows(file, half, slices)?),
            Some(pattern) => {
                let numbers = slices.iter().map(|slice| slice.rows.len() * slice.columns.len()).sum::<usize>();
                weights::fill(&device, pattern, numbers * 2)
            }
        };
        // Norms and biases are drawn as ones.
        let vector = |name: &str, len: usize| match &pattern {
            None => vector(file, name, len),
            Some(_) => Ok(vec![1.0; len]),
        };
        let singles = |numbers: Vec<f32>| Memory::of(&device, &numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>());
        let layer = |i: usize| {
            let name = |part: &str| format!("blk.{i}.{part}.weight");
            let rows = |part: &str, outputs| MatrixSlice {
                rows: shard.range(outputs),
                ..MatrixSlice::whole(name(part), outputs, width)
            };
            let columns = |part: &str, inputs| MatrixSlice {
                columns: shard.range(inputs),
                ..MatrixSlice::whole(name(part), width, inputs)
            };
            let norm = |part: &str, len| singles(vector(&name(part), len)?);
            let biases = || {
                let bias = |part: &str, len| {
                    let all = vector(&format!("blk.{i}.{part}.bias"), len)?;
                    Ok::<_, CpuError>(all[shard.range(len)].to_vec())
                };
                singles([bias("attn_q", queries)?, bias("attn_k", keys)?, bias("attn_v", keys)?].concat())
            };
            Ok::<_, CudaError>(Layer {
                attention_norm: norm("attn_norm", width)?,
                qkv: matrix(&[rows("attn_q", queries), rows("attn_k", keys), rows("attn_v", keys)])?,
                qkv_biases: config.qkv_biases.then(biases).transpose()?,
                query_norm: config.qk_norms.then(|| norm("attn_q_norm", head_dim)).transpose()?,
                key_norm: config.qk_norms.then(|| norm("attn_k_norm", head_dim)).transpose()?,
                attention_out: matrix(&[columns("attn_output", queries)])?,
                ffn_norm: norm("ffn_norm", width)?,
                gates: matrix(&[rows("ffn_gate", ffn), rows("ffn_up", ffn)])?,
                down: matrix(&[columns("ffn_down", ffn)])?,
            })
        };
        let frequencies: Vec<u8> = config.rope.frequencies.iter().flat_map(|frequency| frequency.to_le_bytes()).collect();
        let layers = (0..config.layers).map(layer).collect::<Result<_, _>>()?;
        let tokens = |name: &str| matrix(&[MatrixSlice::whole(name.to_owned(), vocab_size, width)]);
        let (embedding, norm) = (tokens("token_embd.weight")?, singles(vector("output_norm.weight", width)?)?);
        let has_head = !config.tied && shard.rank == 0;
        Ok(Self {
            shape,
            shard,
            context_length: config.context_length,
            eps: config.eps,
            magnitude: config.rope.magnitude,
            frequencies: Memory::of(&device, &frequencies)?,
            embedding,
            layers,
            norm,
            head: has_head.then(|| tokens("output.weight")).transpose()?,
            free_bytes: device.free_bytes()?,
            device,
        })
    }

    pub fn head(&self) -> &Memory<D> {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}
