//! Tests which GGUF files are accepted, and which values are read from them.

mod writer;

use proptest::prelude::*;
use tandem_model::{Gguf, ModelConfig, ModelError, ModelFile, Pairs, Rope, TensorType};
use writer::{Writer, kind};

fn small() -> Writer {
    Writer::default()
        .str("general.architecture", "llama")
        .u32("llama.block_count", 2)
        .u32("llama.embedding_length", 8)
        .u32("llama.feed_forward_length", 16)
        .u32("llama.attention.head_count", 4)
        .u32("llama.attention.head_count_kv", 2)
        .u32("llama.context_length", 64)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .f32("llama.rope.freq_base", 500.0)
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "smollm")
        .strs("tokenizer.ggml.tokens", &["<s>", "a", "b", "ab", "é"])
        .i32s("tokenizer.ggml.token_type", &[3, 1, 1, 1, 1])
        .strs("tokenizer.ggml.merges", &["a b"])
        .u32("tokenizer.ggml.eos_token_id", 0)
        .bool("tokenizer.ggml.add_bos_token", true)
        .str("tokenizer.chat_template", "{{ messages }}")
        .tensor("token_embd.weight", &[8, 5], kind::F32, vec![1; 160])
        .tensor("q", &[32, 2], kind::Q4_1, vec![2; 40])
}

fn read(writer: Writer) -> Result<Gguf, ModelError> {
    Gguf::from_bytes(writer.finish())
}

fn error(writer: Writer) -> ModelError {
    read(writer).err().expect("the file is refused")
}

fn config_error(writer: Writer) -> ModelError {
    ModelConfig::read(&read(writer).expect("the file is well-formed")).expect_err("the configuration is refused")
}

#[test]
fn gguf_reader_returns_the_written_configuration_tensors_and_tokenizer() {
    let file = read(small()).unwrap();
    let config = ModelConfig::read(&file).unwrap();
    let expected = ModelConfig {
        layers: 2,
        width: 8,
        heads: 4,
        kv_heads: 2,
        head_dim: 2,
        ffn: 16,
        eps: 1e-5,
        rope: Rope { pairs: Pairs::Adjacent, frequencies: vec![1.0], magnitude: 1.0 },
        qkv_biases: false,
        qk_norms: false,
        context_length: 64,
        vocab_size: 5,
        tied: true,
    };
    assert_eq!(config, expected);
    assert_eq!(file.context_length().unwrap(), 64);
    let tensor = file.tensor("q").unwrap();
    assert_eq!((tensor.kind, tensor.shape, tensor.data), (TensorType::Q4_1, &[32u64, 2][..], &[2u8; 40][..]));
    let tokenizer = file.tokenizer().unwrap();
    assert_eq!(tokenizer.tokens, ["<s>", "a", "b", "ab", "é"]);
    assert_eq!(tokenizer.token_types, [3, 1, 1, 1, 1]);
    assert_eq!(tokenizer.merges, ["a b"]);
    assert_eq!((tokenizer.pre.as_str(), tokenizer.model.as_str()), ("smollm", "gpt2"));
    assert_eq!((tokenizer.bos, tokenizer.eos, tokenizer.add_bos), (None, Some(0), true));
    assert_eq!(tokenizer.chat_template.as_deref(), Some("{{ messages }}"));
}

#[test]
fn mapped_file_has_the_same_tensors_as_its_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.gguf");
    std::fs::write(&path, small().finish()).unwrap();
    let (mapped, owned) = (Gguf::open(&path).unwrap(), read(small()).unwrap());
    assert_eq!(mapped.tensor("q").unwrap().data, owned.tensor("q").unwrap().data);
    let absent = Gguf::open(&directory.path().join("absent.gguf")).err().unwrap();
    assert!(matches!(absent, ModelError::Open { .. }) && absent.to_string().contains("absent.gguf"), "{absent}");
    assert!(Gguf::open(directory.path()).is_err(), "a directory is not a GGUF file");
}

