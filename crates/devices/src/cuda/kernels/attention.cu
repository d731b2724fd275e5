// Attention over paged KV: the parts common to prompts and single tokens, and the kernel for prompts.
//
// FlashAttention-2 (Dao 2023): scores are computed for a tile of positions at a time, with an online softmax, so that no more than a tile
// is in memory. Rows are *packed*: the GROUP query heads of one key head are rows of one matrix, token by token, so that keys are read once
// for all these heads. The scale of the scores includes log2(e), so that exponentials are powers of two.

/// The distance between two rows in shared memory, in elements. A row is 16 bytes longer than a head, so that the eight rows of a matrix are
/// in different banks.
constexpr int STRIDE = HEAD_PAD + 8;

/// Online softmax of 16 packed rows, as accumulator fragments: a lane holds rows lane / 4 and lane / 4 + 8, and two of every eight columns.
struct Softmax {
    float out[HEAD_PAD / 8][4];
    /// The maximum scaled score so far, and the lane's share of the sum of exponentials.
    float max[2], sum[2];

    DEVICE_MEMBER void clear() {
#pragma unroll
        for (int n = 0; n < HEAD_PAD / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) out[n][i] = 0;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) max[half] = -INFINITY_F, sum[half] = 0;
    }

    /// Updates maximum and sum with the scores of 8 × TILES positions, and rescales the output. Returns the exponentials of the scaled scores
    /// as first operands of `multiply_add`, one for every 16 positions.
    template <int TILES> DEVICE_MEMBER void update(float scores[TILES][4], float scale, u32 powers[TILES / 2][4]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float most = -INFINITY_F;
#pragma unroll
            for (int n = 0; n < TILES; n++) most = fmaxf(most, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
            most = fmaxf(most, shuffle_xor(most, 1));
            most = fmaxf(most, shuffle_xor(most, 2));
            most = fmaxf(max[half], most * scale);
            // While all scores are masked, the base may be any finite number. The scale is applied by the fused operation that subtracts it.
            const float base = most == -INFINITY_F ? 0.0f : most, kept = exp2_fast(max[half] - base);
            max[half] = most;
            sum[half] *= kept;
            // After the first tiles the maxima rarely change, so most outputs need no rescaling.
            if (ballot(kept != 1.0f)) {
#pragma unroll
                for (int n = 0; n < HEAD_PAD / 8; n++) out[n][half * 2] *= kept, out[n][half * 2 + 1] *= kept;
            }
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const float first = exp2_fast(fmaf(scores[n][half * 2], scale, -base));
                const float second = exp2_fast(fmaf(scores[n][half * 2 + 1], scale, -base));
                sum[half] += first + second;
                powers[n / 2][n % 2 * 2 + half] = narrow_pair(first, second);
            }
        }
    }

    /// Adds the sums of all lanes that hold parts of the same row.
    DEVICE_MEMBER void finish() {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            sum[half] += shuffle_xor(sum[half], 1);
            sum[half] += shuffle_xor(sum[half], 2);
        }
    }
};

/// Adds the values of 16 positions to the outputs of DEPTH fragments of rows, weighted by the exponentials `powers[m][place]`. The values are
/// loaded once for all fragments.
template <int DEPTH, int PLACES>
DEVICE void accumulate(Softmax softmax[DEPTH], u32 powers[DEPTH][PLACES][4], int place, const half_t *values, int lane) {
    const half_t *row = values + (lane % 16) * STRIDE + lane / 16 * 8;
#pragma unroll
    for (int n = 0; n < HEAD_PAD / 8; n += 2) {
        u32 b[4];
        load_matrices_transposed(b, row + n * 8);
#pragma unroll
        for (int m = 0; m < DEPTH; m++) {
            multiply_add(softmax[m].out[n], powers[m][place], b[0], b[1]);
            multiply_add(softmax[m].out[n + 1], powers[m][place], b[2], b[3]);
        }
    }
}

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

/// Several thread blocks of a key head that compute the same tokens, each over a part of their positions. Each token has `parts` partitions of
/// results, one for each of these blocks, of which a block writes one.
struct Shared {
    /// The first token's row, its first partition, and the number of thread blocks.
    int row, partition, parts;
    /// Results by [partition][head][element], not yet divided by the sums of their exponentials; and their maxima and sums, by
    /// [partition][head].
    float *outputs;
    float2 *sums;
    /// One counter for each row and block of its heads, all 0 between two kernels.
    u32 *arrivals;
};

