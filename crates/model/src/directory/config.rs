//! Reads `config.json`.

use super::{CONFIG, json};
use crate::{
    ModelConfig, ModelError, Pairs, Rope,
    config::{Family, is_head_dim},
    rope::{Scaling, yarn_magnitude},
};
use serde::{Deserialize, de::IgnoredAny};

#[derive(Deserialize)]
struct RawConfig {
    model_type: String,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    intermediate_size: usize,
    rms_norm_eps: f32,
    rope_theta: Option<f32>,
    rope_scaling: Option<RopeScaling>,
    /// Files of newer versions of `transformers` have this field instead of `rope_theta` and `rope_scaling`.
    rope_parameters: Option<RopeScaling>,
    max_position_embeddings: u32,
    vocab_size: usize,
    tie_word_embeddings: Option<bool>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    use_sliding_window: Option<bool>,
    quantization_config: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct RopeScaling {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f32>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    attention_factor: Option<f64>,
    truncate: Option<bool>,
    mscale: Option<IgnoredAny>,
    mscale_all_dim: Option<IgnoredAny>,
    partial_rotary_factor: Option<f64>,
}

fn wrong(key: &str, wanted: &'static str) -> ModelError {
    ModelError::WrongValue { key: format!("{CONFIG}: {key}"), wanted }
}

/// Reads and checks the configuration. `tied_by_absence` says that the weight files have no output head. If `config.json` does not say
/// whether the head uses the embedding's weights, `tied_by_absence` decides.
pub(super) fn read(bytes: &[u8], tied_by_absence: bool) -> Result<ModelConfig, ModelError> {
    let config: RawConfig = json(CONFIG, bytes)?;
    let family = Family::of(&config.model_type)?;
    let (kv_heads, head_dim) = heads(&config, &family)?;
    if !config.rms_norm_eps.is_finite() || config.rms_norm_eps <= 0.0 {
        return Err(wrong("rms_norm_eps", "above 0"));
    }
    let parameters = config.rope_parameters.or(config.rope_scaling);
    let base = parameters.as_ref().and_then(|parameters| parameters.rope_theta).or(config.rope_theta).unwrap_or(10_000.0);
    if !base.is_finite() || base <= 0.0 {
        return Err(wrong("rope_theta", "above 0"));
    }
    let scaling = parameters.map_or(Ok(Scaling::None), |parameters| scaling(&parameters, config.max_position_embeddings))?;
    Ok(ModelConfig {
        layers: config.num_hidden_layers,
        width: config.hidden_size,
        heads: config.num_attention_heads,
        kv_heads,
        head_dim,
        ffn: config.intermediate_size,
        eps: config.rms_norm_eps,
        // In safetensors, element `i` is paired with element `i + head_dim / 2`. Only conversions to GGUF reorder the rows of a Llama model
        // so that paired elements are adjacent.
        rope: Rope::new(Pairs::Halves, head_dim, base, None, scaling),
        qkv_biases: family.qkv_biases,
        qk_norms: family.qk_norms,
        context_length: config.max_position_embeddings,
        vocab_size: config.vocab_size,
        tied: config.tie_word_embeddings.unwrap_or(tied_by_absence),
    })
}

/// Checks all sizes, and that the model's features are supported. Returns the number of KV heads and the width of a head.
fn heads(config: &RawConfig, family: &Family) -> Result<(usize, usize), ModelError> {
    if config.quantization_config.is_some() {
        return Err(wrong("quantization_config", "absent (quantised safetensors are not supported)"));
    }
    if config.hidden_act.as_deref().is_some_and(|name| name != "silu") {
        return Err(wrong("hidden_act", "silu"));
    }
    for (key, value) in [
        ("attention_bias", config.attention_bias.filter(|_| !family.qkv_biases)),
        ("mlp_bias", config.mlp_bias),
        ("use_sliding_window", config.use_sliding_window),
    ] {
        if value == Some(true) {
            return Err(wrong(key, "false (it is not supported)"));
        }
    }
    let kv_heads = config.num_key_value_heads.unwrap_or(config.num_attention_heads);
    for (key, size) in [
        ("hidden_size", config.hidden_size),
        ("num_hidden_layers", config.num_hidden_layers),
        ("num_attention_heads", config.num_attention_heads),
        ("num_key_value_heads", kv_heads),
        ("intermediate_size", config.intermediate_size),
        ("max_position_embeddings", config.max_position_embeddings as usize),
        ("vocab_size", config.vocab_size),
    ] {
        if !(1..=u32::MAX as usize).contains(&size) {
            return Err(wrong(key, "above 0 and below 2^32"));
        }
    }
    if !config.num_attention_heads.is_multiple_of(kv_heads) {
        return Err(wrong("num_key_value_heads", "a divisor of the number of heads"));
    }
    let head_dim = match config.head_dim {
        Some(head_dim) => head_dim,
        None if config.hidden_size.is_multiple_of(config.num_attention_heads) => config.hidden_size / config.num_attention_heads,
        None => return Err(wrong("num_attention_heads", "a divisor of the width")),
    };
    if !is_head_dim(head_dim) {
        return Err(wrong("head_dim", "even, above 0 and below 2^16"));
    }
    Ok((kv_heads, head_dim))
}

fn scaling(parameters: &RopeScaling, context_length: u32) -> Result<Scaling, ModelError> {
    let key = |name: &str| format!("rope_scaling.{name}");
    let positive = |name: &str, number: Option<f64>| match number {
        Some(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err(wrong(&key(name), "a number above 0")),
    };
    if parameters.partial_rotary_factor.is_some_and(|share| share != 1.0) {
        return Err(wrong(&key("partial_rotary_factor"), "1"));
    }
    match parameters.rope_type.as_deref().unwrap_or("default") {
        "default" => Ok(Scaling::None),
        "linear" => Ok(Scaling::Linear { factor: positive("factor", parameters.factor)? }),
        "llama3" => {
            let low_freq_factor = positive("low_freq_factor", parameters.low_freq_factor)?;
            let high_freq_factor = positive("high_freq_factor", parameters.high_freq_factor)?;
            if high_freq_factor <= low_freq_factor {
                return Err(wrong(&key("high_freq_factor"), "above low_freq_factor"));
            }
            Ok(Scaling::Llama3 {
                factor: positive("factor", parameters.factor)?,
                low_freq_factor,
                high_freq_factor,
                original_context: positive("original_max_position_embeddings", parameters.original_max_position_embeddings)?,
            })
        }
        "yarn" => {
            if parameters.truncate == Some(false) {
                return Err(wrong(&key("truncate"), "true"));
            }
            if parameters.mscale.is_some() || parameters.mscale_all_dim.is_some() {
                return Err(wrong(&key("mscale"), "absent"));
            }
            let factor = positive("factor", parameters.factor)?;
            let original = parameters.original_max_position_embeddings.unwrap_or(f64::from(context_length));
            Ok(Scaling::Yarn {
                factor,
                original_context: positive("original_max_position_embeddings", Some(original))?,
                beta_fast: positive("beta_fast", Some(parameters.beta_fast.unwrap_or(32.0)))?,
                beta_slow: positive("beta_slow", Some(parameters.beta_slow.unwrap_or(1.0)))?,
                magnitude: positive("attention_factor", Some(parameters.attention_factor.unwrap_or(yarn_magnitude(factor))))?,
            })
        }
        _ => Err(wrong(&key("rope_type"), "default, linear, llama3 or yarn (no other scaling is supported)")),
    }
}
