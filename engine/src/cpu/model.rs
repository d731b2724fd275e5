//! A model's weights, packed for the kernels.

use super::{
    CpuError,
    weights::{Matrix, vector},
};
use std::sync::Arc;
use tandem_model::{ModelConfig, ModelFile};

/// A model's weights, packed for the kernels. Engines of one process share it.
pub struct CpuModel {
    pub(super) config: ModelConfig,
    pub(super) embedding: Matrix,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// The weights of the output head; `None` if the embedding is also the head.
    head: Option<Matrix>,
}

pub(super) struct Layer {
    pub attention_norm: Vec<f32>,
    pub query: Matrix,
    pub key: Matrix,
    pub value: Matrix,
    pub qkv_biases: Option<QkvBiases>,
    pub qk_norms: Option<QkNorms>,
    pub attention_out: Matrix,
    pub ffn_norm: Vec<f32>,
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
}

/// Biases that are added to every row's queries, keys and values.
pub(super) struct QkvBiases {
    pub query: Vec<f32>,
    pub key: Vec<f32>,
    pub value: Vec<f32>,
}

/// Weights of the RMS norm of each query and key head; all heads share them.
pub(super) struct QkNorms {
    pub query: Vec<f32>,
    pub key: Vec<f32>,
}

impl CpuModel {
    /// Reads, checks and packs all weights. The files are not needed afterwards.
    ///
    /// # Errors
    ///
    /// [`CpuError`] if the model is not supported, or a weight is missing, damaged or in an unsupported format.
    pub fn load(file: &dyn ModelFile) -> Result<Arc<Self>, CpuError> {
        let config = file.config()?;
        let ModelConfig { width, ffn, vocab_size, head_dim, qkv_biases, qk_norms, .. } = config;
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let layer = |i: usize| {
            let matrix = |name, outputs, inputs| Matrix::load(file, &format!("blk.{i}.{name}.weight"), outputs, inputs);
            let norm = |name, len| vector(file, &format!("blk.{i}.{name}.weight"), len);
            let bias = |name, len| vector(file, &format!("blk.{i}.{name}.bias"), len);
            // A weight that is not read would be missing in every result.
            let qkv = ["attn_q.bias", "attn_k.bias", "attn_v.bias"].into_iter().filter(|_| !qkv_biases);
            let heads = ["attn_q_norm.weight", "attn_k_norm.weight"].into_iter().filter(|_| !qk_norms);
            let others = ["attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"];
            for unread in qkv.chain(heads).chain(others) {
                let name = format!("blk.{i}.{unread}");
                if file.has_tensor(&name) {
                    return Err(CpuError::Unexpected { name });
                }
            }
            let biases = || {
                let (query, key, value) = (bias("attn_q", queries)?, bias("attn_k", keys)?, bias("attn_v", keys)?);
                Ok::<_, CpuError>(QkvBiases { query, key, value })
            };
            let norms =
                || Ok::<_, CpuError>(QkNorms { query: norm("attn_q_norm", head_dim)?, key: norm("attn_k_norm", head_dim)? });
            Ok(Layer {
                attention_norm: norm("attn_norm", width)?,
                query: matrix("attn_q", queries, width)?,
                key: matrix("attn_k", keys, width)?,
                value: matrix("attn_v", keys, width)?,
                qkv_biases: qkv_biases.then(biases).transpose()?,
                qk_norms: qk_norms.then(norms).transpose()?,
                attention_out: matrix("attn_output", width, queries)?,
                ffn_norm: norm("ffn_norm", width)?,
                gate: matrix("ffn_gate", ffn, width)?,
                up: matrix("ffn_up", ffn, width)?,
                down: matrix("ffn_down", width, ffn)?,
            })
        };
        Ok(Arc::new(Self {
            embedding: Matrix::load(file, "token_embd.weight", vocab_size, width)?,
            layers: (0..config.layers).map(layer).collect::<Result<_, _>>()?,
            norm: vector(file, "output_norm.weight", width)?,
            head: (!config.tied).then(|| Matrix::load(file, "output.weight", vocab_size, width)).transpose()?,
            config,
        }))
    }

    /// Returns the model's dimensions.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the bytes of the packed weights: about those of the file's tensors, except for shapes that are not multiples of 32.
    pub fn weight_bytes(&self) -> usize {
        let layers = self.layers.iter().map(|layer| {
            let Layer { query, key, value, attention_out, gate, up, down, attention_norm, ffn_norm, qkv_biases, qk_norms } =
                layer;
            let matrices: usize = [query, key, value, attention_out, gate, up, down].into_iter().map(Matrix::bytes).sum();
            let biases = qkv_biases.iter().flat_map(|biases| [&biases.query, &biases.key, &biases.value]);
            let norms = qk_norms.iter().flat_map(|norms| [&norms.query, &norms.key]);
            let vectors = [attention_norm, ffn_norm].into_iter().chain(biases).chain(norms);
            matrices + vectors.map(|vector| size_of_val(vector.as_slice())).sum::<usize>()
        });
        let head = self.head.as_ref().map_or(0, Matrix::bytes);
        self.embedding.bytes() + layers.sum::<usize>() + size_of_val(self.norm.as_slice()) + head
    }

    pub(super) fn head(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}
