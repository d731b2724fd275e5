//! Computes how a device's memory is divided among the buffers of an engine.

use super::{
    CudaError, CudaLimits,
    plan::{partitions_max, prompt_partitions_max},
    shape::Shape,
};

/// Percentage of the free memory (after loading the weights) that engines may use. The rest is for cuBLASLt's workspaces, the kernels'
/// code, the inputs of steps, and other processes.
const SHARE_PERCENT: usize = 90;
/// The maximum number of rows of logits that are computed at a time. Each row is as long as the vocabulary.
const HEAD_ROWS_MAX: usize = 256;

/// Sizes of an engine's buffers, in bytes unless stated otherwise. A row is one token of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    /// The residual stream: rows × width, 32-bit.
    pub residual: usize,
    /// Inputs of a projection after RMS normalisation: rows × width, 16-bit.
    pub normed: usize,
    /// Queries, keys and values: rows × (heads + 2 × key heads) × head length, 16-bit.
    pub qkv: usize,
    /// Attention outputs: rows × heads × head length, 16-bit.
    pub attended: usize,
    /// Gate and up projections: rows × 2 × feed-forward length, 16-bit.
    pub gates: usize,
    /// Inputs of the down projection: rows × feed-forward length, 16-bit.
    pub inner: usize,
    /// Rotary position embedding: cosine and sine for each row and pair of dimensions, 32-bit.
    pub rope: usize,
    /// Attention outputs that are not normalised yet: one row per partition and head, 32-bit. One-token chunks and tiles of prompts use them.
    pub partial_outputs: usize,
    /// The maximum and the sum of the softmax: one pair per partition and head, 32-bit.
    pub partial_sums: usize,
    /// Counters of the thread blocks that share a row's attention: one per row and block of heads, 32-bit.
    pub arrivals: usize,
    /// Logits: rows × vocabulary, 32-bit; on the first rank only.
    pub logits: usize,
    /// A modifiable copy of the logits for sampling.
    pub scratch: usize,
    /// Number of rows of logits that are computed at a time.
    pub head_rows_max: usize,
    /// The largest number of partitions into which the attention of the one-token chunks of a step is divided.
    pub partitions_max: usize,
    pub capacity_blocks: u32,
}

/// The memory that a device offers to the engines of a process.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceBudget {
    pub multiprocessors: usize,
    /// The number of bytes that are free after loading the weights.
    pub free_bytes: usize,
    /// The number of bytes that each engine's communicator takes; 0 on one GPU.
    pub communicator_bytes: usize,
}

impl Sizes {
    /// Returns the sizes for these limits. If the limits set no number of KV blocks, as many blocks as fit are used. Fails if the buffers
    /// do not fit.
    pub fn new(shape: &Shape, limits: &CudaLimits, budget: DeviceBudget) -> Result<Self, CudaError> {
        let DeviceBudget { multiprocessors, free_bytes, communicator_bytes } = budget;
        let rows = limits.step_tokens_max as usize;
        let partitions_max = partitions_max(limits.sequences_max as usize, shape, multiprocessors);
        let partial = partitions_max + prompt_partitions_max(shape, multiprocessors);
        let head_rows_max = rows.min(HEAD_ROWS_MAX);
        let mut sizes = Self {
            residual: rows * shape.width * 4,
            normed: rows * shape.width * 2,
            qkv: rows * shape.qkv_dim() * 2,
            attended: rows * shape.query_dim() * 2,
            gates: rows * 2 * shape.ffn * 2,
            inner: rows * shape.ffn * 2,
            rope: rows * shape.head_dim * 4,
            partial_outputs: partial * shape.query_dim() * 4,
            partial_sums: partial * shape.heads * 8,
            arrivals: rows * shape.kv_heads * shape.group().div_ceil(Shape::TOKEN_ROWS) * 4,
            logits: head_rows_max * shape.vocab_size * 4,
            scratch: head_rows_max * shape.vocab_size * 4,
            head_rows_max,
            partitions_max,
            capacity_blocks: 0,
        };
        let share = (free_bytes / 100 * SHARE_PERCENT / (limits.engines.max(1) as usize)).saturating_sub(communicator_bytes);
        let fit = share.saturating_sub(sizes.step_bytes()) / shape.block_bytes();
        // The number of blocks is limited, because slot numbers have 32 bits.
        let countable = u32::MAX as usize / shape.block_size;
        let wanted = limits.capacity_blocks.map_or(fit.min(countable), |blocks| blocks as usize);
        if wanted == 0 || wanted > fit || wanted > countable {
            let needed_bytes = sizes.step_bytes() + wanted.max(1) * shape.block_bytes();
            return Err(CudaError::Memory { free_bytes: share, needed_bytes });
        }
        sizes.capacity_blocks = wanted as u32;
        Ok(sizes)
    }

