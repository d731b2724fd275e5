//! Tests of the back end on small random models, written as GGUF files.

mod directory;
pub(crate) mod goldens;
mod histories;
mod kernels;
mod promises;
mod reference;
mod refusals;

#[path = "../../../model/tests/writer/mod.rs"]
mod writer;

use super::{
    linear::{Quantised, linear, quantise},
    math::*,
    *,
};
use half::f16;
use tandem_engine::Logits;
use tandem_kv::TokenId;
use tandem_model::Gguf;
use writer::{Writer, kind};

/// A seeded generator of small numbers (xorshift).
#[derive(Clone)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    pub(crate) fn below(&mut self, end: u32) -> u32 {
        (self.bits() % u64::from(end)) as u32
    }

    pub(crate) fn number(&mut self) -> f32 {
        self.bits() as f32 / (1u64 << 52) as f32 - 1.0
    }

    fn numbers(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.number()).collect()
    }

    fn weights(&mut self, kind: u32, len: usize) -> Vec<u8> {
        let scale = |random: &mut Self| f16::from_f32(random.number() * 0.02).to_le_bytes();
        // The scales are smaller in formats with larger quants, or with larger products of quants and factors, so that all weights have
        // similar magnitudes.
        let fine = |random: &mut Self| f16::from_f32(random.number() * 0.0005).to_le_bytes();
        let finest = |random: &mut Self| f16::from_f32(random.number() * 0.0002).to_le_bytes();
        match kind {
            kind::F32 => (0..len).flat_map(|_| (self.number() * 0.1).to_le_bytes()).collect(),
            kind::F16 => (0..len).flat_map(|_| f16::from_f32(self.number() * 0.1).to_le_bytes()).collect(),
            kind::Q4_1 => (0..len / 32)
                .flat_map(|_| {
                    let scales = [scale(self), scale(self)].concat();
                    [scales, (0..16).map(|_| self.bits() as u8).collect()].concat()
                })
                .collect(),
            kind::BF16 => (0..len).flat_map(|_| half::bf16::from_f32(self.number() * 0.1).to_le_bytes()).collect(),
            kind::Q4_0 => (0..len / 32)
                .flat_map(|_| [scale(self).to_vec(), (0..16).map(|_| self.bits() as u8).collect()].concat())
                .collect(),
            kind::Q4_K => (0..len / 256)
                .flat_map(|_| {
                    let scales = [fine(self), fine(self)].concat();
                    [scales, (0..12 + 128).map(|_| self.bits() as u8).collect()].concat()
                })
                .collect(),
            kind::Q6_K => (0..len / 256)
                .flat_map(|_| [(0..128 + 64 + 16).map(|_| self.bits() as u8).collect(), finest(self).to_vec()].concat())
                .collect(),
            kind::Q8_0 => {
                (0..len / 32).flat_map(|_| [fine(self).to_vec(), (0..32).map(|_| self.bits() as u8).collect()].concat()).collect()
            }
            other => unreachable!("tests make no weights of type {other}"),
        }
    }
}

fn half(bytes: &[u8]) -> f64 {
    f16::from_le_bytes([bytes[0], bytes[1]]).to_f64()
}

/// Dequantises a Q4_K block in the order of the format's description: 64 numbers at a time from 32 bytes.
fn dequantised_q4_k(block: &[u8]) -> Vec<f64> {
    let (scale, min, packed) = (half(block), half(&block[2..]), &block[4..16]);
    let factors = |j: usize| match j {
        0..4 => (packed[j] & 63, packed[j + 4] & 63),
        _ => ((packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4), (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4)),
    };
    let mut numbers = Vec::new();
    for (pair, bytes) in block[16..].chunks(32).enumerate() {
        for (j, shift) in [(pair * 2, 0), (pair * 2 + 1, 4)] {
            let (factor, min_factor) = factors(j);
            let (scale, min) = (scale * f64::from(factor), min * f64::from(min_factor));
            numbers.extend(bytes.iter().map(|byte| scale * f64::from((byte >> shift) & 15) - min));
        }
    }
    numbers
}

/// Dequantises a Q6_K block in the order of the format's description: 128 numbers at a time, four from each byte of high bits.
fn dequantised_q6_k(block: &[u8]) -> Vec<f64> {
    let (low, high, factors, scale) = (&block[..128], &block[128..192], &block[192..208], half(&block[208..]));
    let mut numbers = vec![0.0; 256];
    for n in 0..2 {
        for l in 0..32 {
            let (first, second, high) = (low[n * 64 + l], low[n * 64 + l + 32], high[n * 32 + l]);
            let quants = [
                (first & 15) | ((high & 3) << 4),
                (second & 15) | (((high >> 2) & 3) << 4),
                (first >> 4) | (((high >> 4) & 3) << 4),
                (second >> 4) | ((high >> 6) << 4),
            ];
            for (q, quant) in quants.into_iter().enumerate() {
                let factor = f64::from(factors[n * 8 + l / 16 + q * 2] as i8);
                numbers[n * 128 + q * 32 + l] = scale * factor * (f64::from(quant) - 32.0);
            }
        }
    }
    numbers
}

