//! The served model: its name, tokenizer, chat template and limits.

use crate::{
    ChatTemplate, ServedModelError, Tokenizer,
    chat::{ReasoningParser, ToolCallParser},
};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU32, Ordering},
};
use tandem_kv::TokenId;
use tandem_model::{Gguf, HfDirectory, HfTokenizer, ModelFile, sim};

/// Names of control tokens that end an answer in the supported model families, in addition to those that a model's files name.
const ANSWER_ENDS: [&str; 5] = ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>"];

/// The served model as the frontend uses it. Cheap to clone.
#[derive(Clone)]
pub struct ServedModel {
    /// The model's name in requests.
    pub id: String,
    /// Identifies the weights and the arithmetic that computes with them. It is one element of the cache namespace.
    pub revision: String,
    /// The maximum length of a sequence that the model permits, in tokens.
    pub context_length: u32,
    /// The longest sequence that a worker of the model can hold, in tokens; `u32::MAX` until it is known.
    held_max: Arc<AtomicU32>,
    /// Whether a worker of the model accepts images; `false` until it is known. All clones of the model have it.
    pub reads_images: Arc<AtomicBool>,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// The tokens that end an answer.
    pub stop_tokens: Vec<TokenId>,
    /// The chat template; `None`: the model has none and cannot answer chats.
    pub template: Option<Arc<ChatTemplate>>,
    /// The token before the text of a plain completion, if the model has one.
    pub bos: Option<TokenId>,
    /// How the model writes tool calls.
    pub tool_call_parser: ToolCallParser,
    /// How the model marks its reasoning.
    pub reasoning_parser: ReasoningParser,
}

impl ServedModel {
    /// Loads the model of a GGUF file, served under the name `id`. `revision` identifies the file's content: see
    /// [`tandem_model::revision`].
    ///
    /// # Errors
    /// The file is malformed, or its tokenizer or chat template is not supported.
    pub fn from_gguf(id: impl Into<String>, revision: &str, file: &Gguf) -> Result<Self, ServedModelError> {
        let data = file.tokenizer()?;
        let tokenizer = Tokenizer::from_data(&data)?;
        let name = |token: Option<TokenId>| token.and_then(|token| data.tokens.get(token as usize)).map_or("", String::as_str);
        let template = data.chat_template.as_deref().map(|source| ChatTemplate::new(source, name(data.bos), name(data.eos)));
        let model = Self::new(id.into(), revision, file.context_length()?, tokenizer, template.transpose()?);
        Ok(Self { stop_tokens: stop_tokens(&model.tokenizer, data.eos), bos: data.bos.filter(|_| data.add_bos), ..model })
    }

    /// Loads the model of a directory as Hugging Face's libraries save it, served under the name `id`. `revision` identifies the content of
    /// its files: see [`tandem_model::revision`].
    ///
    /// # Errors
    /// A file is missing or malformed, or the tokenizer or chat template is not supported.
    pub fn from_directory(id: impl Into<String>, revision: &str, directory: &HfDirectory) -> Result<Self, ServedModelError> {
        Self::from_tokenizer(id, revision, directory.tokenizer()?, directory.config()?.context_length)
    }

    /// Makes a model from the files that Hugging Face's libraries save with a model, without its weights. The model is served under the
    /// name `id`. `context_length` is the maximum length of a sequence, in tokens.
    ///
    /// # Errors
    /// The tokenizer or chat template is not supported.
    pub fn from_tokenizer(
        id: impl Into<String>,
        revision: &str,
        files: HfTokenizer,
        context_length: u32,
    ) -> Result<Self, ServedModelError> {
        let (tokenizer, bos) = Tokenizer::from_json(&files.json)?;
        let template = files.chat_template.as_deref().map(|source| ChatTemplate::new(source, &files.bos, &files.eos));
        let eos = tokenizer.special_id(&files.eos);
        let stop_tokens = stop_tokens(&tokenizer, files.stop_tokens.into_iter().chain(eos));
        let model = Self::new(id.into(), revision, context_length, tokenizer, template.transpose()?);
        Ok(Self { stop_tokens, bos, ..model })
    }

