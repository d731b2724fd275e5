//! The way in which a vocabulary writes the bytes of a token.

use crate::error::ServedModelError;
use serde_json::Value;
use std::collections::HashMap;

/// The character that stands for a space in pieces.
pub(super) const SPACE: &str = "\u{2581}";

pub(super) enum Spelling {
    /// Each byte is written as one of GPT-2's characters.
    ByteLevel(HashMap<char, u8>),
    /// The text is written as it is, except replaced characters and the tokens of single bytes.
    Pieces {
        /// Pairs of a text in the vocabulary and the text for which it stands.
        replaced: Vec<(String, String)>,
        /// Whether a token such as `<0x41>` stands for a byte.
        byte_tokens: bool,
        /// Whether a decoded sequence loses the space at its start, which encoding has added.
        space_before: bool,
    },
}

impl Spelling {
    pub(super) fn byte_level() -> Self {
        let visible = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let mut hidden = (256..).filter_map(char::from_u32);
        let mut char_of =
            |byte: u8| if visible(byte) { byte.into() } else { hidden.next().expect("the range has 256 characters") };
        Self::ByteLevel((0..=u8::MAX).map(|byte| (char_of(byte), byte)).collect())
    }

    /// Returns the spelling of SentencePiece's vocabularies.
    pub(super) fn sentence_piece(space_before: bool) -> Self {
        Self::Pieces { replaced: vec![(SPACE.to_owned(), " ".to_owned())], byte_tokens: true, space_before }
    }

    /// Reads the spelling from a `tokenizer.json`.
    ///
    /// # Errors
    /// Fails if the decoder is not supported.
    pub(super) fn of_json(file: &Value) -> Result<Self, ServedModelError> {
        let (before, decoder) = (&file["pre_tokenizer"], &file["decoder"]);
        let kind = |part: &Value| part["type"].as_str().unwrap_or("none").to_owned();
        if parts(before, "pretokenizers").iter().any(|part| part["type"] == "ByteLevel") {
            return Ok(Self::byte_level());
        }
        if decoder.is_null() || decoder["type"] == "ByteLevel" {
            return Err(ServedModelError::PreTokenizer(kind(before)));
        }
        let (mut replaced, mut byte_tokens, mut space_before) = (Vec::new(), false, false);
        for part in parts(decoder, "decoders") {
            let unsupported = || ServedModelError::Decoder(kind(part));
            match kind(part).as_str() {
                "Fuse" => {}
                "ByteFallback" => byte_tokens = true,
                "Strip" if part["content"] == " " && part["stop"] == 0 => space_before = part["start"] == 1,
                "Replace" => {
                    let text = |value: &Value| value.as_str().map(str::to_owned).ok_or_else(unsupported);
                    replaced.push((text(&part["pattern"]["String"])?, text(&part["content"])?));
                }
                "Metaspace" => {
                    replaced.push((part["replacement"].as_str().ok_or_else(unsupported)?.to_owned(), " ".to_owned()));
                    space_before = part["prepend_scheme"] != "never" && part["add_prefix_space"] != false;
                }
                _ => return Err(unsupported()),
            }
        }
        Ok(Self::Pieces { replaced, byte_tokens, space_before })
    }

    /// Returns the bytes of a token's text in the vocabulary.
    pub(super) fn bytes(&self, text: &str) -> Vec<u8> {
        match self {
            Self::ByteLevel(_) => self.visible_bytes(text).unwrap_or_else(|| text.into()),
            Self::Pieces { replaced, byte_tokens, .. } => match byte(text).filter(|_| *byte_tokens) {
                Some(byte) => vec![byte],
                None => replaced.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to)).into_bytes(),
            },
        }
    }

    /// Returns the bytes of a text in which each byte is written as one of GPT-2's characters; `None` if the text has other characters.
    pub(super) fn visible_bytes(&self, text: &str) -> Option<Vec<u8>> {
        let Self::ByteLevel(byte_of) = self else { return None };
        text.chars().map(|char| byte_of.get(&char).copied()).collect()
    }

    pub(super) fn space_before(&self) -> bool {
        matches!(self, Self::Pieces { space_before: true, .. })
    }
}

/// Returns the byte that a token like `<0x41>` stands for.
pub(super) fn byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>').filter(|digits| digits.len() == 2)?;
    u8::from_str_radix(digits, 16).ok()
}

fn parts<'a>(whole: &'a Value, list: &str) -> Vec<&'a Value> {
    match whole[list].as_array() {
        Some(nested) => nested.iter().flat_map(|part| parts(part, list)).collect(),
        None if whole.is_null() => Vec::new(),
        None => vec![whole],
    }
}
