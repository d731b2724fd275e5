//! The tokens that may be sampled next.

use tandem_kv::TokenId;

/// The tokens that a constraint allows at one point of a text: bit `token % 32` of word `token / 32`. There is a bit for every logit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask(pub(crate) Box<[u32]>);

impl Mask {
    /// Returns a mask that allows only these tokens, of a vocabulary of this size.
    pub fn of(tokens: &[TokenId], size: usize) -> Self {
        let mut mask = Self(vec![0; size.div_ceil(32)].into());
        tokens.iter().filter(|token| (**token as usize) < size).for_each(|token| mask.allow(*token));
        mask
    }

    /// Returns a mask that allows the tokens that both masks allow.
    pub fn and(mut self, other: &Self) -> Self {
        self.0.iter_mut().zip(&other.0).for_each(|(word, other)| *word &= other);
        self
    }

    /// Returns the 32-bit words of the mask.
    pub fn words(&self) -> &[u32] {
        &self.0
    }

    /// Returns whether the mask allows the token.
    pub fn allows(&self, token: TokenId) -> bool {
        self.0.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
    }

    /// Returns the allowed token with the lowest id; 0 if no token is allowed.
    pub fn first(&self) -> TokenId {
        let word = self.0.iter().position(|word| *word != 0).unwrap_or_default();
        self.0.get(word).filter(|bits| **bits != 0).map_or(0, |bits| word as TokenId * 32 + bits.trailing_zeros())
    }

    pub(crate) fn allow(&mut self, token: TokenId) {
        if let Some(word) = self.0.get_mut(token as usize / 32) {
            *word |= 1 << (token % 32);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    pub(crate) fn forbid(&mut self, token: TokenId) {
        if let Some(word) = self.0.get_mut(token as usize / 32) {
            *word &= !(1 << (token % 32));
        }
    }

    /// Returns a mask that allows all `size` tokens.
    pub fn all(size: usize) -> Self {
        let mut words = vec![u32::MAX; size.div_ceil(32)];
        if let (Some(last), true) = (words.last_mut(), !size.is_multiple_of(32)) {
            *last = (1 << (size % 32)) - 1;
        }
        Self(words.into())
    }
}
