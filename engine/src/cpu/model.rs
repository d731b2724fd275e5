//! A model's weights as the kernels read them.

use super::{
    CpuError,
    weights::{Matrix, vector},
};
use std::sync::Arc;
use tandem_model::{Gguf, ModelConfig};

/// A model's weights, packed for the kernels. Engines of one process share it.
pub struct CpuModel {
    pub(super) config: ModelConfig,
    pub(super) embedding: Matrix,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// `None` when the embedding is the head as well.
    head: Option<Matrix>,
}

pub(super) struct Layer {
    pub attention_norm: Vec<f32>,
    pub query: Matrix,
    pub key: Matrix,
    pub value: Matrix,
    pub attention_out: Matrix,
    pub ffn_norm: Vec<f32>,
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
}

impl CpuModel {
    /// Reads, checks and packs all weights. The file is not needed afterwards.
    pub fn load(file: &Gguf) -> Result<Arc<Self>, CpuError> {
        let config = ModelConfig::read(file)?;
        let ModelConfig { width, ffn, vocab_size, .. } = config;
        let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let layer = |i: usize| {
            let matrix = |name, outputs, inputs| Matrix::load(file, &format!("blk.{i}.{name}.weight"), outputs, inputs);
            let norm = |name| vector(file, &format!("blk.{i}.{name}.weight"), width);
            // Biases would change every result; Llamas that have them are not known here.
            for biased in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"] {
                let name = format!("blk.{i}.{biased}.bias");
                if file.has_tensor(&name) {
                    return Err(CpuError::Bias { name });
                }
            }
            Ok(Layer {
                attention_norm: norm("attn_norm")?,
                query: matrix("attn_q", queries, width)?,
                key: matrix("attn_k", keys, width)?,
                value: matrix("attn_v", keys, width)?,
                attention_out: matrix("attn_output", width, queries)?,
                ffn_norm: norm("ffn_norm")?,
                gate: matrix("ffn_gate", ffn, width)?,
                up: matrix("ffn_up", ffn, width)?,
                down: matrix("ffn_down", width, ffn)?,
            })
        };
        Ok(Arc::new(Self {
            config,
            embedding: Matrix::load(file, "token_embd.weight", vocab_size, width)?,
            layers: (0..config.layers).map(layer).collect::<Result<_, _>>()?,
            norm: vector(file, "output_norm.weight", width)?,
            head: (!config.tied).then(|| Matrix::load(file, "output.weight", vocab_size, width)).transpose()?,
        }))
    }

    /// The model's numbers.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Memory of the packed weights: that of the file's tensors, but for shapes that are no multiples of 32.
    pub fn weight_bytes(&self) -> usize {
        let layers = self.layers.iter().map(|layer| {
            let Layer { query, key, value, attention_out, gate, up, down, attention_norm, ffn_norm } = layer;
            let matrices: usize = [query, key, value, attention_out, gate, up, down].into_iter().map(Matrix::bytes).sum();
            matrices + size_of_val(attention_norm.as_slice()) + size_of_val(ffn_norm.as_slice())
        });
        let head = self.head.as_ref().map_or(0, Matrix::bytes);
        self.embedding.bytes() + layers.sum::<usize>() + size_of_val(self.norm.as_slice()) + head
    }

    pub(super) fn head(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}
