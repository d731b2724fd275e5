//! Limits of parameters, which the checks enforce and the schemas state.

use crate::error::{ApiError, Problem};

/// The maximum number of samples of one prompt (`n`).
pub(super) const SAMPLES_MAX: i64 = 128;
/// The maximum length of a stop string, in characters. Up to this much text may be held back while it could begin a stop string.
pub(super) const STOP_CHARS_MAX: usize = 1024;
pub(super) const CACHE_SALT_CHARS_MAX: usize = 256;
pub(super) const BAD_WORD_CHARS_MAX: usize = 128;
pub(super) const SAMPLES: Range = Range { low: 1.0, high: SAMPLES_MAX as f64, allowed: "between 1 and 128" };
pub(super) const TEMPERATURE: Range = Range { low: 0.0, high: 2.0, allowed: "between 0 and 2" };
pub(super) const PENALTY: Range = Range { low: -2.0, high: 2.0, allowed: "between -2 and 2" };
pub(super) const FRACTION: Range = Range { low: 0.0, high: 1.0, allowed: "between 0 and 1" };
pub(super) const TOP_P: Range = Range { low: f32::MIN_POSITIVE as f64, high: 1.0, allowed: "above 0 and at most 1" };
pub(super) const REPETITION: Range = Range { low: f32::MIN_POSITIVE as f64, high: 100.0, allowed: "above 0 and at most 100" };
pub(super) const TOP_K: Range = Range { low: -1.0, high: u32::MAX as f64, allowed: "-1 or 0 (off) or a number of tokens" };
/// The number of alternatives that are reported for each token.
pub(super) const ALTERNATIVES: Range = Range { low: 0.0, high: 20.0, allowed: "between 0 and 20" };
/// The values of a priority; lower ones are served earlier.
pub(super) const PRIORITY: Range =
    Range { low: i32::MIN as f64, high: i32::MAX as f64, allowed: "a whole number between -2147483648 and 2147483647" };
pub(super) const BIAS: Range = Range { low: -100.0, high: 100.0, allowed: "between -100 and 100" };
/// The maximum number of entries of `chat_template_kwargs`.
pub(super) const VARIABLES_MAX: usize = 64;
/// The variables that templates get from other fields of a request or from the model.
pub(super) const RESERVED: [&str; 9] = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
    "bos_token",
    "eos_token",
];
/// The maximum length of a tool's name, in characters.
pub(super) const NAME_CHARS_MAX: usize = 256;

/// A number's allowed range, and the description of that range for errors.
pub(super) struct Range {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) allowed: &'static str,
}

impl Range {
    pub(super) fn check(&self, param: &str, found: f64) -> Result<(), ApiError> {
        if (self.low..=self.high).contains(&found) {
            return Ok(());
        }
        Err(ApiError::invalid(param, Problem::Range { allowed: self.allowed, found }))
    }

    pub(super) fn check_or(&self, param: &str, found: Option<f64>, default: f64) -> Result<f32, ApiError> {
        let found = found.unwrap_or(default);
        self.check(param, found)?;
        Ok(found as f32)
    }
}
