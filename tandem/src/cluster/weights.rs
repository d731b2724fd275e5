//! What all workers of a cluster share: one copy of the weights, and what the frontend reads from the same file.

use super::StartError;
use crate::{
    model::StoredModel,
    settings::{EngineKind, UpSettings},
};
use std::{sync::Arc, time::Duration};
use tandem_engine::{
    Engine,
    cpu::{CpuEngine, CpuModel, CpuSettings, Isa},
    cuda::{CudaLimits, CudaModel, CudaSettings},
    sim::{SimEngine, SimSettings, Vocabulary},
};
use tandem_frontend::ServedModel;
use tandem_model::{Gguf, HfDirectory, ModelFile};

/// A model that is ready to be served.
pub(super) struct Loaded {
    pub(super) served: ServedModel,
    /// Part of the cache's namespace: another file under the same name shares no KV.
    pub(super) revision: String,
    device: Device,
}

enum Device {
    Cpu(Arc<CpuModel>),
    Cuda(CudaModel),
    Sim(Vocabulary),
}

impl Loaded {
    /// Reads the model's files for the engine that is set. Takes seconds for a large one.
    pub(super) fn model(
        model: &StoredModel,
        revision: &str,
        served_name: Option<String>,
        settings: &UpSettings,
    ) -> Result<Self, StartError> {
        let (file, served) = open(model, revision, served_name, settings.engine)?;
        let device = match settings.engine {
            EngineKind::Cpu => Device::Cpu(CpuModel::load(&*file).map_err(|cause| unservable(model, cause.into()))?),
            EngineKind::Cuda => Device::Cuda(CudaModel::load(&*file, &cuda_settings(settings))?),
            EngineKind::Sim => Device::Sim(vocabulary(&served)),
        };
        Ok(Self { revision: served.revision().to_owned(), served, device })
    }

    /// The simulator's own.
    pub(super) fn sim(served_name: Option<String>) -> Self {
        let served = ServedModel::sim(served_name.unwrap_or_else(|| "sim".to_owned()));
        Self { served, revision: "sim".to_owned(), device: Device::Sim(Vocabulary::default()) }
    }

    /// A device for one worker of `engines` in this process.
    pub(super) fn engine(&self, settings: &UpSettings, engines: u32) -> Result<Box<dyn Engine>, StartError> {
        match &self.device {
            Device::Cuda(weights) => Ok(weights.engine(cuda_limits(settings, engines))?),
            Device::Cpu(weights) => {
                let (threads, block_size) = (settings.threads as usize, settings.block_size);
                let capacity_blocks = settings.capacity_blocks().expect("the CPU has a default");
                let settings = CpuSettings { block_size, capacity_blocks, threads, isa: Isa::detect() };
                let engine = CpuEngine::new(weights.clone(), settings);
                Ok(Box::new(engine.map_err(|cause| StartError::Engine(cause.into()))?))
            }
            Device::Sim(vocabulary) => {
                let engine = SimEngine::with_vocabulary(sim_settings(settings), vocabulary.clone());
                Ok(Box::new(engine.in_real_time()))
            }
        }
    }
}

/// The model's file, and what a frontend reads from it.
pub(super) fn open(
    model: &StoredModel,
    revision: &str,
    served_name: Option<String>,
    engine: EngineKind,
) -> Result<(Box<dyn ModelFile>, ServedModel), StartError> {
    let name = served_name.unwrap_or_else(|| model.id.clone());
    let (file, served): (Box<dyn ModelFile>, _) = if model.path.is_dir() {
        let directory = HfDirectory::open(&model.path).map_err(|cause| unservable(model, cause.into()))?;
        let served = ServedModel::from_directory(name, revision, &directory);
        (Box::new(directory), served)
    } else {
        let file = Gguf::open(&model.path).map_err(|cause| unservable(model, cause.into()))?;
        let served = ServedModel::from_gguf(name, revision, &file);
        (Box::new(file), served)
    };
    let served = served.map_err(|cause| unservable(model, cause.into()))?;
    // A GPU keeps KV in other numbers and another order than the CPU: workers of the two must not take each other's blocks.
    let served = if engine == EngineKind::Cuda { served.computed("cuda") } else { served };
    Ok((file, served))
}

fn unservable(model: &StoredModel, cause: Box<dyn std::error::Error + Send + Sync>) -> StartError {
    StartError::Unservable { path: model.path.clone(), cause }
}

fn cuda_settings(settings: &UpSettings) -> CudaSettings {
    // Without a cache directory they are compiled at every start.
    let kernels_dir = directories::ProjectDirs::from("", "", "tandem").map(|user| user.cache_dir().join("kernels"));
    CudaSettings { device: settings.device, gpus: settings.tp, block_size: settings.block_size, kernels_dir }
}

fn cuda_limits(settings: &UpSettings, engines: u32) -> CudaLimits {
    /// Prompt tokens that go on beside a full batch, however small the budget.
    const BESIDE_BATCH: u32 = 16;
    CudaLimits {
        capacity_blocks: settings.capacity_blocks(),
        engines,
        step_tokens_max: settings.chunk_budget().max(settings.batch_max + BESIDE_BATCH),
        sequences_max: settings.batch_max,
    }
}

pub(super) fn sim_settings(settings: &UpSettings) -> SimSettings {
    let sim = &settings.sim;
    let milliseconds = |ms: f64| Duration::from_secs_f64(ms / 1e3);
    SimSettings {
        block_size: settings.block_size,
        capacity_blocks: settings.capacity_blocks().expect("the simulator has a default"),
        prefill_tokens_per_second: sim.sim_prefill_tokens_per_second,
        prefill_overhead: milliseconds(sim.sim_prefill_overhead_ms),
        decode_step: milliseconds(sim.sim_decode_step_ms),
        decode_per_sequence: milliseconds(sim.sim_decode_per_sequence_ms),
        kv_bytes_per_token: sim.sim_kv_bytes_per_token,
        transfer_bytes_per_second: sim.sim_transfer_bytes_per_second,
        speedup: sim.sim_speedup,
    }
}

/// A model's tokens for the simulator: it answers with plain words, where a model has such, and ends as the model does.
fn vocabulary(served: &ServedModel) -> Vocabulary {
    let tokenizer = served.tokenizer();
    let is_word = |token: &u32| {
        let bytes = tokenizer.bytes(*token);
        let letters = bytes.strip_prefix(b" ").unwrap_or(bytes);
        !letters.is_empty() && letters.iter().all(u8::is_ascii_lowercase)
    };
    let size = tokenizer.vocab_size();
    let words: Vec<u32> = (0..size as u32).filter(is_word).collect();
    let words = if words.is_empty() { (0..size as u32).collect() } else { words };
    let end = served.stop_tokens().first().copied().unwrap_or(words[0]);
    Vocabulary { size, context_length: served.context_length(), words, end }
}
