//! Rows times a weight matrix.
//!
//! Every output of every row is a chain of its own: group after group, `sum = fma(scale × step, dot, sum)`, then the group's minimum
//! in the same way. `dot` is an exact integer: the row is quantised to 8 bits a number with one step a group (Q6_K's two factors a
//! group are whole numbers and part of it). For float weights it is `sum = fma(x, weight, sum)`, input after input. How many rows are
//! computed together changes only how often a tile is unpacked.

use super::{
    isa::kernel,
    math::{round, widen, widen_bf16},
    weights::{Bf16Tile, F16Tile, F32Tile, GROUP, Matrix, Nibbles, PANEL, Q4_1Tile, Q4_KTile, Q6_KTile, Q8_0Tile, Tiles},
};

/// Rows for which a panel's tiles are unpacked once; their sums (8 KiB) stay in the first-level cache.
const ROWS_MAX: usize = 64;
/// Rows whose sums are kept in registers together.
const ROWS: usize = 4;

/// Rows in 8 bits, stored group by group, in each the rows.
#[derive(Default)]
pub(super) struct Quantised {
    rows: usize,
    /// From −127 to 127, as wide as they are multiplied.
    quants: Vec<[i16; GROUP]>,
    scales: Vec<Scale>,
}

/// Of one group of one row.
#[derive(Clone, Copy, Default)]
struct Scale {
    /// `x ≈ step × quant`.
    step: f32,
    /// `step` × the sum of the quants, for formats with a minimum.
    sum: f32,
}

impl Quantised {
    fn resize(&mut self, rows: usize, inputs: usize) {
        self.rows = rows;
        self.quants.resize(rows * inputs.div_ceil(GROUP), [0; GROUP]);
        self.scales.resize(rows * inputs.div_ceil(GROUP), Scale::default());
    }
}

kernel! {
    /// Quantises rows of `inputs` numbers.
    pub(super) fn quantise(x: &[f32], inputs: usize, into: &mut Quantised) {
        let rows = x.len() / inputs;
        into.resize(rows, inputs);
        for (row, x) in x.chunks_exact(inputs).enumerate() {
            for (group, x) in x.chunks(GROUP).enumerate() {
                let mut padded = [0f32; GROUP];
                padded[..x.len()].copy_from_slice(x);
                let mut largest = 0f32;
                for x in &padded {
                    largest = if x.abs() > largest { x.abs() } else { largest };
                }
                let step = largest / 127.0;
                let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
                let quants = &mut into.quants[group * rows + row];
                let mut sum = 0i32;
                for (quant, x) in quants.iter_mut().zip(&padded) {
                    let rounded = round(x * inverse);
                    sum += rounded;
                    *quant = rounded as i16;
                }
                into.scales[group * rows + row] = Scale { step, sum: step * sum as f32 };
            }
        }
    }
}

kernel! {
    /// `out = x × matrixᵀ` for all rows. `quantised` is of the same `x`.
    pub(super) fn linear(matrix: &Matrix, x: &[f32], quantised: &Quantised, out: &mut [f32]) {
        match &matrix.tiles {
            Tiles::Q4_1(tiles) => integer(tiles, quantised, matrix.outputs, out),
            Tiles::Q8_0(tiles) => integer(tiles, quantised, matrix.outputs, out),
            Tiles::Q4_K(tiles) => integer(tiles, quantised, matrix.outputs, out),
            Tiles::Q6_K(tiles) => integer(tiles, quantised, matrix.outputs, out),
            Tiles::BF16(tiles) => float(tiles, x, matrix.inputs, matrix.outputs, out),
            Tiles::F16(tiles) => float(tiles, x, matrix.inputs, matrix.outputs, out),
            Tiles::F32(tiles) => float(tiles, x, matrix.inputs, matrix.outputs, out),
        }
    }
}

/// A tile whose dot products with quantised rows are whole numbers.
trait IntegerTile {
    /// As many products of a weight and a quant can be added in 16 bits.
    const RUN: usize;
    const HAS_MINS: bool;

