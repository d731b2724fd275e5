//! Causal attention over a sequence's KV, read where it lies: in its blocks.
//!
//! A query's result is computed in an order that its position alone decides: scores run over a head's numbers, the sum of the
//! exponentials over 16 interleaved lanes of positions, the values over the positions, each from the first to the last. Queries that
//! are computed together share only what they read.
#![expect(clippy::needless_range_loop, reason = "one index goes through rows, lanes and vectors alike")]

use super::{isa::kernel, math::exp, simd::Simd};
use half::f16;
use std::ops::Range;
use tandem_kv::BlockId;

/// Positions whose scores are computed side by side.
const STRIP: usize = 16;

/// Where the numbers of a layer's KV lie: keys in `[block][layer][0][kv_head][number][slot]`, so that the scores of neighbouring slots
/// are computed side by side, values in `[block][layer][1][kv_head][slot][number]`.
#[derive(Clone, Copy)]
pub(super) struct KvLayout {
    pub layers: usize,
    pub block_size: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl KvLayout {
    /// After the last block, so that whole vectors can be loaded where a head or a block ends; what is loaded there is not used.
    pub const PADDING: usize = STRIP;

    /// Numbers in the keys (or values) of one token in one layer.
    pub fn row_len(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Numbers in a block.
    pub fn block_len(&self) -> usize {
        self.layers * 2 * self.block_size * self.row_len()
    }

    /// Heads that share keys and values.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    #[inline(always)]
    fn keys(&self, block: BlockId, layer: usize, kv_head: usize) -> usize {
        block.0 as usize * self.block_len() + (layer * 2 * self.kv_heads + kv_head) * self.block_size * self.head_dim
    }

    #[inline(always)]
    fn values(&self, block: BlockId, layer: usize, kv_head: usize) -> usize {
        self.keys(block, layer, self.kv_heads + kv_head)
    }
}

/// A piece of a sequence in one layer.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    /// Position of the first row.
    pub start: usize,
    /// The sequence's.
    pub blocks: &'a [BlockId],
    pub layer: usize,
}

kernel! {
    /// Writes rows of keys and values into their blocks, rounded to half precision.
    pub(super) fn store_kv(_simd, layout: &KvLayout, kv: &mut [u16], place: Place<'_>, keys: &[f32], values: &[f32]) {
        let (row_len, dim, size) = (layout.row_len(), layout.head_dim, layout.block_size);
        for (row, (keys, values)) in keys.chunks_exact(row_len).zip(values.chunks_exact(row_len)).enumerate() {
            let position = place.start + row;
            let (block, slot) = (place.blocks[position / size], position % size);
            for kv_head in 0..layout.kv_heads {
                let into = &mut kv[layout.keys(block, place.layer, kv_head)..][..dim * size];
                for (into, key) in into.chunks_exact_mut(size).zip(&keys[kv_head * dim..][..dim]) {
                    into[slot] = narrow(*key);
                }
                let into = &mut kv[layout.values(block, place.layer, kv_head) + slot * dim..][..dim];
                for (into, value) in into.iter_mut().zip(&values[kv_head * dim..][..dim]) {
                    *into = narrow(*value);
                }
            }
        }
    }
}

/// To half precision; what lies beyond it would become infinite, and attention over it not a number.
#[inline(always)]
fn narrow(number: f32) -> u16 {
    f16::from_f32_const(number.clamp(f16::MIN.to_f32_const(), f16::MAX.to_f32_const())).to_bits()
}

/// Memory that is used again.
#[derive(Default)]
pub(super) struct Scratch {
    /// Rows side by side, for one number of the head after the other.
    queries: Vec<f32>,
    /// Of one row after the other.
    scores: Vec<f32>,
}

kernel! {
    /// Puts each query's result in its place. `rows` has, token after token, the queries of some key heads, turned by their positions and
    /// scaled; the tokens' own keys and values are already in `kv`.
    pub(super) fn attend(
        simd,
        layout: &KvLayout,
        kv: &[u16],
        place: Place<'_>,
        kv_heads: Range<usize>,
        rows: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let first_head = kv_heads.start;
        let token_len = kv_heads.len() * layout.group() * layout.head_dim;
        let end = rows.len() / token_len * layout.group();
        for kv_head in kv_heads {
            let column = (kv_head - first_head) * layout.group() * layout.head_dim;
            let mut queries = Queries { layout, kv, place, kv_head, token_len, column, first: 0 };
            while queries.first < end {
                // As many as the registers hold: keys and values are widened once for them.
                queries.first += match end - queries.first {
                    8.. => queries.attend::<S, 8, 1>(simd, rows, scratch),
                    4.. => queries.attend::<S, 4, 2>(simd, rows, scratch),
                    3 => queries.attend::<S, 3, 4>(simd, rows, scratch),
                    2 => queries.attend::<S, 2, 4>(simd, rows, scratch),
                    _ => queries.attend::<S, 1, 4>(simd, rows, scratch),
                };
            }
        }
    }
}

/// Queries that share keys: those of a group's heads, token after token.
struct Queries<'a> {
    layout: &'a KvLayout,
    kv: &'a [u16],
    place: Place<'a>,
    kv_head: usize,
    /// Numbers of one token in the rows.
    token_len: usize,
    /// Where in a token's the group's queries begin.
    column: usize,
    /// The next to be computed.
    first: usize,
}

