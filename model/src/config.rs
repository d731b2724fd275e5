//! A model's sizes, and which models can be run at all.

use crate::{
    Gguf, ModelError, ModelFile, Pairs, Rope, TensorType,
    rope::{Scaling, yarn_magnitude},
};

/// The numbers that make a Llama or a Qwen: every one is positive, `heads` is a multiple of `kv_heads`, `head_dim` is even.
#[derive(Clone, Debug, PartialEq)]
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
    /// How positions enter.
    pub rope: Rope,
    /// Queries, keys and values have biases.
    pub qkv_biases: bool,
    /// Every head of queries and keys is normalised before it is turned.
    pub qk_norms: bool,
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

/// What tells the families apart.
pub(crate) struct Family {
    /// In GGUF files.
    pairs: Pairs,
    pub(crate) qkv_biases: bool,
    pub(crate) qk_norms: bool,
}

impl Family {
    pub(crate) fn of(architecture: &str) -> Result<Self, ModelError> {
        let (pairs, qkv_biases, qk_norms) = match architecture {
            "llama" => (Pairs::Adjacent, false, false),
            "qwen2" => (Pairs::Halves, true, false),
            "qwen3" => (Pairs::Halves, false, true),
            found => return Err(ModelError::Architecture { found: found.to_owned() }),
        };
        Ok(Self { pairs, qkv_biases, qk_norms })
    }
}

impl ModelConfig {
    /// Reads and checks the numbers. Any other family, and positions scaled in a way that is not known, are refused.
    pub fn read(file: &Gguf) -> Result<Self, ModelError> {
        let architecture = file.str(ARCHITECTURE)?;
        let family = Family::of(architecture)?;
        let key = |name: &str| format!("{architecture}.{name}");
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
        let context_length = size("context_length")? as u32;
        let divisors = rope_divisors(file, head_dim / 2)?;
        let scaling = rope_scaling(file, architecture, context_length)?;
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
            rope: Rope::new(family.pairs, head_dim, rope_base, divisors.as_deref(), scaling),
            qkv_biases: family.qkv_biases,
            qk_norms: family.qk_norms,
            context_length,
            vocab_size,
            tied: !file.has_tensor("output.weight"),
        })
    }
}

/// What a conversion of a Llama 3 has computed already from that family's scaling.
fn rope_divisors(file: &Gguf, pairs: usize) -> Result<Option<Vec<f32>>, ModelError> {
    const NAME: &str = "rope_freqs.weight";
    if !file.has_tensor(NAME) {
        return Ok(None);
    }
    let tensor = file.tensor_of(NAME, &[pairs as u64])?;
    let divisors: Vec<f32> = tensor.data.as_chunks::<4>().0.iter().map(|number| f32::from_le_bytes(*number)).collect();
    if tensor.kind == TensorType::F32 && divisors.iter().all(|divisor| divisor.is_finite() && *divisor > 0.0) {
        Ok(Some(divisors))
    } else {
        Err(ModelError::WrongValue { key: NAME.to_owned(), wanted: "a list of F32 numbers above 0" })
    }
}

fn rope_scaling(file: &Gguf, architecture: &str, context_length: u32) -> Result<Scaling, ModelError> {
    let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
    let number = |name: &str| match file.optional(&key(name), |key| file.f32(key))? {
        Some(number) if !number.is_finite() || number <= 0.0 => Err(ModelError::WrongValue { key: key(name), wanted: "above 0" }),
        number => Ok(number.map(f64::from)),
    };
    // Conversions older than the types have a factor only, under one of two names.
    let old_name = format!("{architecture}.rope.scale_linear");
    let factor = match number("factor")? {
        None if file.has(&old_name) => Some(f64::from(file.f32(&old_name)?)).filter(|factor| *factor > 0.0),
        factor => factor,
    };
    let factor = factor.unwrap_or(1.0);
    match file.optional(&key("type"), |key| file.str(key))?.unwrap_or("linear") {
        "none" => Ok(Scaling::None),
        "linear" if factor == 1.0 => Ok(Scaling::None),
        "linear" => Ok(Scaling::Linear { factor }),
        "yarn" => {
            // How much of YaRN there is: all of it in every model of these families.
            if number("yarn_ext_factor")?.is_some_and(|share| share != 1.0) {
                return Err(ModelError::WrongValue { key: key("yarn_ext_factor"), wanted: "1" });
            }
            if file.optional(&key("yarn_log_multiplier"), |key| file.f32(key))?.is_some_and(|multiplier| multiplier != 0.0) {
                return Err(ModelError::WrongValue { key: key("yarn_log_multiplier"), wanted: "0" });
            }
            let original_context = file.optional(&key("original_context_length"), |key| file.u32(key))?;
            Ok(Scaling::Yarn {
                factor,
                original_context: f64::from(original_context.filter(|tokens| *tokens > 0).unwrap_or(context_length)),
                beta_fast: number("yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: number("yarn_beta_slow")?.unwrap_or(1.0),
                magnitude: yarn_magnitude(factor) * number("attn_factor")?.unwrap_or(1.0),
            })
        }
        _ => Err(ModelError::WrongValue { key: key("type"), wanted: "none, linear or yarn (no other scaling is supported)" }),
    }
}
