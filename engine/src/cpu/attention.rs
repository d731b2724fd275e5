//! Causal attention of one chunk's queries over its sequence's KV.
//!
//! A query's result is computed in an order that its position alone decides: scores run over a head's numbers, the sum of the
//! exponentials over 16 interleaved lanes of positions, the values over the positions, each from the first to the last. Queries that
//! are computed together share only what they read.

use super::{
    isa::kernel,
    math::{exp, widen},
};
use tandem_kv::BlockId;

/// Positions or numbers of a head side by side.
const LANES: usize = 16;
/// Queries computed together.
const ROWS: usize = 4;

/// Where the numbers of a layer's KV lie: `[block][layer][k|v][slot][kv_head × head_dim]`.
#[derive(Clone, Copy)]
pub(super) struct KvLayout {
    pub layers: usize,
    pub block_size: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl KvLayout {
    /// Numbers in the keys (or values) of one token in one layer.
    pub fn row_len(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Numbers in a block.
    pub fn block_len(&self) -> usize {
        self.layers * 2 * self.block_size * self.row_len()
    }

    /// Where the keys of one token begin in the KV memory, and where its values.
    #[inline(always)]
    pub fn keys_and_values(&self, blocks: &[BlockId], layer: usize, position: usize) -> (usize, usize) {
        let block = blocks[position / self.block_size].0 as usize * self.block_len();
        let slot = position % self.block_size * self.row_len();
        let keys = block + layer * 2 * self.block_size * self.row_len() + slot;
        (keys, keys + self.block_size * self.row_len())
    }
}

/// One chunk's queries in one layer.
#[derive(Clone, Copy)]
pub(super) struct Queries<'a> {
    /// Rows of `heads × head_dim`, turned by their positions and scaled.
    pub queries: &'a [f32],
    /// Position of the first row.
    pub start: usize,
    pub layer: usize,
    pub blocks: &'a [BlockId],
}

/// Memory that is used again.
#[derive(Default)]
pub(super) struct Scratch {
    /// Of one head: 16 positions side by side, in each tile all numbers of the head.
    keys: Vec<[f32; LANES]>,
    /// Of one head: 16 numbers of the head side by side, in each all positions.
    values: Vec<[f32; LANES]>,
    scores: [Vec<[f32; LANES]>; ROWS],
}

kernel! {
    /// `out` has the rows of the queries; the chunk's own keys and values are already in `kv`.
    pub(super) fn attend(layout: &KvLayout, kv: &[u16], chunk: Queries<'_>, scratch: &mut Scratch, out: &mut [f32]) {
        let row_len = layout.heads * layout.head_dim;
        let tokens = chunk.queries.len() / row_len;
        let positions = chunk.start + tokens;
        let group = layout.heads / layout.kv_heads;
        for kv_head in 0..layout.kv_heads {
            gather(layout, kv, &chunk, kv_head, positions, scratch);
            let rows = tokens * group;
            let mut row = 0;
            while row < rows {
                let taken = ROWS.min(rows - row);
                let place = Place { layout, kv_head, first_row: row, group, start: chunk.start, positions };
                match taken {
                    1 => attend_rows::<1>(place, chunk.queries, scratch, out),
                    2 => attend_rows::<2>(place, chunk.queries, scratch, out),
                    3 => attend_rows::<3>(place, chunk.queries, scratch, out),
                    _ => attend_rows::<ROWS>(place, chunk.queries, scratch, out),
                }
                row += taken;
            }
        }
    }
}

/// Brings one head's keys and values into the order in which they are read.
#[inline(always)]
fn gather(layout: &KvLayout, kv: &[u16], chunk: &Queries<'_>, kv_head: usize, positions: usize, scratch: &mut Scratch) {
    let dim = layout.head_dim;
    let tiles = positions.div_ceil(LANES);
    scratch.keys.resize(tiles * dim, [0.0; LANES]);
    scratch.values.resize(dim.div_ceil(LANES) * positions, [0.0; LANES]);
    for scores in &mut scratch.scores {
        scores.resize(tiles, [0.0; LANES]);
    }
    for position in 0..positions {
        let (keys, values) = layout.keys_and_values(chunk.blocks, chunk.layer, position);
        let keys = &kv[keys + kv_head * dim..][..dim];
        let values = &kv[values + kv_head * dim..][..dim];
        let lane = position % LANES;
        for (into, key) in scratch.keys[position / LANES * dim..][..dim].iter_mut().zip(keys) {
            into[lane] = widen(*key);
        }
        for (tile, values) in values.chunks(LANES).enumerate() {
            let into = &mut scratch.values[tile * positions + position];
            for (into, value) in into.iter_mut().zip(values) {
                *into = widen(*value);
            }
        }
    }
}

/// Which queries of a chunk are computed together; a row is one head of one token.
#[derive(Clone, Copy)]
struct Place<'a> {
    layout: &'a KvLayout,
    kv_head: usize,
    first_row: usize,
    group: usize,
    start: usize,
    positions: usize,
}

