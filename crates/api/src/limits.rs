//! Limits of parameters, which the checks enforce and the schemas state.

use crate::error::{Problem, RequestError};

/// The maximum number of samples of one prompt (`n`).
pub(crate) const SAMPLES_MAX: i64 = 128;
/// The maximum length of a stop string, in characters. Up to this much text may be held back while it could begin a stop string.
pub(crate) const STOP_CHARS_MAX: usize = 1024;
pub(crate) const CACHE_SALT_CHARS_MAX: usize = 256;
pub(crate) const BAD_WORD_CHARS_MAX: usize = 128;
pub(crate) const SAMPLES: Range = Range { low: 1.0, high: SAMPLES_MAX as f64, allowed: "between 1 and 128" };
pub(crate) const TEMPERATURE: Range = Range { low: 0.0, high: 2.0, allowed: "between 0 and 2" };
pub(crate) const PENALTY: Range = Range { low: -2.0, high: 2.0, allowed: "between -2 and 2" };
pub(crate) const FRACTION: Range = Range { low: 0.0, high: 1.0, allowed: "between 0 and 1" };
pub(crate) const TOP_P: Range = Range { low: 0.0, high: 1.0, allowed: "between 0 and 1" };
pub(crate) const REPETITION: Range = Range { low: f32::MIN_POSITIVE as f64, high: 100.0, allowed: "above 0 and at most 100" };
pub(crate) const TOP_K: Range = Range { low: -1.0, high: u32::MAX as f64, allowed: "-1 or 0 (off) or a number of tokens" };
/// The number of alternatives that are reported for each token.
pub(crate) const ALTERNATIVES: Range = Range { low: 0.0, high: 20.0, allowed: "between 0 and 20" };
/// The values of a priority; lower ones are served earlier.
pub(crate) const PRIORITY: Range =
    Range { low: i32::MIN as f64, high: i32::MAX as f64, allowed: "a whole number between -2147483648 and 2147483647" };
pub(crate) const BIAS: Range = Range { low: -100.0, high: 100.0, allowed: "between -100 and 100" };
/// The maximum number of entries of `chat_template_kwargs`.
pub(crate) const VARIABLES_MAX: usize = 64;
/// The variables that templates get from other fields of a request or from the model.
pub(crate) const RESERVED: [&str; 9] = [
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
pub(crate) const NAME_CHARS_MAX: usize = 256;

/// A number's allowed range, and the description of that range for errors.
pub(crate) struct Range {
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) allowed: &'static str,
}

impl Range {
    pub(crate) fn check(&self, param: &str, found: f64) -> Result<(), RequestError> {
        if (self.low..=self.high).contains(&found) {
            return Ok(());
        }
        Err(RequestError::invalid(param, Problem::Range { allowed: self.allowed, found }))
    }

    pub(crate) fn check_or(&self, param: &str, found: Option<f64>, default: f64) -> Result<f32, RequestError> {
        let found = found.unwrap_or(default);
        self.check(param, found)?;
        Ok(found as f32)
    }
}
