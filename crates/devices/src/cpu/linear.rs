//! Matrix multiplication of activations with a weight matrix.
//!
//! The sum for every output of every row is computed in a fixed order, group by group: `sum = fma(scale × step, dot, sum)`. Then the
//! group's minimum is added in the same way. `dot` is the dot product of the group's weights and the row. It is an exact integer, because
//! the row is quantised to 8 bits with one step per group. For Q6_K, `dot` includes the group's two integer factors. For float weights, the
//! inputs are added one by one: `sum = fma(x, weight, sum)`. The number of rows and outputs that are computed together, and the thread that
//! computes them, do not change any result.
#![expect(clippy::needless_range_loop, reason = "one index goes through rows, lanes and vectors alike")]

use super::{
    isa::{Isa, kernel},
    math::round,
    simd::Simd,
    threads::Threads,
    weights::{Bf16Tile, F16Tile, F32Tile, GROUP, Matrix, Nibbles, PANEL, Q4_1Tile, Q4_KTile, Q6_KTile, Q8_0Tile, Tiles, Words},
};
use std::ops::Range;

/// With up to this many rows, the outputs of a matrix are split between threads, so that each thread reads only its share of the weights.
/// With more rows, the rows are split.
pub(super) const SHARED_ROWS: usize = 16;
/// Minimum number of weights in a task if a matrix is split into more tasks than there are threads. A task of this size takes a few microseconds.
const TASK_WEIGHTS: usize = 1 << 17;

/// A matrix whose rows are quantised to int8, in groups of 32 numbers with one step each.
#[derive(Default)]
pub(super) struct Quantised {
    row_groups: usize,
    groups: Vec<Group>,
}

/// A group of 32 quantised numbers. Each number is approximately `step × quant`.
#[derive(Clone, Copy)]
struct Group {
    /// The quantised numbers, from −127 to 127, in words of four.
    quants: [[i8; 4]; GROUP / 4],
    /// The sum of the quants in each half of the group.
    totals: [i32; 2],
    step: f32,
    /// `step` × the sum of the quants. Weight formats with a minimum, such as Q4_K, multiply the minimum by it.
    sum: f32,
}

impl Group {
    const ZERO: Self = Self { quants: [[0; 4]; GROUP / 4], totals: [0; 2], step: 0.0, sum: 0.0 };
}

impl Quantised {
    #[inline(always)]
    fn row(&self, row: usize) -> &[Group] {
        &self.groups[row * self.row_groups..][..self.row_groups]
    }
}

kernel! {
    /// Quantises the matrix `x`, which has the layout `[rows][inputs]`.
    pub(super) fn quantise(_simd, x: &[f32], inputs: usize, into: &mut Quantised) {
        into.row_groups = inputs.div_ceil(GROUP);
        into.groups.resize(x.len() / inputs * into.row_groups, Group::ZERO);
        for (x, groups) in x.chunks_exact(inputs).zip(into.groups.chunks_exact_mut(into.row_groups)) {
            for (x, group) in x.chunks(GROUP).zip(groups) {
                let mut padded = [0f32; GROUP];
                padded[..x.len()].copy_from_slice(x);
                quantise_group(&padded, group);
            }
        }
    }
}

#[inline(always)]
fn quantise_group(x: &[f32; GROUP], group: &mut Group) {
    let (halves, _) = x.as_chunks::<{ GROUP / 2 }>();
    let mut largest = [0f32; GROUP / 2];
    for half in halves {
        for l in 0..GROUP / 2 {
            largest[l] = if half[l].abs() > largest[l] { half[l].abs() } else { largest[l] };
        }
    }
    let mut lanes = GROUP / 4;
    while lanes > 0 {
        for l in 0..lanes {
            largest[l] = if largest[l + lanes] > largest[l] { largest[l + lanes] } else { largest[l] };
        }
        lanes /= 2;
    }
    let overall = largest[0];
    let step = overall / 127.0;
    let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
    let mut rounded = [0i32; GROUP];
    for i in 0..GROUP {
        rounded[i] = round(x[i] * inverse);
    }
    let mut totals = [0i32; 2];
    for i in 0..GROUP / 2 {
        totals[0] += rounded[i];
        totals[1] += rounded[i + GROUP / 2];
    }
    let quants = group.quants.as_flattened_mut();
    for i in 0..GROUP {
        quants[i] = rounded[i] as i8;
    }
    group.totals = totals;
    group.step = step;
    group.sum = step * (totals[0] + totals[1]) as f32;
}

