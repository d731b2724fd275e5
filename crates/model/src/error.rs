//! Errors of reading a model's files.

use std::{io, path::PathBuf};

/// The reason why a model cannot be used. Each message says what to do.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum ModelError {
    #[error("cannot read the model file {}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("this is not a GGUF file: give the path of a .gguf file")]
    NotGguf,
    /// `found` is the version number in the file. It looks huge if the file is big-endian.
    #[error("GGUF version {found} is not supported, only version 3: convert the file with a current llama.cpp")]
    Version { found: u32 },
    #[error("the model file ends inside its {part}: it is incomplete, fetch it again")]
    Truncated { part: &'static str },
    #[error("the model file is damaged ({what}): fetch it again")]
    Malformed { what: &'static str },
    #[error("the model file has no metadata key {key}: use another conversion of the model")]
    MissingKey { key: String },
    #[error("the model file's metadata key {key} is not {wanted}: use another conversion of the model")]
    WrongValue { key: String, wanted: &'static str },
    #[error(
        "models of architecture {found} are not supported, only llama, qwen2 and qwen3: choose a Llama, Qwen 2 or (dense) Qwen 3 model"
    )]
    Architecture { found: String },
    #[error("the model file has no tensor {name}: use another conversion of the model")]
    MissingTensor { name: String },
    /// `found` and `wanted` are dimensions, innermost first.
    #[error("tensor {name} has shape {found:?} where {wanted:?} is needed: use another conversion of the model")]
    TensorShape { name: String, found: Vec<u64>, wanted: Vec<u64> },
    /// `found` is the format's number in GGUF.
    #[error(
        "tensor {name} has the unknown type number {found}: use a Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, F16, BF16 or F32 conversion of the model"
    )]
    UnknownTensorType { name: String, found: u32 },
    /// `found` is the format's name in safetensors.
    #[error("tensor {name} is stored as {found:?}: use the model in BF16, F16 or F32, or a GGUF conversion of it")]
    Dtype { name: String, found: safetensors::Dtype },
    #[error("{} is incomplete or damaged: fetch the file again", path.display())]
    Safetensors { path: PathBuf, source: safetensors::SafeTensorError },
    #[error("the model's {file} cannot be used: fetch the model again, or choose another")]
    Json { file: &'static str, source: serde_json::Error },
}
