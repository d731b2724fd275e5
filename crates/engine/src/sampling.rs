//! Samples a token from logits. The token depends only on the logits, the sample's history, its seed and its position.
//!
//! The random number of a position depends only on the seed and the position, so a sequence that was preempted, migrated or batched differently
//! samples the same tokens. Exponentials are computed from products and sums in a fixed order, in this module or in `libm`, so they have the same
//! bits on every machine.

mod changes;
mod constrained;
mod masks;
mod request;

pub use changes::Adjustment;
pub(crate) use constrained::{Prepared, compile, refusal as constraint_refusal};
#[cfg(test)]
pub(crate) use masks::MaskResult;
pub(crate) use masks::MaskThreads;
pub use request::{SampleRequest, SampledToken};

use crate::Refusal;
use changes::Changes;
use constrained::Constrained;
use std::borrow::Cow;
use std::cmp::Ordering;
use std::{collections::HashMap, sync::Arc};
use tandem_grammar::{Constraint, Mask, MatchError, Vocabulary};
use tandem_kv::{TokenId, mix};

/// Sampling parameters. The defaults are those of OpenAI's API.
#[derive(Clone, Debug)]
pub struct Sampling {
    /// The maximum number of new tokens. 0 generates nothing; `None` generates until the context or the cache is full.
    pub max_tokens: Option<u32>,
    /// No stop token is sampled before this number of new tokens.
    pub min_tokens: u32,
    /// Logits are divided by this number. If it is 0, the likeliest token is always chosen.
    pub temperature: f32,
    /// Only the likeliest tokens that together reach this probability are kept.
    pub top_p: f32,
    /// This many of the likeliest tokens are kept; 0 keeps all tokens.
    pub top_k: u32,
    /// Only tokens whose probability is at least this fraction of the likeliest token's probability are kept.
    pub min_p: f32,
    /// This number is subtracted from a token's logit once for every time the token was generated.
    pub frequency_penalty: f32,
    /// This number is subtracted from a token's logit if the token was generated at least once.
    pub presence_penalty: f32,
    /// Positive logits of tokens in the prompt or the output are divided by this number, and negative ones are multiplied by it. 1 disables the
    /// penalty.
    pub repetition_penalty: f32,
    /// The number that is added to the logit of each listed token.
    pub logit_bias: HashMap<TokenId, f32>,
    /// The seed of the random numbers. The random number for each token depends on the seed and on the token's position.
    pub seed: u64,
    /// Whether the client has chosen the seed, so that an equal request must get the same answer.
    pub seed_is_given: bool,
    /// The tokens that end the sample.
    pub stop_token_ids: Vec<TokenId>,
    /// If set, the logprobs of each sampled token and of this many alternatives are returned.
    pub logprobs: Option<u32>,
    /// The constraint on the generated text. Where the text is complete, a stop token may end it; where nothing can follow, the sample ends.
    pub constraint: Option<Constraint>,
    /// The only tokens that may be sampled. If the list is empty, all tokens may be sampled.
    pub allowed_token_ids: Arc<[TokenId]>,
    /// The texts that the sample must not contain.
    pub bad_words: Arc<[BadWord]>,
    /// The tokens that are returned as alternatives, in this order. If the list is empty, the likeliest tokens are returned.
    pub logprob_token_ids: Vec<TokenId>,
}

/// A text that a sample must not contain.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BadWord {
    /// The text as the client has sent it, for external engines that have a tokenizer.
    pub text: String,
    /// The sequences of tokens that have this text. The last token of a sequence is not sampled after the other ones.
    pub forms: Vec<Vec<TokenId>>,
}

/// A token and the natural logarithm of its probability. The probability does not include temperature, penalties, biases and constraints.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The id of the token.
    pub token: TokenId,
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
}

/// The logprob of a sampled token, and the logprobs of alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The natural logarithm of the sampled token's probability.
    pub logprob: f32,
    /// The alternatives, the likeliest first unless the request names the tokens to return.
    pub top: Vec<TokenLogprob>,
}

