// The model's shape, and the constants that follow from it. All are compile-time constants.
//
// Compile-time options: HEADS, KV_HEADS, HEAD_DIM (a multiple of 8, at most 128), LAYERS, BLOCK_SIZE, SMALL_SHARED_MEMORY (1: a thread
// block may use less than 100 KiB of shared memory), PAIRS_ADJACENT (RoPE rotates pairs of elements; 1: 2i and 2i + 1,
// 0: i and i + HEAD_DIM / 2).

/// Query heads per key and value head.
constexpr int GROUP = HEADS / KV_HEADS;
/// Head length rounded up to a multiple of 16, as tensor cores need it.
constexpr int HEAD_PAD = (HEAD_DIM + 15) / 16 * 16;
/// Vectors of 8 elements (16 bytes) per padded head.
constexpr int HEAD_VECTORS = HEAD_PAD / 8;
constexpr int KV_DIM = KV_HEADS * HEAD_DIM;
/// Length of a row of queries, keys and values, in this order.
constexpr int QKV_DIM = (HEADS + 2 * KV_HEADS) * HEAD_DIM;

/// The slot of padding rows, which have no KV.
constexpr u32 NO_SLOT = 0xffffffffu;

/// Offset in the KV memory, laid out as [block][layer][keys, values][slot][key head][element], so that a block is contiguous.
DEVICE u64 kv_offset(u64 block, int slot, int layer, int values, int kv_head) {
    return (((block * LAYERS + layer) * 2 + values) * BLOCK_SIZE + slot) * KV_DIM + kv_head * HEAD_DIM;
}

DEVICE float warp_sum(float value) {
    for (int lanes = 16; lanes > 0; lanes /= 2) value += shuffle_xor(value, lanes);
    return value;
}
