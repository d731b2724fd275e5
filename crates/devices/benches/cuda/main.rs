//! Checks and measures the CUDA back end on a machine with a GPU. `bench/gpu.py` runs it. MODEL is a model's directory; after the prefix
//! `drawn:`, only its configuration is used, and the weights are random numbers that are made on the GPU.
//!
//! - `cuda versions`: prints the GPU, and the versions of the driver and of the libraries.
//! - `cuda compile MODEL ARCHITECTURE DRIVER SHARED`: compiles the kernels for a GPU of another machine into the folder `kernels` next to this
//!   program. DRIVER is the CUDA version of that machine's driver (13000), SHARED the shared memory of a thread block in bytes.
//! - `cuda logits MODEL TOKENS CHUNK OUT`: computes TOKENS (ids separated by commas) in chunks of CHUNK tokens, writes all logits to OUT (32-bit
//!   floats), then prints 32 more tokens, sampled greedily one by one.
//! - `cuda kernels MODEL CASE...`: times every kernel alone; prints a line of JSON for each. A CASE is `ceilings:WIDTH:BYTES`,
//!   `prompt:BEFORE:NEW` or `decode:BATCH:CONTEXT`.
//! - `cuda speed MODEL CASE...`: prints a line of JSON for each workload, with the median seconds of its rounds. A CASE is `prefill:TOKENS`,
//!   `cached:BEFORE:NEW`, `decode:BATCH:CONTEXT:greedy` or `decode:BATCH:CONTEXT:drawn`.
//! - `cuda replayed MODEL`: five sequences are decoded greedily together, by replayed CUDA graphs; prints "equal" if each token is the likeliest one,
//!   or tied with it, according to steps that are launched kernel by kernel.
//! - `cuda exercise MODEL`: a short run of every feature (chunks, all kinds of sampling, moved blocks), for compute-sanitizer.
//! - `cuda transports MODEL TOKENS`: another process computes a prompt of TOKENS tokens, whose blocks are then copied from that process's
//!   memory to this one's. Prints a line of JSON with the median seconds of these copies and of the same copies within this process's
//!   memory, the seconds that mapping and unmapping the memory took, and whether decode from both copies gives equal logits.
//! - `cuda source MODEL TOKENS`: the other process of `cuda transports`. It prints the handle of its memory, and ends when its input ends.
//! - `cuda nccl MODEL`: sends memory from the GPU to itself over NCCL (which refuses two ranks on one GPU); prints "equal" and the time.
//! - `cuda transfer MODEL`: moves the blocks of a prompt to another engine through host memory, and compares the bytes and the decoded tokens.
//!
//! With the option `--untuned`, the algorithms of GEMMs are not timed before an engine starts.
#![expect(clippy::print_stdout, clippy::disallowed_methods, reason = "the benchmark measures real time and prints measurements")]

mod checks;
mod speed;
mod transfers;

use std::{
    error::Error,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};
use tandem_devices::cuda::{self, CompileTarget, CudaLimits, CudaModel, CudaSettings};
use tandem_engine::{Chunk, Engine, EngineSettings, Generate, KvSource, Logits, Sampling};
use tandem_kv::{BlockId, HashKey, Namespace, Priority, TokenId};
use tandem_model::HfDirectory;

type Outcome<T> = Result<T, Box<dyn Error>>;

const BLOCK: usize = 16;
/// The workers' default chunk budget.
const CHUNK: usize = 8_192;
const ROUNDS: usize = 5;
/// The number of decode steps that a measurement takes.
const STEPS: usize = 64;
/// Prompts consist of ids below this number, which all measured models have.
const IDS: usize = 500;

/// The program's options.
#[derive(Clone, Copy)]
struct Options {
    tuning: bool,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let options = Options { tuning: !arguments.iter().any(|argument| argument == "--untuned") };
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).filter(|argument| *argument != "--untuned").collect();
    let outcome = match arguments[..] {
        ["versions"] => versions(),
        ["compile", model, architecture, driver, shared] => compile(model, architecture, driver, shared),
        ["logits", model, tokens, chunk, out] => options.load(model).and_then(|model| checks::logits(&model, tokens, chunk, out)),
        ["kernels", model, ref cases @ ..] => options.load(model).and_then(|model| speed::kernels(&model, cases)),
        ["speed", model, ref cases @ ..] => options.load(model).and_then(|model| speed::speed(&model, cases)),
        ["transfer", model] => options.load(model).and_then(|model| transfers::transfer(&model)),
        ["replayed", model] => options.load(model).and_then(|model| checks::replayed(&model)),
        ["exercise", model] => options.load(model).and_then(|model| checks::exercise(&model)),
        ["transports", model, tokens] => transfers::transports(options, model, tokens),
        ["nccl", model] => options.load(model).and_then(|model| transfers::nccl(&model)),
        ["source", model, tokens] => options.load(model).and_then(|model| transfers::source(&model, tokens)),
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

/// Returns the folder of compiled kernels, which is next to this program.
fn kernels_dir() -> Outcome<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name("kernels"))
}

impl Options {
    fn load(self, model: &str) -> Outcome<CudaModel> {
        let settings =
            CudaSettings { device: 0, gpus: 1, block_size: BLOCK as u32, kernels_dir: Some(kernels_dir()?), tuning: self.tuning };
        Ok(match model.strip_prefix("drawn:") {
            Some(model) => CudaModel::load_drawn(&HfDirectory::open(Path::new(model))?, &settings)?,
            None => CudaModel::load(&HfDirectory::open(Path::new(model))?, &settings)?,
        })
    }
}

fn versions() -> Outcome<()> {
    println!("{}", cuda::describe(0)?);
    Ok(())
}

fn compile(model: &str, architecture: &str, driver: &str, shared: &str) -> Outcome<()> {
    let target = CompileTarget { architecture, driver_version: driver.parse()?, shared_max: shared.parse()? };
    let file = cuda::compile_for(&HfDirectory::open(Path::new(model))?, BLOCK as u32, &target, &kernels_dir()?)?;
    println!("{}", file.display());
    Ok(())
}

fn engine(model: &CudaModel, capacity_tokens: usize) -> Outcome<Box<dyn Engine>> {
    let capacity_blocks = Some(capacity_tokens.div_ceil(BLOCK) as u32);
    Ok(model.engine(CudaLimits {
        capacity_blocks,
        engines: 2,
        step_tokens_max: CHUNK as u32,
        sequences_max: 256,
        urgent: false,
    })?)
}

/// Returns the blocks for this many tokens, from block `first` on.
fn blocks(first: usize, tokens: usize) -> Vec<BlockId> {
    (first..first + tokens.div_ceil(BLOCK)).map(|block| BlockId(block as u32)).collect()
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
        itl_max: None,
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
        priority: Priority::default(),
        namespace: Namespace::new("bench", "", "", ""),
        prompt,
        sampling: Sampling { seed: number as u64, ..sampling },
        samples: 1,
        kv: KvSource::Local,
        prompt_logprobs: None,
        generated: Vec::new(),
        images: [].into(),
    }
}
