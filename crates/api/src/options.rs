//! Checks the parameters that all endpoints have.

use super::{
    constraint::{self, Stated},
    fields::{ALLOWED_TOKENS_MAX, BAD_WORDS_MAX, Bounded, BoundedMap, LOGIT_BIASES_MAX, STOP_TOKENS_MAX, STOPS_MAX, Stop, Whole},
    limits::{
        ALTERNATIVES, BAD_WORD_CHARS_MAX, BIAS, CACHE_SALT_CHARS_MAX, FRACTION, PENALTY, PRIORITY, REPETITION, SAMPLES,
        STOP_CHARS_MAX, TEMPERATURE, TOP_K, TOP_P,
    },
    names::ParamNames,
    parameters::{Common, StreamOptions},
};
use crate::error::{Problem, RequestError, at_most};
use std::collections::HashMap;
use tandem_grammar::Kind;
use tandem_kv::TokenId;
use tandem_proto::v1::{BadWord, Sampling, TokenSequence};
use tandem_text::{EncodeError, ServedModel, Special};

/// How tokens become text.
#[derive(Clone, Copy, Debug, Default)]
pub struct TextOptions {
    /// Whether the text includes the stop string or stop token that ends it.
    pub stop_included: bool,
    /// Whether the text includes special tokens.
    pub special_tokens: bool,
    /// Whether the answer has no text. Stop strings are found nevertheless.
    pub absent: bool,
}

/// Whether a token's logprobs are sent with its text or with its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogprobsWith {
    /// With the token's text, so that a stop string and a stop token have none.
    Text,
    /// With the token's id, so that every generated token has them.
    Tokens,
}

/// The checked parameters.
#[derive(Default)]
pub struct Options {
    /// The number of answers to each prompt.
    pub samples: u32,
    /// The parameters of sampling. Each endpoint sets `max_tokens` and `logprobs` itself.
    pub sampling: Sampling,
    /// Strings that end an answer.
    pub stop: Vec<String>,
    /// Isolates the cache: only requests with the same salt share KV.
    pub cache_salt: String,
    /// The usage in a streamed answer; `None` if the answer is not streamed.
    pub stream: Option<StreamUsage>,
    /// How tokens become text.
    pub text: TextOptions,
    /// Whether answers have the ids of the prompt's and the generated tokens (`return_token_ids`).
    pub token_ids: bool,
    /// Whether logprobs name tokens by their ids (`return_tokens_as_token_ids`).
    pub tokens_as_ids: bool,
    /// The number of alternatives that are reported for each token of the prompt (`prompt_logprobs`); `None`: the prompt's logprobs are not
    /// reported.
    pub prompt_logprobs: Option<u32>,
    /// How a prompt that is too long is shortened.
    pub truncation: Option<Truncation>,
    /// The priority that the client asks for in the body; `None`: it asks for none there.
    pub priority: Option<i32>,
    /// The constraint on the text, which `sampling` has as well.
    pub constraint: Option<Stated>,
}

impl Options {
    /// Whether nothing but its limit on tokens can end a sample.
    pub fn ends_at_limit(&self) -> bool {
        self.sampling.stop_token_ids.is_empty() && self.stop.is_empty() && self.sampling.constraint.is_none()
    }

    /// Sets the constraint on the text.
    ///
    /// # Errors
    /// There is another constraint.
    pub fn constrain(&mut self, stated: Stated) -> Result<(), RequestError> {
        if let Some(other) = &self.constraint {
            return Err(constraint::conflict(&stated.param, &other.param));
        }
        stated.set(&mut self.sampling);
        self.constraint = Some(stated);
        Ok(())
    }

    /// Leaves the text free up to and including the marker, such as the end of the reasoning. Has no effect without a constraint.
    pub fn begin_constraint_after(&mut self, marker: &str) {
        // The inputs of calls are constrained wherever a call begins.
        let stated = self.constraint.as_mut().filter(|stated| !matches!(stated.constraint.kind, Kind::CallInputs(_)));
        if let Some(stated) = stated {
            stated.constraint.begins_after = Some(marker.to_owned());
            stated.set(&mut self.sampling);
        }
    }
}

/// How a prompt that is too long is shortened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Truncation {
    /// The number of tokens that remain; `None`: as many as fit into the context.
    tokens: Option<usize>,
    /// Which end of the prompt is kept: its first tokens if true, its last ones if false.
    keeps_first: bool,
}

impl Truncation {
    /// Shortens a prompt. `fitting` tokens fit into the context. Returns whether tokens were removed.
    pub fn apply(self, prompt: &mut Vec<TokenId>, fitting: usize) -> bool {
        let surplus = prompt.len().saturating_sub(self.tokens.unwrap_or(fitting));
        if self.keeps_first {
            prompt.truncate(prompt.len() - surplus);
        } else {
            prompt.drain(..surplus);
        }
        surplus > 0
    }
}