impl Place<'_> {
    /// Where a row's numbers begin in the queries and in the result.
    #[inline(always)]
    fn row_start(&self, r: usize) -> usize {
        let row = self.first_row + r;
        (row / self.group * self.layout.heads + self.kv_head * self.group + row % self.group) * self.layout.head_dim
    }
}

#[inline(always)]
fn attend_rows<const R: usize>(place: Place<'_>, queries: &[f32], scratch: &mut Scratch, out: &mut [f32]) {
    let dim = place.layout.head_dim;
    let Scratch { keys, values, scores } = scratch;
    // How many positions each row sees, its own included. Rows are in the order of their positions.
    let mut seen = [0; R];
    let mut rows = [&queries[..0]; R];
    for r in 0..R {
        seen[r] = place.start + (place.first_row + r) / place.group + 1;
        rows[r] = &queries[place.row_start(r)..][..dim];
    }
    let (fewest, most) = (seen[0], seen[R - 1]);
    for (tile, keys) in keys.chunks_exact(dim).take(most.div_ceil(LANES)).enumerate() {
        let mut sums = [[0f32; LANES]; R];
        multiply(&mut sums, &rows, keys);
        for r in 0..R {
            scores[r][tile] = sums[r];
        }
    }
    let mut totals = [0f32; R];
    for r in 0..R {
        totals[r] = soften(&mut scores[r][..seen[r].div_ceil(LANES)], seen[r]);
    }
    let mut shared = [&queries[..0]; R];
    for r in 0..R {
        shared[r] = &scores[r].as_flattened()[..fewest];
    }
    for (tile, values) in values.chunks_exact(place.positions).enumerate() {
        let mut sums = [[0f32; LANES]; R];
        multiply(&mut sums, &shared, &values[..fewest]);
        for r in 0..R {
            let own = &scores[r].as_flattened()[fewest..seen[r]];
            multiply(std::array::from_mut(&mut sums[r]), &[own], &values[fewest..seen[r]]);
            let out = &mut out[place.row_start(r)..][..dim];
            for (out, sum) in out[tile * LANES..].iter_mut().zip(&sums[r]) {
                *out = sum / totals[r];
            }
        }
    }
}

/// `sums += factors × panel`, one factor after the other.
#[inline(always)]
fn multiply<const R: usize>(sums: &mut [[f32; LANES]; R], factors: &[&[f32]; R], panel: &[[f32; LANES]]) {
    let mut factors = *factors;
    for factors in &mut factors {
        *factors = &factors[..panel.len()];
    }
    let mut local = *sums;
    for (k, numbers) in panel.iter().enumerate() {
        for r in 0..R {
            let factor = factors[r][k];
            for l in 0..LANES {
                local[r][l] = factor.mul_add(numbers[l], local[r][l]);
            }
        }
    }
    *sums = local;
}

/// Makes e^(score − largest) of the first `seen` scores and 0 of the others; returns their sum.
#[inline(always)]
fn soften(scores: &mut [[f32; LANES]], seen: usize) -> f32 {
    scores.as_flattened_mut()[seen..].fill(f32::NEG_INFINITY);
    let mut largest = [f32::NEG_INFINITY; LANES];
    for scores in scores.iter() {
        for l in 0..LANES {
            largest[l] = if scores[l] > largest[l] { scores[l] } else { largest[l] };
        }
    }
    let mut overall = f32::NEG_INFINITY;
    for lane in largest {
        overall = if lane > overall { lane } else { overall };
    }
    for scores in scores.iter_mut() {
        for score in scores {
            *score = exp(*score - overall);
        }
    }
    scores.as_flattened_mut()[seen..].fill(0.0);
    let mut sums = [0f32; LANES];
    for scores in scores.iter() {
        for l in 0..LANES {
            sums[l] += scores[l];
        }
    }
    let mut sum = 0.0;
    for lane in sums {
        sum += lane;
    }
    sum
}
