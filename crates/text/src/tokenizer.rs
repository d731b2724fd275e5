//! Converts text to token ids, and token ids to bytes.
//!
//! A text is first split at the names of special tokens (those of a model's control vocabulary, such as `<|im_start|>`). The text between
//! them is encoded by the model's own algorithm ([`encoder`]). In a *guarded* text, [`Tokenizer::mark`] has marked some of these names as plain text.

mod bpe;
mod byte_level;
mod encoder;
mod gguf;
mod json;
mod kind;
mod library;
mod sentence_piece;
mod spelling;
mod splitter;

use crate::{NamespaceEncodings, ServedModelError};
use aho_corasick::{AhoCorasick, MatchKind};
use encoder::Encoder;
use spelling::Spelling;
use std::borrow::Cow;
use tandem_kv::TokenId;
use tandem_model::sim;

/// The tokenizer of a model. It does not change.
pub struct Tokenizer {
    encoder: Encoder,
    tokens: Vec<StoredToken>,
    /// Maximum number of bytes of text that one token stands for.
    pub token_bytes_max: usize,
    /// Finds the names of all special tokens, for texts in which such a name becomes the token's id.
    special: Literals,
    /// Finds the names of user-defined tokens, which become their ids in every text.
    always: Literals,
    /// Finds the names of control tokens that [`Tokenizer::mark`] marks.
    control: AhoCorasick,
    /// Whether a decoded sequence loses the space at its start, which encoding has added.
    space_before: bool,
}

/// A part of a prompt's text, without special tokens.
#[derive(Clone, Copy)]
pub(crate) struct PromptPart<'a> {
    pub(crate) text: &'a str,
    /// Whether the prompt begins with it.
    pub(crate) is_first: bool,
}

struct StoredToken {
    /// The bytes of the token's text, or of a special token's name.
    bytes: Box<[u8]>,
    special: bool,
}

struct Literals {
    automaton: AhoCorasick,
    tokens: Vec<Literal>,
}

struct Literal {
    id: TokenId,
    /// Whether the token includes the white space before it.
    lstrip: bool,
    /// Whether the token includes the white space after it.
    rstrip: bool,
}

/// The way in which the names of control tokens in a text are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// The name of a control token is encoded as its id.
    Parsed,
    /// The name of a control token is encoded as plain text.
    Text,
}

