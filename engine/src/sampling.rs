//! Samples a token from logits. The token depends only on the logits, the sample's history, its seed and its position.
//!
//! The random number of a position depends only on the seed and the position, so a sequence that was preempted, migrated or batched
//! differently samples the same tokens. Exponentials consist of products and sums in a fixed order, here or in `libm`, so they have the
//! same bits on every machine.

mod changes;
mod request;

pub use request::{SampleRequest, SampledToken};

use changes::Changes;
use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::HashMap;
use tandem_kv::{TokenId, mix};

/// Sampling parameters. The defaults are those of OpenAI's API.
#[derive(Clone, Debug)]
pub struct Sampling {
    /// The maximum number of new tokens. 0 generates nothing; `None` generates until the context or the cache is full.
    pub max_tokens: Option<u32>,
    /// The number of new tokens before which no stop token is sampled.
    pub min_tokens: u32,
    /// The number by which logits are divided. 0: the likeliest token is always chosen.
    pub temperature: f32,
    /// Only the likeliest tokens whose probabilities together reach this value are kept.
    pub top_p: f32,
    /// The number of likeliest tokens that are kept; 0 keeps all tokens.
    pub top_k: u32,
    /// Only tokens are kept whose probability is at least this fraction of the likeliest token's.
    pub min_p: f32,
    /// The number that is subtracted from a token's logit once for every time the token was generated.
    pub frequency_penalty: f32,
    /// The number that is subtracted from a token's logit if the token was generated at least once.
    pub presence_penalty: f32,
    /// The number by which positive logits of tokens in the prompt or the output are divided and negative ones multiplied; 1: no penalty.
    pub repetition_penalty: f32,
    /// The number that is added to the logit of each of these tokens.
    pub logit_bias: HashMap<TokenId, f32>,
    /// The seed. The random number for each token depends on it and on the token's position.
    pub seed: u64,
    /// Tokens that end the sample.
    pub stop_token_ids: Vec<TokenId>,
    /// If set, the logprobs of each sampled token and of this many alternatives are returned.
    pub logprobs: Option<u32>,
}

/// A token and the logarithm of its probability. Temperature, penalties and biases are not included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token's id.
    pub token: TokenId,
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
}

/// The sampled token's logprob, and the likeliest tokens, the likeliest first.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The natural logarithm of the sampled token's probability.
    pub logprob: f32,
    /// The likeliest tokens, as many as were requested.
    pub top: Vec<TokenLogprob>,
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
            stop_token_ids: Vec::new(),
            logprobs: None,
        }
    }
}

/// The sampling state of one sample.
#[derive(Clone, Debug)]
pub(crate) struct Sampler {
    sampling: Sampling,
    /// Changes to logits by penalties and biases. Tokens of the prompt and the output are recorded only if a penalty depends on them.
    changes: Changes,
    generated_len: u32,
}

/// A token that may be sampled, and its weight: its probability divided by that of the likeliest token.
type Candidate = (TokenId, f32);

/// A token is no candidate if the natural logarithm of its weight is at most this number. Half a million such tokens together weigh less
/// than the lowest of the random number's 53 bits.
const LOG_WEIGHT_MIN: f32 = -50.0;

impl Sampler {
    pub(crate) fn new(sampling: Sampling, prompt: &[TokenId]) -> Self {
        let mut changes = Changes::default();
        if sampling.repetition_penalty != 1.0 {
            prompt.iter().for_each(|token| changes.of(*token).seen = true);
        }
        sampling.logit_bias.iter().for_each(|(token, bias)| changes.of(*token).bias = *bias);
        if sampling.min_tokens > 0 {
            // Each stop token needs an entry, because its logit changes until `min_tokens` tokens are generated.
            sampling.stop_token_ids.iter().for_each(|token| _ = changes.of(*token));
        }
        Self { sampling, changes, generated_len: 0 }
    }

    /// Returns the initial state for sample number `sample` of the same prompt and parameters.
    pub(crate) fn for_sample(&self, sample: u32) -> Self {
        let mut sampler = self.clone();
        sampler.sampling.seed = self.sampling.seed.wrapping_add(u64::from(sample));
        sampler
    }

    /// Returns the state after `generated`, the tokens that another worker has generated for this sample.
    pub(crate) fn resumed(mut self, generated: &[TokenId]) -> Self {
        generated.iter().for_each(|token| self.accept(*token));
        self
    }

    pub(crate) fn is_stop(&self, token: TokenId) -> bool {
        self.sampling.stop_token_ids.contains(&token)
    }

    pub(crate) fn generated_len(&self) -> u32 {
        self.generated_len
    }

    /// Samples the token at `position` of the sequence from the logits of the token before it, and counts it as generated.
    pub(crate) fn sample(&mut self, logits: &[f32], position: u32) -> SampledToken {
        let adjusted = self.adjusted(logits);
        let token = if self.sampling.temperature == 0.0 {
            argmax(&adjusted)
        } else {
            choose(&self.candidates(&adjusted), uniform(self.sampling.seed, position))
        };
        let logprobs = self.sampling.logprobs.map(|top| logprobs(logits, token, top));
        self.accept(token);
        SampledToken { token, logprobs }
    }