    fn unpack(&self, into: &mut [[i16; PANEL]; GROUP]);
    fn scales(&self) -> [f32; PANEL];
    fn mins(&self) -> [f32; PANEL];
    /// Whole numbers by which the dot products of the group's two halves are multiplied, where the format has such.
    fn factors(&self) -> Option<&[[i8; PANEL]; 2]>;
    /// Each output's dot product with one row.
    fn dot(&self, row: &[i16; GROUP]) -> [i32; PANEL];
}

#[inline(always)]
fn widened(halves: &[u16; PANEL]) -> [f32; PANEL] {
    let mut numbers = [0f32; PANEL];
    for c in 0..PANEL {
        numbers[c] = widen(halves[c]);
    }
    numbers
}

impl Nibbles {
    // 16 × 15 × 127 = 30,480
    const RUN: usize = 16;

    #[inline(always)]
    fn unpack(&self, into: &mut [[i16; PANEL]; GROUP]) {
        for (words, into) in self.0.iter().zip(into.as_chunks_mut::<4>().0) {
            for c in 0..PANEL {
                let word = words[c];
                into[0][c] = (word & 15) as i16;
                into[1][c] = (word >> 4 & 15) as i16;
                into[2][c] = (word >> 8 & 15) as i16;
                into[3][c] = (word >> 12) as i16;
            }
        }
    }

    #[inline(always)]
    fn dot(&self, row: &[i16; GROUP]) -> [i32; PANEL] {
        let mut total = [0i32; PANEL];
        for half in 0..GROUP / Self::RUN {
            let mut sums = [0i16; PANEL];
            for word in half * 4..half * 4 + 4 {
                let (words, x) = (&self.0[word], [row[word * 4], row[word * 4 + 1], row[word * 4 + 2], row[word * 4 + 3]]);
                for c in 0..PANEL {
                    let quants = words[c];
                    let first =
                        ((quants & 15) as i16).wrapping_mul(x[0]).wrapping_add(((quants >> 4 & 15) as i16).wrapping_mul(x[1]));
                    let last =
                        ((quants >> 8 & 15) as i16).wrapping_mul(x[2]).wrapping_add(((quants >> 12) as i16).wrapping_mul(x[3]));
                    sums[c] = sums[c].wrapping_add(first).wrapping_add(last);
                }
            }
            for c in 0..PANEL {
                total[c] += i32::from(sums[c]);
            }
        }
        total
    }
}

impl IntegerTile for Q4_1Tile {
    const RUN: usize = Nibbles::RUN;
    const HAS_MINS: bool = true;

    #[inline(always)]
    fn unpack(&self, into: &mut [[i16; PANEL]; GROUP]) {
        self.quants.unpack(into);
    }

    #[inline(always)]
    fn scales(&self) -> [f32; PANEL] {
        widened(&self.scales)
    }

    #[inline(always)]
    fn mins(&self) -> [f32; PANEL] {
        widened(&self.mins)
    }

    #[inline(always)]
    fn factors(&self) -> Option<&[[i8; PANEL]; 2]> {
        None
    }

    #[inline(always)]
    fn dot(&self, row: &[i16; GROUP]) -> [i32; PANEL] {
        self.quants.dot(row)
    }
}

impl IntegerTile for Q4_KTile {
    const RUN: usize = Nibbles::RUN;
    const HAS_MINS: bool = true;

    #[inline(always)]
    fn unpack(&self, into: &mut [[i16; PANEL]; GROUP]) {
        self.quants.unpack(into);
    }

    #[inline(always)]
    fn scales(&self) -> [f32; PANEL] {
        let mut scales = widened(&self.scales);
        for (scale, factor) in scales.iter_mut().zip(&self.factors) {
            *scale *= f32::from(*factor);
        }
        scales
    }

    #[inline(always)]
    fn mins(&self) -> [f32; PANEL] {
        let mut mins = widened(&self.mins);
        for (min, factor) in mins.iter_mut().zip(&self.min_factors) {
            *min *= -f32::from(*factor);
        }
        mins
    }

    #[inline(always)]
    fn factors(&self) -> Option<&[[i8; PANEL]; 2]> {
        None
    }

    #[inline(always)]
    fn dot(&self, row: &[i16; GROUP]) -> [i32; PANEL] {
        self.quants.dot(row)
    }
}

impl IntegerTile for Q6_KTile {
    // 8 × 32 × 127 = 32,512
    const RUN: usize = 8;
    const HAS_MINS: bool = false;

