//! Loads models. All workers of a process share one copy of the weights; frontends need no weights.

#[cfg(feature = "cuda")]
mod cuda;

use super::StartError;
use crate::settings::{CommonArgs, EngineKind, ExtraModel, ModelArgs, ParserArgs, WorkerArgs};
use std::{
    error::Error,
    path::Path,
    sync::{Arc, OnceLock},
    time::Duration,
};
#[cfg(feature = "cuda")]
use tandem_devices::cuda::CudaModel;
use tandem_devices::{
    cpu::{CpuEngine, CpuModel, CpuSettings, Isa},
    sim::{SimEngine, SimSettings, Vocabulary},
};
use tandem_engine::{Engine, EngineHandle, EngineSettings};
use tandem_model::{Gguf, HfDirectory, HfTokenizer, ModelFile};
use tandem_model_store::{ModelSource, Store, StoreArgs, StoredModel};
use tandem_process::starting;
use tandem_proto::ClusterKey;
use tandem_text::ServedModel;

/// This many events of a sequence are buffered for a client before backpressure pauses the sequence. They cover more than a second of tokens, so a
/// short delay of the reader does not pause the sequence. With logprobs they take a few hundred KiB.
const MAX_BUFFERED_EVENTS: u32 = 1_024;

/// A smaller `--kv-capacity-tokens` causes a warning: a single chat with a system prompt is often longer.
const SMALL_CAPACITY_TOKENS: u32 = 2_048;

#[derive(Clone)]
pub(super) struct EngineConfig {
    pub(super) model: ModelArgs,
    pub(super) worker: WorkerArgs,
    pub(super) block_size: u32,
    served_model_name: Option<String>,
}

pub(super) struct Loaded {
    pub(super) served: ServedModel,
    device: ModelDevice,
    /// The vocabulary of the model, with which its engines enforce constraints.
    vocabulary: OnceLock<Arc<tandem_grammar::Vocabulary>>,
}

enum ModelDevice {
    Cpu(Arc<CpuModel>),
    #[cfg(feature = "cuda")]
    Cuda(CudaModel),
    Sim(Vocabulary),
}

/// How the engine of one worker shares a GPU with the other engines of the process.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "engines share GPUs only"))]
pub(super) struct DeviceShare {
    /// The number of engines, which share the memory.
    pub(super) engines: u32,
    /// Whether the engine's work runs before that of other engines.
    pub(super) urgent: bool,
}

impl EngineConfig {
    pub(super) fn new(common: &CommonArgs, model: &ModelArgs, worker: &WorkerArgs) -> Self {
        let served_model_name = common.served_model_name.clone();
        Self { model: model.clone(), worker: worker.clone(), block_size: common.block_size, served_model_name }
    }

    /// Checks that the device exists. This is done before a model is downloaded for it.
    pub(super) fn check_device(&self) -> Result<(), StartError> {
        match self.model.engine {
            #[cfg(feature = "cuda")]
            EngineKind::Cuda => Ok(tandem_devices::cuda::check(self.worker.device, self.worker.tp)?),
            #[cfg(not(feature = "cuda"))]
            EngineKind::Cuda => Err(StartError::WithoutCuda),
            _ if self.worker.tp > 1 => Err(StartError::OneDevice),
            EngineKind::Sim | EngineKind::Cpu | EngineKind::Vllm | EngineKind::Sglang | EngineKind::LlamaCpp => Ok(()),
        }
    }

    /// Loads the model with its weights, and downloads it first if necessary. A large model takes seconds. External engines load their models
    /// themselves.
    pub(super) async fn load(self) -> Result<Loaded, StartError> {
        if let Some(tokens) = self.worker.kv_capacity_tokens.filter(|tokens| *tokens < SMALL_CAPACITY_TOKENS) {
            tracing::warn!(
                tokens,
                "--kv-capacity-tokens is small: a prompt and its answer together can have no more tokens than this, and few requests run at once"
            );
        }
        on_blocking_thread(move || {
            let Some((stored, revision)) = stored(&self.model)? else {
                return Ok(Loaded::new(sim_served(self.served_model_name), ModelDevice::Sim(Vocabulary::default())));
            };
            starting::report("loads the model");
            let (file, served) = open(&stored, &revision, self.served_model_name.clone(), self.model.engine)?;
            let device = match self.model.engine {
                EngineKind::Cpu => {
                    ModelDevice::Cpu(CpuModel::load(&*file).map_err(|error| unservable(&stored.path, error.into()))?)
                }
                #[cfg(feature = "cuda")]
                EngineKind::Cuda => ModelDevice::Cuda(CudaModel::load(&*file, &self.cuda())?),
                EngineKind::Sim => ModelDevice::Sim(vocabulary(&served)),
                _ => unreachable!("workers of other devices, and of external engines, load no model"),
            };
            Ok(Loaded::new(served, device))
        })
        .await
    }