/// Which chunks of a streamed answer have usage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamUsage {
    /// Whether a last chunk without choices is sent, with the usage.
    pub at_end: bool,
    /// Whether every chunk has the usage so far.
    pub in_every_chunk: bool,
}

/// Checks that a number of tokens is at least `low`, which is 0 or 1.
///
/// # Errors
/// The number is less than `low`, or greater than any context.
pub(crate) fn token_count(param: &str, found: i64, low: u32) -> Result<u32, RequestError> {
    let allowed = match low {
        _ if found > 0 => "at most 4294967295",
        0 => "a whole number from 0 on",
        _ => "a whole number from 1 on",
    };
    let count = u32::try_from(found).ok().filter(|count| *count >= low);
    count.ok_or_else(|| RequestError::invalid(param, Problem::Range { allowed, found: found as f64 }))
}

/// Checks the number of alternatives to be reported for each token. All endpoints have the limit of OpenAI's chat endpoint.
///
/// # Errors
/// The number is out of range.
pub(crate) fn alternatives(param: &str, found: i64) -> Result<u32, RequestError> {
    ALTERNATIVES.check(param, found as f64)?;
    Ok(found as u32)
}

/// Refuses a list of tokens for logprobs without a request for logprobs.
///
/// # Errors
/// The request has the list, but does not request logprobs.
pub(crate) fn check_logprob_tokens(options: &Options) -> Result<(), RequestError> {
    if options.sampling.logprobs.is_none() && !options.sampling.logprob_token_ids.is_empty() {
        return Err(RequestError::invalid("logprob_token_ids", Problem::Rule { rule: "is only allowed with 'logprobs'" }));
    }
    Ok(())
}

/// Refuses a request for the prompt's logprobs in a streamed answer, which has no field for them.
///
/// # Errors
/// The answer is streamed, and the prompt's logprobs are requested.
pub(crate) fn check_prompt_logprobs(prompt_logprobs: Option<u32>, stream: Option<StreamUsage>) -> Result<(), RequestError> {
    if stream.is_some() && prompt_logprobs.is_some() {
        return Err(RequestError::invalid("prompt_logprobs", Problem::Rule { rule: "is only allowed when 'stream' is false" }));
    }
    Ok(())
}

/// Checks that `min_tokens` is not greater than the request's limit on tokens.
///
/// # Errors
/// `min_tokens` is greater than the limit.
pub(crate) fn check_min_tokens(options: &Options, max_tokens: Option<u32>) -> Result<(), RequestError> {
    if max_tokens.is_some_and(|max_tokens| options.sampling.min_tokens > max_tokens) {
        return Err(RequestError::invalid("min_tokens", Problem::Rule { rule: "must not be above 'max_tokens'" }));
    }
    Ok(())
}

impl Options {
    /// Refuses parameters whose results the Responses and Messages APIs cannot express.
    ///
    /// # Errors
    /// Such a parameter is set.
    pub(crate) fn check_one_text(&self) -> Result<(), RequestError> {
        const RULE: &str = "is not supported by this path; use /v1/chat/completions";
        let requested = [
            ("n", self.samples != 1),
            ("prompt_logprobs", self.prompt_logprobs.is_some()),
            ("return_token_ids", self.token_ids),
            ("return_tokens_as_token_ids", self.tokens_as_ids),
        ];
        match requested.into_iter().find(|(_, requested)| *requested) {
            Some((param, _)) => Err(RequestError::invalid(param, Problem::Rule { rule: RULE })),
            None => Ok(()),
        }
    }
}

