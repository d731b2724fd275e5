//! How fast the device has been.

use tandem_kv::StepStats;

/// Of the latest steps: ratios of weighted sums that fade.
#[derive(Debug, Default)]
pub(super) struct Rates {
    prefill_tokens: f64,
    prefill_seconds: f64,
    decode_steps: f64,
    decode_seconds: f64,
}

/// What is left of a sum after another step of its kind.
const FADE: f64 = 0.9;

impl Rates {
    /// Only steps of one kind tell that kind's rate. A step of prompts weighs as much as it has tokens, and fades the others by its
    /// part of a full one: steps of a few new tokens after long cached prefixes take a step's fixed time, and say little of what a
    /// prompt's worth of tokens will take.
    pub fn measure(&mut self, stats: &StepStats, chunk_budget: u32) {
        let seconds = stats.duration.as_secs_f64();
        match (stats.prefill_tokens, stats.decode_tokens) {
            (0, _) => {
                self.decode_steps = self.decode_steps * FADE + 1.0;
                self.decode_seconds = self.decode_seconds * FADE + seconds;
            }
            (tokens, 0) => {
                let tokens = f64::from(tokens);
                let fade = FADE.powf(tokens / f64::from(chunk_budget));
                self.prefill_tokens = self.prefill_tokens * fade + tokens * tokens;
                self.prefill_seconds = self.prefill_seconds * fade + tokens * seconds;
            }
            _ => {}
        }
    }

    /// 0 before the first measurement.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        if self.prefill_seconds > 0.0 { self.prefill_tokens / self.prefill_seconds } else { 0.0 }
    }

    /// 0 before the first measurement.
    pub fn decode_step_ms(&self) -> f64 {
        if self.decode_steps > 0.0 { self.decode_seconds / self.decode_steps * 1e3 } else { 0.0 }
    }
}
