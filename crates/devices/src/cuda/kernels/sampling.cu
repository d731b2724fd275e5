// Samples a token from a row of logits, with the same rules as crates/engine/src/sampling.rs on the host: penalties, bias, mask; temperature,
// min-p, top-k, top-p; then selection by one random number in [0, 1) over the cumulative weights in the order of token ids. The result
// depends only on the row, the settings and that number.
//
// Nothing is sorted: the threshold that keeps k tokens, or a share p of the weight, is found by three histograms over the bits of the
// weights, ten bits at a time. Weights are added as fixed-point numbers, whose sums do not depend on the order, so equal rows give equal
// tokens. A thread block computes one row; each of its warps has a segment of the vocabulary.

constexpr int SAMPLE_THREADS = 512;
constexpr int SAMPLE_WARPS = SAMPLE_THREADS / 32;
constexpr u32 NO_TOKEN = 0xffffffffu;
/// Tokens whose weight has this logarithm or less are not candidates. The sampler on the host has the same limit.
constexpr float LOG_WEIGHT_MIN = -50.0f;

/// The settings of a row; written by crates/devices/src/cuda/sampling.rs.
struct SampleSettings {
    /// The random number in [0, 1) by which the token is selected.
    double uniform;
    /// The number by which logits are divided; 0: the likeliest token is selected.
    float temperature;
    float top_p, min_p;
    float frequency_penalty, presence_penalty, repetition_penalty;
    /// The number of likeliest tokens that are kept; 0: no limit.
    u32 top_k;
    /// The index of the row's first adjustment in the list of all adjustments, and the number of the row's adjustments.
    u32 first_adjustment, adjustments;
    /// Offset of the row's mask in the list of words; NO_TOKEN: no mask. A mask has one bit per token, which is 1 if the token is allowed.
    u32 mask;
    /// Number of alternatives whose logprobs are returned; NO_TOKEN: the sampled token's logprob is not returned either.
    u32 top;
    /// Offset of the alternatives' tokens in the list of words; NO_TOKEN: the alternatives are the likeliest tokens.
    u32 alternatives;
};
static_assert(sizeof(SampleSettings) == 56, "the host writes 56 bytes");

/// The inputs of a token's penalties and bias: how often the token was generated, whether it is in the prompt or the output, and the bias
/// that is added to its logit.
struct Adjustment {
    u32 token, count, seen;
    float bias;
};
static_assert(sizeof(Adjustment) == 16, "the host writes 16 bytes");

/// A token and the logarithm of its probability before temperature, penalties and mask.
struct TokenLogprob {
    u32 token;
    float logprob;
};

struct Best {
    float value;
    u32 token;
};

DEVICE Best better(Best a, Best b) { return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a; }

/// The number of bits of a weight that one pass over the row examines.
constexpr int DIGIT_BITS = 10;
constexpr u32 DIGITS = 1 << DIGIT_BITS;
/// Weights are at most 1, whose bits are less than 2^30.
constexpr int DIGIT_PASSES = 3;
static_assert(DIGITS == 2 * SAMPLE_THREADS, "each thread has two digits");
/// The number of times that a thread loads four numbers before it uses them, so that many loads are in flight.
constexpr u32 LOADED = 4;

/// Returns a weight, which is at most 1, as a fixed-point number. The sum of a vocabulary of 2^24 tokens fits in 64 bits.
DEVICE u64 fixed_point(float weight) { return static_cast<u64>(weight * 1099511627776.0f); }

/// The thread block's scratch memory.
struct SampleShared {
    double shares[SAMPLE_WARPS];
    u64 sums[SAMPLE_WARPS];
    Best bests[SAMPLE_WARPS];
    /// Sums of measures by digit: the lower and the upper halves.
    u32 low[DIGITS], high[DIGITS];
    u64 above;
    u32 found;
};

/// A row of numbers. All threads of the block must call a method together.
struct Row {
    float *numbers;
    u32 len;
    SampleShared *shared;

    DEVICE_MEMBER u32 segment() const { return (len + SAMPLE_WARPS * 128 - 1) / (SAMPLE_WARPS * 128) * 128; }
    DEVICE_MEMBER u32 begin(u32 warp) const { return min(warp * segment(), len); }
    DEVICE_MEMBER u32 end(u32 warp) const { return min((warp + 1) * segment(), len); }