impl Sampling {
    /// Returns the parameters for the rest of a sample that has this many tokens. An external engine always generates one, so at least one is
    /// allowed.
    #[must_use]
    pub fn of_sample(&self, sample: u32, generated: u32) -> Self {
        let max_tokens = self.max_tokens.map(|max| max.saturating_sub(generated).max(1));
        let min_tokens = self.min_tokens.saturating_sub(generated).min(max_tokens.unwrap_or(u32::MAX));
        Self { seed: self.seed.wrapping_add(sample.into()), min_tokens, max_tokens, ..self.clone() }
    }
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            max_tokens: Some(16),
            min_tokens: 0,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: HashMap::new(),
            seed: 0,
            seed_is_given: false,
            stop_token_ids: Vec::new(),
            logprobs: None,
            constraint: None,
            allowed_token_ids: Arc::default(),
            bad_words: Arc::default(),
            logprob_token_ids: Vec::new(),
        }
    }
}

/// The state from which the next token of a sample is sampled.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    /// Changes to logits by penalties and biases. Tokens of the prompt and the output are recorded only if a penalty depends on them.
    changes: Changes,
    generated_len: u32,
    /// The last generated tokens, at most `recent_max` of them: as many as can precede the last token of a bad word.
    recent: Vec<TokenId>,
    recent_max: usize,
    prepared: Option<Arc<Prepared>>,
    constrained: Option<Constrained>,
}

/// A token that may be sampled, and its weight: the token's probability divided by the probability of the likeliest token.
type Candidate = (TokenId, f32);

/// A token is not sampled if the natural logarithm of its weight is at most this number. Half a million such tokens together weigh less than the
/// lowest of the random number's 53 bits.
const LOG_WEIGHT_MIN: f32 = -50.0;

/// The token id that a sampler returns if all logits are NaNs, so that no token can be sampled. It shows that weights or KV are damaged.
pub const NO_TOKEN: TokenId = TokenId::MAX;

impl Sampler {
    /// Returns the sampler of a sample that begins after this prompt, without a constraint.
    pub fn new(sampling: Sampling, prompt: &[TokenId]) -> Self {
        let mut changes = Changes::default();
        if sampling.repetition_penalty != 1.0 {
            prompt.iter().for_each(|token| changes.of(*token).seen = true);
        }
        sampling.logit_bias.iter().for_each(|(token, bias)| changes.of(*token).bias = *bias);
        if sampling.min_tokens > 0 {
            // Each stop token needs an entry, because its logit changes until `min_tokens` tokens are generated.
            sampling.stop_token_ids.iter().for_each(|token| _ = changes.of(*token));
        }
        forms(&sampling.bad_words).for_each(|(_, last)| _ = changes.of(last));
        let recent_max = forms(&sampling.bad_words).map(|(before, _)| before.len()).max().unwrap_or(0);
        let (prepared, constrained) = (None, None);
        Self { sampling, changes, generated_len: 0, recent: Vec::new(), recent_max, prepared, constrained }
    }

    /// Adds a constraint. The thread that requests a mask computes it, so no mask is late.
    ///
    /// # Errors
    /// Fails if the constraint cannot be enforced.
    pub fn constrained(self, vocabulary: &Vocabulary, constraint: &Constraint) -> Result<Self, Refusal> {
        let fresh = compile(vocabulary, constraint, &self.sampling.stop_token_ids)?;
        let prepared = Prepared::new(fresh, &[], MaskThreads::none(), "".into())?;
        Ok(self.with_constraint(Some(Arc::new(prepared))))
    }

    pub(crate) fn with_constraint(self, prepared: Option<Arc<Prepared>>) -> Self {
        Self { prepared, ..self }
    }

    /// Returns the initial state for sample number `sample` of the same prompt and parameters. `generated` has the tokens that another worker has
    /// already generated for this sample.
    pub fn for_sample(&self, sample: u32, generated: &[TokenId]) -> Self {
        let mut sampler = self.clone();
        sampler.sampling.seed = self.sampling.seed.wrapping_add(u64::from(sample));
        generated.iter().for_each(|token| sampler.count(*token));
        sampler.constrained = self.prepared.as_ref().map(|prepared| prepared.start(sample));
        sampler
    }

    /// Returns whether the text of sample number `sample`, which another worker has begun, is already complete under its constraint.
    pub(crate) fn is_complete_from_start(&self, sample: u32) -> bool {
        self.prepared.as_ref().is_some_and(|prepared| prepared.is_complete(sample))
    }

