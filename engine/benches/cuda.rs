//! What `bench/gpu.py` asks of the CUDA back end, on a machine with a GPU; run by `bench/gpu.sh`.
//!
//! - `cuda logits MODEL TOKENS CHUNK OUT`: computes the tokens (separated by commas) of a model's directory in chunks of so many, writes the
//!   logits of all of them to OUT (four bytes each), then prints 32 tokens that follow greedily, computed one by one.
//! - `cuda speed MODEL`: prints a line of JSON for each workload, with the median seconds of its rounds.
//! - `cuda exercise MODEL`: a little of everything: chunks, draws of every kind, moved blocks. For compute-sanitizer.
//! - `cuda transfer MODEL`: moves the blocks of a prompt to another engine through the host, and compares bytes and what is decoded from them.
#![expect(clippy::print_stdout, clippy::disallowed_methods, reason = "it measures real time and prints what it measured")]

use std::{
    error::Error,
    fs,
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};
use tandem_engine::{
    Chunk, Engine, EngineHandle, EngineSettings, Event, Generate, KvSource, Logits, Sampling,
    cuda::{CudaLimits, CudaModel, CudaSettings},
};
use tandem_kv::{BlockId, Namespace, TokenId};
use tandem_model::HfDirectory;

type Outcome<T> = Result<T, Box<dyn Error>>;

const BLOCK: usize = 16;
/// As workers do.
const CHUNK: usize = 8_192;
const ROUNDS: usize = 5;
const GREEDY: usize = 32;
/// Measured of a decoding batch.
const STEPS: usize = 64;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["logits", model, tokens, chunk, out] => logits(model, tokens, chunk, out),
        ["speed", model] => speed(model),
        ["transfer", model] => load(model).and_then(|model| transfer(&model)),
        ["exercise", model] => exercise(model),
        _ => {
            println!("see bench/gpu.sh, which runs this on a machine with a GPU");
            Ok(())
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn load(model: &str) -> Outcome<CudaModel> {
    let settings = CudaSettings { device: 0, block_size: BLOCK as u32, kernels_dir: Some("target/gpu-kernels".into()) };
    Ok(CudaModel::load(&HfDirectory::open(Path::new(model))?, &settings)?)
}

fn engine(model: &CudaModel, capacity_tokens: usize) -> Outcome<Box<dyn Engine>> {
    let capacity_blocks = Some(capacity_tokens.div_ceil(BLOCK) as u32);
    Ok(model.engine(CudaLimits { capacity_blocks, engines: 2, step_tokens_max: CHUNK as u32 + 256, sequences_max: 256 })?)
}

/// Blocks for so many tokens, from this one on.
fn blocks(first: usize, tokens: usize) -> Vec<BlockId> {
    (first..first + tokens.div_ceil(BLOCK)).map(|block| BlockId(block as u32)).collect()
}

fn likeliest(logits: &[f32]) -> TokenId {
    let largest = |best: usize, at: usize| if logits[at] > logits[best] { at } else { best };
    (0..logits.len()).fold(0, largest) as TokenId
}

fn logits(model: &str, tokens: &str, chunk: &str, out: &str) -> Outcome<()> {
    let (mut tokens, len) = (tokens.split(',').map(str::parse).collect::<Result<Vec<TokenId>, _>>()?, chunk.parse::<usize>()?);
    let blocks = blocks(0, tokens.len() + GREEDY);
    let mut engine = engine(&load(model)?, blocks.len() * BLOCK)?;
    let mut all = Vec::new();
    for (i, tokens) in tokens.chunks(len).enumerate() {
        let chunk = Chunk { tokens, start: (i * len) as u32, blocks: &blocks, logits: Logits::All };
        all.extend(engine.step(&[chunk])?.logits);
    }
    fs::write(out, all.iter().flat_map(|logit| logit.to_le_bytes()).collect::<Vec<u8>>())?;
    let mut next = likeliest(&all[all.len() - engine.describe().vocab_size..]);
    let mut greedy = Vec::new();
    for _ in 0..GREEDY {
        greedy.push(next.to_string());
        tokens.push(next);
        let start = tokens.len() - 1;
        let chunk = Chunk { tokens: &tokens[start..], start: start as u32, blocks: &blocks, logits: Logits::Last };
        next = likeliest(&engine.step(&[chunk])?.logits);
    }
    println!("{}", greedy.join(","));
    Ok(())
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// A whole prompt in chunks, to its last token's logits.
fn prefill(engine: &mut dyn Engine, tokens: &[TokenId], blocks: &[BlockId]) -> Outcome<f64> {
    let started = Instant::now();
    for (i, chunk) in tokens.chunks(CHUNK).enumerate() {
        let start = i * CHUNK;
        // Whoever has none of its rows wanted spares itself a part of the last layer.
        let logits = if start + chunk.len() == tokens.len() { Logits::Last } else { Logits::None };
        engine.step(&[Chunk { tokens: chunk, start: start as u32, blocks, logits }])?;
    }
    Ok(started.elapsed().as_secs_f64())
}

/// A step of the whole loop while `batch` sequences of some `context` tokens each go on, tokens drawn on the device and told.
fn decode(model: &CudaModel, batch: usize, context: usize, sampling: &Sampling) -> Outcome<f64> {
    let settings = EngineSettings {
        chunk_budget: CHUNK as u32,
        batch_max: 256,
        queue_max: 256,
        prefix_caching: false,
        unheard_max: 1_024,
        step_max: Duration::from_secs(60),
    };
    let engine = EngineHandle::start(engine(model, batch * (context + 2 * STEPS))?, settings);
    let generate = |number: usize| Generate {
        request_id: number.to_string(),
        namespace: Namespace::new("bench", "", "", ""),
        prompt: (0..context - STEPS / 2).map(|position| ((number + position) % 1_000) as TokenId).collect(),
        sampling: Sampling { max_tokens: None, seed: number as u64, ..sampling.clone() },
        samples: 1,
        kv: KvSource::Local,
        prompt_logprobs: None,
        generated: Vec::new(),
    };
    tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
        let mut jobs = Vec::new();
        for number in 0..batch {
            jobs.push(engine.generate(generate(number)).await?);
        }
        // The last one to begin: from its first token on, all go on in every step.
        let last = jobs.last_mut().expect("a batch has sequences");
        let mut told = Vec::new();
        while told.len() <= STEPS {
            match last.next().await {
                Some(Event::Token { .. }) => told.push(Instant::now()),
                Some(Event::Scheduled { .. } | Event::Started(_)) => {}
                other => return Err(format!("a sequence ended with {other:?}").into()),
            }
        }
        drop(jobs);
        // Its thread must not be in the driver when the process ends.
        engine.wait_for_load(|load| load.in_use_blocks == 0).await;
        Ok(median(told.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect()))
    })
}

