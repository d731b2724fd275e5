//! Tests that the golden models, saved in the layout of Hugging Face's libraries, give the same logits.

use super::{goldens, *};
use safetensors::{Dtype, tensor::TensorView};
use std::path::Path;
use tandem_model::{HfDirectory, ModelConfig, ModelFile};

fn hf_name(name: &str) -> String {
    [
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("attn_output", "self_attn.o_proj"),
        ("attn_norm", "input_layernorm"),
        ("ffn_norm", "post_attention_layernorm"),
        ("attn_q_norm", "self_attn.q_norm"),
        ("attn_k_norm", "self_attn.k_norm"),
        ("attn_q.", "self_attn.q_proj."),
        ("attn_k.", "self_attn.k_proj."),
        ("attn_v.", "self_attn.v_proj."),
        ("ffn_gate", "mlp.gate_proj"),
        ("ffn_up", "mlp.up_proj"),
        ("ffn_down", "mlp.down_proj"),
        ("blk.", "model.layers."),
    ]
    .iter()
    .fold(if name == "output.weight" { "lm_head.weight".to_owned() } else { name.to_owned() }, |name, (from, to)| {
        name.replace(from, to)
    })
}

/// Reverts a permutation of rows. The conversion of a Llama model to GGUF makes the rows `i` and `i + half` of each head adjacent.
fn unpermuted(data: &[u8], rows: usize, head_dim: usize) -> Vec<u8> {
    let (row, half) = (data.len() / rows, head_dim / 2);
    let from = |at: usize| at / head_dim * head_dim + at % head_dim % half * 2 + at % head_dim / half;
    (0..rows).flat_map(|at| data[from(at) * row..][..row].to_vec()).collect()
}

fn save(gguf: &Gguf, rope: &str, shards: usize, into: &Path) {
    let config = ModelConfig::read(gguf).unwrap();
    let family = gguf.str("general.architecture").unwrap();
    let ModelConfig { layers, width, heads, kv_heads, head_dim, ffn, eps, context_length, vocab_size, tied, .. } = config;
    let json = format!(
        r#"{{"model_type":"{family}","hidden_size":{width},"num_hidden_layers":{layers},"num_attention_heads":{heads},
        "num_key_value_heads":{kv_heads},"head_dim":{head_dim},"intermediate_size":{ffn},"rms_norm_eps":{eps},
        "max_position_embeddings":{context_length},"vocab_size":{vocab_size},"tie_word_embeddings":{tied},"hidden_act":"silu",
        "rope_theta":10000.0,"rope_scaling":{rope}}}"#
    );
    std::fs::write(into.join("config.json"), json).unwrap();
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    for (name, kind) in gguf.tensor_types() {
        let tensor = gguf.tensor(name).unwrap();
        let dtype = match kind {
            TensorType::F32 => Dtype::F32,
            TensorType::F16 => Dtype::F16,
            TensorType::BF16 => Dtype::BF16,
            other => unreachable!("{other:?}"),
        };
        let turned = family == "llama" && (name.ends_with("attn_q.weight") || name.ends_with("attn_k.weight"));
        let data = if turned { unpermuted(tensor.data, tensor.shape[1] as usize, head_dim) } else { tensor.data.to_vec() };
        tensors.push((hf_name(name), dtype, tensor.shape.iter().rev().map(|length| *length as usize).collect(), data));
    }
    tensors.sort_by(|first, second| first.0.cmp(&second.0));
    let file_name = |shard| match shards {
        1 => "model.safetensors".to_owned(),
        _ => format!("model-{shard}-of-{shards}.safetensors"),
    };
    let mut index = Vec::new();
    for (shard, tensors) in tensors.chunks(tensors.len().div_ceil(shards)).enumerate() {
        let views =
            tensors.iter().map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
        std::fs::write(into.join(file_name(shard)), safetensors::serialize(views, None).unwrap()).unwrap();
        index.extend(tensors.iter().map(|(name, ..)| format!("\"{name}\":\"{}\"", file_name(shard))));
    }
    if shards > 1 {
        let index = format!(r#"{{"metadata":{{}},"weight_map":{{{}}}}}"#, index.join(","));
        std::fs::write(into.join("model.safetensors.index.json"), index).unwrap();
    }
}

