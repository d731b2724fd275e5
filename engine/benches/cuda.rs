//! Checks and measures the CUDA back end on a machine with a GPU. `bench/gpu.py` runs it. MODEL is a model's directory.
//!
//! - `cuda logits MODEL TOKENS CHUNK OUT`: computes TOKENS (ids separated by commas) in chunks of CHUNK tokens, writes all logits to OUT (32-bit
//!   floats), then prints 32 more tokens, sampled greedily one by one.
//! - `cuda speed MODEL`: prints a line of JSON for each workload, with the median seconds of its rounds.
//! - `cuda replayed MODEL`: five sequences are decoded greedily together, by replayed CUDA graphs; prints "equal" if each token is the likeliest one,
//!   or tied with it, according to steps that are launched kernel by kernel.
//! - `cuda exercise MODEL`: a short run of every feature (chunks, all kinds of sampling, moved blocks), for compute-sanitizer.
//! - `cuda transports MODEL TOKENS`: another process computes a prompt of TOKENS tokens, whose blocks are then copied from that process's
//!   memory to this one's. Prints a line of JSON with the median seconds of these copies and of the same copies within this process's
//!   memory, and whether decode from both copies gives equal logits.
//! - `cuda source MODEL TOKENS`: the other process of `cuda transports`. It prints the handle of its memory, and ends when its input ends.
//! - `cuda nccl MODEL`: sends memory from the GPU to itself over NCCL (which refuses two ranks on one GPU); prints "equal" and the time.
//! - `cuda transfer MODEL`: moves the blocks of a prompt to another engine through host memory, and compares the bytes and the decoded tokens.
#![expect(clippy::print_stdout, clippy::disallowed_methods, reason = "the benchmark measures real time and prints measurements")]

use std::{
    error::Error,
    fs,
    io::{BufRead, BufReader, Read},
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};
use tandem_engine::{
    Chunk, Engine, EngineHandle, EngineSettings, Event, Generate, KvSource, Logits, Sampling,
    cuda::{CudaLimits, CudaModel, CudaSettings},
};
use tandem_kv::{BlockId, HashKey, Namespace, TokenId};
use tandem_model::HfDirectory;

type Outcome<T> = Result<T, Box<dyn Error>>;

const BLOCK: usize = 16;
/// The workers' default chunk budget.
const CHUNK: usize = 8_192;
const ROUNDS: usize = 5;
const GREEDY: usize = 32;
/// The number of decode steps that a measurement takes.
const STEPS: usize = 64;
/// Number of concurrent sequences. Decode steps pad them to six rows.
const BATCH: usize = 5;
/// Two logits that differ by less than this many standard deviations of their row count as equal, as in bench/gpu.py.
const TIE: f64 = 5e-2;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["logits", model, tokens, chunk, out] => logits(model, tokens, chunk, out),
        ["speed", model] => speed(model),
        ["transfer", model] => load(model).and_then(|model| transfer(&model)),
        ["replayed", model] => replayed(model),
        ["exercise", model] => exercise(model),
        ["transports", model, tokens] => transports(model, tokens),
        ["nccl", model] => nccl(model),
        ["source", model, tokens] => source(model, tokens),
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
    let settings = CudaSettings { device: 0, gpus: 1, block_size: BLOCK as u32, kernels_dir: Some("target/gpu-kernels".into()) };
    Ok(CudaModel::load(&HfDirectory::open(Path::new(model))?, &settings)?)
}

fn engine(model: &CudaModel, capacity_tokens: usize) -> Outcome<Box<dyn Engine>> {
    let capacity_blocks = Some(capacity_tokens.div_ceil(BLOCK) as u32);
    Ok(model.engine(CudaLimits { capacity_blocks, engines: 2, step_tokens_max: CHUNK as u32 + 256, sequences_max: 256 })?)
}

