//! A model on NVIDIA's GPUs: the same Llamas and Qwens as on the CPU.
//!
//! The binary needs nothing of CUDA to be built or started. [`CudaModel::load`] finds driver, NVRTC and cuBLASLt at run time, compiles the
//! kernels for the model's shape and the device (once; the result is kept on the disk) and copies the weights. Products are cuBLASLt's,
//! everything else is ours (`cuda/kernels`). What computes is behind `device::Device`: tests run the same steps and the same kernels'
//! sources on the host (docs/adr/013-cuda.md).
//!
//! Weights, activations, keys and values have two bytes a number, the residual stream and all sums four. Unlike on the CPU, a result's
//! last bits depend on the batch: cuBLASLt chooses its order of summation by the shape of a product.

mod compile;
mod device;
mod draws;
mod error;
mod gpu;
mod memory;
mod model;
mod plan;
mod runner;
mod shape;
#[cfg(test)]
mod tests;
mod weights;

pub use error::CudaError;

use crate::Engine;
use gpu::Gpu;
use model::Model;
use runner::Runner;
use std::{path::PathBuf, sync::Arc};
use tandem_model::ModelFile;

/// Which GPU, and what its kernels are compiled for.
#[derive(Clone, Debug)]
pub struct CudaSettings {
    /// The GPU's number, from 0.
    pub device: u32,
    /// Tokens in a block.
    pub block_size: u32,
    /// Where compiled kernels are kept; they are compiled anew at every start without.
    pub kernels_dir: Option<PathBuf>,
}

/// The KV memory of one engine, and the largest step it is asked for.
#[derive(Clone, Copy, Debug)]
pub struct CudaLimits {
    /// Blocks in the KV memory; by default what fits in this engine's share of the memory.
    pub capacity_blocks: Option<u32>,
    /// Engines that share what the weights leave free.
    pub engines: u32,
    /// Tokens in a step.
    pub step_tokens_max: u32,
    /// Sequences that go on by one token in a step.
    pub sequences_max: u32,
}

/// A model's weights on a GPU. Engines of one process share it.
#[derive(Clone)]
pub struct CudaModel(Arc<Model<Gpu>>);

/// Whether there is a driver, and a GPU of this number that the kernels can run on.
pub fn check(device: u32) -> Result<(), CudaError> {
    gpu::Driver::find(device).map(drop)
}

impl CudaModel {
    /// Opens the GPU, compiles the kernels unless that has been done, and copies all weights. The files are not needed afterwards.
    pub fn load(file: &dyn ModelFile, settings: &CudaSettings) -> Result<Self, CudaError> {
        // The driver first: without one nothing else is worth a word.
        let driver = gpu::Driver::find(settings.device)?;
        let model = Model::load(file, settings.block_size as usize, driver.shared_max(), |shape| {
            Gpu::open(&driver, &compile::cubin(shape, &driver, settings.kernels_dir.as_deref())?, shape)
        })?;
        Ok(Self(Arc::new(model)))
    }

    /// An engine with an empty KV memory.
    pub fn engine(&self, limits: CudaLimits) -> Result<Box<dyn Engine>, CudaError> {
        Ok(Box::new(Runner::new(Arc::clone(&self.0), limits)?))
    }
}
