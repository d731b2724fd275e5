//! Compares the engine's results with a reference that computes in double precision from the bytes of the model file.

use super::*;
use crate::cpu::weights::Matrix;
use tandem_model::ModelFile;

/// The allowed error is the largest that the quantisation of activations to 8 bits can cause.
#[test]
fn products_of_each_weight_format_match_its_dequantised_weights() {
    for (kind, inputs) in [
        (kind::Q4_0, 96),
        (kind::Q4_1, 96),
        (kind::Q8_0, 96),
        (kind::Q4_K, 512),
        (kind::Q6_K, 512),
        (kind::F16, 83),
        (kind::BF16, 83),
        (kind::F32, 83),
    ] {
        let (quantised, outputs) = (is_quantised(kind), 75);
        let mut random = Random::new(kind.into());
        let data = random.weights(kind, inputs * outputs);
        let weights = dequantised(kind, &data);
        let file = gguf(Writer::default().tensor("w", &[inputs as u64, outputs as u64], kind, data));
        let matrix = Matrix::load(&file, "w", outputs, inputs).unwrap();
        for rows in [1, 3, 4, 7, 70] {
            let x = random.numbers(rows * inputs);
            let (mut quants, mut out) = (Quantised::default(), vec![f32::NAN; rows * outputs]);
            quantise(Isa::detect(), &x, inputs, &mut quants);
            linear(&Threads::new(1).unwrap(), Isa::detect(), (&x, inputs, &quants), [(&matrix, &mut out)]);
            for (out, x) in out.chunks(outputs).zip(x.chunks(inputs)) {
                // The error of each product is at most the weight × half a quantisation step. The step follows from the largest activation,
                // which is at most 1 here.
                let step = if quantised { 0.5 / 127.0 } else { 1e-6 };
                for (out, weights) in out.iter().zip(weights.chunks(inputs)) {
                    let expected: f64 = x.iter().zip(weights).map(|(x, weight)| f64::from(*x) * weight).sum();
                    let bound = weights.iter().map(|weight| weight.abs() * step).sum::<f64>() + 1e-5;
                    assert!((f64::from(*out) - expected).abs() <= bound, "type {kind}: {out} is not {expected} within {bound}");
                }
            }
        }
        let mut row = vec![0.0; inputs];
        matrix.row(outputs - 1, &mut row);
        for (number, weight) in row.iter().zip(&weights[(outputs - 1) * inputs..]) {
            assert!((f64::from(*number) - weight).abs() < 1e-6, "type {kind}: an embedding has {number} for {weight}");
        }
    }
}

fn is_quantised(kind: u32) -> bool {
    ![kind::F32, kind::F16, kind::BF16].contains(&kind)
}

fn number(kind: TensorType) -> u32 {
    match kind {
        TensorType::F32 => kind::F32,
        TensorType::F16 => kind::F16,
        TensorType::BF16 => kind::BF16,
        TensorType::Q4_0 => kind::Q4_0,
        TensorType::Q4_1 => kind::Q4_1,
        TensorType::Q8_0 => kind::Q8_0,
        TensorType::Q4_K => kind::Q4_K,
        TensorType::Q6_K => kind::Q6_K,
        other => unreachable!("{other:?}"),
    }
}

