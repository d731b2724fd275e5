// The operations on single rows (tokens) between GEMMs: embedding, RMSNorm, RoPE, SwiGLU.

constexpr int ROW_THREADS = 256;

/// Eight 16-bit floats, for 16-byte accesses.
struct __align__(16) Eight {
    u32 pairs[4];
};

DEVICE float first_of(u32 pair) { return widen(static_cast<half_t>(pair & 0xffff)); }
DEVICE float second_of(u32 pair) { return widen(static_cast<half_t>(pair >> 16)); }

/// Writes the tokens' embeddings to the residual stream ([row][width]). One thread block per row; `width` is a multiple of 8.
KERNEL(ROW_THREADS) embed(const u32 *tokens, const half_t *embedding, float *stream, int width) {
    const u64 row = blockIdx.x;
    const half_t *from = embedding + static_cast<u64>(tokens[row]) * width;
    for (int i = threadIdx.x; i < width; i += ROW_THREADS) stream[row * width + i] = widen(from[i]);
}

/// RMSNorm (Zhang and Sennrich 2019): out = x / sqrt(mean(x²) + eps) × weight. Output row i is from input row `rows[i]`, or from row i if
/// `rows` is null. One thread block per output row.
KERNEL(ROW_THREADS) rms_norm(const float *stream, const u32 *rows, const float *weight, half_t *out, int width, float eps) {
    __shared__ float sums[ROW_THREADS / 32];
    const u64 to = blockIdx.x, from = rows ? rows[to] : to;
    const float *x = stream + from * width;
    float squares = 0;
    for (int i = threadIdx.x * 2; i < width; i += ROW_THREADS * 2) squares += x[i] * x[i] + x[i + 1] * x[i + 1];
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    block_sync();
    float sum = 0;
    for (int warp = 0; warp < ROW_THREADS / 32; warp++) sum += sums[warp];
    const float factor = 1.0f / sqrtf(sum / width + eps);
    u32 *pairs = reinterpret_cast<u32 *>(out + to * width);
    for (int i = threadIdx.x * 2; i < width; i += ROW_THREADS * 2) {
        pairs[i / 2] = narrow_pair(x[i] * factor * weight[i], x[i + 1] * factor * weight[i + 1]);
    }
}

/// RoPE (Su et al. 2021): cosine and sine of every row's rotations, times the magnitude, as [row][pair]. Angles are in double precision,
/// because positions are large. One thread block per row.
KERNEL(64) rope(const u32 *positions, const double *frequencies, float2 *rotations, double magnitude) {
    const u64 row = blockIdx.x;
    for (int pair = threadIdx.x; pair < HEAD_DIM / 2; pair += 64) {
        const double angle = positions[row] * frequencies[pair];
        rotations[row * (HEAD_DIM / 2) + pair] =
            make_float2(static_cast<float>(cos(angle) * magnitude), static_cast<float>(sin(angle) * magnitude));
    }
}

constexpr int HEADS_A_BLOCK = 4;

/// Adds biases, normalises and rotates queries and keys, and writes keys and values to their slots of the KV memory; queries are updated in
/// place. One warp per row and head. `biases` and the norms may be null. `slots` has block × BLOCK_SIZE + offset in the block for each row,
/// or NO_SLOT.
KERNEL(HEADS_A_BLOCK * 32)
store_kv(half_t *qkv, const float *biases, const float *query_norm, const float *key_norm, const float2 *rotations, const u32 *slots, half_t *pool,
         int layer, float eps) {
    constexpr int HALF = HEAD_DIM / 2, EACH = (HALF + 31) / 32;
    const u64 row = blockIdx.x;
    const int head = blockIdx.y * HEADS_A_BLOCK + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (head >= HEADS + 2 * KV_HEADS) return;
    const bool is_query = head < HEADS, is_value = head >= HEADS + KV_HEADS;
    half_t *from = qkv + row * QKV_DIM + head * HEAD_DIM;
    const float *norm = is_query ? query_norm : is_value ? nullptr : key_norm;
    float pairs[EACH][2];
    int places[EACH][2];
    float squares = 0;
    for (int i = 0; i < EACH; i++) {
        const int pair = lane + 32 * i;
        places[i][0] = PAIRS_ADJACENT ? 2 * pair : pair;
        places[i][1] = PAIRS_ADJACENT ? 2 * pair + 1 : pair + HALF;
        for (int j = 0; j < 2; j++) {
            pairs[i][j] = pair < HALF ? widen(from[places[i][j]]) : 0.0f;
            if (biases && pair < HALF) pairs[i][j] += biases[head * HEAD_DIM + places[i][j]];
            squares += pairs[i][j] * pairs[i][j];
        }
    }
    if (norm) {
        const float factor = 1.0f / sqrtf(warp_sum(squares) / HEAD_DIM + eps);
        for (int i = 0; i < EACH; i++) {
            for (int j = 0; j < 2; j++) {
                if (lane + 32 * i < HALF) pairs[i][j] *= factor * norm[places[i][j]];
            }
        }
    }
    half_t *to = from;
    if (!is_query) {
        const u32 slot = slots[row];
        if (slot == NO_SLOT) return;
        const int kv_head = head - HEADS - (is_value ? KV_HEADS : 0);
        to = pool + kv_offset(slot / BLOCK_SIZE, slot % BLOCK_SIZE, layer, is_value, kv_head);
    }
    for (int i = 0; i < EACH; i++) {
        const int pair = lane + 32 * i;
        if (pair >= HALF) continue;
        float first = pairs[i][0], second = pairs[i][1];
        if (!is_value) {
            const float2 rotation = rotations[row * HALF + pair];
            first = pairs[i][0] * rotation.x - pairs[i][1] * rotation.y;
            second = pairs[i][1] * rotation.x + pairs[i][0] * rotation.y;
        }
        to[places[i][0]] = narrow(first);
        to[places[i][1]] = narrow(second);
    }
}

DEVICE float swiglu_of(float gate, float up) { return gate / (1.0f + exp2_fast(gate * -1.44269504f)) * up; }

/// SwiGLU (Shazeer 2020): gate ÷ (1 + e^-gate) × up. A row of `gates` has `ffn` gates (a multiple of 8), then as many numbers of `up`. One
/// thread per eight elements.
KERNEL(ROW_THREADS) swiglu(const half_t *gates, half_t *out, int ffn, u32 rows) {
    const u64 eight = static_cast<u64>(blockIdx.x) * ROW_THREADS + threadIdx.x, each = ffn / 8;
    if (eight >= each * rows) return;
    const u64 row = eight / each, at = eight % each * 8;
    const Eight gate = *reinterpret_cast<const Eight *>(gates + row * 2 * ffn + at);
    const Eight up = *reinterpret_cast<const Eight *>(gates + row * 2 * ffn + ffn + at);
    Eight inner;
    for (int i = 0; i < 4; i++) {
        inner.pairs[i] = narrow_pair(swiglu_of(first_of(gate.pairs[i]), first_of(up.pairs[i])),
                                     swiglu_of(second_of(gate.pairs[i]), second_of(up.pairs[i])));
    }
    *reinterpret_cast<Eight *>(out + row * ffn + at) = inner;
}
