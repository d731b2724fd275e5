//! The constants that the kernels are compiled with, and the kernels' constants that the host needs.

use super::{CudaError, shard::Shard};
use tandem_model::{ModelConfig, Pairs};

/// The kernels' sources, in the order of their dependencies. (The emulation replaces `primitives.cu`.)
pub(super) const SOURCES: [(&str, &str); 6] = [
    ("primitives.cu", include_str!("kernels/primitives.cu")),
    ("model.cu", include_str!("kernels/model.cu")),
    ("rows.cu", include_str!("kernels/rows.cu")),
    ("attention.cu", include_str!("kernels/attention.cu")),
    ("decode.cu", include_str!("kernels/decode.cu")),
    ("sampling.cu", include_str!("kernels/sampling.cu")),
];

/// A 16-bit float type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Half {
    /// IEEE half precision: 11 significant bits, up to 65,504.
    Float16,
    /// The upper half of an IEEE single-precision float: 8 significant bits, and the same range.
    BFloat16,
}

/// The largest supported number of elements of a head. It is limited because `attend_prompt` keeps a tile of outputs in registers.
pub(super) const HEAD_DIM_MAX: usize = 128;

/// The constants of a model that its kernels are compiled with; numbers of heads and feed-forward columns are those of one rank.
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
    /// Whether the kernels use smaller tiles, for GPUs with less shared memory than data-centre models.
    pub small_shared_memory: bool,
}

impl Shape {
    /// Returns the shape of one rank. Fails if the kernels do not support the model (for example because its rows are not multiples of the
    /// 16 bytes that the kernels copy at a time) or if the shards are uneven. `shared_max` is the shared memory of a thread block in bytes.
    pub fn new(config: &ModelConfig, half: Half, block_size: usize, shared_max: usize, shard: Shard) -> Result<Self, CudaError> {
        let &ModelConfig { layers, width, heads, kv_heads, head_dim, ffn, vocab_size, .. } = config;
        for (fits, what, found) in [
            (head_dim.is_multiple_of(8) && head_dim <= HEAD_DIM_MAX, "heads of a multiple of 8 numbers, 128 at most", head_dim),
            (width.is_multiple_of(8), "a width that is a multiple of 8", width),
            (ffn.is_multiple_of(8), "a feed-forward length that is a multiple of 8", ffn),
            (heads / kv_heads <= Self::PROMPT_ROWS, "at most 128 query heads for a key head", heads / kv_heads),
        ] {
            if !fits {
                return Err(CudaError::Shape { what, found });
            }
        }
        shard.check(config)?;
        let [heads, kv_heads, ffn] = [heads, kv_heads, ffn].map(|all| shard.range(all).len());
        let (pairs, small_shared_memory) = (config.rope.pairs, false);
        let mut shape =
            Self { half, layers, width, heads, kv_heads, head_dim, ffn, vocab_size, block_size, pairs, small_shared_memory };
        shape.small_shared_memory = shape.prompt_bytes().max(shape.token_bytes()) > shared_max;
        Ok(shape)
    }

    /// Returns the constants as compiler options.
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

    /// Returns the number of query heads per key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns the length of a row of queries: heads × head length.
    pub fn query_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the length of a row of queries, keys and values.
    pub fn qkv_dim(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Returns the bytes of one token's keys (or values) in one layer.
    pub fn kv_row_bytes(&self) -> usize {
        self.kv_heads * self.head_dim * 2
    }

    /// Returns the bytes of a rank's shard of one KV block.
    pub fn block_bytes(&self) -> usize {
        self.layers * 2 * self.block_size * self.kv_row_bytes()
    }

    // The following constants repeat those of kernels/attention.cu and kernels/decode.cu; a test compares them.

    /// Rows per tile of a prompt: one for each token and each query head that shares the tile's key head.
    pub const PROMPT_ROWS: usize = 128;
    /// Threads per thread block of `store_kv`.
    pub const STORE_THREADS: usize = 128;
    /// Query heads per thread block of `attend_token`.
    pub const TOKEN_ROWS: usize = 16;
    /// Positions that a thread block of `attend_token` processes at a time.
    pub const TOKEN_POSITIONS: usize = 64;

    /// Returns the number of tokens in a tile of a prompt.
    pub fn tile_tokens(&self) -> usize {
        Self::PROMPT_ROWS / self.group()
    }

    /// Returns the number of heads that a thread block of `store_kv` stores: a thread has eight elements.
    pub fn store_heads(&self) -> usize {
        Self::STORE_THREADS / (self.head_dim / 8).next_power_of_two()
    }

    fn head_pad(&self) -> usize {
        self.head_dim.next_multiple_of(16)
    }

    /// Returns the shared memory of a thread block of `attend_prompt` in bytes.
    pub fn prompt_bytes(&self) -> usize {
        let tile = if self.small_shared_memory { 32 } else { 64 };
        (Self::PROMPT_ROWS + 4 * tile) * (self.head_pad() + 8) * 2
    }

    /// Returns the shared memory of a thread block of `attend_token` in bytes.
    pub fn token_bytes(&self) -> usize {
        let stages = if self.small_shared_memory { 2 } else { 3 };
        let copies = (Self::TOKEN_ROWS + stages * 2 * Self::TOKEN_POSITIONS) * (self.head_pad() + 8) * 2;
        copies.max(4 * Self::TOKEN_ROWS * (self.head_pad() + 2) * 4)
    }
}
