// The model's shape, known when the kernels are compiled, and what follows from it.
//
// Given: HEADS, KV_HEADS, HEAD_DIM (a multiple of 8, at most 128), LAYERS, BLOCK_SIZE, SMALL_SHARED_MEMORY (1: a block
// may have less than 100 KiB of shared memory), PAIRS_ADJACENT (1: RoPE turns numbers 2i and
// 2i + 1, 0: i and i + HEAD_DIM / 2).

/// Query heads that share a key and value head.
constexpr int GROUP = HEADS / KV_HEADS;
/// As the matrix units take it.
constexpr int HEAD_PAD = (HEAD_DIM + 15) / 16 * 16;
/// Of 8 numbers, 16 bytes.
constexpr int HEAD_VECTORS = HEAD_PAD / 8;
constexpr int KV_DIM = KV_HEADS * HEAD_DIM;
/// A row of the product that makes queries, keys and values, in this order.
constexpr int QKV_DIM = (HEADS + 2 * KV_HEADS) * HEAD_DIM;

/// Of rows that only fill a step up: they have no KV.
constexpr u32 NO_SLOT = 0xffffffffu;

/// The KV memory: [block][layer][keys, values][slot][key head][number], so that a block is one extent.
DEVICE u64 kv_offset(u64 block, int slot, int layer, int values, int kv_head) {
    return (((block * LAYERS + layer) * 2 + values) * BLOCK_SIZE + slot) * KV_DIM + kv_head * HEAD_DIM;
}

DEVICE float warp_sum(float value) {
    for (int lanes = 16; lanes > 0; lanes /= 2) value += shuffle_xor(value, lanes);
    return value;
}
