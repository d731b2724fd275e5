//! Reads a model from a GGUF file or a Hugging Face directory: the weights for the engine, and the tokenizer and the chat template for the
//! frontend.

mod bytes;
mod config;
mod directory;
mod error;
mod file;
mod gguf;
mod parse;
pub mod revision;
mod rope;
mod tensor;
mod tokenizer;

pub use config::ModelConfig;
pub use directory::{HfDirectory, HfTokenizer, shards_of_index};
pub use error::ModelError;
pub use file::ModelFile;
pub use gguf::Gguf;
pub use rope::{Pairs, Rope};
pub use tensor::{Tensor, TensorType};
pub use tokenizer::TokenizerData;

/// The built-in vocabulary of `--engine sim`: one token for each of the 256 bytes, followed by the tokens of this module.
pub mod sim {
    /// The token that begins a chat turn.
    pub const IM_START: u32 = 256;
    /// The token that ends a chat turn. It therefore also ends an answer.
    pub const IM_END: u32 = 257;
    /// The number of tokens in the vocabulary.
    pub const VOCAB_SIZE: usize = 258;
    /// The length of the longest sequence, in tokens.
    pub const CONTEXT_LENGTH: u32 = 131_072;
}
