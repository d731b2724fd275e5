// Attention of one-token chunks (Flash-Decoding, Dao et al. 2023). Almost all of its time is spent on reading the KV. So several thread
// blocks divide a sequence's positions into partitions, and the last one of them combines the results.

constexpr int TOKEN_WARPS = 4;
/// Number of rows that a thread block computes. Each row is one of the query heads that share a key head.
constexpr int TOKEN_ROWS = 16;
/// Positions that a warp processes at a time.
constexpr int TOKEN_TILE = 16;
/// Number of tiles of each warp in shared memory: one is in use while the next ones are being copied.
constexpr int TOKEN_STAGES = SMALL_SHARED_MEMORY ? 2 : 3;
constexpr int TOKEN_STAGE = 2 * TOKEN_TILE * STRIDE;
constexpr int TOKEN_COPIES_BYTES = (TOKEN_ROWS * STRIDE + TOKEN_WARPS * TOKEN_STAGES * TOKEN_STAGE) * 2;
/// The shared memory is used twice: at the end of the kernel it holds the rows, maxima and sums of all warps.
constexpr int TOKEN_RESULTS_BYTES = TOKEN_WARPS * TOKEN_ROWS * (HEAD_PAD + 2) * 4;
constexpr int TOKEN_BYTES = TOKEN_COPIES_BYTES > TOKEN_RESULTS_BYTES ? TOKEN_COPIES_BYTES : TOKEN_RESULTS_BYTES;

/// The work of a thread block of `attend_token`: a part of the positions to which a token attends.
struct __align__(16) TokenPart {
    /// The token's row, the positions from `begin` to before `end`, and the offset of the sequence's block table. An empty part is padding.
    int row, begin, end, table;
    /// The token's first partition of results, and its number of parts. The part's own partition has the index of the thread block.
    int partition, parts;
};

/// Attention of one token over a part of its positions. There is one thread block for each part, key head and 16 of its query heads. Of the
/// blocks that share a token's heads, the last one combines the results of all.
KERNEL(TOKEN_WARPS * 32)
attend_token(const half_t *qkv, const half_t *pool, const u32 *tables, const TokenPart *all_parts, half_t *out, float *partial_outputs,
             float2 *partial_sums, u32 *arrivals, int layer, float scale) {
    DYNAMIC_SHARED(memory);
    const TokenPart part = all_parts[blockIdx.x];
    if (part.begin == part.end) return;
    const int kv_head = blockIdx.y, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int first_head = kv_head * GROUP + blockIdx.z * TOKEN_ROWS;
    const int left = GROUP - static_cast<int>(blockIdx.z) * TOKEN_ROWS, rows = left < TOKEN_ROWS ? left : TOKEN_ROWS;
    const u32 *table = tables + part.table;
    half_t *queries = reinterpret_cast<half_t *>(memory);
    half_t *stages = queries + TOKEN_ROWS * STRIDE + warp * TOKEN_STAGES * TOKEN_STAGE;
    const int steps = (part.end - part.begin + TOKEN_WARPS * TOKEN_TILE - 1) / (TOKEN_WARPS * TOKEN_TILE);

    copy_queries(queries, qkv, part.row, first_head, rows, TOKEN_ROWS, thread, TOKEN_WARPS * 32, TOKEN_ROWS);
    // Every warp copies only its own tiles, and waits only for them.
    const auto begin = [&](int step) {
        if (step < steps) {
            half_t *keys = stages + step % TOKEN_STAGES * TOKEN_STAGE;
            const int first = part.begin + (step * TOKEN_WARPS + warp) * TOKEN_TILE;
            copy_kv(keys, keys + TOKEN_TILE * STRIDE, pool, table, first, part.end, TOKEN_TILE, layer, kv_head, lane, 32);
        }
        copy_commit();
    };
    for (int step = 0; step < TOKEN_STAGES - 1; step++) begin(step);
    copy_wait<TOKEN_STAGES - 2>();
    block_sync();
    u32 a[HEAD_PAD / 16][4];
#pragma unroll
    for (int k = 0; k < HEAD_PAD; k += 16) load_rows(a[k / 16], queries + k, lane);
    Softmax softmax[1];
    softmax[0].clear();
    for (int step = 0; step < steps; step++) {
        begin(step + TOKEN_STAGES - 1);
        copy_wait<TOKEN_STAGES - 1>();
        warp_sync();
        const half_t *keys = stages + step % TOKEN_STAGES * TOKEN_STAGE;
        const int first = part.begin + (step * TOKEN_WARPS + warp) * TOKEN_TILE;
        float scores[2][4] = {};
#pragma unroll
        for (int k = 0; k < HEAD_PAD; k += 16) {
            u32 b[4];
            load_keys(b, keys + k, lane);
            multiply_add(scores[0], a[k / 16], b[0], b[1]);
            multiply_add(scores[1], a[k / 16], b[2], b[3]);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int position = first + n * 8 + lane % 4 * 2 + i % 2;
                if (position >= part.end) scores[n][i] = -INFINITY_F;
            }
        }
        u32 powers[1][1][4];
        softmax[0].update<2>(scores, scale, powers[0]);
        accumulate<1, 1>(softmax, powers, 0, keys + TOKEN_TILE * STRIDE, lane);
        // All lanes must have read this step's tile before a later copy overwrites it.
        warp_sync();
    }
    softmax[0].finish();

    // Combine the rows of the four warps. Each row is scaled by the exponential of the difference between its maximum and the largest
    // maximum.
    block_sync();
    float *warp_outs = reinterpret_cast<float *>(memory);
    float *warp_maxima = warp_outs + TOKEN_WARPS * TOKEN_ROWS * HEAD_PAD, *warp_sums = warp_maxima + TOKEN_WARPS * TOKEN_ROWS;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp * TOKEN_ROWS + lane / 4 + half * 8;
