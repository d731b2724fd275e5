//! Recovers tokens that a streamed answer of llama.cpp leaves out.
//!
//! A token may end within a UTF-8 character. The server sends no event for such a token. Its event for the token that completes the character has the
//! text of all these tokens, but only the id of the last one. The adapter uses the ids into which the server's tokenizer divides the text. These
//! tokens have the same bytes, although the model may have divided the text differently.

use crate::api::EngineFailure;
use serde::Deserialize;
use tandem_kv::TokenId;

#[derive(Deserialize)]
pub(super) struct Tokenized {
    tokens: Vec<PieceToken>,
}

#[derive(Deserialize)]
struct PieceToken {
    id: TokenId,
    piece: TokenPiece,
}

/// The text of a token, or its bytes if they are not valid UTF-8.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenPiece {
    Text(String),
    Bytes(Vec<u8>),
}

impl TokenPiece {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl Tokenized {
    /// Returns the tokens whose bytes are exactly the text, without the space that some tokenizers put before the text.
    ///
    /// # Errors
    /// Fails if no tokens at the end of the tokenizer's answer have these bytes.
    pub fn of(self, text: &str) -> Result<Vec<TokenId>, EngineFailure> {
        let suffixes = (0..self.tokens.len()).map(|from| &self.tokens[from..]);
        let has_the_text = |tokens: &&[PieceToken]| tokens.iter().flat_map(|token| token.piece.bytes()).eq(text.as_bytes());
        match { suffixes }.find(has_the_text) {
            Some(tokens) => Ok(tokens.iter().map(|token| token.id).collect()),
            None => Err(EngineFailure::Protocol(
                "the server's tokenizer returned no tokens for a character that it had divided".to_owned(),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(json: &str, text: &str) -> Result<Vec<TokenId>, EngineFailure> {
        serde_json::from_str::<Tokenized>(json).expect("an answer").of(text)
    }

    #[test]
    fn recovered_tokens_have_exactly_the_bytes_of_their_text() {
        // The answer was recorded from build 10434 of llama.cpp.
        let recorded = r#"{"tokens":[{"id":10813,"piece":[240,159]},{"id":232,"piece":[142]},{"id":227,"piece":[137]}]}"#;
        assert_eq!(tokens(recorded, "🎉").expect("the tokens have the text's bytes"), [10_813, 232, 227]);
        let spaced =
            r#"{"tokens":[{"id":9,"piece":" "},{"id":7,"piece":[226,130]},{"id":8,"piece":[172]},{"id":3,"piece":"!"}]}"#;
        assert_eq!(tokens(spaced, "€!").expect("the tokens have the text's bytes after the space"), [7, 8, 3]);
        for other in ["🎊", "", "a🎉"] {
            assert!(tokens(recorded, other).is_err(), "{other}");
        }
    }
}
