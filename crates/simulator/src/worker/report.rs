//! What a worker's state looks like from outside.

use super::{SimulatedEngine, SimulatedSequence};
use tandem_kv::Load;
use tandem_router::WorkerRole;

impl SimulatedEngine {
    /// Returns whether the worker takes new requests in this role.
    pub(crate) fn serves(&self, role: WorkerRole) -> bool {
        self.present && !self.drains && self.role == role
    }

    /// Returns whether the worker has no request, and expects none.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty() && self.sending.is_empty() && self.expected == 0
    }

    pub(crate) fn load(&self) -> Load {
        let counts = self.cache.counts();
        let pending = self.waiting.iter().filter(|sequence| !sequence.received).map(|sequence| sequence.own);
        let running = self.running.iter().filter(|sequence| !sequence.is_decoding()).map(SimulatedSequence::remaining);
        let has_prefilled = self.long_steps > 0;
        let rate = self.device.prefill_tokens_per_second / self.slower;
        Load {
            running_sequences: self.running.len() as u32,
            waiting_requests: self.waiting.len() as u32 + self.expected,
            pending_prefill_tokens: pending.chain(running).sum(),
            free_blocks: counts.free,
            cached_blocks: counts.cached,
            in_use_blocks: counts.in_use,
            prefill_tokens_per_second: if has_prefilled { rate } else { 0.0 },
            prefill_measurements: self.long_steps,
            prefill_fixed_ms: if has_prefilled { self.device.prefill_step.as_secs_f64() * 1e3 * self.slower } else { 0.0 },
            decode_step_ms: self.decode_step_ms,
            prompt_share: self.prompt_share,
            ..Default::default()
        }
    }
}