/// The error of a text that cannot be encoded.
#[derive(Debug, thiserror::Error)]
#[error("the tokenizer failed")]
pub struct EncodeError(#[source] Box<dyn std::error::Error + Send + Sync>);

/// Candidates for the guard character: code points that Unicode never assigns to characters.
const GUARDS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

impl Tokenizer {
    /// Returns the tokenizer of `--engine sim`: each byte is a token.
    pub fn sim() -> Self {
        let plain = (0..=u8::MAX).map(|byte| StoredToken { bytes: [byte].into(), special: false });
        let special = ["<|im_start|>", "<|im_end|>"].map(|name| StoredToken { bytes: name.as_bytes().into(), special: true });
        let tokens: Vec<StoredToken> = plain.chain(special).collect();
        debug_assert_eq!(tokens.len(), sim::VOCAB_SIZE);
        let names = [("<|im_start|>".to_owned(), sim::IM_START), ("<|im_end|>".to_owned(), sim::IM_END)];
        Self {
            encoder: Encoder::Bytes,
            space_before: false,
            token_bytes_max: token_bytes_max(&tokens),
            tokens,
            special: Literals::new(names.to_vec()).expect("an automaton can be built from two short names"),
            always: Literals::new(Vec::new()).expect("an automaton can be built from no names"),
            control: automaton(names.iter().map(|(name, _)| name)).expect("an automaton can be built from two short names"),
        }
    }

    fn assemble(encoder: Encoder, spelling: &Spelling, tokens: &[String], kinds: &[i32]) -> Result<Self, ServedModelError> {
        let named = |wanted: &[i32]| -> Vec<(String, TokenId)> {
            let wanted = (0..).zip(tokens).zip(kinds).filter(|((_, text), kind)| wanted.contains(kind) && !text.is_empty());
            wanted.map(|((id, text), _)| (text.clone(), id)).collect()
        };
        let all = tokens.iter().zip(kinds).map(|(text, kind)| {
            let special = [kind::UNKNOWN, kind::CONTROL].contains(kind);
            let literal = special || *kind == kind::USER_DEFINED;
            let bytes = if literal { text.as_bytes().to_vec() } else { spelling.bytes(text) };
            StoredToken { bytes: bytes.into(), special }
        });
        let control = named(&[kind::UNKNOWN, kind::CONTROL]);
        let tokens: Vec<StoredToken> = all.collect();
        Ok(Self {
            token_bytes_max: token_bytes_max(&tokens) * encoder.shrinks(),
            encoder,
            tokens,
            special: Literals::new(named(&[kind::UNKNOWN, kind::CONTROL, kind::USER_DEFINED]))?,
            always: Literals::new(named(&[kind::USER_DEFINED]))?,
            // A name of one character is omitted, because a guard character cannot split it.
            control: automaton(control.iter().map(|(name, _)| name).filter(|name| name.chars().count() > 1))?,
            space_before: spelling.space_before(),
        })
    }

    /// Makes a special or user-defined token include the white space around it.
    fn set_strips(&mut self, id: TokenId, lstrip: bool, rstrip: bool) {
        for literal in self.special.tokens.iter_mut().chain(&mut self.always.tokens).filter(|literal| literal.id == id) {
            (literal.lstrip, literal.rstrip) = (lstrip, rstrip);
        }
    }

    /// Returns the number of token ids.
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the minimum number of tokens of a text with this many bytes.
    pub fn tokens_min(&self, text_bytes: usize) -> usize {
        text_bytes.div_ceil(self.token_bytes_max)
    }

    /// Encodes a text. Adds no token before or after it.
    ///
    /// # Errors
    /// Fails if the model's tokenizer cannot encode the text.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<TokenId>, EncodeError> {
        let literals = if special == Special::Parsed { &self.special } else { &self.always };
        self.encode_cut(text, literals, None, None)
    }

    /// Encodes a prompt in which the names of special tokens become their ids, except names that [`Tokenizer::mark`] has marked with `guard`. The
    /// ids do not depend on what `encodings` has cached.
    ///
    /// # Errors
    /// Fails if the model's tokenizer cannot encode the text.
    pub fn encode_prompt(
        &self,
        text: &str,
        guard: Option<Guard>,
        encodings: &NamespaceEncodings,
    ) -> Result<Vec<TokenId>, EncodeError> {
        self.encode_cut(text, &self.special, guard, Some(encodings))
    }

    /// Returns a guard character that occurs in none of `texts`; `None` if every candidate occurs in them.
    pub fn guard<'a>(texts: impl Iterator<Item = &'a str>) -> Option<Guard> {
        let mut free: Vec<char> = GUARDS.collect();
        for text in texts {
            if Self::may_hold_guard(text) {
                free.retain(|guard| !text.contains(*guard));
            }
        }
        free.first().map(|char| Guard(*char))
    }

    /// Returns whether the text may contain a candidate for the guard character.
    pub fn may_hold_guard(text: &str) -> bool {
        // The candidates have the same first byte in UTF-8. Most texts lack it, so one quick search suffices.
        text.as_bytes().contains(&0xEF)
    }

    /// Marks every name of a control token as plain text, by inserting the guard character after the name's first character.
    pub fn mark<'a>(&self, text: &'a str, guard: Guard) -> Cow<'a, str> {
        let mut text = Cow::Borrowed(text);
        // Names of control tokens may overlap in the text, so the search is repeated until all of them are marked.
        while self.control.is_match(&*text) {
            let mut marked = String::with_capacity(text.len() + 16);
            let mut last = 0;
            for found in self.control.find_iter(&*text) {
                let name = &text[found.range()];
                let first = name.chars().next().map_or(0, char::len_utf8);
                marked.push_str(&text[last..found.start() + first]);
                marked.push(guard.0);
                last = found.start() + first;
            }
            marked.push_str(&text[last..]);
            text = marked.into();
        }
        text
    }

    /// Returns the bytes of a token's text, or of a special token's name.
    pub fn bytes(&self, token: TokenId) -> &[u8] {
        self.tokens.get(token as usize).map_or(&[], |token| &token.bytes)
    }

    /// Returns the bytes of each token, and whether it is a special token, in the order of the ids.
    pub fn tokens(&self) -> impl Iterator<Item = (&[u8], bool)> {
        self.tokens.iter().map(|token| (&*token.bytes, token.special))
    }

    /// Returns whether the token has no visible text. This is also true of an unknown id.
    pub fn is_special(&self, token: TokenId) -> bool {
        self.tokens.get(token as usize).is_none_or(|token| token.special)
    }

    /// Returns the id of the special token with this name, if there is one.
    pub fn special_id(&self, name: &str) -> Option<TokenId> {
        let id = self.tokens.iter().position(|token| token.special && &*token.bytes == name.as_bytes())?;
        Some(id as TokenId)
    }

    /// Decodes a sequence from its start to text. A special token becomes its name.
    ///
    /// The text of a sequence begins without the space that some tokenizers put before its first word. For tokens in the middle of a sequence,
    /// use [`Tokenizer::bytes`], which keeps each token's space.
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| self.bytes(*token)).copied().collect();
        let bytes = if self.space_before { bytes.strip_prefix(b" ").unwrap_or(&bytes) } else { &bytes };
        String::from_utf8_lossy(bytes).into_owned()
    }

    fn encode_cut(
        &self,
        text: &str,
        literals: &Literals,
        guard: Option<Guard>,
        encodings: Option<&NamespaceEncodings>,
    ) -> Result<Vec<TokenId>, EncodeError> {
        // Each call encodes the text between two special tokens.
        let encode = |part: PromptPart<'_>, ids: &mut Vec<TokenId>| self.encode_plain(part, guard, encodings, ids);
        let mut ids = Vec::with_capacity(text.len() / 4);
        let mut last = 0;
        for found in literals.automaton.find_iter(text).filter(|found| !found.is_empty()) {
            // The white space that the preceding token includes (`rstrip`) may be a part of this name.
            if found.start() < last {
                continue;
            }
            let literal = &literals.tokens[found.pattern()];
            let before = &text[last..found.start()];
            let before = if literal.lstrip { before.trim_end() } else { before };
            encode(PromptPart { text: before, is_first: last == 0 }, &mut ids)?;
            ids.push(literal.id);
            let after = &text[found.end()..];
            last = text.len() - if literal.rstrip { after.trim_start() } else { after }.len();
        }
        encode(PromptPart { text: &text[last..], is_first: last == 0 }, &mut ids)?;
        Ok(ids)
    }

    /// Encodes text without special tokens.
    fn encode_plain(
        &self,
        part: PromptPart<'_>,
        guard: Option<Guard>,
        encodings: Option<&NamespaceEncodings>,
        ids: &mut Vec<TokenId>,
    ) -> Result<(), EncodeError> {
        let unmarked = guard.filter(|guard| part.text.contains(guard.0)).map(|guard| part.text.replace(guard.0, ""));
        let part = PromptPart { text: unmarked.as_deref().unwrap_or(part.text), ..part };
        let encode = |ids: &mut Vec<TokenId>| self.encoder.encode(part, ids);
        match encodings {
            _ if part.text.is_empty() => Ok(()),
            Some(encodings) if self.encoder.is_slow() => encodings.encode(part, ids, encode),
            _ => encode(ids),
        }
    }
}

/// A character that [`Tokenizer::mark`] inserts into the name of a control token, so that the name is encoded as plain text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard(char);

impl Guard {
    pub fn char(self) -> char {
        self.0
    }
}

impl Literals {
    fn new(names: Vec<(String, TokenId)>) -> Result<Self, ServedModelError> {
        let automaton = automaton(names.iter().map(|(name, _)| name))?;
        let token = |(_, id)| Literal { id, lstrip: false, rstrip: false };
        Ok(Self { automaton, tokens: names.into_iter().map(token).collect() })
    }
}

fn token_bytes_max(tokens: &[StoredToken]) -> usize {
    tokens.iter().map(|token| token.bytes.len()).max().unwrap_or_default().max(1)
}

fn automaton<'a>(names: impl Iterator<Item = &'a String>) -> Result<AhoCorasick, ServedModelError> {
    Ok(AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(names)?)
}

#[cfg(test)]
mod tests;
