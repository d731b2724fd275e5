//! Access to a model's files that does not depend on their format.

use crate::{ModelConfig, ModelError, Tensor};

/// Provides a model's configuration and weights. Tensors have the names that they have in GGUF.
pub trait ModelFile {
    /// Returns the model's configuration.
    ///
    /// # Errors
    /// Fails if a value is missing or invalid, or if the model is not supported.
    fn config(&self) -> Result<ModelConfig, ModelError>;

    /// Returns a tensor by its name.
    ///
    /// # Errors
    /// Fails if there is no such tensor, or if its number format is not supported.
    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError>;

    /// Whether the model has a tensor of this name.
    fn has_tensor(&self, name: &str) -> bool;

    /// Returns a tensor by its name and checks its shape (innermost dimension first).
    ///
    /// # Errors
    /// Fails as [`tensor`](Self::tensor) does, and if the shape differs.
    fn tensor_of(&self, name: &str, shape: &[u64]) -> Result<Tensor<'_>, ModelError> {
        let tensor = self.tensor(name)?;
        if tensor.shape == shape {
            Ok(tensor)
        } else {
            Err(ModelError::TensorShape { name: name.to_owned(), found: tensor.shape.to_vec(), wanted: shape.to_vec() })
        }
    }
}
