// Samples a token from a row of logits, with the same rules as engine/src/sampling.rs on the host: penalties, bias, mask; temperature,
// min-p, top-k, top-p; then selection by one random number in [0, 1) over the cumulative weights in the order of token ids. The result
// depends only on the row, the settings and that number.
//
// Nothing is sorted: the threshold that keeps k tokens, or a share p of the weight, is found by bisection over the bits of the weights. A
// thread block computes one row. Each warp has a segment of the vocabulary; sums are added in a fixed order, so equal rows give equal
// tokens.

constexpr int SAMPLE_THREADS = 512;
constexpr int SAMPLE_WARPS = SAMPLE_THREADS / 32;
constexpr u32 NO_TOKEN = 0xffffffffu;
/// Tokens whose weight has this logarithm or less are not candidates. The sampler on the host has the same limit.
constexpr float LOG_WEIGHT_MIN = -50.0f;

/// The settings of a row; written by engine/src/cuda/sampling.rs.
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
    /// Offset of the row's mask in 32-bit words; -1: no mask. A mask has one bit per token, which is 1 if the token is allowed.
    int mask;
    /// Number of alternatives whose logprobs are returned; NO_TOKEN: the sampled token's logprob is not returned either.
    u32 top;
    u32 padding;
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

/// A row of numbers, and the thread block's scratch memory. All threads of the block must call a method together.
struct Row {
    float *numbers;
    u32 len;
    double *sums;
    Best *bests;

    DEVICE_MEMBER u32 segment() const { return (len + SAMPLE_WARPS * 32 - 1) / (SAMPLE_WARPS * 32) * 32; }
    DEVICE_MEMBER u32 begin(u32 warp) const { return warp * segment(); }
    DEVICE_MEMBER u32 end(u32 warp) const { return min((warp + 1) * segment(), len); }

    /// Returns the largest number for which `may(token, number)` is true, and its token; the lowest token if several are equal.
    template <class May> DEVICE_MEMBER Best largest(May may) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        Best best = {-INFINITY_F, NO_TOKEN};
        for (u32 i = begin(warp) + lane; i < end(warp); i += 32) {
            if (may(i, numbers[i])) best = better(best, Best{numbers[i], i});
        }
        for (int lanes = 16; lanes > 0; lanes /= 2) {
            best = better(best, Best{shuffle_xor(best.value, lanes), shuffle_xor(best.token, lanes)});
        }
        block_sync();
        if (lane == 0) bests[warp] = best;
        block_sync();
        best = bests[0];
        for (int w = 1; w < SAMPLE_WARPS; w++) best = better(best, bests[w]);
        return best;
    }

    /// Returns the sum of `measure(token, number)`, and leaves every warp's share in `sums`.
    template <class Measure> DEVICE_MEMBER double sum(Measure measure) {
        const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        double own = 0;
        for (u32 i = begin(warp) + lane; i < end(warp); i += 32) own += measure(i, numbers[i]);
        for (int lanes = 16; lanes > 0; lanes /= 2) own += shuffle_xor(own, lanes);
        block_sync();
        if (lane == 0) sums[warp] = own;
        block_sync();
        double all = 0;
        for (int w = 0; w < SAMPLE_WARPS; w++) all += sums[w];
        return all;
    }

    /// Returns the first token at which the running sum of `measure` exceeds `target`; if there is none because of rounding, the last token
    /// with a measure above 0.
    template <class Measure> DEVICE_MEMBER u32 first_beyond(double target, Measure measure) {
        sum(measure);
        const u32 own = threadIdx.x / 32, lane = threadIdx.x % 32;
        u32 warp = 0, last = 0;
        double before = 0, before_last = 0;
        for (; warp < SAMPLE_WARPS && before + sums[warp] <= target; warp++) {
            if (sums[warp] > 0) last = warp, before_last = before;
            before += sums[warp];
        }
        if (warp == SAMPLE_WARPS) warp = last, before = before_last;
        block_sync();
        if (own == warp) {
            u32 found = NO_TOKEN, last_found = NO_TOKEN;
            for (u32 tile = begin(warp); tile < end(warp) && found == NO_TOKEN; tile += 32) {
                const u32 i = tile + lane;
                const double own_measure = i < end(warp) ? measure(i, numbers[i]) : 0;
                double upto = own_measure;
                for (int lanes = 1; lanes < 32; lanes *= 2) {
                    const double other = shuffle_up(upto, lanes);
                    if (static_cast<int>(lane) >= lanes) upto += other;
                }
                const u32 measuring = ballot(own_measure > 0), beyond = ballot(own_measure > 0 && before + upto > target);
                if (measuring) last_found = tile + 31 - __clz(measuring);
                if (beyond) found = tile + __ffs(beyond) - 1;
                before += shuffle(upto, 31);
            }
            if (lane == 0) bests[0].token = found == NO_TOKEN ? last_found : found;
        }
        block_sync();
        const u32 token = bests[0].token;
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

    /// Keeps the heaviest candidates: as few of them as are needed so that their measures sum to `target` or more. No weight may be above
    /// 1.
    template <class Measure> DEVICE_MEMBER void narrow_to(Row &row, double target, Measure measure) {
        const Candidates all = *this;
        // Invariant: the measures of the candidates whose weight has bits of at least `low` sum to the target or more; with `high` instead
        // of `low` they do not.
        u32 low = 1, high = __float_as_uint(1.0f) + 1;
        const auto from = [&](u32 least_bits, u32 token, float weight) {
            return all.keeps(token, weight) && __float_as_uint(weight) >= least_bits ? measure(weight) : 0.0;
        };
        while (high - low > 1) {
            const u32 middle = low + (high - low) / 2;
            const double held = row.sum([&](u32 token, float weight) { return from(middle, token, weight); });
            if (held >= target) {
                low = middle;
            } else {
                high = middle;
            }
        }
        const double above = row.sum([&](u32 token, float weight) { return from(low + 1, token, weight); });
        const double each = measure(__uint_as_float(low));
        // How many of the candidates whose weight has bits equal to `low` are needed to reach the target; at least one.
        const double wanted = fmax(ceil((target - above) / each), 1.0);
        const auto equal = [&](u32 token, float weight) {
            return all.keeps(token, weight) && __float_as_uint(weight) == low ? 1.0 : 0.0;
        };
        last = row.first_beyond(wanted - 0.5, equal);
        least = low;
    }
};

