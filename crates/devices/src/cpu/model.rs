//! A model's weights, packed for the kernels.

use super::{
    CpuError,
    weights::{Matrix, vector},
};
use std::sync::Arc;
use tandem_model::{ModelConfig, ModelFile};

/// A model's weights, packed for the kernels. The engines of a process share them.
pub struct CpuModel {
    pub(super) config: ModelConfig,
    pub(super) embedding: Matrix,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    head: Option<Matrix>,
}

pub(super) struct Layer {
    pub attention_norm: Vec<f32>,
    pub query: Matrix,
    pub key: Matrix,
    pub value: Matrix,
    /// Biases that are added to every row's queries, keys and values; `None` if the model has none.
    pub qkv_biases: Option<[Vec<f32>; 3]>,
    /// Weights of the RMSNorms of the query heads and of the key heads, each shared by all heads; `None` if the model does not normalise
    /// heads.
    pub qk_norms: Option<[Vec<f32>; 2]>,
    pub attention_out: Matrix,
    pub ffn_norm: Vec<f32>,
    pub gate: Matrix,
    pub up: Matrix,
    pub down: Matrix,
}

impl CpuModel {
    /// Reads, checks and packs all weights. The files are not needed afterwards.
    ///
    /// # Errors
    /// Returns a [`CpuError`] if the model is not supported, or if a weight is missing, damaged or in an unsupported format.
    pub fn load(file: &dyn ModelFile) -> Result<Arc<Self>, CpuError> {
        let config = file.config()?;
        let ModelConfig { width, ffn, vocab_size, head_dim, qkv_biases, qk_norms, .. } = config;
        refuse_unread(file, &config)?;
        let (queries, keys) = (config.heads * head_dim, config.kv_heads * head_dim);
        let layer = |i: usize| {
            let matrix = |name, outputs, inputs| Matrix::load(file, &format!("blk.{i}.{name}.weight"), outputs, inputs);
            let norm = |name, len| vector(file, &format!("blk.{i}.{name}.weight"), len);
            let bias = |name, len| vector(file, &format!("blk.{i}.{name}.bias"), len);
            let biases = || Ok::<_, CpuError>([bias("attn_q", queries)?, bias("attn_k", keys)?, bias("attn_v", keys)?]);
            let norms = || Ok::<_, CpuError>([norm("attn_q_norm", head_dim)?, norm("attn_k_norm", head_dim)?]);
            Ok::<_, CpuError>(Layer {
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

    /// Returns the size of the packed weights in bytes: about the size of the file's tensors, unless their shapes are not multiples of 32.
    pub fn weight_bytes(&self) -> usize {
        let layers = self.layers.iter().map(|layer| {
            let Layer { query, key, value, attention_out, gate, up, down, attention_norm, ffn_norm, qkv_biases, qk_norms } =
                layer;
            let matrices: usize = [query, key, value, attention_out, gate, up, down].into_iter().map(Matrix::bytes).sum();
            let vectors =
                [attention_norm, ffn_norm].into_iter().chain(qkv_biases.iter().flatten()).chain(qk_norms.iter().flatten());
            matrices + vectors.map(|vector| size_of_val(vector.as_slice())).sum::<usize>()
        });
        let head = self.head.as_ref().map_or(0, Matrix::bytes);
        self.embedding.bytes() + layers.sum::<usize>() + size_of_val(self.norm.as_slice()) + head
    }

    pub(super) fn head(&self) -> &Matrix {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}

/// Fails if a layer has a tensor that models of this family do not have. All results would be wrong if such a tensor were ignored.
pub(crate) fn refuse_unread(file: &dyn ModelFile, config: &ModelConfig) -> Result<(), CpuError> {
    let qkv = ["attn_q.bias", "attn_k.bias", "attn_v.bias"].into_iter().filter(|_| !config.qkv_biases);
    let heads = ["attn_q_norm.weight", "attn_k_norm.weight"].into_iter().filter(|_| !config.qk_norms);
    let unread = qkv.chain(heads).chain(["attn_output.bias", "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"]);
    let unread: Vec<&str> = unread.collect();
    let mut names = (0..config.layers).flat_map(|layer| unread.iter().map(move |part| format!("blk.{layer}.{part}")));
    names.find(|name| file.has_tensor(name)).map_or(Ok(()), |name| Err(CpuError::Unexpected { name }))
}