    fn machine(&self, key: &ClusterKey) -> EngineSettings {
        EngineSettings {
            chunk_budget: self.chunk_budget(),
            itl_max: self.worker.slo_itl.map(|ms| Duration::from_secs_f64(ms / 1e3)),
            batch_max: self.worker.batch_max,
            // This limit equals the frontend's, because all requests that a frontend admits may be placed on one worker.
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
    fn new(served: ServedModel, device: ModelDevice) -> Self {
        Self { served, device, vocabulary: OnceLock::new() }
    }

    /// Starts the engine of one worker.
    pub(super) fn start(&self, config: &EngineConfig, share: DeviceShare, key: &ClusterKey) -> Result<EngineHandle, StartError> {
        let handle = EngineHandle::start(self.engine(config, share)?, config.machine(key));
        let size = handle.info().vocab_size;
        let vocabulary = || Arc::new(tandem_grammar::Vocabulary::new(self.served.tokenizer.tokens(), size));
        Ok(handle.with_vocabulary(Arc::clone(self.vocabulary.get_or_init(vocabulary))))
    }

    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "engines share GPUs only"))]
    fn engine(&self, config: &EngineConfig, share: DeviceShare) -> Result<Box<dyn Engine>, StartError> {
        match &self.device {
            #[cfg(feature = "cuda")]
            ModelDevice::Cuda(weights) => Ok(weights.engine(config.cuda_limits(share))?),
            ModelDevice::Cpu(weights) => {
                let engine = CpuEngine::new(weights.clone(), config.cpu());
                Ok(Box::new(engine.map_err(|error| StartError::Engine(error.into()))?))
            }
            ModelDevice::Sim(vocabulary) => {
                Ok(Box::new(SimEngine::with_vocabulary(config.sim(), vocabulary.clone()).in_real_time().sampling()))
            }
        }
    }
}

/// Loads the tokenizer, the chat template and the limits of a model for a frontend. Downloads the model first if necessary.
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

/// Loads the tokenizers and chat templates of a frontend's further models, each of which is served under its own id.
pub(super) async fn load_extra(model: &ModelArgs, extra: &[ExtraModel]) -> Result<Vec<ServedModel>, StartError> {
    let mut served = Vec::with_capacity(extra.len());
    for ExtraModel { id, source } in extra {
        let model = ModelArgs { model: Some(source.clone()), ..model.clone() };
        served.push(load_served(model, Some(id.clone())).await?);
    }
    Ok(served)
}

/// Returns the models with the parsers that the settings name.
///
/// # Errors
/// Fails if the settings name a model that is not served.
pub(super) fn with_parsers(
    parsers: &ParserArgs,
    model: ServedModel,
    extra: Vec<ServedModel>,
) -> Result<(ServedModel, Vec<ServedModel>), StartError> {
    let all: Vec<&ServedModel> = std::iter::once(&model).chain(&extra).collect();
    if let Some(id) = parsers.unknown_id(&all) {
        return Err(StartError::ParserOfUnknownModel(id.to_owned()));
    }
    Ok((parsers.applied(model), extra.into_iter().map(|model| parsers.applied(model)).collect()))
}

/// Loads the tokenizer and the chat template of a model that external engines compute. Downloads them first if necessary. The model has no revision,
/// because engines do not report the revision of their weights.
pub(super) async fn load_tokenizer(store: StoreArgs, source: ModelSource, id: Option<String>) -> Result<ServedModel, StartError> {
    on_blocking_thread(move || {
        let StoredModel { path, id: stored_id, .. } = Store::new(store)?.get_tokenizer(&source)?;
        // The path of a repository's files contains the commit.
        tracing::info!(%source, path = %path.display(), "loading the tokenizer and the chat template");
        // The default id of a model is the name of its repository, as in vLLM.
        let by_default = if let ModelSource::HuggingFace { repository, .. } = source { repository } else { stored_id };
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

/// Runs `load` on another thread, which it may block: it reads large files and may download them.
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

/// Returns the vocabulary of the simulator's answers: the model's plain words, or all tokens if it has no plain words. The model's first stop token
/// ends an answer.
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
    let close = (0..size as u32).find(|token| tokenizer.bytes(*token) == b"\"");
    Vocabulary { size, context_length: served.context_length, words, end, close }
}