    /// Calls `visit(token, number)` for the thread's share of the row.
    template <class Visit> DEVICE_MEMBER void each(Visit visit) const {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, end_of_warp = end(warp);
        // If rows are aligned to 16 bytes, a thread loads four consecutive numbers at a time; otherwise, consecutive threads load one each.
        const bool aligned = len % 4 == 0;
        const u32 distance = aligned ? 1 : 32;
        for (u32 first = begin(warp) + (aligned ? 4 * lane : lane); first < end_of_warp; first += 128 * LOADED) {
            FourSingles loaded[LOADED];
#pragma unroll
            for (u32 j = 0; j < LOADED; j++) {
                const u32 at = first + 128 * j;
                if (aligned) {
                    if (at < end_of_warp) loaded[j] = *reinterpret_cast<const FourSingles *>(numbers + at);
                } else {
#pragma unroll
                    for (u32 k = 0; k < 4; k++) loaded[j].numbers[k] = at + 32 * k < end_of_warp ? numbers[at + 32 * k] : 0.0f;
                }
            }
#pragma unroll
            for (u32 j = 0; j < LOADED; j++) {
#pragma unroll
                for (u32 k = 0; k < 4; k++) {
                    const u32 token = first + 128 * j + distance * k;
                    if (token < end_of_warp) visit(token, loaded[j].numbers[k]);
                }
            }
        }
    }

    /// Returns the largest number for which `may(token, number)` is true, and its token; the lowest token if several are equal.
    template <class May> DEVICE_MEMBER Best largest(May may) const {
        Best best = {-INFINITY_F, NO_TOKEN};
        each([&](u32 token, float number) {
            if (may(token, number)) best = better(best, Best{number, token});
        });
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            best = better(best, Best{shuffle_xor(best.value, lanes), shuffle_xor(best.token, lanes)});
        }
        block_sync();
        if (threadIdx.x % 32 == 0) shared->bests[threadIdx.x / 32] = best;
        block_sync();
        best = shared->bests[0];
        for (int w = 1; w < SAMPLE_WARPS; w++) best = better(best, shared->bests[w]);
        return best;
    }

    /// Returns the sum of `measure(number)`, which is added in a fixed order.
    template <class Measure> DEVICE_MEMBER double sum(Measure measure) const {
        double own = 0;
        each([&](u32, float number) { own += measure(number); });
        for (int lanes = 16; lanes > 0; lanes /= 2) own += shuffle_xor(own, lanes);
        block_sync();
        if (threadIdx.x % 32 == 0) shared->shares[threadIdx.x / 32] = own;
        block_sync();
        double all = 0;
        for (int w = 0; w < SAMPLE_WARPS; w++) all += shared->shares[w];
        return all;
    }

    /// Returns the sum of the threads' numbers before this thread's one, and sets `total` to the sum of all.
    DEVICE_MEMBER u64 sum_before(u64 own, u64 &total) const {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        u64 upto = own;
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            const u64 other = shuffle_up(upto, lanes);
            if (static_cast<int>(lane) >= lanes) upto += other;
        }
        block_sync();
        if (lane == 31) shared->sums[warp] = upto;
        block_sync();
        u64 before = upto - own;
        total = 0;
        for (u32 w = 0; w < SAMPLE_WARPS; w++) {
            if (w == warp) before += total;
            total += shared->sums[w];
        }
        return before;
    }

    /// Returns the first token at which the running sum of `measure(token, number)` exceeds `target(total)`, which is less than the sum of
    /// all measures.
    template <class Target, class Measure> DEVICE_MEMBER u32 first_beyond(Target target, Measure measure) const {
        u64 own = 0;
        each([&](u32 token, float number) { own += measure(token, number); });
        for (int lanes = 16; lanes > 0; lanes /= 2) own += shuffle_xor(own, lanes);
        block_sync();
        if (threadIdx.x % 32 == 0) shared->sums[threadIdx.x / 32] = own;
        block_sync();
        u64 total = 0, before = 0;
        for (u32 w = 0; w < SAMPLE_WARPS; w++) total += shared->sums[w];
        const u64 wanted = target(total);
        u32 warp = 0;
        while (warp + 1 < SAMPLE_WARPS && before + shared->sums[warp] <= wanted) before += shared->sums[warp++];
        // All threads share the numbers of the warp in whose segment the token is.
        const u32 count = (segment() + SAMPLE_THREADS - 1) / SAMPLE_THREADS;
        const u32 first = min(begin(warp) + threadIdx.x * count, end(warp)), last = min(first + count, end(warp));
        own = 0;
        for (u32 i = first; i < last; i++) own += measure(i, numbers[i]);
        u64 all;
        u64 running = before + sum_before(own, all);
        if (running <= wanted && running + own > wanted) {
            u32 token = first;
            for (; running + measure(token, numbers[token]) <= wanted; token++) running += measure(token, numbers[token]);
            shared->found = token;
        }
        block_sync();
        const u32 token = shared->found;
        block_sync();
        return token;
    }
};

