//! A draw in plain numbers, for devices that draw by themselves.

use super::{Sampler, TokenLogprobs, uniform};
use std::collections::BTreeMap;
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

/// What changes one token's logit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Adjustment {
    pub token: TokenId,
    /// Times it was generated, as far as a penalty asks for it.
    pub count: u32,
    /// In prompt or output, as far as the repetition penalty asks for it.
    pub seen: bool,
    pub bias: f32,
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

    /// Every token whose logit is not what the model says, once, by its id. As `Sampler::adjusted` has it.
    pub(crate) fn adjustments(&self, vocab_size: usize) -> Vec<Adjustment> {
        let sampler = self.sampler;
        let s = &sampler.sampling;
        let mut changes: BTreeMap<TokenId, Adjustment> = BTreeMap::new();
        let mut change = |token: TokenId, with: &dyn Fn(&mut Adjustment)| {
            if (token as usize) < vocab_size {
                with(changes.entry(token).or_insert(Adjustment { token, ..Adjustment::default() }));
            }
        };
        if s.repetition_penalty != 1.0 {
            let tokens = sampler.prompt.iter().chain(sampler.generated.keys());
            tokens.for_each(|token| change(*token, &|adjustment| adjustment.seen = true));
        }
        sampler.generated.iter().for_each(|(token, count)| change(*token, &|adjustment| adjustment.count = *count));
        s.logit_bias.iter().for_each(|(token, bias)| change(*token, &|adjustment| adjustment.bias += bias));
        if sampler.generated_len < s.min_tokens {
            s.stop_token_ids.iter().for_each(|token| change(*token, &|adjustment| adjustment.bias = f32::NEG_INFINITY));
        }
        changes.into_values().collect()
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