/// Returns the blocks for this many tokens, from block `first` on.
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
        all.extend(engine.step(&[chunk])?.into_logits());
    }
    fs::write(out, all.iter().flat_map(|logit| logit.to_le_bytes()).collect::<Vec<u8>>())?;
    let mut next = likeliest(&all[all.len() - engine.describe().vocab_size..]);
    let mut greedy = Vec::new();
    for _ in 0..GREEDY {
        greedy.push(next.to_string());
        tokens.push(next);
        let start = tokens.len() - 1;
        let chunk = Chunk { tokens: &tokens[start..], start: start as u32, blocks: &blocks, logits: Logits::Last };
        next = likeliest(&engine.step(&[chunk])?.into_logits());
    }
    println!("{}", greedy.join(","));
    Ok(())
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Computes a prompt in chunks, and the logits of its last token; returns the seconds taken.
fn prefill(engine: &mut dyn Engine, tokens: &[TokenId], blocks: &[BlockId]) -> Outcome<f64> {
    let started = Instant::now();
    for (i, chunk) in tokens.chunks(CHUNK).enumerate() {
        let start = i * CHUNK;
        // A step that returns no logits skips part of the last layer.
        let logits = if start + chunk.len() == tokens.len() { Logits::Last } else { Logits::None };
        engine.step(&[Chunk { tokens: chunk, start: start as u32, blocks, logits }])?;
    }
    Ok(started.elapsed().as_secs_f64())
}

fn settings() -> EngineSettings {
    EngineSettings {
        chunk_budget: CHUNK as u32,
        batch_max: 256,
        queue_max: 256,
        prefix_caching: false,
        hash_key: HashKey::NONE,
        max_buffered_events: 1_024,
        step_max: Duration::from_secs(60),
    }
}

fn generate(number: usize, prompt: Vec<TokenId>, sampling: Sampling) -> Generate {
    Generate {
        request_id: number.to_string(),
        account: String::new(),
        namespace: Namespace::new("bench", "", "", ""),
        prompt,
        sampling: Sampling { seed: number as u64, ..sampling },
        samples: 1,
        kv: KvSource::Local,
        prompt_logprobs: None,
        generated: Vec::new(),
    }
}

fn replayed(model: &str) -> Outcome<()> {
    let model = load(model)?;
    let mut plain = engine(&model, 1_024)?;
    let handle = EngineHandle::start(engine(&model, BATCH * 1_024)?, settings());
    // The prompts have different lengths. One of them is long enough for several attention partitions.
    let prompts: Vec<Vec<TokenId>> =
        (0..BATCH).map(|number| (0..40 + number * 150).map(|token| (token * 7 + number) as TokenId % 500).collect()).collect();
    let greedy = Sampling { temperature: 0.0, max_tokens: Some(STEPS as u32), ..Sampling::default() };
    let tokens: Vec<Vec<TokenId>> = tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
        let (mut jobs, mut all) = (Vec::new(), Vec::new());
        for (number, prompt) in prompts.iter().enumerate() {
            jobs.push(handle.generate(generate(number, prompt.clone(), greedy.clone())).await?);
        }
        for job in &mut jobs {
            let mut line = Vec::new();
            while line.len() < STEPS {
                match job.next().await {
                    Some(Event::Token { token, .. }) => line.push(token),
                    Some(Event::Scheduled { .. } | Event::Started(_)) => {}
                    other => return Err(format!("a sequence ended with {other:?}").into()),
                }
            }
            all.push(line);
        }
        drop(jobs);
        // The engine's thread must not be in a driver call when the process ends.
        handle.wait_for_load(|load| load.in_use_blocks == 0).await;
        Ok::<_, Box<dyn Error>>(all)
    })?;
    for (prompt, line) in prompts.iter().zip(&tokens) {
        let (sequence, blocks) = ([&prompt[..], line].concat(), blocks(0, prompt.len() + STEPS));
        let chunk = Chunk { tokens: &sequence, start: 0, blocks: &blocks, logits: Logits::All };
        let logits = plain.step(&[chunk])?.into_logits();
        let rows = logits.chunks(plain.describe().vocab_size).skip(prompt.len() - 1);
        for (place, (row, token)) in rows.zip(line).enumerate() {
            let mean = row.iter().map(|logit| f64::from(*logit)).sum::<f64>() / row.len() as f64;
            let variance = row.iter().map(|logit| (f64::from(*logit) - mean).powi(2)).sum::<f64>() / row.len() as f64;
            let likeliest = likeliest(row);
            let [best, found] = [likeliest, *token].map(|token| f64::from(row[token as usize]));
            // The comparison is false if one of the logits is a NaN.
            let tied = best - found <= TIE * variance.sqrt();
            if !tied {
                return Err(format!("token {place} after {} of the prompt is {token}, not {likeliest}", prompt.len()).into());
            }
        }
    }
    println!("equal");
    Ok(())
}