/// Combines the results of all parts of the packed rows from `begin` to before `end`, in the order of the parts.
DEVICE void combine(const Shared &shared, half_t *out, int kv_head, int begin, int end, int thread, int threads) {
    constexpr int FOURS = HEAD_DIM / 4;
    for (int i = begin * FOURS + thread; i < end * FOURS; i += threads) {
        const int token = i / FOURS / GROUP, head = kv_head * GROUP + i / FOURS % GROUP;
        const u64 first = (static_cast<u64>(shared.partition) + token * shared.parts) * HEADS + head;
        const FourSingles *outputs = reinterpret_cast<const FourSingles *>(shared.outputs) + first * FOURS + i % FOURS;
        float max = -INFINITY_F, total[4] = {}, sum = 0;
        for (int part = 0; part < shared.parts; part++) max = fmaxf(max, shared.sums[first + part * HEADS].x);
        for (int part = 0; part < shared.parts; part++) {
            const float2 of_part = shared.sums[first + part * HEADS];
            const float kept = exp2_fast(of_part.x - max);
            const FourSingles four = outputs[part * HEADS * FOURS];
#pragma unroll
            for (int j = 0; j < 4; j++) total[j] += four.numbers[j] * kept;
            sum += of_part.y * kept;
        }
        Four *to = reinterpret_cast<Four *>(out) + ((static_cast<u64>(shared.row) + token) * HEADS + head) * FOURS + i % FOURS;
        *to = {{narrow_pair(total[0] / sum, total[1] / sum), narrow_pair(total[2] / sum, total[3] / sum)}};
    }
}

/// Called by all threads of a block after they have written their results. The last one of the blocks that share tokens combines the results of
/// all, and resets their counter.
DEVICE void combine_if_last(const Shared &shared, half_t *out, int kv_head, int begin, int end, int thread, int threads) {
    __shared__ bool is_last;
    u32 *arrived = shared.arrivals + (static_cast<u64>(shared.row) * gridDim.y + blockIdx.y) * gridDim.z + blockIdx.z;
    block_sync();
    if (thread == 0) {
        device_fence();
        is_last = count_up(arrived) + 1 == static_cast<u32>(shared.parts);
        device_fence();
        if (is_last) *arrived = 0;
    }
    block_sync();
    if (is_last) combine(shared, out, kv_head, begin, end, thread, threads);
}

constexpr int PROMPT_WARPS = 4;
/// The number of 16-row fragments that each warp computes.
constexpr int PROMPT_DEPTH = 2;
constexpr int PROMPT_ROWS = PROMPT_WARPS * PROMPT_DEPTH * 16;
/// The number of positions in a tile.
constexpr int PROMPT_TILE = SMALL_SHARED_MEMORY ? 32 : 64;
/// Bytes of shared memory: queries, and two tiles each of keys and values, one in use while the other is being copied.
constexpr int PROMPT_BYTES = (PROMPT_ROWS + 4 * PROMPT_TILE) * STRIDE * 2;

/// The work of a thread block of `attend_prompt`: consecutive tokens of a sequence, and the positions that they attend to.
struct __align__(16) PromptTile {
    /// The first row, the number of tokens (PROMPT_ROWS / GROUP at most), the position of the first token, and the offset of the sequence's
    /// block table.
    int row, tokens, position, table;
    /// The positions to which this block attends: from `begin`, a multiple of PROMPT_TILE, to before `end`.
    int begin, end;
    /// If several blocks share the tile: the first token's first partition of results, and the number of positions of each block. If one
    /// block computes the tile alone, `each` is 0.
    int partition, each;

    /// Returns the number of blocks that share the tile.
    DEVICE_MEMBER int parts() const { return (position + tokens + each - 1) / each; }
};

/// A block's queries, and its tiles of keys and values in shared memory.
struct PromptOperands {
    const half_t *queries, *keys, *values;
    float scale;
    int warp_row, lane;
};

/// Updates the outputs of a warp with a tile of positions from `first` on. If `masked`, positions after a row's own token, the first of which
/// has position `token`, are not attended to.
DEVICE void attend_tile(Softmax softmax[PROMPT_DEPTH], const PromptOperands &in, bool masked, int first, int token) {
    float scores[PROMPT_DEPTH][PROMPT_TILE / 8][4];
#pragma unroll
    for (int m = 0; m < PROMPT_DEPTH; m++) {
#pragma unroll
        for (int n = 0; n < PROMPT_TILE / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) scores[m][n][i] = 0;
        }
    }
    // More steps of this loop at a time would need more registers than there are.
