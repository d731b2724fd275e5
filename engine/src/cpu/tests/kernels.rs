//! Each kernel compiled for the build's target and for this processor: the same bits.

use super::*;
use crate::cpu::weights::Matrix;
use proptest::prelude::*;
use tandem_model::{Pairs, Rope};

/// Numbers of all magnitudes, zeros of both signs among them.
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

/// The results of a kernel under both compilations.
fn both(len: usize, mut kernel: impl FnMut(Isa, &mut Vec<f32>)) -> [Vec<u32>; 2] {
    [Isa::BASELINE, Isa::detect()].map(|isa| {
        let mut out = vec![0.0; len];
        kernel(isa, &mut out);
        bits(&out)
    })
}

/// Every type of weight that has a kernel, and how many numbers share a scale.
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
    fn matrices(seed in any::<u64>(), rows in 1usize..80, groups in 1usize..4, outputs in 1usize..80) {
        let mut random = Random::new(seed);
        for (kind, block_len) in KINDS {
            let inputs = if block_len == 1 { groups * 32 - random.below(20) as usize } else { groups * block_len };
            let data = random.weights(kind, inputs * outputs);
            let file = gguf(Writer::default().tensor("w", &[inputs as u64, outputs as u64], kind, data));
            let matrix = Matrix::load(&file, "w", outputs, inputs).unwrap();
            let x = wild(&mut random, rows * inputs);
            let [baseline, best] = both(rows * outputs, |isa, out| {
                let mut quantised = Quantised::default();
                quantise(isa, &x, inputs, &mut quantised);
                linear(isa, &matrix, &x, &quantised, out);
            });
            prop_assert_eq!(baseline, best);
        }
    }

    #[test]
    fn norms_and_gates(seed in any::<u64>(), rows in 1usize..5, width in 1usize..100) {
        let mut random = Random::new(seed);
        let (x, y, weight) = (wild(&mut random, rows * width), wild(&mut random, rows * width), wild(&mut random, width));
        let [baseline, best] = both(rows * width, |isa, out| rms_norm(isa, &x, &weight, 1e-5, out));
        prop_assert_eq!(baseline, best);
        let [baseline, best] = both(rows * width, |isa, out| { out.copy_from_slice(&x); rms_norm_in_place(isa, out, &weight, 1e-5) });
        prop_assert_eq!(&baseline, &bits(&{ let mut out = vec![0.0; rows * width]; rms_norm(Isa::detect(), &x, &weight, 1e-5, &mut out); out }));
        prop_assert_eq!(baseline, best);
        let [baseline, best] = both(rows * width, |isa, out| { out.copy_from_slice(&x); add_to_rows(isa, out, &weight) });
        prop_assert_eq!(baseline, best);
        let [baseline, best] = both(rows * width, |isa, out| { out.copy_from_slice(&x); swiglu(isa, out, &y) });
        prop_assert_eq!(baseline, best);
        let [baseline, best] = both(rows * width, |isa, out| { out.copy_from_slice(&x); add(isa, out, &y) });
        prop_assert_eq!(baseline, best);
    }

    #[test]
    fn attention(seed in any::<u64>(), before in 0usize..60, new in 1usize..30, group in 1usize..4, pairs in 1usize..20) {
        let mut random = Random::new(seed);
        let (block_size, kv_heads, head_dim) = (4, 2, pairs * 2);
        let layout = KvLayout { layers: 1, block_size, heads: kv_heads * group, kv_heads, head_dim };
        let blocks: Vec<_> = (0..(before + new).div_ceil(block_size) as u32).rev().map(BlockId).collect();
        let kv: Vec<u16> = (0..blocks.len() * layout.block_len()).map(|_| f16::from_f32(random.number() * 4.0).to_bits()).collect();
        let row_len = layout.heads * head_dim;
        let x = wild(&mut random, new * row_len);
        let mut angles = Vec::new();
        let frequencies = (0..pairs).map(|pair| 1e4f64.powf(-(pair as f64) / pairs as f64)).collect();
        let style = if seed % 2 == 0 { Pairs::Adjacent } else { Pairs::Halves };
        let rope = Rope { pairs: style, frequencies, magnitude: 1.0 };
        (0..new).for_each(|row| turns((before + row) as u32, &rope, &mut angles));
        let [baseline, best] = both(new * row_len, |isa, out| {
            let mut queries = x.clone();
            rotate(isa, &mut queries, row_len, &angles, &rope, 0.3);
            let chunk = Queries { queries: &queries, start: before, layer: 0, blocks: &blocks };
            attend(isa, &layout, &kv, chunk, &mut Scratch::default(), out);
        });
        prop_assert_eq!(baseline, best);
    }
}

#[test]
fn what_is_beyond_half_precision_is_kept_finite() {
    let sizes = Sizes { kind: kind::F32, ..ODD };
    let huge = vec![1e30f32; (sizes.width * sizes.kv_heads * sizes.head_dim) as usize];
    let data: Vec<u8> = huge.iter().flat_map(|number| number.to_le_bytes()).collect();
    let shape = [u64::from(sizes.width), u64::from(sizes.kv_heads * sizes.head_dim)];
    let file = gguf(file(sizes, 1).tensor("blk.0.attn_v.weight", &shape, kind::F32, data));
    let mut engine = engine(&CpuModel::load(&file).unwrap());
    let logits = run(&mut engine, &tokens(1, 9, sizes.vocab), &scattered(0, 1), &[]);
    assert!(logits.iter().all(|logit| logit.is_finite()));
}
