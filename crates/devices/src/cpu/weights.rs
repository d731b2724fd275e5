//! Weight matrices, packed for the kernels at load time. Most of them take about as many bytes as in the file.
//!
//! A *panel* is 32 outputs. A *group* is 32 consecutive inputs, which share a scale in most of the file formats. A *tile* is one group of one panel,
//! and a *column* is one output of a tile. A panel's tiles are consecutive, and a tile's 32 outputs are adjacent, so that the kernels' innermost
//! loops run over independent outputs. A *quant* is a weight's quantised integer. A *word* has the quants of four inputs of one output, with one byte
//! for each.

use super::{
    CpuError,
    simd::{widen, widen_bf16},
};
use half::f16;
use std::ops::Range;
use tandem_model::{ModelFile, TensorType};

pub(super) const PANEL: usize = 32;
pub(super) const GROUP: usize = 32;

/// A weight matrix with the dimensions `[outputs][inputs]`, packed for the kernels.
pub(crate) struct Matrix {
    pub outputs: usize,
    pub inputs: usize,
    pub(super) tiles: Tiles,
}

/// The tiles of a matrix: all groups of the first panel, then those of the next. The padding of the last panel and group is 0.
#[expect(non_camel_case_types, reason = "the formats' own names")]
pub(super) enum Tiles {
    /// The tiles of matrices in the formats Q4_1 and Q4_0. Q4_0 is stored as Q4_1 with the minimum −8 × scale, which half precision
    /// represents exactly.
    Q4_1(Vec<Q4_1Tile>),
    Q8_0(Vec<Q8_0Tile>),
    Q4_K(Vec<Q4_KTile>),
    Q6_K(Vec<Q6_KTile>),
    F16(Vec<F16Tile>),
    BF16(Vec<Bf16Tile>),
    F32(Vec<F32Tile>),
}

/// Evaluates an expression for the tiles of a matrix, whatever their type. In the expression, `$name` is the tiles.
macro_rules! each_type {
    ($tiles:expr, $name:ident => $ask:expr) => {
        match $tiles {
            Tiles::Q4_1($name) => $ask,
            Tiles::Q8_0($name) => $ask,
            Tiles::Q4_K($name) => $ask,
            Tiles::Q6_K($name) => $ask,
            Tiles::F16($name) => $ask,
            Tiles::BF16($name) => $ask,
            Tiles::F32($name) => $ask,
        }
    };
}

pub(super) type Words = [u8; PANEL * 4];

/// The quants of a tile, from 0 to 15, two in each byte. The bytes of row `i` hold the four inputs from `4i` on in their lower halves, and the four
/// inputs from `4i + 16` on in their upper halves.
#[derive(Clone)]
pub(super) struct Nibbles(pub [Words; GROUP / 8]);

/// A tile of the formats Q4_0 and Q4_1, with `weight = scale × quant + min`.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct Q4_1Tile {
    pub quants: Nibbles,
    pub scales: [u16; PANEL],
    pub mins: [u16; PANEL],
}

/// A tile of the format Q4_K: `weight = scale × factor × quant − min × min_factor`. Factors are from 0 to 63, so that `scale × factor` and
/// `min × min_factor` are exact in single precision.
#[derive(Clone)]
#[expect(non_camel_case_types, reason = "the format's own name")]
#[repr(align(64))]
pub(super) struct Q4_KTile {
    pub quants: Nibbles,
    /// The scale of each output. In the file it applies to 256 inputs, so eight tiles have the same scale.
    pub scales: [u16; PANEL],
    pub mins: [u16; PANEL],
    pub factors: [u8; PANEL],
    pub min_factors: [u8; PANEL],
}

/// A tile of the format Q6_K, with `weight = scale × factor × (quant − 32)`. Quants are from 0 to 63, and each half of the group has a factor.
#[derive(Clone)]
#[expect(non_camel_case_types, reason = "the format's own name")]
#[repr(align(64))]
pub(super) struct Q6_KTile {
    pub quants: [Words; GROUP / 4],
    /// The scale of each output. In the file it applies to 256 inputs, so eight tiles have the same scale.
    pub scales: [u16; PANEL],
    pub factors: [[i8; PANEL]; 2],
}

/// A tile of the format Q8_0, with `weight = scale × quant`. Quants are from −128 to 127.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct Q8_0Tile {
    pub quants: [Words; GROUP / 4],
    pub scales: [u16; PANEL],
}

/// A tile of half-precision weights, as bits.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct F16Tile(pub [[u16; PANEL]; GROUP]);

/// A tile of bfloat16 weights: the upper 16 bits of single-precision numbers.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct Bf16Tile(pub [[u16; PANEL]; GROUP]);

#[derive(Clone)]
#[repr(align(64))]
pub(super) struct F32Tile(pub [[f32; PANEL]; GROUP]);