/// A set of candidates. The bits of a weight are compared as an integer: a token is in the set if its weight's bits are above `least`, or
/// equal `least` while the token's id is at most `last`.
struct Candidates {
    u32 least, last;

    DEVICE_MEMBER bool keeps(u32 token, float weight) const {
        const u32 bits = __float_as_uint(weight);
        return weight > 0 && (bits > least || (bits == least && token <= last));
    }

    /// Keeps the heaviest candidates: as few of them as are needed so that their measures sum to `target(total)` or more. If the target is
    /// 0, keeps all. The target is at most the total.
    template <class Target, class Measure> DEVICE_MEMBER void narrow_to(const Row &row, Target target, Measure measure) {
        const Candidates all = *this;
        SampleShared &shared = *row.shared;
        // The bits of the threshold that are known so far, and the measures of the candidates above them.
        u32 known = 0;
        u64 above = 0, wanted = 0;
        for (int pass = 0; pass < DIGIT_PASSES; pass++) {
            const int shift = DIGIT_BITS * (DIGIT_PASSES - 1 - pass);
            block_sync();
            for (u32 digit = threadIdx.x; digit < DIGITS; digit += SAMPLE_THREADS) shared.low[digit] = 0, shared.high[digit] = 0;
            block_sync();
            row.each([&](u32 token, float weight) {
                const u32 bits = __float_as_uint(weight);
                if (!all.keeps(token, weight) || bits >> shift >> DIGIT_BITS != known >> shift >> DIGIT_BITS) return;
                add_shared(&shared.low[(bits >> shift) % DIGITS], &shared.high[(bits >> shift) % DIGITS], measure(weight));
            });
            block_sync();
            // Each thread has two digits; the first thread has the largest ones.
            const u32 upper = DIGITS - 1 - 2 * threadIdx.x;
            const auto held = [&](u32 digit) { return static_cast<u64>(shared.high[digit]) << 32 | shared.low[digit]; };
            const u64 sums[2] = {held(upper), held(upper - 1)};
            u64 total;
            u64 before = above + row.sum_before(sums[0] + sums[1], total);
            if (pass == 0) {
                wanted = target(total);
                if (wanted == 0) return;
            }
            for (u32 i = 0; i < 2; i++) {
                if (before < wanted && before + sums[i] >= wanted) shared.found = upper - i, shared.above = before;
                before += sums[i];
            }
            block_sync();
            known |= shared.found << shift;
            above = shared.above;
        }
        // The number of candidates with exactly these weight bits that are needed.
        const u64 each = measure(__uint_as_float(known)), needed = (wanted - above + each - 1) / each;
        last = row.first_beyond([&](u64) { return needed - 1; },
                                [&](u32 token, float weight) -> u64 { return all.keeps(token, weight) && __float_as_uint(weight) == known; });
        least = known;
    }
};

