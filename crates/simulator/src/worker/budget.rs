//! Computes how many prompt tokens a step has if it also continues answers, as the engine does (docs/adr/045-time-between-tokens.md).

use super::SimulatedEngine;

/// The minimum number of prompt tokens in a step, as in the engine.
const PREFILL_TOKENS_MIN: u64 = 16;

/// The maximum time of a step with prompt tokens, as a multiple of the time of a step without prompt tokens, as in the engine.
const ITL_STEPS: f64 = 16.0;

/// The weight of the latest step in the mean share of prompt tokens, as in the engine.
const SHARE_WEIGHT: f64 = 0.05;

impl SimulatedEngine {
    /// Returns how many prompt tokens a step computes that also continues `decoding` sequences, as in the engine.
    pub(super) fn prompt_budget(&self, decoding: u64) -> u64 {
        let (device, decode) = (&self.device, self.decode_seconds(decoding));
        let other = decode + device.prefill_step.as_secs_f64();
        let seconds = (decode * ITL_STEPS - other).max(other);
        let is_limited = decoding > 0 && decode > 0.0;
        let within_itl = if is_limited { (seconds * device.prefill_tokens_per_second) as u64 } else { u64::MAX };
        within_itl.min(device.step_tokens.saturating_sub(decoding)).max(PREFILL_TOKENS_MIN)
    }

    /// Returns the time of a step that only continues `decoding` sequences, in seconds.
    fn decode_seconds(&self, decoding: u64) -> f64 {
        (self.device.decode_step + self.device.decode_sequence * decoding as u32).as_secs_f64()
    }

    /// Adds a step that has prompt tokens and continues `decoding` sequences to the mean share of prompt tokens, as the engine does.
    pub(super) fn record_share(&mut self, decoding: u64) {
        let share = if decoding == 0 {
            1.0
        } else {
            let seconds = self.prompt_budget(decoding) as f64 / self.device.prefill_tokens_per_second;
            seconds / (seconds + self.device.prefill_step.as_secs_f64() + self.decode_seconds(decoding))
        };
        let before = if self.prompt_share > 0.0 { self.prompt_share } else { share };
        self.prompt_share = before + SHARE_WEIGHT * (share - before);
    }
}