#[test]
fn vocabulary_has_one_score_for_each_token() {
    const SCORES: &str = "tokenizer.ggml.scores";
    let scores = [0.0, -1.5, f32::MIN, -0.0, 4.0];
    let tokenizer =
        read(small().f32s(SCORES, &scores).bool("tokenizer.ggml.add_space_prefix", true)).unwrap().tokenizer().unwrap();
    assert_eq!(tokenizer.scores, scores);
    assert!(tokenizer.add_space_prefix);
    for writer in [small().f32s(SCORES, &scores[1..]), small().i32s(SCORES, &[1; 5]), small().f32(SCORES, 1.0)] {
        let error = read(writer).unwrap().tokenizer().unwrap_err();
        assert!(matches!(&error, ModelError::WrongValue { key, .. } if key == SCORES), "{error}");
    }
}

#[test]
fn missing_optional_keys_have_defaults() {
    let writer = small()
        .without("tokenizer.ggml.pre")
        .without("tokenizer.ggml.token_type")
        .without("tokenizer.ggml.merges")
        .without("tokenizer.ggml.eos_token_id")
        .without("tokenizer.ggml.add_bos_token")
        .without("tokenizer.chat_template");
    let tokenizer = read(writer).unwrap().tokenizer().unwrap();
    assert_eq!(tokenizer.token_types, [1; 5]);
    assert_eq!(
        (tokenizer.pre.as_str(), tokenizer.eos, tokenizer.add_bos, tokenizer.chat_template),
        ("default", None, false, None)
    );
    let silent = small().str("tokenizer.ggml.pre", "llama-bpe").without("tokenizer.ggml.add_bos_token");
    assert!(read(silent.clone()).unwrap().tokenizer().unwrap().add_bos, "Llama 3 prompts begin with the BOS token");
    assert!(!read(silent.bool("tokenizer.ggml.add_bos_token", false)).unwrap().tokenizer().unwrap().add_bos);
    let tokenizer =
        read(small().str("tokenizer.ggml.model", "llama").without("tokenizer.ggml.add_bos_token")).unwrap().tokenizer().unwrap();
    assert!(tokenizer.add_bos && tokenizer.add_space_prefix && tokenizer.scores.is_empty(), "a SentencePiece vocabulary");
    let writer = small().without("llama.attention.head_count_kv").without("llama.rope.freq_base");
    let config = ModelConfig::read(&read(writer).unwrap()).unwrap();
    assert_eq!(config.kv_heads, 4);
    let four = read(small().without("llama.rope.freq_base").u32("llama.attention.key_length", 4)).unwrap();
    assert_eq!(ModelConfig::read(&four).unwrap().rope.frequencies, [1.0, 0.01], "the default base is 10,000");
}

#[test]
fn file_truncated_at_any_length_is_refused() {
    let whole = small().finish();
    for len in 0..whole.len() {
        match Gguf::from_bytes(whole[..len].to_vec()) {
            Err(ModelError::Truncated { .. }) => {}
            Err(ModelError::NotGguf) if len < 4 => {}
            Err(other) => panic!("{len} bytes: {other}"),
            Ok(_) => panic!("{len} of {} bytes were accepted as a complete file", whole.len()),
        }
    }
}