#pragma unroll 2
    for (int k = 0; k < HEAD_PAD; k += 16) {
        u32 a[PROMPT_DEPTH][4];
#pragma unroll
        for (int m = 0; m < PROMPT_DEPTH; m++) load_rows(a[m], in.queries + (in.warp_row + m * 16) * STRIDE + k, in.lane);
#pragma unroll
        for (int n = 0; n < PROMPT_TILE / 8; n += 2) {
            u32 b[4];
            load_keys(b, in.keys + n * 8 * STRIDE + k, in.lane);
#pragma unroll
            for (int m = 0; m < PROMPT_DEPTH; m++) {
                multiply_add(scores[m][n], a[m], b[0], b[1]);
                multiply_add(scores[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
    // Only the last tiles have positions after a token's own, so most tiles skip this block.
    if (masked) {
#pragma unroll
        for (int m = 0; m < PROMPT_DEPTH; m++) {
#pragma unroll
            for (int n = 0; n < PROMPT_TILE / 8; n++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int own = token + (in.warp_row + m * 16 + in.lane / 4 + i / 2 * 8) / GROUP;
                    if (first + n * 8 + in.lane % 4 * 2 + i % 2 > own) scores[m][n][i] = -INFINITY_F;
                }
            }
        }
    }
    u32 powers[PROMPT_DEPTH][PROMPT_TILE / 16][4];
#pragma unroll
    for (int m = 0; m < PROMPT_DEPTH; m++) {
        softmax[m].template update<PROMPT_TILE / 8>(scores[m], in.scale, powers[m]);
    }
#pragma unroll
    for (int n = 0; n < PROMPT_TILE / 16; n++) {
        accumulate<PROMPT_DEPTH, PROMPT_TILE / 16>(softmax, powers, n, in.values + n * 16 * STRIDE, in.lane);
    }
}

/// Attention of consecutive tokens. One thread block per tile and key head. The tokens' own KV must already be in `pool`. Of the blocks that
/// share a tile, the last one combines the results of all.
KERNEL(PROMPT_WARPS * 32)
attend_prompt(const half_t *qkv, const half_t *pool, const u32 *tables, const PromptTile *tiles, half_t *out, float *partial_outputs,
              float2 *partial_sums, u32 *arrivals, int layer, float scale) {
    DYNAMIC_SHARED(memory);
    half_t *queries = reinterpret_cast<half_t *>(memory);
    half_t *keys = queries + PROMPT_ROWS * STRIDE, *values = keys + 2 * PROMPT_TILE * STRIDE;
    // The tile is in shared memory, because registers are scarce in the loop.
    __shared__ PromptTile tile;
    const int kv_head = blockIdx.y, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    if (thread == 0) tile = tiles[blockIdx.x];
    block_sync();
    const int steps = (tile.end - tile.begin + PROMPT_TILE - 1) / PROMPT_TILE;
    copy_queries(queries, qkv, tile.row, kv_head * GROUP, tile.tokens * GROUP, PROMPT_ROWS, thread, PROMPT_WARPS * 32, GROUP);
    copy_kv(keys, values, pool, tables + tile.table, tile.begin, tile.end, PROMPT_TILE, layer, kv_head, thread, PROMPT_WARPS * 32);
    copy_commit();
    Softmax softmax[PROMPT_DEPTH];
#pragma unroll
    for (int m = 0; m < PROMPT_DEPTH; m++) softmax[m].clear();
    const int first_row = warp * PROMPT_DEPTH * 16;
    for (int step = 0; step < steps; step++) {
        const int stage = step % 2 * PROMPT_TILE * STRIDE, first = tile.begin + step * PROMPT_TILE;
        if (step + 1 < steps) {
            const int next = (step + 1) % 2 * PROMPT_TILE * STRIDE;
            copy_kv(keys + next, values + next, pool, tables + tile.table, first + PROMPT_TILE, tile.end, PROMPT_TILE, layer, kv_head, thread,
                    PROMPT_WARPS * 32);
        }
        copy_commit();
        copy_wait<1>();
        block_sync();
        const PromptOperands operands = {queries, keys + stage, values + stage, scale, first_row, lane};
        attend_tile(softmax, operands, first + PROMPT_TILE > tile.position + 1, first, tile.position);
        block_sync();
    }
#pragma unroll
    for (int m = 0; m < PROMPT_DEPTH; m++) {
        softmax[m].finish();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + m * 16 + lane / 4 + half * 8;
            if (row >= tile.tokens * GROUP) continue;
            const int token = row / GROUP, head = kv_head * GROUP + row % GROUP;
            if (tile.each > 0) {
                const u64 place = (static_cast<u64>(tile.partition) + token * tile.parts() + tile.begin / tile.each) * HEADS + head;
                float2 *pairs = reinterpret_cast<float2 *>(partial_outputs + place * HEAD_DIM);
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; n++) {
                    pairs[n * 4 + lane % 4] = make_float2(softmax[m].out[n][half * 2], softmax[m].out[n][half * 2 + 1]);
                }
                if (lane % 4 == 0) partial_sums[place] = make_float2(softmax[m].max[half], softmax[m].sum[half]);
                continue;
            }
            const float factor = 1.0f / softmax[m].sum[half];
            u32 *pairs = reinterpret_cast<u32 *>(out + ((static_cast<u64>(tile.row) + token) * HEADS + head) * HEAD_DIM);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 8; n++) {
                pairs[n * 4 + lane % 4] = narrow_pair(softmax[m].out[n][half * 2] * factor, softmax[m].out[n][half * 2 + 1] * factor);
            }
        }
    }
    if (tile.each > 0) {
        const Shared shared = {tile.row, tile.partition, tile.parts(), partial_outputs, partial_sums, arrivals};
        combine_if_last(shared, out, kv_head, 0, tile.tokens * GROUP, thread, PROMPT_WARPS * 32);
    }
}
