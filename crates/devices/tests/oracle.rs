//! Compares a real model with independent references (`ci/goldens/make_goldens.py`), and its own results bit by bit.
//!
//! `TANDEM_MODEL=….gguf cargo test --release -p tandem-devices --test oracle`
#![expect(clippy::print_stderr, reason = "a skipped test says so")]

use serde::{Deserialize, de::DeserializeOwned};
use std::{
    path::Path,
    sync::{Arc, OnceLock},
};
use tandem_devices::cpu::{CpuEngine, CpuModel, CpuSettings, Isa};
use tandem_engine::{Chunk, Engine, Logits};
use tandem_kv::{BlockId, TokenId};
use tandem_model::Gguf;

/// The two highest logits of the reference differ clearly if their difference is at least this number. A smaller difference may change its sign,
/// because activations are rounded to 8 bits.
const CLEAR_MARGIN: f32 = 1.0;
const BLOCK_SIZE: usize = 16;
const SEQUENCE_BLOCKS: usize = 128;

fn model() -> Option<Arc<CpuModel>> {
    static MODEL: OnceLock<Option<Arc<CpuModel>>> = OnceLock::new();
    MODEL
        .get_or_init(|| {
            let Some(path) = std::env::var_os("TANDEM_MODEL") else {
                eprintln!("SKIPPED, NOTHING WAS COMPARED: set TANDEM_MODEL to the default model's .gguf file");
                return None;
            };
            let file = Gguf::open(Path::new(&path)).expect("TANDEM_MODEL must name a GGUF file");
            Some(CpuModel::load(&file).expect("the model loads"))
        })
        .clone()
}

fn goldens<T: DeserializeOwned>(name: &str) -> Vec<T> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ci/goldens").join(name);
    serde_json::from_slice(&std::fs::read(path).expect("the goldens are in the tree"))
        .expect("the goldens have the format of their script")
}

#[derive(Deserialize)]
struct TeacherForced {
    tokens: Vec<TokenId>,
    /// The logprobs of all tokens except the first: entry `i` is the logprob of `tokens[i + 1]`.
    logprobs: Vec<f64>,
    top1: Vec<usize>,
}

#[derive(Deserialize)]
struct Greedy {
    prompt: Vec<TokenId>,
    tokens: Vec<TokenId>,
    top_two: Vec<[f32; 2]>,
}

fn engine(model: &Arc<CpuModel>, sequences: usize) -> CpuEngine {
    let capacity_blocks = (sequences * SEQUENCE_BLOCKS) as u32;
    let settings = CpuSettings { block_size: BLOCK_SIZE as u32, capacity_blocks, threads: 1, isa: Isa::detect() };
    CpuEngine::new(model.clone(), settings).expect("the settings are possible")
}

fn blocks(sequence: usize, sequences: usize) -> Vec<BlockId> {
    (0..SEQUENCE_BLOCKS).map(|i| BlockId((i * sequences + sequence) as u32)).collect()
}

fn argmax(logits: &[f32]) -> usize {
    (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).expect("the vocabulary is not empty")
}

fn logprob(logits: &[f32], token: usize) -> f64 {
    let largest = f64::from(logits[argmax(logits)]);
    f64::from(logits[token]) - largest - logits.iter().map(|logit| (f64::from(*logit) - largest).exp()).sum::<f64>().ln()
}

fn all_logits(engine: &mut CpuEngine, tokens: &[TokenId], chunk_len: usize) -> Vec<f32> {
    let blocks = blocks(0, 1);
    let chunks = tokens.chunks(chunk_len).enumerate();
    let steps = chunks.map(|(i, tokens)| {
        let chunk = Chunk { tokens, start: (i * chunk_len) as u32, blocks: &blocks, logits: Logits::All };
        engine.step(&[chunk]).expect("the step runs").into_logits()
    });
    steps.collect::<Vec<_>>().concat()
}

#[test]
fn perplexity_and_top_tokens_match_the_reference() {
    let Some(model) = model() else { return };
    let vocabulary = model.config().vocab_size;
    let mut engine = engine(&model, 1);
    let (mut ours, mut reference, mut agreed, mut count) = (0.0, 0.0, 0, 0);
    for golden in goldens::<TeacherForced>("logprobs.json") {
        let logits = all_logits(&mut engine, &golden.tokens, 512);
        for (i, (expected, top)) in golden.logprobs.iter().zip(&golden.top1).enumerate() {
            let row = &logits[i * vocabulary..][..vocabulary];
            ours -= logprob(row, golden.tokens[i + 1] as usize);
            reference -= expected;
            agreed += usize::from(argmax(row) == *top);
            count += 1;
        }
    }
    assert!(count >= 2000, "only {count} tokens were compared");
    let (ours, reference) = ((ours / count as f64).exp(), (reference / count as f64).exp());
    let agreement = agreed as f64 / count as f64;
    eprintln!("{count} tokens: perplexity {ours:.4}, reference {reference:.4}; top token equal for {:.2}%", agreement * 100.0);
    assert!((ours / reference - 1.0).abs() < 0.01, "perplexity {ours} is more than 1% from the reference's {reference}");
    assert!(agreement >= 0.95, "the top token equals the reference's for only {agreement} of all tokens");
}