/// Samples a token for every row of logits ([row][vocab]). `scratch` has the size of `logits`; `tops` is [row][top_max]; `words` is the list of
/// words, with masks and lists of tokens.
KERNEL_ALONE(SAMPLE_THREADS)
sample(const float *logits, float *scratch, int vocab, const SampleSettings *all_settings, const Adjustment *adjustments, const u32 *words,
       TokenLogprob *sampled, TokenLogprob *tops, int top_max) {
    __shared__ SampleShared shared;
    const u64 index = blockIdx.x;
    const float *raw = logits + index * vocab;
    const SampleSettings &settings = all_settings[index];
    const Row row = {scratch + index * vocab, static_cast<u32>(vocab), &shared};
    const Row original = {const_cast<float *>(raw), row.len, &shared};

    double normaliser = 0;
    const auto logprob = [&](u32 token) { return token < row.len ? static_cast<float>(raw[token] - normaliser) : 0.0f; };
    if (settings.top != NO_TOKEN) {
        Best best = original.largest([](u32, float) { return true; });
        const float max = best.value;
        normaliser = max + log(original.sum([&](float logit) { return static_cast<double>(expf(logit - max)); }));
        for (u32 place = 0; place < settings.top; place++) {
            const u32 token = settings.alternatives == NO_TOKEN ? best.token : words[settings.alternatives + place];
            if (threadIdx.x == 0) tops[index * top_max + place] = {token, logprob(token)};
            if (settings.alternatives != NO_TOKEN) continue;
            const Best before = best;
            best = original.largest([&](u32 token, float logit) {
                return logit < before.value || (logit == before.value && token > before.token);
            });
        }
    }
    const bool adjusted = settings.adjustments > 0;
    if (adjusted) original.each([&](u32 token, float logit) { row.numbers[token] = logit; });
    block_sync();
    // Each token occurs in the list of adjustments only once, so the threads modify different numbers.
    for (u32 i = threadIdx.x; i < settings.adjustments; i += SAMPLE_THREADS) {
        const Adjustment change = adjustments[settings.first_adjustment + i];
        float logit = row.numbers[change.token];
        if (change.seen) logit = logit > 0 ? logit / settings.repetition_penalty : logit * settings.repetition_penalty;
        if (change.count) logit -= settings.frequency_penalty * change.count + settings.presence_penalty;
        row.numbers[change.token] = logit + change.bias;
    }
    block_sync();
    const u32 *mask = settings.mask == NO_TOKEN ? nullptr : words + settings.mask;
    const auto allowed = [&](u32 token, float) { return !mask || (mask[token / 32] >> (token % 32) & 1); };
    const Row changed = {adjusted ? row.numbers : original.numbers, row.len, &shared};
    const Best likeliest = changed.largest(allowed);
    u32 token = likeliest.token;
    // Without a likeliest token, all tokens are excluded, or the logits are NaNs, for which no token is returned.
    if (token == NO_TOKEN && raw[0] == raw[0]) token = 0;
    if (settings.temperature > 0 && likeliest.value > -INFINITY_F && likeliest.value < INFINITY_F) {
        // Held in registers: as far as the compiler knows, the stores below could change the settings.
        const float temperature = settings.temperature, min_p = settings.min_p;
        const float least = likeliest.value + LOG_WEIGHT_MIN * temperature;
        changed.each([&](u32 candidate, float logit) {
            // If the temperature is so low that `least` is rounded to the maximum, the second condition keeps the likeliest tokens.
            const bool counts = (logit > least || logit == likeliest.value) && allowed(candidate, logit);
            const float weight = counts ? expf((logit - likeliest.value) / temperature) : 0.0f;
            row.numbers[candidate] = weight >= min_p ? weight : 0.0f;
        });
        block_sync();
        Candidates kept = {0, NO_TOKEN};
        if (settings.top_k > 0) {
            kept.narrow_to(row, [&](u64 count) { return count > settings.top_k ? static_cast<u64>(settings.top_k) : 0; },
                           [](float) -> u64 { return 1; });
        }
        if (settings.top_p < 1) {
            const auto share = [&](u64 total) {
                const u64 wanted = static_cast<u64>(ceil(static_cast<double>(settings.top_p) * static_cast<double>(total)));
                return max(min(wanted, total), static_cast<u64>(1));
            };
            kept.narrow_to(row, share, [](float weight) { return fixed_point(weight); });
        }
        token = row.first_beyond(
            [&](u64 total) { return min(static_cast<u64>(settings.uniform * static_cast<double>(total)), total - 1); },
            [&](u32 candidate, float weight) -> u64 { return kept.keeps(candidate, weight) ? fixed_point(weight) : 0; });
    }
    if (threadIdx.x == 0) sampled[index] = {token, settings.top == NO_TOKEN ? 0.0f : logprob(token)};
}