/// Samples a token for every row of logits ([row][vocab]). `scratch` has the size of `logits`; `tops` is [row][top_max].
KERNEL(SAMPLE_THREADS)
sample(const float *logits, float *scratch, int vocab, const SampleSettings *all_settings, const Adjustment *adjustments, const u32 *masks,
       TokenLogprob *sampled, TokenLogprob *tops, int top_max) {
    __shared__ double sums[SAMPLE_WARPS];
    __shared__ Best bests[SAMPLE_WARPS];
    const u64 index = blockIdx.x;
    const float *raw = logits + index * vocab;
    const SampleSettings settings = all_settings[index];
    Row row = {scratch + index * vocab, static_cast<u32>(vocab), sums, bests};
    for (u32 i = threadIdx.x; i < row.len; i += SAMPLE_THREADS) row.numbers[i] = raw[i];
    block_sync();

    double normaliser = 0;
    if (settings.top != NO_TOKEN) {
        Best best = row.largest([](u32, float) { return true; });
        const float max = best.value;
        normaliser = max + log(row.sum([&](u32, float logit) { return static_cast<double>(expf(logit - max)); }));
        for (u32 place = 0; place < settings.top; place++) {
            if (threadIdx.x == 0) tops[index * top_max + place] = {best.token, static_cast<float>(best.value - normaliser)};
            const Best before = best;
            best = row.largest([&](u32 token, float logit) {
                return logit < before.value || (logit == before.value && token > before.token);
            });
        }
    }
    // Each token occurs in the list of adjustments only once, so the threads modify different numbers.
    for (u32 i = threadIdx.x; i < settings.adjustments; i += SAMPLE_THREADS) {
        const Adjustment change = adjustments[settings.first_adjustment + i];
        float logit = row.numbers[change.token];
        if (change.seen) logit = logit > 0 ? logit / settings.repetition_penalty : logit * settings.repetition_penalty;
        if (change.count) logit -= settings.frequency_penalty * change.count + settings.presence_penalty;
        row.numbers[change.token] = logit + change.bias;
    }
    block_sync();
    const u32 *mask = settings.mask < 0 ? nullptr : masks + settings.mask;
    const auto allowed = [&](u32 token, float) { return !mask || (mask[token / 32] >> (token % 32) & 1); };
    const Best likeliest = row.largest(allowed);
    u32 token = likeliest.token == NO_TOKEN ? 0 : likeliest.token;
    if (settings.temperature > 0 && likeliest.value > -INFINITY_F && likeliest.value < INFINITY_F) {
        const float least = likeliest.value + LOG_WEIGHT_MIN * settings.temperature;
        for (u32 i = threadIdx.x; i < row.len; i += SAMPLE_THREADS) {
            const float logit = row.numbers[i];
            // If the temperature is so low that the limit rounds to the maximum, the likeliest tokens remain candidates.
            const bool counts = (logit > least || logit == likeliest.value) && allowed(i, logit);
            const float weight = counts ? expf((logit - likeliest.value) / settings.temperature) : 0.0f;
            row.numbers[i] = weight >= settings.min_p ? weight : 0.0f;
        }
        block_sync();
        Candidates kept = {0, NO_TOKEN};
        const auto itself = [&](u32 candidate, float weight) { return kept.keeps(candidate, weight) ? static_cast<double>(weight) : 0.0; };
        const auto one = [&](u32 candidate, float weight) { return kept.keeps(candidate, weight) ? 1.0 : 0.0; };
        if (settings.top_k > 0 && row.sum(one) > settings.top_k) {
            kept.narrow_to(row, settings.top_k, [](float) { return 1.0; });
        }
        if (settings.top_p < 1) {
            const double wanted = settings.top_p * row.sum(itself);
            kept.narrow_to(row, wanted, [](float weight) { return static_cast<double>(weight); });
        }
        token = row.first_beyond(settings.uniform * row.sum(itself), itself);
    }
    if (threadIdx.x == 0) sampled[index] = {token, settings.top == NO_TOKEN ? 0.0f : static_cast<float>(raw[token] - normaliser)};
}
