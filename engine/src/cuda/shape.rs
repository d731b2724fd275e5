//! What the kernels are compiled for, and what the host must know of them.

use super::{CudaError, shard::Shard};
use tandem_model::{ModelConfig, Pairs};

/// The kernels' sources, in the order in which they use each other. `kernels/primitives.cu` comes first on a device.
pub(super) const SOURCES: [(&str, &str); 6] = [
    ("primitives.cu", include_str!("kernels/primitives.cu")),
    ("model.cu", include_str!("kernels/model.cu")),
    ("rows.cu", include_str!("kernels/rows.cu")),
    ("attention.cu", include_str!("kernels/attention.cu")),
    ("decode.cu", include_str!("kernels/decode.cu")),
    ("sampling.cu", include_str!("kernels/sampling.cu")),
];

/// A number of two bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Half {
    /// IEEE's: more digits, up to 65,504.
    Float16,
    /// The upper half of single precision.
    BFloat16,
}

/// The longest head: the prompt's kernel keeps a tile of outputs in registers.
pub(super) const HEAD_DIM_MAX: usize = 128;

/// The constants of one model that its kernels are compiled with; heads and feed-forward are those of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub half: Half,
    pub layers: usize,
    pub width: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub vocab_size: usize,
    pub block_size: usize,
    pub pairs: Pairs,
    /// The kernels' tiles are smaller, for GPUs with less shared memory than data centres' have.
    pub small_shared_memory: bool,
}

impl Shape {
    /// Of one of so many ranks. Refuses what the kernels cannot do: their copies are of 16 bytes. A block may have `shared_max` bytes of shared
    /// memory.
    pub fn new(config: &ModelConfig, half: Half, block_size: usize, shared_max: usize, shard: Shard) -> Result<Self, CudaError> {
        let &ModelConfig { layers, width, heads, kv_heads, head_dim, ffn, vocab_size, .. } = config;
        let refused = |what, found| Err(CudaError::Shape { what, found });
        if !head_dim.is_multiple_of(8) || head_dim > HEAD_DIM_MAX {
            return refused("heads of a multiple of 8 numbers, 128 at most", head_dim);
        }
        if !width.is_multiple_of(8) {
            return refused("a width that is a multiple of 8", width);
        }
        if !ffn.is_multiple_of(8) {
            return refused("a feed-forward length that is a multiple of 8", ffn);
        }
        if heads / kv_heads > Self::PROMPT_ROWS {
            return refused("at most 128 query heads for a key head", heads / kv_heads);
        }
        shard.check(config)?;
        let [heads, kv_heads, ffn] = [heads, kv_heads, ffn].map(|all| shard.range(all).len());
        let (pairs, small_shared_memory) = (config.rope.pairs, false);
        let mut shape =
            Self { half, layers, width, heads, kv_heads, head_dim, ffn, vocab_size, block_size, pairs, small_shared_memory };
        shape.small_shared_memory = shape.prompt_bytes().max(shape.token_bytes()) > shared_max;
        Ok(shape)
    }

    /// As the compiler takes them.
    pub fn definitions(&self) -> Vec<String> {
        let definition = |name, value: usize| format!("-D{name}={value}");
        vec![
            definition("HALF_IS_FLOAT16", (self.half == Half::Float16).into()),
            definition("LAYERS", self.layers),
            definition("HEADS", self.heads),
            definition("KV_HEADS", self.kv_heads),
            definition("HEAD_DIM", self.head_dim),
            definition("BLOCK_SIZE", self.block_size),
            definition("SMALL_SHARED_MEMORY", self.small_shared_memory.into()),
            definition("PAIRS_ADJACENT", (self.pairs == Pairs::Adjacent).into()),
        ]
    }

    /// Query heads that share a key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Numbers of all query heads.
    pub fn query_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Numbers of a row of queries, keys and values.
    pub fn qkv_dim(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Bytes of a slot's keys (or values) of one layer.
    pub fn kv_row_bytes(&self) -> usize {
        self.kv_heads * self.head_dim * 2
    }

    /// Bytes of one KV block, or a rank's part of it.
    pub fn block_bytes(&self) -> usize {
        self.layers * 2 * self.block_size * self.kv_row_bytes()
    }

    // What follows repeats constants of kernels/attention.cu and kernels/decode.cu; a test compares them.

    /// Packed rows (a token's query heads of one key head) in a tile of a prompt.
    pub const PROMPT_ROWS: usize = 128;
    /// Query heads that a block of `attend_token` takes.
    pub const TOKEN_ROWS: usize = 16;
    /// Positions that a block of `attend_token` takes at a time.
    pub const TOKEN_POSITIONS: usize = 64;

    fn head_pad(&self) -> usize {
        self.head_dim.next_multiple_of(16)
    }

    /// Bytes of shared memory of `attend_prompt`.
    pub fn prompt_bytes(&self) -> usize {
        let tile = if self.small_shared_memory { 32 } else { 64 };
        (Self::PROMPT_ROWS + 4 * tile) * (self.head_pad() + 8) * 2
    }

    /// Bytes of shared memory of `attend_token`.
    pub fn token_bytes(&self) -> usize {
        let stages = if self.small_shared_memory { 2 } else { 3 };
        let copies = (Self::TOKEN_ROWS + stages * 2 * Self::TOKEN_POSITIONS) * (self.head_pad() + 8) * 2;
        copies.max(4 * Self::TOKEN_ROWS * (self.head_pad() + 2) * 4)
    }
}
