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
mod graphs;
mod inputs;
mod memory;
mod model;
mod plan;
mod pool;
mod runner;
mod shape;
mod split;
#[cfg(test)]
mod tests;
mod weights;

pub use error::CudaError;

use crate::Engine;
use gpu::Gpu;
use model::Model;
use runner::Runner;
use split::Split;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tandem_model::ModelFile;

/// Which GPUs, and what their kernels are compiled for.
#[derive(Clone, Debug)]
pub struct CudaSettings {
    /// The GPU's number, from 0, or the first one's.
    pub device: u32,
    /// GPUs that compute the model together, each a part of every layer: `device` and those after it.
    pub gpus: u32,
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

/// A model's weights on a GPU, or on several. Engines of one process share it.
#[derive(Clone)]
pub struct CudaModel(Arc<[Model<Gpu>]>);

/// Whether there is a driver, so many GPUs from this number on that the kernels can run on, and what several need.
pub fn check(device: u32, gpus: u32) -> Result<(), CudaError> {
    gpu::Driver::find_alike(device, gpus).map(drop)
}

impl CudaModel {
    /// Opens the GPUs, compiles the kernels unless that has been done, and copies all weights. The files are not needed afterwards.
    pub fn load(file: &dyn ModelFile, settings: &CudaSettings) -> Result<Self, CudaError> {
        // The driver first: without one nothing else is worth a word.
        let drivers = gpu::Driver::find_alike(settings.device, settings.gpus)?;
        let (block_size, ranks, mut cubin) = (settings.block_size as usize, drivers.len(), None);
        let ranks = drivers.iter().enumerate().map(|(rank, driver)| {
            Model::load(file, block_size, driver.shared_max(), Split { rank, ranks }, |shape| {
                let cubin = match &mut cubin {
                    Some(cubin) => cubin,
                    none => none.insert(compile::cubin(shape, driver, settings.kernels_dir.as_deref())?),
                };
                Gpu::open(driver, cubin, shape)
            })
        });
        Ok(Self(ranks.collect::<Result<_, _>>()?))
    }

    /// An engine with an empty KV memory.
    pub fn engine(&self, limits: CudaLimits) -> Result<Box<dyn Engine>, CudaError> {
        Ok(Box::new(Runner::new(Arc::clone(&self.0), limits)?))
    }

    /// Sends memory of the first GPU to itself over NCCL: all that one GPU can show of it. How long it took, and whether the bytes came.
    pub fn send_to_itself(&self, bytes: usize) -> Result<(Duration, bool), CudaError> {
        self.0[0].device.send_to_itself(bytes)
    }
}