/// Computes `out = x × matrixᵀ` for each of the matrices. `x` has the layout `[rows][inputs]`, and `out` the layout `[rows][outputs]`. `quantised`
/// has the quantised numbers of `x`.
pub(super) fn linear<const N: usize>(
    threads: &Threads,
    isa: Isa,
    (x, inputs, quantised): (&[f32], usize, &Quantised),
    products: [(&Matrix, &mut [f32]); N],
) {
    let rows = x.len() / inputs;
    let mut tasks = Vec::new();
    for (matrix, out) in products {
        let panels = matrix.outputs.div_ceil(PANEL);
        let few = TASK_WEIGHTS / (PANEL * inputs) + 1;
        let each = if rows <= SHARED_ROWS { panels.div_ceil(threads.count()).min(few.max(panels / 64)) } else { panels };
        let mut rest: Vec<&mut [f32]> = out.chunks_exact_mut(matrix.outputs).collect();
        for first in (0..panels).step_by(each) {
            let panels = first..panels.min(first + each);
            let outputs = matrix.outputs.min(panels.end * PANEL) - first * PANEL;
            let out =
                rest.iter_mut().map(|rest| rest.split_off_mut(..outputs).expect("a row has all outputs")).collect::<Vec<_>>();
            tasks.push((matrix, panels, out));
        }
    }
    threads.for_each(tasks, |(matrix, panels, mut out)| multiply(isa, matrix, panels, x, quantised, &mut out));
}

kernel! {
    /// Computes the outputs of some panels, which are groups of neighbouring outputs. `out` has one slice per row, into which the outputs are
    /// written.
    fn multiply(simd, matrix: &Matrix, panels: Range<usize>, x: &[f32], quantised: &Quantised, out: &mut [&mut [f32]]) {
        match &matrix.tiles {
            Tiles::Q4_1(tiles) => integer(simd, tiles, panels, quantised, out),
            Tiles::Q8_0(tiles) => integer(simd, tiles, panels, quantised, out),
            Tiles::Q4_K(tiles) => integer(simd, tiles, panels, quantised, out),
            Tiles::Q6_K(tiles) => integer(simd, tiles, panels, quantised, out),
            Tiles::BF16(tiles) => float(simd, tiles, panels, x, matrix.inputs, out),
            Tiles::F16(tiles) => float(simd, tiles, panels, x, matrix.inputs, out),
            Tiles::F32(tiles) => float(simd, tiles, panels, x, matrix.inputs, out),
        }
    }
}

/// The weights of one group of inputs for all outputs of a panel. Their dot products with quantised rows are integers. In each method, `column` is
/// the first of the outputs whose values the returned vector holds.
trait IntegerTile {
    const HAS_MINS: bool = false;
    /// Unpacked weights, which are used for several rows.
    type Weights<S: Simd>: Copy;

    fn weights<S: Simd>(&self, simd: S, column: usize) -> Self::Weights<S>;
    fn dot<S: Simd>(simd: S, weights: &Self::Weights<S>, x: &Group) -> S::Ints;
    fn scales<S: Simd>(&self, simd: S, column: usize) -> S::Floats;

    /// Returns the minima, which are used only if `HAS_MINS` is true.
    #[inline(always)]
    fn mins<S: Simd>(&self, simd: S, _column: usize) -> S::Floats {
        simd.splat(0.0)
    }
}

