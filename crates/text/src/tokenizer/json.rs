//! Builds tokenizers from `tokenizer.json`, the file of Hugging Face's `tokenizers`.

use super::{Tokenizer, encoder::Encoder, kind, library::Library, spelling::Spelling};
use crate::error::ServedModelError;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tandem_kv::TokenId;

/// An entry of `added_tokens`.
#[derive(serde::Deserialize)]
struct AddedToken {
    id: TokenId,
    content: String,
    special: bool,
    /// Whether the token includes the white space before it.
    #[serde(default)]
    lstrip: bool,
    /// Whether the token includes the white space after it.
    #[serde(default)]
    rstrip: bool,
    /// Whether the token is found only between words. A file with such a token is refused.
    #[serde(default)]
    single_word: bool,
}

impl Tokenizer {
    /// Builds the tokenizer of a `tokenizer.json`. Also returns the token that the file puts before every text, if there is one.
    ///
    /// # Errors
    /// Fails if the file's tokenizer is not supported or malformed.
    pub fn from_json(json: &[u8]) -> Result<(Self, Option<TokenId>), ServedModelError> {
        let mut file: Value = serde_json::from_slice(json).map_err(broken)?;
        let algorithm = file["model"]["type"].as_str().unwrap_or("unknown").to_owned();
        if !["BPE", "Unigram"].contains(&algorithm.as_str()) {
            return Err(ServedModelError::TokenizerAlgorithm(algorithm));
        }
        let spelling = Spelling::of_json(&file)?;
        let first = leading_token(&tokenizers::Tokenizer::from_bytes(json).map_err(ServedModelError::Tokenizer)?)?;
        // The library gets no added tokens, because it does not know guard characters. `encode_cut` finds special tokens instead.
        let added: Vec<AddedToken> = part(file["added_tokens"].take())?.unwrap_or_default();
        if let Some(token) = added.iter().find(|token| token.single_word) {
            return Err(ServedModelError::AddedToken(token.content.clone()));
        }
        if algorithm == "Unigram" {
            hide_special_pieces(&mut file["model"]["vocab"], &added);
        }
        let mut pre_tokenizer = file["pre_tokenizer"].take();
        let at_start = part(pre_tokenizer.clone())?;
        no_space_before(&mut pre_tokenizer);
        let library = Library {
            normalizer: part(file["normalizer"].take())?,
            first: at_start,
            later: part(pre_tokenizer)?,
            model: serde_json::from_value(file["model"].take()).map_err(broken)?,
        };
        let vocabulary = tokenizers::Model::get_vocab(&library.model);
        let named = vocabulary.into_iter().map(|(text, id)| (id, text, kind::NORMAL));
        let special = added.iter().map(|token| {
            let kind = if token.special { kind::CONTROL } else { kind::USER_DEFINED };
            (token.id, token.content.clone(), kind)
        });
        let all: Vec<(TokenId, String, i32)> = named.chain(special).collect();
        // Some ids may be unused, but a damaged file must not cause a huge allocation.
        let len = all.iter().map(|(id, ..)| *id as usize + 1).max().unwrap_or_default();
        if len > 2 * all.len() + 65_536 {
            return Err(ServedModelError::TokenIds(len));
        }
        let (mut tokens, mut kinds) = (vec![String::new(); len], vec![kind::UNUSED; len]);
        for (id, text, kind) in all {
            (tokens[id as usize], kinds[id as usize]) = (text, kind);
        }
        let mut tokenizer = Self::assemble(Encoder::of(library), &spelling, &tokens, &kinds)?;
        for token in added {
            tokenizer.set_strips(token.id, token.lstrip, token.rstrip);
        }
        Ok((tokenizer, first))
    }
}

fn broken(source: serde_json::Error) -> ServedModelError {
    ServedModelError::Tokenizer(Box::new(source))
}

/// Reads a part of the file that may be null or absent.
fn part<T: DeserializeOwned>(value: Value) -> Result<Option<T>, ServedModelError> {
    serde_json::from_value(value).map_err(broken)
}

/// Changes a pre-tokenizer that puts a space before the start of a sequence, so that it leaves the text unchanged.
fn no_space_before(pre_tokenizer: &mut Value) {
    if pre_tokenizer["prepend_scheme"] == "first" {
        pre_tokenizer["prepend_scheme"] = "never".into();
        pre_tokenizer["add_prefix_space"] = Value::Null;
    }
    if let Some(steps) = pre_tokenizer.get_mut("pretokenizers").and_then(Value::as_array_mut) {
        steps.iter_mut().for_each(no_space_before);
    }
}

/// Renames the pieces of special tokens, which this algorithm would otherwise find in plain text. No text contains the new names, because its spaces
/// are replaced before it is split into pieces.
fn hide_special_pieces(vocabulary: &mut Value, added: &[AddedToken]) {
    for token in added.iter().filter(|token| token.special) {
        let piece = vocabulary.get_mut(token.id as usize).and_then(|piece| piece.get_mut(0));
        if let Some(piece) = piece.filter(|piece| **piece == token.content) {
            *piece = format!("{} ", token.content).into();
        }
    }
}

/// Returns the token that the file's post-processor puts before every text, if there is one.
///
/// # Errors
/// Fails if the post-processor changes a text in any other way.
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
