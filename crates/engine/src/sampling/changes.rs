//! The penalties and biases of each token, which are updated with every generated token, so that no step has to read a sequence's whole history.

use std::collections::HashMap;
use tandem_kv::TokenId;

/// The changes to one token's logit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Adjustment {
    /// The token.
    pub token: TokenId,
    /// The number of times that the token was generated; 0 if no penalty depends on it.
    pub count: u32,
    /// Whether the token is in the prompt or the output; false if there is no repetition penalty.
    pub seen: bool,
    /// The number that is added to the logit.
    pub bias: f32,
}

/// The changes to logits by penalties and biases. Each token whose logit may change is listed once, in the order in which the tokens were added.
#[derive(Clone, Debug, Default)]
pub(super) struct Changes {
    all: Vec<Adjustment>,
    indices: HashMap<TokenId, usize>,
}

impl Changes {
    pub fn of(&mut self, token: TokenId) -> &mut Adjustment {
        let new = || {
            self.all.push(Adjustment { token, ..Adjustment::default() });
            self.all.len() - 1
        };
        let index = *self.indices.entry(token).or_insert_with(new);
        &mut self.all[index]
    }

    pub fn iter(&self) -> impl Iterator<Item = &Adjustment> {
        self.all.iter()
    }
}
