//! Converts text to token ids, and token ids to bytes.
//!
//! A text is first split at the names of special tokens (those of a model's control vocabulary, such as `<|im_start|>`). The text between
//! them is encoded by the model's own algorithm. In a *guarded* text, [`Tokenizer::mark`] has marked some of these names as plain text.

use crate::model::error::ServedModelError;
use aho_corasick::{AhoCorasick, MatchKind};
use std::collections::HashMap;
use tandem_kv::TokenId;
use tandem_model::{TokenizerData, sim};
use tokenizers::{
    PreTokenizerWrapper, SplitDelimiterBehavior,
    models::bpe::{BPE, Vocab},
    normalizers::unicode::NFC,
    pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

/// The GGUF token types that the tokenizer distinguishes.
mod kind {
    pub(super) const NORMAL: i32 = 1;
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const CONTROL: i32 = 3;
    pub(super) const USER_DEFINED: i32 = 4;
    pub(super) const UNUSED: i32 = 5;
}

/// A model's tokenizer. It never changes.
pub struct Tokenizer {
    algorithm: Algorithm,
    tokens: Vec<Token>,
    /// The maximum number of bytes of text that one token stands for.
    pub(crate) token_bytes_max: usize,
    /// Finds the names of all special tokens, for texts in which such a name becomes the token's id.
    special: Literals,
    /// Finds the names of user-defined tokens, which become their ids in every text.
    always: Literals,
    /// Finds the names of control tokens that [`Tokenizer::mark`] marks.
    control: AhoCorasick,
}

enum Algorithm {
    /// Byte-level byte-pair encoding.
    Bpe(Box<tokenizers::Tokenizer>),
    /// Each byte is a token.
    Bytes,
}

struct Token {
    /// The bytes of the token's text, or of a special token's name.
    bytes: Box<[u8]>,
    special: bool,
}

struct Literals {
    automaton: AhoCorasick,
    ids: Vec<TokenId>,
}

/// How the names of control tokens in a text are encoded.
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

/// Candidates for the guard character: code points that Unicode never assigns.
const GUARDS: std::ops::RangeInclusive<char> = '\u{FDD0}'..='\u{FDEF}';

impl Tokenizer {
    /// Returns the tokenizer of `--engine sim`: each byte is a token.
    pub(crate) fn sim() -> Self {
        let plain = (0..=u8::MAX).map(|byte| Token { bytes: [byte].into(), special: false });
        let special = ["<|im_start|>", "<|im_end|>"].map(|name| Token { bytes: name.as_bytes().into(), special: true });
        let tokens: Vec<Token> = plain.chain(special).collect();
        debug_assert_eq!(tokens.len(), sim::VOCAB_SIZE);
        let names = [("<|im_start|>".to_owned(), sim::IM_START), ("<|im_end|>".to_owned(), sim::IM_END)];
        Self {
            algorithm: Algorithm::Bytes,
            token_bytes_max: token_bytes_max(&tokens),
            tokens,
            special: Literals::new(names.to_vec()).expect("an automaton can be built from two short names"),
            always: Literals::new(Vec::new()).expect("an automaton can be built from no names"),
            control: automaton(names.iter().map(|(name, _)| name)).expect("an automaton can be built from two short names"),
        }
    }

    /// Builds the tokenizer of a GGUF file, which must be byte-level BPE with one of the supported pre-tokenizers.
    ///
    /// # Errors
    /// The file's tokenizer is not supported or malformed.
    pub(crate) fn from_data(data: &TokenizerData) -> Result<Self, ServedModelError> {
        if data.model != "gpt2" {
            return Err(ServedModelError::TokenizerAlgorithm(data.model.clone()));
        }
        let Cut { pre_tokenizer, composed, whole_words } = Cut::named(&data.pre)?;
        let merge = |merge: &String| merge.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned()));
        let merges = data.merges.iter().map(merge).collect::<Option<Vec<_>>>().ok_or(ServedModelError::Merge)?;
        let bpe = BPE::builder()
            .vocab_and_merges(data.tokens.iter().cloned().zip(0..).collect::<Vocab>(), merges)
            .ignore_merges(whole_words)
            .build()
            .map_err(ServedModelError::Tokenizer)?;
        let mut encoder = tokenizers::Tokenizer::new(bpe);
        encoder.with_pre_tokenizer(Some(pre_tokenizer));
        encoder.with_normalizer(composed.then_some(NFC)).map_err(ServedModelError::Tokenizer)?;
        Self::assemble(encoder, &data.tokens, &data.token_types)
    }

    /// Builds the tokenizer of a `tokenizer.json`, which must be byte-level BPE. Also returns the token that the file puts before every
    /// text, if any.
    ///
    /// # Errors
    /// The file's tokenizer is not supported or malformed.
    pub fn from_json(json: &[u8]) -> Result<(Self, Option<TokenId>), ServedModelError> {
        let broken = |source: serde_json::Error| ServedModelError::Tokenizer(Box::new(source));
        let mut file: serde_json::Value = serde_json::from_slice(json).map_err(broken)?;
        let algorithm = file["model"]["type"].as_str().unwrap_or("unknown");
        if algorithm != "BPE" || file["model"]["byte_fallback"] == true {
            return Err(ServedModelError::TokenizerAlgorithm(algorithm.to_owned()));
        }
        if !is_byte_level(&file["pre_tokenizer"]) {
            let found = file["pre_tokenizer"]["type"].as_str().unwrap_or("unknown").to_owned();
            return Err(ServedModelError::PreTokenizer(found));
        }
        let whole = tokenizers::Tokenizer::from_bytes(json).map_err(ServedModelError::Tokenizer)?;
        let first = leading_token(&whole)?;
        // The library gets no added tokens: it does not know guard characters, so `encode_cut` finds special tokens itself.
        let added: Vec<AddedToken> = serde_json::from_value(file["added_tokens"].take()).map_err(broken)?;
        file["added_tokens"] = serde_json::json!([]);
        for step in ["post_processor", "truncation", "padding"] {
            file[step].take();
        }
        let bare = serde_json::to_vec(&file).map_err(broken)?;
        let encoder = tokenizers::Tokenizer::from_bytes(bare).map_err(ServedModelError::Tokenizer)?;
        if let Some(token) = added.iter().find(|token| token.lstrip || token.rstrip || token.single_word) {
            return Err(ServedModelError::AddedToken(token.content.clone()));
        }
        let vocabulary = encoder.get_vocab(false);
        let named = vocabulary.into_iter().map(|(text, id)| (id, text, kind::NORMAL));
        let added = added.into_iter().map(|token| {
            let kind = if token.special { kind::CONTROL } else { kind::USER_DEFINED };
            (token.id, token.content, kind)
        });
        let all: Vec<(TokenId, String, i32)> = named.chain(added).collect();
        // Some ids may be unused, but a damaged file must not cause a huge allocation.
        let len = all.iter().map(|(id, ..)| *id as usize + 1).max().unwrap_or_default();
        if len > 2 * all.len() + 65_536 {
            return Err(ServedModelError::TokenIds(len));
        }
        let (mut tokens, mut kinds) = (vec![String::new(); len], vec![kind::UNUSED; len]);
        for (id, text, kind) in all {
            (tokens[id as usize], kinds[id as usize]) = (text, kind);
        }
        Ok((Self::assemble(encoder, &tokens, &kinds)?, first))
    }

    /// Builds the tokenizer from the library's encoder. `kinds` has the GGUF type of each token.
    fn assemble(encoder: tokenizers::Tokenizer, tokens: &[String], kinds: &[i32]) -> Result<Self, ServedModelError> {
        let named = |wanted: &[i32]| -> Vec<(String, TokenId)> {
            let wanted = (0..).zip(tokens).zip(kinds).filter(|((_, text), kind)| wanted.contains(kind) && !text.is_empty());
            wanted.map(|((id, text), _)| (text.clone(), id)).collect()
        };
        let bytes_of = byte_of_char();
        let all = tokens.iter().zip(kinds).map(|(text, kind)| {
            let special = [kind::UNKNOWN, kind::CONTROL].contains(kind);
            let literal = special || *kind == kind::USER_DEFINED;
            let bytes = text.chars().map(|char| bytes_of.get(&char).copied()).collect::<Option<Vec<u8>>>();
            let bytes = bytes.filter(|_| !literal).unwrap_or_else(|| text.as_bytes().to_vec());
            Token { bytes: bytes.into(), special }
        });
        let control = named(&[kind::UNKNOWN, kind::CONTROL]);
        let tokens: Vec<Token> = all.collect();
        // Unicode composition (NFC) makes a text at most four times shorter, so a token may stand for four times the bytes of its own text.
        let shrinks = if encoder.get_normalizer().is_some() { 4 } else { 1 };
        Ok(Self {
            algorithm: Algorithm::Bpe(Box::new(encoder)),
            token_bytes_max: token_bytes_max(&tokens) * shrinks,
            tokens,
            special: Literals::new(named(&[kind::UNKNOWN, kind::CONTROL, kind::USER_DEFINED]))?,
            always: Literals::new(named(&[kind::USER_DEFINED]))?,
            // A name of one character is omitted, because a guard character cannot split it.
            control: automaton(control.iter().map(|(name, _)| name).filter(|name| name.chars().count() > 1))?,
        })
    }

    /// The number of token ids.
    pub fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the minimum number of tokens of a text with this many bytes.
    pub(crate) fn tokens_min(&self, text_bytes: usize) -> usize {
        text_bytes.div_ceil(self.token_bytes_max)
    }

    /// Encodes a text. Adds no token before or after it.
    ///
    /// # Errors
    /// The model's tokenizer cannot encode the text.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<TokenId>, EncodeError> {
        let literals = if special == Special::Parsed { &self.special } else { &self.always };
        self.encode_cut(text, literals, None)
    }

    /// Encodes a text in which the names of special tokens become their ids, except names that [`Tokenizer::mark`] has marked with `guard`.
    ///
    /// # Errors
    /// The model's tokenizer cannot encode the text.
    pub(crate) fn encode_guarded(&self, text: &str, guard: Guard) -> Result<Vec<TokenId>, EncodeError> {
        self.encode_cut(text, &self.special, Some(guard))
    }

    /// Returns a guard character that occurs in none of `texts`; `None` if every candidate occurs in them.
    pub(crate) fn guard<'a>(texts: impl Iterator<Item = &'a str>) -> Option<Guard> {
        let mut free: Vec<char> = GUARDS.collect();
        for text in texts {
            // The candidates have the same first byte in UTF-8. Most texts lack it, so one quick search suffices.
            if text.as_bytes().contains(&0xEF) {
                free.retain(|guard| !text.contains(*guard));
            }
        }
        free.first().map(|char| Guard(*char))
    }

    /// Marks every name of a control token as plain text, by inserting the guard character after the name's first character.
    pub(crate) fn mark(&self, text: &str, guard: Guard) -> String {
        let mut text = text.to_owned();
        // Names of control tokens in the text may overlap, so the search is repeated until all of them are marked as ordinary text.
        while self.control.is_match(&text) {
            let mut marked = String::with_capacity(text.len() + 16);
            let mut last = 0;
            for found in self.control.find_iter(&text) {
                let name = &text[found.range()];
                let first = name.chars().next().map_or(0, char::len_utf8);
                marked.push_str(&text[last..found.start() + first]);
                marked.push(guard.0);
                last = found.start() + first;
            }
            marked.push_str(&text[last..]);
            text = marked;
        }
        text
    }

    /// Returns the bytes of a token's text, or of a special token's name.
    pub fn bytes(&self, token: TokenId) -> &[u8] {
        self.tokens.get(token as usize).map_or(&[], |token| &token.bytes)
    }

    /// Whether the token has no visible text. Unknown ids count as such tokens.
    pub(crate) fn is_special(&self, token: TokenId) -> bool {
        self.tokens.get(token as usize).is_none_or(|token| token.special)
    }

    /// Returns the id of the special token with this name, if there is one.
    pub(crate) fn special_id(&self, name: &str) -> Option<TokenId> {
        let id = self.tokens.iter().position(|token| token.special && &*token.bytes == name.as_bytes())?;
        Some(id as TokenId)
    }

    /// Decodes tokens to text. A special token becomes its name.
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| self.bytes(*token)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn encode_cut(&self, text: &str, literals: &Literals, guard: Option<Guard>) -> Result<Vec<TokenId>, EncodeError> {
        let mut ids = Vec::with_capacity(text.len() / 4);
        let mut last = 0;
        for found in literals.automaton.find_iter(text) {
            self.encode_plain(&text[last..found.start()], guard, &mut ids)?;
            ids.push(literals.ids[found.pattern()]);
            last = found.end();
        }
        self.encode_plain(&text[last..], guard, &mut ids)?;
        Ok(ids)
    }

    fn encode_plain(&self, text: &str, guard: Option<Guard>, ids: &mut Vec<TokenId>) -> Result<(), EncodeError> {
        if text.is_empty() {
            return Ok(());
        }
        let unmarked = guard.filter(|guard| text.contains(guard.0)).map(|guard| text.replace(guard.0, ""));
        let text = unmarked.as_deref().unwrap_or(text);
        match &self.algorithm {
            Algorithm::Bytes => ids.extend(text.bytes().map(TokenId::from)),
            Algorithm::Bpe(encoder) => {
                ids.extend_from_slice(encoder.encode_fast(text, false).map_err(EncodeError)?.get_ids());
            }
        }
        Ok(())
    }
}