impl Queries<'_> {
    /// Computes `R` queries, `V` vectors of their results at a time; returns `R`.
    #[inline(always)]
    fn attend<S: Simd, const R: usize, const V: usize>(&self, simd: S, rows: &mut [f32], scratch: &mut Scratch) -> usize {
        let (dim, group) = (self.layout.head_dim, self.layout.group());
        // Where each query is, and how many positions it sees, its own included. Queries are in the order of their positions.
        let (mut at, mut seen) = ([0; R], [0; R]);
        scratch.queries.resize(dim * R, 0.0);
        for r in 0..R {
            let (token, head) = ((self.first + r) / group, (self.first + r) % group);
            seen[r] = self.place.start + token + 1;
            at[r] = token * self.token_len + self.column + head * dim;
            for (queries, number) in scratch.queries.chunks_exact_mut(R).zip(&rows[at[r]..][..dim]) {
                queries[r] = *number;
            }
        }
        let (fewest, most) = (seen[0], seen[R - 1]);
        // A whole strip beyond the last block's end may be written.
        let stride = most.next_multiple_of(self.layout.block_size).next_multiple_of(STRIP) + STRIP;
        if scratch.scores.len() < stride * R {
            scratch.scores.resize(stride * R, 0.0);
        }
        let scores = &mut scratch.scores[..stride * R];
        self.scores::<S, R>(simd, &scratch.queries, most, scores, stride);
        let mut totals = [0f32; R];
        for (r, scores) in scores.chunks_exact_mut(stride).enumerate() {
            totals[r] = soften(scores, seen[r]);
        }
        let mut column = 0;
        while column < dim {
            let mut sums = [[simd.splat(0.0); V]; R];
            self.add_values(simd, &mut sums, column, 0..fewest, scores, stride);
            for r in 0..R {
                let own = fewest..seen[r];
                self.add_values(simd, std::array::from_mut(&mut sums[r]), column, own, &scores[r * stride..], stride);
            }
            for v in 0..V {
                let first = column + v * S::LANES;
                let mut lanes = [0f32; STRIP];
                for r in 0..R {
                    simd.store(sums[r][v], &mut lanes);
                    let len = S::LANES.min(dim.saturating_sub(first));
                    for (into, sum) in rows[at[r] + first.min(dim)..][..len].iter_mut().zip(&lanes) {
                        *into = sum / totals[r];
                    }
                }
            }
            column += V * S::LANES;
        }
        R
    }

    /// Every query's products with the keys of the positions below `most`; beyond them, anything.
    #[inline(always)]
    fn scores<S: Simd, const R: usize>(&self, simd: S, queries: &[f32], most: usize, scores: &mut [f32], stride: usize) {
        let size = self.layout.block_size;
        for (index, block) in self.place.blocks[..most.div_ceil(size)].iter().enumerate() {
            let keys = &self.kv[self.layout.keys(*block, self.place.layer, self.kv_head)..];
            for slot in (0..size.min(most - index * size)).step_by(S::LANES) {
                let mut sums = [simd.splat(0.0); R];
                for (d, queries) in queries.as_chunks::<R>().0.iter().enumerate() {
                    let keys = simd.load_halves(&keys[d * size + slot..]);
                    for r in 0..R {
                        sums[r] = simd.mul_add(simd.splat(queries[r]), keys, sums[r]);
                    }
                }
                for r in 0..R {
                    simd.store(sums[r], &mut scores[r * stride + index * size + slot..]);
                }
            }
        }
    }

    /// Adds the values of these positions, times the scores; numbers of the head from `column`.
    #[inline(always)]
    fn add_values<S: Simd, const R: usize, const V: usize>(
        &self,
        simd: S,
        sums: &mut [[S::Floats; V]; R],
        column: usize,
        positions: Range<usize>,
        scores: &[f32],
        stride: usize,
    ) {
        let (dim, size) = (self.layout.head_dim, self.layout.block_size);
        let mut rows = [&scores[..0]; R];
        for r in 0..R {
            rows[r] = &scores[r * stride..][..positions.end];
        }
        let mut local = *sums;
        let mut position = positions.start;
        while position < positions.end {
            let (block, slot) = (self.place.blocks[position / size], position % size);
            let len = (size - slot).min(positions.end - position);
            let values = &self.kv[self.layout.values(block, self.place.layer, self.kv_head) + slot * dim + column..];
            for i in 0..len {
                for v in 0..V {
                    // Beyond the head there may be less than a vector before the memory ends; nothing of it is used.
                    if v > 0 && column + v * S::LANES >= dim {
                        continue;
                    }
                    let values = simd.load_halves(&values[i * dim + v * S::LANES..]);
                    for r in 0..R {
                        local[r][v] = simd.mul_add(simd.splat(rows[r][position + i]), values, local[r][v]);
                    }
                }
            }
            position += len;
        }
        *sums = local;
    }
}

/// Makes e^(score − largest) of the first `seen` scores and 0 of the others; returns their sum.
#[inline(always)]
fn soften(scores: &mut [f32], seen: usize) -> f32 {
    let (scores, _) = scores.as_chunks_mut::<STRIP>();
    let scores = &mut scores[..seen.div_ceil(STRIP)];
    scores.as_flattened_mut()[seen..].fill(f32::NEG_INFINITY);
    let mut largest = [f32::NEG_INFINITY; STRIP];
    for scores in scores.iter() {
        for l in 0..STRIP {
            largest[l] = if scores[l] > largest[l] { scores[l] } else { largest[l] };
        }
    }
    let mut overall = f32::NEG_INFINITY;
    for lane in largest {
        overall = if lane > overall { lane } else { overall };
    }
    let mut sums = [0f32; STRIP];
    for scores in scores.iter_mut() {
        for score in scores.iter_mut() {
            *score = exp(*score - overall);
        }
    }
    scores.as_flattened_mut()[seen..].fill(0.0);
    for scores in scores.iter() {
        for l in 0..STRIP {
            sums[l] += scores[l];
        }
    }
    let mut sum = 0.0;
    for lane in sums {
        sum += lane;
    }
    sum
}
