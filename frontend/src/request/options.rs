//! Checks the parameters that both endpoints have.

use super::{
    fields::{BoundedMap, LOGIT_BIASES_MAX, STOP_TOKENS_MAX, STOPS_MAX, Stop, Whole},
    parameters::{Common, StreamOptions},
};
use crate::{
    error::{ApiError, Problem, at_most},
    model::ServedModel,
};
use std::collections::HashMap;
use tandem_proto::v1::Sampling;

/// The maximum number of samples of one prompt (`n`).
const SAMPLES_MAX: i64 = 128;
/// The maximum length of a stop string, in bytes. Up to this much text may be held back while it could begin a stop string.
const STOP_BYTES_MAX: usize = 1024;
const CACHE_SALT_BYTES_MAX: usize = 256;

/// The checked parameters.
pub(crate) struct Options {
    pub(crate) samples: u32,
    /// The parameters of sampling. Each endpoint sets `max_tokens` and `logprobs` itself.
    pub(crate) sampling: Sampling,
    pub(crate) stop: Vec<String>,
    pub(crate) cache_salt: String,
    pub(crate) stream: Option<StreamUsage>,
}

/// Which chunks of a streamed answer have usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamUsage {
    /// Whether a last chunk without choices is sent, with the usage.
    pub(crate) at_end: bool,
    /// Whether every chunk has the usage so far.
    pub(crate) in_every_chunk: bool,
}

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

    fn check_or(&self, param: &str, found: Option<f64>, default: f64) -> Result<f32, ApiError> {
        let found = found.unwrap_or(default);
        self.check(param, found)?;
        Ok(found as f32)
    }
}

/// Checks that a number of tokens is at least `low`.
///
/// # Errors
/// The number is less than `low`.
pub(super) fn token_count(param: &str, found: i64, low: u32) -> Result<u32, ApiError> {
    let allowed = if low == 0 { "a whole number from 0 on" } else { "a whole number from 1 on" };
    match u32::try_from(found) {
        Ok(count) if count >= low => Ok(count),
        // This number exceeds every model's context, so a later check against the context refuses it.
        Err(_) if found > 0 => Ok(u32::MAX),
        _ => Err(ApiError::invalid(param, Problem::Range { allowed, found: found as f64 })),
    }
}

/// Checks the number of alternatives to be reported for each token. Both endpoints have the limit of OpenAI's chat endpoint.
///
/// # Errors
/// The number is out of range.
pub(super) fn alternatives(param: &str, found: i64) -> Result<u32, ApiError> {
    Range { low: 0.0, high: 20.0, allowed: "between 0 and 20" }.check(param, found as f64)?;
    Ok(found as u32)
}

/// Checks that `min_tokens` is not greater than the request's limit on tokens.
///
/// # Errors
/// `min_tokens` is greater than the limit.
pub(super) fn check_min_tokens(options: &Options, max_tokens: Option<u32>) -> Result<(), ApiError> {
    if max_tokens.is_some_and(|max_tokens| options.sampling.min_tokens > max_tokens) {
        return Err(ApiError::invalid("min_tokens", Problem::Rule { rule: "must not be above 'max_tokens'" }));
    }
    Ok(())
}

