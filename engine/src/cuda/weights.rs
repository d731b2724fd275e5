//! A model's tensors as the GPU takes them: numbers of two bytes, row by row.

use super::{CudaError, shape::Half};
use crate::cpu::{CpuError, weights::Matrix};
use half::{bf16, f16};
use tandem_model::{ModelFile, TensorType};

/// In which numbers a model is computed: in its own, and in bfloat16, which overflows nowhere, where those have another size.
pub(super) fn half_of(file: &dyn ModelFile) -> Result<Half, CudaError> {
    let kind = file.tensor("blk.0.attn_q.weight")?.kind;
    Ok(if kind == TensorType::F16 { Half::Float16 } else { Half::BFloat16 })
}

/// The rows of several tensors, one tensor after the other: name and number of rows each, all with rows of `inputs` numbers.
pub(super) fn rows(file: &dyn ModelFile, half: Half, parts: &[(String, usize)], inputs: usize) -> Result<Vec<u8>, CudaError> {
    let mut bytes = Vec::with_capacity(parts.iter().map(|(_, outputs)| outputs * inputs * 2).sum());
    for (name, outputs) in parts {
        append(file, half, name, *outputs, inputs, &mut bytes)?;
    }
    Ok(bytes)
}

fn append(
    file: &dyn ModelFile,
    half: Half,
    name: &str,
    outputs: usize,
    inputs: usize,
    into: &mut Vec<u8>,
) -> Result<(), CudaError> {
    let tensor = file.tensor_of(name, &[inputs as u64, outputs as u64])?;
    let first = into.len();
    let as_it_is = matches!((tensor.kind, half), (TensorType::F16, Half::Float16) | (TensorType::BF16, Half::BFloat16));
    if as_it_is {
        into.extend_from_slice(tensor.data);
    } else {
        let matrix = Matrix::load(file, name, outputs, inputs)?;
        let mut row = vec![0.0; inputs];
        for output in 0..outputs {
            matrix.row(output, &mut row);
            match half {
                Half::Float16 => into.extend(row.iter().flat_map(|number| f16::from_f32(*number).to_le_bytes())),
                Half::BFloat16 => into.extend(row.iter().flat_map(|number| bf16::from_f32(*number).to_le_bytes())),
            }
        }
    }
    // All ones in the exponent: infinite, or not a number.
    let exponent = match half {
        Half::Float16 => 0x7c00,
        Half::BFloat16 => 0x7f80,
    };
    let finite = into[first..].as_chunks::<2>().0.iter().all(|bits| u16::from_le_bytes(*bits) & exponent != exponent);
    match (finite, as_it_is) {
        (true, _) => Ok(()),
        (false, true) => Err(CpuError::NotFinite { name: name.to_owned() }.into()),
        // The matrix was finite when it was loaded.
        (false, false) => Err(CudaError::BeyondHalf { name: name.to_owned() }),
    }
}