    #[inline(always)]
    fn unpack(&self, into: &mut [[i16; PANEL]; GROUP]) {
        for (quants, into) in self.quants.iter().zip(into) {
            for c in 0..PANEL {
                into[c] = i16::from(quants[c]);
            }
        }
    }

    #[inline(always)]
    fn scales(&self) -> [f32; PANEL] {
        widened(&self.scales)
    }

    #[inline(always)]
    fn mins(&self) -> [f32; PANEL] {
        [0.0; PANEL]
    }

    #[inline(always)]
    fn factors(&self) -> Option<&[[i8; PANEL]; 2]> {
        Some(&self.factors)
    }

    #[inline(always)]
    fn dot(&self, row: &[i16; GROUP]) -> [i32; PANEL] {
        let mut unpacked = [[0i16; PANEL]; GROUP];
        self.unpack(&mut unpacked);
        let [total] = dot_rows(&unpacked, std::array::from_ref(row), Self::RUN, self.factors());
        total
    }
}

impl IntegerTile for Q8_0Tile {
    // 2 × 128 × 127 = 32,512
    const RUN: usize = 2;
    const HAS_MINS: bool = false;

    #[inline(always)]
    fn unpack(&self, into: &mut [[i16; PANEL]; GROUP]) {
        for (quants, into) in self.quants.iter().zip(into) {
            for c in 0..PANEL {
                into[c] = i16::from(quants[c]);
            }
        }
    }

    #[inline(always)]
    fn scales(&self) -> [f32; PANEL] {
        widened(&self.scales)
    }

    #[inline(always)]
    fn mins(&self) -> [f32; PANEL] {
        [0.0; PANEL]
    }

    #[inline(always)]
    fn factors(&self) -> Option<&[[i8; PANEL]; 2]> {
        None
    }

    #[inline(always)]
    fn dot(&self, row: &[i16; GROUP]) -> [i32; PANEL] {
        let mut total = [0i32; PANEL];
        for (quants, x) in self.quants.as_chunks::<2>().0.iter().zip(row.as_chunks::<2>().0) {
            for c in 0..PANEL {
                let sum = i16::from(quants[0][c]).wrapping_mul(x[0]).wrapping_add(i16::from(quants[1][c]).wrapping_mul(x[1]));
                total[c] += i32::from(sum);
            }
        }
        total
    }
}

#[inline(always)]
fn integer<T: IntegerTile>(tiles: &[T], x: &Quantised, outputs: usize, out: &mut [f32]) {
    let groups = tiles.len() / outputs.div_ceil(PANEL);
    let mut unpacked = [[0i16; PANEL]; GROUP];
    let mut sums = [[0f32; PANEL]; ROWS_MAX];
    for (block, out) in out.chunks_mut(ROWS_MAX * outputs).enumerate() {
        let (first, rows) = (block * ROWS_MAX, out.len() / outputs);
        for (panel, tiles) in tiles.chunks_exact(groups).enumerate() {
            sums[..rows].fill([0.0; PANEL]);
            for (group, tile) in tiles.iter().enumerate() {
                let (scales, mins) = (tile.scales(), tile.mins());
                let at = group * x.rows + first;
                let (fours, rest) = x.quants[at..at + rows].as_chunks::<ROWS>();
                let row_scales = &x.scales[at..at + rows];
                if !fours.is_empty() {
                    tile.unpack(&mut unpacked);
                }
                for (four, quants) in fours.iter().enumerate() {
                    let dots = dot_rows::<ROWS>(&unpacked, quants, T::RUN, tile.factors());
                    for (r, dots) in dots.iter().enumerate() {
                        accumulate::<T>(&mut sums[four * ROWS + r], dots, &scales, &mins, row_scales[four * ROWS + r]);
                    }
                }
                for (r, quants) in rest.iter().enumerate() {
                    let r = fours.len() * ROWS + r;
                    accumulate::<T>(&mut sums[r], &tile.dot(quants), &scales, &mins, row_scales[r]);
                }
            }
            store(&sums[..rows], panel, outputs, out);
        }
    }
}

