//! What a model's files say: the one reader of them, for the engine (weights) and the frontend (tokeniser, template).

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

/// The vocabulary of `--engine sim`: the 256 bytes, then these.
pub mod sim {
    /// Begins a chat turn.
    pub const IM_START: u32 = 256;
    /// Ends a chat turn, and an answer.
    pub const IM_END: u32 = 257;
    /// How many tokens there are.
    pub const VOCAB_SIZE: usize = 258;
    /// Tokens a sequence may have.
    pub const CONTEXT_LENGTH: u32 = 131_072;
}