/// Computes all logits of one sequence in double precision, without caches or batches.
fn forward(file: &Gguf, sizes: Sizes, tokens: &[TokenId]) -> Vec<f64> {
    let weights = |name: &str| {
        let tensor = file.tensor(name).unwrap();
        (dequantised(number(tensor.kind), tensor.data), tensor.shape[0] as usize)
    };
    let multiply = |name: &str, x: &[f64]| -> Vec<f64> {
        let (weights, inputs) = weights(name);
        weights.chunks(inputs).map(|row| row.iter().zip(x).map(|(weight, x)| weight * x).sum()).collect()
    };
    let norm = |name: &str, x: &[f64]| -> Vec<f64> {
        let root = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + 1e-5).sqrt();
        x.iter().zip(weights(name).0).map(|(x, weight)| x / root * weight).collect()
    };
    let (dim, group) = (sizes.head_dim as usize, (sizes.heads / sizes.kv_heads) as usize);
    let rope = tandem_model::ModelConfig::read(file).unwrap().rope;
    let rotate = |x: &mut [f64], position: usize| {
        for head in x.chunks_mut(dim) {
            for (i, frequency) in rope.frequencies.iter().enumerate() {
                let (first, second) = if sizes.family == "llama" { (2 * i, 2 * i + 1) } else { (i, i + dim / 2) };
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                let turned = [head[first] * cos - head[second] * sin, head[first] * sin + head[second] * cos];
                [head[first], head[second]] = turned.map(|side| side * rope.magnitude);
            }
        }
    };
    // The projection includes the biases or the norms of heads that some model families have.
    let project = |layer: u32, part: &str, x: &[f64]| -> Vec<f64> {
        let mut out = multiply(&format!("blk.{layer}.{part}.weight"), x);
        if sizes.family == "qwen2" {
            let bias = weights(&format!("blk.{layer}.{part}.bias")).0;
            out.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
        }
        if sizes.family == "qwen3" && part != "attn_v" {
            out = out.chunks(dim).flat_map(|head| norm(&format!("blk.{layer}.{part}_norm.weight"), head)).collect();
        }
        out
    };
    let embedding = weights("token_embd.weight").0;
    let width = sizes.width as usize;
    let mut stream: Vec<Vec<f64>> = tokens.iter().map(|token| embedding[*token as usize * width..][..width].to_vec()).collect();
    for layer in 0..sizes.layers {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in stream.iter_mut().enumerate() {
            let normed = norm(&name("attn_norm"), x);
            let (mut query, mut key) = (project(layer, "attn_q", &normed), project(layer, "attn_k", &normed));
            rotate(&mut query, position);
            rotate(&mut key, position);
            keys.push(key);
            values.push(project(layer, "attn_v", &normed));
            let mut attended = Vec::new();
            for (head, query) in query.chunks(dim).enumerate() {
                let at = head / group * dim;
                let score = |key: &Vec<f64>| query.iter().zip(&key[at..]).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt();
                let shares: Vec<f64> = keys.iter().map(|key| score(key).exp()).collect();
                let total: f64 = shares.iter().sum();
                attended.extend(
                    (at..at + dim)
                        .map(|i| shares.iter().zip(&values).map(|(share, value)| share * value[i]).sum::<f64>() / total),
                );
            }
            for (x, change) in x.iter_mut().zip(multiply(&name("attn_output"), &attended)) {
                *x += change;
            }
            let normed = norm(&name("ffn_norm"), x);
            let gate = multiply(&name("ffn_gate"), &normed);
            let inner: Vec<f64> =
                gate.iter().zip(multiply(&name("ffn_up"), &normed)).map(|(g, up)| g / (1.0 + (-g).exp()) * up).collect();
            for (x, change) in x.iter_mut().zip(multiply(&name("ffn_down"), &inner)) {
                *x += change;
            }
        }
    }
    let head = if sizes.tied { "token_embd.weight" } else { "output.weight" };
    stream.iter().flat_map(|x| multiply(head, &norm("output_norm.weight", x))).collect()
}

#[test]
fn model_logits_match_a_double_precision_reference() {
    let floats = [kind::F32, kind::F16, kind::BF16].map(|kind| Sizes { kind, ..ODD });
    let tied = Sizes { kind: kind::F16, tied: true, ..QUANTISED };
    let quantised = [kind::Q4_0, kind::Q4_1, kind::Q8_0].map(|kind| Sizes { kind, ..QUANTISED });
    let blocks = [kind::Q4_K, kind::Q6_K].map(|kind| Sizes { kind, ..BLOCKS });
    let qwens = [QWEN2, QWEN3, Sizes { family: "qwen3", ..BLOCKS }];
    for sizes in qwens.into_iter().chain(floats).chain([tied]).chain(quantised).chain(blocks) {
        compare(gguf(file(sizes, 7)), sizes);
    }
}

#[test]
fn logits_with_extended_context_match_a_double_precision_reference() {
    let file = || file(QWEN3, 8).u32("qwen3.rope.scaling.original_context_length", 16).f32("qwen3.rope.scaling.factor", 4.0);
    compare(gguf(file().str("qwen3.rope.scaling.type", "yarn")), QWEN3);
    compare(gguf(file().str("qwen3.rope.scaling.type", "linear")), QWEN3);
}

fn compare(file: Gguf, sizes: Sizes) {
    let tokens = tokens(3, 50, sizes.vocab);
    let expected = forward(&file, sizes, &tokens);
    let mut engine = engine(&CpuModel::load(&file).unwrap());
    let logits = run(&mut engine, &tokens, &scattered(0, 2), &[17, 1, 30]);
    assert_eq!(logits.len(), expected.len());
    let largest = expected.iter().fold(0f64, |largest, logit| largest.max(logit.abs()));
    // Keys and values are rounded to half precision. With quantised weights, each layer's inputs are also rounded to 8 bits.
    let (each, all) = if is_quantised(sizes.kind) { (0.1, 0.04) } else { (2e-3, 1e-3) };
    for (i, (logit, expected)) in logits.iter().zip(&expected).enumerate() {
        assert!((f64::from(*logit) - expected).abs() < each * largest, "logit {i} of {sizes:?}: {logit} is not {expected}");
    }
    let squares: f64 = expected.iter().map(|logit| logit * logit).sum();
    let errors: f64 = logits.iter().zip(&expected).map(|(logit, expected)| (f64::from(*logit) - expected).powi(2)).sum();
    let error = (errors / squares).sqrt();
    assert!(error < all, "the relative error of the logits of {sizes:?} is {error}");
}
