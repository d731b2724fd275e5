//! Loads the model: for workers, with one copy of the weights that all workers of a process share, and for frontends, which need no
//! weights.

use super::StartError;
use crate::{
    model::{Source, Store, StoreArgs, StoredModel},
    settings::{CommonArgs, EngineKind, ExtraModel, ModelArgs, WorkerArgs},
};
use std::{error::Error, path::Path, sync::Arc, time::Duration};
use tandem_engine::{
    Engine, EngineSettings,
    cpu::{CpuEngine, CpuModel, CpuSettings, Isa},
    cuda::{CudaLimits, CudaModel, CudaSettings},
    sim::{SimEngine, SimSettings, Vocabulary},
};
use tandem_frontend::ServedModel;
use tandem_model::{Gguf, HfDirectory, HfTokenizer, ModelFile};
use tandem_proto::ClusterKey;

/// The number of events of a sequence that are buffered for a client before backpressure pauses the sequence. The events cover more than a
/// second of tokens, so a short delay of the reader does not pause the sequence. With logprobs they take a few hundred KiB.
const MAX_BUFFERED_EVENTS: u32 = 1_024;

/// The settings of the engines of a process.
#[derive(Clone)]
pub(super) struct EngineConfig {
    pub(super) model: ModelArgs,
    pub(super) worker: WorkerArgs,
    pub(super) block_size: u32,
    served_model_name: Option<String>,
}

/// A model that is ready to be served.
pub(super) struct Loaded {
    pub(super) served: ServedModel,
    device: Device,
}

enum Device {
    Cpu(Arc<CpuModel>),
    Cuda(CudaModel),
    Sim(Vocabulary),
}

impl EngineConfig {
    pub(super) fn new(common: &CommonArgs, model: &ModelArgs, worker: &WorkerArgs) -> Self {
        let served_model_name = common.served_model_name.clone();
        Self { model: model.clone(), worker: worker.clone(), block_size: common.block_size, served_model_name }
    }

    /// Checks that the device exists, before a model is downloaded for it.
    pub(super) fn check_device(&self) -> Result<(), StartError> {
        match self.model.engine {
            EngineKind::Cuda => Ok(tandem_engine::cuda::check(self.worker.device, self.worker.tp)?),
            _ if self.worker.tp > 1 => Err(StartError::OneDevice),
            EngineKind::Sim | EngineKind::Cpu | EngineKind::Vllm | EngineKind::LlamaCpp => Ok(()),
        }
    }

    /// Loads the model with its weights, downloading it first if necessary. A large model takes seconds. Not for external engines.
    pub(super) async fn load(self) -> Result<Loaded, StartError> {
        on_blocking_thread(move || {
            let Some((stored, revision)) = stored(&self.model)? else {
                return Ok(Loaded { served: sim_served(self.served_model_name), device: Device::Sim(Vocabulary::default()) });
            };
            let (file, served) = open(&stored, &revision, self.served_model_name.clone(), self.model.engine)?;
            let device = match self.model.engine {
                EngineKind::Cpu => Device::Cpu(CpuModel::load(&*file).map_err(|error| unservable(&stored.path, error.into()))?),
                EngineKind::Cuda => Device::Cuda(CudaModel::load(&*file, &self.cuda())?),
                EngineKind::Sim => Device::Sim(vocabulary(&served)),
                EngineKind::Vllm | EngineKind::LlamaCpp => unreachable!("the caller starts no engine"),
            };
            Ok(Loaded { served, device })
        })
        .await
    }

    /// Returns the settings of the engine's thread in a cluster with this key.
    pub(super) fn machine(&self, key: &ClusterKey) -> EngineSettings {
        EngineSettings {
            chunk_budget: self.chunk_budget(),
            batch_max: self.worker.batch_max,
            // This equals the frontend's limit, because all requests that a frontend admits may be placed on one worker.
            queue_max: self.model.max_concurrent_requests,
            prefix_caching: !self.worker.no_prefix_caching,
            hash_key: key.hash_key(),
            max_buffered_events: MAX_BUFFERED_EVENTS,
            step_max: Duration::from_secs(self.worker.step_timeout.into()),
        }
    }

