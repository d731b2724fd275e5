//! Weight matrices, packed once for the kernels in nearly the bytes that the file has.
//!
//! A *panel* is 32 outputs, a *group* 32 consecutive inputs (which share a scale in the file's formats), a *tile* one group of one
//! panel. Tiles of a panel follow each other, and within a tile the 32 outputs of one input lie side by side, so that the kernels'
//! innermost loops run over outputs, every output by itself.

use super::{CpuError, math::widen};
use tandem_model::{Gguf, TensorType};

/// Outputs side by side in a tile.
pub(super) const PANEL: usize = 32;
/// Inputs in a tile.
pub(super) const GROUP: usize = 32;

/// `outputs` rows of `inputs` numbers.
pub(super) struct Matrix {
    pub outputs: usize,
    pub inputs: usize,
    pub tiles: Tiles,
}

/// Panel by panel, group by group; outputs and inputs that fill up the last ones are 0.
pub(super) enum Tiles {
    Q4_1(Vec<Q4_1Tile>),
    Q8_0(Vec<Q8_0Tile>),
    F16(Vec<F16Tile>),
    F32(Vec<F32Tile>),
}

/// `weight = scale × quant + min`, quants from 0 to 15.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct Q4_1Tile {
    /// Word `i` holds the inputs `4i` to `4i + 3`, the first in the lowest four bits.
    pub quants: [[u16; PANEL]; GROUP / 4],
    pub scales: [u16; PANEL],
    pub mins: [u16; PANEL],
}

/// `weight = scale × quant`.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct Q8_0Tile {
    pub quants: [[i8; PANEL]; GROUP],
    pub scales: [u16; PANEL],
}

/// Half-precision bits.
#[derive(Clone)]
#[repr(align(64))]
pub(super) struct F16Tile(pub [[u16; PANEL]; GROUP]);

#[derive(Clone)]
#[repr(align(64))]
pub(super) struct F32Tile(pub [[f32; PANEL]; GROUP]);

/// How one group of one output gets into a tile and out of it.
trait Tile: Clone {
    /// Of a group in the file.
    const GROUP_BYTES: usize;
    const ZERO: Self;

    /// Puts a group (or the shorter end of a row) into a column. False when a number in it is not finite.
    fn put(&mut self, column: usize, group: &[u8]) -> bool;

    /// One weight.
    fn get(&self, column: usize, input: usize) -> f32;
}

fn half_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn is_finite(half: u16) -> bool {
    half & 0x7c00 != 0x7c00
}

impl Tile for Q4_1Tile {
    const GROUP_BYTES: usize = 20;
    const ZERO: Self = Self { quants: [[0; PANEL]; GROUP / 4], scales: [0; PANEL], mins: [0; PANEL] };

    fn put(&mut self, column: usize, group: &[u8]) -> bool {
        self.scales[column] = half_at(group, 0);
        self.mins[column] = half_at(group, 2);
        // The file's byte i holds input i in its low half and input i + 16 in its high half.
        for (word, bytes) in group[4..].as_chunks::<4>().0.iter().enumerate() {
            let [a, b, c, d] = bytes.map(u16::from);
            self.quants[word][column] = (a & 15) | (b & 15) << 4 | (c & 15) << 8 | (d & 15) << 12;
            self.quants[word + 4][column] = a >> 4 | b >> 4 << 4 | c >> 4 << 8 | d >> 4 << 12;
        }
        is_finite(self.scales[column]) && is_finite(self.mins[column])
    }

    fn get(&self, column: usize, input: usize) -> f32 {
        let quant = self.quants[input / 4][column] >> (input % 4 * 4) & 15;
        widen(self.scales[column]).mul_add(f32::from(quant), widen(self.mins[column]))
    }
}

impl Tile for Q8_0Tile {
    const GROUP_BYTES: usize = 34;
    const ZERO: Self = Self { quants: [[0; PANEL]; GROUP], scales: [0; PANEL] };

    fn put(&mut self, column: usize, group: &[u8]) -> bool {
        self.scales[column] = half_at(group, 0);
        for (quants, byte) in self.quants.iter_mut().zip(&group[2..]) {
            quants[column] = *byte as i8;
        }
        is_finite(self.scales[column])
    }

    fn get(&self, column: usize, input: usize) -> f32 {
        widen(self.scales[column]) * f32::from(self.quants[input][column])
    }
}

impl Tile for F16Tile {
    const GROUP_BYTES: usize = 2 * GROUP;
    const ZERO: Self = Self([[0; PANEL]; GROUP]);

