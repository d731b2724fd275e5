// From a row of logits to a token, as engine/src/sampling.rs does it on the host: penalties, bias, mask; temperature, min-p, top-k, top-p; the
// draw in the order of the tokens' ids, so that it depends on nothing but the row, the settings and one number from [0, 1).
//
// Nothing is sorted: a threshold that keeps so many tokens, or so much of the weight, is found by bisection over the bits of the weights.
// A block per row. Each warp has a segment of the vocabulary; sums are added in one order, so equal rows give equal tokens.

constexpr int SAMPLE_THREADS = 512;
constexpr int SAMPLE_WARPS = SAMPLE_THREADS / 32;
constexpr u32 NO_TOKEN = 0xffffffffu;
/// As on the host: tokens of this weight (its logarithm) or less are no candidates.
constexpr float LOG_WEIGHT_MIN = -50.0f;

/// How a row's token is drawn. engine/src/cuda/draws.rs writes it.
struct SampleSettings {
    /// Decides the draw.
    double uniform;
    /// 0: the likeliest.
    float temperature;
    float top_p, min_p;
    float frequency_penalty, presence_penalty, repetition_penalty;
    /// 0: all.
    u32 top_k;
    /// Where the row's adjustments begin, and how many there are.
    u32 first_adjustment, adjustments;
    /// Where the row's mask begins (a bit a token, 1: may be drawn); -1: there is none.
    int mask;
    /// Alternatives whose logprobs are wanted; NO_TOKEN: not even the drawn token's.
    u32 top;
    u32 padding;
};
static_assert(sizeof(SampleSettings) == 56, "the host writes 56 bytes");

/// What changes a token's logit: how often it was generated, whether it is in prompt or output, its bias.
struct Adjustment {
    u32 token, count, seen;
    float bias;
};
static_assert(sizeof(Adjustment) == 16, "the host writes 16 bytes");

/// A token with the logarithm of its probability before temperature, penalties and mask.
struct TokenLogprob {
    u32 token;
    float logprob;
};

struct Best {
    float value;
    u32 token;
};

DEVICE Best better(Best a, Best b) { return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a; }

/// A row of numbers and the block's scratch memory.
struct Row {
    float *numbers;
    u32 len;
    double *sums;
    Best *bests;

    DEVICE_MEMBER u32 segment() const { return (len + SAMPLE_WARPS * 32 - 1) / (SAMPLE_WARPS * 32) * 32; }
    DEVICE_MEMBER u32 begin(u32 warp) const { return warp * segment(); }
    DEVICE_MEMBER u32 end(u32 warp) const { return min((warp + 1) * segment(), len); }

    /// The largest number for which `may(token, number)`, the lowest token of equals; in all threads.
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

    /// Leaves every warp's sum of `measure(token, number)` in `sums`, and gives the whole; in all threads.
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

    /// The first token up to which more than `target` is measured; if rounding has it that there is none, the last that measures.
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

/// Candidates that are kept: weights above one with these bits, and of those that are equal to it the tokens up to `last`.
struct Candidates {
    u32 least, last;

    DEVICE_MEMBER bool keeps(u32 token, float weight) const {
        const u32 bits = __float_as_uint(weight);
        return weight > 0 && (bits > least || (bits == least && token <= last));
    }

