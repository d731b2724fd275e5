//! Tests that unsupported models and invalid steps are refused.

use super::*;

fn refused(writer: Writer) -> CpuError {
    CpuModel::load(&gguf(writer)).err().expect("the model is refused")
}

#[test]
fn unsupported_models_are_refused_with_their_cause() {
    let original = || file(QUANTISED, 1);
    assert!(matches!(
        refused(original().str("general.architecture", "gemma3")),
        CpuError::Model(ModelError::Architecture { .. })
    ));
    let absent = refused(original().without_tensor("blk.1.ffn_up.weight"));
    assert!(matches!(absent, CpuError::Model(ModelError::MissingTensor { name }) if name == "blk.1.ffn_up.weight"));
    let shape = refused(original().tensor("blk.0.attn_k.weight", &[96, 96], kind::Q4_1, vec![0; 96 * 60]));
    assert!(matches!(shape, CpuError::Model(ModelError::TensorShape { .. })));
    let format = refused(original().tensor("blk.0.attn_k.weight", &[96, 32], kind::Q5_0, vec![0; 32 * 66]));
    assert!(matches!(format, CpuError::WeightType { kind: TensorType::Q5_0, .. }));
    let norm = refused(original().tensor("output_norm.weight", &[96], kind::Q4_1, vec![0; 60]));
    assert!(matches!(norm, CpuError::WeightType { .. }));
    let bias = refused(original().tensor("blk.1.attn_q.bias", &[96], kind::F32, vec![0; 384]));
    assert!(matches!(bias, CpuError::Unexpected { name } if name == "blk.1.attn_q.bias"));
    let head = refused(original().tensor("blk.1.attn_q_norm.weight", &[16], kind::F32, vec![0; 64]));
    assert!(matches!(head, CpuError::Unexpected { name } if name == "blk.1.attn_q_norm.weight"));
    let out = refused(file(QWEN2, 1).tensor("blk.0.attn_output.bias", &[40], kind::F32, vec![0; 160]));
    assert!(matches!(out, CpuError::Unexpected { name } if name == "blk.0.attn_output.bias"));
    for (sizes, needed) in [(QWEN2, "blk.1.attn_k.bias"), (QWEN3, "blk.1.attn_q_norm.weight")] {
        let absent = refused(file(sizes, 1).without_tensor(needed));
        assert!(matches!(absent, CpuError::Model(ModelError::MissingTensor { name }) if name == needed));
    }
}

#[test]
fn non_finite_weights_are_refused() {
    let damaged = |name: &str, kind: u32, inputs: u64, outputs: u64, mut data: Vec<u8>, at: usize, bytes: &[u8]| {
        data[at..at + bytes.len()].copy_from_slice(bytes);
        let sizes = if inputs == 256 { BLOCKS } else { QUANTISED };
        let error = refused(file(Sizes { kind, ..sizes }, 1).tensor(name, &[inputs, outputs], kind, data));
        assert!(matches!(&error, CpuError::NotFinite { name: found } if found == name), "{error}");
    };
    let infinite = f16::INFINITY.to_le_bytes();
    damaged("blk.0.attn_k.weight", kind::Q4_1, 96, 32, vec![0; 96 * 20], 40, &infinite);
    damaged("blk.0.attn_k.weight", kind::Q4_1, 96, 32, vec![0; 96 * 20], 42, &f16::NAN.to_le_bytes());
    damaged("blk.0.attn_k.weight", kind::Q8_0, 96, 32, vec![0; 96 * 34], 34, &infinite);
    damaged("blk.0.attn_k.weight", kind::Q4_0, 96, 32, vec![0; 96 * 18], 36, &infinite);
    // The scale of the next tensor is finite, but its weights are not.
    damaged("blk.0.attn_k.weight", kind::Q4_0, 96, 32, vec![0; 96 * 18], 36, &f16::MAX.to_le_bytes());
    damaged("blk.0.attn_k.weight", kind::Q4_K, 256, 64, vec![0; 64 * 144], 144, &infinite);
    damaged("blk.0.attn_k.weight", kind::Q4_K, 256, 64, vec![0; 64 * 144], 146, &infinite);
    damaged("blk.0.attn_k.weight", kind::Q6_K, 256, 64, vec![0; 64 * 210], 208, &infinite);
    damaged("blk.0.attn_k.weight", kind::BF16, 96, 32, vec![0; 96 * 64], 100, &half::bf16::INFINITY.to_le_bytes());
    damaged("blk.0.attn_k.weight", kind::F16, 96, 32, vec![0; 96 * 64], 100, &infinite);
    damaged("blk.0.attn_k.weight", kind::F32, 96, 32, vec![0; 96 * 128], 100, &f32::NAN.to_le_bytes());
    let norm: Vec<u8> = [f32::INFINITY; 96].iter().flat_map(|number| number.to_le_bytes()).collect();
    let error = refused(file(QUANTISED, 1).tensor("output_norm.weight", &[96], kind::F32, norm));
    assert!(matches!(error, CpuError::NotFinite { .. }));
}

#[test]
fn empty_or_oversized_kv_memory_is_refused() {
    let model = model(QUANTISED);
    for (block_size, capacity_blocks) in [(0, 1), (1, 0), (u32::MAX, u32::MAX)] {
        let error = CpuEngine::new(model.clone(), CpuSettings { block_size, capacity_blocks, ..settings() })
            .err()
            .expect("CpuEngine::new refuses these settings");
        assert!(matches!(error, CpuError::Settings { .. }), "{error}");
    }
}

#[test]
fn invalid_steps_are_refused_and_change_no_kv() {
    let model = model(QUANTISED);
    let mut engine = engine(&model);
    let good = tokens(2, 8, QUANTISED.vocab);
    let blocks = scattered(0, 2);
    let expected = run(&mut engine, &good, &blocks, &[]);
    let kv = engine.kv.clone();
    let chunk = |tokens, start, blocks| Chunk { tokens, start, blocks, logits: Logits::Last };
    let beyond_vocabulary = [QUANTISED.vocab];
    let beyond_memory = [BlockId(CAPACITY_BLOCKS)];
    let other = tokens(77, 8, QUANTISED.vocab);
    for (bad, what) in [
        (chunk(&[], 8, &blocks), "empty"),
        (chunk(&beyond_vocabulary, 8, &blocks), "vocabulary"),
        (chunk(&good, CONTEXT - 7, &blocks), "context"),
        (chunk(&good, u32::MAX, &blocks), "context"),
        (chunk(&good, 0, &blocks[..1]), "blocks"),
        (chunk(&good[..4], 0, &beyond_memory), "blocks"),
    ] {
        // The valid chunk before the invalid one is not computed either.
        let error = engine.step(&[chunk(&other, 0, &blocks), bad]).expect_err(what);
        assert!(error.to_string().contains(what), "{error} does not say {what}");
        assert!(engine.kv == kv, "a refused step has written");
    }
    assert_eq!(bits(&run(&mut engine, &good, &blocks, &[])), bits(&expected));
}

#[test]
#[should_panic(expected = "the payload has the size of a block")]
fn writing_a_block_of_wrong_size_panics() {
    engine(&model(QUANTISED)).write_block(BlockId(0), &[0; 3]).unwrap();
}