impl Common {
    /// Checks the parameters.
    ///
    /// # Errors
    /// A parameter is out of range.
    pub(crate) fn check(mut self, names: &ParamNames, model: &ServedModel) -> Result<Options, RequestError> {
        let n = self.n.map_or(1, |Whole(n)| n);
        SAMPLES.check("n", n as f64)?;
        let top_k = self.top_k.map_or(0, |Whole(top_k)| top_k);
        TOP_K.check("top_k", top_k as f64)?;
        let min_tokens = self.min_tokens.map(|Whole(found)| token_count("min_tokens", found, 0)).transpose()?.unwrap_or(0);
        let constraint = self.constraint(names);
        let sampling = Sampling {
            max_tokens: None,
            min_tokens,
            temperature: TEMPERATURE.check_or("temperature", self.temperature, 1.0)?,
            // 0 selects the likeliest token, as the smallest positive value does. vLLM refuses 0.
            top_p: TOP_P.check_or("top_p", self.top_p, 1.0)?.max(f32::MIN_POSITIVE),
            top_k: top_k.max(0) as u32,
            min_p: FRACTION.check_or("min_p", self.min_p, 0.0)?,
            frequency_penalty: PENALTY.check_or("frequency_penalty", self.frequency_penalty, 0.0)?,
            presence_penalty: PENALTY.check_or("presence_penalty", self.presence_penalty, 0.0)?,
            repetition_penalty: REPETITION.check_or("repetition_penalty", self.repetition_penalty, 1.0)?,
            logit_bias: logit_bias(self.logit_bias.unwrap_or_default(), model)?,
            // Without a client's seed, the seed is random, so that equal requests get different answers.
            seed: self.seed.map_or_else(|| uuid::Uuid::new_v4().as_u64_pair().1, |Whole(seed)| seed as u64),
            seed_is_given: self.seed.is_some(),
            stop_token_ids: stop_tokens(self.stop_token_ids.unwrap_or_default(), self.ignore_eos, model)?,
            logprobs: None,
            allowed_token_ids: self.allowed_token_ids.map_or_else(|| Ok(Vec::new()), |given| allowed_tokens(given, model))?,
            bad_words: bad_words(self.bad_words.unwrap_or_default(), model)?,
            logprob_token_ids: token_ids("logprob_token_ids", self.logprob_token_ids.unwrap_or_default(), model)?,
            constraint: None,
            call_inputs: Vec::new(),
        };
        let stop = stop_strings(names.stop, self.stop.unwrap_or_default())?;
        let text = TextOptions {
            stop_included: self.include_stop_str_in_output.unwrap_or(false),
            special_tokens: !self.skip_special_tokens.unwrap_or(true),
            absent: !self.detokenize.unwrap_or(true),
        };
        let stream = stream(self.stream, self.stream_options)?;
        let prompt_logprobs = self.prompt_logprobs.map(|Whole(found)| alternatives("prompt_logprobs", found)).transpose()?;
        check_prompt_logprobs(prompt_logprobs, stream)?;
        let mut options = Options {
            samples: n as u32,
            sampling,
            stop,
            cache_salt: cache_salt(self.cache_salt)?,
            stream,
            text,
            token_ids: self.return_token_ids.unwrap_or(false),
            tokens_as_ids: self.return_tokens_as_token_ids.unwrap_or(false),
            prompt_logprobs,
            truncation: truncation(self.truncate_prompt_tokens, self.truncation_side)?,
            priority: priority(self.priority)?,
            constraint: None,
        };
        if let Some(stated) = constraint? {
            options.constrain(stated)?;
        }
        Ok(options)
    }
}

fn logit_bias(BoundedMap(given): BoundedMap<LOGIT_BIASES_MAX>, model: &ServedModel) -> Result<HashMap<u32, f32>, RequestError> {
    at_most("logit_bias", given.len(), LOGIT_BIASES_MAX, "entries")?;
    let vocab_size = model.tokenizer.vocab_size();
    let entry = |(token, bias): (String, f64)| match token.parse::<u32>() {
        Ok(id) if (id as usize) < vocab_size && !token.starts_with('+') => {
            BIAS.check(&format!("logit_bias.{id}"), bias).map(|()| (id, bias as f32))
        }
        _ => Err(RequestError::invalid("logit_bias", Problem::Vocabulary { vocab_size })),
    };
    given.into_iter().map(entry).collect()
}

/// Checks a list of token ids.
fn token_ids<const MAX: usize>(
    param: &str,
    Bounded(given): Bounded<Whole, MAX>,
    model: &ServedModel,
) -> Result<Vec<u32>, RequestError> {
    at_most(param, given.len(), MAX, "entries")?;
    let vocab_size = model.tokenizer.vocab_size();
    let known = |Whole(id): Whole| u32::try_from(id).ok().filter(|id| (*id as usize) < vocab_size);
    let ids: Option<Vec<_>> = given.into_iter().map(known).collect();
    ids.ok_or_else(|| RequestError::invalid(param, Problem::Vocabulary { vocab_size }))
}

fn stop_tokens(
    given: Bounded<Whole, STOP_TOKENS_MAX>,
    ignore_eos: Option<bool>,
    model: &ServedModel,
) -> Result<Vec<u32>, RequestError> {
    let own = if ignore_eos == Some(true) { &[] } else { model.stop_tokens.as_slice() };
    Ok([own, &token_ids("stop_token_ids", given, model)?].concat())
}