/// With factors, a dot product stays below 2 × 16 × 32 × 127 × 128 < 2^24 and is a single-precision number exactly, as all others.
#[inline(always)]
fn dot_rows<const R: usize>(
    weights: &[[i16; PANEL]; GROUP],
    rows: &[[i16; GROUP]; R],
    run: usize,
    factors: Option<&[[i8; PANEL]; 2]>,
) -> [[i32; PANEL]; R] {
    let mut total = [[0i32; PANEL]; R];
    for start in (0..GROUP).step_by(run) {
        let mut sums = [[0i16; PANEL]; R];
        for k in start..start + run {
            for r in 0..R {
                let x = rows[r][k];
                for c in 0..PANEL {
                    sums[r][c] = sums[r][c].wrapping_add(weights[k][c].wrapping_mul(x));
                }
            }
        }
        for r in 0..R {
            for c in 0..PANEL {
                let factor = match factors {
                    None => 1,
                    Some(factors) => i32::from(factors[start / (GROUP / 2)][c]),
                };
                total[r][c] += factor * i32::from(sums[r][c]);
            }
        }
    }
    total
}

#[inline(always)]
fn accumulate<T: IntegerTile>(
    sums: &mut [f32; PANEL],
    dots: &[i32; PANEL],
    scales: &[f32; PANEL],
    mins: &[f32; PANEL],
    row: Scale,
) {
    for c in 0..PANEL {
        sums[c] = (scales[c] * row.step).mul_add(dots[c] as f32, sums[c]);
        if T::HAS_MINS {
            sums[c] = mins[c].mul_add(row.sum, sums[c]);
        }
    }
}

/// A tile of floats.
trait FloatTile {
    fn numbers(&self) -> [[f32; PANEL]; GROUP];
}

impl FloatTile for F16Tile {
    #[inline(always)]
    fn numbers(&self) -> [[f32; PANEL]; GROUP] {
        let mut numbers = [[0f32; PANEL]; GROUP];
        for (into, halves) in numbers.iter_mut().zip(&self.0) {
            for c in 0..PANEL {
                into[c] = widen(halves[c]);
            }
        }
        numbers
    }
}

impl FloatTile for Bf16Tile {
    #[inline(always)]
    fn numbers(&self) -> [[f32; PANEL]; GROUP] {
        let mut numbers = [[0f32; PANEL]; GROUP];
        for (into, bits) in numbers.iter_mut().zip(&self.0) {
            for c in 0..PANEL {
                into[c] = widen_bf16(bits[c]);
            }
        }
        numbers
    }
}

impl FloatTile for F32Tile {
    #[inline(always)]
    fn numbers(&self) -> [[f32; PANEL]; GROUP] {
        self.0
    }
}

#[inline(always)]
fn float<T: FloatTile>(tiles: &[T], x: &[f32], inputs: usize, outputs: usize, out: &mut [f32]) {
    let groups = inputs.div_ceil(GROUP);
    let mut sums = [[0f32; PANEL]; ROWS_MAX];
    for (x, out) in x.chunks(ROWS_MAX * inputs).zip(out.chunks_mut(ROWS_MAX * outputs)) {
        let rows = out.len() / outputs;
        for (panel, tiles) in tiles.chunks_exact(groups).enumerate() {
            sums[..rows].fill([0.0; PANEL]);
            for (group, tile) in tiles.iter().enumerate() {
                let weights = tile.numbers();
                for (sums, x) in sums.iter_mut().zip(x.chunks_exact(inputs)) {
                    let x = &x[group * GROUP..inputs.min((group + 1) * GROUP)];
                    for (x, weights) in x.iter().zip(&weights) {
                        for c in 0..PANEL {
                            sums[c] = x.mul_add(weights[c], sums[c]);
                        }
                    }
                }
            }
            store(&sums[..rows], panel, outputs, out);
        }
    }
}

/// Of the last panel only the columns that are outputs.
#[inline(always)]
fn store(sums: &[[f32; PANEL]], panel: usize, outputs: usize, out: &mut [f32]) {
    let columns = PANEL.min(outputs - panel * PANEL);
    for (sums, out) in sums.iter().zip(out.chunks_exact_mut(outputs)) {
        out[panel * PANEL..][..columns].copy_from_slice(&sums[..columns]);
    }
}
