//! Why a GPU cannot be used; each message says what to do.

use crate::{ChunkError, EngineError, cpu::CpuError};
use tandem_model::ModelError;

type Source = Box<dyn std::error::Error + Send + Sync>;

/// What can go wrong on the way to a GPU, and on it.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no libcuda.
    #[error(
        "--engine cuda needs an NVIDIA driver, and this machine has none (libcuda.so.1 is not found); install it, or use --engine cpu"
    )]
    NoDriver,
    /// The driver is there, what it drives is not.
    #[error(
        "there is no GPU number {device}: the driver knows {count}; choose another with --device (or fewer with --tp), or see CUDA_VISIBLE_DEVICES"
    )]
    NoDevice {
        /// As set.
        device: u32,
        /// How many there are.
        count: i32,
    },
    /// A library of CUDA's is not found.
    #[error("{library} is not found; install CUDA 13 or pip's {package}, and put its folder in LD_LIBRARY_PATH")]
    NoLibrary {
        /// Its file.
        library: &'static str,
        /// The wheel that has it.
        package: &'static str,
    },
    /// The kernels use instructions that came later.
    #[error("GPU number {device} has compute capability {major}.{minor}, and 8.0 is the least; use a later one, or --engine cpu")]
    TooOld {
        /// As set.
        device: u32,
        /// Of its compute capability.
        major: i32,
        /// Of its compute capability.
        minor: i32,
    },
    /// NVRTC refused the kernels, which are tested with other versions.
    #[error("the kernels cannot be compiled for this GPU with this NVRTC ({log}); install NVRTC 13.0")]
    Compile {
        /// What NVRTC said.
        log: String,
    },
    /// The driver refused something.
    #[error("the GPU's driver failed while {doing} ({source}); see the system's log, and start anew")]
    Driver {
        /// What was asked of it.
        doing: &'static str,
        /// Its reason.
        source: Source,
    },
    /// cuBLASLt refused a product.
    #[error("a product of matrices failed ({source}); start anew, and see whether cuBLASLt is of CUDA 13")]
    Product {
        /// Its reason.
        source: Source,
    },
    /// NCCL failed, or its other end. The communicator is of no use any more; the GPU is.
    #[error("NCCL failed while {doing} ({source}); NCCL_DEBUG=WARN in the environment makes it say why")]
    Nccl {
        /// What was asked of it.
        doing: &'static str,
        /// Its reason.
        source: Source,
    },
    /// The model has other sizes than the kernels can take.
    #[error("the GPU's kernels need {what}, and the model has {found}: choose another model, or --engine cpu")]
    Shape {
        /// What they need.
        what: &'static str,
        /// What there is.
        found: usize,
    },
    /// Heads or feed-forward cannot be dealt out to so many GPUs.
    #[error(
        "--tp {ranks} does not fit the model: its {heads} query heads, {kv_heads} key heads and {ffn} feed-forward columns (by eights) must divide by it; {possible:?} do"
    )]
    Split {
        /// GPUs, as set.
        ranks: usize,
        /// Of the model.
        heads: usize,
        /// Of the model.
        kv_heads: usize,
        /// Of the model.
        ffn: usize,
        /// What `--tp` may be.
        possible: Vec<usize>,
    },
    /// One program is for all of them.
    #[error(
        "--tp needs GPUs of one kind, and number {device} is {found} while the first is {first}; choose others with --device or CUDA_VISIBLE_DEVICES"
    )]
    Unlike {
        /// Its number.
        device: u32,
        /// Its architecture.
        found: String,
        /// That of the first.
        first: String,
    },
    /// GPUs that compute one model could not add up their parts.
    #[error(
        "adding up what several GPUs computed failed ({source}); NCCL_DEBUG=WARN in the environment makes NCCL say why; start anew"
    )]
    Sum {
        /// The reason.
        source: Source,
    },
    /// No room for KV.
    #[error(
        "{free_bytes} bytes are free for this worker on the GPU, and {needed_bytes} are needed for a step and its KV blocks; use fewer workers, a smaller --prefill-chunk-budget or --kv-capacity-tokens, or a smaller model"
    )]
    Memory {
        /// This engine's share.
        free_bytes: usize,
        /// For a step's own numbers and one block.
        needed_bytes: usize,
    },
    /// The file is not one of a model that can be run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A weight cannot be read.
    #[error(transparent)]
    Weights(#[from] CpuError),
    /// A weight is too large for half precision.
    #[error("tensor {name} has a number beyond half precision: take a BF16 conversion of the model")]
    BeyondHalf {
        /// The tensor.
        name: String,
    },
    /// A step has a chunk that cannot be computed.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// More than the engine was made for.
    #[error(
        "a step of {tokens} tokens, {sequences} of them single, is more than the {tokens_max} and {sequences_max} this engine has room for"
    )]
    StepTooLarge {
        /// As asked for.
        tokens: usize,
        /// As asked for.
        sequences: usize,
        /// As set.
        tokens_max: usize,
        /// As set.
        sequences_max: usize,
    },
}

/// After the driver has refused something, it refuses all.
impl From<CudaError> for EngineError {
    fn from(error: CudaError) -> Self {
        match error {
            CudaError::Driver { .. } | CudaError::Product { .. } | CudaError::Sum { .. } => Self::Lost(Box::new(error)),
            _ => Self::Step(Box::new(error)),
        }
    }
}
