//! A model on several GPUs, a *rank* each: who has what of a tensor, and of a block. Plain arithmetic.
//!
//! Every rank has the same number of heads and of the feed-forward's columns, one rank's after the other's. The rows that make them are of one
//! rank; of the matrices that read them (attention's output and `down`) a rank has those columns, so that the ranks' products must be added.

use super::CudaError;
use std::ops::Range;
use tandem_model::ModelConfig;

/// The most GPUs that one engine computes on: those of one machine.
pub(super) const RANKS_MAX: usize = 8;

/// One rank of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shard {
    pub rank: usize,
    pub ranks: usize,
}

impl Shard {
    /// What this rank has of rows or columns that belong to heads or to the feed-forward.
    pub fn range(self, len: usize) -> Range<usize> {
        let each = len / self.ranks;
        self.rank * each..(self.rank + 1) * each
    }

    /// Refuses models whose heads or columns cannot be dealt out evenly; the kernels' copies are of eight numbers.
    pub fn check(self, &ModelConfig { heads, kv_heads, ffn, .. }: &ModelConfig) -> Result<(), CudaError> {
        let fits =
            |ranks: &usize| [heads, kv_heads].iter().all(|heads| heads.is_multiple_of(*ranks)) && ffn.is_multiple_of(8 * ranks);
        if self.ranks == 1 || fits(&self.ranks) {
            return Ok(());
        }
        let possible = (1..=RANKS_MAX).filter(|ranks| *ranks == 1 || fits(ranks)).collect();
        Err(CudaError::TensorParallel { ranks: self.ranks, heads, kv_heads, ffn, possible })
    }

    /// Copies this rank's part of a block into the whole, whose rows (a slot's keys or values) have all ranks' heads side by side.
    pub fn merge_into(self, part: &[u8], row_bytes: usize, whole: &mut [u8]) {
        let rows = whole.chunks_exact_mut(row_bytes).skip(self.rank).step_by(self.ranks);
        rows.zip(part.chunks_exact(row_bytes)).for_each(|(into, row)| into.copy_from_slice(row));
    }

    /// This rank's part of a whole block.
    pub fn extract(self, whole: &[u8], row_bytes: usize) -> Vec<u8> {
        whole.chunks_exact(row_bytes).skip(self.rank).step_by(self.ranks).collect::<Vec<_>>().concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_everything_once() {
        for ranks in [1, 2, 3, 4] {
            let shards = (0..ranks).map(|rank| Shard { rank, ranks });
            let ranges: Vec<usize> = shards.clone().flat_map(|shard| shard.range(24)).collect();
            assert_eq!(ranges, (0..24).collect::<Vec<_>>());
            let whole: Vec<u8> = (0..ranks as u8 * 20).collect();
            let mut joined = vec![0; whole.len()];
            for shard in shards {
                let part = shard.extract(&whole, 4);
                assert_eq!(part.len(), 20);
                shard.merge_into(&part, 4, &mut joined);
            }
            assert_eq!(joined, whole);
        }
        assert_eq!(Shard { rank: 1, ranks: 2 }.extract(&[0, 1, 2, 3, 4, 5, 6, 7], 2), [2, 3, 6, 7]);
    }
}