/// Returns the median duration of a decode step in the engine's loop, in seconds. The step decodes `batch` sequences of about `context`
/// tokens, and samples on the device.
fn decode(model: &CudaModel, batch: usize, context: usize, sampling: &Sampling) -> Outcome<f64> {
    let engine = EngineHandle::start(engine(model, batch * (context + 2 * STEPS))?, settings());
    let prompt =
        |number: usize| (0..context - STEPS / 2).map(|position| ((number + position) % 1_000) as TokenId).collect::<Vec<_>>();
    let endless = Sampling { max_tokens: None, ..sampling.clone() };
    tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
        let mut jobs = Vec::new();
        for number in 0..batch {
            jobs.push(engine.generate(generate(number, prompt(number), endless.clone())).await?);
        }
        // From the first token of the last sequence on, every step decodes all sequences.
        let last = jobs.last_mut().expect("a batch has at least one sequence");
        let mut line = Vec::new();
        while line.len() <= STEPS {
            match last.next().await {
                Some(Event::Token { .. }) => line.push(Instant::now()),
                Some(Event::Scheduled { .. } | Event::Started(_)) => {}
                other => return Err(format!("a sequence ended with {other:?}").into()),
            }
        }
        drop(jobs);
        // The engine's thread must not be in a driver call when the process ends.
        engine.wait_for_load(|load| load.in_use_blocks == 0).await;
        Ok(median(line.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64()).collect()))
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
    let random = Sampling { temperature: 0.8, top_p: 0.95, top_k: 40, ..Sampling::default() };
    for batch in [1, 32] {
        for (mode, sampling) in [("greedy", &greedy), ("random", &random)] {
            let seconds = decode(&model, batch, 2_048, sampling)?;
            println!(r#"{{"what":"decode","sampling":"{mode}","batch":{batch},"context":2048,"seconds":{seconds}}}"#);
        }
    }
    Ok(())
}

fn exercise(model: &str) -> Outcome<()> {
    let model = load(model)?;
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let random = Sampling { temperature: 0.8, top_p: 0.95, top_k: 40, min_p: 0.01, ..Sampling::default() };
    let (logprobs, logit_bias) = (Some(3), [(7, 1.5)].into());
    let penalised = Sampling {
        frequency_penalty: 0.3,
        presence_penalty: 0.2,
        repetition_penalty: 1.1,
        logprobs,
        logit_bias,
        ..random.clone()
    };
    for (batch, sampling) in [(1, &greedy), (BATCH, &random), (BATCH, &penalised)] {
        decode(&model, batch, 150, sampling)?;
    }
    transfer(&model)
}

/// Returns a prompt whose number of tokens is the number in the text `tokens`.
fn prompt(tokens: &str) -> Outcome<Vec<TokenId>> {
    Ok((0..tokens.parse()?).map(|token| token % 1_000).collect())
}

