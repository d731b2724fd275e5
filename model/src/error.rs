//! Errors of model files; each message says what to do.

use std::path::PathBuf;

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file cannot be opened or mapped.
    #[error("cannot read the model file {}: {source}", path.display())]
    Open {
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: std::io::Error,
    },
    /// The first four bytes are not `GGUF`.
    #[error("this is not a GGUF file: give the path of a .gguf file")]
    NotGguf,
    /// The file has another version of the format (a big-endian file shows as a huge number).
    #[error("GGUF version {found} is not supported, only version 3: convert the file with a current llama.cpp")]
    Version {
        /// The version of the format in the file.
        found: u32,
    },
    /// The file ends before what it announces.
    #[error("the model file ends inside its {part}: it is incomplete, fetch it again")]
    Truncated {
        /// The part that is incomplete.
        part: &'static str,
    },
    /// The file's content is invalid.
    #[error("the model file is damaged ({what}): fetch it again")]
    Malformed {
        /// The rule that is violated.
        what: &'static str,
    },
    /// A required metadata key is missing.
    #[error("the model file has no metadata key {key}: use another conversion of the model")]
    MissingKey {
        /// The metadata key.
        key: String,
    },
    /// A metadata value has the wrong type or is out of range.
    #[error("the model file's metadata key {key} is not {wanted}: use another conversion of the model")]
    WrongValue {
        /// The metadata key.
        key: String,
        /// A description of valid values.
        wanted: &'static str,
    },
    /// The model's architecture is not supported.
    #[error(
        "models of architecture {found} are not supported, only llama, qwen2 and qwen3: choose a model of the Llama or Qwen family"
    )]
    Architecture {
        /// The name of the architecture in the file.
        found: String,
    },
    /// A required weight is missing.
    #[error("the model file has no tensor {name}: use another conversion of the model")]
    MissingTensor {
        /// The name of the tensor.
        name: String,
    },
    /// A weight's shape does not match the metadata.
    #[error("tensor {name} has shape {found:?} where {wanted:?} is needed: use another conversion of the model")]
    TensorShape {
        /// The name of the tensor.
        name: String,
        /// The tensor's dimensions, innermost first.
        found: Vec<u64>,
        /// The expected dimensions, innermost first.
        wanted: Vec<u64>,
    },
    /// A weight in a GGUF file has an unsupported number format.
    #[error(
        "tensor {name} has the unknown type number {found}: use a Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, F16, BF16 or F32 conversion of the model"
    )]
    UnknownTensorType {
        /// The name of the tensor.
        name: String,
        /// The number of the tensor's format in the file.
        found: u32,
    },
    /// A weight in a safetensors file has an unsupported number format.
    #[error("tensor {name} is stored as {found:?}: use the model in BF16, F16 or F32, or a GGUF conversion of it")]
    Dtype {
        /// The name of the tensor.
        name: String,
        /// The tensor's number format.
        found: safetensors::Dtype,
    },
    /// A safetensors file is damaged or incomplete.
    #[error("{} cannot be read ({source}): it is incomplete, fetch it again", path.display())]
    Safetensors {
        /// The path of the file.
        path: PathBuf,
        /// The error of the parser.
        source: safetensors::SafeTensorError,
    },
    /// A JSON file of the model is invalid.
    #[error("the model's {file} cannot be used ({source}): fetch the model again, or choose another")]
    Json {
        /// The file's name.
        file: &'static str,
        /// The error of the parser.
        source: serde_json::Error,
    },
}