    fn put(&mut self, column: usize, group: &[u8]) -> bool {
        let halves = group.as_chunks::<2>().0.iter().map(|half| u16::from_le_bytes(*half));
        self.0.iter_mut().zip(halves).fold(true, |finite, (row, half)| {
            row[column] = half;
            finite & is_finite(half)
        })
    }

    fn get(&self, column: usize, input: usize) -> f32 {
        widen(self.0[input][column])
    }
}

impl Tile for F32Tile {
    const GROUP_BYTES: usize = 4 * GROUP;
    const ZERO: Self = Self([[0.0; PANEL]; GROUP]);

    fn put(&mut self, column: usize, group: &[u8]) -> bool {
        let numbers = group.as_chunks::<4>().0.iter().map(|number| f32::from_le_bytes(*number));
        self.0.iter_mut().zip(numbers).fold(true, |finite, (row, number)| {
            row[column] = number;
            finite & number.is_finite()
        })
    }

    fn get(&self, column: usize, input: usize) -> f32 {
        self.0[input][column]
    }
}

impl Matrix {
    /// Packs a tensor that must have this shape.
    pub fn load(file: &Gguf, name: &str, outputs: usize, inputs: usize) -> Result<Self, CpuError> {
        let tensor = file.tensor_of(name, &[inputs as u64, outputs as u64])?;
        let not_finite = || CpuError::NotFinite { name: name.to_owned() };
        let tiles = match tensor.kind {
            TensorType::Q4_1 => pack(tensor.data, outputs).map(Tiles::Q4_1),
            TensorType::Q8_0 => pack(tensor.data, outputs).map(Tiles::Q8_0),
            TensorType::F16 => pack(tensor.data, outputs).map(Tiles::F16),
            TensorType::F32 => pack(tensor.data, outputs).map(Tiles::F32),
            kind => return Err(CpuError::WeightType { name: name.to_owned(), kind }),
        };
        Ok(Self { outputs, inputs, tiles: tiles.ok_or_else(not_finite)? })
    }

    /// The numbers of one output, as the embedding of a token.
    pub fn row(&self, output: usize, into: &mut [f32]) {
        match &self.tiles {
            Tiles::Q4_1(tiles) => row(tiles, output, into),
            Tiles::Q8_0(tiles) => row(tiles, output, into),
            Tiles::F16(tiles) => row(tiles, output, into),
            Tiles::F32(tiles) => row(tiles, output, into),
        }
    }

    /// Of memory.
    pub fn bytes(&self) -> usize {
        match &self.tiles {
            Tiles::Q4_1(tiles) => size_of_val(tiles.as_slice()),
            Tiles::Q8_0(tiles) => size_of_val(tiles.as_slice()),
            Tiles::F16(tiles) => size_of_val(tiles.as_slice()),
            Tiles::F32(tiles) => size_of_val(tiles.as_slice()),
        }
    }
}

/// `None` when a number is not finite.
fn pack<T: Tile>(data: &[u8], outputs: usize) -> Option<Vec<T>> {
    let row_bytes = data.len() / outputs;
    let groups = row_bytes.div_ceil(T::GROUP_BYTES);
    let mut tiles = vec![T::ZERO; outputs.div_ceil(PANEL) * groups];
    let mut finite = true;
    for (output, row) in data.chunks_exact(row_bytes).enumerate() {
        let panel = &mut tiles[output / PANEL * groups..][..groups];
        for (tile, group) in panel.iter_mut().zip(row.chunks(T::GROUP_BYTES)) {
            finite &= tile.put(output % PANEL, group);
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

/// A vector of float weights (norms).
pub(super) fn vector(file: &Gguf, name: &str, len: usize) -> Result<Vec<f32>, CpuError> {
    let tensor = file.tensor_of(name, &[len as u64])?;
    let numbers: Vec<f32> = match tensor.kind {
        TensorType::F32 => tensor.data.as_chunks::<4>().0.iter().map(|number| f32::from_le_bytes(*number)).collect(),
        TensorType::F16 => tensor.data.as_chunks::<2>().0.iter().map(|half| half::f16::from_le_bytes(*half).to_f32()).collect(),
        kind => return Err(CpuError::WeightType { name: name.to_owned(), kind }),
    };
    if numbers.iter().all(|number| number.is_finite()) { Ok(numbers) } else { Err(CpuError::NotFinite { name: name.to_owned() }) }
}