fn model(name: &str) -> Gguf {
    gguf(goldens::models().into_iter().find(|(known, _)| *known == name).unwrap().1)
}

#[test]
fn hugging_face_directories_give_the_reference_logits() {
    const YARN: &str = r#"{"rope_type":"yarn","factor":4.0,"original_max_position_embeddings":24}"#;
    const LINEAR: &str = r#"{"type":"linear","factor":4.0}"#;
    for (name, rope, shards) in [
        ("llama-f32", "null", 1),
        ("llama-f16", "null", 2),
        ("llama-linear", LINEAR, 1),
        ("qwen2-f32", "null", 3),
        ("qwen3-bf16", "null", 2),
        ("qwen3-yarn", YARN, 1),
    ] {
        let (gguf, folder) = (model(name), tempfile::tempdir().unwrap());
        save(&gguf, rope, shards, folder.path());
        let directory = HfDirectory::open(folder.path()).unwrap();
        let mut ours = engine(&CpuModel::load(&directory).unwrap());
        let logits = goldens::compare(name, &mut ours);
        if !name.starts_with("llama") {
            let mut same = engine(&CpuModel::load(&gguf).unwrap());
            assert_eq!(
                bits(&logits),
                bits(&goldens::compare(name, &mut same)),
                "{name}: the bits differ from those of the GGUF file"
            );
        }
    }
}

#[test]
fn directory_error_names_the_missing_or_unsupported_entry() {
    let folder = tempfile::tempdir().unwrap();
    save(&model("qwen3-bf16"), "null", 1, folder.path());
    let weights = folder.path().join("model.safetensors");
    let whole = std::fs::read(&weights).unwrap();
    for len in [0, 7, 100, whole.len() - 1] {
        std::fs::write(&weights, &whole[..len]).unwrap();
        let error = HfDirectory::open(folder.path()).err().expect("a truncated file is refused");
        assert!(matches!(error, ModelError::Safetensors { .. } | ModelError::Open { .. }), "{len} bytes: {error}");
    }
    let config = std::fs::read_to_string(folder.path().join("config.json")).unwrap();
    std::fs::write(&weights, &whole).unwrap();
    for (from, to, named) in [
        ("\"qwen3\"", "\"gemma3\"", "gemma3"),
        ("\"qwen3\"", "\"qwen2\"", "attn_q_norm.weight"),
        ("\"rope_scaling\":null", "\"rope_scaling\":{\"rope_type\":\"longrope\"}", "rope_scaling.rope_type"),
        ("\"rope_scaling\":null", "\"rope_scaling\":{\"rope_type\":\"yarn\"}", "rope_scaling.factor"),
        ("\"silu\"", "\"gelu\"", "hidden_act"),
        ("\"hidden_act\"", "\"quantization_config\":{},\"hidden_act\"", "quantization_config"),
        ("\"hidden_act\"", "\"use_sliding_window\":true,\"hidden_act\"", "use_sliding_window"),
        ("\"hidden_size\":64", "\"hidden_size\":0", "hidden_size"),
        ("\"hidden_size\":64", "\"hidden_size\":32", "token_embd.weight"),
        ("\"hidden_size\":64", "\"hidden_size\":\"x\"", "config.json"),
        ("\"num_key_value_heads\":2", "\"num_key_value_heads\":3", "num_key_value_heads"),
        ("\"tie_word_embeddings\":true", "\"tie_word_embeddings\":false", "lm_head.weight"),
    ] {
        assert!(config.contains(from), "{from}");
        std::fs::write(folder.path().join("config.json"), config.replace(from, to)).unwrap();
        let opened = HfDirectory::open(folder.path()).map_err(CpuError::from);
        let error = opened.and_then(|directory| CpuModel::load(&directory)).err().expect(to).to_string();
        assert!(error.contains(named), "{to}: {error}");
    }
    std::fs::write(folder.path().join("config.json"), config).unwrap();
    std::fs::write(folder.path().join("model.safetensors.index.json"), r#"{"weight_map":{"a":"../x.safetensors"}}"#).unwrap();
    assert!(
        matches!(HfDirectory::open(folder.path()), Err(ModelError::Malformed { .. })),
        "a file outside the folder is refused"
    );
}