    fn chunk_budget(&self) -> u32 {
        self.worker.chunk_budget(self.model.engine)
    }

    fn capacity_blocks(&self) -> Option<u32> {
        self.worker.capacity_blocks(self.model.engine, self.block_size)
    }

    fn cuda(&self) -> CudaSettings {
        // Without a cache directory the kernels are compiled at every start.
        let kernels_dir = directories::ProjectDirs::from("", "", "tandem").map(|user| user.cache_dir().join("kernels"));
        CudaSettings { device: self.worker.device, gpus: self.worker.tp, block_size: self.block_size, kernels_dir }
    }

    fn cuda_limits(&self, engines: u32) -> CudaLimits {
        /// The number of prompt tokens that always fit in the same step as a full batch, however small the budget.
        const PREFILL_WITH_FULL_BATCH: u32 = 16;
        let batch_max = self.worker.batch_max;
        CudaLimits {
            capacity_blocks: self.capacity_blocks(),
            engines,
            step_tokens_max: self.chunk_budget().max(batch_max + PREFILL_WITH_FULL_BATCH),
            sequences_max: batch_max,
        }
    }

    fn cpu(&self) -> CpuSettings {
        let capacity_blocks = self.capacity_blocks().expect("the CPU engine has a default capacity");
        CpuSettings { block_size: self.block_size, capacity_blocks, threads: self.worker.threads as usize, isa: Isa::detect() }
    }

    pub(super) fn sim(&self) -> SimSettings {
        let sim = &self.worker.sim;
        let milliseconds = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        SimSettings {
            block_size: self.block_size,
            capacity_blocks: self.capacity_blocks().expect("the simulator has a default capacity"),
            prefill_tokens_per_second: sim.sim_prefill_tokens_per_second,
            prefill_overhead: milliseconds(sim.sim_prefill_overhead_ms),
            decode_step: milliseconds(sim.sim_decode_step_ms),
            decode_per_sequence: milliseconds(sim.sim_decode_per_sequence_ms),
            kv_bytes_per_token: sim.sim_kv_bytes_per_token,
            transfer_bytes_per_second: sim.sim_transfer_bytes_per_second,
            speedup: sim.sim_speedup,
        }
    }
}

impl Loaded {
    /// Creates the engine of one worker. The process has `engines` workers, which share the memory of the device.
    pub(super) fn engine(&self, config: &EngineConfig, engines: u32) -> Result<Box<dyn Engine>, StartError> {
        match &self.device {
            Device::Cuda(weights) => Ok(weights.engine(config.cuda_limits(engines))?),
            Device::Cpu(weights) => {
                let engine = CpuEngine::new(weights.clone(), config.cpu());
                Ok(Box::new(engine.map_err(|error| StartError::Engine(error.into()))?))
            }
            Device::Sim(vocabulary) => Ok(Box::new(SimEngine::with_vocabulary(config.sim(), vocabulary.clone()).in_real_time())),
        }
    }
}

/// Loads the model's tokenizer, chat template and limits for a frontend, downloading the model first if necessary.
pub(super) async fn load_served(model: ModelArgs, served_model_name: Option<String>) -> Result<ServedModel, StartError> {
    if model.engine.server().is_some() {
        return load_tokenizer(model.store, model.model.unwrap_or_default(), served_model_name).await;
    }
    on_blocking_thread(move || match stored(&model)? {
        None => Ok(sim_served(served_model_name)),
        Some((stored, revision)) => Ok(open(&stored, &revision, served_model_name, model.engine)?.1),
    })
    .await
}

/// Reads what a frontend needs of its further models, each of which is served under its own id.
pub(super) async fn load_extra(model: &ModelArgs, extra: &[ExtraModel]) -> Result<Vec<ServedModel>, StartError> {
    let mut served = Vec::with_capacity(extra.len());
    for ExtraModel { id, source } in extra {
        let model = ModelArgs { model: Some(source.clone()), ..model.clone() };
        served.push(load_served(model, Some(id.clone())).await?);
    }
    Ok(served)
}

