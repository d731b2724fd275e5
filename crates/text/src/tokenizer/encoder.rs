//! Encodes text that contains no special tokens.

use super::{EncodeError, PromptPart, byte_level::ByteLevel, library::Library, sentence_piece::SentencePiece};
use tandem_kv::TokenId;

pub(super) enum Encoder {
    ByteLevel {
        shrinks: usize,
        encoder: Box<ByteLevel>,
    },
    Library(Box<Library>),
    SentencePiece(Box<SentencePiece>),
    /// Each byte is a token.
    Bytes,
}

impl Encoder {
    /// Returns the fastest encoder that gives the ids of these steps.
    pub(super) fn of(library: Library) -> Self {
        match ByteLevel::of(&library) {
            Some(encoder) => Self::ByteLevel { shrinks: library.shrinks(), encoder: Box::new(encoder) },
            None => Self::Library(Box::new(library)),
        }
    }

    /// Returns the maximum number of bytes of text that one byte of a token's text can stand for.
    pub(super) fn shrinks(&self) -> usize {
        match self {
            Self::Bytes | Self::SentencePiece(_) => 1,
            Self::ByteLevel { shrinks, .. } => *shrinks,
            Self::Library(library) => library.shrinks(),
        }
    }

    /// Whether a lookup of a text's ids in a cache costs less than encoding the text.
    pub(super) fn is_slow(&self) -> bool {
        !matches!(self, Self::Bytes)
    }

    /// Appends the ids of a part of a prompt.
    pub(super) fn encode(&self, part: PromptPart<'_>, ids: &mut Vec<TokenId>) -> Result<(), EncodeError> {
        let text = part.text;
        match self {
            Self::Bytes => ids.extend(text.bytes().map(TokenId::from)),
            Self::ByteLevel { encoder, .. } => encoder.encode(text, ids),
            Self::SentencePiece(pieces) => pieces.encode(text, ids),
            Self::Library(library) => library.encode(part, ids).map_err(EncodeError)?,
        }
        Ok(())
    }
}
