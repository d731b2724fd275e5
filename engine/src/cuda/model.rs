//! A model's weights in a device's memory.

use super::{
    CudaError,
    device::{Device, Memory},
    shape::Shape,
    weights,
};
use crate::cpu::{CpuError, weights::vector};
use std::sync::Arc;
use tandem_model::{ModelConfig, ModelFile};

/// Weights, and the device that has them.
pub(super) struct Model<D: Device> {
    pub shape: Shape,
    pub context_length: u32,
    pub eps: f32,
    pub magnitude: f64,
    pub device: Arc<D>,
    /// Bytes that were free when all weights had come.
    pub free_bytes: usize,
    /// Radians a position, in double precision.
    pub frequencies: Memory<D>,
    pub embedding: Memory<D>,
    pub layers: Vec<Layer<D>>,
    pub norm: Memory<D>,
    /// `None` when the embedding is the head as well.
    head: Option<Memory<D>>,
}

/// Matrices in numbers of two bytes, vectors in those of four.
pub(super) struct Layer<D: Device> {
    pub attention_norm: Memory<D>,
    /// Queries, keys and values in one product.
    pub qkv: Memory<D>,
    pub qkv_biases: Option<Memory<D>>,
    pub query_norm: Option<Memory<D>>,
    pub key_norm: Option<Memory<D>>,
    pub attention_out: Memory<D>,
    pub ffn_norm: Memory<D>,
    /// Gate and up in one product.
    pub gates: Memory<D>,
    pub down: Memory<D>,
}

impl<D: Device> Model<D> {
    /// Reads, checks and copies all weights to the device that `open` gives for the model's shape.
    pub fn load(
        file: &dyn ModelFile,
        block_size: usize,
        shared_max: usize,
        open: impl FnOnce(&Shape) -> Result<D, CudaError>,
    ) -> Result<Self, CudaError> {
        let config = file.config()?;
        let half = weights::half_of(file)?;
        let shape = Shape::new(&config, half, block_size, shared_max)?;
        refuse_unread(file, &config)?;
        let device = Arc::new(open(&shape)?);
        let ModelConfig { width, ffn, vocab_size, head_dim, .. } = config;
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let matrix = |parts: &[(String, usize)], inputs| Memory::of(&device, &weights::rows(file, half, parts, inputs)?);
        let singles = |numbers: Vec<f32>| Memory::of(&device, &numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>());
        let layer = |i: usize| {
            let name = |part: &str| format!("blk.{i}.{part}.weight");
            let one = |part: &str, outputs, inputs| matrix(&[(name(part), outputs)], inputs);
            let norm = |part: &str, len| singles(vector(file, &name(part), len)?);
            let biases = || {
                let bias = |part: &str, len| vector(file, &format!("blk.{i}.{part}.bias"), len);
                singles([bias("attn_q", queries)?, bias("attn_k", keys)?, bias("attn_v", keys)?].concat())
            };
            Ok::<_, CudaError>(Layer {
                attention_norm: norm("attn_norm", width)?,
                qkv: matrix(&[(name("attn_q"), queries), (name("attn_k"), keys), (name("attn_v"), keys)], width)?,
                qkv_biases: config.qkv_biases.then(biases).transpose()?,
                query_norm: config.qk_norms.then(|| norm("attn_q_norm", head_dim)).transpose()?,
                key_norm: config.qk_norms.then(|| norm("attn_k_norm", head_dim)).transpose()?,
                attention_out: one("attn_output", width, queries)?,
                ffn_norm: norm("ffn_norm", width)?,
                gates: matrix(&[(name("ffn_gate"), ffn), (name("ffn_up"), ffn)], width)?,
                down: one("ffn_down", width, ffn)?,
            })
        };
        let frequencies: Vec<u8> = config.rope.frequencies.iter().flat_map(|frequency| frequency.to_le_bytes()).collect();
        let layers = (0..config.layers).map(layer).collect::<Result<_, _>>()?;
        let head = || matrix(&[("output.weight".to_owned(), vocab_size)], width);
        let (embedding, norm) = (
            matrix(&[("token_embd.weight".to_owned(), vocab_size)], width)?,
            singles(vector(file, "output_norm.weight", width)?)?,
        );
        Ok(Self {
            shape,
            context_length: config.context_length,
            eps: config.eps,
            magnitude: config.rope.magnitude,
            frequencies: Memory::of(&device, &frequencies)?,
            embedding,
            layers,
            norm,
            head: (!config.tied).then(head).transpose()?,
            free_bytes: device.free_bytes()?,
            device,
        })
    }

    /// The output head's address.
    pub fn head(&self) -> u64 {
        self.head.as_ref().unwrap_or(&self.embedding).address()
    }
}

/// What is not read would be missing from every result.
fn refuse_unread(file: &dyn ModelFile, config: &ModelConfig) -> Result<(), CudaError> {
    let qkv = ["attn_q.bias", "attn_k.bias", "attn_v.bias"].into_iter().filter(|_| !config.qkv_biases);
    let heads = ["attn_q_norm.weight", "attn_k_norm.weight"].into_iter().filter(|_| !config.qk_norms);
    let unread = qkv.chain(heads).chain(["attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"]);
    let unread: Vec<&str> = unread.collect();
    let names = (0..config.layers).flat_map(|layer| unread.iter().map(move |part| format!("blk.{layer}.{part}")));
    match names.into_iter().find(|name| file.has_tensor(name)) {
        Some(name) => Err(CpuError::Unexpected { name }.into()),
        None => Ok(()),
    }
}
