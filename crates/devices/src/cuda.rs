//! Models on NVIDIA GPUs: the same Llama and Qwen families as on the CPU.
//!
//! The binary needs no part of CUDA to be built or started. [`CudaModel::load`] finds the driver, NVRTC and cuBLASLt at run time, compiles
//! the kernels for the model's shape and the GPU (once; the result is cached on disk) and copies the weights. GEMMs run in cuBLASLt,
//! everything else in our own kernels (`cuda/kernels`). The trait `device::Device` separates the host code from the GPU, so tests run the
//! same steps and the same kernel sources on the host (docs/adr/013-cuda.md).
//!
//! Weights, activations, keys and values are 16-bit floats; the residual stream and all accumulators are 32-bit floats. Unlike on the CPU,
//! the last bits of a result depend on the batch: cuBLASLt chooses its order of summation by the shape of a GEMM.

mod buffers;
mod compile;
mod device;
mod error;
mod gpu;
mod graphs;
mod inputs;
mod memory;
mod model;
mod plan;
mod pool;
mod runner;
mod sampling;
mod shape;
mod shard;
#[cfg(test)]
mod tests;
mod weights;

pub use error::CudaError;

use gpu::Gpu;
use model::Model;
use runner::Runner;
pub use runner::measure::{Timing, TimingCase};
use shape::Shape;
use shard::Shard;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tandem_engine::Engine;
use tandem_model::ModelFile;
use weights::Origin;

/// The GPUs to use, and the parameters with which their kernels are compiled.
#[derive(Clone, Debug)]
pub struct CudaSettings {
    /// Ordinal of the GPU, or of the first one, counted from 0.
    pub device: u32,
    /// Number of GPUs that compute the model together (tensor parallelism): the GPU `device` and those with the next ordinals.
    pub gpus: u32,
    /// The number of tokens in a block.
    pub block_size: u32,
    /// Directory in which compiled kernels are cached; `None`: they are compiled at every start.
    pub kernels_dir: Option<PathBuf>,
    /// Whether the algorithms of GEMMs are timed and CUDA graphs are recorded when an engine is created, which takes some seconds. If not,
    /// cuBLASLt's own choices are used, and a graph is recorded when a step needs it for the second time.
    pub tuning: bool,
}

/// The size of an engine's KV memory, and of the largest step it accepts.
#[derive(Clone, Copy, Debug)]
pub struct CudaLimits {
    /// The number of blocks in the KV memory; `None`: as many as fit in this engine's share of the GPU memory.
    pub capacity_blocks: Option<u32>,
    /// The number of engines that share the memory that the weights leave free.
    pub engines: u32,
    /// The maximum number of tokens in a step.
    pub step_tokens_max: u32,
    /// The maximum number of sequences in a step that advance by a single token.
    pub sequences_max: u32,
    /// Whether the engine's work runs before the work of non-urgent engines of the process.
    pub urgent: bool,
}

/// A model's weights on one or several GPUs, shared by all engines of a process. Clones refer to the same weights.
#[derive(Clone)]
pub struct CudaModel {
    ranks: Arc<[Model<Gpu>]>,
    tuning: bool,
}

/// Checks that `gpus` GPUs from ordinal `device` on can be used, without loading anything.
///
/// # Errors
///
/// Fails if the driver, cuBLASLt or (for several GPUs) NCCL is not found, if there are too few GPUs, or if a GPU is too old or of another
/// architecture than the first.
pub fn check(device: u32, gpus: u32) -> Result<(), CudaError> {
    gpu::Driver::find_alike(device, gpus).map(drop)
}

/// Returns the name of a GPU, its architecture, and the versions of the driver and of the libraries, as one line.
///
/// # Errors
///
/// Fails as [`check`] does for one GPU.
pub fn describe(device: u32) -> Result<String, CudaError> {
    Ok(gpu::Driver::find(device)?.describe())
}

/// The GPU for which kernels are compiled on another machine.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct CompileTarget<'a> {
    /// The architecture as NVRTC names it, such as `sm_90a`.
    pub architecture: &'a str,
    /// The CUDA version that the driver supports, such as 13000.
    pub driver_version: i32,
    /// The maximum shared memory of a thread block, in bytes.
    pub shared_max: usize,
}