fn speed(model: &str) -> Outcome<()> {
    let model = load(model)?;
    let mut alone = engine(&model, 65_536)?;
    let tokens: Vec<TokenId> = (0..65_536).map(|token| token % 1_000).collect();
    for len in [4_096, 16_384, 65_536] {
        let blocks = blocks(0, len);
        let rounds = (0..ROUNDS).map(|_| prefill(&mut *alone, &tokens[..len], &blocks)).collect::<Outcome<Vec<_>>>()?;
        println!(r#"{{"what":"prefill","tokens":{len},"seconds":{}}}"#, median(rounds));
    }
    drop(alone);
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let drawn = Sampling { temperature: 0.8, top_p: 0.95, top_k: 40, ..Sampling::default() };
    for batch in [1, 32] {
        for (draw, sampling) in [("greedy", &greedy), ("drawn", &drawn)] {
            let seconds = decode(&model, batch, 2_048, sampling)?;
            println!(r#"{{"what":"decode","draw":"{draw}","batch":{batch},"context":2048,"seconds":{seconds}}}"#);
        }
    }
    Ok(())
}

fn exercise(model: &str) -> Outcome<()> {
    let model = load(model)?;
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let drawn = Sampling { temperature: 0.8, top_p: 0.95, top_k: 40, min_p: 0.01, ..Sampling::default() };
    let (logprobs, logit_bias) = (Some(3), [(7, 1.5)].into());
    let penalised = Sampling {
        frequency_penalty: 0.3,
        presence_penalty: 0.2,
        repetition_penalty: 1.1,
        logprobs,
        logit_bias,
        ..drawn.clone()
    };
    for (batch, sampling) in [(1, &greedy), (3, &drawn), (3, &penalised)] {
        decode(&model, batch, 150, sampling)?;
    }
    transfer(&model)
}

fn transfer(model: &CudaModel) -> Outcome<()> {
    let (mut from, mut to) = (engine(model, 1_024)?, engine(model, 1_024)?);
    let tokens: Vec<TokenId> = (0..200).map(|token| token * 7 % 90).collect();
    let (here, there) = (blocks(0, 200), blocks(20, 200));
    prefill(&mut *from, &tokens[..199], &here)?;
    let bytes = from.describe().block_bytes;
    let (mut sent, mut received) = (vec![0; bytes], vec![0; bytes]);
    for (here, there) in here.iter().zip(&there) {
        from.read_block(*here, &mut sent)?;
        to.write_block(*there, &sent)?;
        to.read_block(*there, &mut received)?;
        if sent != received {
            return Err(format!("block {} came with other bytes", here.0).into());
        }
    }
    let last = |engine: &mut dyn Engine, blocks| {
        let chunk = Chunk { tokens: &tokens[199..], start: 199, blocks, logits: Logits::Last };
        engine.step(&[chunk]).map(|output| output.logits)
    };
    let (own, moved) = (last(&mut *from, &here)?, last(&mut *to, &there)?);
    if own != moved {
        return Err("decode on moved blocks differs from decode on its own".into());
    }
    println!("equal");
    Ok(())
}
