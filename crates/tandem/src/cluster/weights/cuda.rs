//! The settings of GPUs (`--engine cuda`).

use super::{DeviceShare, EngineConfig};
use tandem_devices::cuda::{CudaLimits, CudaSettings};

impl EngineConfig {
    pub(super) fn cuda(&self) -> CudaSettings {
        // Without a cache directory the kernels are compiled at every start.
        let kernels_dir = directories::ProjectDirs::from("", "", "tandem").map(|user| user.cache_dir().join("kernels"));
        CudaSettings {
            device: self.worker.device,
            gpus: self.worker.tp,
            block_size: self.block_size,
            kernels_dir,
            tuning: !self.worker.no_gpu_tuning,
        }
    }

    pub(super) fn cuda_limits(&self, share: DeviceShare) -> CudaLimits {
        /// A step with a full batch has at least this many prompt tokens, however small the budget.
        const PREFILL_WITH_FULL_BATCH: u32 = 16;
        let batch_max = self.worker.batch_max;
        CudaLimits {
            capacity_blocks: self.capacity_blocks(),
            engines: share.engines,
            step_tokens_max: self.chunk_budget().max(batch_max + PREFILL_WITH_FULL_BATCH),
            sequences_max: batch_max,
            urgent: share.urgent,
        }
    }
}
