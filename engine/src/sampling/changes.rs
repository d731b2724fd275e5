//! What changes single tokens' logits, kept from draw to draw: a step does not read the whole history of its sequences again.

use std::collections::HashMap;
use tandem_kv::TokenId;

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

/// Every token whose logit is or may become other than what the model says, once, in the order in which they came.
#[derive(Clone, Debug, Default)]
pub(super) struct Changes {
    all: Vec<Adjustment>,
    places: HashMap<TokenId, usize>,
}

impl Changes {
    /// What changes this token's logit; nothing yet if it is new.
    pub fn of(&mut self, token: TokenId) -> &mut Adjustment {
        let new = || {
            self.all.push(Adjustment { token, ..Adjustment::default() });
            self.all.len() - 1
        };
        let place = *self.places.entry(token).or_insert_with(new);
        &mut self.all[place]
    }

    pub fn iter(&self) -> impl Iterator<Item = &Adjustment> {
        self.all.iter()
    }
}
