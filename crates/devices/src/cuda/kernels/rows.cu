// The operations on single rows (tokens) between GEMMs: embedding, RMSNorm, RoPE, SwiGLU.

constexpr int ROW_THREADS = 256;

/// Eight 16-bit floats, four 16-bit floats, and four 32-bit floats, for accesses of 16 and of 8 bytes.
struct __align__(16) Eight {
    u32 pairs[4];
};
struct __align__(8) Four {
    u32 pairs[2];
};
struct __align__(16) FourSingles {
    float numbers[4];
};

DEVICE float first_of(u32 pair) { return widen(static_cast<half_t>(pair & 0xffff)); }
DEVICE float second_of(u32 pair) { return widen(static_cast<half_t>(pair >> 16)); }

/// Writes the tokens' embeddings to the residual stream ([row][width]). One thread block per row; `width` is a multiple of 8.
KERNEL(ROW_THREADS) embed(const u32 *tokens, const half_t *embedding, float *stream, int width) {
    const u64 row = blockIdx.x;
    const Eight *from = reinterpret_cast<const Eight *>(embedding + static_cast<u64>(tokens[row]) * width);
    FourSingles *to = reinterpret_cast<FourSingles *>(stream + row * width);
    for (int i = threadIdx.x; i < width / 8; i += ROW_THREADS) {
        const Eight eight = from[i];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const u32 first = eight.pairs[half * 2], second = eight.pairs[half * 2 + 1];
            to[i * 2 + half] = {{first_of(first), second_of(first), first_of(second), second_of(second)}};
        }
    }
}

/// RMSNorm (Zhang and Sennrich 2019): out = x / sqrt(mean(x²) + eps) × weight. Output row i is from input row `rows[i]`, or from row i if
/// `rows` is null. One thread block per output row; `width` is a multiple of 8.
KERNEL(ROW_THREADS) rms_norm(const float *stream, const u32 *rows, const float *weight, half_t *out, int width, float eps) {
    __shared__ float sums[ROW_THREADS / 32];
    const u64 to = blockIdx.x, from = rows ? rows[to] : to;
    const FourSingles *x = reinterpret_cast<const FourSingles *>(stream + from * width);
    const FourSingles *weights = reinterpret_cast<const FourSingles *>(weight);
    float squares = 0;
    for (int i = threadIdx.x; i < width / 4; i += ROW_THREADS) {
        const FourSingles four = x[i];
#pragma unroll
        for (int j = 0; j < 4; j++) squares += four.numbers[j] * four.numbers[j];
    }
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    block_sync();
    float sum = 0;
    for (int warp = 0; warp < ROW_THREADS / 32; warp++) sum += sums[warp];
    const float factor = 1.0f / sqrtf(sum / width + eps);
    Eight *eights = reinterpret_cast<Eight *>(out + to * width);
    for (int i = threadIdx.x; i < width / 8; i += ROW_THREADS) {
        Eight eight;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const FourSingles four = x[i * 2 + half], by = weights[i * 2 + half];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                eight.pairs[half * 2 + j] = narrow_pair(four.numbers[j * 2] * factor * by.numbers[j * 2],
                                                        four.numbers[j * 2 + 1] * factor * by.numbers[j * 2 + 1]);
            }
        }
        eights[i] = eight;
    }
}

/// RoPE (Su et al. 2021): cosine and sine of every row's rotations, times the magnitude, as [row][pair]. Angles are in double precision,
/// because positions are large, and in half turns, for which sine and cosine need no table in local memory. One thread block per row.
KERNEL(64) rope(const u32 *positions, const double *frequencies, float2 *rotations, double magnitude) {
    const u64 row = blockIdx.x;
    for (int pair = threadIdx.x; pair < HEAD_DIM / 2; pair += 64) {
        const double half_turns = positions[row] * frequencies[pair] * 0.31830988618379067154;
        rotations[row * (HEAD_DIM / 2) + pair] =
            make_float2(static_cast<float>(cospi(half_turns) * magnitude), static_cast<float>(sinpi(half_turns) * magnitude));
    }
}

/// Each thread of `store_kv` has four RoPE pairs of a head. So a head has as many threads as it has fours of pairs, rounded up to a power
/// of two.
constexpr int HEAD_FOURS = HEAD_DIM / 8;
constexpr int HEAD_THREADS = HEAD_FOURS > 8 ? 16 : HEAD_FOURS > 4 ? 8 : HEAD_FOURS > 2 ? 4 : HEAD_FOURS;
constexpr int STORE_THREADS = 128;
constexpr int HEADS_A_BLOCK = STORE_THREADS / HEAD_THREADS;

/// The eight elements that one thread of `store_kv` processes: four pairs.
struct Pairs {
    float first[4], second[4];