    /// Returns the model of `--engine sim`. Each byte is a token, and the chat template is ChatML.
    pub fn sim(id: impl Into<String>) -> Self {
        let model = Self::new(id.into(), "sim", sim::CONTEXT_LENGTH, Tokenizer::sim(), Some(ChatTemplate::chatml()));
        Self { stop_tokens: vec![sim::IM_END], ..model }
    }

    /// Makes a model without stop tokens and leading token. Its parsers follow from its template.
    fn new(id: String, revision: &str, context_length: u32, tokenizer: Tokenizer, template: Option<ChatTemplate>) -> Self {
        // A template that cannot render tools gets them as texts in the format of Hermes.
        let tool_call_parser = template.as_ref().map_or(ToolCallParser::None, |template| match template.abilities().tools {
            Some(_) => ToolCallParser::of_template(template.source()),
            None => ToolCallParser::Hermes,
        });
        let reasoning_parser =
            template.as_ref().map_or(ReasoningParser::None, |template| ReasoningParser::of_template(template.source()));
        let (revision, tokenizer, template) = (revision.to_owned(), tokenizer.into(), template.map(Arc::new));
        let (stop_tokens, bos) = (Vec::new(), None);
        let (held_max, reads_images) = (Arc::new(AtomicU32::new(u32::MAX)), Arc::default());
        Self {
            id,
            revision,
            context_length,
            held_max,
            reads_images,
            tokenizer,
            stop_tokens,
            template,
            bos,
            tool_call_parser,
            reasoning_parser,
        }
    }

    /// Returns the same model with other parsers of its answers. `None`: the parser that follows from the chat template.
    pub fn with_parsers(mut self, tool_call: Option<ToolCallParser>, reasoning: Option<ReasoningParser>) -> Self {
        self.tool_call_parser = tool_call.unwrap_or(self.tool_call_parser);
        self.reasoning_parser = reasoning.unwrap_or(self.reasoning_parser);
        self
    }

    /// Returns whether the chat template writes tool calls between tags that no parser knows. Such calls stay in the content of answers.
    pub fn has_unknown_calls(&self) -> bool {
        let is_tag = |text: &str| {
            let tag = text.split('>').next().unwrap_or_default();
            tag.len() < 40 && (tag.contains("tool_call") || tag.contains("function_call"))
        };
        let source = self.template.as_ref().map_or("", |template| template.source());
        self.tool_call_parser == ToolCallParser::Json && source.split('<').skip(1).any(is_tag)
    }

    /// Returns a model that differs only in its id: a LoRA of this one.
    pub fn named(&self, id: impl Into<String>) -> Self {
        let (held_max, reads_images) = (Arc::new(AtomicU32::new(u32::MAX)), Arc::default());
        Self { id: id.into(), held_max, reads_images, ..self.clone() }
    }

    /// Returns the same model with its context limited to this many tokens.
    pub fn with_context_length(mut self, tokens: u32) -> Self {
        self.context_length = self.context_length.min(tokens);
        self
    }

    /// Returns the maximum length of a sequence, in tokens, that the model permits and a worker can hold.
    pub fn usable_context(&self) -> u32 {
        self.context_length.min(self.held_max.load(Ordering::Relaxed))
    }

    /// Sets the longest sequence that a worker of the model can hold, in tokens. All clones of the model have it.
    pub fn set_held_max(&self, tokens: u32) {
        self.held_max.store(tokens, Ordering::Relaxed);
    }

    /// Returns whether a worker of the model accepts images.
    pub fn reads_images(&self) -> bool {
        self.reads_images.load(Ordering::Relaxed)
    }

    /// Returns the length in bytes beyond which a rendered conversation cannot fit into the context. The factor 4 is for guard characters
    /// ([`Tokenizer::mark`]): each has three bytes and follows at least one byte of text.
    pub fn rendered_bytes_max(&self) -> usize {
        4 * self.context_length as usize * self.tokenizer.token_bytes_max
    }
}

