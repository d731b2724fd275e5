//! Measures the CPU back end in tokens per second: `cargo bench -p tandem-devices --bench cpu -- [--threads N] [--isa NAME] MODEL.gguf` (or
//! `TANDEM_MODEL`). Prints medians of seven rounds of each workload.
//!
//! With `--stdin`, each line of the input names a workload: one round of the workload is run, and its duration in seconds is printed. The
//! first line of the output names the instruction set. `bench/cpu.sh` uses this to alternate between this engine and llama.cpp.
#![expect(clippy::print_stdout, clippy::disallowed_methods, reason = "the benchmark measures real time and prints measurements")]

use std::{error::Error, fmt, io, ops::Range, path::PathBuf, str::FromStr, time::Instant};
use tandem_devices::cpu::{CpuEngine, CpuModel, CpuSettings, Isa};
use tandem_engine::{Chunk, Engine, EngineError, Logits};
use tandem_kv::{BlockId, TokenId};
use tandem_model::Gguf;

const ROUNDS: usize = 7;
const BLOCK: u32 = 16;
/// The chunk size of prefills, as in workers.
const CHUNK: u32 = 512;
/// The number of tokens that each sequence decodes in a round.
const DECODED: u32 = 32;
const CONTEXT_MAX: u32 = 2_048;
const BATCH_MAX: u32 = 8;
const BLOCKS_EACH: u32 = (CONTEXT_MAX + DECODED) / BLOCK;

const WORKLOADS: [Workload; 5] = [
    Workload::Prefill { len: 512 },
    Workload::Prefill { len: 2_048 },
    Workload::Decode { after: 512, batch: 1 },
    Workload::Decode { after: 2_048, batch: 1 },
    Workload::Decode { after: 512, batch: 8 },
];

#[derive(Clone, Copy)]
enum Workload {
    /// One prompt of `len` tokens is computed, with logits for its last token.
    Prefill { len: u32 },
    /// `batch` sequences, each of which already has `after` tokens, are decoded together, with logits for every token.
    Decode { after: u32, batch: u32 },
}

impl Workload {
    fn tokens(self) -> u32 {
        match self {
            Self::Prefill { len } => len,
            Self::Decode { batch, .. } => DECODED * batch,
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Prefill { len } => write!(f, "prefill {len}"),
            Self::Decode { after, batch } => write!(f, "decode {after} {batch}"),
        }
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "unknown workload: {line:?}; give `prefill LENGTH` or `decode AFTER BATCH`, up to {CONTEXT_MAX} tokens and {BATCH_MAX} sequences"
            )
        };
        let number = |word: &str, max| word.parse().ok().filter(|number| (1..=max).contains(number)).ok_or_else(wrong);
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["prefill", len] => Ok(Self::Prefill { len: number(len, CONTEXT_MAX)? }),
            ["decode", after, batch] => Ok(Self::Decode { after: number(after, CONTEXT_MAX)?, batch: number(batch, BATCH_MAX)? }),
            _ => Err(wrong()),
        }
    }
}

struct Bench {
    engine: CpuEngine,
    sequences: Sequences,
    /// For each sequence, the number of tokens whose KV is computed.
    computed: [u32; BATCH_MAX as usize],
}

struct Sequences {
    tokens: Vec<TokenId>,
    blocks: Vec<Vec<BlockId>>,
}

impl Sequences {
    fn chunk<'a>(&'a self, sequence: u32, positions: Range<u32>, logits: Logits<'a>) -> Chunk<'a> {
        let tokens = &self.tokens[positions.start as usize..positions.end as usize];
        Chunk { tokens, start: positions.start, blocks: &self.blocks[sequence as usize], logits }
    }
}

impl Bench {
    fn new(engine: CpuEngine) -> Self {
        let vocabulary = engine.describe().vocab_size as u32;
        let blocks_of = |sequence| (0..BLOCKS_EACH).map(|index| BlockId(sequence * BLOCKS_EACH + index)).collect();
        let sequences = Sequences {
            tokens: (0..CONTEXT_MAX + DECODED).map(|position| (position * 7919 + 13) % vocabulary).collect(),
            blocks: (0..BATCH_MAX).map(blocks_of).collect(),
        };
        Self { engine, sequences, computed: [0; BATCH_MAX as usize] }
    }