    /// Returns whether the text is complete under the constraint, and nothing can follow it.
    pub(crate) fn is_complete(&self) -> bool {
        self.constrained.as_ref().is_some_and(Constrained::is_complete)
    }

    /// Returns whether the mask of the constraint, if there is one, is computed.
    pub(crate) fn is_ready(&self) -> bool {
        self.constrained.as_ref().is_none_or(Constrained::is_ready)
    }

    /// Returns whether the mask of the constraint was late for the current step, or is not ready yet. The step's token must then be discarded.
    pub(crate) fn take_late(&mut self) -> bool {
        self.constrained.as_mut().is_some_and(Constrained::take_late)
    }

    pub(crate) fn is_stop(&self, token: TokenId) -> bool {
        self.sampling.stop_token_ids.contains(&token)
    }

    pub(crate) fn generated_len(&self) -> u32 {
        self.generated_len
    }

    /// Samples the token at `position` of the sequence from the logits of the token before it. The caller [accepts](Self::accept) it, unless
    /// it is [`NO_TOKEN`], or the mask of the constraint was late.
    pub fn sample(&self, logits: &[f32], position: u32) -> SampledToken {
        if logits.first().is_some_and(|logit| logit.is_nan()) && logits.iter().all(|logit| logit.is_nan()) {
            return SampledToken { token: NO_TOKEN, logprobs: None };
        }
        let mask = self.mask(logits.len());
        let adjusted = self.adjusted(logits, mask.as_ref());
        let token = if self.sampling.temperature == 0.0 {
            argmax(&adjusted)
        } else {
            choose(&self.candidates(&adjusted), uniform(self.sampling.seed, position))
        };
        // If every token is excluded, the first token is sampled, or the first one that the mask allows. Other devices do the same.
        let token = mask.filter(|mask| !mask.allows(token)).map_or(token, |mask| mask.first());
        let logprobs = self.sampling.logprobs.map(|top| match self.sampling.logprob_token_ids.as_slice() {
            [] => logprobs(logits, token, top),
            tokens => logprobs_of(logits, token, tokens),
        });
        SampledToken { token, logprobs }
    }

    /// Records that a token was generated.
    ///
    /// # Errors
    /// Fails if the constraint does not allow the token, or is too complex to be continued.
    pub fn accept(&mut self, token: TokenId) -> Result<(), MatchError> {
        self.count(token);
        let is_stop = self.is_stop(token);
        self.constrained.as_mut().filter(|_| !is_stop).map_or(Ok(()), |constrained| constrained.accept(token))
    }

    fn count(&mut self, token: TokenId) {
        if self.has_penalties() {
            let change = self.changes.of(token);
            change.count += 1;
            change.seen |= self.sampling.repetition_penalty != 1.0;
        }
        self.generated_len += 1;
        if self.recent_max > 0 {
            let surplus = (self.recent.len() + 1).saturating_sub(self.recent_max);
            self.recent.drain(..surplus);
            self.recent.push(token);
        }
    }

    /// Returns the tokens that must not be sampled now: stop tokens before `min_tokens`, and tokens that would complete a bad word.
    fn barred(&self) -> impl Iterator<Item = TokenId> {
        let stops = if self.generated_len < self.sampling.min_tokens { self.sampling.stop_token_ids.as_slice() } else { &[] };
        let completed = forms(&self.sampling.bad_words).filter(|(before, _)| self.recent.ends_with(before)).map(|(_, last)| last);
        stops.iter().copied().chain(completed)
    }

    /// Returns the tokens that may be sampled; `None` if all tokens may be sampled. A constraint that has failed allows all tokens; the failure is
    /// reported when the token is accepted. A constraint whose mask is not ready allows all tokens, too; the token is [discarded](Self::take_late).
    fn mask(&self, vocab_size: usize) -> Option<Mask> {
        let listed = &self.sampling.allowed_token_ids;
        let listed = (!listed.is_empty()).then(|| Mask::of(listed, vocab_size));
        match (listed, self.constrained.as_ref().and_then(|constrained| constrained.mask().unwrap_or_default())) {
            (Some(listed), Some(mask)) => Some(listed.and(&mask)),
            (listed, mask) => listed.or(mask),
        }
    }