/// Reads the tokenizer and the chat template of a model that external engines compute, downloading them first if necessary. The model has
/// no revision: engines do not report that of their weights.
pub(super) async fn load_tokenizer(store: StoreArgs, source: Source, id: Option<String>) -> Result<ServedModel, StartError> {
    on_blocking_thread(move || {
        let StoredModel { path, id: stored_id, .. } = Store::new(store)?.get_tokenizer(&source)?;
        // By default, the model's id is the repository's name, as in vLLM.
        let by_default = if let Source::HuggingFace { repository, .. } = source { repository } else { stored_id };
        let (id, unservable) = (id.unwrap_or(by_default), |error| unservable(&path, error));
        if path.is_dir() {
            let files = HfTokenizer::read(&path).map_err(|error| unservable(error.into()))?;
            let context_length = files.context_length.unwrap_or(u32::MAX);
            return ServedModel::from_tokenizer(id, "", files, context_length).map_err(|error| unservable(error.into()));
        }
        let file = Gguf::open(&path).map_err(|error| unservable(error.into()))?;
        ServedModel::from_gguf(id, "", &file).map_err(|error| unservable(error.into()))
    })
    .await
}

/// Runs `load` on a thread that it may block, because it reads large files and may download them.
async fn on_blocking_thread<T: Send + 'static>(
    load: impl FnOnce() -> Result<T, StartError> + Send + 'static,
) -> Result<T, StartError> {
    tokio::task::spawn_blocking(load).await.expect("the loading task does not panic")
}

/// Returns the model in the store and its revision; `None` if the simulator runs without a model.
fn stored(settings: &ModelArgs) -> Result<Option<(StoredModel, String)>, StartError> {
    if settings.engine == EngineKind::Sim && settings.model.is_none() {
        return Ok(None);
    }
    let store = Store::new(settings.store.clone())?;
    let model = store.get(&settings.model.clone().unwrap_or_default())?;
    let revision = store.revision(&model)?;
    Ok(Some((model, revision)))
}

/// Returns the model of a simulator that runs without a model's files.
fn sim_served(served_model_name: Option<String>) -> ServedModel {
    ServedModel::sim(served_model_name.unwrap_or_else(|| "sim".to_owned()))
}

/// Opens the model's file or directory, and loads its tokenizer, chat template and limits for a frontend.
fn open(
    model: &StoredModel,
    revision: &str,
    served_model_name: Option<String>,
    engine: EngineKind,
) -> Result<(Box<dyn ModelFile>, ServedModel), StartError> {
    let name = served_model_name.unwrap_or_else(|| model.id.clone());
    let unservable = |error| unservable(&model.path, error);
    let (file, served): (Box<dyn ModelFile>, _) = if model.path.is_dir() {
        let directory = HfDirectory::open(&model.path).map_err(|error| unservable(error.into()))?;
        let served = ServedModel::from_directory(name, revision, &directory);
        (Box::new(directory), served)
    } else {
        let file = Gguf::open(&model.path).map_err(|error| unservable(error.into()))?;
        let served = ServedModel::from_gguf(name, revision, &file);
        (Box::new(file), served)
    };
    let mut served = served.map_err(|error| unservable(error.into()))?;
    // KV on GPUs and on CPUs differs in number format and layout, so GPU workers and CPU workers must not exchange blocks.
    if engine == EngineKind::Cuda {
        served.revision += "-cuda";
    }
    Ok((file, served))
}

fn unservable(path: &Path, source: Box<dyn Error + Send + Sync>) -> StartError {
    StartError::Unservable { path: path.to_owned(), source }
}

/// Returns the tokens of the simulator's answers: the model's plain words, or all tokens if it has no plain words. The model's first stop
/// token ends an answer.
fn vocabulary(served: &ServedModel) -> Vocabulary {
    let tokenizer = &served.tokenizer;
    let is_word = |token: &u32| {
        let bytes = tokenizer.bytes(*token);
        let letters = bytes.strip_prefix(b" ").unwrap_or(bytes);
        !letters.is_empty() && letters.iter().all(u8::is_ascii_lowercase)
    };
    let size = tokenizer.vocab_size();
    let words: Vec<u32> = (0..size as u32).filter(is_word).collect();
    let words = if words.is_empty() { (0..size as u32).collect() } else { words };
    let end = served.stop_tokens.first().copied().unwrap_or(words[0]);
    Vocabulary { size, context_length: served.context_length, words, end }
}
