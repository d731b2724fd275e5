//! What can be wrong with a model's file; each message says what to do.

use std::path::PathBuf;

/// Why a model's file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file cannot be opened or mapped.
    #[error("cannot read the model file {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The first four bytes are not `GGUF`.
    #[error("this is not a GGUF file: give the path of a .gguf file")]
    NotGguf,
    /// Another version of the format (a big-endian file shows as a huge number).
    #[error("GGUF version {found} is not supported, only version 3: convert the file with a current llama.cpp")]
    Version {
        /// What the file says.
        found: u32,
    },
    /// The file ends before what it announces.
    #[error("the model file ends inside its {part}: it is incomplete, fetch it again")]
    Truncated {
        /// What could not be read whole.
        part: &'static str,
    },
    /// What the file says cannot be so.
    #[error("the model file is damaged ({what}): fetch it again")]
    Malformed {
        /// Which rule it breaks.
        what: &'static str,
    },
    /// A metadata key that is needed is absent.
    #[error(
        "the model file has no metadata key {key}: it was not made for this kind of use, take another conversion of the model"
    )]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A metadata value is not what its key promises.
    #[error("the model file's metadata key {key} is not {wanted}: take another conversion of the model")]
    WrongValue {
        /// The key.
        key: String,
        /// What it must be.
        wanted: &'static str,
    },
    /// Only `llama`, `qwen2` and `qwen3` models can be run.
    #[error(
        "models of architecture {found} are not supported, only llama, qwen2 and qwen3: choose a model of the Llama or Qwen family"
    )]
    Architecture {
        /// What the file says.
        found: String,
    },
    /// A weight that is needed is absent.
    #[error("the model file has no tensor {name}: take another conversion of the model")]
    MissingTensor {
        /// The tensor.
        name: String,
    },
    /// A weight has not the shape that the metadata imply.
    #[error("tensor {name} has shape {found:?} where {wanted:?} is needed: take another conversion of the model")]
    TensorShape {
        /// The tensor.
        name: String,
        /// Innermost dimension first, as in the file.
        found: Vec<u64>,
        /// The same way.
        wanted: Vec<u64>,
    },
    /// A weight's number format is not known here.
    #[error(
        "tensor {name} has the unknown type number {found}: take a Q4_0, Q4_1, Q4_K, Q6_K, Q8_0, F16, BF16 or F32 conversion of the model"
    )]
    UnknownTensorType {
        /// The tensor.
        name: String,
        /// What the file says.
        found: u32,
    },
    /// A weight's number format in a safetensors file has no counterpart here.
    #[error("tensor {name} is stored as {found:?}: take the model in BF16, F16 or F32, or a GGUF conversion of it")]
    Dtype {
        /// The tensor.
        name: String,
        /// How it is stored.
        found: safetensors::Dtype,
    },
    /// A file of weights is damaged or incomplete.
    #[error("{} cannot be read ({source}): it is incomplete, fetch it again", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// Which rule it breaks.
        source: safetensors::SafeTensorError,
    },
    /// A file beside the weights is not what it should be.
    #[error("the model's {file} cannot be used ({source}): fetch the model again, or choose another")]
    Json {
        /// Its name.
        file: &'static str,
        /// What it lacks or says wrongly.
        source: serde_json::Error,
    },
}
