//! Reads a model's configuration, and checks that the model is supported.

use crate::{
    Gguf, ModelError, ModelFile, Pairs, Rope, TensorType,
    rope::{Scaling, yarn_magnitude},
};

/// The configuration of a Llama or Qwen model. All sizes are positive, `heads` is a multiple of `kv_heads`, and `head_dim` is even.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Number of transformer layers.
    pub layers: usize,
    /// Number of elements of a token's vector in the residual stream (the hidden size).
    pub width: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads. Each serves `heads ÷ kv_heads` query heads.
    pub kv_heads: usize,
    /// Number of elements of one head's vector.
    pub head_dim: usize,
    /// Number of elements of the feed-forward network's inner layer.
    pub ffn: usize,
    /// RMSNorm's epsilon, which is added to the mean square.
    pub eps: f32,
    /// Parameters of the rotary position embedding.
    pub rope: Rope,
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_biases: bool,
    /// Whether every query head and key head is normalised before RoPE.
    pub qk_norms: bool,
    /// Longest sequence, in tokens.
    pub context_length: u32,
    /// Number of tokens in the vocabulary, which is the number of rows of the embedding.
    pub vocab_size: usize,
    /// Whether the output head uses the weights of the embedding.
    pub tied: bool,
}

/// Whether a head may have this length. The length is bounded, because RoPE's frequencies are computed before the tensors are checked.
pub(crate) fn is_head_dim(length: usize) -> bool {
    (2..=usize::from(u16::MAX)).contains(&length) && length.is_multiple_of(2)
}

const ARCHITECTURE: &str = "general.architecture";

impl Gguf {
    /// Returns the longest sequence that the model supports, in tokens.
    ///
    /// # Errors
    /// Fails if a metadata key is missing or has a value of another type.
    pub fn context_length(&self) -> Result<u32, ModelError> {
        self.u32(&format!("{}.context_length", self.str(ARCHITECTURE)?))
    }
}

pub(crate) struct Family {
    /// The assignment of a head's elements to RoPE pairs in GGUF files.
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
    /// Reads and checks the configuration of a GGUF file.
    ///
    /// # Errors
    /// Fails if a value is missing or invalid, or if the model's family or its RoPE scaling is not supported.
    pub fn read(file: &Gguf) -> Result<Self, ModelError> {
        const EPS: &str = "attention.layer_norm_rms_epsilon";
        let architecture = file.str(ARCHITECTURE)?;
        let family = Family::of(architecture)?;
        let numbers = Numbers { file, architecture };
        let (width, heads) = (numbers.size("embedding_length")?, numbers.size("attention.head_count")?);
        let kv_heads = numbers.optional_size("attention.head_count_kv")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(numbers.wrong("attention.head_count_kv", "a divisor of the number of heads"));
        }
        if numbers.integer("expert_count")?.is_some_and(|experts| experts > 0) {
            return Err(numbers.wrong("expert_count", "0 (mixtures of experts are not supported)"));
        }
        let head_dim = numbers.head_dim(width, heads)?;
        let context_length = numbers.size("context_length")? as u32;
        let rope_base = numbers.positive("rope.freq_base")?.unwrap_or(10_000.0);
        let divisors = rope_divisors(file, head_dim / 2)?;
        let scaling = numbers.rope_scaling(context_length)?;
        Ok(Self {
            layers: numbers.size("block_count")?,
            width,
            heads,
            kv_heads,
            head_dim,
            ffn: numbers.size("feed_forward_length")?,
            eps: numbers.positive(EPS)?.ok_or_else(|| numbers.missing(EPS))?,
            rope: Rope::new(family.pairs, head_dim, rope_base, divisors.as_deref(), scaling),
            qkv_biases: family.qkv_biases,
            qk_norms: family.qk_norms,
            context_length,
            vocab_size: vocab_size(file, width)?,
            tied: !file.has_tensor("output.weight"),
        })
    }
}

/// Reads a file's numeric metadata, whose keys start with the architecture's name.
struct Numbers<'a> {
    file: &'a Gguf,
    architecture: &'a str,
}