impl Nibbles {
    #[inline(always)]
    fn words<S: Simd>(&self, simd: S, column: usize) -> [S::Bytes; GROUP / 4] {
        let mut words = [simd.splat_bytes(&[0; 4]); GROUP / 4];
        for i in 0..GROUP / 8 {
            let bytes = simd.load_bytes(&self.0[i][column * 4..]);
            words[i] = simd.low_nibbles(bytes);
            words[i + GROUP / 8] = simd.high_nibbles(bytes);
        }
        words
    }

    /// Returns the dot products. A 16-bit sum receives two products in each of eight calls, so it is at most 8 × 2 × 15 × 127 = 30,480,
    /// which is less than 2^15.
    #[inline(always)]
    fn dot<S: Simd>(simd: S, words: &[S::Bytes; GROUP / 4], x: &Group) -> S::Ints {
        let mut sums = simd.no_sums();
        for i in 0..GROUP / 4 {
            sums = simd.add_products(sums, words[i], simd.splat_bytes(&x.quants[i]));
        }
        simd.ints(sums)
    }
}

#[inline(always)]
fn loaded<S: Simd>(simd: S, words: &[Words; GROUP / 4], column: usize) -> [S::Bytes; GROUP / 4] {
    let mut loaded = [simd.splat_bytes(&[0; 4]); GROUP / 4];
    for i in 0..GROUP / 4 {
        loaded[i] = simd.load_bytes(&words[i][column * 4..]);
    }
    loaded
}

impl IntegerTile for Q4_1Tile {
    const HAS_MINS: bool = true;
    type Weights<S: Simd> = [S::Bytes; GROUP / 4];

    #[inline(always)]
    fn weights<S: Simd>(&self, simd: S, column: usize) -> Self::Weights<S> {
        self.quants.words(simd, column)
    }

    #[inline(always)]
    fn dot<S: Simd>(simd: S, weights: &Self::Weights<S>, x: &Group) -> S::Ints {
        Nibbles::dot(simd, weights, x)
    }

    #[inline(always)]
    fn scales<S: Simd>(&self, simd: S, column: usize) -> S::Floats {
        simd.load_halves(&self.scales[column..])
    }

    #[inline(always)]
    fn mins<S: Simd>(&self, simd: S, column: usize) -> S::Floats {
        simd.load_halves(&self.mins[column..])
    }
}

impl IntegerTile for Q4_KTile {
    const HAS_MINS: bool = true;
    type Weights<S: Simd> = [S::Bytes; GROUP / 4];

    #[inline(always)]
    fn weights<S: Simd>(&self, simd: S, column: usize) -> Self::Weights<S> {
        self.quants.words(simd, column)
    }

    #[inline(always)]
    fn dot<S: Simd>(simd: S, weights: &Self::Weights<S>, x: &Group) -> S::Ints {
        Nibbles::dot(simd, weights, x)
    }

    #[inline(always)]
    fn scales<S: Simd>(&self, simd: S, column: usize) -> S::Floats {
        simd.mul(simd.load_halves(&self.scales[column..]), simd.load_u8(&self.factors[column..]))
    }

    /// Returns the negated minima, because this format subtracts its minima. Negation changes only the sign of a product, so the result
    /// stays exact.
    #[inline(always)]
    fn mins<S: Simd>(&self, simd: S, column: usize) -> S::Floats {
        let mins = simd.mul(simd.load_halves(&self.mins[column..]), simd.load_u8(&self.min_factors[column..]));
        simd.mul(mins, simd.splat(-1.0))
    }
}

impl IntegerTile for Q6_KTile {
    type Weights<S: Simd> = ([S::Bytes; GROUP / 4], [S::Ints; 2]);

    #[inline(always)]
    fn weights<S: Simd>(&self, simd: S, column: usize) -> Self::Weights<S> {
        let factors = [simd.load_i8(&self.factors[0][column..]), simd.load_i8(&self.factors[1][column..])];
        (loaded(simd, &self.quants, column), factors)
    }