trait Tile: Clone {
    /// The size in bytes of a block in the file. A block has `BLOCK_GROUPS` groups.
    const BLOCK_BYTES: usize;
    const BLOCK_GROUPS: usize = 1;
    const ZERO: Self;

    /// Packs group number `group` of a block of the file into a column. The last block of a row may be shorter. Returns false if a number
    /// in the group is not finite.
    fn put(&mut self, column: usize, block: &[u8], group: usize) -> bool;

    fn get(&self, column: usize, input: usize) -> f32;
}

fn half_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn halves(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.as_chunks::<2>().0.iter().map(|half| u16::from_le_bytes(*half))
}

fn singles(bytes: &[u8]) -> impl Iterator<Item = f32> {
    bytes.as_chunks::<4>().0.iter().map(|number| f32::from_le_bytes(*number))
}

fn put_column<T: Copy>(
    tile: &mut [[T; PANEL]; GROUP],
    column: usize,
    numbers: impl Iterator<Item = T>,
    is_finite: impl Fn(T) -> bool,
) -> bool {
    tile.iter_mut().zip(numbers).fold(true, |finite, (row, number)| {
        row[column] = number;
        finite & is_finite(number)
    })
}

fn is_finite(half: u16) -> bool {
    half & 0x7c00 != 0x7c00
}

const NO_WORDS: [Words; GROUP / 4] = [[0; PANEL * 4]; GROUP / 4];

/// Returns the position of the quant of this column and input in a tile's words: the index of the row, and the index of the byte in the
/// row.
fn place(column: usize, input: usize) -> (usize, usize) {
    (input / 4, column * 4 + input % 4)
}

impl Nibbles {
    const ZERO: Self = Self([[0; PANEL * 4]; GROUP / 8]);

    /// Packs 16 bytes; byte `i` holds input `i` in its lower half and input `i + 16` in its upper half.
    fn put(&mut self, column: usize, bytes: &[u8]) {
        for (words, four) in self.0.iter_mut().zip(bytes.as_chunks::<4>().0) {
            words[column * 4..][..4].copy_from_slice(four);
        }
    }

    fn get(&self, column: usize, input: usize) -> f32 {
        let (row, at) = place(column, input % 16);
        f32::from(self.0[row][at] >> (input / 16 * 4) & 15)
    }
}

impl Tile for Q4_1Tile {
    const BLOCK_BYTES: usize = 20;
    const ZERO: Self = Self { quants: Nibbles::ZERO, scales: [0; PANEL], mins: [0; PANEL] };

    fn put(&mut self, column: usize, block: &[u8], _group: usize) -> bool {
        self.scales[column] = half_at(block, 0);
        self.mins[column] = half_at(block, 2);
        self.quants.put(column, &block[4..20]);
        is_finite(self.scales[column]) && is_finite(self.mins[column])
    }

    fn get(&self, column: usize, input: usize) -> f32 {
        widen(self.scales[column]).mul_add(self.quants.get(column, input), widen(self.mins[column]))
    }
}

impl Q4_1Tile {
    const Q4_0_BYTES: usize = 18;

    /// Packs a block of the format Q4_0, whose weights are `scale × (quant − 8)`.
    fn put_q4_0(&mut self, column: usize, block: &[u8], _group: usize) -> bool {
        let scale = f16::from_bits(half_at(block, 0));
        // If −8 × scale exceeds the range of half precision, the minimum is infinite and the tensor is refused.
        let min = f16::from_f32(scale.to_f32() * -8.0);
        (self.scales[column], self.mins[column]) = (scale.to_bits(), min.to_bits());
        self.quants.put(column, &block[2..18]);
        scale.is_finite() && min.is_finite()
    }
}

impl Tile for Q4_KTile {
    const BLOCK_BYTES: usize = 144;
    const BLOCK_GROUPS: usize = 8;
    const ZERO: Self =
        Self { quants: Nibbles::ZERO, scales: [0; PANEL], mins: [0; PANEL], factors: [0; PANEL], min_factors: [0; PANEL] };

    fn put(&mut self, column: usize, block: &[u8], group: usize) -> bool {
        self.scales[column] = half_at(block, 0);
        self.mins[column] = half_at(block, 2);
        // Twelve bytes hold eight factors and eight min factors of six bits each. Bytes 0 to 3 hold factors 0 to 3 in the low six bits, and the high
        // two bits of factors 4 to 7. Bytes 4 to 7 hold the same of the min factors. Bytes 8 to 11 hold the low four bits of factors 4 to 7 in their
        // low halves, and of min factors 4 to 7 in their high halves. (See `get_scale_min_k4` in ggml.)
        let packed = &block[4..16];
        (self.factors[column], self.min_factors[column]) = if group < 4 {
            (packed[group] & 63, packed[group + 4] & 63)
        } else {
            let low = packed[group + 4];
            (low & 15 | packed[group - 4] >> 6 << 4, low >> 4 | packed[group] >> 6 << 4)
        };
        // In the file, 32 bytes hold two groups, the first in the low halves of the bytes and the second in the high halves.
        let (bytes, shift) = (&block[16 + group / 2 * 32..][..32], group % 2 * 4);
        let pairs: [u8; 16] = std::array::from_fn(|i| bytes[i] >> shift & 15 | (bytes[i + 16] >> shift & 15) << 4);
        self.quants.put(column, &pairs);
        is_finite(self.scales[column]) && is_finite(self.mins[column])
    }

