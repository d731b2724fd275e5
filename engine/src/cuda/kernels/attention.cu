// Attention over paged KV: the parts common to prompts and single tokens, and the kernel for prompts.
//
// FlashAttention-2 (Dao 2023): scores are computed for a tile of positions at a time, with an online softmax, so that no more than a tile
// is in memory. Rows are *packed*: the GROUP query heads of one key head are rows of one matrix, token by token, so that keys are read once
// for all these heads. Scores are scaled by log2(e), so that exponentials are powers of two.

/// Distance of two rows in shared memory, in elements. A row has 16 bytes more than a head, so that the eight rows of a matrix are in
/// different banks.
constexpr int STRIDE = HEAD_PAD + 8;

/// Online softmax of 16 packed rows, as accumulator fragments: a lane holds rows lane / 4 and lane / 4 + 8, and two of every eight columns.
struct Softmax {
    float out[HEAD_PAD / 8][4];
    /// The maximum score so far, and the lane's share of the sum of exponentials.
    float max[2], sum[2];

    DEVICE_MEMBER void clear() {
        for (int n = 0; n < HEAD_PAD / 8; n++) {
            for (int i = 0; i < 4; i++) out[n][i] = 0;
        }
        for (int half = 0; half < 2; half++) max[half] = -INFINITY_F, sum[half] = 0;
    }

