//! Compares small random models with independent references: `ci/goldens/make_small.py` (numpy), checked with llama.cpp.

use super::*;
use serde::Deserialize;

#[derive(Deserialize)]
pub(crate) struct Golden {
    pub model: String,
    revision: String,
    pub tokens: Vec<TokenId>,
    pub logits: Vec<f64>,
}

pub(crate) const LLAMA: Sizes = Sizes {
    family: "llama",
    layers: 2,
    width: 64,
    heads: 4,
    kv_heads: 2,
    head_dim: 16,
    ffn: 96,
    vocab: 48,
    kind: kind::F32,
    tied: false,
};
/// A model whose matrices have multiples of 256 inputs, and whose heads have more than width ÷ heads elements.
const WIDE: Sizes = Sizes { family: "qwen3", layers: 1, width: 256, heads: 8, head_dim: 64, ffn: 256, vocab: 33, ..LLAMA };

pub(crate) fn models() -> Vec<(&'static str, Writer)> {
    let llama = |kind| file(Sizes { kind, ..LLAMA }, 21);
    let qwen2 = |kind| file(Sizes { family: "qwen2", kind, ..LLAMA }, 22);
    let qwen3 = |kind| file(Sizes { family: "qwen3", head_dim: 24, tied: true, kind, ..LLAMA }, 23);
    let wide = |kind| file(Sizes { kind, ..WIDE }, 24);
    let stretched = |writer: Writer, family: &str, how: &str| {
        writer
            .str(&format!("{family}.rope.scaling.type"), how)
            .f32(&format!("{family}.rope.scaling.factor"), 4.0)
            .u32(&format!("{family}.rope.scaling.original_context_length"), 24)
    };
    let divisors = [1f32, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0].into_iter().flat_map(f32::to_le_bytes).collect();
    vec![
        ("llama-f32", llama(kind::F32)),
        ("llama-f16", llama(kind::F16)),
        ("llama-bf16", llama(kind::BF16)),
        ("llama-q4_0", llama(kind::Q4_0)),
        ("llama-q4_1", llama(kind::Q4_1)),
        ("llama-q8_0", llama(kind::Q8_0)),
        ("llama-divisors", llama(kind::F32).tensor("rope_freqs.weight", &[8], kind::F32, divisors)),
        ("llama-linear", stretched(llama(kind::F32), "llama", "linear")),
        ("qwen2-f32", qwen2(kind::F32)),
        ("qwen2-q8_0", qwen2(kind::Q8_0)),
        ("qwen3-bf16", qwen3(kind::BF16)),
        ("qwen3-yarn", stretched(qwen3(kind::F32), "qwen3", "yarn")),
        ("qwen3-q4_k", wide(kind::Q4_K)),
        ("qwen3-q6_k", wide(kind::Q6_K)),
    ]
}

pub(crate) fn goldens() -> Vec<Golden> {
    serde_json::from_str(include_str!("../../../../../ci/goldens/small.json")).unwrap()
}

pub(super) fn compare(name: &str, engine: &mut CpuEngine) -> Vec<f32> {
    let golden = goldens().into_iter().find(|golden| golden.model == name).unwrap();
    let all = run(engine, &golden.tokens, &scattered(0, 1), &[]);
    let logits = &all[all.len() - golden.logits.len()..];
    let squares: f64 = golden.logits.iter().map(|logit| logit * logit).sum();
    let errors: f64 = logits.iter().zip(&golden.logits).map(|(logit, golden)| (f64::from(*logit) - golden).powi(2)).sum();
    let error = (errors / squares).sqrt();
    // The errors come from 8-bit activations where weights are quantised, and from keys and values in half precision.
    let bound = if name.contains("-q") { 0.04 } else { 1e-3 };
    assert!(error < bound, "the relative error of the logits of {name} is {error}");
    all
}

fn sha256(file: &[u8]) -> String {
    tandem_model::revision::sha256(file).unwrap()
}

#[test]
fn small_models_give_the_reference_logits() {
    let (goldens, models) = (goldens(), models());
    assert_eq!(goldens.len(), models.len());
    for (golden, (name, writer)) in goldens.iter().zip(models) {
        let revision = sha256(&writer.clone().finish());
        assert_eq!((golden.model.as_str(), &golden.revision), (name, &revision), "the goldens were made with other models");
        compare(name, &mut engine(&CpuModel::load(&gguf(writer)).unwrap()));
    }
}

/// Writes the model files that `make_small.py` reads. That script documents the procedure.
#[test]
#[ignore = "writes files for ci/goldens/make_small.py"]
fn models_for_the_reference_script_are_written() {
    let folder = std::env::var_os("TANDEM_SMALL_MODELS").expect("TANDEM_SMALL_MODELS must name a folder");
    for (name, writer) in models() {
        let file = writer.finish();
        let path = std::path::Path::new(&folder).join(format!("{name}.{}.gguf", sha256(&file)));
        std::fs::write(path, file).unwrap();
    }
}