    /// Loads the elements of thread `four` of a head, which are two runs of four, or adjacent.
    DEVICE_MEMBER void load(const half_t *head, int four) {
        if (PAIRS_ADJACENT) {
            const Eight eight = reinterpret_cast<const Eight *>(head)[four];
#pragma unroll
            for (int i = 0; i < 4; i++) first[i] = first_of(eight.pairs[i]), second[i] = second_of(eight.pairs[i]);
        } else {
            const Four a = reinterpret_cast<const Four *>(head)[four], b = reinterpret_cast<const Four *>(head)[HEAD_FOURS + four];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                first[2 * i] = first_of(a.pairs[i]), first[2 * i + 1] = second_of(a.pairs[i]);
                second[2 * i] = first_of(b.pairs[i]), second[2 * i + 1] = second_of(b.pairs[i]);
            }
        }
    }

    DEVICE_MEMBER void store(half_t *head, int four) const {
        if (PAIRS_ADJACENT) {
            Eight eight;
#pragma unroll
            for (int i = 0; i < 4; i++) eight.pairs[i] = narrow_pair(first[i], second[i]);
            reinterpret_cast<Eight *>(head)[four] = eight;
        } else {
            Four a, b;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                a.pairs[i] = narrow_pair(first[2 * i], first[2 * i + 1]);
                b.pairs[i] = narrow_pair(second[2 * i], second[2 * i + 1]);
            }
            reinterpret_cast<Four *>(head)[four] = a, reinterpret_cast<Four *>(head)[HEAD_FOURS + four] = b;
        }
    }

    /// The same elements of a list of 32-bit floats.
    DEVICE_MEMBER void load(const float *head, int four) {
        const FourSingles *from = reinterpret_cast<const FourSingles *>(head);
        const FourSingles a = from[PAIRS_ADJACENT ? 2 * four : four], b = from[PAIRS_ADJACENT ? 2 * four + 1 : HEAD_FOURS + four];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            first[i] = PAIRS_ADJACENT ? (i < 2 ? a.numbers[2 * i % 4] : b.numbers[2 * i % 4]) : a.numbers[i];
            second[i] = PAIRS_ADJACENT ? (i < 2 ? a.numbers[(2 * i + 1) % 4] : b.numbers[(2 * i + 1) % 4]) : b.numbers[i];
        }
    }
};

/// Adds biases, normalises and rotates queries and keys, and writes keys and values to their slots of the KV memory; queries are updated in
/// place. HEAD_THREADS threads per row and head. `biases` and the norms may be null. `slots` has block × BLOCK_SIZE + offset in the block for
/// each row, or NO_SLOT.
KERNEL(STORE_THREADS)
store_kv(half_t *qkv, const float *biases, const float *query_norm, const float *key_norm, const float2 *rotations, const u32 *slots, half_t *pool,
         int layer, float eps) {
    constexpr int ALL_HEADS = HEADS + 2 * KV_HEADS;
    const u64 row = blockIdx.x;
    const int head = blockIdx.y * HEADS_A_BLOCK + threadIdx.x / HEAD_THREADS, four = threadIdx.x % HEAD_THREADS;
    const bool present = head < ALL_HEADS && four < HEAD_FOURS;
    const bool is_query = head < HEADS, is_value = head >= HEADS + KV_HEADS;
    half_t *from = qkv + row * QKV_DIM + head * HEAD_DIM;
    Pairs pairs = {}, others;
    if (present) {
        pairs.load(from, four);
        if (biases) {
            others.load(biases + head * HEAD_DIM, four);
#pragma unroll
            for (int i = 0; i < 4; i++) pairs.first[i] += others.first[i], pairs.second[i] += others.second[i];
        }
    }
    // A warp has several heads, so all its threads add the squares of their head.
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) squares += pairs.first[i] * pairs.first[i] + pairs.second[i] * pairs.second[i];
#pragma unroll
    for (int threads = HEAD_THREADS / 2; threads > 0; threads /= 2) squares += shuffle_xor(squares, threads);
    if (!present) return;
    const float *norm = is_query ? query_norm : is_value ? nullptr : key_norm;
    if (norm) {
        const float factor = 1.0f / sqrtf(squares / HEAD_DIM + eps);
        others.load(norm, four);
#pragma unroll
        for (int i = 0; i < 4; i++) pairs.first[i] *= factor * others.first[i], pairs.second[i] *= factor * others.second[i];
    }
    half_t *to = from;
    if (!is_query) {
        const u32 slot = slots[row];
        if (slot == NO_SLOT) return;
        const int kv_head = head - HEADS - (is_value ? KV_HEADS : 0);
        to = pool + kv_offset(slot / BLOCK_SIZE, slot % BLOCK_SIZE, layer, is_value, kv_head);
    }
    if (!is_value) {
        const FourSingles *of_row = reinterpret_cast<const FourSingles *>(rotations + row * (HEAD_DIM / 2) + four * 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const FourSingles two = of_row[i / 2];
            const float cosine = two.numbers[i % 2 * 2], sine = two.numbers[i % 2 * 2 + 1];
            const float first = pairs.first[i], second = pairs.second[i];
            pairs.first[i] = first * cosine - second * sine;
            pairs.second[i] = second * cosine + first * sine;
        }
    }
    pairs.store(to, four);
}

DEVICE float swiglu_of(float gate, float up) { return gate / (1.0f + exp2_fast(gate * -1.44269504f)) * up; }

/// SwiGLU (Shazeer 2020): gate ÷ (1 + e^-gate) × up. A row of `gates` has `ffn` gates (a multiple of 8), then as many numbers of `up`. One
/// thread per eight elements; the blocks of a row have consecutive y.
KERNEL(ROW_THREADS) swiglu(const half_t *gates, half_t *out, int ffn) {
    const u64 row = blockIdx.x;
    const int at = (blockIdx.y * ROW_THREADS + threadIdx.x) * 8;
    if (at >= ffn) return;
    const Eight gate = *reinterpret_cast<const Eight *>(gates + row * 2 * ffn + at);
    const Eight up = *reinterpret_cast<const Eight *>(gates + row * 2 * ffn + ffn + at);
    Eight inner;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        inner.pairs[i] = narrow_pair(swiglu_of(first_of(gate.pairs[i]), first_of(up.pairs[i])),
                                     swiglu_of(second_of(gate.pairs[i]), second_of(up.pairs[i])));
    }
    *reinterpret_cast<Eight *>(out + row * ffn + at) = inner;
}
