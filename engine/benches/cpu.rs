//! Tokens a second of the CPU back end on one thread: `cargo bench -p tandem-engine --bench cpu -- MODEL.gguf` (or `TANDEM_MODEL`).
//!
//! Medians of seven rounds: a prompt of 512 tokens in one chunk; decoding after it, alone and eight sequences together;
//! decoding after 2,048 tokens.
#![expect(clippy::print_stdout, clippy::disallowed_methods, reason = "it measures real time and prints what it measured")]

use std::{path::PathBuf, time::Instant};
use tandem_engine::{
    Chunk, Engine, Logits,
    cpu::{CpuEngine, CpuModel, CpuSettings},
};
use tandem_kv::BlockId;
use tandem_model::Gguf;

const ROUNDS: usize = 7;
const PROMPT: u32 = 512;
const DECODED: u32 = 32;
const BLOCK: u32 = 16;
const LONG: u32 = 2_048;
const BLOCKS_EACH: u32 = (LONG + DECODED) / BLOCK;

fn main() {
    let argument = std::env::args().skip(1).find(|argument| !argument.starts_with("--"));
    let Some(path) = argument.or_else(|| std::env::var("TANDEM_MODEL").ok()).map(PathBuf::from) else {
        println!("skipped: give a .gguf file as argument or in TANDEM_MODEL");
        return;
    };
    let start = Instant::now();
    let model = CpuModel::load(&Gguf::open(&path).expect("the model opens")).expect("the model loads");
    println!("load: {:.0} ms, weights {:.1} MB", start.elapsed().as_secs_f64() * 1e3, model.weight_bytes() as f64 / 1e6);
    let vocabulary = model.config().vocab_size as u32;
    let settings = CpuSettings { block_size: BLOCK, capacity_blocks: 8 * BLOCKS_EACH };
    let mut engine = CpuEngine::new(model, settings).expect("the settings are possible");
    let tokens: Vec<u32> = (0..LONG + DECODED).map(|i| (i * 7919 + 13) % vocabulary).collect();
    let blocks: Vec<Vec<BlockId>> =
        (0..8).map(|sequence| (0..BLOCKS_EACH).map(|i| BlockId(sequence * BLOCKS_EACH + i)).collect()).collect();
    let chunk = |sequence: usize, start: u32, len: u32, logits| Chunk {
        tokens: &tokens[start as usize..(start + len) as usize],
        start,
        blocks: &blocks[sequence],
        logits,
    };
    for sequence in 0..8 {
        engine.step(&[chunk(sequence, 0, PROMPT, Logits::None)]).expect("the step runs");
    }
    report("prefill of 512", PROMPT, || drop(engine.step(&[chunk(0, 0, PROMPT, Logits::None)]).expect("the step runs")));
    for start in (PROMPT..LONG).step_by(PROMPT as usize) {
        engine.step(&[chunk(0, start, PROMPT, Logits::None)]).expect("the step runs");
    }
    for (context, batch) in [(PROMPT, 1), (PROMPT, 8), (LONG, 1)] {
        report(&format!("decode after {context}, batch of {batch}"), DECODED * batch as u32, || {
            for position in context..context + DECODED {
                let chunks: Vec<_> = (0..batch).map(|sequence| chunk(sequence, position, 1, Logits::Last)).collect();
                engine.step(&chunks).expect("the step runs");
            }
        });
    }
}

fn report(what: &str, tokens: u32, mut round: impl FnMut()) {
    let mut rates: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            round();
            f64::from(tokens) / start.elapsed().as_secs_f64()
        })
        .collect();
    rates.sort_by(f64::total_cmp);
    println!("{what}: median {:.1} tok/s (from {:.1} to {:.1})", rates[ROUNDS / 2], rates[0], rates[ROUNDS - 1]);
}