    fn has_penalties(&self) -> bool {
        let s = &self.sampling;
        s.repetition_penalty != 1.0 || s.frequency_penalty != 0.0 || s.presence_penalty != 0.0
    }

    /// Returns the logits after penalties and biases, as OpenAI documents them. The repetition penalty is that of CTRL (Keskar et al. 2019).
    fn adjusted<'a>(&self, logits: &'a [f32], mask: Option<&Mask>) -> Cow<'a, [f32]> {
        let s = &self.sampling;
        let all_allowed = mask.is_none() && s.bad_words.is_empty() && self.generated_len >= s.min_tokens;
        if !self.has_penalties() && s.logit_bias.is_empty() && all_allowed {
            return Cow::Borrowed(logits);
        }
        let mut adjusted = logits.to_vec();
        for change in self.changes.iter() {
            let Some(logit) = adjusted.get_mut(change.token as usize) else { continue };
            if change.seen {
                *logit = if *logit > 0.0 { *logit / s.repetition_penalty } else { *logit * s.repetition_penalty };
            }
            if change.count > 0 {
                *logit -= s.frequency_penalty * change.count as f32 + s.presence_penalty;
            }
            *logit += change.bias;
        }
        for token in self.barred() {
            if let Some(logit) = adjusted.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        if let Some(mask) = mask {
            for (logits, allowed) in adjusted.chunks_mut(32).zip(mask.words()) {
                let bits = logits.iter_mut().zip((0..32).map(|bit| allowed >> bit & 1));
                bits.filter(|(_, allowed)| *allowed == 0).for_each(|(logit, _)| *logit = f32::NEG_INFINITY);
            }
        }
        Cow::Owned(adjusted)
    }

    /// Returns the candidates that remain after temperature, min-p, top-k and top-p were applied in this order, sorted by token id.
    fn candidates(&self, logits: &[f32]) -> Vec<Candidate> {
        let s = &self.sampling;
        let likeliest = argmax(logits);
        let max = logits[likeliest as usize];
        if !max.is_finite() {
            // No weights can be computed, because a penalty overflowed, or because `min_tokens` excludes all tokens.
            return vec![(likeliest, 1.0)];
        }
        let logit_min = max + LOG_WEIGHT_MIN * s.temperature;
        let mut candidates = Vec::with_capacity(logits.len());
        // At a very low temperature, `logit_min` equals the maximum. The second condition keeps the likeliest tokens in this case.
        candidates.extend((0..).zip(logits.iter().copied()).filter(|(_, logit)| *logit > logit_min || *logit == max));
        for (_, weight) in &mut candidates {
            *weight = exp((*weight - max) / s.temperature);
        }
        if s.min_p > 0.0 {
            candidates.retain(|(_, weight)| *weight >= s.min_p);
        }
        if s.top_k > 0 && (s.top_k as usize) < candidates.len() {
            candidates.select_nth_unstable_by(s.top_k as usize - 1, likelier_first);
            candidates.truncate(s.top_k as usize);
        }
        if s.top_p < 1.0 {
            keep_top_p(&mut candidates, f64::from(s.top_p));
        }
        // The sum of the weights and the chosen token depend on the order of the candidates. Sorting makes this order independent of the
        // filters above.
        candidates.sort_unstable_by_key(|(token, _)| *token);
        candidates
    }
}

/// Keeps the likeliest candidates that together have the fraction `top_p` of the weight. Only as many candidates are sorted as necessary.
fn keep_top_p(candidates: &mut Vec<Candidate>, top_p: f64) {
    candidates.sort_unstable_by_key(|(token, _)| *token);
    let wanted = top_p * total(candidates);
    let mut sorted = 256.min(candidates.len());
    loop {
        if sorted < candidates.len() {
            candidates.select_nth_unstable_by(sorted - 1, likelier_first);
        }
        candidates[..sorted].sort_unstable_by(likelier_first);
        let mut held = 0.0;
        let kept = candidates[..sorted].iter().position(|(_, weight)| {
            held += f64::from(*weight);
            held >= wanted
        });
        if let Some(last) = kept {
            return candidates.truncate(last + 1);
        }
        if sorted == candidates.len() {
            return;
        }
        sorted = (sorted * 8).min(candidates.len());
    }
}