/// An entry of `added_tokens` in `tokenizer.json`.
#[derive(serde::Deserialize)]
struct AddedToken {
    id: TokenId,
    content: String,
    special: bool,
    /// Whether the token removes the white space before it. A token with this field, `rstrip` or `single_word` set is refused, because it
    /// would change the text around it.
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    single_word: bool,
}

/// Whether the pre-tokenizer converts texts to bytes.
fn is_byte_level(pre_tokenizer: &serde_json::Value) -> bool {
    let parts = pre_tokenizer["pretokenizers"].as_array();
    pre_tokenizer["type"] == "ByteLevel" || parts.is_some_and(|parts| parts.iter().any(|part| part["type"] == "ByteLevel"))
}

/// Returns the token that the file's post-processor puts before every text, if any.
///
/// # Errors
/// The post-processor changes a text in any other way.
fn leading_token(whole: &tokenizers::Tokenizer) -> Result<Option<TokenId>, ServedModelError> {
    let ids = |finished| -> Result<Vec<TokenId>, ServedModelError> {
        Ok(whole.encode_fast("a", finished).map_err(ServedModelError::Tokenizer)?.get_ids().to_vec())
    };
    let (plain, finished) = (ids(false)?, ids(true)?);
    match finished.strip_suffix(plain.as_slice()) {
        Some([]) => Ok(None),
        Some([first]) => Ok(Some(*first)),
        _ => Err(ServedModelError::PostProcessor),
    }
}