#[test]
fn greedy_continuations_match_the_reference_where_its_margin_is_clear() {
    let Some(model) = model() else { return };
    let vocabulary = model.config().vocab_size;
    let mut engine = engine(&model, 1);
    let (mut free, mut clear) = (0, 0);
    for golden in goldens::<Greedy>("greedy.json") {
        // The engine computes the reference's tokens. At every clear step, its likeliest token must be the reference's token. So greedy decoding
        // gives the same tokens up to the first step that is not clear.
        let tokens = [&golden.prompt[..], &golden.tokens[..golden.tokens.len() - 1]].concat();
        let logits = all_logits(&mut engine, &tokens, 512);
        let mut all_clear = true;
        for (i, (token, [first, second])) in golden.tokens.iter().zip(golden.top_two).enumerate() {
            let row = &logits[(golden.prompt.len() - 1 + i) * vocabulary..][..vocabulary];
            all_clear &= first - second >= CLEAR_MARGIN;
            free += usize::from(all_clear);
            if first - second >= CLEAR_MARGIN {
                clear += 1;
                assert_eq!(argmax(row), *token as usize, "step {i} after a prompt of {} tokens", golden.prompt.len());
            }
        }
    }
    eprintln!("{clear} clear steps are equal, {free} of them before any that is not clear");
    assert!(clear >= 300, "only {clear} steps were compared");
}

fn document() -> Vec<TokenId> {
    goldens::<TeacherForced>("logprobs.json")
        .into_iter()
        .map(|golden| golden.tokens)
        .max_by_key(Vec::len)
        .expect("the goldens have at least one document")
}

fn kv_of(engine: &CpuEngine, blocks: &[BlockId]) -> Vec<u8> {
    let mut bytes = vec![0; engine.describe().block_bytes * blocks.len()];
    for (block, into) in blocks.iter().zip(bytes.chunks_exact_mut(engine.describe().block_bytes)) {
        engine.read_block(*block, into).expect("the block exists");
    }
    bytes
}

#[test]
fn logits_and_kv_have_the_same_bits_for_chunks_of_any_length() {
    let Some(model) = model() else { return };
    let tokens = document();
    let used = tokens.len().div_ceil(BLOCK_SIZE);
    let mut whole = engine(&model, 1);
    let run = |engine: &mut CpuEngine, chunk_len: usize| {
        let (blocks, mut last) = (blocks(0, 1), Vec::new());
        for (i, tokens) in tokens.chunks(chunk_len).enumerate() {
            let chunk = Chunk { tokens, start: (i * chunk_len) as u32, blocks: &blocks, logits: Logits::Last };
            last = engine.step(&[chunk]).expect("the step runs").into_logits();
        }
        last
    };
    let expected = run(&mut whole, tokens.len());
    for chunk_len in [64, 512, 77] {
        let mut chunked = engine(&model, 1);
        assert_eq!(run(&mut chunked, chunk_len), expected, "logits in chunks of {chunk_len}");
        assert!(kv_of(&chunked, &blocks(0, 1)[..used]) == kv_of(&whole, &blocks(0, 1)[..used]), "KV in chunks of {chunk_len}");
    }
    // The KV of a prefix is already in the memory, as after a cache hit or a transfer.
    let mut cached = engine(&model, 1);
    let cached_blocks = 40;
    for block in &blocks(0, 1)[..cached_blocks] {
        cached.write_block(*block, &kv_of(&whole, &[*block])).unwrap();
    }
    let start = cached_blocks * BLOCK_SIZE;
    let chunk = Chunk { tokens: &tokens[start..], start: start as u32, blocks: &blocks(0, 1), logits: Logits::Last };
    assert_eq!(cached.step(&[chunk]).expect("the step runs").into_logits(), expected, "logits after a cached prefix");
}

#[test]
fn logits_have_the_same_bits_in_a_batch_of_eight_and_alone() {
    let Some(model) = model() else { return };
    let vocabulary = model.config().vocab_size;
    let document = document();
    // The prompts have different lengths. Afterwards all sequences decode together.
    let prompts: Vec<&[TokenId]> = (0..8).map(|i| &document[i * 90..i * 90 + 20 + 13 * i]).collect();
    let alone: Vec<Vec<Vec<f32>>> =
        prompts.iter().map(|prompt| decode(&mut engine(&model, 1), &[prompt], vocabulary).remove(0)).collect();
    let together = decode(&mut engine(&model, 8), &prompts, vocabulary);
    assert!(alone == together, "the logits of a batch are not those of its sequences alone");
}

/// Decodes all prompts greedily in one batch. Returns the logits of each prompt and step.
fn decode(engine: &mut CpuEngine, prompts: &[&[TokenId]], vocabulary: usize) -> Vec<Vec<Vec<f32>>> {
    const STEPS: usize = 12;
    let all_blocks: Vec<_> = (0..prompts.len()).map(|sequence| blocks(sequence, prompts.len())).collect();
    let mut sequences: Vec<Vec<TokenId>> = prompts.iter().map(|prompt| prompt.to_vec()).collect();
    let mut computed = vec![0; prompts.len()];
    let mut logits = vec![Vec::new(); prompts.len()];
    for _ in 0..STEPS {
        let chunks: Vec<_> = (0..prompts.len())
            .map(|i| Chunk {
                tokens: &sequences[i][computed[i]..],
                start: computed[i] as u32,
                blocks: &all_blocks[i],
                logits: Logits::Last,
            })
            .collect();
        let output = engine.step(&chunks).expect("the step runs").into_logits();
        for (i, row) in output.chunks_exact(vocabulary).enumerate() {
            computed[i] = sequences[i].len();
            sequences[i].push(argmax(row) as TokenId);
            logits[i].push(row.to_vec());
        }
    }
    logits
}
