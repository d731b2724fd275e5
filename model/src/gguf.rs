//! A GGUF file in memory: its metadata by key, its tensors by name.

use crate::{ModelConfig, ModelError, ModelFile, Tensor, TensorType, bytes::Bytes, parse};
use std::{collections::HashMap, path::Path};

/// A GGUF file, checked when it was opened: what it announces lies within it.
pub struct Gguf {
    bytes: Bytes,
    contents: parse::Contents,
}

impl Gguf {
    /// Maps the file into memory. Weights are read from the disk when they are first touched.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::new(Bytes::map(path)?)
    }

    /// A file that is in memory already.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, ModelError> {
        Self::new(Bytes::Owned(bytes))
    }

    fn new(bytes: Bytes) -> Result<Self, ModelError> {
        let contents = parse::contents(bytes.as_slice())?;
        Ok(Self { bytes, contents })
    }

    /// A tensor by its name.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        let found = self.contents.tensors.get(name).ok_or_else(|| ModelError::MissingTensor { name: name.to_owned() })?;
        Ok(Tensor { kind: found.kind, shape: &found.shape, data: &self.bytes.as_slice()[found.range.clone()] })
    }

    /// Whether there is a tensor of this name.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.contents.tensors.contains_key(name)
    }

    /// All tensors' names and types, in no order.
    pub fn tensor_types(&self) -> impl Iterator<Item = (&str, TensorType)> {
        self.contents.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.kind))
    }

    /// Whether the metadata have this key.
    pub fn has(&self, key: &str) -> bool {
        self.contents.metadata.contains_key(key)
    }

    /// A whole number of any width that is not negative and fits.
    pub fn u32(&self, key: &str) -> Result<u32, ModelError> {
        self.value(key, "a whole number below 2^32", |value| match value {
            parse::Value::Unsigned(number) => u32::try_from(*number).ok(),
            parse::Value::Signed(number) => u32::try_from(*number).ok(),
            _ => None,
        })
    }

    /// A number with a fraction.
    pub fn f32(&self, key: &str) -> Result<f32, ModelError> {
        self.value(key, "a number with a fraction", |value| match value {
            parse::Value::Float(number) => Some(*number as f32),
            _ => None,
        })
    }

    /// Yes or no.
    pub fn bool(&self, key: &str) -> Result<bool, ModelError> {
        self.value(key, "true or false", |value| match value {
            parse::Value::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// A text.
    pub fn str(&self, key: &str) -> Result<&str, ModelError> {
        self.value(key, "a text", |value| match value {
            parse::Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// A list of texts.
    pub fn strings(&self, key: &str) -> Result<Vec<String>, ModelError> {
        self.value(key, "a list of texts", |value| match value {
            parse::Value::Array(array) => array.strings(self.bytes.as_slice()),
            _ => None,
        })
    }

    /// A list of 32-bit whole numbers.
    pub fn i32s(&self, key: &str) -> Result<Vec<i32>, ModelError> {
        self.value(key, "a list of 32-bit whole numbers", |value| match value {
            parse::Value::Array(array) => array.i32s(self.bytes.as_slice()),
            _ => None,
        })
    }

    /// `None` when the key is absent; an error still when its value is wrong.
    pub(crate) fn optional<T>(
        &self,
        key: &str,
        get: impl FnOnce(&str) -> Result<T, ModelError>,
    ) -> Result<Option<T>, ModelError> {
        if self.has(key) { get(key).map(Some) } else { Ok(None) }
    }

    fn value<'a, T>(
        &'a self,
        key: &str,
        wanted: &'static str,
        get: impl FnOnce(&'a parse::Value) -> Option<T>,
    ) -> Result<T, ModelError> {
        let value = self.contents.metadata.get(key).ok_or_else(|| ModelError::MissingKey { key: key.to_owned() })?;
        get(value).ok_or_else(|| ModelError::WrongValue { key: key.to_owned(), wanted })
    }
}

impl ModelFile for Gguf {
    fn config(&self) -> Result<ModelConfig, ModelError> {
        ModelConfig::read(self)
    }

    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError> {
        Gguf::tensor(self, name)
    }

    fn has_tensor(&self, name: &str) -> bool {
        Gguf::has_tensor(self, name)
    }
}

/// Names to what was found under them.
pub(crate) type ByName<T> = HashMap<String, T>;
