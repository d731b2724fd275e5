//! A tokenizer that is read from a local file.

use super::CountTokens;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// The tokenizer of a `tokenizer.json`.
#[derive(Clone, Debug)]
pub struct LocalTokenizer(Tokenizer);

/// The reason why a tokenizer cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LocalTokenizerError {
    /// The file cannot be read, or does not contain a tokenizer.
    #[error("{} is not a tokenizer; name a tokenizer.json of Hugging Face, or a folder that has one: {source}", path.display())]
    Open {
        /// The path of the file.
        path: PathBuf,
        /// The error of the tokenizer library.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A text cannot be encoded.
    #[error("the tokenizer fails: {0}")]
    Encode(#[source] Box<dyn std::error::Error + Send + Sync>),
}

impl LocalTokenizer {
    /// Opens a file, or the `tokenizer.json` of a folder.
    ///
    /// # Errors
    /// Fails if the file cannot be read, or does not contain a tokenizer.
    pub fn open(path: &Path) -> Result<Self, LocalTokenizerError> {
        let path = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        Tokenizer::from_file(&path).map(Self).map_err(|source| LocalTokenizerError::Open { path, source })
    }

    /// Returns the number of tokens in a text, not counting tokens that a server adds.
    pub fn tokens(&self, text: &str) -> Result<u64, LocalTokenizerError> {
        self.encoded(text, false)
    }

    fn encoded(&self, text: &str, special: bool) -> Result<u64, LocalTokenizerError> {
        let encoding = self.0.encode_fast(text, special).map_err(LocalTokenizerError::Encode)?;
        Ok(encoding.len() as u64)
    }
}

impl CountTokens for LocalTokenizer {
    type Error = LocalTokenizerError;

    async fn count(&self, text: &str) -> Result<u64, LocalTokenizerError> {
        self.encoded(text, true)
    }
}