#pragma unroll
        for (int n = 0; n < HEAD_PAD / 8; n++) {
            for (int i = 0; i < 2; i++) warp_outs[row * HEAD_PAD + n * 8 + lane % 4 * 2 + i] = softmax[0].out[n][half * 2 + i];
        }
        if (lane % 4 == 0) warp_maxima[row] = softmax[0].max[half], warp_sums[row] = softmax[0].sum[half];
    }
    block_sync();
    constexpr int FOURS = HEAD_DIM / 4;
    for (int i = thread; i < rows * FOURS; i += TOKEN_WARPS * 32) {
        const int row = i / FOURS, four = i % FOURS, head = first_head + row;
        float max = -INFINITY_F, total[4] = {}, sum = 0;
        for (int w = 0; w < TOKEN_WARPS; w++) max = fmaxf(max, warp_maxima[w * TOKEN_ROWS + row]);
        for (int w = 0; w < TOKEN_WARPS; w++) {
            const int place = w * TOKEN_ROWS + row;
            const float kept = exp2_fast(warp_maxima[place] - max);
            const FourSingles of_warp = reinterpret_cast<const FourSingles *>(warp_outs + place * HEAD_PAD)[four];
#pragma unroll
            for (int j = 0; j < 4; j++) total[j] += of_warp.numbers[j] * kept;
            sum += warp_sums[place] * kept;
        }
        if (part.parts == 1) {
            Four *to = reinterpret_cast<Four *>(out) + (static_cast<u64>(part.row) * HEADS + head) * FOURS + four;
            *to = {{narrow_pair(total[0] / sum, total[1] / sum), narrow_pair(total[2] / sum, total[3] / sum)}};
            continue;
        }
        const u64 place = static_cast<u64>(blockIdx.x) * HEADS + head;
        reinterpret_cast<FourSingles *>(partial_outputs)[place * FOURS + four] = {{total[0], total[1], total[2], total[3]}};
        if (four == 0) partial_sums[place] = make_float2(max, sum);
    }
    if (part.parts == 1) return;
    const Shared shared = {part.row, part.partition, part.parts, partial_outputs, partial_sums, arrivals};
    const int first_row = blockIdx.z * TOKEN_ROWS;
    combine_if_last(shared, out, kv_head, first_row, first_row + rows, thread, TOKEN_WARPS * 32);
}
