//! A GGUF file: its metadata by key, its tensors by name.

use crate::{ModelConfig, ModelError, ModelFile, Tensor, TensorType, bytes::Bytes, parse};
use std::path::Path;

/// A GGUF file. Opening it checks that all metadata and tensors that it announces lie within the file.
pub struct Gguf {
    bytes: Bytes,
    contents: parse::GgufContents,
}

impl Gguf {
    /// Maps the file into memory; weights are read from disk at their first access.
    ///
    /// # Errors
    /// Fails if the file cannot be opened, or is not a complete GGUF file of version 3.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        Self::new(Bytes::map(path)?)
    }

    /// Parses a file that is in memory.
    ///
    /// # Errors
    /// Fails if the bytes are not a complete GGUF file of version 3.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self, ModelError> {
        Self::new(Bytes::Owned(bytes))
    }

    fn new(bytes: Bytes) -> Result<Self, ModelError> {
        let contents = parse::contents(bytes.as_slice())?;
        Ok(Self { bytes, contents })
    }

    /// Returns the names and types of all tensors, in no particular order.
    pub fn tensor_types(&self) -> impl Iterator<Item = (&str, TensorType)> {
        self.contents.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor.kind))
    }

    /// Whether the metadata contains this key.
    pub fn has(&self, key: &str) -> bool {
        self.contents.metadata.contains_key(key)
    }

    /// Returns the key's value, which may be an integer of any width in the range of `u32`.
    ///
    /// # Errors
    /// Fails if the key is missing or its value is not such an integer.
    pub fn u32(&self, key: &str) -> Result<u32, ModelError> {
        self.value(key, "an integer below 2^32", |value| match value {
            parse::Value::Unsigned(number) => u32::try_from(*number).ok(),
            parse::Value::Signed(number) => u32::try_from(*number).ok(),
            _ => None,
        })
    }

    /// Returns the key's floating-point number.
    ///
    /// # Errors
    /// Fails if the key is missing or has a value of another type.
    pub fn f32(&self, key: &str) -> Result<f32, ModelError> {
        self.value(key, "a floating-point number", |value| match value {
            parse::Value::Float(number) => Some(*number as f32),
            _ => None,
        })
    }

    /// Returns the key's boolean.
    ///
    /// # Errors
    /// Fails if the key is missing or has a value of another type.
    pub fn bool(&self, key: &str) -> Result<bool, ModelError> {
        self.value(key, "true or false", |value| match value {
            parse::Value::Bool(value) => Some(*value),
            _ => None,
        })
    }

    /// Returns the key's string.
    ///
    /// # Errors
    /// Fails if the key is missing or has a value of another type.
    pub fn str(&self, key: &str) -> Result<&str, ModelError> {
        self.value(key, "a string", |value| match value {
            parse::Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// Returns the key's list of strings.
    ///
    /// # Errors
    /// Fails if the key is missing or has a value of another type.
    pub fn strings(&self, key: &str) -> Result<Vec<String>, ModelError> {
        self.value(key, "a list of strings", |value| match value {
            parse::Value::Array(array) => array.strings(self.bytes.as_slice()),
            _ => None,
        })
    }

    /// Returns the key's list of 32-bit integers, which must be in the range of `i32`.
    ///
    /// # Errors
    /// Fails if the key is missing or its value is not such a list.
    pub fn i32s(&self, key: &str) -> Result<Vec<i32>, ModelError> {
        self.value(key, "a list of 32-bit integers", |value| match value {
            parse::Value::Array(array) => array.i32s(self.bytes.as_slice()),
            _ => None,
        })
    }

    /// Returns the key's list of 32-bit floating-point numbers.
    ///
    /// # Errors
    /// Fails if the key is missing or its value is not such a list.
    pub fn f32s(&self, key: &str) -> Result<Vec<f32>, ModelError> {
        self.value(key, "a list of 32-bit floating-point numbers", |value| match value {
            parse::Value::Array(array) => array.f32s(self.bytes.as_slice()),
            _ => None,
        })
    }

    /// Returns the key's value as read by `get`; `None` if the key is absent. A value of another type is an error.
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
        let found = self.contents.tensors.get(name).ok_or_else(|| ModelError::MissingTensor { name: name.to_owned() })?;
        Ok(Tensor { kind: found.kind, shape: &found.shape, data: &self.bytes.as_slice()[found.range.clone()] })
    }

    fn has_tensor(&self, name: &str) -> bool {
        self.contents.tensors.contains_key(name)
    }
}