    /// Updates maximum and sum with the scores of 8 × TILES positions, rescales the output, and replaces the scores by their exponentials.
    template <int TILES> DEVICE_MEMBER void update(float scores[TILES][4]) {
        for (int half = 0; half < 2; half++) {
            float most = max[half];
            for (int n = 0; n < TILES; n++) most = fmaxf(most, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
            most = fmaxf(most, shuffle_xor(most, 1));
            most = fmaxf(most, shuffle_xor(most, 2));
            // While all scores are masked, the base may be any finite number.
            const float base = most == -INFINITY_F ? 0.0f : most;
            const float kept = exp2_fast(max[half] - base);
            max[half] = most;
            sum[half] *= kept;
            for (int n = 0; n < HEAD_PAD / 8; n++) out[n][half * 2] *= kept, out[n][half * 2 + 1] *= kept;
            for (int n = 0; n < TILES; n++) {
                for (int i = half * 2; i < half * 2 + 2; i++) {
                    scores[n][i] = exp2_fast(scores[n][i] - base);
                    sum[half] += scores[n][i];
                }
            }
        }
    }

    /// Adds the values of 16 positions, weighted by the exponentials of the scores. `first` and `second` have the exponentials of eight
    /// positions each.
    DEVICE_MEMBER void accumulate(const float first[4], const float second[4], const half_t *values, int lane) {
        const u32 powers[4] = {narrow_pair(first[0], first[1]), narrow_pair(first[2], first[3]), narrow_pair(second[0], second[1]),
                               narrow_pair(second[2], second[3])};
        const half_t *row = values + (lane % 16) * STRIDE + lane / 16 * 8;
#pragma unroll
        for (int n = 0; n < HEAD_PAD / 8; n += 2) {
            u32 b[4];
            load_matrices_transposed(b, row + n * 8);
            multiply_add(out[n], powers, b[0], b[1]);
            multiply_add(out[n + 1], powers, b[2], b[3]);
        }
    }

    /// Adds the sums of all lanes that hold parts of the same row.
    DEVICE_MEMBER void finish() {
        for (int half = 0; half < 2; half++) {
            sum[half] += shuffle_xor(sum[half], 1);
            sum[half] += shuffle_xor(sum[half], 2);
        }
    }
};

/// Loads 16 rows × 16 elements as the first operand of `multiply_add`.
DEVICE void load_rows(u32 to[4], const half_t *rows, int lane) { load_matrices(to, rows + (lane % 16) * STRIDE + lane / 16 * 8); }

/// Loads 16 positions × 16 elements as the second operand: two registers for positions 0–7, two for 8–15.
DEVICE void load_keys(u32 to[4], const half_t *keys, int lane) {
    load_matrices(to, keys + (lane % 8 + lane / 16 * 8) * STRIDE + lane / 8 % 2 * 8);
}

/// Starts copying the keys and values of `count` positions from `first` on. Positions from `end` on are filled with zeros.
DEVICE void copy_kv(half_t *keys, half_t *values, const half_t *pool, const u32 *table, int first, int end, int count, int layer, int kv_head,
                    int thread, int threads) {
    for (int vector = thread; vector < count * HEAD_VECTORS; vector += threads) {
        const int row = vector / HEAD_VECTORS, at = vector % HEAD_VECTORS * 8, position = first + row;
        const bool present = position < end && at < HEAD_DIM;
        const u64 block = present ? table[position / BLOCK_SIZE] : 0;
        const int slot = present ? position % BLOCK_SIZE : 0, in_head = present ? at : 0;
        copy_async(keys + row * STRIDE + at, pool + kv_offset(block, slot, layer, 0, kv_head) + in_head, present);
        copy_async(values + row * STRIDE + at, pool + kv_offset(block, slot, layer, 1, kv_head) + in_head, present);
    }
}

/// Starts copying `rows` packed query rows from head `first_head` of token `token` on, padded with zero rows to `count`.
DEVICE void copy_queries(half_t *to, const half_t *qkv, u64 token, int first_head, int rows, int count, int thread, int threads, int heads) {
    for (int vector = thread; vector < count * HEAD_VECTORS; vector += threads) {
        const int row = vector / HEAD_VECTORS, at = vector % HEAD_VECTORS * 8;
        const bool present = row < rows && at < HEAD_DIM;
        const u64 from = (token + row / heads) * QKV_DIM + (first_head + row % heads) * HEAD_DIM + at;
        copy_async(to + row * STRIDE + at, qkv + (present ? from : 0), present);
    }
}

constexpr int PROMPT_WARPS = 4;
/// The number of 16-row fragments that each warp computes.
constexpr int PROMPT_DEPTH = 2;
constexpr int PROMPT_ROWS = PROMPT_WARPS * PROMPT_DEPTH * 16;
/// The number of positions in a tile.
constexpr int PROMPT_TILE = SMALL_SHARED_MEMORY ? 32 : 64;
/// Bytes of shared memory: queries, and two tiles each of keys and values, one in use while the other is being copied.
constexpr int PROMPT_BYTES = (PROMPT_ROWS + 4 * PROMPT_TILE) * STRIDE * 2;

/// Attention of consecutive tokens. One thread block per tile and key head. An entry of `tiles` has the first row, the number of tokens
/// (PROMPT_ROWS / GROUP at most), the position of the first token, and the offset of the sequence's block table in `tables`. The tokens'
/// own KV must already be in `pool`.
KERNEL(PROMPT_WARPS * 32)
attend_prompt(const half_t *qkv, const half_t *pool, const u32 *tables, const int4 *tiles, half_t *out, int layer, float scale) {
    DYNAMIC_SHARED(shared);
    half_t *queries = reinterpret_cast<half_t *>(shared);
    half_t *keys = queries + PROMPT_ROWS * STRIDE, *values = keys + 2 * PROMPT_TILE * STRIDE;
    const int4 tile = tiles[blockIdx.x];
    const int kv_head = blockIdx.y, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int rows = tile.y * GROUP, end = tile.z + tile.y;
    const u32 *table = tables + tile.w;
    const int steps = (end + PROMPT_TILE - 1) / PROMPT_TILE;

    copy_queries(queries, qkv, tile.x, kv_head * GROUP, rows, PROMPT_ROWS, thread, PROMPT_WARPS * 32, GROUP);
    copy_kv(keys, values, pool, table, 0, end, PROMPT_TILE, layer, kv_head, thread, PROMPT_WARPS * 32);
    copy_commit();
    Softmax softmax[PROMPT_DEPTH];
#pragma unroll
    for (int m = 0; m < PROMPT_DEPTH; m++) softmax[m].clear();
    const int first_row = warp * PROMPT_DEPTH * 16;
    for (int step = 0; step < steps; step++) {
        const int stage = step % 2 * PROMPT_TILE * STRIDE, first = step * PROMPT_TILE;
        if (step + 1 < steps) {
            const int next = (step + 1) % 2 * PROMPT_TILE * STRIDE;
            copy_kv(keys + next, values + next, pool, table, first + PROMPT_TILE, end, PROMPT_TILE, layer, kv_head, thread,
                    PROMPT_WARPS * 32);
        }
        copy_commit();
        copy_wait<1>();
        block_sync();
        float scores[PROMPT_DEPTH][PROMPT_TILE / 8][4];
#pragma unroll
        for (int m = 0; m < PROMPT_DEPTH; m++) {
#pragma unroll
            for (int n = 0; n < PROMPT_TILE / 8; n++) {
                for (int i = 0; i < 4; i++) scores[m][n][i] = 0;
            }
        }
#pragma unroll
        for (int k = 0; k < HEAD_PAD; k += 16) {
            u32 a[PROMPT_DEPTH][4];
#pragma unroll
            for (int m = 0; m < PROMPT_DEPTH; m++) load_rows(a[m], queries + (first_row + m * 16) * STRIDE + k, lane);
#pragma unroll
            for (int n = 0; n < PROMPT_TILE / 8; n += 2) {
                u32 b[4];
                load_keys(b, keys + stage + n * 8 * STRIDE + k, lane);
#pragma unroll
                for (int m = 0; m < PROMPT_DEPTH; m++) {
                    multiply_add(scores[m][n], a[m], b[0], b[1]);
                    multiply_add(scores[m][n + 1], a[m], b[2], b[3]);
                }
            }
        }
        // Causal mask; only the last tiles have positions after a token's own.
        const bool masked = first + PROMPT_TILE > tile.z;
#pragma unroll
        for (int m = 0; m < PROMPT_DEPTH; m++) {
#pragma unroll
            for (int n = 0; n < PROMPT_TILE / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[m][n][i] *= scale;
                    if (masked) {
                        const int token = tile.z + (first_row + m * 16 + lane / 4 + i / 2 * 8) / GROUP;
                        const int position = first + n * 8 + lane % 4 * 2 + i % 2;
                        if (position > token) scores[m][n][i] = -INFINITY_F;
                    }
                }
            }
            softmax[m].update<PROMPT_TILE / 8>(scores[m]);
#pragma unroll
            for (int n = 0; n < PROMPT_TILE / 8; n += 2) {
                softmax[m].accumulate(scores[m][n], scores[m][n + 1], values + stage + n * 8 * STRIDE, lane);
            }
        }
        block_sync();
    }
#pragma unroll
    for (int m = 0; m < PROMPT_DEPTH; m++) {
        softmax[m].finish();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + m * 16 + lane / 4 + half * 8;
            if (row >= rows) continue;
            const float factor = 1.0f / softmax[m].sum[half];
            const u64 at = (static_cast<u64>(tile.x) + row / GROUP) * HEADS * HEAD_DIM + (kv_head * GROUP + row % GROUP) * HEAD_DIM;
            u32 *pairs = reinterpret_cast<u32 *>(out + at);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                pairs[n * 4 + lane % 4] = narrow_pair(softmax[m].out[n][half * 2] * factor, softmax[m].out[n][half * 2 + 1] * factor);
            }
        }
    }
}