/// Returns an engine whose first blocks have the KV of all tokens of a prompt but the last, and whose memory has capacity for two more
/// copies of these blocks.
fn computed(model: &CudaModel, tokens: &[TokenId]) -> Outcome<Box<dyn Engine>> {
    let mut engine = engine(model, 3 * tokens.len().next_multiple_of(BLOCK))?;
    prefill(&mut *engine, &tokens[..tokens.len() - 1], &blocks(0, tokens.len()))?;
    Ok(engine)
}

fn source(model: &str, tokens: &str) -> Outcome<()> {
    let engine = computed(&load(model)?, &prompt(tokens)?)?;
    let handle = engine.kv_memory().ok_or("this engine does not offer its memory to peers")?.ipc_handle()?;
    println!("{}", handle.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    // Waits until the other process closes the pipe.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn transports(model: &str, tokens: &str) -> Outcome<()> {
    let mut source = Command::new(std::env::current_exe()?)
        .args(["source", model, tokens])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let tokens = prompt(tokens)?;
    let (mut engine, here) = (computed(&load(model)?, &tokens)?, blocks(0, tokens.len()));
    let mut line = String::new();
    BufReader::new(source.stdout.take().ok_or("the process has no output")?).read_line(&mut line)?;
    let digits: Vec<u8> = line.trim().chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    let handle: Vec<u8> = digits.chunks(2).map(|pair| pair[0] << 4 | pair[pair.len() - 1]).collect();
    let memory = engine.kv_memory().ok_or("this engine does not offer its memory to peers")?;
    let (theirs, ours) =
        (memory.open_peer(&handle).map_err(|error| format!("{line}: {error}"))?, memory.open_peer(&memory.ipc_handle()?)?);
    let [there, plain] = [1, 2].map(|times| blocks(times * here.len(), tokens.len()));
    let to = |blocks: &[BlockId]| here.iter().copied().zip(blocks.iter().copied()).collect::<Vec<_>>();
    let (mut copied, mut plainly) = (Vec::new(), Vec::new());
    for _ in 0..=ROUNDS {
        for (peer, blocks, seconds) in [(&theirs, &there, &mut copied), (&ours, &plain, &mut plainly)] {
            let (blocks, started) = (to(blocks), Instant::now());
            peer.copy(&blocks)?;
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    // The first round includes one-time initialisation.
    let [copied, plainly] = [copied, plainly].map(|seconds| median(seconds[1..].to_vec()));
    let start = tokens.len() - 1;
    let mut last = |blocks: &[BlockId]| {
        let chunk = Chunk { tokens: &tokens[start..], start: start as u32, blocks, logits: Logits::Last };
        engine.step(&[chunk]).map(|output| output.into_logits())
    };
    let equal = last(&here)? == last(&there)?;
    drop((theirs, source.stdin.take()));
    source.wait()?;
    let bytes = here.len() * engine.describe().block_bytes;
    println!(r#"{{"what":"cuda_ipc","bytes":{bytes},"seconds":{copied},"plain_seconds":{plainly},"equal":{equal}}}"#);
    Ok(())
}

fn nccl(model: &str) -> Outcome<()> {
    let (took, equal) = load(model)?.nccl_self_test(64 << 20)?;
    println!("{}, 64 MiB in {:.1} ms", if equal { "equal" } else { "DIFFERENT" }, took.as_secs_f64() * 1e3);
    Ok(())
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
            return Err(format!("block {} was received with other bytes", here.0).into());
        }
    }
    let last = |engine: &mut dyn Engine, blocks| {
        let chunk = Chunk { tokens: &tokens[199..], start: 199, blocks, logits: Logits::Last };
        engine.step(&[chunk]).map(|output| output.into_logits())
    };
    let (own, moved) = (last(&mut *from, &here)?, last(&mut *to, &there)?);
    if own != moved {
        return Err("decode on moved blocks differs from decode on the original ones".into());
    }
    println!("equal");
    Ok(())
}
