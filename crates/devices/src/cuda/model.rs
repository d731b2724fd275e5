//! A model's weights in device memory, or one rank's shard of them.

use super::{
    CudaError,
    device::{Device, Memory},
    shape::{Half, Shape},
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

/// Reads the weights of one rank and copies them to its device.
struct Loader<'a, D: Device> {
    file: &'a dyn ModelFile,
    config: &'a ModelConfig,
    half: Half,
    shard: Shard,
    device: &'a Arc<D>,
    /// The random numbers that every matrix repeats, unless the weights come from the file.
    pattern: Option<Memory<D>>,
}

impl<D: Device> Loader<'_, D> {
    fn matrix(&self, slices: &[MatrixSlice]) -> Result<Memory<D>, CudaError> {
        match &self.pattern {
            None => Memory::of(self.device, &weights::rows(self.file, self.half, slices)?),
            Some(pattern) => {
                let numbers = slices.iter().map(|slice| slice.rows.len() * slice.columns.len()).sum::<usize>();
                weights::fill(self.device, pattern, numbers * 2)
            }
        }
    }

    /// Returns a norm or a bias. If the weights are random, all of its numbers are 1.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, CpuError> {
        match &self.pattern {
            None => vector(self.file, name, len),
            Some(_) => Ok(vec![1.0; len]),
        }
    }

    fn singles(&self, numbers: &[f32]) -> Result<Memory<D>, CudaError> {
        Memory::of(self.device, &numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<_>>())
    }

    fn layer(&self, i: usize) -> Result<Layer<D>, CudaError> {
        let &Self { config, shard, .. } = self;
        let &ModelConfig { width, ffn, head_dim, .. } = config;
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let name = |part: &str| format!("blk.{i}.{part}.weight");
        let rows =
            |part: &str, outputs| MatrixSlice { rows: shard.range(outputs), ..MatrixSlice::whole(name(part), outputs, width) };
        let columns =
            |part: &str, inputs| MatrixSlice { columns: shard.range(inputs), ..MatrixSlice::whole(name(part), width, inputs) };
        let norm = |part: &str, len| self.singles(&self.vector(&name(part), len)?);
        let biases = || {
            let bias = |part: &str, len| {
                let all = self.vector(&format!("blk.{i}.{part}.bias"), len)?;
                Ok::<_, CpuError>(all[shard.range(len)].to_vec())
            };
            self.singles(&[bias("attn_q", queries)?, bias("attn_k", keys)?, bias("attn_v", keys)?].concat())
        };
        Ok(Layer {
            attention_norm: norm("attn_norm", width)?,
            qkv: self.matrix(&[rows("attn_q", queries), rows("attn_k", keys), rows("attn_v", keys)])?,
            qkv_biases: config.qkv_biases.then(biases).transpose()?,
            query_norm: config.qk_norms.then(|| norm("attn_q_norm", head_dim)).transpose()?,
            key_norm: config.qk_norms.then(|| norm("attn_k_norm", head_dim)).transpose()?,
            attention_out: self.matrix(&[columns("attn_output", queries)])?,
            ffn_norm: norm("ffn_norm", width)?,
            gates: self.matrix(&[rows("ffn_gate", ffn), rows("ffn_up", ffn)])?,
            down: self.matrix(&[columns("ffn_down", ffn)])?,
        })
    }
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
        let (config, half) = (&file.config()?, weights::half_of(file)?);
        let shape = Shape::new(config, half, block_size, shared_max, shard)?;
        cpu::model::refuse_unread(file, config)?;
        let device = Arc::new(open(&shape)?);
        let pattern = match origin {
            Origin::File => None,
            Origin::Drawn => Some(Memory::of(&device, &weights::drawn(half))?),
        };
        let loader = Loader { file, config, half, shard, device: &device, pattern };
        let frequencies: Vec<u8> = config.rope.frequencies.iter().flat_map(|frequency| frequency.to_le_bytes()).collect();
        let layers = (0..config.layers).map(|i| loader.layer(i)).collect::<Result<_, _>>()?;
        let tokens = |name: &str| loader.matrix(&[MatrixSlice::whole(name.to_owned(), config.vocab_size, config.width)]);
        let embedding = tokens("token_embd.weight")?;
        let norm = loader.singles(&loader.vector("output_norm.weight", config.width)?)?;
        let has_head = !config.tied && shard.rank == 0;
        let head = has_head.then(|| tokens("output.weight")).transpose()?;
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
            head,
            free_bytes: device.free_bytes()?,
            device,
        })
    }

    pub fn head(&self) -> &Memory<D> {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}