    /// Runs one round and returns its duration in seconds. The KV of earlier tokens is computed before the measurement.
    fn seconds(&mut self, workload: Workload) -> Result<f64, EngineError> {
        if let Workload::Decode { after, batch } = workload {
            for sequence in 0..batch {
                self.prefill(sequence, self.computed[sequence as usize]..after)?;
            }
        }
        let start = Instant::now();
        match workload {
            Workload::Prefill { len } => self.prefill(0, 0..len)?,
            Workload::Decode { after, batch } => {
                for position in after..after + DECODED {
                    let token = |sequence| self.sequences.chunk(sequence, position..position + 1, Logits::Last);
                    self.engine.step(&(0..batch).map(token).collect::<Vec<_>>())?;
                }
            }
        }
        Ok(start.elapsed().as_secs_f64())
    }

    fn prefill(&mut self, sequence: u32, positions: Range<u32>) -> Result<(), EngineError> {
        let end = positions.end;
        for start in positions.step_by(CHUNK as usize) {
            let chunk_end = end.min(start + CHUNK);
            let logits = if chunk_end == end { Logits::Last } else { Logits::None };
            self.engine.step(&[self.sequences.chunk(sequence, start..chunk_end, logits)])?;
            let computed = &mut self.computed[sequence as usize];
            *computed = chunk_end.max(*computed);
        }
        Ok(())
    }
}

struct Arguments {
    model: Option<PathBuf>,
    threads: usize,
    isa: Isa,
    stdin: bool,
}

impl Arguments {
    fn read(mut words: impl Iterator<Item = String>) -> Result<Self, Box<dyn Error>> {
        let mut read =
            Self { model: std::env::var_os("TANDEM_MODEL").map(PathBuf::from), threads: 1, isa: Isa::detect(), stdin: false };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            match word.as_str() {
                "--threads" => read.threads = value()?.parse()?,
                "--isa" => read.isa = instruction_set(&value()?)?,
                "--stdin" => read.stdin = true,
                // Cargo adds this argument to the command line.
                "--bench" => {}
                option if option.starts_with("--") => {
                    return Err(format!("unknown option: {option}; the options are --threads N, --isa NAME and --stdin").into());
                }
                model => read.model = Some(model.into()),
            }
        }
        Ok(read)
    }
}

fn instruction_set(name: &str) -> Result<Isa, String> {
    let available = Isa::available();
    let names = available.iter().map(Isa::to_string).collect::<Vec<_>>().join(", ");
    let unknown = format!("unknown or unavailable instruction set {name}: this processor has {names}");
    available.into_iter().find(|isa| isa.to_string() == name).ok_or(unknown)
}

fn main() -> Result<(), Box<dyn Error>> {
    let Arguments { model, threads, isa, stdin } = Arguments::read(std::env::args().skip(1))?;
    let Some(path) = model else {
        println!("skipped: give a .gguf file as argument or in TANDEM_MODEL");
        return Ok(());
    };
    let start = Instant::now();
    let model = CpuModel::load(&Gguf::open(&path)?)?;
    let (load_ms, megabytes) = (start.elapsed().as_secs_f64() * 1e3, model.weight_bytes() as f64 / 1e6);
    let settings = CpuSettings { block_size: BLOCK, capacity_blocks: BATCH_MAX * BLOCKS_EACH, threads, isa };
    let mut bench = Bench::new(CpuEngine::new(model, settings)?);
    if stdin {
        println!("{isa}");
        for line in io::stdin().lines() {
            println!("{}", bench.seconds(line?.parse()?)?);
        }
        return Ok(());
    }
    println!("{isa}, {threads} threads; load: {load_ms:.0} ms, weights {megabytes:.1} MB");
    for workload in WORKLOADS {
        let round = |_| Ok(f64::from(workload.tokens()) / bench.seconds(workload)?);
        let mut rates = (0..ROUNDS).map(round).collect::<Result<Vec<_>, EngineError>>()?;
        rates.sort_by(f64::total_cmp);
        println!("{workload}: median {:.1} tok/s (from {:.1} to {:.1})", rates[ROUNDS / 2], rates[0], rates[ROUNDS - 1]);
    }
    Ok(())
}
