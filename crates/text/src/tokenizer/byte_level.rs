//! Byte-level BPE without offsets: it gives the ids of Hugging Face's library, which also records where each token was in the text.

use super::{
    bpe::{Bpe, BpeScratch},
    library::Library,
    spelling::Spelling,
    splitter::Splitter,
};
use std::{borrow::Cow, collections::HashMap};
use tandem_kv::TokenId;
use tokenizers::{ModelWrapper, NormalizerWrapper, models::bpe::BPE};
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

pub(super) struct ByteLevel {
    /// Whether a letter and its accents are first composed to one character (NFC).
    composed: bool,
    splitter: Splitter,
    bpe: Bpe,
}

/// The merges of a model, as the library writes them.
#[derive(serde::Deserialize)]
struct Merges {
    merges: Vec<(String, String)>,
}

impl ByteLevel {
    /// Returns the encoder that gives the same ids as the library; `None` if the library's tokenizer is not byte-level BPE, or is unusual.
    pub(super) fn of(library: &Library) -> Option<Self> {
        let composed = match &library.normalizer {
            None => false,
            Some(NormalizerWrapper::NFC(_)) => true,
            Some(_) => return None,
        };
        let ModelWrapper::BPE(model) = &library.model else { return None };
        if library.first != library.later || model.dropout.is_some_and(|dropout| dropout > 0.0) || has_affixes(model) {
            return None;
        }
        let splitter = Splitter::of(library.first.as_ref()?)?;
        Some(Self { composed, splitter, bpe: bpe(model)? })
    }

    /// Appends the ids of a text.
    pub(super) fn encode(&self, text: &str, ids: &mut Vec<TokenId>) {
        let mut scratch = BpeScratch::default();
        let text = if self.composed { compose(text) } else { Cow::Borrowed(text) };
        self.splitter.split(&text, &mut |word| self.bpe.encode(word.as_bytes(), &mut scratch, ids));
    }
}

fn has_affixes(model: &BPE) -> bool {
    let is_set = |affix: &Option<String>| affix.as_deref().is_some_and(|affix| !affix.is_empty());
    is_set(&model.continuing_subword_prefix) || is_set(&model.end_of_word_suffix)
}

fn bpe(model: &BPE) -> Option<Bpe> {
    let ids: HashMap<String, TokenId> = model.get_vocab();
    let Merges { merges } = serde_json::to_vec(model).and_then(|json| serde_json::from_slice(&json)).ok()?;
    let merges = merges.iter().map(|(left, right)| {
        let id = |text: &str| ids.get(text).copied();
        Some(((id(left)?, id(right)?), id(&format!("{left}{right}"))?))
    });
    let merges = merges.collect::<Option<Vec<_>>>()?;
    let spelling = Spelling::byte_level();
    let words = ids.iter().filter_map(|(text, id)| Some((spelling.visible_bytes(text)?.into(), *id)));
    let bpe = Bpe::new(words, merges.into_iter(), model.ignore_merges);
    // Many vocabularies lack bytes that were rare in their training data. The library leaves such a byte out, or has a token for it.
    let leaves_out = model.unk_token.is_none() && !model.byte_fallback;
    (leaves_out || bpe.has_all_bytes()).then_some(bpe)
}

/// Composes the characters of a text (NFC), with the tables that the library has.
fn compose(text: &str) -> Cow<'_, str> {
    if text.is_ascii() || matches!(is_nfc_quick(text.chars()), IsNormalized::Yes) {
        return Cow::Borrowed(text);
    }
    text.nfc().map(|(char, _)| char).collect::<String>().into()
}
