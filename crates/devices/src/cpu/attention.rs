//! Causal attention that reads a sequence's KV directly from its blocks (paged attention).
//!
//! The order in which a query's numbers are summed depends only on its position: scores are summed over the dimensions of a head,
//! exponentials in 16 interleaved lanes of positions, and values over the positions, each from the first to the last. Queries that are
//! computed together share the loaded keys and values, but no sums.
#![expect(clippy::needless_range_loop, reason = "one index goes through rows, lanes and vectors alike")]

use super::{isa::kernel, math::exp, simd::Simd};
use half::f16;
use std::ops::Range;
use tandem_kv::BlockId;

/// Number of lanes in which exponentials are summed: position `p` belongs to lane `p % STRIP`.
const STRIP: usize = 16;

/// The layout of the KV memory. Keys are `[block][layer][0][kv_head][dimension][slot]`, so that one vector holds the keys of neighbouring tokens.
/// Values are `[block][layer][1][kv_head][slot][dimension]`. A block has one slot for each token.
#[derive(Clone, Copy)]
pub(super) struct KvLayout {
    pub layers: usize,
    pub block_size: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl KvLayout {
    /// The number of unused elements after the last block. They allow whole vectors to be loaded at the end of a head or block.
    pub const PADDING: usize = STRIP;

    /// Returns how many numbers the keys (or the values) of one token have in one layer.
    pub fn row_len(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    pub fn block_len(&self) -> usize {
        self.layers * 2 * self.block_size * self.row_len()
    }

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

#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub start: usize,
    pub blocks: &'a [BlockId],
    pub layer: usize,
}

kernel! {
    /// Writes keys and values, `[rows][row_len]` each, to their blocks, rounded to half precision.
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

/// Rounds to half precision. Numbers beyond the range of half precision are clamped, because infinities would make the results of attention
/// NaN.
#[inline(always)]
fn narrow(number: f32) -> u16 {
    f16::from_f32_const(number.clamp(f16::MIN.to_f32_const(), f16::MAX.to_f32_const())).to_bits()
}

#[derive(Default)]
pub(super) struct Scratch {
    /// The queries, in the layout `[dimension][row]`.
    queries: Vec<f32>,
    /// The scores, in the layout `[row][position]`.
    scores: Vec<f32>,
}

kernel! {
    /// Replaces each query with its attention output. `rows` has the queries of the key heads `kv_heads`, `[token][query head][dimension]`,
    /// rotated and scaled. The tokens' own keys and values must be in `kv`.
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
                // Computes as many queries together as the registers hold, so that keys and values are converted once for all of them.
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

/// The queries that attend to the same key head, in the order of their tokens.
struct Queries<'a> {
    layout: &'a KvLayout,
    kv: &'a [u16],
    place: Place<'a>,
    kv_head: usize,
    token_len: usize,
    column: usize,
    first: usize,
}

impl Queries<'_> {
    /// Computes `R` queries, `V` vectors of their results at a time; returns `R`.
    #[inline(always)]
    fn attend<S: Simd, const R: usize, const V: usize>(&self, simd: S, rows: &mut [f32], scratch: &mut Scratch) -> usize {
        let (dim, group) = (self.layout.head_dim, self.layout.group());
        // `at` is the offset of each query, `seen` the number of positions to which the query attends, its own included. Queries are sorted
        // by position.
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
        // Up to one strip of scores may be written after the last block's end.
        let stride = most.next_multiple_of(self.layout.block_size).next_multiple_of(STRIP) + STRIP;
        if scratch.scores.len() < stride * R {
            scratch.scores.resize(stride * R, 0.0);
        }
        let scores = &mut scratch.scores[..stride * R];
        self.scores::<S, R>(simd, &scratch.queries, most, scores, stride);
        let mut totals = [0f32; R];
        for (r, scores) in scores.chunks_exact_mut(stride).enumerate() {
            totals[r] = exponentiate(scores, seen[r]);
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

    /// Computes every query's dot products with the keys of the positions below `most`. The scores of later positions are undefined.
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

    /// Adds the values at `positions`, weighted with the scores, to `sums`, which have the head's dimensions from `column` on.
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
                    // A vector that starts after the last element of the head is skipped, because the memory may end within it.
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

/// Replaces the first `seen` scores with e^(score − largest) and the others with 0; returns the sum (softmax without the division).
#[inline(always)]
fn exponentiate(scores: &mut [f32], seen: usize) -> f32 {
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