#[test]
fn file_of_another_format_or_version_is_refused() {
    let mut file = small().finish();
    file[4..8].copy_from_slice(&2u32.to_le_bytes());
    assert!(matches!(Gguf::from_bytes(file.clone()), Err(ModelError::Version { found: 2 })));
    file[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(matches!(Gguf::from_bytes(file.clone()), Err(ModelError::Version { .. })), "big-endian");
    file[..4].copy_from_slice(b"PK\x03\x04");
    assert!(matches!(Gguf::from_bytes(file), Err(ModelError::NotGguf)));
}

#[test]
fn lengths_beyond_the_file_are_refused_without_allocation() {
    for at in [8, 16] {
        let mut file = small().finish();
        file[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(Gguf::from_bytes(file).is_err(), "count at {at}");
    }
    let endless = |kind: u32| small().raw("list", 9, &[&kind.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat());
    for kind in [0, 5, 8, 12] {
        assert!(matches!(error(endless(kind)), ModelError::Truncated { .. }), "a list of type {kind}");
    }
    assert!(matches!(error(small().raw("text", 8, &u64::MAX.to_le_bytes())), ModelError::Truncated { .. }));
    assert!(matches!(error(small().tensor("large", &[1 << 40, 1 << 40], kind::F32, vec![])), ModelError::Malformed { .. }));
    assert!(matches!(error(small().tensor("large", &[1 << 40], kind::F32, vec![])), ModelError::Truncated { .. }));
}

#[test]
fn malformed_files_are_refused() {
    assert!(matches!(error(small().raw("x", 77, &[])), ModelError::Malformed { .. }), "an unknown type of value");
    assert!(
        matches!(error(small().raw("x", 9, &[9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])), ModelError::Malformed { .. }),
        "a list of lists"
    );
    assert!(matches!(error(small().raw("x", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff])), ModelError::Malformed { .. }), "not UTF-8");
    assert!(matches!(error(small().u32("general.alignment", 24)), ModelError::Malformed { .. }), "an invalid alignment");
    assert!(matches!(error(small().u32("general.alignment", 0)), ModelError::Malformed { .. }), "alignment 0");
    assert!(
        matches!(error(small().tensor("q", &[33], kind::Q4_1, vec![0; 40])), ModelError::Malformed { .. }),
        "an incomplete quantized block"
    );
    assert!(
        matches!(error(small().tensor("q", &[1; 5], kind::F32, vec![0; 4])), ModelError::Malformed { .. }),
        "too many dimensions"
    );
    assert!(matches!(error(small().tensor("q", &[32], 99, vec![0; 40])), ModelError::UnknownTensorType { found: 99, .. }));
    let twice = small().tensor("same", &[1], kind::F32, vec![0; 4]).tensor("s\0me", &[1], kind::F32, vec![0; 4]).finish();
    let at = twice.windows(4).position(|window| window == b"s\0me").unwrap();
    let mut twice = twice;
    twice[at + 1] = b'a';
    assert!(matches!(Gguf::from_bytes(twice), Err(ModelError::Malformed { .. })), "two tensors of one name");
}

#[test]
fn error_names_the_missing_or_mistyped_key() {
    let file = read(small()).unwrap();
    let wrong = |error: ModelError| {
        assert!(matches!(&error, ModelError::WrongValue { key, .. } if error.to_string().contains(key)), "{error}")
    };
    wrong(file.u32("general.architecture").unwrap_err());
    wrong(file.str("llama.block_count").unwrap_err());
    wrong(file.f32("llama.block_count").unwrap_err());
    wrong(file.bool("llama.block_count").unwrap_err());
    wrong(file.strings("tokenizer.ggml.token_type").unwrap_err());
    wrong(file.i32s("tokenizer.ggml.tokens").unwrap_err());
    wrong(read(small().raw("x", 5, &(-1i32).to_le_bytes())).unwrap().u32("x").unwrap_err());
    wrong(read(small().raw("x", 10, &(1u64 << 32).to_le_bytes())).unwrap().u32("x").unwrap_err());
    assert!(matches!(file.u32("absent"), Err(ModelError::MissingKey { key }) if key == "absent"));
    assert!(matches!(file.tensor("absent"), Err(ModelError::MissingTensor { name }) if name == "absent"));
    assert!(matches!(file.tensor_of("q", &[2, 32]), Err(ModelError::TensorShape { .. })));
    assert_eq!(read(small().raw("x", 0, &[200])).unwrap().u32("x").unwrap(), 200);
}

#[test]
fn inconsistent_tokenizers_are_refused() {
    let tokenizer = |writer| read(writer).unwrap().tokenizer().unwrap_err();
    let short = tokenizer(small().i32s("tokenizer.ggml.token_type", &[1]));
    assert!(matches!(short, ModelError::WrongValue { key, .. } if key == "tokenizer.ggml.token_type"));
    let beyond = tokenizer(small().u32("tokenizer.ggml.bos_token_id", 5));
    assert!(matches!(beyond, ModelError::WrongValue { key, .. } if key == "tokenizer.ggml.bos_token_id"));
    assert!(matches!(tokenizer(small().without("tokenizer.ggml.tokens")), ModelError::MissingKey { .. }));
}

#[test]
fn unsupported_or_inconsistent_model_is_refused() {
    assert!(
        matches!(config_error(small().str("general.architecture", "gemma3")), ModelError::Architecture { found } if found == "gemma3")
    );
    let key_of = |writer| match config_error(writer) {
        ModelError::WrongValue { key, .. } => key,
        other => panic!("{other}"),
    };
    assert_eq!(key_of(small().u32("llama.attention.head_count_kv", 3)), "llama.attention.head_count_kv");
    assert_eq!(key_of(small().u32("llama.attention.head_count_kv", 0)), "llama.attention.head_count_kv");
    assert_eq!(key_of(small().u32("llama.block_count", 0)), "llama.block_count");
    assert_eq!(
        key_of(small().u32("llama.attention.head_count", 3).u32("llama.attention.head_count_kv", 3)),
        "llama.attention.head_count"
    );
    assert_eq!(key_of(small().u32("llama.attention.key_length", 3)), "llama.attention.key_length");
    // Frequencies for this length would take 16 GiB.
    assert_eq!(key_of(small().u32("llama.attention.key_length", 0xFFFF_FFFE)), "llama.attention.key_length");
    let wide_head = small().u32("llama.embedding_length", 0xFFFF_FFFE);
    let wide_head = wide_head.u32("llama.attention.head_count", 1).u32("llama.attention.head_count_kv", 1);
    assert_eq!(key_of(wide_head), "llama.attention.key_length");
    assert_eq!(key_of(small().u32("llama.attention.value_length", 4)), "llama.attention.value_length");
    assert_eq!(key_of(small().u32("llama.rope.dimension_count", 4)), "llama.rope.dimension_count");
    assert_eq!(key_of(small().str("llama.rope.scaling.type", "longrope")), "llama.rope.scaling.type");
    assert_eq!(key_of(small().f32("llama.rope.scaling.factor", 0.0)), "llama.rope.scaling.factor");
    let yarn = || small().str("llama.rope.scaling.type", "yarn").f32("llama.rope.scaling.factor", 4.0);
    assert_eq!(key_of(yarn().f32("llama.rope.scaling.yarn_ext_factor", 0.5)), "llama.rope.scaling.yarn_ext_factor");
    assert_eq!(key_of(yarn().f32("llama.rope.scaling.yarn_log_multiplier", 0.1)), "llama.rope.scaling.yarn_log_multiplier");
    assert_eq!(key_of(yarn().f32("llama.rope.scaling.yarn_beta_fast", f32::NAN)), "llama.rope.scaling.yarn_beta_fast");
    assert_eq!(key_of(small().tensor("rope_freqs.weight", &[1], kind::F32, vec![0; 4])), "rope_freqs.weight");
    assert_eq!(key_of(small().tensor("rope_freqs.weight", &[1], kind::F16, vec![1; 2])), "rope_freqs.weight");
    let short = small().tensor("rope_freqs.weight", &[2], kind::F32, vec![1; 8]);
    assert!(matches!(config_error(short), ModelError::TensorShape { .. }));
    assert_eq!(key_of(small().u32("llama.expert_count", 8)), "llama.expert_count");
    assert_eq!(key_of(small().f32("llama.attention.layer_norm_rms_epsilon", f32::NAN)), "llama.attention.layer_norm_rms_epsilon");
    assert_eq!(key_of(small().f32("llama.rope.freq_base", 0.0)), "llama.rope.freq_base");
    let wide = small().tensor("token_embd.weight", &[4, 5], kind::F32, vec![0; 80]);
    assert!(matches!(config_error(wide), ModelError::TensorShape { .. }));
    assert!(matches!(config_error(small().without_tensor("token_embd.weight")), ModelError::MissingTensor { .. }));
}

fn family(name: &str) -> Writer {
    small()
        .str("general.architecture", name)
        .u32(&format!("{name}.block_count"), 2)
        .u32(&format!("{name}.embedding_length"), 8)
        .u32(&format!("{name}.feed_forward_length"), 16)
        .u32(&format!("{name}.attention.head_count"), 4)
        .u32(&format!("{name}.attention.key_length"), 4)
        .u32(&format!("{name}.context_length"), 64)
        .f32(&format!("{name}.attention.layer_norm_rms_epsilon"), 1e-5)
}

#[test]
fn architecture_determines_rope_pairs_biases_and_norms() {
    for (name, pairs, qkv_biases, qk_norms) in
        [("llama", Pairs::Adjacent, false, false), ("qwen2", Pairs::Halves, true, false), ("qwen3", Pairs::Halves, false, true)]
    {
        let config = ModelConfig::read(&read(family(name)).unwrap()).unwrap();
        assert_eq!((config.rope.pairs, config.qkv_biases, config.qk_norms), (pairs, qkv_biases, qk_norms), "{name}");
        assert_eq!(config.head_dim, 4, "{name}");
    }
}

#[test]
fn rope_scaling_is_read_from_keys_and_tensors() {
    let rope = |writer| ModelConfig::read(&read(writer).unwrap()).unwrap().rope;
    let qwen = || family("qwen3").f32("qwen3.rope.freq_base", 100.0);
    assert_eq!(rope(qwen()).frequencies, [1.0, 0.1]);
    assert_eq!(rope(qwen().str("qwen3.rope.scaling.type", "none").f32("qwen3.rope.scaling.factor", 2.0)).frequencies, [1.0, 0.1]);
    for linear in [
        qwen().str("qwen3.rope.scaling.type", "linear").f32("qwen3.rope.scaling.factor", 2.0),
        qwen().f32("qwen3.rope.scaling.factor", 2.0),
        qwen().f32("qwen3.rope.scale_linear", 2.0),
    ] {
        assert_eq!(rope(linear).frequencies, [0.5, 0.05]);
    }
    let divisors = [1f32.to_le_bytes(), 4f32.to_le_bytes()].concat();
    assert_eq!(rope(qwen().tensor("rope_freqs.weight", &[2], kind::F32, divisors)).frequencies, [1.0, 0.025]);
    let yarn = |writer: Writer| writer.str("qwen3.rope.scaling.type", "yarn").f32("qwen3.rope.scaling.factor", 4.0);
    let found = rope(yarn(qwen()));
    assert!((found.magnitude - 1.1386294361).abs() < 1e-9, "{}", found.magnitude);
    assert_eq!(rope(yarn(qwen()).f32("qwen3.rope.scaling.attn_factor", 2.0)).magnitude, found.magnitude * 2.0);
    // YaRN keeps or divides a pair by how often it rotates in the original context. In a context of 64 the first pair rotates ten times and
    // the second once; in a context of 4,096 each of the two pairs rotates often.
    assert_eq!(found.frequencies[0], 1.0);
    assert!(found.frequencies[1] < 0.1, "{}", found.frequencies[1]);
    assert_eq!(rope(yarn(qwen()).u32("qwen3.rope.scaling.original_context_length", 4096)).frequencies, [1.0, 0.1]);
}

proptest! {
    #[test]
    fn damaged_files_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut file = small().finish();
        let len = file.len();
        for (at, byte) in changes {
            file[at.index(len)] = byte;
        }
        if let Ok(file) = Gguf::from_bytes(file) {
            let _ = (file.tokenizer(), ModelConfig::read(&file), file.context_length());
            for (name, _) in file.tensor_types() {
                prop_assert!(file.tensor(name).is_ok());
            }
        }
    }
}
