//! Encodes text with Hugging Face's library.

use super::PromptPart;
use tandem_kv::TokenId;
use tokenizers::{
    Error, Model, ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, OffsetType, PreTokenizedString, PreTokenizer,
    PreTokenizerWrapper,
};

/// The steps of a `tokenizer.json`.
pub(super) struct Library {
    pub(super) normalizer: Option<NormalizerWrapper>,
    /// Splits the text at the start of a sequence.
    pub(super) first: Option<PreTokenizerWrapper>,
    /// Splits text after a special token. It differs from `first` if only the start of a sequence gets a space before it.
    pub(super) later: Option<PreTokenizerWrapper>,
    pub(super) model: ModelWrapper,
}

impl Library {
    /// Returns the maximum number of bytes of text that one byte of a token's text can stand for.
    pub(super) fn shrinks(&self) -> usize {
        /// Composition (NFC) makes a text at most four times shorter.
        const COMPOSED: usize = 4;
        /// Other normalizers may remove any number of spaces, and one unknown token may stand for any number of characters. If a text has more of
        /// either in a row, it is treated as too long.
        const REMOVED: usize = 1024;
        let joins_unknown = match &self.model {
            ModelWrapper::BPE(bpe) => bpe.unk_token.is_some() && bpe.fuse_unk && !bpe.byte_fallback,
            _ => true,
        };
        match &self.normalizer {
            _ if joins_unknown => REMOVED,
            None => 1,
            Some(NormalizerWrapper::NFC(_)) => COMPOSED,
            Some(normalizer) if keeps_length(normalizer) => 1,
            Some(_) => REMOVED,
        }
    }

    /// Appends the ids of a part of a prompt.
    pub(super) fn encode(&self, part: PromptPart<'_>, ids: &mut Vec<TokenId>) -> Result<(), Error> {
        let mut text = NormalizedString::from(part.text);
        if let Some(normalizer) = &self.normalizer {
            normalizer.normalize(&mut text)?;
        }
        let mut words = PreTokenizedString::from(text);
        if let Some(pre_tokenizer) = if part.is_first { &self.first } else { &self.later } {
            pre_tokenizer.pre_tokenize(&mut words)?;
        }
        self.model.tokenize_in_pretokenized(&mut words, None)?;
        ids.extend_from_slice(words.into_encoding(None, 0, OffsetType::None)?.get_ids());
        Ok(())
    }
}

/// Returns whether the normalizer only replaces or adds characters. A replaced space is a space again in the bytes of a token.
fn keeps_length(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::Prepend(_) => true,
        NormalizerWrapper::Replace(replace) => {
            serde_json::to_value(replace).is_ok_and(|replace| replace["pattern"]["String"] == " ")
        }
        NormalizerWrapper::Sequence(steps) => AsRef::<[NormalizerWrapper]>::as_ref(steps).iter().all(keeps_length),
        _ => false,
    }
}