    fn get(&self, column: usize, input: usize) -> f32 {
        let scale = widen(self.scales[column]) * f32::from(self.factors[column]);
        let min = widen(self.mins[column]) * f32::from(self.min_factors[column]);
        scale.mul_add(self.quants.get(column, input), -min)
    }
}

impl Tile for Q6_KTile {
    const BLOCK_BYTES: usize = 210;
    const BLOCK_GROUPS: usize = 8;
    const ZERO: Self = Self { quants: NO_WORDS, scales: [0; PANEL], factors: [[0; PANEL]; 2] };

    fn put(&mut self, column: usize, block: &[u8], group: usize) -> bool {
        // In the file, 64 bytes have the low four bits of the quants of 128 inputs (four groups): two groups in the low halves of the bytes, two in
        // the high halves. 32 more bytes have the high two bits of these quants: each byte has two bits for each of the four groups.
        let (part, quarter) = (group / 4, group % 4);
        let low = &block[part * 64 + quarter % 2 * 32..][..32];
        let high = &block[128 + part * 32..][..32];
        for input in 0..GROUP {
            let low = low[input] >> (quarter / 2 * 4) & 15;
            let high = high[input] >> (quarter * 2) & 3;
            let (row, at) = place(column, input);
            self.quants[row][at] = low | high << 4;
        }
        for (half, factors) in self.factors.iter_mut().enumerate() {
            factors[column] = block[192 + group * 2 + half] as i8;
        }
        self.scales[column] = half_at(block, 208);
        is_finite(self.scales[column])
    }

    fn get(&self, column: usize, input: usize) -> f32 {
        let scale = widen(self.scales[column]) * f32::from(self.factors[input / 16][column]);
        let (row, at) = place(column, input);
        scale * (f32::from(self.quants[row][at]) - 32.0)
    }
}

impl Tile for Q8_0Tile {
    const BLOCK_BYTES: usize = 34;
    const ZERO: Self = Self { quants: NO_WORDS, scales: [0; PANEL] };

    fn put(&mut self, column: usize, block: &[u8], _group: usize) -> bool {
        self.scales[column] = half_at(block, 0);
        for (words, four) in self.quants.iter_mut().zip(block[2..].as_chunks::<4>().0) {
            words[column * 4..][..4].copy_from_slice(four);
        }
        is_finite(self.scales[column])
    }

    fn get(&self, column: usize, input: usize) -> f32 {
        let (row, at) = place(column, input);
        widen(self.scales[column]) * f32::from(self.quants[row][at] as i8)
    }
}

impl Tile for F16Tile {
    const BLOCK_BYTES: usize = 2 * GROUP;
    const ZERO: Self = Self([[0; PANEL]; GROUP]);

    fn put(&mut self, column: usize, block: &[u8], _group: usize) -> bool {
        put_column(&mut self.0, column, halves(block), is_finite)
    }

    fn get(&self, column: usize, input: usize) -> f32 {
        widen(self.0[input][column])
    }
}

impl Tile for Bf16Tile {
    const BLOCK_BYTES: usize = 2 * GROUP;
    const ZERO: Self = Self([[0; PANEL]; GROUP]);

    fn put(&mut self, column: usize, block: &[u8], _group: usize) -> bool {
        put_column(&mut self.0, column, halves(block), |bits| widen_bf16(bits).is_finite())
    }

    fn get(&self, column: usize, input: usize) -> f32 {
        widen_bf16(self.0[input][column])
    }
}

impl Tile for F32Tile {
    const BLOCK_BYTES: usize = 4 * GROUP;
    const ZERO: Self = Self([[0.0; PANEL]; GROUP]);

    fn put(&mut self, column: usize, block: &[u8], _group: usize) -> bool {
        put_column(&mut self.0, column, singles(block), f32::is_finite)
    }

    fn get(&self, column: usize, input: usize) -> f32 {
        self.0[input][column]
    }
}

impl Matrix {
    /// Packs a tensor of this shape.
    ///
    /// # Errors
    /// Fails if the tensor is missing, has another shape or an unsupported format, or has a number that is not finite.
    pub fn load(file: &dyn ModelFile, name: &str, outputs: usize, inputs: usize) -> Result<Self, CpuError> {
        Self::load_rows(file, name, outputs, inputs, 0..outputs)
    }