fn allowed_tokens(given: Bounded<Whole, ALLOWED_TOKENS_MAX>, model: &ServedModel) -> Result<Vec<u32>, RequestError> {
    let mut tokens = token_ids("allowed_token_ids", given, model)?;
    if tokens.is_empty() {
        return Err(RequestError::invalid("allowed_token_ids", Problem::Empty));
    }
    tokens.sort_unstable();
    tokens.dedup();
    Ok(tokens)
}

/// Encodes `bad_words`. As in vLLM, the tokens that a word has at the beginning of a text are barred. Its tokens after a space are barred
/// as well if they are equally many.
fn bad_words(Bounded(given): Bounded<String, BAD_WORDS_MAX>, model: &ServedModel) -> Result<Vec<BadWord>, RequestError> {
    at_most("bad_words", given.len(), BAD_WORDS_MAX, "strings")?;
    let longest = given.iter().map(|text| text.chars().count()).max().unwrap_or(0);
    at_most("bad_words", longest, BAD_WORD_CHARS_MAX, "characters in each string")?;
    let encode = |text: &str| model.tokenizer.encode(text, Special::Parsed).map_err(|_: EncodeError| RequestError::Failed);
    let word = |text: String| {
        let trimmed = Some(text.trim_start()).filter(|trimmed| !trimmed.is_empty()).unwrap_or(&text);
        let plain = encode(trimmed)?;
        let Some(first) = plain.first() else {
            return Err(RequestError::invalid("bad_words", Problem::Rule { rule: "must not contain a string without tokens" }));
        };
        let after_space = encode(&format!(" {trimmed}"))?;
        let differs = after_space.len() == plain.len() && after_space.first() != Some(first);
        let forms = [Some(plain), differs.then_some(after_space)].into_iter().flatten();
        Ok(BadWord { text, forms: forms.map(|tokens| TokenSequence { tokens }).collect() })
    };
    given.into_iter().map(word).collect()
}

fn truncation(tokens: Option<Whole>, side: Option<String>) -> Result<Option<Truncation>, RequestError> {
    let keeps_first = match side.as_deref() {
        None | Some("left") => false,
        Some("right") => true,
        Some(_) => return Err(RequestError::invalid("truncation_side", Problem::Choice { allowed: "'left', 'right'" })),
    };
    let tokens = match tokens {
        None => return Ok(None),
        Some(Whole(-1)) => None,
        Some(Whole(found)) if found >= 1 => Some(usize::try_from(found).unwrap_or(usize::MAX)),
        Some(Whole(found)) => {
            let allowed = "-1 (as many tokens as fit) or a number of tokens";
            return Err(RequestError::invalid("truncate_prompt_tokens", Problem::Range { allowed, found: found as f64 }));
        }
    };
    Ok(Some(Truncation { tokens, keeps_first }))
}

fn stop_strings(param: &str, Stop(given): Stop) -> Result<Vec<String>, RequestError> {
    at_most(param, given.len(), STOPS_MAX, "strings")?;
    if given.iter().any(String::is_empty) {
        return Err(RequestError::invalid(param, Problem::Rule { rule: "must not hold an empty string" }));
    }
    let longest = given.iter().map(|text| text.chars().count()).max().unwrap_or(0);
    at_most(param, longest, STOP_CHARS_MAX, "characters in each string").map(|()| given)
}

pub(crate) fn priority(given: Option<Whole>) -> Result<Option<i32>, RequestError> {
    let Some(Whole(found)) = given else { return Ok(None) };
    PRIORITY.check("priority", found as f64).map(|()| Some(found as i32))
}

/// Checks the length of a client's `cache_salt`; empty if there is none.
///
/// # Errors
/// It is given and empty, or it is too long.
pub fn cache_salt(given: Option<String>) -> Result<String, RequestError> {
    let Some(salt) = given else { return Ok(String::new()) };
    if salt.is_empty() {
        return Err(RequestError::invalid("cache_salt", Problem::Empty));
    }
    at_most("cache_salt", salt.chars().count(), CACHE_SALT_CHARS_MAX, "characters").map(|()| salt)
}

pub(crate) fn stream(stream: Option<bool>, options: Option<StreamOptions>) -> Result<Option<StreamUsage>, RequestError> {
    let is_streamed = stream == Some(true);
    if !is_streamed && options.is_some() {
        return Err(RequestError::invalid("stream_options", Problem::Rule { rule: "is only allowed when 'stream' is true" }));
    }
    let options = options.unwrap_or_default();
    let at_end = options.include_usage.unwrap_or(false);
    // As in vLLM, `continuous_usage_stats` has an effect only with `include_usage`.
    let in_every_chunk = at_end && options.continuous_usage_stats.unwrap_or(false);
    Ok(is_streamed.then_some(StreamUsage { at_end, in_every_chunk }))
}
