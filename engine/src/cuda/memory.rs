//! Who gets how much of a device's memory. Plain arithmetic.

use super::{CudaError, CudaLimits, plan::parts_max, shape::Shape};

/// Of the memory that the weights leave free, in hundredths: the rest is for cuBLASLt's workspace, the kernels' code, inputs of steps, and others.
const SHARE_PERCENT: usize = 90;
/// Rows of logits that are computed at a time: each has the vocabulary's length.
const LOGIT_ROWS_MAX: usize = 256;

/// Bytes of everything that an engine holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub stream: usize,
    pub normed: usize,
    pub qkv: usize,
    pub attended: usize,
    pub gates: usize,
    pub inner: usize,
    pub turns: usize,
    /// Parts of single tokens' attention, and their maxima and sums.
    pub outs: usize,
    pub sums: usize,
    pub logits: usize,
    /// What a draw makes of the logits.
    pub scratch: usize,
    pub logit_rows: usize,
    pub parts_max: usize,
    pub capacity_blocks: u32,
}

/// What a device has for the engines of a process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub processors: usize,
    /// Free when the weights had come.
    pub free_bytes: usize,
    /// That each engine's connection to its other ranks takes; 0 without.
    pub connection_bytes: usize,
}

impl Sizes {
    /// Blocks as set, or as many as fit.
    pub fn new(shape: &Shape, limits: &CudaLimits, room: Room) -> Result<Self, CudaError> {
        let Room { processors, free_bytes, connection_bytes } = room;
        let rows = limits.step_tokens_max as usize;
        let parts_max = parts_max(limits.sequences_max as usize, shape, processors);
        let logit_rows = rows.min(LOGIT_ROWS_MAX);
        let mut sizes = Self {
            stream: rows * shape.width * 4,
            normed: rows * shape.width * 2,
            qkv: rows * shape.qkv_dim() * 2,
            attended: rows * shape.query_dim() * 2,
            gates: rows * 2 * shape.ffn * 2,
            inner: rows * shape.ffn * 2,
            turns: rows * shape.head_dim * 4,
            outs: parts_max * shape.query_dim() * 4,
            sums: parts_max * shape.heads * 8,
            logits: logit_rows * shape.vocab_size * 4,
            scratch: logit_rows * shape.vocab_size * 4,
            logit_rows,
            parts_max,
            capacity_blocks: 0,
        };
        let share = (free_bytes / 100 * SHARE_PERCENT / (limits.engines.max(1) as usize)).saturating_sub(connection_bytes);
        let fit = share.saturating_sub(sizes.step_bytes()) / shape.block_bytes();
        // Slots are counted in 32 bits.
        let countable = u32::MAX as usize / shape.block_size;
        let wanted = limits.capacity_blocks.map_or(fit.min(countable), |blocks| blocks as usize);
        if wanted == 0 || wanted > fit || wanted > countable {
            let needed_bytes = sizes.step_bytes() + wanted.max(1) * shape.block_bytes();
            return Err(CudaError::Memory { free_bytes: share, needed_bytes });
        }
        sizes.capacity_blocks = wanted as u32;
        Ok(sizes)
    }

    /// Of a step's own numbers.
    pub fn step_bytes(&self) -> usize {
        let Self { stream, normed, qkv, attended, gates, inner, turns, outs, sums, logits, scratch, .. } = self;
        stream + normed + qkv + attended + gates + inner + turns + outs + sums + logits + scratch
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
        little_shared: false,
    };
    const LIMITS: CudaLimits = CudaLimits { capacity_blocks: None, engines: 1, step_tokens_max: 8_448, sequences_max: 256 };
    const H200_FREE: usize = 123 << 30;
    const H200: Room = Room { processors: 132, free_bytes: H200_FREE, connection_bytes: 0 };

    #[test]
    fn kv_takes_what_is_left_of_nine_tenths() {
        assert_eq!(QWEN3_8B.block_bytes(), 2_359_296, "147,456 bytes a token");
        let alone = Sizes::new(&QWEN3_8B, &LIMITS, H200).unwrap();
        let held = alone.step_bytes() + alone.capacity_blocks as usize * QWEN3_8B.block_bytes();
        let share = H200_FREE / 100 * 90;
        assert!(held <= share && share - held < QWEN3_8B.block_bytes());
        assert!(alone.step_bytes() < 2 << 30, "a step of 8,448 tokens has {} bytes of its own", alone.step_bytes());
        let third = Sizes::new(&QWEN3_8B, &CudaLimits { engines: 3, ..LIMITS }, H200).unwrap();
        assert!(third.capacity_blocks < alone.capacity_blocks / 3);
        let connected = Room { connection_bytes: 2 << 30, ..H200 };
        for (engines, plain) in [(1, alone), (3, third)] {
            let rank = Sizes::new(&QWEN3_8B, &CudaLimits { engines, ..LIMITS }, connected).unwrap();
            let fewer = (plain.capacity_blocks - rank.capacity_blocks) as usize;
            let less = fewer * QWEN3_8B.block_bytes();
            assert!(less.abs_diff(connected.connection_bytes) < QWEN3_8B.block_bytes(), "each engine has its own");
        }
    }

    #[test]
    fn a_rank_of_two_has_half_of_what_heads_and_feed_forward_take() {
        let rank = Shape { heads: 16, kv_heads: 4, ffn: 6_144, ..QWEN3_8B };
        let limits = CudaLimits { capacity_blocks: Some(1_000), ..LIMITS };
        let [all, half] = [QWEN3_8B, rank].map(|shape| Sizes::new(&shape, &limits, H200).unwrap());
        for (all, half) in [(all.qkv, half.qkv), (all.attended, half.attended), (all.gates, half.gates), (all.inner, half.inner)]
        {
            assert_eq!(all, 2 * half);
        }
        assert_eq!((all.stream, all.normed, all.logits), (half.stream, half.normed, half.logits));
        let alone = Sizes::new(&QWEN3_8B, &LIMITS, H200).unwrap();
        let split = Sizes::new(&rank, &LIMITS, H200).unwrap();
        assert!(split.capacity_blocks > 2 * alone.capacity_blocks, "a block's parts are half as large");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_numbers() {
        let refused = |limits, free_bytes| match Sizes::new(&QWEN3_8B, &limits, Room { free_bytes, ..H200 }) {
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
