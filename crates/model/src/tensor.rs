//! Tensors and their number formats.

/// A number format of tensors, with GGUF's names and numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, non_camel_case_types, reason = "the names are GGUF's and document themselves")]
pub enum TensorType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q8_1 = 9,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    Q8_K = 15,
    I8 = 24,
    I16 = 25,
    I32 = 26,
    I64 = 27,
    F64 = 28,
    BF16 = 30,
}

impl TensorType {
    /// Returns the type that has this number in GGUF; `None` if there is none.
    pub(crate) fn from_number(number: u32) -> Option<Self> {
        use TensorType::*;
        let all =
            [F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q8_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_K, I8, I16, I32, I64, F64, BF16];
        all.into_iter().find(|kind| *kind as u32 == number)
    }

    /// Returns how many numbers a storage block of this type holds.
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 | Self::I8 | Self::I16 | Self::I32 | Self::I64 | Self::F64 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::Q8_1 => 32,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K | Self::Q8_K => 256,
        }
    }

    /// Returns the size of a storage block in bytes.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::I8 => 1,
            Self::F16 | Self::BF16 | Self::I16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 | Self::F64 => 8,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q8_1 => 36,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
            Self::Q8_K => 292,
        }
    }
}

/// A tensor in a model file.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// The tensor's number format.
    pub kind: TensorType,
    /// Dimensions, innermost first: a weight has `shape[1]` rows of `shape[0]` numbers.
    pub shape: &'a [u64],
    /// The stored bytes. Their number is the product of the dimensions, divided by `block_len` and multiplied by `block_bytes`.
    pub data: &'a [u8],
}
