//! Parses GGUF version 3. Every length is checked before it is used.

use crate::{ModelError, TensorType};
use std::{collections::HashMap, ops::Range};

pub(crate) struct GgufContents {
    pub metadata: HashMap<String, Value>,
    pub tensors: HashMap<String, TensorInfo>,
}

pub(crate) enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Array(MetadataArray),
}

/// An array in the metadata, checked when the file is opened and decoded when it is read.
pub(crate) struct MetadataArray {
    kind: u32,
    len: usize,
    range: Range<usize>,
}

pub(crate) struct TensorInfo {
    pub kind: TensorType,
    pub shape: Vec<u64>,
    pub range: Range<usize>,
}

const METADATA: &str = "metadata";
const TENSOR_LIST: &str = "list of tensors";
/// The numbers of value types in GGUF.
const TEXT: u32 = 8;
const ARRAY: u32 = 9;
/// Maximum number of dimensions of a tensor, as in ggml.
const DIMENSIONS_MAX: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;

pub(crate) fn contents(bytes: &[u8]) -> Result<GgufContents, ModelError> {
    if bytes.get(..4) != Some(b"GGUF") {
        return Err(ModelError::NotGguf);
    }
    let mut reader = ByteReader { bytes, at: 4, part: "header" };
    let version = reader.u32()?;
    if version != 3 {
        return Err(ModelError::Version { found: version });
    }
    let tensor_count = reader.u64()?;
    let metadata_count = reader.u64()?;
    reader.part = METADATA;
    let mut metadata = HashMap::new();
    for _ in 0..metadata_count {
        let key = reader.text()?.to_owned();
        let value = reader.value()?;
        if metadata.insert(key, value).is_some() {
            return Err(ModelError::Malformed { what: "a metadata key appears twice" });
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(Value::Unsigned(alignment)) if alignment.is_power_of_two() => *alignment,
        Some(_) => return Err(ModelError::Malformed { what: "the alignment is not a power of two" }),
    };
    reader.part = TENSOR_LIST;
    let mut listed = Vec::new();
    for _ in 0..tensor_count {
        listed.push(reader.tensor()?);
    }
    let data_start = (reader.at as u64)
        .checked_next_multiple_of(alignment)
        .and_then(|start| usize::try_from(start).ok())
        .ok_or(ModelError::Malformed { what: "the alignment is larger than a file can be" })?;
    if data_start > bytes.len() && tensor_count > 0 {
        return Err(ModelError::Truncated { part: "weights" });
    }
    let mut tensors = HashMap::new();
    for (name, kind, shape, offset) in listed {
        let range = tensor_range(kind, &shape, offset, data_start)?;
        if range.end > bytes.len() {
            return Err(ModelError::Truncated { part: "weights" });
        }
        if !offset.is_multiple_of(alignment) {
            return Err(ModelError::Malformed { what: "a tensor is not aligned" });
        }
        if tensors.insert(name, TensorInfo { kind, shape, range }).is_some() {
            return Err(ModelError::Malformed { what: "a tensor's name appears twice" });
        }
    }
    Ok(GgufContents { metadata, tensors })
}

fn tensor_range(kind: TensorType, shape: &[u64], offset: u64, data_start: usize) -> Result<Range<usize>, ModelError> {
    let row = shape.first().copied().unwrap_or(1);
    if !row.is_multiple_of(kind.block_len() as u64) {
        return Err(ModelError::Malformed { what: "a tensor's rows are not whole blocks of its type" });
    }
    let range = || {
        let numbers = shape.iter().try_fold(1u64, |product, dimension| product.checked_mul(*dimension))?;
        let size = (numbers / kind.block_len() as u64).checked_mul(kind.block_bytes() as u64)?;
        let start = (data_start as u64).checked_add(offset)?;
        Some(usize::try_from(start).ok()?..usize::try_from(start.checked_add(size)?).ok()?)
    };
    range().ok_or(ModelError::Malformed { what: "a tensor is larger than a file can be" })
}

impl MetadataArray {
    pub fn strings(&self, file: &[u8]) -> Option<Vec<String>> {
        if self.kind != TEXT {
            return None;
        }
        let mut reader = ByteReader { bytes: &file[self.range.clone()], at: 0, part: METADATA };
        (0..self.len).map(|_| reader.text().ok().map(str::to_owned)).collect()
    }

    pub fn i32s(&self, file: &[u8]) -> Option<Vec<i32>> {
        const U32: u32 = 4;
        const I32: u32 = 5;
        if self.kind != I32 && self.kind != U32 {
            return None;
        }
        let words = file[self.range.clone()].as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word));
        let numbers: Vec<i32> = words.collect();
        (self.kind == I32 || numbers.iter().all(|number| *number >= 0)).then_some(numbers)
    }

    pub fn f32s(&self, file: &[u8]) -> Option<Vec<f32>> {
        const F32: u32 = 6;
        let words = file[self.range.clone()].as_chunks::<4>().0.iter().map(|word| f32::from_le_bytes(*word));
        (self.kind == F32).then(|| words.collect())
    }
}