    /// Counts a token as generated.
    pub(crate) fn accept(&mut self, token: TokenId) {
        if self.has_penalties() {
            let change = self.changes.of(token);
            change.count += 1;
            change.seen |= self.sampling.repetition_penalty != 1.0;
        }
        self.generated_len += 1;
    }

    fn has_penalties(&self) -> bool {
        let s = &self.sampling;
        s.repetition_penalty != 1.0 || s.frequency_penalty != 0.0 || s.presence_penalty != 0.0
    }

    /// Returns the logits after penalties and bias, as OpenAI documents them; the repetition penalty is that of CTRL (Keskar et al. 2019).
    fn adjusted<'a>(&self, logits: &'a [f32]) -> Cow<'a, [f32]> {
        let s = &self.sampling;
        if !self.has_penalties() && s.logit_bias.is_empty() && self.generated_len >= s.min_tokens {
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
        if self.generated_len < s.min_tokens {
            for token in &s.stop_token_ids {
                if let Some(logit) = adjusted.get_mut(*token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
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
            // No weights can be computed: a penalty overflowed, or all tokens are stop tokens that `min_tokens` excludes.
            return vec![(likeliest, 1.0)];
        }
        let logit_min = max + LOG_WEIGHT_MIN * s.temperature;
        let mut candidates = Vec::with_capacity(logits.len());
        // At a very low temperature `logit_min` equals the maximum. The second condition keeps the likeliest tokens in this case.
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
    /// The sum of these two numbers is ln 2. The first one has so few bits that its product with an integer is exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    // x = n ln 2 + r. 2^n is set as the result's exponent, and e^r is approximated by the first terms of its Taylor series.
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

/// Returns the logprob of `token`, and those of the `top` likeliest tokens.
pub(crate) fn logprobs(logits: &[f32], token: TokenId, top: u32) -> TokenLogprobs {
    let max = f64::from(logits[argmax(logits) as usize]);
    let sum: f64 = logits.iter().map(|logit| libm::exp(f64::from(*logit) - max)).sum();
    let normaliser = max + libm::log(sum);
    let logprob = |token: TokenId| (f64::from(logits[token as usize]) - normaliser) as f32;
    let mut order: Vec<TokenId> = (0..logits.len() as TokenId).collect();
    let likelier = |a: &TokenId, b: &TokenId| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let top = (top as usize).min(order.len());
    if top > 0 && top < order.len() {
        order.select_nth_unstable_by(top - 1, likelier);
    }
    order.truncate(top);
    order.sort_unstable_by(likelier);
    TokenLogprobs {
        logprob: logprob(token),
        top: order.into_iter().map(|token| TokenLogprob { token, logprob: logprob(token) }).collect(),
    }
}

/// Returns a random number in [0, 1) that depends only on the seed and the position.
fn uniform(seed: u64, position: u32) -> f64 {
    let bits = mix(mix(seed) ^ u64::from(position));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampled(sampling: Sampling, logits: &[f32], count: u32) -> Vec<TokenId> {
        let sampler = Sampler::new(sampling, &[]);
        (0..count).map(|position| sampler.clone().sample(logits, position).token).collect()
    }

    #[test]
    fn greedy_selects_the_lowest_id_of_equal_logits() {
        assert_eq!(sampled(Sampling { temperature: 0.0, ..Sampling::default() }, &[0.0, 3.0, 3.0, 1.0], 1), [1]);
    }

    #[test]
    fn argmax_finds_the_maximum_at_any_index() {
        for len in [1, 7, 8, 9, 40] {
            for place in 0..len {
                let mut logits = vec![-1.0f32; len];
                logits[place..].fill(2.0);
                assert_eq!(argmax(&logits), place as TokenId, "of {len}");
                logits[..place].fill(f32::NAN);
                assert_eq!(argmax(&logits), place as TokenId, "of {len}");
            }
        }
        assert_eq!(argmax(&[f32::NEG_INFINITY; 9]), 0);
        assert_eq!(argmax(&[f32::NAN; 9]), 0);
    }

    #[test]
    fn exp_is_within_its_error_bound() {
        for x in (0..=500_000).map(|step| step as f32 * -1e-4) {
            let exact = libm::exp(f64::from(x));
            assert!((f64::from(exp(x)) - exact).abs() <= 2e-7 * exact, "e^{x}: {}", exp(x));
        }
        assert_eq!(exp(0.0), 1.0, "the likeliest token has weight 1");
    }

    #[test]
    fn token_frequencies_follow_the_softmax() {
        let logits = [0.0f32, 1.0, 2.0, -1.0];
        let tokens = sampled(Sampling { seed: 7, ..Sampling::default() }, &logits, 40_000);
        let total: f32 = logits.iter().map(|logit| logit.exp()).sum();
        for (token, logit) in logits.iter().enumerate() {
            let seen = tokens.iter().filter(|token_id| **token_id == token as TokenId).count() as f32 / 40_000.0;
            let expected = logit.exp() / total;
            assert!((seen - expected).abs() < 0.01, "token {token}: seen {seen}, expected {expected}");
        }
    }

    #[test]
    fn top_k_top_p_and_min_p_keep_the_likeliest_tokens() {
        // The probabilities are 0.4, 0.3, 0.2 and 0.1.
        let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
        let kept = |sampling: Sampling| {
            let mut tokens = sampled(sampling, &logits, 2_000);
            tokens.sort_unstable();
            tokens.dedup();
            tokens
        };
        assert_eq!(kept(Sampling { top_k: 2, ..Sampling::default() }), [0, 1]);
        assert_eq!(kept(Sampling { top_p: 0.5, ..Sampling::default() }), [0, 1]);
        assert_eq!(kept(Sampling { top_p: 0.95, ..Sampling::default() }), [0, 1, 2, 3]);
        assert_eq!(kept(Sampling { min_p: 0.45, ..Sampling::default() }), [0, 1, 2]);
        assert_eq!(
            kept(Sampling { top_k: 2, top_p: 0.5, ..Sampling::default() }),
            [0],
            "top-p applies to the tokens that top-k kept"
        );
    }

    #[test]
    fn top_p_keeps_tokens_beyond_the_first_sorted_candidates() {
        let logits = vec![0.0f32; 5_000];
        let sampler = Sampler::new(Sampling { top_p: 0.5, ..Sampling::default() }, &[]);
        assert_eq!(sampler.candidates(&logits).len(), 2_500);
    }

    #[test]
    fn penalties_and_bias_change_the_sampled_token() {
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        let logits = [1.0f32, 0.9, 0.0];
        let mut sampler = Sampler::new(Sampling { presence_penalty: 0.2, ..greedy.clone() }, &[]);
        assert_eq!(
            [sampler.sample(&logits, 0).token, sampler.sample(&logits, 1).token, sampler.sample(&logits, 2).token],
            [0, 1, 0]
        );
        let mut sampler = Sampler::new(Sampling { frequency_penalty: 0.2, ..greedy.clone() }, &[]);
        assert_eq!([0, 1, 2, 3].map(|position| sampler.sample(&logits, position).token), [0, 1, 0, 1]);
        let mut sampler = Sampler::new(Sampling { repetition_penalty: 2.0, ..greedy.clone() }, &[0]);
        assert_eq!(sampler.sample(&logits, 0).token, 1, "the prompt's tokens count as seen");
        let bias = HashMap::from([(2, 100.0), (9_999, 1.0)]);
        assert_eq!(sampled(Sampling { logit_bias: bias, ..greedy.clone() }, &logits, 1), [2]);
        let min_tokens = Sampling { min_tokens: 1, stop_token_ids: vec![0], ..greedy };
        let mut sampler = Sampler::new(min_tokens, &[]);
        assert_eq!([sampler.sample(&logits, 0).token, sampler.sample(&logits, 1).token], [1, 0]);
    }

    #[test]
    fn non_finite_logits_still_give_a_token() {
        let logits = [5.0f32, 1.0, -1.0];
        let penalty = Sampling { repetition_penalty: f32::MIN_POSITIVE, ..Sampling::default() };
        assert_eq!(Sampler::new(penalty, &[0]).sample(&logits, 0).token, 0, "5 divided by the penalty is infinite");
        let no_token = Sampling { min_tokens: 1, stop_token_ids: vec![0, 1, 2], ..Sampling::default() };
        assert_eq!(sampled(no_token, &logits, 1), [0]);
        assert_eq!(sampled(Sampling::default(), &[f32::NAN; 3], 1), [0]);
        assert_eq!(sampled(Sampling::default(), &[f32::NAN, f32::NEG_INFINITY, 1.0], 1), [2]);
    }

    #[test]
    fn lowest_temperatures_select_the_likeliest_token() {
        for temperature in [1e-3, 1e-8, f32::MIN_POSITIVE, 1e-45] {
            assert_eq!(
                sampled(Sampling { temperature, ..Sampling::default() }, &[-20.0, 20.0, 19.0], 3),
                [1; 3],
                "{temperature}"
            );
        }
    }

    #[test]
    fn logprobs_ignore_the_temperature() {
        let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
        let sampling = Sampling { temperature: 0.1, logprobs: Some(2), ..Sampling::default() };
        let SampledToken { token, logprobs } = Sampler::new(sampling, &[]).sample(&logits, 0);
        let logprobs = logprobs.expect("the request asked for logprobs");
        assert!((logprobs.logprob - logits[token as usize]).abs() < 1e-6);
        assert_eq!(logprobs.top.iter().map(|top| top.token).collect::<Vec<_>>(), [0, 1]);
    }

    #[test]
    fn sampling_depends_only_on_seed_and_position() {
        let logits = vec![0.0f32; 1_000];
        let of = |seed| sampled(Sampling { seed, ..Sampling::default() }, &logits, 50);
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
        let sampler = Sampler::new(Sampling { seed: 1, ..Sampling::default() }, &[]);
        assert_eq!(sampler.for_sample(1).sample(&logits, 3).token, of(2)[3], "sample i equals a request with seed + i");
    }
}
