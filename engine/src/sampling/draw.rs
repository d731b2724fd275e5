//! A draw in plain numbers, for devices that draw by themselves.

use super::{Sampler, TokenLogprobs, changes::Adjustment, uniform};
use tandem_kv::TokenId;

/// How the token after a chunk is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Draw<'a> {
    sampler: &'a Sampler,
    position: u32,
}

/// A token that a device has drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The token.
    pub token: TokenId,
    /// When they were asked for.
    pub logprobs: Option<TokenLogprobs>,
}

impl Draw<'_> {
    /// What the host draws from a row.
    #[cfg(test)]
    pub(crate) fn on_host(&self, row: &[f32]) -> Drawn {
        let (token, logprobs) = self.sampler.clone().draw(row, self.position);
        Drawn { token, logprobs }
    }

    /// The settings.
    pub(crate) fn sampling(&self) -> &super::Sampling {
        &self.sampler.sampling
    }

    /// The number from [0, 1) that decides the draw.
    pub(crate) fn uniform(&self) -> f64 {
        uniform(self.sampler.sampling.seed, self.position)
    }

    /// Every token whose logit is not what the model says, once. As `Sampler::adjusted` has it.
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
    /// For the token at `position` of the sequence.
    pub(crate) fn draw_at(&self, position: u32) -> Draw<'_> {
        Draw { sampler: self, position }
    }

    /// Remembers a token that a device has drawn.
    pub(crate) fn accept(&mut self, drawn: &Drawn) -> (TokenId, Option<TokenLogprobs>) {
        self.remember(drawn.token);
        (drawn.token, drawn.logprobs.clone())
    }
}
