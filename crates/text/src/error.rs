//! The error of loading a model.

use tandem_grammar::StackError;
use tandem_model::ModelError;

/// Why a model cannot be served. Each message ends with advice.
#[derive(Debug, thiserror::Error)]
pub enum ServedModelError {
    /// The model's files are incomplete or malformed.
    #[error(transparent)]
    File(#[from] ModelError),
    /// The tokenizer has an algorithm that is not supported.
    #[error(
        "unsupported tokenizer {0}: a GGUF file needs gpt2, llama or gemma4, a tokenizer.json BPE or Unigram; choose another model or \
         another conversion of it"
    )]
    TokenizerAlgorithm(String),
    /// The pre-tokenizer is not supported.
    #[error(
        "unsupported pre-tokenizer {0}: docs/models.md lists those that are supported; choose another conversion of the model"
    )]
    PreTokenizer(String),
    /// The decoder of a `tokenizer.json` is not supported.
    #[error("unsupported decoder {0} in tokenizer.json: docs/models.md lists those that are supported; choose another model")]
    Decoder(String),
    /// A SentencePiece vocabulary has no scores, which say in which order pieces are merged.
    #[error("the model file's tokenizer lacks its scores (tokenizer.ggml.scores): take another conversion of the model")]
    Scores,
    /// A SentencePiece vocabulary lacks the token of a byte.
    #[error("the model file's tokenizer lacks the tokens of bytes (<0x00> to <0xFF>): take another conversion of the model")]
    Bytes,
    /// An added token would be found only between words.
    #[error("added token {0} of tokenizer.json uses single_word (unsupported): choose another model")]
    AddedToken(String),
    /// The post-processor adds more than one token before a text.
    #[error("the tokenizer's post-processor adds more than one leading token (unsupported); choose another model")]
    PostProcessor,
    /// The highest token id is far beyond the number of tokens.
    #[error("the tokenizer's ids go up to {0}, far beyond its number of tokens: the file is damaged, fetch it again")]
    TokenIds(usize),
    /// A merge is not a pair of tokens.
    #[error("the model file's list of merges is damaged: fetch it again")]
    Merge,
    /// The tokenizer cannot be built, for example because vocabulary and merges do not match.
    #[error("the model file's tokenizer cannot be used: fetch it again")]
    Tokenizer(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// There are too many special tokens, or their names are too long.
    #[error("the model file's special tokens cannot be used: fetch it again")]
    SpecialTokens(#[from] aho_corasick::BuildError),
    /// The chat template does not compile.
    #[error("the model file's chat template cannot be used: take another conversion of the model")]
    Template(#[from] minijinja::Error),
    /// The chat template is too long.
    #[error("the model file's chat template has {0} bytes, more than the limit of {1}: take another conversion of the model")]
    TemplateLength(usize, usize),
    /// The chat template's thread cannot be started, or the program fails on the template.
    #[error("the model file's chat template cannot be compiled ({0}): take another conversion of the model")]
    TemplateThread(#[from] StackError),
    /// The chat template exceeds the limits on steps, bytes or time for a short conversation.
    #[error(
        "the model file's chat template takes more than {0} steps, {1} bytes or 5 s for a conversation of four short messages: \
         take another conversion of the model"
    )]
    TemplateEndless(u64, usize),
}
