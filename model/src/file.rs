//! What the engine asks of a model's files, whichever format they have.

use crate::{ModelConfig, ModelError, Tensor};

/// A model's sizes and weights. Tensors have the names that GGUF gives them.
pub trait ModelFile {
    /// Reads and checks the model's numbers.
    fn config(&self) -> Result<ModelConfig, ModelError>;

    /// A tensor by its name.
    fn tensor(&self, name: &str) -> Result<Tensor<'_>, ModelError>;

    /// Whether there is a tensor of this name.
    fn has_tensor(&self, name: &str) -> bool;

    /// A tensor by its name, which must have this shape (innermost dimension first).
    fn tensor_of(&self, name: &str, shape: &[u64]) -> Result<Tensor<'_>, ModelError> {
        let tensor = self.tensor(name)?;
        if tensor.shape == shape {
            Ok(tensor)
        } else {
            Err(ModelError::TensorShape { name: name.to_owned(), found: tensor.shape.to_vec(), wanted: shape.to_vec() })
        }
    }
}