    /// Returns the total bytes of all buffers except the KV memory.
    pub fn step_bytes(&self) -> usize {
        let rows = self.residual + self.normed + self.qkv + self.attended + self.gates + self.inner + self.rope;
        rows + self.partial_outputs + self.partial_sums + self.arrivals + self.logits + self.scratch
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::shape::Half;
    use tandem_model::Pairs;

    const QWEN3_8B: Shape = Shape {
        half: Half::BFloat16,
        layers: 36,
        width: 4_096,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        ffn: 12_288,
        vocab_size: 151_936,
        block_size: 16,
        pairs: Pairs::Halves,
        small_shared_memory: false,
    };
    const LIMITS: CudaLimits =
        CudaLimits { capacity_blocks: None, engines: 1, step_tokens_max: 8_448, sequences_max: 256, urgent: false };
    const H200_FREE: usize = 123 << 30;
    const H200: DeviceBudget = DeviceBudget { multiprocessors: 132, free_bytes: H200_FREE, communicator_bytes: 0 };

    #[test]
    fn kv_memory_fills_ninety_percent_of_free_memory() {
        assert_eq!(QWEN3_8B.block_bytes(), 2_359_296, "147,456 bytes a token");
        let alone = Sizes::new(&QWEN3_8B, &LIMITS, H200).unwrap();
        let held = alone.step_bytes() + alone.capacity_blocks as usize * QWEN3_8B.block_bytes();
        let share = H200_FREE / 100 * 90;
        assert!(held <= share && share - held < QWEN3_8B.block_bytes());
        assert!(alone.step_bytes() < 2 << 30, "a step of 8,448 tokens takes {} bytes", alone.step_bytes());
        let third = Sizes::new(&QWEN3_8B, &CudaLimits { engines: 3, ..LIMITS }, H200).unwrap();
        assert!(third.capacity_blocks < alone.capacity_blocks / 3);
        let connected = DeviceBudget { communicator_bytes: 2 << 30, ..H200 };
        for (engines, plain) in [(1, alone), (3, third)] {
            let rank = Sizes::new(&QWEN3_8B, &CudaLimits { engines, ..LIMITS }, connected).unwrap();
            let fewer = (plain.capacity_blocks - rank.capacity_blocks) as usize;
            let less = fewer * QWEN3_8B.block_bytes();
            assert!(less.abs_diff(connected.communicator_bytes) < QWEN3_8B.block_bytes(), "each engine has its own communicator");
        }
    }

    #[test]
    fn two_ranks_halve_buffers_of_heads_and_feed_forward() {
        let rank = Shape { heads: 16, kv_heads: 4, ffn: 6_144, ..QWEN3_8B };
        let limits = CudaLimits { capacity_blocks: Some(1_000), ..LIMITS };
        let [all, half] = [QWEN3_8B, rank].map(|shape| Sizes::new(&shape, &limits, H200).unwrap());
        for (all, half) in [(all.qkv, half.qkv), (all.attended, half.attended), (all.gates, half.gates), (all.inner, half.inner)]
        {
            assert_eq!(all, 2 * half);
        }
        assert_eq!((all.residual, all.normed, all.logits), (half.residual, half.normed, half.logits));
        let alone = Sizes::new(&QWEN3_8B, &LIMITS, H200).unwrap();
        let shard = Sizes::new(&rank, &LIMITS, H200).unwrap();
        assert!(shard.capacity_blocks > 2 * alone.capacity_blocks, "a rank's shard of a block is half as large");
    }

    #[test]
    fn oversized_kv_memory_is_refused_with_the_needed_and_the_free_bytes() {
        let refused = |limits, free_bytes| match Sizes::new(&QWEN3_8B, &limits, DeviceBudget { free_bytes, ..H200 }) {
            Err(CudaError::Memory { free_bytes, needed_bytes }) => (free_bytes, needed_bytes),
            other => panic!("{other:?}"),
        };
        let (free, needed) = refused(LIMITS, 1 << 30);
        assert!(free < 1 << 30 && needed > 1 << 30);
        let (free, needed) = refused(CudaLimits { capacity_blocks: Some(1_000_000), ..LIMITS }, H200_FREE);
        assert!(needed > free);
        let set = Sizes::new(&QWEN3_8B, &CudaLimits { capacity_blocks: Some(1_000), ..LIMITS }, H200).unwrap();
        assert_eq!(set.capacity_blocks, 1_000);
    }
}