fn likelier_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

fn total(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(|(_, weight)| f64::from(*weight)).sum()
}

/// Returns e^x for x from [`LOG_WEIGHT_MIN`] to 0, with a relative error below 2e-7. It is computed for each token of the vocabulary
/// whenever a token is sampled, so it consists of sums and products that the compiler can vectorise.
#[inline]
fn exp(x: f32) -> f32 {
    /// The number 1.5 × 2^23. The low bits of its sum with a number x are the integer nearest to x, if |x| is below 2^22.
    const ROUNDING: f32 = 12_582_912.0;
    /// The sum of these two numbers is ln 2. The first number has so few bits that its product with an integer is exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    // The argument is split into n ln 2 + r. The result's exponent is set to n, and e^r is approximated by the first terms of its Taylor series.
    let rounded = x * std::f32::consts::LOG2_E + ROUNDING;
    let n = rounded - ROUNDING;
    let r = x - n * LN_2[0] - n * LN_2[1];
    let series =
        [5_040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0f32].iter().fold(0.0, |sum, factorial| sum * r + 1.0 / factorial);
    let power = rounded.to_bits().wrapping_sub(ROUNDING.to_bits()).wrapping_add(127) << 23;
    series * f32::from_bits(power)
}

fn choose(candidates: &[Candidate], uniform: f64) -> TokenId {
    let mut left = uniform * total(candidates);
    for (token, weight) in candidates {
        left -= f64::from(*weight);
        if left < 0.0 {
            return *token;
        }
    }
    candidates.last().expect("the likeliest token is always a candidate").0
}

/// Returns the likeliest token; of several equally likely ones, the one with the lowest id.
fn argmax(logits: &[f32]) -> TokenId {
    // Eight maxima are computed side by side, so that the compiler vectorises the comparison. A NaN is never larger than a maximum.
    let larger = |max: f32, logit: f32| if logit > max { logit } else { max };
    let mut maxima = [f32::NEG_INFINITY; 8];
    let (rows, rest) = logits.as_chunks::<8>();
    for row in rows {
        maxima = std::array::from_fn(|lane| larger(maxima[lane], row[lane]));
    }
    let max = maxima.iter().chain(rest).fold(f32::NEG_INFINITY, |max, logit| larger(max, *logit));
    logits.iter().position(|logit| *logit == max).unwrap_or(0) as TokenId
}

/// Returns each token sequence of each bad word, split into its last token and the tokens before it.
fn forms(bad_words: &[BadWord]) -> impl Iterator<Item = (&[TokenId], TokenId)> {
    bad_words.iter().flat_map(|word| &word.forms).filter_map(|form| form.split_last()).map(|(last, before)| (before, *last))
}

/// Returns the logprob of `token`, and the logprobs of the `top` likeliest tokens.
pub(crate) fn logprobs(logits: &[f32], token: TokenId, top: u32) -> TokenLogprobs {
    let mut order: Vec<TokenId> = (0..logits.len() as TokenId).collect();
    let likelier = |a: &TokenId, b: &TokenId| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let top = (top as usize).min(order.len());
    if top > 0 && top < order.len() {
        order.select_nth_unstable_by(top - 1, likelier);
    }
    order.truncate(top);
    order.sort_unstable_by(likelier);
    logprobs_of(logits, token, &order)
}

/// Returns the logprob of `token`, and the logprobs of the tokens `others` in their order.
fn logprobs_of(logits: &[f32], token: TokenId, others: &[TokenId]) -> TokenLogprobs {
    let max = f64::from(logits[argmax(logits) as usize]);
    let sum: f64 = logits.iter().map(|logit| libm::exp(f64::from(*logit) - max)).sum();
    let normaliser = max + libm::log(sum);
    let logprob = |token: TokenId| (f64::from(logits[token as usize]) - normaliser) as f32;
    TokenLogprobs {
        logprob: logprob(token),
        top: others.iter().map(|token| TokenLogprob { token: *token, logprob: logprob(*token) }).collect(),
    }
}

fn uniform(seed: u64, position: u32) -> f64 {
    let bits = mix(mix(seed) ^ u64::from(position));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests;
