//! Settings that are one of a few words.

use clap::ValueEnum;
use serde::Serialize;

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// This machine's CPU
    #[default]
    Cpu,
    /// An NVIDIA GPU; not run on one yet (docs/adr/013-cuda.md)
    Cuda,
    /// No model: deterministic text, times from a cost model
    Sim,
}

/// Where prompts are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefillPlace {
    /// Wherever the first token is estimated to come first
    #[default]
    Auto,
    /// Always on a prefill worker
    Remote,
    /// Always on the decode worker
    Local,
}

/// How KV goes from worker to worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvTransfer {
    /// From GPU to GPU where both workers can (CUDA IPC on one host, else NCCL), else over TCP
    #[default]
    Auto,
    /// Over TCP, through both hosts' memory
    Tcp,
}

/// How workers are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[clap(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum PolicyName {
    /// The least estimated time to the first token
    #[default]
    KvAware,
    /// The least pending work
    LeastLoaded,
    /// One after the other
    RoundRobin,
    /// By chance
    Random,
}
