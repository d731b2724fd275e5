//! Sampling requests for devices that sample tokens themselves, and the tokens that these devices return.

use super::{Sampler, TokenLogprobs, changes::Adjustment, uniform};
use tandem_grammar::Mask;
use tandem_kv::TokenId;

/// A request to sample the token that follows a chunk.
#[derive(Clone, Copy, Debug)]
pub struct SampleRequest<'a> {
    sampler: &'a Sampler,
    position: u32,
}

/// A token that a device has sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// The id of the token.
    pub token: TokenId,
    /// The logprobs of the token and of its alternatives; `None` unless [`Sampling::logprobs`](super::Sampling::logprobs) is set.
    pub logprobs: Option<TokenLogprobs>,
}

impl SampleRequest<'_> {
    /// Samples a token on the host from a row of logits.
    pub fn on_host(&self, row: &[f32]) -> SampledToken {
        self.sampler.sample(row, self.position)
    }

    /// Samples a token from `candidates`, which are sorted by token id. The result equals that of [`SampleRequest::on_host`] for a row of
    /// logits in which all other tokens are too unlikely to be sampled at a temperature of at most 1. Returns `None` if other tokens may be
    /// sampled or are needed: with logprobs, penalties, biases or bans, or at a higher temperature.
    pub fn among(&self, candidates: &[(TokenId, f32)]) -> Option<SampledToken> {
        let Sampler { sampling, constrained, .. } = self.sampler;
        let is_plain = sampling.temperature <= 1.0
            && sampling.logprobs.is_none()
            && sampling.logit_bias.is_empty()
            && sampling.allowed_token_ids.is_empty()
            && sampling.bad_words.is_empty()
            && constrained.is_none()
            && !self.sampler.has_penalties()
            && self.sampler.generated_len >= sampling.min_tokens;
        let row: Vec<f32> = candidates.iter().filter(|_| is_plain).map(|(_, logit)| *logit).collect();
        let sampled = (!row.is_empty()).then(|| self.on_host(&row))?;
        let (token, _) = candidates.get(sampled.token as usize)?;
        Some(SampledToken { token: *token, ..sampled })
    }

    /// Returns the parameters of the sample.
    pub fn sampling(&self) -> &super::Sampling {
        &self.sampler.sampling
    }

    /// Returns the random number in [0, 1) that selects the token.
    pub fn uniform(&self) -> f64 {
        uniform(self.sampler.sampling.seed, self.position)
    }

    /// Returns the tokens that may be sampled; `None` if all tokens may be sampled. If the mask of the sample's constraint is not ready, the token is
    /// discarded.
    pub fn mask(&self, vocab_size: usize) -> Option<Mask> {
        self.sampler.mask(vocab_size)
    }

    /// Returns whether the sample has a constraint. The mask of a constraint may not be computed yet.
    pub fn is_constrained(&self) -> bool {
        self.sampler.constrained.is_some()
    }

    /// Returns an [`Adjustment`] for every token whose logit differs from the model's. Together they make the changes that
    /// `Sampler::adjusted` makes.
    pub fn adjustments(&self, vocab_size: usize) -> impl Iterator<Item = Adjustment> {
        let sampler = self.sampler;
        let barred: Vec<TokenId> = sampler.barred().collect();
        let now = move |change: &Adjustment| Adjustment {
            bias: if barred.contains(&change.token) { f32::NEG_INFINITY } else { change.bias },
            ..*change
        };
        sampler.changes.iter().filter(move |change| (change.token as usize) < vocab_size).map(now)
    }
}

impl Sampler {
    /// Returns the request for the token at `position` of the sequence.
    pub fn request(&self, position: u32) -> SampleRequest<'_> {
        SampleRequest { sampler: self, position }
    }
}
