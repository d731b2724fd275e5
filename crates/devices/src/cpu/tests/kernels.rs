//! Tests that each kernel gives the same bits with all instruction sets of this processor.

use super::*;
use crate::cpu::{
    attention::{Place, Scratch, attend, store_kv},
    weights::Matrix,
};
use proptest::prelude::*;
use tandem_model::{Pairs, Rope};

/// Returns random numbers of all magnitudes, including 0 and −0.
fn wild(random: &mut Random, len: usize) -> Vec<f32> {
    let number = |random: &mut Random| match random.below(8) {
        0 => 0.0,
        1 => -0.0,
        2 => random.number() * 1e4,
        3 => random.number() * 1e-30,
        _ => random.number(),
    };
    (0..len).map(|_| number(random)).collect()
}

fn same(len: usize, mut kernel: impl FnMut(Isa, &mut Vec<f32>)) -> Vec<u32> {
    let mut results = Isa::available().into_iter().map(|isa| {
        let mut out = vec![0.0; len];
        kernel(isa, &mut out);
        (isa, bits(&out))
    });
    let (best, result) = results.next().unwrap();
    for (isa, other) in results {
        assert_eq!(other, result, "{isa} and {best}");
    }
    result
}

/// The weight formats for which there is a kernel, each with the number of weights that share a scale.
const KINDS: [(u32, usize); 8] = [
    (kind::Q4_0, 32),
    (kind::Q4_1, 32),
    (kind::Q8_0, 32),
    (kind::Q4_K, 256),
    (kind::Q6_K, 256),
    (kind::F16, 1),
    (kind::BF16, 1),
    (kind::F32, 1),
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn matrix_kernels_give_equal_bits_on_all_instruction_sets(
        seed in any::<u64>(), rows in 1usize..80, groups in 1usize..4, outputs in 1usize..80,
    ) {
        let mut random = Random::new(seed);
        for (kind, block_len) in KINDS {
            let inputs = if block_len == 1 { groups * 32 - random.below(20) as usize } else { groups * block_len };
            let data = random.weights(kind, inputs * outputs);
            let file = gguf(Writer::default().tensor("w", &[inputs as u64, outputs as u64], kind, data));
            let matrix = Matrix::load(&file, "w", outputs, inputs).unwrap();
            let x = wild(&mut random, rows * inputs);
            let threads = Threads::new(1 + (seed % 3) as usize).unwrap();
            let together = same(rows * outputs, |isa, out| {
                let mut quantised = Quantised::default();
                quantise(isa, &x, inputs, &mut quantised);
                linear(&threads, isa, (&x, inputs, &quantised), [(&matrix, out)]);
            });
            for (row, together) in together.chunks(outputs).enumerate().step_by(5) {
                let x = &x[row * inputs..][..inputs];
                let alone = same(outputs, |isa, out| {
                    let mut quantised = Quantised::default();
                    quantise(isa, x, inputs, &mut quantised);
                    linear(&threads, isa, (x, inputs, &quantised), [(&matrix, out)]);
                });
                prop_assert_eq!(together, &alone[..], "row {}", row);
            }
        }
    }

    #[test]
    fn norm_and_gate_kernels_give_equal_bits_on_all_instruction_sets(seed in any::<u64>(), rows in 1usize..5, width in 1usize..100) {
        let mut random = Random::new(seed);
        let (x, y, weight) = (wild(&mut random, rows * width), wild(&mut random, rows * width), wild(&mut random, width));
        let len = rows * width;
        let normed = same(len, |isa, out| rms_norm(isa, &x, &weight, 1e-5, out));
        let in_place = same(len, |isa, out| { out.copy_from_slice(&x); rms_norm_in_place(isa, out, &weight, 1e-5) });
        prop_assert_eq!(normed, in_place);
        same(len, |isa, out| { out.copy_from_slice(&x); add_to_rows(isa, out, &weight) });
        same(len, |isa, out| { out.copy_from_slice(&x); swiglu(isa, out, &y) });
        same(len, |isa, out| { out.copy_from_slice(&x); add(isa, out, &y) });
    }

    #[test]
    fn attention_kernel_gives_equal_bits_on_all_instruction_sets(
        seed in any::<u64>(), before in 0usize..60, new in 1usize..30, kv_heads in 1usize..3, group in 1usize..4, pairs in 1usize..20,
        block_size in 1usize..40,
    ) {
        let mut random = Random::new(seed);
        let head_dim = pairs * 2;
        let layout = KvLayout { layers: 1, block_size, heads: kv_heads * group, kv_heads, head_dim };
        let blocks: Vec<_> = (0..(before + new).div_ceil(block_size) as u32).rev().map(BlockId).collect();
        let mut kv = vec![0x7e00; blocks.len() * layout.block_len() + KvLayout::PADDING];
        let place = Place { start: 0, blocks: &blocks, layer: 0 };
        let mut kv_rows = || wild(&mut random, (before + new) * layout.row_len());
        let (keys, values) = (kv_rows(), kv_rows());
        store_kv(Isa::detect(), &layout, &mut kv, place, &keys, &values);
        let row_len = layout.heads * head_dim;
        let x = wild(&mut random, new * row_len);
        let mut angles = Vec::new();
        let frequencies = (0..pairs).map(|pair| 1e4f64.powf(-(pair as f64) / pairs as f64)).collect();
        let style = if seed % 2 == 0 { Pairs::Adjacent } else { Pairs::Halves };
        let rope = Rope { pairs: style, frequencies, magnitude: 1.0 };
        (0..new).for_each(|row| rotations_at((before + row) as u32, &rope, &mut angles));
        let together = same(new * row_len, |isa, out| {
            out.copy_from_slice(&x);
            rotate(isa, out, row_len, &angles, &rope, 0.3);
            attend(isa, &layout, &kv, Place { start: before, ..place }, 0..kv_heads, out, &mut Scratch::default());
        });
        prop_assert!(together.iter().all(|bits| f32::from_bits(*bits).is_finite()), "values after the last position have no effect");
        let group_len = group * head_dim;
        let alone: Vec<u32> = (0..new * kv_heads).flat_map(|piece| same(group_len, |isa, out| {
            let (token, head) = (piece / kv_heads, piece % kv_heads);
            let mut row = x[token * row_len..][..row_len].to_vec();
            rotate(isa, &mut row, row_len, &angles[token * pairs..][..pairs], &rope, 0.3);
            out.copy_from_slice(&row[head * group_len..][..group_len]);
            attend(isa, &layout, &kv, Place { start: before + token, ..place }, head..head + 1, out, &mut Scratch::default());
        })).collect();
        prop_assert_eq!(together, alone);
    }
}

#[test]
fn keys_and_values_beyond_half_precision_are_clamped() {
    let sizes = Sizes { kind: kind::F32, ..ODD };
    let huge = vec![1e30f32; (sizes.width * sizes.kv_heads * sizes.head_dim) as usize];
    let data: Vec<u8> = huge.iter().flat_map(|number| number.to_le_bytes()).collect();
    let shape = [u64::from(sizes.width), u64::from(sizes.kv_heads * sizes.head_dim)];
    let file = gguf(file(sizes, 1).tensor("blk.0.attn_v.weight", &shape, kind::F32, data));
    let mut engine = engine(&CpuModel::load(&file).unwrap());
    let logits = run(&mut engine, &tokens(1, 9, sizes.vocab), &scattered(0, 1), &[]);
    assert!(logits.iter().all(|logit| logit.is_finite()));
}