/// Returns the tokens that end an answer: those that the model's files name, and those in [`ANSWER_ENDS`].
fn stop_tokens(tokenizer: &Tokenizer, named: impl IntoIterator<Item = TokenId>) -> Vec<TokenId> {
    let mut tokens: Vec<TokenId> = named.into_iter().collect();
    tokens.extend(ANSWER_ENDS.iter().filter_map(|name| tokenizer.special_id(name)));
    tokens.sort_unstable();
    tokens.dedup();
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::{Conversation, Message, Role, TemplateOptions, Tools};
    use std::{fs, path::Path};

    /// Writes a model's files to a directory, without weights, which the frontend does not read.
    fn directory(at: &Path) {
        let files = [
            (
                "config.json",
                r#"{"model_type":"qwen3","hidden_size":8,"num_hidden_layers":1,"num_attention_heads":2,"intermediate_size":4,
                "rms_norm_eps":1e-6,"max_position_embeddings":77,"vocab_size":4,"eos_token_id":2}"#,
            ),
            (
                "tokenizer.json",
                r#"{"version":"1.0","normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,
                "trim_offsets":true,"use_regex":true},"added_tokens":[
                {"id":1,"content":"<s>","special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false},
                {"id":2,"content":"</s>","special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false},
                {"id":3,"content":"<|im_end|>","special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false}],
                "model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#,
            ),
            (
                "tokenizer_config.json",
                r#"{"bos_token":{"content":"<s>"},"eos_token":"</s>","chat_template":"{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}"#,
            ),
        ];
        for (name, content) in files {
            fs::write(at.join(name), content).expect("the folder is writable");
        }
        fs::write(at.join("model.safetensors"), [&2u64.to_le_bytes()[..], b"{}"].concat()).expect("the folder is writable");
    }

    fn served(at: &Path) -> ServedModel {
        ServedModel::from_directory("m", "r", &HfDirectory::open(at).expect("the model directory is valid"))
            .expect("the frontend can serve the model")
    }

    fn rendered(model: &ServedModel) -> String {
        let messages = vec![Message::new(Role::User, "a")];
        let conversation = Conversation { messages, tools: Tools::default(), template: TemplateOptions::default() };
        let template = model.template.as_ref().expect("the model has a chat template");
        template.render(conversation.variables(template.abilities()), 1 << 10).expect("the template renders")
    }

    #[test]
    fn model_directory_supplies_id_context_length_stop_tokens_and_template() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        directory(folder.path());
        let model = served(folder.path());
        assert_eq!((model.id.as_str(), model.context_length, model.bos), ("m", 77, None));
        assert_eq!(model.stop_tokens, [2, 3], "the stop tokens of the model and of its family");
        assert_eq!(rendered(&model), "<s>a</s>");

        // Files of newer versions of the libraries take precedence over files of older versions.
        fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id":[0,2]}"#).expect("the folder is writable");
        fs::write(folder.path().join("chat_template.jinja"), "{{ messages[0].content }}!").expect("the folder is writable");
        let model = served(folder.path());
        assert_eq!(model.stop_tokens, [0, 2, 3]);
        assert_eq!(rendered(&model), "a!");

        let named = r#"{"chat_template":[{"name":"tools","template":"t"},{"name":"default","template":"d"}]}"#;
        fs::write(folder.path().join("tokenizer_config.json"), named).expect("the folder is writable");
        fs::remove_file(folder.path().join("chat_template.jinja")).expect("the folder is writable");
        assert_eq!(rendered(&served(folder.path())), "d");
    }

    #[test]
    fn model_directory_without_valid_tokenizer_is_refused() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        directory(folder.path());
        fs::remove_file(folder.path().join("tokenizer.json")).expect("the folder is writable");
        let opened = HfDirectory::open(folder.path()).expect("config.json is there");
        let error = ServedModel::from_directory("m", "r", &opened).err().expect("the model is refused").to_string();
        assert!(error.contains("tokenizer.json"), "{error}");
        fs::write(folder.path().join("tokenizer_config.json"), "[").expect("the folder is writable");
        let error = ServedModel::from_directory("m", "r", &opened).err().expect("the model is refused").to_string();
        assert!(error.contains("tokenizer_config.json"), "{error}");
    }
}
