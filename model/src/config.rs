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
        let (width, heads) = (size(file, "embedding_length")?, size(file, "attention.head_count")?);
        let kv_heads = optional_size(file, "attention.head_count_kv")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(wrong("attention.head_count_kv", "a divisor of the number of heads"));
        }
        let head_dim = head_dim(file, width, heads)?;
        refuse_unknown_kinds(file, head_dim)?;
        Ok(Self {
            eps: positive("attention.layer_norm_rms_epsilon", file.f32(&key("attention.layer_norm_rms_epsilon"))?)?,
            rope_base: positive(
                "rope.freq_base",
                file.optional(&key("rope.freq_base"), |key| file.f32(key))?.unwrap_or(10_000.0),
            )?,
            vocab_size: vocab_size(file, width)?,
            layers: size(file, "block_count")?,
            width,
            heads,
            kv_heads,
            head_dim,
            ffn: size(file, "feed_forward_length")?,
            context_length: size(file, "context_length")? as u32,
            tied: !file.has_tensor("output.weight"),
        })
    }
}

fn key(name: &str) -> String {
    format!("llama.{name}")
}

fn wrong(name: &str, wanted: &'static str) -> ModelError {
    ModelError::WrongValue { key: key(name), wanted }
}

fn size(file: &Gguf, name: &str) -> Result<usize, ModelError> {
    match file.u32(&key(name))? {
        0 => Err(wrong(name, "above 0")),
        size => Ok(size as usize),
    }
}

fn optional_size(file: &Gguf, name: &str) -> Result<Option<usize>, ModelError> {
    file.optional(&key(name), |_| size(file, name))
}

fn positive(name: &str, number: f32) -> Result<f32, ModelError> {
    if number.is_finite() && number > 0.0 { Ok(number) } else { Err(wrong(name, "above 0")) }
}

/// Keys and values must have the same, and it is turned in pairs.
fn head_dim(file: &Gguf, width: usize, heads: usize) -> Result<usize, ModelError> {
    let head_dim = match optional_size(file, "attention.key_length")? {
        Some(len) => len,
        None if width.is_multiple_of(heads) => width / heads,
        None => return Err(wrong("attention.head_count", "a divisor of the width")),
    };
    if optional_size(file, "attention.value_length")?.is_some_and(|len| len != head_dim) {
        return Err(wrong("attention.value_length", "equal to the key length"));
    }
    if head_dim.is_multiple_of(2) { Ok(head_dim) } else { Err(wrong("attention.key_length", "even")) }
}

/// Llamas whose results would be wrong, because what they need is not built.
fn refuse_unknown_kinds(file: &Gguf, head_dim: usize) -> Result<(), ModelError> {
    let rotated = file.optional(&key("rope.dimension_count"), |key| file.u32(key))?;
    if rotated.is_some_and(|rotated| rotated as usize != head_dim) {
        return Err(wrong("rope.dimension_count", "the head's length"));
    }
    let scaling = file.optional(&key("rope.scaling.type"), |key| file.str(key))?;
    if scaling.is_some_and(|scaling| scaling != "none") || file.has_tensor("rope_freqs.weight") {
        return Err(wrong("rope.scaling.type", "none (scaled positions are not supported)"));
    }
    if file.optional(&key("expert_count"), |key| file.u32(key))?.is_some_and(|experts| experts > 0) {
        return Err(wrong("expert_count", "0 (mixtures of experts are not supported)"));
    }
    Ok(())
}

fn vocab_size(file: &Gguf, width: usize) -> Result<usize, ModelError> {
    const EMBEDDING: &str = "token_embd.weight";
    match file.tensor(EMBEDDING)?.shape {
        &[columns, rows] if columns == width as u64 && (1..=u64::from(u32::MAX)).contains(&rows) => Ok(rows as usize),
        found => {
            let wanted = vec![width as u64, 1];
            Err(ModelError::TensorShape { name: EMBEDDING.to_owned(), found: found.to_vec(), wanted })
        }
    }
}