struct ByteReader<'a> {
    bytes: &'a [u8],
    at: usize,
    part: &'static str,
}

impl<'a> ByteReader<'a> {
    fn take(&mut self, len: u64) -> Result<&'a [u8], ModelError> {
        let taken = usize::try_from(len)
            .ok()
            .and_then(|len| self.bytes.get(self.at..self.at.checked_add(len)?))
            .ok_or(ModelError::Truncated { part: self.part })?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], ModelError> {
        Ok(self.take(N as u64)?.try_into().expect("take returns the requested length"))
    }

    fn u32(&mut self) -> Result<u32, ModelError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, ModelError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn text(&mut self) -> Result<&'a str, ModelError> {
        let len = self.u64()?;
        std::str::from_utf8(self.take(len)?).map_err(|_| ModelError::Malformed { what: "a text is not UTF-8" })
    }

    fn value(&mut self) -> Result<Value, ModelError> {
        Ok(match self.u32()? {
            0 => Value::Unsigned(u8::from_le_bytes(self.array()?).into()),
            1 => Value::Signed(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Signed(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Unsigned(self.u32()?.into()),
            5 => Value::Signed(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => Value::Bool(self.array::<1>()? != [0]),
            TEXT => Value::Text(self.text()?.to_owned()),
            ARRAY => Value::Array(self.array_value()?),
            10 => Value::Unsigned(self.u64()?),
            11 => Value::Signed(i64::from_le_bytes(self.array()?)),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            _ => return Err(ModelError::Malformed { what: "a metadata value has an unknown type" }),
        })
    }

    fn array_value(&mut self) -> Result<MetadataArray, ModelError> {
        let kind = self.u32()?;
        let len = self.u64()?;
        let start = self.at;
        if kind == TEXT {
            for _ in 0..len {
                self.text()?;
            }
        } else {
            let width = match kind {
                0 | 1 | 7 => 1u64,
                2 | 3 => 2,
                4..=6 => 4,
                10..=12 => 8,
                _ => return Err(ModelError::Malformed { what: "a metadata list has an unknown type" }),
            };
            self.take(len.checked_mul(width).ok_or(ModelError::Truncated { part: self.part })?)?;
        }
        // Each element takes at least one byte of the file, so the length fits into `usize`.
        let len = usize::try_from(len).map_err(|_| ModelError::Truncated { part: self.part })?;
        Ok(MetadataArray { kind, len, range: start..self.at })
    }

    fn tensor(&mut self) -> Result<(String, TensorType, Vec<u64>, u64), ModelError> {
        let name = self.text()?.to_owned();
        let dimensions = self.u32()?;
        if dimensions > DIMENSIONS_MAX {
            return Err(ModelError::Malformed { what: "a tensor has more than four dimensions" });
        }
        let shape = (0..dimensions).map(|_| self.u64()).collect::<Result<_, _>>()?;
        let number = self.u32()?;
        let offset = self.u64()?;
        match TensorType::from_number(number) {
            Some(kind) => Ok((name, kind, shape, offset)),
            None => Err(ModelError::UnknownTensorType { name, found: number }),
        }
    }
}
