//! Sampling requests for devices that sample on their own, and the tokens that these devices return.

use super::{Sampler, TokenLogprobs, changes::Adjustment, uniform};
use tandem_kv::TokenId;

/// How the token that follows a chunk is sampled.
#[derive(Clone, Copy, Debug)]
pub struct SampleRequest<'a> {
    sampler: &'a Sampler,
    position: u32,
}

/// A sampled token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// The token's id.
    pub token: TokenId,
    /// Logprobs of the token and the likeliest alternatives; `None` unless [`Sampling::logprobs`](super::Sampling::logprobs) is set.
    pub logprobs: Option<TokenLogprobs>,
}

impl SampleRequest<'_> {
    /// Samples on the host from a row of logits.
    #[cfg(test)]
    pub(crate) fn on_host(&self, row: &[f32]) -> SampledToken {
        self.sampler.clone().sample(row, self.position)
    }

    pub(crate) fn sampling(&self) -> &super::Sampling {
        &self.sampler.sampling
    }

    /// Returns the random number in [0, 1) that selects the token.
    pub(crate) fn uniform(&self) -> f64 {
        uniform(self.sampler.sampling.seed, self.position)
    }

    /// Returns an [`Adjustment`] for every token whose logit differs from the model's. Together they make the changes that
    /// `Sampler::adjusted` makes.
    pub(crate) fn adjustments(&self, vocab_size: usize) -> impl Iterator<Item = Adjustment> {
        let sampler = self.sampler;
        let barred = |token| sampler.generated_len < sampler.sampling.min_tokens && sampler.is_stop(token);
        let now = move |change: &Adjustment| Adjustment {
            bias: if barred(change.token) { f32::NEG_INFINITY } else { change.bias },
            ..*change
        };
        sampler.changes.iter().filter(move |change| (change.token as usize) < vocab_size).map(now)
    }
}

impl Sampler {
    /// Returns the request for the token at `position` of the sequence.
    pub(crate) fn request(&self, position: u32) -> SampleRequest<'_> {
        SampleRequest { sampler: self, position }
    }
}
