//! Errors of the CUDA back end. Each message that an operator can act on says what to do.

use crate::cpu::CpuError;
use tandem_engine::{ChunkError, EngineError};
use tandem_model::ModelError;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// An error that prevents the use of a GPU, or of a step that failed on it.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages describe the fields")]
pub enum CudaError {
    /// libcuda is not installed.
    #[error("--engine cuda needs an NVIDIA driver, and libcuda.so.1 is not found; install the driver, or use --engine cpu")]
    NoDriver,
    /// The driver is older than the first one of CUDA 13. `found` is the CUDA version that it supports, such as 12.8.
    #[error(
        "the NVIDIA driver supports CUDA {found}, and --engine cuda needs CUDA 13; install driver R580 or later, or use --engine cpu"
    )]
    OldDriver { found: String },
    /// The dynamic linker has found a library of an older CUDA. `package` is the Python wheel that contains a suitable one.
    #[error(
        "{library} is version {found}, and --engine cuda needs 13; put the folder of pip's {package} first in LD_LIBRARY_PATH, or remove the older CUDA from it"
    )]
    OldLibrary { library: &'static str, found: String, package: &'static str },
    /// The driver has no GPU with this ordinal.
    #[error(
        "there is no GPU number {device}: the driver has {count} GPUs, numbered from 0; \
         choose another --device, a smaller --tp, or other CUDA_VISIBLE_DEVICES"
    )]
    NoDevice { device: u32, count: i32 },
    /// A CUDA library is not found. `package` is the Python wheel that contains it.
    #[error("{library} is not found; install CUDA 13 or pip's {package}, and put its folder in LD_LIBRARY_PATH")]
    NoLibrary { library: &'static str, package: &'static str },
    /// The GPU lacks instructions that the kernels use.
    #[error("GPU number {device} has compute capability {major}.{minor}; use a GPU with 8.0 or later, or --engine cpu")]
    TooOld { device: u32, major: i32, minor: i32 },
    /// NVRTC cannot compile the kernels, which are tested with version 13.0. `log` is the log of the compiler.
    #[error("this version of NVRTC cannot compile the kernels for this GPU ({log}); install NVRTC 13.0")]
    Compile { log: String },
    /// A driver call failed. The device cannot be used any more.
    #[error("the GPU driver failed while {doing} ({source}); read the system log, and restart the process")]
    Driver { doing: &'static str, source: Source },
    /// cuBLASLt refused a GEMM. The device cannot be used any more.
    #[error("cuBLASLt failed to compute a GEMM ({source}); check that it belongs to CUDA 13, and restart the process")]
    Gemm { source: Source },
    /// NCCL failed on this rank or on the other one. The communicator cannot be used any more, but the GPU can.
    #[error("NCCL failed while {doing} ({source}); set NCCL_DEBUG=WARN in the environment to see why")]
    Nccl { doing: &'static str, source: Source },
    /// The model has a shape that the kernels do not support.
    #[error("the GPU kernels need {what}, and the model has {found}: use another model, or --engine cpu")]
    Shape { what: &'static str, found: usize },
    /// Heads or feed-forward columns cannot be divided evenly among the GPUs.
    #[error(
        "--tp {ranks} does not fit the model, which has {heads} query heads, {kv_heads} key heads and {ffn} feed-forward columns; --tp must divide the heads, and the columns into multiples of 8: use one of {possible:?}"
    )]
    TensorParallel { ranks: usize, heads: usize, kv_heads: usize, ffn: usize, possible: Vec<usize> },
    /// The GPUs differ, but the kernels are compiled for one kind of GPU.
    #[error(
        "--tp needs equal GPUs, but GPU {device} is {found} and the first GPU is {first}; choose other GPUs with --device or CUDA_VISIBLE_DEVICES"
    )]
    Unlike { device: u32, found: String, first: String },
    /// An all-reduce among the GPUs of a tensor-parallel engine failed. The engine cannot be used any more.
    #[error(
        "the all-reduce of several GPUs failed ({source}); set NCCL_DEBUG=WARN in the environment to see why, and restart the process"
    )]
    AllReduce { source: Source },
    /// This engine's share of the free memory is too small for the buffers of a step and at least one KV block.
    #[error(
        "a step and its KV blocks need {needed_bytes} bytes of GPU memory, but {free_bytes} are free for this worker; use fewer workers, a smaller --prefill-chunk-budget or --kv-capacity-tokens, or a smaller model"
    )]
    Memory { free_bytes: usize, needed_bytes: usize },
    /// The file is not a model that can be run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A weight cannot be read.
    #[error(transparent)]
    Weights(#[from] CpuError),
    /// A weight is too large for IEEE half precision.
    #[error("tensor {name} has a number beyond the range of half precision: use a BF16 conversion of the model")]
    BeyondHalf { name: String },
    /// A chunk of a step cannot be computed.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// A step is larger than the engine's limits. `sequences` counts the sequences that advance by one token.
    #[error(
        "a step has {tokens} tokens and {sequences} sequences that advance by one token; this engine's limits are {tokens_max} and {sequences_max}"
    )]
    StepTooLarge { tokens: usize, sequences: usize, tokens_max: usize, sequences_max: usize },
}

/// Errors after which the GPU or the engine cannot be used any more become `EngineError::Lost`.
impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Driver { .. } | CudaError::Gemm { .. } | CudaError::AllReduce { .. } => Self::Lost(Box::new(error)),
            _ => Self::Step(Box::new(error)),
        }
    }
}
