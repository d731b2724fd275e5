// Attention of one-token chunks (Flash-Decoding, Dao et al. 2023). Almost all of its time is spent on reading the KV. So several thread
// blocks divide a sequence's positions into partitions, and a second kernel combines their results.

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

/// Attention of one token over one partition of its positions. There is one thread block for each partition, key head and 16 of its query
/// heads. An entry of `partitions` has the row, the first position, the position after the last one, and the offset of the sequence's block
/// table in `tables`. Writes outputs, [partition][head][element], that are not yet divided by the sums of their exponentials. Also writes
/// the maximum of the scores and the sum of the exponentials, [partition][head]. Empty partitions are padding, for which nothing is
/// written.
KERNEL(TOKEN_WARPS * 32)
attend_token(const half_t *qkv, const half_t *pool, const u32 *tables, const int4 *partitions, float *partial_outputs, float2 *partial_sums, int layer, float scale) {
    DYNAMIC_SHARED(shared);
    const int4 partition = partitions[blockIdx.x];
    if (partition.y == partition.z) return;
    const int kv_head = blockIdx.y, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int first_head = kv_head * GROUP + blockIdx.z * TOKEN_ROWS;
    const int left = GROUP - static_cast<int>(blockIdx.z) * TOKEN_ROWS, rows = left < TOKEN_ROWS ? left : TOKEN_ROWS;
    const u32 *table = tables + partition.w;
    half_t *queries = reinterpret_cast<half_t *>(shared);
    half_t *stages = queries + TOKEN_ROWS * STRIDE + warp * TOKEN_STAGES * TOKEN_STAGE;
    const int steps = (partition.z - partition.y + TOKEN_WARPS * TOKEN_TILE - 1) / (TOKEN_WARPS * TOKEN_TILE);

    copy_queries(queries, qkv, partition.x, first_head, rows, TOKEN_ROWS, thread, TOKEN_WARPS * 32, TOKEN_ROWS);
    // Every warp copies only its own tiles, and waits only for them.
    const auto begin = [&](int step) {
        if (step < steps) {
            half_t *keys = stages + step % TOKEN_STAGES * TOKEN_STAGE;
            const int first = partition.y + (step * TOKEN_WARPS + warp) * TOKEN_TILE;
            copy_kv(keys, keys + TOKEN_TILE * STRIDE, pool, table, first, partition.z, TOKEN_TILE, layer, kv_head, lane, 32);
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
        const int first = partition.y + (step * TOKEN_WARPS + warp) * TOKEN_TILE;
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
                if (position >= partition.z) scores[n][i] = -INFINITY_F;
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
    float *warp_outs = reinterpret_cast<float *>(shared);
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
    for (int i = thread; i < rows * HEAD_DIM; i += TOKEN_WARPS * 32) {
        const int row = i / HEAD_DIM, at = i % HEAD_DIM;
        float max = -INFINITY_F, out = 0, sum = 0;
        for (int w = 0; w < TOKEN_WARPS; w++) max = fmaxf(max, warp_maxima[w * TOKEN_ROWS + row]);
        for (int w = 0; w < TOKEN_WARPS; w++) {
            const float kept = exp2_fast(warp_maxima[w * TOKEN_ROWS + row] - max);
            out += warp_outs[(w * TOKEN_ROWS + row) * HEAD_PAD + at] * kept;
            sum += warp_sums[w * TOKEN_ROWS + row] * kept;
        }
        const u64 head = static_cast<u64>(blockIdx.x) * HEADS + first_head + row;
        partial_outputs[head * HEAD_DIM + at] = out;
        if (at == 0) partial_sums[head] = make_float2(max, sum);
    }
}

constexpr int COMBINE_THREADS = 128;

/// Combines the partitions of each one-token chunk. There is one thread block for each token and head. An entry of `rows` has the row, its
/// first partition and its number of partitions. For rows without partitions, which are padding, zeros are written.
KERNEL(COMBINE_THREADS) combine(const float *partial_outputs, const float2 *partial_sums, const int4 *rows, half_t *out) {
    const int4 row = rows[blockIdx.x];
    const int head = blockIdx.y;
    float max = -INFINITY_F;
    for (int partition = row.y; partition < row.y + row.z; partition++) max = fmaxf(max, partial_sums[static_cast<u64>(partition) * HEADS + head].x);
    for (int at = threadIdx.x; at < HEAD_DIM; at += COMBINE_THREADS) {
        float total = 0, sum = 0;
        for (int partition = row.y; partition < row.y + row.z; partition++) {
            const u64 place = static_cast<u64>(partition) * HEADS + head;
            const float kept = exp2_fast(partial_sums[place].x - max);
            total += partial_outputs[place * HEAD_DIM + at] * kept;
            sum += partial_sums[place].y * kept;
        }
        out[static_cast<u64>(row.x) * HEADS * HEAD_DIM + head * HEAD_DIM + at] = narrow(row.z ? total / sum : 0.0f);
    }
}
