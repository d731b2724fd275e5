//! Reads the tokenizer's data in a GGUF file.

use crate::{Gguf, ModelError};

/// The data from which a tokenizer is built.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenizerData {
    /// The text of each token as the vocabulary writes it (byte-level for `gpt2`), by token id.
    pub tokens: Vec<String>,
    /// The score of each token, which a SentencePiece vocabulary has instead of merges; may be empty.
    pub scores: Vec<f32>,
    /// The kind of each token: 1 normal, 2 unknown, 3 control (special tokens), 4 user-defined, 5 unused, 6 byte.
    pub token_types: Vec<i32>,
    /// Pairs of tokens to merge, each written as `left right`, in order of priority.
    pub merges: Vec<String>,
    /// Name of the pre-tokenizer, which splits text before tokens are merged; `default` if the file has none.
    pub pre: String,
    /// Name of the algorithm; `gpt2` is byte-level BPE, `llama` is SentencePiece's BPE.
    pub model: String,
    /// Whether a space is put before each text that is tokenised.
    pub add_space_prefix: bool,
    /// Token that starts a sequence; `None` if the file names none.
    pub bos: Option<u32>,
    /// Token that ends an answer; `None` if the file names none.
    pub eos: Option<u32>,
    /// Whether the model expects `bos` before every sequence, as in its training.
    pub add_bos: bool,
    /// Jinja source of the chat template; `None` if the file has none.
    pub chat_template: Option<String>,
}

impl Gguf {
    /// Returns the tokenizer's data. Every token has a type, and every token id is in the vocabulary.
    ///
    /// # Errors
    /// Fails if a required key is missing, or if a value is invalid or contradicts another.
    pub fn tokenizer(&self) -> Result<TokenizerData, ModelError> {
        const TYPES: &str = "tokenizer.ggml.token_type";
        const SCORES: &str = "tokenizer.ggml.scores";
        let tokens = self.strings("tokenizer.ggml.tokens")?;
        let token_types = self.optional(TYPES, |key| self.i32s(key))?.unwrap_or_else(|| vec![1; tokens.len()]);
        if token_types.len() != tokens.len() {
            return Err(ModelError::WrongValue { key: TYPES.to_owned(), wanted: "as long as the list of tokens" });
        }
        let id = |key: &str| match self.optional(key, |key| self.u32(key))? {
            Some(id) if id as usize >= tokens.len() => {
                Err(ModelError::WrongValue { key: key.to_owned(), wanted: "a token's id" })
            }
            id => Ok(id),
        };
        let pre = self.optional("tokenizer.ggml.pre", |key| self.str(key))?.unwrap_or("default").to_owned();
        let model = self.str("tokenizer.ggml.model")?.to_owned();
        let add_bos = self.optional("tokenizer.ggml.add_bos_token", |key| self.bool(key))?;
        let add_space_prefix = self.optional("tokenizer.ggml.add_space_prefix", |key| self.bool(key))?;
        let scores = self.optional(SCORES, |key| self.f32s(key))?.unwrap_or_default();
        if !scores.is_empty() && scores.len() != tokens.len() {
            return Err(ModelError::WrongValue { key: SCORES.to_owned(), wanted: "as long as the list of tokens" });
        }
        Ok(TokenizerData {
            token_types,
            merges: self.optional("tokenizer.ggml.merges", |key| self.strings(key))?.unwrap_or_default(),
            scores,
            add_space_prefix: add_space_prefix.unwrap_or(model == "llama"),
            bos: id("tokenizer.ggml.bos_token_id")?,
            eos: id("tokenizer.ggml.eos_token_id")?,
            // These tokenizers always add `bos`, but conversions of their models may lack the key.
            add_bos: add_bos.unwrap_or(
                ["llama", "gemma4"].contains(&model.as_str())
                    || ["llama-bpe", "llama3", "llama-v3", "tekken"].contains(&pre.as_str()),
            ),
            pre,
            model,
            chat_template: self.optional("tokenizer.chat_template", |key| self.str(key))?.map(str::to_owned),
            tokens,
        })
    }
}
