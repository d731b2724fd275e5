//! Settings of workers: their engine, the simulated device, and how they transfer KV.

use super::{EngineKind, ExternalArgs, SimArgs};
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::path::PathBuf;

/// The settings of `tandem up` and of both kinds of workers.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Workers")]
#[serde(rename_all = "kebab-case")]
pub struct WorkerArgs {
    /// KV memory of each worker, in tokens [default: 16384 on the CPU, 360 MiB a worker for the default model; 65536 with --engine sim;
    /// with --engine cuda what fits in nine tenths of the memory that the weights leave free, shared by all workers of the process]
    #[arg(long, env = "TANDEM_KV_CAPACITY_TOKENS", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub kv_capacity_tokens: Option<u32>,

    /// Threads of each worker's engine on the CPU. The default is one, because several workers share the machine
    #[arg(long, env = "TANDEM_THREADS", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: u32,

    /// Index of the GPU for --engine cuda; 0 is the first one that CUDA_VISIBLE_DEVICES lets the process use
    #[arg(long, env = "TANDEM_DEVICE", value_name = "INDEX", default_value_t = 0)]
    pub device: u32,

    /// Do not time the algorithms of matrix products when a worker starts with --engine cuda, and use cuBLASLt's own choices; and record
    /// CUDA graphs when they are needed, not at the start. Both take some seconds, and another process that uses the GPU disturbs the timing
    #[arg(long, env = "TANDEM_NO_GPU_TUNING")]
    pub no_gpu_tuning: bool,

    /// Tensor parallelism: the number of GPUs, from --device on, that compute one model together, each with its share of the heads and of
    /// the feed-forward layers. For models that do not fit on one GPU or are too slow on it; all workers of the process use the same GPUs
    #[arg(long, env = "TANDEM_TP", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub tp: u32,

    /// Tokens computed in one step of an engine. Longer prompts are computed in chunks, so that running answers wait for one step at most
    /// [default: 512; 8192 with --engine cuda, because fewer do not keep a GPU busy]
    #[arg(long, env = "TANDEM_PREFILL_CHUNK_BUDGET", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    pub prefill_chunk_budget: Option<u32>,

    /// Limit on the time between two tokens of an answer while prompts are computed, in milliseconds: steps with running answers get fewer tokens of
    /// prompts, so that these steps end in time. It never takes more than half of a step from them, so a limit below twice the time that a
    /// step takes without their tokens is not kept. In `tandem bench`, and for the number of wanted
    /// workers, the same name limits the mean of an answer [default: 16 times the measured time of a step without prompts]
    #[arg(long, env = "TANDEM_SLO_ITL", value_name = "MS", value_parser = step_ms)]
    pub slo_itl: Option<f64>,

    /// Sequences in one step of an engine; more are queued, because each one makes the step longer. With --engine vllm it is the server's
    /// --max-num-seqs
    #[arg(long, env = "TANDEM_BATCH_MAX", value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch_max: u32,

    /// Time after which a step that has not ended counts as hung, in seconds: the worker's requests fail over to other workers, and it gets
    /// no new ones until the step ends. The default is how long clients and proxies usually wait for a first token; set it lower for a
    /// device with fast steps. An external server counts as hung if for this time it answers no health check and no
    /// request on it makes progress
    #[arg(long, env = "TANDEM_STEP_TIMEOUT", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub step_timeout: u32,

    /// Transfer path for the KV of a prompt that another worker computes. `auto` has not been tested on a GPU yet
    #[arg(long, env = "TANDEM_KV_TRANSFER", value_enum, default_value_t)]
    pub kv_transfer: KvTransfer,

    /// Turn off the prefix cache: every prompt is computed as a whole, and answers report 0 cached tokens
    #[arg(long, env = "TANDEM_NO_PREFIX_CACHING")]
    pub no_prefix_caching: bool,

    /// Append to this file a line for every prompt that a worker starts and one for its outcome, as input of `tandem audit`. Each process
    /// needs a file of its own [default: no ledger is written]
    #[arg(long, env = "TANDEM_LEDGER", value_name = "FILE")]
    pub ledger: Option<PathBuf>,

    /// Whether workers leave cached tokens out of their reports. Tests of the router's estimates set it.
    #[doc(hidden)]
    #[arg(skip)]
    #[serde(skip)]
    pub withhold_cached_tokens: bool,

    /// The server that computes for the worker.
    #[command(flatten)]
    #[serde(flatten)]
    pub external: ExternalArgs,

    /// The cost model of the simulated device.
    #[command(flatten)]
    #[serde(flatten)]
    pub sim: SimArgs,
}

/// Parses a number of milliseconds. An hour is longer than any step, and than any service level.
pub(super) fn step_ms(text: &str) -> Result<f64, &'static str> {
    let ms = super::sim::positive(text)?;
    if ms <= 3_600_000.0 { Ok(ms) } else { Err("write a number of milliseconds up to 3600000") }
}

impl WorkerArgs {
    /// Returns the KV memory of each worker in whole blocks, at least one. `None`: as much as fits on the device.
    pub fn capacity_blocks(&self, engine: EngineKind, block_size: u32) -> Option<u32> {
        let by_default = match engine {
            EngineKind::Cpu => Some(16_384),
            EngineKind::Cuda | EngineKind::Vllm | EngineKind::Sglang | EngineKind::LlamaCpp => None,
            EngineKind::Sim => Some(65_536),
        };
        self.kv_capacity_tokens.or(by_default).map(|tokens| (tokens / block_size).max(1))
    }

    /// Returns the maximum number of tokens that are computed in one step of an engine.
    pub fn chunk_budget(&self, engine: EngineKind) -> u32 {
        self.prefill_chunk_budget.unwrap_or(match engine {
            EngineKind::Cpu | EngineKind::Sim | EngineKind::Vllm | EngineKind::Sglang | EngineKind::LlamaCpp => 512,
            EngineKind::Cuda => 8_192,
        })
    }
}

/// How KV is transferred from worker to worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvTransfer {
    /// From GPU to GPU if both workers support it (CUDA IPC within a host, else NCCL), else over TCP
    #[default]
    Auto,
    /// Over TCP, staged through host memory
    Tcp,
}