impl Numbers<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn wrong(&self, name: &str, wanted: &'static str) -> ModelError {
        ModelError::WrongValue { key: self.key(name), wanted }
    }

    fn missing(&self, name: &str) -> ModelError {
        ModelError::MissingKey { key: self.key(name) }
    }

    fn integer(&self, name: &str) -> Result<Option<u32>, ModelError> {
        self.file.optional(&self.key(name), |key| self.file.u32(key))
    }

    fn float(&self, name: &str) -> Result<Option<f32>, ModelError> {
        self.file.optional(&self.key(name), |key| self.file.f32(key))
    }

    fn optional_size(&self, name: &str) -> Result<Option<usize>, ModelError> {
        match self.integer(name)? {
            Some(0) => Err(self.wrong(name, "above 0")),
            size => Ok(size.map(|size| size as usize)),
        }
    }

    fn size(&self, name: &str) -> Result<usize, ModelError> {
        self.optional_size(name)?.ok_or_else(|| self.missing(name))
    }

    fn positive(&self, name: &str) -> Result<Option<f32>, ModelError> {
        match self.float(name)? {
            Some(number) if !number.is_finite() || number <= 0.0 => Err(self.wrong(name, "above 0")),
            number => Ok(number),
        }
    }

    /// Returns the number of elements of a head, which must be the same for keys, values and RoPE.
    fn head_dim(&self, width: usize, heads: usize) -> Result<usize, ModelError> {
        let head_dim = match self.optional_size("attention.key_length")? {
            Some(head_dim) => head_dim,
            None if width.is_multiple_of(heads) => width / heads,
            None => return Err(self.wrong("attention.head_count", "a divisor of the width")),
        };
        if self.optional_size("attention.value_length")?.is_some_and(|length| length != head_dim) {
            return Err(self.wrong("attention.value_length", "equal to the key length"));
        }
        if !is_head_dim(head_dim) {
            return Err(self.wrong("attention.key_length", "even, above 0 and below 2^16"));
        }
        if self.integer("rope.dimension_count")?.is_some_and(|length| length as usize != head_dim) {
            return Err(self.wrong("rope.dimension_count", "the head's length"));
        }
        Ok(head_dim)
    }

    fn rope_scaling(&self, context_length: u32) -> Result<Scaling, ModelError> {
        let key = |name: &str| format!("rope.scaling.{name}");
        let number = |name: &str| Ok::<_, ModelError>(self.positive(&key(name))?.map(f64::from));
        // Files from older converters have no scaling type, only a scaling factor under one of two names.
        let factor = match number("factor")? {
            None => self.float("rope.scale_linear")?.map(f64::from).filter(|factor| *factor > 0.0),
            factor => factor,
        };
        let factor = factor.unwrap_or(1.0);
        match self.file.optional(&self.key(&key("type")), |key| self.file.str(key))?.unwrap_or("linear") {
            "none" => Ok(Scaling::None),
            "linear" if factor == 1.0 => Ok(Scaling::None),
            "linear" => Ok(Scaling::Linear { factor }),
            "yarn" => {
                // `yarn_ext_factor` is the weight of the frequencies that YaRN does not divide. It is 1 in all models of the supported
                // families.
                if number("yarn_ext_factor")?.is_some_and(|share| share != 1.0) {
                    return Err(self.wrong(&key("yarn_ext_factor"), "1"));
                }
                if self.float(&key("yarn_log_multiplier"))?.is_some_and(|multiplier| multiplier != 0.0) {
                    return Err(self.wrong(&key("yarn_log_multiplier"), "0"));
                }
                let original_context = self.integer(&key("original_context_length"))?.filter(|tokens| *tokens > 0);
                Ok(Scaling::Yarn {
                    factor,
                    original_context: f64::from(original_context.unwrap_or(context_length)),
                    beta_fast: number("yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: number("yarn_beta_slow")?.unwrap_or(1.0),
                    magnitude: yarn_magnitude(factor) * number("attn_factor")?.unwrap_or(1.0),
                })
            }
            _ => Err(self.wrong(&key("type"), "none, linear or yarn (no other scaling is supported)")),
        }
    }
}

/// Returns the size of the vocabulary: the number of rows of the embedding.
fn vocab_size(file: &Gguf, width: usize) -> Result<usize, ModelError> {
    const NAME: &str = "token_embd.weight";
    match file.tensor(NAME)?.shape {
        &[columns, rows] if columns == width as u64 && (1..=u64::from(u32::MAX)).contains(&rows) => Ok(rows as usize),
        found => Err(ModelError::TensorShape { name: NAME.to_owned(), found: found.to_vec(), wanted: vec![width as u64, 1] }),
    }
}

/// Returns the divisors of RoPE frequencies, if the file has them. Conversions of Llama 3 models store that family's RoPE scaling in them.
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
