//! A model in Hugging Face's layout: a directory with `config.json`, `tokenizer.json` and safetensors.

mod config;
mod names;

use crate::{ModelConfig, ModelError, ModelFile, Tensor, TensorType, bytes::Bytes};
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, de::DeserializeOwned};
use std::{
    collections::{BTreeSet, HashMap},
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

/// A model's directory. Opening it checks that the weight files are complete.
pub struct HfDirectory {
    path: PathBuf,
    shards: Vec<Bytes>,
    tensors: HashMap<String, SafetensorInfo>,
    config: ModelConfig,
}

struct SafetensorInfo {
    shard: usize,
    kind: Result<TensorType, Dtype>,
    /// The dimensions, innermost first as in GGUF.
    shape: Vec<u64>,
    range: Range<usize>,
}

/// The data from which a tokenizer is built.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HfTokenizer {
    /// Contents of `tokenizer.json`, for the crate `tokenizers`.
    pub json: Vec<u8>,
    /// Jinja source of the chat template; `None` if the directory has no template.
    pub chat_template: Option<String>,
    /// Text of the token that starts a sequence; may be empty.
    pub bos: String,
    /// Text of the token that ends a sequence; may be empty.
    pub eos: String,
    /// Ids of tokens that end an answer.
    pub stop_tokens: Vec<u32>,
    /// The length of the model's context in tokens; `None` if the configuration does not name it.
    pub context_length: Option<u32>,
}

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION: &str = "generation_config.json";
const TEMPLATE: &str = "chat_template.jinja";
const INDEX: &str = "model.safetensors.index.json";
const WHOLE: &str = "model.safetensors";

impl HfDirectory {
    /// Whether the directory contains a model in this layout.
    pub fn is_at(path: &Path) -> bool {
        path.join(CONFIG).is_file() && (path.join(WHOLE).is_file() || path.join(INDEX).is_file())
    }

    /// Reads the configuration and maps the weight files into memory. Weights are read from disk at their first access.
    ///
    /// # Errors
    /// Fails if a file is missing, damaged or invalid, or if the model is not supported.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let config = read(path, CONFIG)?;
        let (mut shards, mut tensors) = (Vec::new(), HashMap::new());
        for name in shard_names(path)? {
            let file = path.join(&name);
            let bytes = Bytes::map(&file)?;
            let broken = |source| ModelError::Safetensors { path: file.clone(), source };
            for (name, view) in SafeTensors::deserialize(bytes.as_slice()).map_err(broken)?.tensors() {
                let start = view.data().as_ptr() as usize - bytes.as_slice().as_ptr() as usize;
                let info = SafetensorInfo {
                    shard: shards.len(),
                    kind: tensor_type(view.dtype()),
                    shape: view.shape().iter().rev().map(|dimension| *dimension as u64).collect(),
                    range: start..start + view.data().len(),
                };
                if tensors.insert(name, info).is_some() {
                    return Err(ModelError::Malformed { what: "a tensor's name appears twice" });
                }
            }
            shards.push(bytes);
        }
        let tied_by_absence = !tensors.contains_key("lm_head.weight");
        let config = config::read(&config, tied_by_absence)?;
        Ok(Self { path: path.to_owned(), shards, tensors, config })
    }

    /// Returns the paths of the model's files that exist, in the order of their names.
    pub(crate) fn files(path: &Path) -> Result<Vec<PathBuf>, ModelError> {
        let mut names = shard_names(path)?;
        names.extend([CONFIG, TOKENIZER, TOKENIZER_CONFIG, GENERATION, TEMPLATE].map(str::to_owned));
        Ok(names.into_iter().map(|name| path.join(name)).filter(|file| file.exists()).collect())
    }

    /// Returns the content of `tokenizer.json`, and the special tokens and the chat template from the directory's other files.
    ///
    /// # Errors
    /// Fails if a file cannot be read, or is not valid JSON or UTF-8.
    pub fn tokenizer(&self) -> Result<HfTokenizer, ModelError> {
        HfTokenizer::read(&self.path)
    }
}

impl HfTokenizer {
    /// Whether the directory contains the files that a tokenizer needs. The directory may lack the weights.
    pub fn is_at(path: &Path) -> bool {
        path.join(CONFIG).is_file() && path.join(TOKENIZER).is_file()
    }