    /// Returns the dot products. Each is at most 2 × 16 × 32 × 127 × 128 < 2^24 in absolute value, so single precision holds it exactly.
    #[inline(always)]
    fn dot<S: Simd>(simd: S, (words, factors): &Self::Weights<S>, x: &Group) -> S::Ints {
        let mut dot = simd.splat_int(0);
        for half in 0..2 {
            // The stored quants are greater by 32 than the quants in the format's formula.
            let mut sum = simd.splat_int(-32 * x.totals[half]);
            for pair in (half * 4..half * 4 + 4).step_by(2) {
                // Each 16-bit sum has two products from each of the two calls, so it is at most 2 × 2 × 63 × 127 = 32,004 < 2^15.
                let sums = simd.add_products(simd.no_sums(), words[pair], simd.splat_bytes(&x.quants[pair]));
                let sums = simd.add_products(sums, words[pair + 1], simd.splat_bytes(&x.quants[pair + 1]));
                sum = simd.add_ints(sum, simd.ints(sums));
            }
            dot = simd.add_ints(dot, simd.mul_ints(sum, factors[half]));
        }
        dot
    }

    #[inline(always)]
    fn scales<S: Simd>(&self, simd: S, column: usize) -> S::Floats {
        simd.load_halves(&self.scales[column..])
    }
}

impl IntegerTile for Q8_0Tile {
    type Weights<S: Simd> = [S::Bytes; GROUP / 4];

    #[inline(always)]
    fn weights<S: Simd>(&self, simd: S, column: usize) -> Self::Weights<S> {
        let mut words = loaded(simd, &self.quants, column);
        for words in &mut words {
            *words = simd.signed(*words);
        }
        words
    }

    #[inline(always)]
    fn dot<S: Simd>(simd: S, weights: &Self::Weights<S>, x: &Group) -> S::Ints {
        let mut sums = simd.no_signed_sums(x.totals[0] + x.totals[1]);
        for i in 0..GROUP / 4 {
            sums = simd.add_signed_products(sums, weights[i], simd.splat_bytes(&x.quants[i]));
        }
        sums
    }

    #[inline(always)]
    fn scales<S: Simd>(&self, simd: S, column: usize) -> S::Floats {
        simd.load_halves(&self.scales[column..])
    }
}

type Sums<const R: usize> = [[f32; PANEL]; R];

#[inline(always)]
fn integer<S: Simd, T: IntegerTile>(simd: S, tiles: &[T], panels: Range<usize>, x: &Quantised, out: &mut [&mut [f32]]) {
    let groups = x.row_groups;
    let first_panel = panels.start;
    for panel in panels {
        let tiles = &tiles[panel * groups..][..groups];
        let at = (panel - first_panel) * PANEL;
        let mut row = 0;
        while row < out.len() {
            // As many rows are computed together as the registers hold, so that weights are unpacked once for all of these rows.
            let left = out.len() - row;
            row += match left {
                8.. if S::LANES == 16 => store(&integer_rows::<S, T, 8, 1>(simd, tiles, x, row), at, &mut out[row..]),
                4.. => store(&integer_rows::<S, T, 4, 1>(simd, tiles, x, row), at, &mut out[row..]),
                2.. => store(&integer_rows::<S, T, 2, 1>(simd, tiles, x, row), at, &mut out[row..]),
                _ if S::LANES == 16 => store(&integer_rows::<S, T, 1, 2>(simd, tiles, x, row), at, &mut out[row..]),
                _ => store(&integer_rows::<S, T, 1, 4>(simd, tiles, x, row), at, &mut out[row..]),
            };
        }
    }
}