/// Compiles the kernels for a model and a GPU that this machine need not have, for `bench/gpu.sh`. Returns the file in the cache.
///
/// # Errors
///
/// Fails if NVRTC is not found or refuses the kernels, if they do not support the model, or if the file cannot be written.
#[doc(hidden)]
pub fn compile_for(
    file: &dyn ModelFile,
    block_size: u32,
    target: &CompileTarget<'_>,
    kernels_dir: &Path,
) -> Result<PathBuf, CudaError> {
    let (config, half) = (file.config()?, weights::half_of(file)?);
    let shape = Shape::new(&config, half, block_size as usize, target.shared_max, Shard { rank: 0, ranks: 1 })?;
    compile::cubin_for(&shape, target, kernels_dir)
}

impl CudaModel {
    /// Opens the GPUs, compiles the kernels unless the cache has them, and copies all weights. The files are not needed afterwards.
    ///
    /// # Errors
    ///
    /// Fails as [`check`] does; and if NVRTC is not found or refuses the kernels, if the model has a shape that the kernels or the number
    /// of GPUs do not support, if a weight cannot be read, or if the driver fails (for example for lack of memory).
    pub fn load(file: &dyn ModelFile, settings: &CudaSettings) -> Result<Self, CudaError> {
        Self::load_from(file, settings, Origin::File)
    }

    /// Loads a model as [`load`](Self::load) does, but reads only the headers of the files, and makes random weights on the GPUs.
    ///
    /// # Errors
    ///
    /// Fails as [`load`](Self::load) does.
    #[doc(hidden)]
    pub fn load_drawn(file: &dyn ModelFile, settings: &CudaSettings) -> Result<Self, CudaError> {
        Self::load_from(file, settings, Origin::Drawn)
    }

    fn load_from(file: &dyn ModelFile, settings: &CudaSettings, origin: Origin) -> Result<Self, CudaError> {
        // The drivers are found first, so that a missing driver is reported before an error in the model's files.
        let drivers = gpu::Driver::find_alike(settings.device, settings.gpus)?;
        for (gpu, driver) in (settings.device..).zip(&drivers) {
            tracing::info!(gpu, found = driver.describe(), "the GPU and its libraries");
        }
        let (block_size, ranks, mut cubin) = (settings.block_size as usize, drivers.len(), None);
        let ranks = drivers.iter().enumerate().map(|(rank, driver)| {
            Model::load(file, block_size, driver.shared_max, Shard { rank, ranks }, origin, |shape| {
                let cubin = match &mut cubin {
                    Some(cubin) => cubin,
                    none => none.insert(compile::cubin(shape, driver, settings.kernels_dir.as_deref())?),
                };
                Gpu::open(driver, cubin, shape, settings)
            })
        });
        Ok(Self { ranks: ranks.collect::<Result<_, _>>()?, tuning: settings.tuning })
    }

    /// Creates an engine with an empty KV memory.
    ///
    /// # Errors
    ///
    /// Fails with [`CudaError::Memory`] if the KV memory does not fit, and if the driver or NCCL fails.
    pub fn engine(&self, limits: CudaLimits) -> Result<Box<dyn Engine>, CudaError> {
        let runner = Runner::new(Arc::clone(&self.ranks), limits)?;
        Ok(Box::new(if self.tuning { runner.with_recorded_graphs()? } else { runner }))
    }

    /// Times the kernels and GEMMs one by one (rope and embed together), for `bench/gpu.sh`, and passes each result to `report` at once.
    ///
    /// # Errors
    ///
    /// Fails if the memory for the cases does not fit, and if the driver fails.
    #[doc(hidden)]
    pub fn measure(&self, cases: &[TimingCase], report: &mut dyn FnMut(Timing)) -> Result<(), CudaError> {
        runner::measure::measure(&self.ranks, cases, report)
    }

    /// Sends `bytes` bytes of the first GPU to itself over NCCL, for `bench/gpu.sh`. On one GPU, nothing else of NCCL can be tested.
    /// Returns the time taken, and whether the received bytes are those sent.
    ///
    /// # Errors
    ///
    /// Fails if NCCL is not found or fails, or if the driver fails.
    #[doc(hidden)]
    pub fn nccl_self_test(&self, bytes: usize) -> Result<(Duration, bool), CudaError> {
        self.ranks[0].device.nccl_self_test(bytes)
    }
}
