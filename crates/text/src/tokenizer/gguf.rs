//! Builds tokenizers from the data of GGUF files.

use super::{
    Tokenizer,
    encoder::Encoder,
    library::Library,
    sentence_piece::SentencePiece,
    spelling::{SPACE, Spelling},
};
use crate::error::ServedModelError;
use tandem_model::TokenizerData;
use tokenizers::{
    PreTokenizerWrapper, SplitDelimiterBehavior,
    models::bpe::{BPE, Vocab},
    normalizers::{replace::Replace, unicode::NFC},
    pre_tokenizers::{
        byte_level::ByteLevel,
        digits::Digits,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

impl Tokenizer {
    /// Builds the tokenizer of a GGUF file.
    ///
    /// # Errors
    /// Fails if the file's tokenizer is not supported or malformed.
    pub fn from_data(data: &TokenizerData) -> Result<Self, ServedModelError> {
        let (encoder, spelling) = match data.model.as_str() {
            "gpt2" => (Encoder::of(byte_level(data)?), Spelling::byte_level()),
            "gemma4" => (Encoder::of(gemma(data)?), Spelling::sentence_piece(false)),
            "llama" => {
                (Encoder::SentencePiece(Box::new(SentencePiece::new(data)?)), Spelling::sentence_piece(data.add_space_prefix))
            }
            other => return Err(ServedModelError::TokenizerAlgorithm(other.to_owned())),
        };
        Self::assemble(encoder, &spelling, &data.tokens, &data.token_types)
    }
}

pub(super) fn byte_level(data: &TokenizerData) -> Result<Library, ServedModelError> {
    let Cut { pre_tokenizer, composed, whole_words } = Cut::named(&data.pre)?;
    let model = BPE::builder().vocab_and_merges(vocabulary(data), merges(data)?).ignore_merges(whole_words).build();
    Ok(Library {
        normalizer: composed.then(|| NFC.into()),
        first: Some(pre_tokenizer.clone()),
        later: Some(pre_tokenizer),
        model: model.map_err(ServedModelError::Tokenizer)?.into(),
    })
}

/// The tokenizer of Gemma 4: byte-pair encoding of whole lines, with merges instead of scores.
fn gemma(data: &TokenizerData) -> Result<Library, ServedModelError> {
    let lines = split("[^\n]+|[\n]+")?;
    let model = BPE::builder().vocab_and_merges(vocabulary(data), merges(data)?).byte_fallback(true).fuse_unk(true).build();
    Ok(Library {
        normalizer: Some(Replace::new(" ", SPACE).map_err(ServedModelError::Tokenizer)?.into()),
        first: Some(lines.clone()),
        later: Some(lines),
        model: model.map_err(ServedModelError::Tokenizer)?.into(),
    })
}

fn vocabulary(data: &TokenizerData) -> Vocab {
    data.tokens.iter().cloned().zip(0..).collect()
}

fn merges(data: &TokenizerData) -> Result<Vec<(String, String)>, ServedModelError> {
    let merge = |merge: &String| merge.split_once(' ').map(|(left, right)| (left.to_owned(), right.to_owned()));
    data.merges.iter().map(merge).collect::<Option<Vec<_>>>().ok_or(ServedModelError::Merge)
}

fn split(regex: &str) -> Result<PreTokenizerWrapper, ServedModelError> {
    let split = Split::new(SplitPattern::Regex(regex.to_owned()), SplitDelimiterBehavior::Isolated, false);
    Ok(split.map_err(ServedModelError::Tokenizer)?.into())
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
    /// Returns the steps of the pre-tokenizer that GGUF files call `name`. The regular expressions are those of the families'
    /// `tokenizer.json`.
    fn named(name: &str) -> Result<Self, ServedModelError> {
        const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        const QWEN_2: &str =
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        const QWEN_3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        const DEEPSEEK_3: [&str; 3] = [
            r"\p{N}{1,3}",
            "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ];
        const DEEPSEEK_CODER: [&str; 4] =
            ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+"];
        let own_rules = |regexes: &[&str], digits: bool| -> Result<PreTokenizerWrapper, ServedModelError> {
            let mut steps = regexes.iter().map(|regex| split(regex)).collect::<Result<Vec<_>, _>>()?;
            steps.extend(digits.then(|| Digits::new(true).into()));
            steps.push(ByteLevel::new(false, true, false).into());
            Ok(Sequence::new(steps).into())
        };
        let gpt2 = || PreTokenizerWrapper::from(ByteLevel::new(false, true, true));
        let single_digits = || PreTokenizerWrapper::from(Sequence::new(vec![Digits::new(true).into(), gpt2()]));
        let (pre_tokenizer, composed, whole_words) = match name {
            "gpt2" | "gpt-2" | "mpt" | "olmo" | "phi-2" => (gpt2(), false, false),
            "smollm" | "command-r" | "refact" | "starcoder" | "exaone" => (single_digits(), false, false),
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" | "pixtral" | "lfm2" => (own_rules(&[LLAMA_3], false)?, false, true),
            "qwen2" | "deepseek-r1-qwen" => (own_rules(&[QWEN_2], false)?, true, false),
            "qwen35" => (own_rules(&[QWEN_3_5], false)?, false, false),
            "tekken" => (own_rules(&[TEKKEN], false)?, false, true),
            "gpt-4o" | "llama4" => (own_rules(&[GPT_4O], false)?, false, false),
            "deepseek-v3" => (own_rules(&DEEPSEEK_3, false)?, false, false),
            "deepseek-coder" => (own_rules(&DEEPSEEK_CODER, true)?, false, false),
            found => return Err(ServedModelError::PreTokenizer(found.to_owned())),
        };
        Ok(Self { pre_tokenizer, composed, whole_words })
    }
}