#[inline(always)]
fn integer_rows<S: Simd, T: IntegerTile, const R: usize, const V: usize>(
    simd: S,
    tiles: &[T],
    x: &Quantised,
    row: usize,
) -> Sums<R> {
    let mut rows = [&x.groups[..0]; R];
    for r in 0..R {
        rows[r] = &x.row(row + r)[..tiles.len()];
    }
    let mut out = [[0f32; PANEL]; R];
    for column in (0..PANEL).step_by(S::LANES * V) {
        let mut sums = [[simd.splat(0.0); V]; R];
        for (g, tile) in tiles.iter().enumerate() {
            for v in 0..V {
                let column = column + v * S::LANES;
                let weights = tile.weights(simd, column);
                let (scales, mins) = (tile.scales(simd, column), tile.mins(simd, column));
                for r in 0..R {
                    let group = &rows[r][g];
                    let dots = simd.floats(T::dot(simd, &weights, group));
                    sums[r][v] = simd.mul_add(simd.mul(scales, simd.splat(group.step)), dots, sums[r][v]);
                    if T::HAS_MINS {
                        sums[r][v] = simd.mul_add(mins, simd.splat(group.sum), sums[r][v]);
                    }
                }
            }
        }
        for r in 0..R {
            for v in 0..V {
                simd.store(sums[r][v], &mut out[r][column + v * S::LANES..]);
            }
        }
    }
    out
}

trait FloatTile {
    fn load<S: Simd>(&self, simd: S, input: usize, column: usize) -> S::Floats;
}

impl FloatTile for F16Tile {
    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, input: usize, column: usize) -> S::Floats {
        simd.load_halves(&self.0[input][column..])
    }
}

impl FloatTile for Bf16Tile {
    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, input: usize, column: usize) -> S::Floats {
        simd.load_bf16(&self.0[input][column..])
    }
}

impl FloatTile for F32Tile {
    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, input: usize, column: usize) -> S::Floats {
        simd.load(&self.0[input][column..])
    }
}

#[inline(always)]
fn float<S: Simd, T: FloatTile>(simd: S, tiles: &[T], panels: Range<usize>, x: &[f32], inputs: usize, out: &mut [&mut [f32]]) {
    let groups = inputs.div_ceil(GROUP);
    let first_panel = panels.start;
    for panel in panels {
        let tiles = &tiles[panel * groups..][..groups];
        let at = (panel - first_panel) * PANEL;
        let mut row = 0;
        while row < out.len() {
            let (left, x) = (out.len() - row, &x[row * inputs..]);
            row += match left {
                8.. if S::LANES == 16 => store(&float_rows::<S, T, 8, 2>(simd, tiles, x, inputs), at, &mut out[row..]),
                4.. => store(&float_rows::<S, T, 4, 2>(simd, tiles, x, inputs), at, &mut out[row..]),
                _ if S::LANES == 16 => store(&float_rows::<S, T, 1, 2>(simd, tiles, x, inputs), at, &mut out[row..]),
                _ => store(&float_rows::<S, T, 1, 4>(simd, tiles, x, inputs), at, &mut out[row..]),
            };
        }
    }
}

#[inline(always)]
fn float_rows<S: Simd, T: FloatTile, const R: usize, const V: usize>(simd: S, tiles: &[T], x: &[f32], inputs: usize) -> Sums<R> {
    let mut out = [[0f32; PANEL]; R];
    for column in (0..PANEL).step_by(S::LANES * V) {
        let mut sums = [[simd.splat(0.0); V]; R];
        for (g, tile) in tiles.iter().enumerate() {
            let first = g * GROUP;
            for input in 0..GROUP.min(inputs - first) {
                let mut weights = [simd.splat(0.0); V];
                for v in 0..V {
                    weights[v] = tile.load(simd, input, column + v * S::LANES);
                }
                for r in 0..R {
                    let x = simd.splat(x[r * inputs + first + input]);
                    for v in 0..V {
                        sums[r][v] = simd.mul_add(x, weights[v], sums[r][v]);
                    }
                }
            }
        }
        for r in 0..R {
            for v in 0..V {
                simd.store(sums[r][v], &mut out[r][column + v * S::LANES..]);
            }
        }
    }
    out
}

/// Copies a panel's results to `out`, without the padding of the last panel. Returns the number of rows.
#[inline(always)]
fn store<const R: usize>(sums: &Sums<R>, at: usize, out: &mut [&mut [f32]]) -> usize {
    for (sums, out) in sums.iter().zip(out) {
        let columns = PANEL.min(out.len() - at);
        out[at..][..columns].copy_from_slice(&sums[..columns]);
    }
    R
}