    /// Reads the tokenizer of a model of any architecture. The directory may lack the weights.
    ///
    /// # Errors
    /// Fails if a file cannot be read, or is not valid JSON or UTF-8.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        let config: TokenizerConfig = match read_optional(path, TOKENIZER_CONFIG)? {
            Some(bytes) => json(TOKENIZER_CONFIG, &bytes)?,
            None => TokenizerConfig::default(),
        };
        let template = match read_optional(path, TEMPLATE)? {
            Some(bytes) => Some(String::from_utf8(bytes).map_err(|_| ModelError::Malformed { what: "a text is not UTF-8" })?),
            None => config.chat_template.and_then(TemplateField::text),
        };
        let mut model: TextModelConfig = json(CONFIG, &read(path, CONFIG)?)?;
        if let Some(bytes) = read_optional(path, GENERATION)? {
            let generation: TextModelConfig = json(GENERATION, &bytes)?;
            model.eos_token_id = generation.eos_token_id.or(model.eos_token_id);
        }
        let nested = model.text_config.as_deref();
        Ok(Self {
            context_length: model.max_position_embeddings.or(nested.and_then(|nested| nested.max_position_embeddings)),
            json: read(path, TOKENIZER)?,
            chat_template: template,
            bos: config.bos_token.map_or_else(String::new, TokenField::text),
            eos: config.eos_token.map_or_else(String::new, TokenField::text),
            stop_tokens: match model.eos_token_id {
                None => Vec::new(),
                Some(OneOrMany::One(token)) => vec![token],
                Some(OneOrMany::Many(tokens)) => tokens,
            },
        })
    }
}

impl ModelFile for HfDirectory {
    fn config(&self) -> Result<ModelConfig, ModelError> {
        Ok(self.config.clone())
    }

    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        let name = names::in_safetensors(name);
        let Some(found) = self.tensors.get(&name) else {
            return Err(ModelError::MissingTensor { name });
        };
        match found.kind {
            Ok(kind) => Ok(Tensor { kind, shape: &found.shape, data: &self.shards[found.shard].as_slice()[found.range.clone()] }),
            Err(found) => Err(ModelError::Dtype { name, found }),
        }
    }

    fn has_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(&names::in_safetensors(name))
    }
}

fn tensor_type(dtype: Dtype) -> Result<TensorType, Dtype> {
    match dtype {
        Dtype::F32 => Ok(TensorType::F32),
        Dtype::F16 => Ok(TensorType::F16),
        Dtype::BF16 => Ok(TensorType::BF16),
        other => Err(other),
    }
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

fn shard_names(path: &Path) -> Result<BTreeSet<String>, ModelError> {
    let Some(bytes) = read_optional(path, INDEX)? else {
        return Ok(BTreeSet::from([WHOLE.to_owned()]));
    };
    shards_of_index(&bytes)
}

/// Returns the names of the weight files that the index lists, in order. Each is a plain file name without a directory.
///
/// # Errors
/// Fails if the index is not valid JSON, names no files, or names files of other directories.
pub fn shards_of_index(index: &[u8]) -> Result<BTreeSet<String>, ModelError> {
    let names: BTreeSet<String> = json::<Index>(INDEX, index)?.weight_map.into_values().collect();
    let is_plain = |name: &String| name.ends_with(".safetensors") && !name.contains(['/', '\\']);
    if names.iter().all(is_plain) && !names.is_empty() {
        Ok(names)
    } else {
        Err(ModelError::Malformed { what: "the index of the weights names no files, or files of other directories" })
    }
}

fn read(path: &Path, name: &str) -> Result<Vec<u8>, ModelError> {
    let path = path.join(name);
    fs::read(&path).map_err(|source| ModelError::Open { path, source })
}

fn read_optional(path: &Path, name: &str) -> Result<Option<Vec<u8>>, ModelError> {
    let path = path.join(name);
    match fs::read(&path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ModelError::Open { path, source }),
    }
}

fn json<T: DeserializeOwned>(file: &'static str, bytes: &[u8]) -> Result<T, ModelError> {
    serde_json::from_slice(bytes).map_err(|source| ModelError::Json { file, source })
}

#[derive(Default, Deserialize)]
struct TokenizerConfig {
    bos_token: Option<TokenField>,
    eos_token: Option<TokenField>,
    chat_template: Option<TemplateField>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenField {
    Text(String),
    Added { content: String },
}

impl TokenField {
    fn text(self) -> String {
        match self {
            Self::Text(text) | Self::Added { content: text } => text,
        }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TemplateField {
    One(String),
    Several(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl TemplateField {
    fn text(self) -> Option<String> {
        match self {
            Self::One(text) => Some(text),
            Self::Several(all) => all.into_iter().find(|one| one.name == "default").map(|one| one.template),
        }
    }
}

/// The fields of a model's configuration that concern text. Models for text and images have them in `text_config`, except the end tokens.
#[derive(Deserialize)]
struct TextModelConfig {
    eos_token_id: Option<OneOrMany>,
    max_position_embeddings: Option<u32>,
    text_config: Option<Box<TextModelConfig>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}