/// Dequantises the file's bytes without the product's code, which the test checks.
fn dequantised(kind: u32, data: &[u8]) -> Vec<f64> {
    match kind {
        kind::F32 => data.as_chunks::<4>().0.iter().map(|number| f64::from(f32::from_le_bytes(*number))).collect(),
        kind::F16 => data.chunks(2).map(half).collect(),
        kind::Q4_1 => data
            .chunks(20)
            .flat_map(|block| {
                let (scale, min) = (half(block), half(&block[2..]));
                let low = block[4..].iter().map(|byte| byte & 15);
                let quants: Vec<u8> = low.chain(block[4..].iter().map(|byte| byte >> 4)).collect();
                quants.into_iter().map(move |quant| scale * f64::from(quant) + min)
            })
            .collect(),
        kind::BF16 => data.as_chunks::<2>().0.iter().map(|bits| f64::from(half::bf16::from_le_bytes(*bits).to_f32())).collect(),
        kind::Q4_0 => data
            .chunks(18)
            .flat_map(|block| {
                let low = block[2..].iter().map(|byte| byte & 15);
                let quants: Vec<u8> = low.chain(block[2..].iter().map(|byte| byte >> 4)).collect();
                quants.into_iter().map(move |quant| half(block) * (f64::from(quant) - 8.0))
            })
            .collect(),
        kind::Q4_K => data.chunks(144).flat_map(dequantised_q4_k).collect(),
        kind::Q6_K => data.chunks(210).flat_map(dequantised_q6_k).collect(),
        kind::Q8_0 => {
            data.chunks(34).flat_map(|block| block[2..].iter().map(move |byte| half(block) * f64::from(*byte as i8))).collect()
        }
        other => unreachable!("{other}"),
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub family: &'static str,
    pub layers: u32,
    pub width: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub ffn: u32,
    pub vocab: u32,
    pub kind: u32,
    pub tied: bool,
}

/// A model with three query heads per key head, as in the default model, and with dimensions that do not fill panels.
const QUANTISED: Sizes = Sizes {
    family: "llama",
    layers: 2,
    width: 96,
    heads: 6,
    kv_heads: 2,
    head_dim: 16,
    ffn: 64,
    vocab: 101,
    kind: kind::Q4_1,
    tied: true,
};
/// A model with dimensions that are not multiples of each other.
const ODD: Sizes = Sizes {
    family: "llama",
    layers: 2,
    width: 40,
    heads: 5,
    kv_heads: 5,
    head_dim: 6,
    ffn: 37,
    vocab: 45,
    kind: kind::F32,
    tied: false,
};

/// A model whose matrices have 256 inputs each, as many as a block of the K formats.
const BLOCKS: Sizes = Sizes {
    family: "llama",
    layers: 1,
    width: 256,
    heads: 8,
    kv_heads: 2,
    head_dim: 32,
    ffn: 256,
    vocab: 33,
    kind: kind::Q4_K,
    tied: false,
};

/// A model with biases, whose rotary embedding pairs the two halves of a head.
const QWEN2: Sizes = Sizes { family: "qwen2", ..ODD };
/// A model with normalised heads, whose length is greater than width ÷ heads.
const QWEN3: Sizes = Sizes { family: "qwen3", head_dim: 20, kind: kind::F16, tied: true, ..ODD };

const CONTEXT: u32 = 96;

/// Returns a complete model with random weights. If its layers have 4-bit weights, its embedding, and so a tied head, has 8-bit weights.
pub(crate) fn file(sizes: Sizes, seed: u64) -> Writer {
    let Sizes { family, layers, width, heads, kv_heads, head_dim, ffn, vocab, kind, tied } = sizes;
    let mut random = Random::new(seed);
    let mut writer = Writer::default()
        .str("general.architecture", family)
        .str("tokenizer.ggml.model", "none")
        .u32(&format!("{family}.vocab_size"), vocab)
        .u32(&format!("{family}.block_count"), layers)
        .u32(&format!("{family}.embedding_length"), width)
        .u32(&format!("{family}.feed_forward_length"), ffn)
        .u32(&format!("{family}.attention.head_count"), heads)
        .u32(&format!("{family}.attention.head_count_kv"), kv_heads)
        .u32(&format!("{family}.attention.key_length"), head_dim)
        .u32(&format!("{family}.attention.value_length"), head_dim)
        .u32(&format!("{family}.context_length"), CONTEXT)
        .f32(&format!("{family}.attention.layer_norm_rms_epsilon"), 1e-5)
        .f32(&format!("{family}.rope.freq_base"), 10_000.0);
    let embedding_kind = if kind == kind::Q4_1 { kind::Q8_0 } else { kind };
    let mut tensor = |writer: Writer, name: &str, kind, inputs: u32, outputs: u32| {
        let data = random.weights(kind, (inputs * outputs) as usize);
        writer.tensor(name, &[inputs.into(), outputs.into()], kind, data)
    };
    writer = tensor(writer, "token_embd.weight", embedding_kind, width, vocab);
    if !tied {
        writer = tensor(writer, "output.weight", kind, width, vocab);
    }
    for layer in 0..layers {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        writer = tensor(writer, &name("attn_q"), kind, width, heads * head_dim);
        writer = tensor(writer, &name("attn_k"), kind, width, kv_heads * head_dim);
        writer = tensor(writer, &name("attn_v"), kind, width, kv_heads * head_dim);
        writer = tensor(writer, &name("attn_output"), kind, heads * head_dim, width);
        writer = tensor(writer, &name("ffn_gate"), kind, width, ffn);
        writer = tensor(writer, &name("ffn_up"), kind, width, ffn);
        writer = tensor(writer, &name("ffn_down"), kind, ffn, width);
    }
    for (name, len) in [("attn_q", heads), ("attn_k", kv_heads), ("attn_v", kv_heads)] {
        for layer in (0..layers).filter(|_| family == "qwen2") {
            let len = len * head_dim;
            let data = (0..len).flat_map(|_| random.number().to_le_bytes()).collect();
            writer = writer.tensor(&format!("blk.{layer}.{name}.bias"), &[len.into()], kind::F32, data);
        }
    }
    for name in ["attn_q_norm", "attn_k_norm"] {
        for layer in (0..layers).filter(|_| family == "qwen3") {
            let data = (0..head_dim).flat_map(|_| (1.0 + random.number() * 0.5).to_le_bytes()).collect();
            writer = writer.tensor(&format!("blk.{layer}.{name}.weight"), &[head_dim.into()], kind::F32, data);
        }
    }
    let norms = (0..layers).flat_map(|layer| ["attn_norm", "ffn_norm"].map(|norm| format!("blk.{layer}.{norm}.weight")));
    for name in norms.chain(["output_norm.weight".to_owned()]) {
        let data = (0..width).flat_map(|_| (1.0 + random.number() * 0.2).to_le_bytes()).collect();
        writer = writer.tensor(&name, &[width.into()], kind::F32, data);
    }
    writer
}

pub(crate) fn gguf(writer: Writer) -> Gguf {
    Gguf::from_bytes(writer.finish()).expect("the writer writes well-formed files")
}

fn model(sizes: Sizes) -> Arc<CpuModel> {
    CpuModel::load(&gguf(file(sizes, 1))).expect("the model loads")
}

const BLOCK_SIZE: u32 = 4;
const CAPACITY_BLOCKS: u32 = 64;

fn settings() -> CpuSettings {
    CpuSettings { block_size: BLOCK_SIZE, capacity_blocks: CAPACITY_BLOCKS, threads: 1, isa: Isa::detect() }
}

fn engine(model: &Arc<CpuModel>) -> CpuEngine {
    engine_with(model, settings())
}

fn engine_with(model: &Arc<CpuModel>, settings: CpuSettings) -> CpuEngine {
    CpuEngine::new(model.clone(), settings).expect("the settings are possible")
}

/// Returns a sequence's blocks for a whole context, in descending order and interleaved with those of other sequences.
fn scattered(sequence: u32, sequences: u32) -> Vec<BlockId> {
    let each = CAPACITY_BLOCKS / sequences;
    (0..each.min(CONTEXT / BLOCK_SIZE)).rev().map(|i| BlockId(i * sequences + sequence)).collect()
}

fn tokens(seed: u64, len: usize, vocab: u32) -> Vec<TokenId> {
    let mut random = Random::new(seed);
    (0..len).map(|_| random.below(vocab)).collect()
}

/// Computes the tokens in chunks of these lengths (the last length is repeated); returns all logits.
fn run(engine: &mut CpuEngine, tokens: &[TokenId], blocks: &[BlockId], chunk_lens: &[usize]) -> Vec<f32> {
    let (mut logits, mut start, mut lens) = (Vec::new(), 0, chunk_lens.iter());
    let mut len = tokens.len();
    while start < tokens.len() {
        len = lens.next().copied().unwrap_or(len).clamp(1, tokens.len() - start);
        let chunk = Chunk { tokens: &tokens[start..start + len], start: start as u32, blocks, logits: Logits::All };
        logits.extend(engine.step(&[chunk]).expect("the step runs").into_logits());
        start += len;
    }
    logits
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}
