//! Tensor parallelism: the shard of each tensor and of each KV block that a rank holds.
//!
//! The division is that of Megatron-LM (Shoeybi et al. 2019). Heads and feed-forward columns are divided evenly, in the order of the ranks.
//! The matrices that produce them (`qkv`, `gate`, `up`) are divided by rows. The matrices that consume them (attention output, `down`) are
//! divided by columns, so an all-reduce must sum the ranks' results.

use super::CudaError;
use std::ops::Range;
use tandem_model::ModelConfig;

/// The maximum number of GPUs of one engine. All of them are in one machine.
pub(super) const RANKS_MAX: usize = 8;

/// Identifies the shard of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shard {
    pub rank: usize,
    pub ranks: usize,
}

impl Shard {
    /// Returns the rank's range of `len` rows or columns that belong to heads or to the feed-forward network.
    pub fn range(self, len: usize) -> Range<usize> {
        let each = len / self.ranks;
        self.rank * each..(self.rank + 1) * each
    }

    /// Fails if heads or columns cannot be divided evenly. The number of a rank's columns must be a multiple of eight, because the kernels
    /// copy eight numbers at a time.
    pub fn check(self, &ModelConfig { heads, kv_heads, ffn, .. }: &ModelConfig) -> Result<(), CudaError> {
        let divides = |ranks| heads.is_multiple_of(ranks) && kv_heads.is_multiple_of(ranks) && ffn.is_multiple_of(8 * ranks);
        let fits = |ranks: &usize| *ranks == 1 || divides(*ranks);
        if fits(&self.ranks) {
            return Ok(());
        }
        let possible = (1..=RANKS_MAX).filter(fits).collect();
        Err(CudaError::TensorParallel { ranks: self.ranks, heads, kv_heads, ffn, possible })
    }

    /// Copies this rank's shard of a KV block into the whole block. A row of the whole block has the keys or the values of one slot, for
    /// the heads of all ranks in order. `row_bytes` is the number of bytes that one rank has of such a row.
    pub fn merge_into(self, part: &[u8], row_bytes: usize, whole: &mut [u8]) {
        let rows = whole.chunks_exact_mut(row_bytes).skip(self.rank).step_by(self.ranks);
        rows.zip(part.chunks_exact(row_bytes)).for_each(|(into, row)| into.copy_from_slice(row));
    }

    /// Returns this rank's shard of a whole KV block. The reverse of [`Self::merge_into`].
    pub fn extract(self, whole: &[u8], row_bytes: usize) -> Vec<u8> {
        whole.chunks_exact(row_bytes).skip(self.rank).step_by(self.ranks).collect::<Vec<_>>().concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_all_rows_and_blocks_without_overlap() {
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
