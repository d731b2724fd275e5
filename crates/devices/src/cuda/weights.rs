//! Converts a model's tensors to row-major 16-bit floats.

use super::{
    CudaError,
    device::{Device, Memory},
    shape::Half,
};
use crate::cpu::{CpuError, weights::Matrix};
use half::{bf16, f16};
use std::{ops::Range, sync::Arc};
use tandem_model::{ModelFile, TensorType};

/// Returns the 16-bit type in which a model is computed. It is the type of the model's weights if that has 16 bits, otherwise bfloat16,
/// because it has the range of 32-bit floats.
pub(super) fn half_of(file: &dyn ModelFile) -> Result<Half, CudaError> {
    let kind = file.tensor("blk.0.attn_q.weight")?.kind;
    Ok(if kind == TensorType::F16 { Half::Float16 } else { Half::BFloat16 })
}

/// The source of a model's weights. The model's configuration always comes from its files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    File,
    /// The weights are random numbers, which are made on the device. Only the file's headers are read, so that the speed of a large model can be
    /// measured without its weights.
    Drawn,
}

/// The number of random bytes that are copied to the device. Each random matrix consists of repetitions of them.
const DRAWN_BYTES: usize = 4 << 20;

/// Returns random weights with a mean of 0 and a deviation of about 0.02, from which `fill` makes matrices of any size.
pub(super) fn drawn(half: Half) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let numbers = (0..DRAWN_BYTES / 2).map(|_| {
        // A linear congruential generator, whose upper bits are random enough for weights.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 * 0.07 - 0.035
    });
    match half {
        Half::Float16 => numbers.flat_map(|number| f16::from_f32(number).to_le_bytes()).collect(),
        Half::BFloat16 => numbers.flat_map(|number| bf16::from_f32(number).to_le_bytes()).collect(),
    }
}

/// Returns device memory of this size, filled with repetitions of `pattern`.
pub(super) fn fill<D: Device>(device: &Arc<D>, pattern: &Memory<D>, bytes: usize) -> Result<Memory<D>, CudaError> {
    let memory = Memory::new(device, bytes)?;
    for at in (0..bytes).step_by(pattern.bytes()) {
        device.copy(pattern.address(), memory.address() + at as u64, pattern.bytes().min(bytes - at))?;
    }
    Ok(memory)
}

/// A range of rows and columns of a matrix in the file.
pub(super) struct MatrixSlice {
    pub name: String,
    /// The number of rows of the matrix in the file.
    pub outputs: usize,
    /// The number of columns of the matrix in the file.
    pub inputs: usize,
    pub rows: Range<usize>,
    pub columns: Range<usize>,
}

impl MatrixSlice {
    pub fn whole(name: String, outputs: usize, inputs: usize) -> Self {
        Self { name, outputs, inputs, rows: 0..outputs, columns: 0..inputs }
    }
}

/// Returns the bytes of several slices, one slice after the other, row by row. Fails if a tensor is missing, has another shape, or has a
/// number that is not finite in the 16-bit type.
pub(super) fn rows(file: &dyn ModelFile, half: Half, slices: &[MatrixSlice]) -> Result<Vec<u8>, CudaError> {
    let mut bytes = Vec::with_capacity(slices.iter().map(|slice| slice.rows.len() * slice.columns.len() * 2).sum());
    for slice in slices {
        append(file, half, slice, &mut bytes)?;
    }
    Ok(bytes)
}

fn append(file: &dyn ModelFile, half: Half, slice: &MatrixSlice, into: &mut Vec<u8>) -> Result<(), CudaError> {
    let MatrixSlice { name, outputs, inputs, rows, columns } = slice;
    let tensor = file.tensor_of(name, &[*inputs as u64, *outputs as u64])?;
    let first = into.len();
    let as_it_is = matches!((tensor.kind, half), (TensorType::F16, Half::Float16) | (TensorType::BF16, Half::BFloat16));
    if as_it_is {
        let rows = tensor.data.chunks_exact(inputs * 2).take(rows.end).skip(rows.start);
        rows.for_each(|row| into.extend_from_slice(&row[columns.start * 2..columns.end * 2]));
    } else {
        let matrix = Matrix::load_rows(file, name, *outputs, *inputs, rows.clone())?;
        // The numbers of a quantised row are stored in blocks, so the whole row is decoded before the slice's columns are taken.
        let mut row = vec![0.0; *inputs];
        for output in 0..rows.len() {
            matrix.row(output, &mut row);
            let row = row[columns.clone()].iter();
            match half {
                Half::Float16 => into.extend(row.flat_map(|number| f16::from_f32(*number).to_le_bytes())),
                Half::BFloat16 => into.extend(row.flat_map(|number| bf16::from_f32(*number).to_le_bytes())),
            }
        }
    }
    // A mask of the exponent bits. In infinities and NaNs all of these bits are set.
    let exponent = match half {
        Half::Float16 => 0x7c00,
        Half::BFloat16 => 0x7f80,
    };
    // The loop does not stop at a number that is not finite, so that the compiler can vectorise it.
    let infinite =
        into[first..].as_chunks::<2>().0.iter().fold(false, |any, bits| any | (u16::from_le_bytes(*bits) & exponent == exponent));
    match (infinite, as_it_is) {
        (false, _) => Ok(()),
        (true, true) => Err(CpuError::NotFinite { name: name.to_owned() }.into()),
        // `load_rows` has checked that all numbers of the matrix are finite, so the conversion to 16 bits overflowed.
        (true, false) => Err(CudaError::BeyondHalf { name: name.to_owned() }),
    }
}
