//! Why a model cannot be served.

use tandem_model::ModelError;

/// Why a model cannot be served. Each text ends with what to do.
#[derive(Debug, thiserror::Error)]
pub enum ServedModelError {
    /// The model's files are incomplete or malformed.
    #[error(transparent)]
    File(#[from] ModelError),
    /// The tokenizer is not byte-level BPE.
    #[error("unsupported tokenizer {found}: only gpt2 (byte-level BPE) is supported; choose another model")]
    TokenizerAlgorithm {
        /// The algorithm that the file names.
        found: String,
    },
    /// The pre-tokenizer is not one of the supported ones.
    #[error("unsupported pre-tokenizer {found}: only gpt-2, smollm, llama-bpe and qwen2 are supported; choose another model")]
    PreTokenizer {
        /// The pre-tokenizer that the file names.
        found: String,
    },
    /// An added token changes the text around it.
    #[error("added token {name} uses lstrip, rstrip or single_word (unsupported); choose another model")]
    AddedToken {
        /// The text of the control token.
        name: String,
    },
    /// The post-processor does more than to put one token before a text.
    #[error("the tokenizer's post-processor adds more than one leading token (unsupported); choose another model")]
    PostProcessor,
    /// Token ids are far beyond the number of tokens.
    #[error("the tokenizer's ids go up to {len}, far beyond its number of tokens: the file is damaged, fetch it again")]
    TokenIds {
        /// The largest id plus one.
        len: usize,
    },
    /// A merge is not a pair of tokens.
    #[error("the model file's list of merges is damaged: fetch it again")]
    Merge,
    /// Vocabulary and merges do not match.
    #[error("the model file's tokenizer cannot be used: fetch it again")]
    Tokenizer(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The special tokens' names are too many or too long.
    #[error("the model file's special tokens cannot be used: fetch it again")]
    SpecialTokens(#[from] aho_corasick::BuildError),
    /// The chat template does not compile.
    #[error("the model file's chat template cannot be used: take another conversion of the model")]
    Template(#[from] minijinja::Error),
    /// The chat template does not end within its limits.
    #[error(
        "the model file's chat template takes more than {steps} steps or {bytes} bytes for a conversation of four short messages: \
         take another conversion of the model"
    )]
    TemplateEndless {
        /// Instructions that it may execute.
        steps: u64,
        /// Bytes that it may write.
        bytes: usize,
    },
}
