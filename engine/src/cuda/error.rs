//! Errors of the CUDA back end; each message says what to do.

use crate::{ChunkError, EngineError, cpu::CpuError};
use tandem_model::ModelError;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// Why a GPU cannot be used, or why a step on it failed.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// libcuda is not installed.
    #[error(
        "--engine cuda needs an NVIDIA driver, and this machine has none (libcuda.so.1 is not found); install it, or use --engine cpu"
    )]
    NoDriver,
    /// The driver has no GPU with this ordinal.
    #[error(
        "there is no GPU number {device}: the driver knows {count}; choose another with --device (or fewer with --tp), or see CUDA_VISIBLE_DEVICES"
    )]
    NoDevice {
        /// The ordinal, as set.
        device: u32,
        /// Number of GPUs that the driver reports.
        count: i32,
    },
    /// A CUDA library is not found.
    #[error("{library} is not found; install CUDA 13 or pip's {package}, and put its folder in LD_LIBRARY_PATH")]
    NoLibrary {
        /// The library's file name.
        library: &'static str,
        /// The Python wheel that contains it.
        package: &'static str,
    },
    /// The GPU lacks instructions that the kernels use.
    #[error("GPU number {device} has compute capability {major}.{minor}, and 8.0 is the least; use a later one, or --engine cpu")]
    TooOld {
        /// The ordinal of the GPU.
        device: u32,
        /// Major number of its compute capability.
        major: i32,
        /// Minor number of its compute capability.
        minor: i32,
    },
    /// NVRTC refused the kernels, which are tested with version 13.0.
    #[error("the kernels cannot be compiled for this GPU with this NVRTC ({log}); install NVRTC 13.0")]
    Compile {
        /// The compiler log of NVRTC.
        log: String,
    },
    /// A driver call failed. The device cannot be used any more.
    #[error("the GPU driver failed while {doing} ({source}); see the system log, and restart")]
    Driver {
        /// The purpose of the failed call.
        doing: &'static str,
        /// The error that the driver reported.
        source: Source,
    },
    /// cuBLASLt refused a GEMM. The device cannot be used any more.
    #[error("cuBLASLt failed at a matrix product ({source}); check that it is the one of CUDA 13, and restart")]
    Gemm {
        /// The error that cuBLASLt reported.
        source: Source,
    },
    /// NCCL or its other end failed. The communicator cannot be used any more; the GPU can.
    #[error("NCCL failed while {doing} ({source}); set NCCL_DEBUG=WARN in the environment to see why")]
    Nccl {
        /// The purpose of the failed call.
        doing: &'static str,
        /// The error that NCCL reported.
        source: Source,
    },
    /// The model has a shape that the kernels do not support.
    #[error("the GPU kernels need {what}, and the model has {found}: choose another model, or --engine cpu")]
    Shape {
        /// The requirement of the kernels.
        what: &'static str,
        /// The model's value, which violates the requirement.
        found: usize,
    },
    /// Heads or feed-forward columns cannot be divided evenly among the GPUs.
    #[error(
        "--tp {ranks} does not fit the model: its {heads} query heads, {kv_heads} key heads and {ffn} feed-forward columns (by eights) must divide by it; {possible:?} do"
    )]
    TensorParallel {
        /// Number of GPUs, as set.
        ranks: usize,
        /// The model's query heads.
        heads: usize,
        /// The model's key heads.
        kv_heads: usize,
        /// The model's feed-forward columns.
        ffn: usize,
        /// Values of `--tp` that fit the model.
        possible: Vec<usize>,
    },
    /// The GPUs differ, but the kernels are compiled for one kind.
    #[error(
        "--tp needs GPUs of one kind, and number {device} is {found} while the first is {first}; choose others with --device or CUDA_VISIBLE_DEVICES"
    )]
    Unlike {
        /// The ordinal of the GPU that differs.
        device: u32,
        /// The architecture of that GPU.
        found: String,
        /// The first GPU's architecture.
        first: String,
    },
    /// An all-reduce among the GPUs of a tensor-parallel engine failed. The engine cannot be used any more.
    #[error("the all-reduce of several GPUs failed ({source}); set NCCL_DEBUG=WARN in the environment to see why, and restart")]
    AllReduce {
        /// The error that NCCL reported.
        source: Source,
    },
    /// The KV memory does not fit.
    #[error(
        "{free_bytes} bytes are free for this worker on the GPU, and {needed_bytes} are needed for a step and its KV blocks; use fewer workers, a smaller --prefill-chunk-budget or --kv-capacity-tokens, or a smaller model"
    )]
    Memory {
        /// This engine's share of the free memory.
        free_bytes: usize,
        /// Bytes that the buffers of a step and the KV blocks (at least one) need.
        needed_bytes: usize,
    },
    /// The file is not a model that can be run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A weight cannot be read.
    #[error(transparent)]
    Weights(#[from] CpuError),
    /// A weight is too large for IEEE half precision.
    #[error("tensor {name} has a number beyond half precision: take a BF16 conversion of the model")]
    BeyondHalf {
        /// The name of the tensor.
        name: String,
    },
    /// A chunk of a step cannot be computed.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// A step is larger than the engine's limits.
    #[error(
        "a step of {tokens} tokens, {sequences} of them single, exceeds this engine's limits of {tokens_max} tokens and {sequences_max} single ones"
    )]
    StepTooLarge {
        /// Tokens in the step.
        tokens: usize,
        /// Sequences in the step that advance by a single token.
        sequences: usize,
        /// The most tokens that one step may have.
        tokens_max: usize,
        /// The most sequences that may advance by a single token in one step.
        sequences_max: usize,
    },
}

/// After a failed driver call, all further calls fail.
impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Driver { .. } | CudaError::Gemm { .. } | CudaError::AllReduce { .. } => Self::Lost(Box::new(error)),
            _ => Self::Step(Box::new(error)),
        }
    }
}
