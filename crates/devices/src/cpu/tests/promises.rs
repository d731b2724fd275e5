//! Tests that the bits of a result depend only on tokens, positions and the KV before them.

use super::*;
use proptest::prelude::*;

fn all_sizes() -> [Sizes; 11] {
    let quantised = |kind| Sizes { kind, ..QUANTISED };
    let floats = |kind| Sizes { kind, ..ODD };
    [
        QUANTISED,
        quantised(kind::Q4_0),
        quantised(kind::Q8_0),
        BLOCKS,
        Sizes { kind: kind::Q6_K, tied: true, ..BLOCKS },
        ODD,
        floats(kind::F16),
        Sizes { tied: true, ..floats(kind::BF16) },
        QWEN2,
        QWEN3,
        Sizes { family: "qwen3", ..BLOCKS },
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn logits_and_kv_have_the_same_bits_for_any_division_into_chunks(
        seed in any::<u64>(), len in 1usize..90, lens in prop::collection::vec(1usize..24, 1..12),
    ) {
        for sizes in all_sizes() {
            let model = model(sizes);
            let tokens = tokens(seed, len, sizes.vocab);
            let (mut whole, mut chunked) = (engine(&model), engine(&model));
            let expected = run(&mut whole, &tokens, &scattered(0, 2), &[]);
            let logits = run(&mut chunked, &tokens, &scattered(0, 2), &lens);
            prop_assert_eq!(bits(&logits), bits(&expected));
            prop_assert!(whole.kv == chunked.kv, "the KV depends on the chunks");
        }
    }

    #[test]
    fn logits_have_the_same_bits_in_any_batch(seed in any::<u64>(), shapes in prop::collection::vec((0usize..30, 1usize..12), 1..6)) {
        for sizes in all_sizes() {
            let model = model(sizes);
            let sequences: Vec<_> = shapes.iter().enumerate().map(|(i, (before, new))| (tokens(seed ^ i as u64, before + new, sizes.vocab), *before)).collect();
            let all_blocks: Vec<_> = (0..sequences.len()).map(|i| scattered(i as u32, 6)).collect();
            let sequences: Vec<_> = sequences.into_iter().map(|(mut tokens, before)| { tokens.truncate(40); (tokens, before.min(29)) }).collect();
            let mut together = engine(&model);
            let mut expected = Vec::new();
            for ((tokens, before), blocks) in sequences.iter().zip(&all_blocks) {
                run(&mut together, &tokens[..*before], blocks, &[]);
                let alone = run(&mut engine(&model), tokens, blocks, &[*before]);
                expected.extend_from_slice(&alone[before * sizes.vocab as usize..]);
            }
            let chunks: Vec<_> = sequences.iter().zip(&all_blocks)
                .map(|((tokens, before), blocks)| Chunk { tokens: &tokens[*before..], start: *before as u32, blocks, logits: Logits::All })
                .collect();
            let logits = together.step(&chunks).unwrap().into_logits();
            prop_assert_eq!(bits(&logits), bits(&expected));
        }
    }
}

#[test]
fn logits_are_returned_for_the_requested_tokens() {
    let model = model(QUANTISED);
    let vocab = QUANTISED.vocab as usize;
    let tokens = tokens(5, 9, QUANTISED.vocab);
    let (first, second, third) = (scattered(0, 3), scattered(1, 3), scattered(2, 3));
    let all = run(&mut engine(&model), &tokens, &first, &[]);
    let chunk = |blocks, logits| Chunk { tokens: &tokens, start: 0, blocks, logits };
    let chunks = [chunk(&first, Logits::Last), chunk(&second, Logits::None), chunk(&third, Logits::All)];
    let output = engine(&model).step(&chunks).unwrap().into_logits();
    assert_eq!(bits(&output), bits(&[&all[8 * vocab..], &all].concat()));
    assert!(engine(&model).step(&[chunk(&first, Logits::None)]).unwrap().into_logits().is_empty());
    assert!(engine(&model).step(&[]).unwrap().into_logits().is_empty());
}

#[test]
fn decode_on_copied_blocks_gives_logits_with_the_same_bits() {
    let model = model(QUANTISED);
    let tokens = tokens(9, 61, QUANTISED.vocab);
    let (from, to) = (scattered(0, 2), scattered(1, 2));
    let mut prefill = engine(&model);
    let expected = run(&mut prefill, &tokens, &from, &[60]);
    let mut decode = engine(&model);
    let mut payload = vec![0xaa; prefill.describe().block_bytes];
    for (from, to) in from.iter().zip(&to).take(60 / BLOCK_SIZE as usize) {
        prefill.read_block(*from, &mut payload).unwrap();
        decode.write_block(*to, &payload).unwrap();
        let mut again = vec![0; payload.len()];
        decode.read_block(*to, &mut again).unwrap();
        assert!(again == payload, "a block that is read equals the block that was written");
    }
    let last = Chunk { tokens: &tokens[60..], start: 60, blocks: &to, logits: Logits::Last };
    let logits = decode.step(&[last]).unwrap().into_logits();
    assert_eq!(bits(&logits), bits(&expected[60 * QUANTISED.vocab as usize..]));

    // If one number of the KV is changed, the logits change, which shows that the engine reads the KV.
    let mut block = vec![0; payload.len()];
    decode.read_block(to[3], &mut block).unwrap();
    block[1] ^= 0x40;
    decode.write_block(to[3], &block).unwrap();
    assert_ne!(bits(&decode.step(&[last]).unwrap().into_logits()), bits(&logits));
}

#[test]
fn engine_info_has_the_sizes_of_model_and_kv_memory() {
    let model = model(ODD);
    let engine = engine(&model);
    let info = engine.describe();
    let expected = ODD.layers * 2 * BLOCK_SIZE * ODD.kv_heads * ODD.head_dim * 2;
    assert_eq!(info.block_bytes, expected as usize);
    assert_eq!((info.block_size, info.capacity_blocks), (BLOCK_SIZE, CAPACITY_BLOCKS));
    assert_eq!((info.vocab_size, info.context_length), (ODD.vocab as usize, CONTEXT));
}

#[test]
fn packed_weights_are_at_most_5_percent_larger_than_the_file() {
    // All dimensions are multiples of 32, so that no panel is padded.
    let sizes = Sizes { vocab: 128, heads: 4, kv_heads: 2, head_dim: 32, width: 128, ..QUANTISED };
    let file = file(sizes, 1).finish();
    let model = CpuModel::load(&Gguf::from_bytes(file.clone()).unwrap()).unwrap();
    assert!(
        model.weight_bytes() < file.len() * 105 / 100,
        "the weights take {} bytes, the file has {}",
        model.weight_bytes(),
        file.len()
    );
}

#[test]
fn logits_and_kv_have_the_same_bits_for_any_instruction_set_and_threads() {
    for sizes in all_sizes() {
        let model = model(sizes);
        let tokens = tokens(11, 70, sizes.vocab);
        let mut baseline = engine_with(&model, CpuSettings { isa: *Isa::available().last().unwrap(), ..settings() });
        let expected = run(&mut baseline, &tokens, &scattered(0, 2), &[43, 1]);
        for isa in Isa::available() {
            for threads in [1, 2, 3] {
                let mut engine = engine_with(&model, CpuSettings { isa, threads, ..settings() });
                let logits = run(&mut engine, &tokens, &scattered(0, 2), &[43, 1]);
                assert_eq!(bits(&logits), bits(&expected), "{sizes:?} on {isa} with {threads} threads");
                assert!(engine.kv == baseline.kv, "KV of {sizes:?} on {isa} with {threads} threads");
            }
        }
    }
}
