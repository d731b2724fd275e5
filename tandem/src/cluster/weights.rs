//! What all workers of a cluster share: one copy of the weights, and what the frontend reads from the same file.

use super::StartError;
use crate::{model::StoredModel, settings::UpSettings};
use std::{sync::Arc, time::Duration};
use tandem_engine::{
    Engine,
    cpu::{CpuEngine, CpuModel, CpuSettings},
    sim::{SimEngine, SimSettings},
};
use tandem_frontend::ServedModel;
use tandem_model::Gguf;

/// A model that is ready to be served.
pub(super) struct Loaded {
    pub(super) served: ServedModel,
    /// Part of the cache's namespace: another file under the same name shares no KV.
    pub(super) revision: String,
    /// None: the simulator has no weights.
    weights: Option<Arc<CpuModel>>,
}

impl Loaded {
    /// Reads the model's file. Takes seconds for a large one.
    pub(super) fn gguf(model: StoredModel, served_name: Option<String>) -> Result<Self, StartError> {
        let name = served_name.unwrap_or(model.id);
        let unservable = |cause| StartError::Unservable { path: model.path.clone(), cause };
        let file = Gguf::open(&model.path).map_err(|cause| unservable(cause.into()))?;
        let served = ServedModel::from_gguf(name, &file).map_err(|cause| unservable(cause.into()))?;
        let weights = CpuModel::load(&file).map_err(|cause| unservable(cause.into()))?;
        Ok(Self { served, revision: file.revision(), weights: Some(weights) })
    }

    /// The simulator's.
    pub(super) fn sim(served_name: Option<String>) -> Self {
        let served = ServedModel::sim(served_name.unwrap_or_else(|| "sim".to_owned()));
        Self { served, revision: "sim".to_owned(), weights: None }
    }

    /// A device for one worker.
    pub(super) fn engine(&self, settings: &UpSettings) -> Result<Box<dyn Engine>, StartError> {
        let (block_size, capacity_blocks) = (settings.block_size, settings.capacity_blocks());
        match &self.weights {
            Some(weights) => {
                let engine = CpuEngine::new(weights.clone(), CpuSettings { block_size, capacity_blocks });
                Ok(Box::new(engine.map_err(|cause| StartError::Engine(cause.into()))?))
            }
            None => Ok(Box::new(SimEngine::new(sim_settings(settings)))),
        }
    }
}

fn sim_settings(settings: &UpSettings) -> SimSettings {
    let sim = &settings.sim;
    let milliseconds = |ms: f64| Duration::from_secs_f64(ms / 1e3);
    SimSettings {
        block_size: settings.block_size,
        capacity_blocks: settings.capacity_blocks(),
        prefill_tokens_per_second: sim.sim_prefill_tokens_per_second,
        prefill_overhead: milliseconds(sim.sim_prefill_overhead_ms),
        decode_step: milliseconds(sim.sim_decode_step_ms),
        decode_per_sequence: milliseconds(sim.sim_decode_per_sequence_ms),
        kv_bytes_per_token: sim.sim_kv_bytes_per_token,
        transfer_bytes_per_second: sim.sim_transfer_bytes_per_second,
        speedup: sim.sim_speedup,
    }
}