    /// Packs the rows `rows` of a tensor that has `outputs` rows.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Matrix::load`].
    pub fn load_rows(
        file: &dyn ModelFile,
        name: &str,
        outputs: usize,
        inputs: usize,
        rows: Range<usize>,
    ) -> Result<Self, CpuError> {
        let tensor = file.tensor_of(name, &[inputs as u64, outputs as u64])?;
        let row_bytes = tensor.data.len() / outputs;
        let (data, outputs) = (&tensor.data[rows.start * row_bytes..rows.end * row_bytes], rows.len());
        let not_finite = || CpuError::NotFinite { name: name.to_owned() };
        let tiles = match tensor.kind {
            TensorType::Q4_1 => pack(data, outputs).map(Tiles::Q4_1),
            TensorType::Q8_0 => pack(data, outputs).map(Tiles::Q8_0),
            TensorType::Q4_0 => pack_with(data, outputs, Q4_1Tile::Q4_0_BYTES, Q4_1Tile::put_q4_0).map(Tiles::Q4_1),
            TensorType::Q4_K => pack(data, outputs).map(Tiles::Q4_K),
            TensorType::Q6_K => pack(data, outputs).map(Tiles::Q6_K),
            TensorType::F16 => pack(data, outputs).map(Tiles::F16),
            TensorType::BF16 => pack(data, outputs).map(Tiles::BF16),
            TensorType::F32 => pack(data, outputs).map(Tiles::F32),
            kind => return Err(CpuError::WeightType { name: name.to_owned(), kind }),
        };
        Ok(Self { outputs, inputs, tiles: tiles.ok_or_else(not_finite)? })
    }

    /// Unpacks the weights of one output into `into`. In the matrix of embeddings, an output is a token.
    pub fn row(&self, output: usize, into: &mut [f32]) {
        each_type!(&self.tiles, tiles => row(tiles, output, into))
    }

    /// Returns the size in memory in bytes.
    pub fn bytes(&self) -> usize {
        each_type!(&self.tiles, tiles => size_of_val(tiles.as_slice()))
    }
}

fn pack<T: Tile>(data: &[u8], outputs: usize) -> Option<Vec<T>> {
    pack_with(data, outputs, T::BLOCK_BYTES, T::put)
}

/// Packs all rows of a matrix. A block of a row has `block_bytes` bytes, and `put` packs one group of a block. Returns `None` if a number is not
/// finite.
fn pack_with<T: Tile>(
    data: &[u8],
    outputs: usize,
    block_bytes: usize,
    put: impl Fn(&mut T, usize, &[u8], usize) -> bool,
) -> Option<Vec<T>> {
    let row_bytes = data.len() / outputs;
    let groups = row_bytes.div_ceil(block_bytes) * T::BLOCK_GROUPS;
    let mut tiles = vec![T::ZERO; outputs.div_ceil(PANEL) * groups];
    let mut finite = true;
    for (output, row) in data.chunks_exact(row_bytes).enumerate() {
        let panel = &mut tiles[output / PANEL * groups..][..groups];
        for (tiles, block) in panel.chunks_exact_mut(T::BLOCK_GROUPS).zip(row.chunks(block_bytes)) {
            for (group, tile) in tiles.iter_mut().enumerate() {
                finite &= put(tile, output % PANEL, block, group);
            }
        }
    }
    finite.then_some(tiles)
}

fn row<T: Tile>(tiles: &[T], output: usize, into: &mut [f32]) {
    let groups = into.len().div_ceil(GROUP);
    for (group, into) in into.chunks_mut(GROUP).enumerate() {
        let tile = &tiles[output / PANEL * groups + group];
        for (input, into) in into.iter_mut().enumerate() {
            *into = tile.get(output % PANEL, input);
        }
    }
}

/// Reads a vector of float weights, such as those of a norm. Fails if the tensor is missing, has another length or format, or has a number
/// that is not finite.
pub(crate) fn vector(file: &dyn ModelFile, name: &str, len: usize) -> Result<Vec<f32>, CpuError> {
    let tensor = file.tensor_of(name, &[len as u64])?;
    let numbers: Vec<f32> = match tensor.kind {
        TensorType::F32 => singles(tensor.data).collect(),
        TensorType::F16 => halves(tensor.data).map(|bits| f16::from_bits(bits).to_f32()).collect(),
        TensorType::BF16 => halves(tensor.data).map(widen_bf16).collect(),
        kind => return Err(CpuError::WeightType { name: name.to_owned(), kind }),
    };
    if numbers.iter().all(|number| number.is_finite()) { Ok(numbers) } else { Err(CpuError::NotFinite { name: name.to_owned() }) }
}