impl Common {
    /// Checks the parameters.
    ///
    /// # Errors
    /// A parameter is out of range.
    pub(super) fn check(self, model: &ServedModel) -> Result<Options, ApiError> {
        const PENALTY: Range = Range { low: -2.0, high: 2.0, allowed: "between -2 and 2" };
        const FRACTION: Range = Range { low: 0.0, high: 1.0, allowed: "between 0 and 1" };
        let n = self.n.map_or(1, |Whole(n)| n);
        Range { low: 1.0, high: SAMPLES_MAX as f64, allowed: "between 1 and 128" }.check("n", n as f64)?;
        let top_k = self.top_k.map_or(0, |Whole(top_k)| top_k);
        if top_k < -1 || top_k > i64::from(u32::MAX) {
            let allowed = "-1 or 0 (off) or a number of tokens";
            return Err(ApiError::invalid("top_k", Problem::Range { allowed, found: top_k as f64 }));
        }
        let temperature = Range { low: 0.0, high: 2.0, allowed: "between 0 and 2" };
        let top_p = Range { low: f64::from(f32::MIN_POSITIVE), high: 1.0, allowed: "above 0 and at most 1" };
        let repetition = Range { low: f64::from(f32::MIN_POSITIVE), high: 100.0, allowed: "above 0 and at most 100" };
        let min_tokens = self.min_tokens.map(|Whole(found)| token_count("min_tokens", found, 0)).transpose()?.unwrap_or(0);
        let sampling = Sampling {
            max_tokens: None,
            min_tokens,
            temperature: temperature.check_or("temperature", self.temperature, 1.0)?,
            top_p: top_p.check_or("top_p", self.top_p, 1.0)?,
            top_k: top_k.max(0) as u32,
            min_p: FRACTION.check_or("min_p", self.min_p, 0.0)?,
            frequency_penalty: PENALTY.check_or("frequency_penalty", self.frequency_penalty, 0.0)?,
            presence_penalty: PENALTY.check_or("presence_penalty", self.presence_penalty, 0.0)?,
            repetition_penalty: repetition.check_or("repetition_penalty", self.repetition_penalty, 1.0)?,
            logit_bias: logit_bias(self.logit_bias.unwrap_or_default(), model)?,
            // Without a client's seed, the seed is random, so that equal requests get different answers.
            seed: self.seed.map_or_else(|| uuid::Uuid::new_v4().as_u64_pair().1, |Whole(seed)| seed as u64),
            stop_token_ids: stop_tokens(self.stop_token_ids.unwrap_or_default().0, self.ignore_eos.unwrap_or(false), model)?,
            logprobs: None,
        };
        Ok(Options {
            samples: n as u32,
            sampling,
            stop: stop_strings(self.stop.unwrap_or_default())?,
            cache_salt: cache_salt(self.cache_salt)?,
            stream: stream(self.stream.unwrap_or(false), self.stream_options)?,
        })
    }
}

fn logit_bias(BoundedMap(given): BoundedMap<LOGIT_BIASES_MAX>, model: &ServedModel) -> Result<HashMap<u32, f32>, ApiError> {
    const BIAS: Range = Range { low: -100.0, high: 100.0, allowed: "between -100 and 100" };
    at_most("logit_bias", given.len(), LOGIT_BIASES_MAX, "entries")?;
    let vocab_size = model.tokenizer.vocab_size();
    let entry = |(token, bias): (String, f64)| match token.parse::<u32>() {
        Ok(id) if (id as usize) < vocab_size && !token.starts_with('+') => {
            BIAS.check(&format!("logit_bias.{id}"), bias).map(|()| (id, bias as f32))
        }
        _ => Err(ApiError::invalid("logit_bias", Problem::Vocabulary { vocab_size })),
    };
    given.into_iter().map(entry).collect()
}

fn stop_tokens(given: Vec<i64>, ignore_eos: bool, model: &ServedModel) -> Result<Vec<u32>, ApiError> {
    at_most("stop_token_ids", given.len(), STOP_TOKENS_MAX, "entries")?;
    let vocab_size = model.tokenizer.vocab_size();
    let mut tokens = if ignore_eos { Vec::new() } else { model.stop_tokens.clone() };
    for id in given {
        match u32::try_from(id) {
            Ok(id) if (id as usize) < vocab_size => tokens.push(id),
            _ => return Err(ApiError::invalid("stop_token_ids", Problem::Vocabulary { vocab_size })),
        }
    }
    Ok(tokens)
}

fn stop_strings(Stop(given): Stop) -> Result<Vec<String>, ApiError> {
    at_most("stop", given.len(), STOPS_MAX, "strings")?;
    if given.iter().any(String::is_empty) {
        return Err(ApiError::invalid("stop", Problem::Rule { rule: "must not hold an empty string" }));
    }
    let longest = given.iter().map(String::len).max().unwrap_or(0);
    at_most("stop", longest, STOP_BYTES_MAX, "bytes in each string").map(|()| given)
}

fn cache_salt(given: Option<String>) -> Result<String, ApiError> {
    let Some(salt) = given else { return Ok(String::new()) };
    if salt.is_empty() {
        return Err(ApiError::invalid("cache_salt", Problem::Empty));
    }
    at_most("cache_salt", salt.len(), CACHE_SALT_BYTES_MAX, "bytes").map(|()| salt)
}

fn stream(stream: bool, options: Option<StreamOptions>) -> Result<Option<StreamUsage>, ApiError> {
    if !stream && options.is_some() {
        return Err(ApiError::invalid("stream_options", Problem::Rule { rule: "is only allowed when 'stream' is true" }));
    }
    let options = options.unwrap_or_default();
    let at_end = options.include_usage.unwrap_or(false);
    // As in vLLM, `continuous_usage_stats` has an effect only with `include_usage`.
    let in_every_chunk = at_end && options.continuous_usage_stats.unwrap_or(false);
    Ok(stream.then_some(StreamUsage { at_end, in_every_chunk }))
}