    /// Keeps, of what is kept, the heaviest that together measure `target` or more. No weight is above 1.
    template <class Measure> DEVICE_MEMBER void narrow_to(Row &row, double target, Measure measure) {
        const Candidates all = *this;
        // Weights of at least `low` measure enough, those of at least `high` do not.
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
        // As many of the equals as are missing, at least one.
        const double wanted = fmax(ceil((target - above) / each), 1.0);
        const auto equal = [&](u32 token, float weight) {
            return all.keeps(token, weight) && __float_as_uint(weight) == low ? 1.0 : 0.0;
        };
        last = row.first_beyond(wanted - 0.5, equal);
        least = low;
    }
};

/// Draws the token of every row of logits. `scratch` has the size of `logits`; `tops` has `top_max` places a row.
KERNEL(SAMPLE_THREADS)
sample(const float *logits, float *scratch, int vocab, const SampleSettings *draws, const Adjustment *adjustments, const u32 *masks,
       TokenLogprob *drawn, TokenLogprob *tops, int top_max) {
    __shared__ double sums[SAMPLE_WARPS];
    __shared__ Best bests[SAMPLE_WARPS];
    const u64 index = blockIdx.x;
    const float *raw = logits + index * vocab;
    const SampleSettings draw = draws[index];
    Row row = {scratch + index * vocab, static_cast<u32>(vocab), sums, bests};
    for (u32 i = threadIdx.x; i < row.len; i += SAMPLE_THREADS) row.numbers[i] = raw[i];
    block_sync();

    double normaliser = 0;
    if (draw.top != NO_TOKEN) {
        Best best = row.largest([](u32, float) { return true; });
        const float max = best.value;
        normaliser = max + log(row.sum([&](u32, float logit) { return static_cast<double>(expf(logit - max)); }));
        for (u32 place = 0; place < draw.top; place++) {
            if (threadIdx.x == 0) tops[index * top_max + place] = {best.token, static_cast<float>(best.value - normaliser)};
            const Best before = best;
            best = row.largest([&](u32 token, float logit) {
                return logit < before.value || (logit == before.value && token > before.token);
            });
        }
    }
    // A token is in the list once: the threads change different numbers.
    for (u32 i = threadIdx.x; i < draw.adjustments; i += SAMPLE_THREADS) {
        const Adjustment change = adjustments[draw.first_adjustment + i];
        float logit = row.numbers[change.token];
        if (change.seen) logit = logit > 0 ? logit / draw.repetition_penalty : logit * draw.repetition_penalty;
        if (change.count) logit -= draw.frequency_penalty * change.count + draw.presence_penalty;
        row.numbers[change.token] = logit + change.bias;
    }
    block_sync();
    const u32 *mask = draw.mask < 0 ? nullptr : masks + draw.mask;
    const auto allowed = [&](u32 token, float) { return !mask || (mask[token / 32] >> (token % 32) & 1); };
    const Best likeliest = row.largest(allowed);
    u32 token = likeliest.token == NO_TOKEN ? 0 : likeliest.token;
    if (draw.temperature > 0 && likeliest.value > -INFINITY_F && likeliest.value < INFINITY_F) {
        const float least = likeliest.value + LOG_WEIGHT_MIN * draw.temperature;
        for (u32 i = threadIdx.x; i < row.len; i += SAMPLE_THREADS) {
            const float logit = row.numbers[i];
            // Where the temperature is so low that the limit is the maximum, the likeliest stay.
            const bool counts = (logit > least || logit == likeliest.value) && allowed(i, logit);
            const float weight = counts ? expf((logit - likeliest.value) / draw.temperature) : 0.0f;
            row.numbers[i] = weight >= draw.min_p ? weight : 0.0f;
        }
        block_sync();
        Candidates kept = {0, NO_TOKEN};
        const auto itself = [&](u32 candidate, float weight) { return kept.keeps(candidate, weight) ? static_cast<double>(weight) : 0.0; };
        const auto one = [&](u32 candidate, float weight) { return kept.keeps(candidate, weight) ? 1.0 : 0.0; };
        if (draw.top_k > 0 && row.sum(one) > draw.top_k) {
            kept.narrow_to(row, draw.top_k, [](float) { return 1.0; });
        }
        if (draw.top_p < 1) {
            const double wanted = draw.top_p * row.sum(itself);
            kept.narrow_to(row, wanted, [](float weight) { return static_cast<double>(weight); });
        }
        token = row.first_beyond(draw.uniform * row.sum(itself), itself);
    }
    if (threadIdx.x == 0) drawn[index] = {token, draw.top == NO_TOKEN ? 0.0f : static_cast<float>(raw[token] - normaliser)};
}
