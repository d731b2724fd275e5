//! The state of one text under a constraint.

use crate::{GrammarError, Mask, MatchError, input_matcher::InputMatcher, marker::Marker};
use llguidance::{
    TokenParser,
    api::StopReason,
    toktrie::{ApproximateTokEnv, TokenizerEnv},
};
use std::sync::Arc;
use tandem_kv::TokenId;

pub(crate) struct SharedTrie {
    pub trie: Arc<ApproximateTokEnv>,
    pub stop_tokens: Vec<TokenId>,
}

/// The state of one text under a constraint. A clone does not change when the original changes.
#[derive(Clone)]
pub struct Matcher {
    kind: MatcherKind,
    shared: Arc<SharedTrie>,
    /// The marker after which the constraint begins; `None` once the text contains it.
    marker: Option<Marker>,
}

#[derive(Clone)]
enum MatcherKind {
    /// The whole text is constrained.
    Text(Box<llguidance::Matcher>),
    /// Only the inputs of certain calls are.
    Inputs(Box<InputMatcher>),
}

impl Matcher {
    pub(crate) fn new(parser: TokenParser, shared: SharedTrie, marker: Option<&str>) -> Result<Self, GrammarError> {
        let kind = MatcherKind::Text(Box::new(llguidance::Matcher::new(Ok(parser))));
        let mut matcher = Self::of(kind, shared, marker);
        // The first mask shows whether any text meets the constraint.
        match matcher.mask() {
            Ok(_) => Ok(matcher),
            Err(error) => Err(GrammarError::invalid(error)),
        }
    }

    pub(crate) fn of_inputs(inputs: InputMatcher, shared: SharedTrie, marker: Option<&str>) -> Self {
        Self::of(MatcherKind::Inputs(Box::new(inputs)), shared, marker)
    }

    fn of(kind: MatcherKind, shared: SharedTrie, marker: Option<&str>) -> Self {
        let marker = marker.filter(|marker| !marker.is_empty()).map(|text| Marker::new(text, &shared.trie));
        Self { kind, shared: Arc::new(shared), marker }
    }

    /// Returns whether the text meets the constraint and cannot be continued.
    pub fn is_complete(&self) -> bool {
        let MatcherKind::Text(parser) = &self.kind else { return false };
        self.marker.is_none() && parser.stop_reason() == StopReason::NoExtension
    }

    /// Returns the tokens that are allowed next; `None` if all tokens are. Takes some tens of microseconds, and at most about ten milliseconds.
    ///
    /// # Errors
    /// Fails if no token can continue the text.
    pub fn mask(&mut self) -> Result<Option<Mask>, MatchError> {
        let size = self.shared.trie.tok_trie().vocab_size();
        if let Some(marker) = &self.marker {
            let barred = marker.barred(&self.shared.trie);
            let mut mask = (!barred.is_empty()).then(|| Mask::all(size));
            mask.iter_mut().for_each(|mask| barred.iter().for_each(|token| mask.forbid(*token)));
            return Ok(mask);
        }
        let parser = match &mut self.kind {
            MatcherKind::Inputs(inputs) => return inputs.mask(),
            MatcherKind::Text(parser) => parser,
        };
        let is_accepting = parser.is_accepting().map_err(|_| failure(parser))?;
        let allowed = if parser.is_stopped() { None } else { parser.compute_mask().ok() };
        let mut mask = match allowed {
            Some(allowed) => Mask(allowed.as_slice()[..size.div_ceil(32)].into()),
            None if is_accepting => Mask(vec![0; size.div_ceil(32)].into()),
            None => return Err(failure(parser)),
        };
        if is_accepting {
            self.shared.stop_tokens.iter().filter(|token| (**token as usize) < size).for_each(|token| mask.allow(*token));
        }
        if mask.is_empty() { Err(MatchError::NoToken) } else { Ok(Some(mask)) }
    }

    /// Appends a token to the text. Stop tokens are not part of the text.
    ///
    /// # Errors
    /// Fails if the constraint does not allow the token here, or is too complex.
    pub fn accept(&mut self, token: TokenId) -> Result<(), MatchError> {
        if let Some(marker) = &mut self.marker {
            if marker.accept(token, &self.shared.trie)? {
                self.marker = None;
            }
            return Ok(());
        }
        let parser = match &mut self.kind {
            MatcherKind::Inputs(inputs) => return inputs.accept(token),
            MatcherKind::Text(parser) => parser,
        };
        match parser.try_consume_tokens(&[token]) {
            Ok(1) => Ok(()),
            Ok(_) => Err(MatchError::NotAllowed),
            Err(_) => Err(failure(parser)),
        }
    }
}

fn failure(parser: &llguidance::Matcher) -> MatchError {
    match parser.stop_reason() {
        StopReason::NoExtensionBias | StopReason::NoExtension => MatchError::NoToken,
        _ => {
            let message = parser.get_error().unwrap_or_default();
            MatchError::TooComplex(message.lines().next().unwrap_or_default().to_owned())
        }
    }
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("is_free", &self.marker.is_some()).finish_non_exhaustive()
    }
}
