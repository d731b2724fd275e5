//! The model this frontend speaks for.

use crate::prompt::{ChatTemplate, Tokenizer};
use tandem_kv::{Namespace, TokenId};
use tandem_model::{Gguf, ModelError, sim};

/// Names of control tokens that end an answer in the families we serve, besides the one a file names.
const ANSWER_ENDS: [&str; 4] = ["<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>"];

/// What the frontend must know of the served model: its name, tokeniser, chat template and limits.
pub struct ServedModel {
    pub(crate) id: String,
    revision: String,
    pub(crate) context_length: u32,
    pub(crate) tokenizer: Tokenizer,
    /// Absent: the model is no chat model.
    pub(crate) template: Option<ChatTemplate>,
    /// Tokens that end an answer.
    pub(crate) stop_tokens: Vec<TokenId>,
    /// Goes before the text of a plain completion.
    pub(crate) bos: Option<TokenId>,
}

/// The model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ServedModelError {
    /// Its file lacks something or says it wrongly.
    #[error(transparent)]
    File(#[from] ModelError),
    /// Only byte-level BPE is built.
    #[error("tokenisers of kind {found} are not supported, only gpt2 (byte-level BPE): choose another model")]
    TokenizerAlgorithm {
        /// What the file says.
        found: String,
    },
    /// Text is cut in a way that is not built.
    #[error("texts cut as {found} are not supported, only gpt-2, smollm, llama-bpe and qwen2: choose another model")]
    PreTokenizer {
        /// What the file says.
        found: String,
    },
    /// A merge is not two tokens.
    #[error("the model file's list of merges is damaged: fetch it again")]
    Merge,
    /// Vocabulary and merges do not fit together.
    #[error("the model file's tokeniser cannot be used: fetch it again")]
    Tokenizer(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The special tokens' names are too many or too long.
    #[error("the model file's special tokens cannot be used: fetch it again")]
    SpecialTokens(#[from] aho_corasick::BuildError),
    /// The chat template does not compile.
    #[error("the model file's chat template cannot be used: take another conversion of the model")]
    Template(#[from] minijinja::Error),
}

impl ServedModel {
    /// The model of a GGUF file, served under the name `id`.
    pub fn from_gguf(id: impl Into<String>, file: &Gguf) -> Result<Self, ServedModelError> {
        let data = file.tokenizer()?;
        let tokenizer = Tokenizer::from_data(&data)?;
        let name = |token: Option<TokenId>| token.and_then(|token| data.tokens.get(token as usize)).map_or("", String::as_str);
        let template = data.chat_template.as_deref().map(|source| ChatTemplate::new(source, name(data.bos), name(data.eos)));
        let mut stop_tokens: Vec<TokenId> = data.eos.into_iter().collect();
        stop_tokens.extend(ANSWER_ENDS.iter().filter_map(|name| tokenizer.special_id(name)));
        stop_tokens.sort_unstable();
        stop_tokens.dedup();
        Ok(Self {
            id: id.into(),
            revision: file.revision(),
            context_length: file.context_length()?,
            template: template.transpose()?,
            stop_tokens,
            bos: data.bos.filter(|_| data.add_bos),
            tokenizer,
        })
    }

    /// The model of `--engine sim`: bytes are tokens, conversations are ChatML.
    pub fn sim(id: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            revision: "sim".to_owned(),
            context_length: sim::CONTEXT_LENGTH,
            tokenizer: Tokenizer::sim(),
            template: Some(ChatTemplate::chatml()),
            stop_tokens: vec![sim::IM_END],
            bos: None,
        }
    }

    /// The same model with a shorter context.
    pub fn with_context_length(mut self, tokens: u32) -> Self {
        self.context_length = self.context_length.min(tokens);
        self
    }

    /// Its name in requests.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Its tokeniser.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Whose KV a request may share: that of the same model and the same `cache_salt`.
    pub(crate) fn namespace(&self, cache_salt: &str) -> Namespace {
        Namespace::new(&self.id, &self.revision, "", cache_salt)
    }
}
