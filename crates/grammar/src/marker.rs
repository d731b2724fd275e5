//! The marker that ends the free text before a constraint begins.

use crate::MatchError;
use llguidance::toktrie::{ApproximateTokEnv, TokTrie, TokenizerEnv};
use std::sync::Arc;
use tandem_kv::TokenId;

/// Finds the marker after which a constraint begins. White space that follows the marker in the same token is free as well. Any other text must not
/// follow in the same token, because the constraint has not been applied to it.
#[derive(Clone)]
pub(crate) struct Marker {
    marker: Arc<[u8]>,
    /// The last bytes of the text, fewer than the marker has.
    tail: Vec<u8>,
    /// The tokens that contain the whole marker and more text.
    barred: Arc<[TokenId]>,
}

impl Marker {
    pub fn new(marker: &str, trie: &ApproximateTokEnv) -> Self {
        let mut new = Self { marker: marker.as_bytes().into(), tail: Vec::new(), barred: Arc::new([]) };
        new.barred = new.overrunning(trie).into();
        new
    }

    /// Returns the tokens that must not be generated now: with them, text would follow the marker in the same token.
    pub fn barred(&self, trie: &ApproximateTokEnv) -> Vec<TokenId> {
        let may_be_within = (1..=self.tail.len()).any(|len| self.tail.ends_with(&self.marker[..len]));
        if may_be_within { self.overrunning(trie) } else { self.barred.to_vec() }
    }

    /// Appends a token. Returns whether the marker is complete.
    pub fn accept(&mut self, token: TokenId, trie: &ApproximateTokEnv) -> Result<bool, MatchError> {
        self.tail.extend(text(trie, token));
        if let Some(end) = self.end_in(&self.tail) {
            return if is_space(&self.tail[end..]) { Ok(true) } else { Err(MatchError::NotAllowed) };
        }
        let excess = (self.tail.len() + 1).saturating_sub(self.marker.len());
        self.tail.drain(..excess);
        Ok(false)
    }

    fn end_in(&self, text: &[u8]) -> Option<usize> {
        let begin = text.windows(self.marker.len()).position(|window| *window == *self.marker)?;
        Some(begin + self.marker.len())
    }

    fn overrunning(&self, trie: &ApproximateTokEnv) -> Vec<TokenId> {
        let mut joined = self.tail.clone();
        let overruns = |token: &TokenId| {
            joined.truncate(self.tail.len());
            joined.extend(text(trie, *token));
            self.end_in(&joined).is_some_and(|end| !is_space(&joined[end..]))
        };
        (0..trie.tok_trie().vocab_size() as TokenId).filter(overruns).collect()
    }
}

fn is_space(text: &[u8]) -> bool {
    text.iter().all(u8::is_ascii_whitespace)
}

fn text(trie: &ApproximateTokEnv, token: TokenId) -> &[u8] {
    match trie.tok_trie().token(token) {
        [TokTrie::SPECIAL_TOKEN_MARKER, name @ ..] if !name.is_empty() => name,
        bytes => bytes,
    }
}
