//! A model's sizes, and which models can be run at all.

use crate::{Gguf, ModelError};

/// The numbers that make a Llama: every one is positive, `heads` is a multiple of `kv_heads`, `head_dim` is even.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelConfig {
    /// Transformer blocks.
    pub layers: usize,
    /// Numbers in the residual stream.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads ÷ kv_heads` query heads.
    pub kv_heads: usize,
    /// Numbers in one head.
    pub head_dim: usize,
    /// Numbers between the two halves of the feed-forward network.
    pub ffn: usize,
    /// Added to the mean square before its root.
    pub eps: f32,
    /// Base of the rotary position embedding.
    pub rope_base: f32,
    /// The longest sequence in tokens.
    pub context_length: u32,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// The output head is the embedding.
    pub tied: bool,
}

const ARCHITECTURE: &str = "general.architecture";

impl Gguf {
    /// The longest sequence the model takes, in tokens.
    pub fn context_length(&self) -> Result<u32, ModelError> {
        self.u32(&format!("{}.context_length", self.str(ARCHITECTURE)?))
    }
}

impl ModelConfig {
    /// Reads and checks the numbers. Anything but a Llama, and a Llama with scaled rotary positions, is refused.
    pub fn read(file: &Gguf) -> Result<Self, ModelError> {
        let architecture = file.str(ARCHITECTURE)?;
        if architecture != "llama" {
            return Err(ModelError::Architecture { found: architecture.to_owned() });
        }
        let key = |name: &str| format!("llama.{name}");
        let size = |name: &str| match file.u32(&key(name))? {
            0 => Err(ModelError::WrongValue { key: key(name), wanted: "above 0" }),
            size => Ok(size as usize),
        };
        let (width, heads) = (size("embedding_length")?, size("attention.head_count")?);
        let kv_heads = if file.has(&key("attention.head_count_kv")) { size("attention.head_count_kv")? } else { heads };
        if !heads.is_multiple_of(kv_heads) {
            return Err(ModelError::WrongValue {
                key: key("attention.head_count_kv"),
                wanted: "a divisor of the number of heads",
            });
        }
        let head_dim = if file.has(&key("attention.key_length")) {
            size("attention.key_length")?
        } else if width.is_multiple_of(heads) {
            width / heads
        } else {
            return Err(ModelError::WrongValue { key: key("attention.head_count"), wanted: "a divisor of the width" });
        };
        if file.has(&key("attention.value_length")) && size("attention.value_length")? != head_dim {
            return Err(ModelError::WrongValue { key: key("attention.value_length"), wanted: "equal to the key length" });
        }
        if !head_dim.is_multiple_of(2) {
            return Err(ModelError::WrongValue { key: key("attention.key_length"), wanted: "even" });
        }
        let rotated = file.optional(&key("rope.dimension_count"), |key| file.u32(key))?;
        if rotated.is_some_and(|rotated| rotated as usize != head_dim) {
            return Err(ModelError::WrongValue { key: key("rope.dimension_count"), wanted: "the head's length" });
        }
        let scaling = file.optional(&key("rope.scaling.type"), |key| file.str(key))?;
        if scaling.is_some_and(|scaling| scaling != "none") || file.has_tensor("rope_freqs.weight") {
            return Err(ModelError::WrongValue {
                key: key("rope.scaling.type"),
                wanted: "none (scaled positions are not supported)",
            });
        }
        let positive = |name: &str, number: f32| {
            if number.is_finite() && number > 0.0 {
                Ok(number)
            } else {
                Err(ModelError::WrongValue { key: key(name), wanted: "above 0" })
            }
        };
        let eps = positive("attention.layer_norm_rms_epsilon", file.f32(&key("attention.layer_norm_rms_epsilon"))?)?;
        let rope_base =
            positive("rope.freq_base", file.optional(&key("rope.freq_base"), |key| file.f32(key))?.unwrap_or(10_000.0))?;
        if file.optional(&key("expert_count"), |key| file.u32(key))?.is_some_and(|experts| experts > 0) {
            return Err(ModelError::WrongValue { key: key("expert_count"), wanted: "0 (mixtures of experts are not supported)" });
        }
        let embedding = file.tensor("token_embd.weight")?.shape;
        let vocab_size = match embedding {
            &[columns, rows] if columns == width as u64 && (1..=u64::from(u32::MAX)).contains(&rows) => rows as usize,
            found => {
                let wanted = vec![width as u64, 1];
                return Err(ModelError::TensorShape { name: "token_embd.weight".to_owned(), found: found.to_vec(), wanted });
            }
        };
        Ok(Self {
            layers: size("block_count")?,
            width,
            heads,
            kv_heads,
            head_dim,
            ffn: size("feed_forward_length")?,
            eps,
            rope_base,
            context_length: size("context_length")? as u32,
            vocab_size,
            tied: !file.has_tensor("output.weight"),
        })
    }
}