/// The steps that split a text before BPE merges are applied.
struct Cut {
    pre_tokenizer: PreTokenizerWrapper,
    /// Whether a letter and its accents are first composed to one character (NFC).
    composed: bool,
    /// Whether a word that is itself a token is encoded as that token, without merges.
    whole_words: bool,
}

impl Cut {
    /// Returns the steps of the pre-tokenizer that GGUF files call `name`.
    fn named(name: &str) -> Result<Self, ServedModelError> {
        /// These regular expressions are from the `tokenizer.json` of Llama 3, and of Qwen 2 and 3. Those of Qwen split numbers into single
        /// digits.
        const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        const QWEN_2: &str =
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let own_rule = |regex: &str| -> Result<PreTokenizerWrapper, ServedModelError> {
            let split = Split::new(SplitPattern::Regex(regex.to_owned()), SplitDelimiterBehavior::Isolated, false);
            let bytes = ByteLevel::new(false, true, false);
            Ok(Sequence::new(vec![split.map_err(ServedModelError::Tokenizer)?.into(), bytes.into()]).into())
        };
        let gpt2 = ByteLevel::new(false, true, true);
        let (pre_tokenizer, composed, whole_words) = match name {
            "gpt2" | "gpt-2" => (gpt2.into(), false, false),
            "smollm" => (Sequence::new(vec![Digits::new(true).into(), gpt2.into()]).into(), false, false),
            "llama-bpe" => (own_rule(LLAMA_3)?, false, true),
            "qwen2" => (own_rule(QWEN_2)?, true, false),
            found => return Err(ServedModelError::PreTokenizer(found.to_owned())),
        };
        Ok(Self { pre_tokenizer, composed, whole_words })
    }
}

/// A character that [`Tokenizer::mark`] inserts into the name of a control token, so that the name is encoded as plain text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Guard(char);

impl Literals {
    fn new(names: Vec<(String, TokenId)>) -> Result<Self, ServedModelError> {
        let automaton = automaton(names.iter().map(|(name, _)| name))?;
        Ok(Self { automaton, ids: names.into_iter().map(|(_, id)| id).collect() })
    }
}

fn token_bytes_max(tokens: &[Token]) -> usize {
    tokens.iter().map(|token| token.bytes.len()).max().unwrap_or_default().max(1)
}

fn automaton<'a>(names: impl Iterator<Item = &'a String>) -> Result<AhoCorasick, ServedModelError> {
    Ok(AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(names)?)
}

/// Returns a map from GPT-2's visible character for each byte to that byte.
fn byte_of_char() -> HashMap<char, u8> {
    let visible = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut hidden = (256..).filter_map(char::from_u32);
    let mut char_of = |byte: u8| if visible(byte) { byte.into() } else { hidden.next().expect("the range has 256 characters") };
    (0..=u8::MAX).map(|byte| (char_of(byte), byte)).collect()
}

#[cfg(test)]
mod tests;
