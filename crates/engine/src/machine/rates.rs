//! Estimates the speed of the device from the latest steps: a fixed time for each step and a time for each token.
//!
//! There are two linear functions (*lines*): the time for a number of prompt tokens, and the time for a number of decoding sequences. Each is fitted
//! by weighted least squares. If a step computes both, each line is fitted to the step's duration minus the time that the other line predicts.
//! Without enough steps there is no rate: a step of a few tokens takes little more than the fixed time, so its time per token says nothing about a
//! longer prompt.

use std::time::Duration;
use tandem_kv::StepStats;

/// Prefill and decode speed, measured over the latest steps.
#[derive(Debug, Default)]
pub(super) struct Rates {
    prefill: Regression,
    decode: Regression,
    prefill_measurements: u64,
    /// The mean of [`Rates::share_of`] in the latest steps with prompts; 0 while it is unknown.
    prompt_share: f64,
}

/// The factor by which the weights of older steps are multiplied after each long step with prompt tokens, or after each step with decoding
/// sequences.
const DECAY: f64 = 0.9;

/// A step with at least this many prompt tokens is *long*. Short steps have about equal weights. The times of long steps vary more, so their weights
/// decrease with the square of their length. If the mean length of the steps is at least this number, there is a rate even if all steps are equally
/// long, because then the fixed time is small compared with the time for the tokens.
const LONG_STEP_TOKENS: f64 = 64.0;

/// A line's slope is determined only if the lengths of the steps differ enough: the weighted sum of the squared deviations of the lengths from their
/// mean must reach this number. One very long step among many steps of a few tokens contributes about four times this number.
const SPREAD_MIN: f64 = LONG_STEP_TOKENS * LONG_STEP_TOKENS / 4.0;

/// A slope is significant if it exceeds its standard error at least by this factor.
const STANDARD_ERRORS_MIN: f64 = 3.0;

/// The weight of the latest step in the mean share of prompts. It is small, because the router estimates the next seconds from the mean, not one
/// step.
const SHARE_WEIGHT: f64 = 0.05;

/// The default limit on the time of a step with prompts, as a multiple of the time of a step that only continues the same sequences.
const ITL_STEPS: f64 = 16.0;

/// The number of classes of steps of similar length. Each class begins at twice the length at which the previous class begins.
const LENGTH_CLASSES: usize = 16;

impl Rates {
    /// Adds a step to the evidence. `chunk_budget` is the number of prompt tokens in a full step, and `step_budget` the number that this step could
    /// have computed.
    pub fn record(&mut self, stats: &StepStats, chunk_budget: u32, step_budget: usize) {
        let seconds = stats.duration.as_secs_f64();
        let (tokens, sequences) = (f64::from(stats.prefill_tokens), f64::from(stats.decode_tokens));
        // A step with prompt tokens and decoding sequences is evidence for one of the two lines only if the time that the other line explains is
        // known. For decoding sequences a mean time suffices; for prompt tokens it does not, because their time per token depends on the length
        // of the step.
        let decode_part = || self.decode_seconds(stats.decode_tokens as usize);
        let prefill_seconds = if sequences > 0.0 { decode_part().map(|part| seconds - part) } else { Some(seconds) };
        let prefill_part = || self.prefill.line().or_else(|| self.prefill.scaled()).map(|line| line.seconds(tokens));
        let decode_seconds = if tokens > 0.0 { prefill_part().map(|part| seconds - part) } else { Some(seconds) };
        if let Some(prefill_seconds) = prefill_seconds.filter(|seconds| tokens > 0.0 && *seconds > 0.0) {
            // The weights of earlier steps decay after a short step only in proportion to its tokens, so that many short steps do not
            // displace a long step.
            let is_long = tokens >= LONG_STEP_TOKENS.min(f64::from(chunk_budget));
            let decay = if is_long { DECAY } else { DECAY.powf(tokens / f64::from(chunk_budget)) };
            let is_added = self.prefill.record(tokens, prefill_seconds, decay);
            let is_full = tokens >= LONG_STEP_TOKENS.min(step_budget as f64);
            self.prefill_measurements += u64::from(is_added && is_full);
        }
        // In a step with a long chunk, the decode time is the small difference between the duration and the predicted prefill time, and may
        // be negative by chance. Negative values are included, because the mean would be too high without them. Such steps are used only until there
        // are steps without prompts: any division of the time between the two lines fits such steps, so both lines would drift.
        let is_needed = tokens == 0.0 || self.decode.mean().is_none();
        if let Some(decode_seconds) = decode_seconds.filter(|_| sequences > 0.0 && is_needed) {
            self.decode.record(sequences, decode_seconds, DECAY);
        }
    }

    /// Returns the prompt tokens per second, not counting the fixed time of a step; 0 while it is unknown.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        self.prefill.rate().map_or(0.0, |line| line.each.recip())
    }

    /// Returns the number of full steps from which the rate was computed: steps with [`LONG_STEP_TOKENS`] prompt tokens, or with the step's budget if
    /// that is less. Other steps hardly displace this evidence, so while only they run, the rate is as old as the last full step.
    pub fn prefill_measurements(&self) -> u64 {
        self.prefill_measurements
    }

    /// Returns the fixed time of a step that computes prompt tokens, in milliseconds; 0 while it is unknown.
    pub fn prefill_fixed_ms(&self) -> f64 {
        self.prefill.rate().map_or(0.0, |line| line.fixed * 1e3)
    }

    /// Returns how many prompt tokens a step may compute that also continues `sequences` sequences, so that it takes no longer than `itl_max`; if
    /// that is `None`, no longer than [`ITL_STEPS`] steps without prompts. Prompt tokens get at least half of the step. Returns `None` while the
    /// rates are unknown.
    pub fn prompt_tokens(&self, sequences: usize, itl_max: Option<Duration>) -> Option<usize> {
        let (prefill, decode) = (self.latest_rate()?, self.decode_seconds(sequences).filter(|seconds| *seconds > 0.0)?);
        let step = itl_max.map_or(decode * ITL_STEPS, |itl_max| itl_max.as_secs_f64());
        let other = decode + prefill.fixed;
        Some(((step - other).max(other) / prefill.each) as usize)
    }

    /// Returns the fraction of a full step's time that prompt tokens have lately taken; 0 while it is unknown.
    pub fn prompt_share(&self) -> f64 {
        self.prompt_share
    }

    /// Records the share of a step that continued `sequences` sequences and had capacity for `tokens` prompt tokens.
    pub fn record_share(&mut self, tokens: usize, sequences: usize) {
        let Some(share) = self.share_of(tokens, sequences) else { return };
        let before = if self.prompt_share > 0.0 { self.prompt_share } else { share };
        self.prompt_share = before + SHARE_WEIGHT * (share - before);
    }

    /// Returns the part of a step's time that `tokens` prompt tokens take if the step also continues `sequences` sequences. The fixed time of
    /// the step is not included, because the router adds it. In a step without sequences the result is 1.
    fn share_of(&self, tokens: usize, sequences: usize) -> Option<f64> {
        if sequences == 0 {
            return Some(1.0);
        }
        let (prefill, decode) = self.latest_rate().zip(self.decode_seconds(sequences))?;
        let seconds = prefill.each * tokens as f64;
        Some(seconds / (seconds + prefill.fixed + decode))
    }

    /// Returns the line for prompt tokens. If the latest steps were too short to determine a line, returns the last line, scaled to these steps.
    fn latest_rate(&self) -> Option<Line> {
        self.prefill.rate().or_else(|| self.prefill.scaled())
    }

    /// Returns the time in seconds that a step takes to continue `sequences` sequences.
    fn decode_seconds(&self, sequences: usize) -> Option<f64> {
        let seconds = self.decode.line().map(|line| line.seconds(sequences as f64)).or_else(|| self.decode.mean())?;
        Some(seconds.max(0.0))
    }

    /// Returns the mean time of the latest steps that continue sequences, in milliseconds; 0 while it is unknown.
    pub fn decode_step_ms(&self) -> f64 {
        self.decode.mean().map_or(0.0, |seconds| seconds.max(0.0) * 1e3)
    }
}

/// The length of a step (prompt tokens or decoding sequences) and its duration in seconds.
type Observation = (f64, f64);

/// Weighted least squares over steps, with decaying weights. The duration of a step, `y` seconds, is a linear function of its length, `x` tokens or
/// sequences.
#[derive(Debug, Default)]
struct Regression {
    /// The latest two steps of each length class, the older first. The next step of the class is compared with them.
    latest: [Vec<Observation>; LENGTH_CLASSES],
    /// The last line through steps of different lengths.
    last_line: Option<Line>,
    samples: f64,
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
    yy: f64,
}

/// The duration of a step in seconds as a function of its length: a fixed time, and a time for each token or sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Line {
    fixed: f64,
    each: f64,
}

impl Regression {
    /// Takes the latest three steps of similar length, and adds the one with the median time per token to the sums. Returns false if there are fewer
    /// than three. A single outlier, such as a stalled step or a device's first step, is never the median.
    fn record(&mut self, x: f64, y: f64, decay: f64) -> bool {
        let latest = &mut self.latest[(x.log2() as usize).min(LENGTH_CLASSES - 1)];
        latest.push((x, y));
        let [first, second, third] = latest[..] else { return false };
        let mut sorted = [first, second, third];
        sorted.sort_by(|(x, y), (other_x, other_y)| (y / x).total_cmp(&(other_y / other_x)));
        latest.remove(0);
        self.add(sorted[1], decay);
        true
    }

    fn add(&mut self, (x, y): Observation, decay: f64) {
        let weight = (1.0 + x / LONG_STEP_TOKENS).powi(-2);
        let added = [1.0, weight, weight * x, weight * y, weight * x * x, weight * x * y, weight * y * y];
        let Self { samples, weight, x, y, xx, xy, yy, .. } = self;
        for (sum, added) in [samples, weight, x, y, xx, xy, yy].into_iter().zip(added) {
            *sum = *sum * decay + added;
        }
        self.last_line = self.line().or(self.last_line);
    }

    fn mean(&self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.y / self.weight)
    }

    /// Returns the line through the steps. If the steps are long, but their lengths are too similar to determine a slope, returns the last
    /// line, scaled to these steps. If there is no last line, returns the line through the steps and the origin, whose fixed time is 0.
    /// Returns `None` if there is not enough evidence.
    fn rate(&self) -> Option<Line> {
        let is_long = || self.weight > 0.0 && self.x / self.weight >= LONG_STEP_TOKENS;
        self.line().or_else(|| is_long().then(|| self.scaled().unwrap_or_else(|| self.through_zero())))
    }

    /// Returns the last line through steps of different lengths, scaled by a factor so that it fits the mean of the latest steps. The factor applies
    /// to the fixed time and to the slope, because a device that becomes slower takes longer for both.
    fn scaled(&self) -> Option<Line> {
        let last = self.last_line?;
        let factor = (self.y / self.weight) / last.seconds(self.x / self.weight);
        Some(Line { fixed: last.fixed * factor, each: last.each * factor })
    }

    /// Returns the line through steps of different lengths; `None` while the lengths are too similar, or the times vary too much.
    fn line(&self) -> Option<Line> {
        if self.weight <= 0.0 {
            return None;
        }
        let (mean_x, mean_y) = (self.x / self.weight, self.y / self.weight);
        let spread = self.xx - self.x * mean_x;
        let covariation = self.xy - self.x * mean_y;
        let slope = covariation / spread;
        let unexplained = (self.yy - self.y * mean_y - slope * covariation).max(0.0) / (self.samples - 2.0).max(1.0);
        let is_significant = spread >= SPREAD_MIN && slope > STANDARD_ERRORS_MIN * (unexplained / spread).sqrt();
        let fixed = mean_y - slope * mean_x;
        is_significant.then(|| if fixed > 0.0 { Line { fixed, each: slope } } else { self.through_zero() })
    }

    fn through_zero(&self) -> Line {
        Line { fixed: 0.0, each: self.xy / self.xx }
    }
}

impl Line {
    fn seconds(self, x: f64) -> f64 {
        self.fixed + self.each * x
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};
    use std::time::Duration;

    const BUDGET: u32 = 512;

    /// Returns the duration of a step on the simulator's default device, in seconds: 4 ms plus 1 s per 20,000 tokens if the step has prompt
    /// tokens, and in addition 6 ms plus 0.1 ms per sequence if it has decoding sequences.
    fn seconds(tokens: u32, sequences: u32) -> f64 {
        let prefill = if tokens > 0 { 0.004 + f64::from(tokens) / 20_000.0 } else { 0.0 };
        prefill + if sequences > 0 { 0.006 + 0.000_1 * f64::from(sequences) } else { 0.0 }
    }

    fn step(rates: &mut Rates, tokens: u32, sequences: u32, slower: f64) {
        let duration = Duration::from_secs_f64(seconds(tokens, sequences) * slower);
        rates.record(&StepStats { prefill_tokens: tokens, decode_tokens: sequences, duration }, BUDGET, BUDGET as usize);
    }

    fn after(steps: &[(u32, u32)]) -> Rates {
        let mut rates = Rates::default();
        steps.iter().for_each(|(tokens, sequences)| step(&mut rates, *tokens, *sequences, 1.0));
        rates
    }

    fn is_near(value: f64, expected: f64, tolerance: f64) -> bool {
        (value / expected - 1.0).abs() <= tolerance
    }

    #[test]
    fn prefill_rate_is_unknown_after_tiny_prompts_only() {
        let mut rates = after(&vec![(1, 0); 1_000]);
        assert_eq!((rates.prefill_tokens_per_second(), rates.prefill_fixed_ms()), (0.0, 0.0));
        // Once there is a rate, tiny prompts do not change it.
        (0..3).for_each(|_| step(&mut rates, 400, 0, 1.0));
        (0..3_000).for_each(|_| step(&mut rates, 2, 0, 1.0));
        assert!(is_near(rates.prefill_tokens_per_second(), 20_000.0, 0.01), "{rates:?}");
        assert!(is_near(rates.prefill_fixed_ms(), 4.0, 0.01), "{rates:?}");
        // Without new evidence, the rate becomes unknown after some time.
        (0..100_000).for_each(|_| step(&mut rates, 2, 0, 1.0));
        assert_eq!(rates.prefill_tokens_per_second(), 0.0, "{rates:?}");
    }

    #[test]
    fn short_steps_are_not_counted_as_measurements_of_the_rate() {
        let mut rates = after(&[(512, 0); 3]);
        assert_eq!(rates.prefill_measurements(), 1);
        (0..3_000).for_each(|at| step(&mut rates, 1 + at % 63, 0, 1.0));
        assert_eq!(rates.prefill_measurements(), 1);
        step(&mut rates, 512, 0, 1.0);
        assert_eq!(rates.prefill_measurements(), 2);
        // If the chunk budget is smaller than a long step, a full chunk is treated as a long step.
        let mut rates = Rates::default();
        let stats = StepStats { prefill_tokens: 16, decode_tokens: 0, duration: Duration::from_millis(5) };
        (0..3).for_each(|_| rates.record(&stats, 16, 16));
        assert_eq!(rates.prefill_measurements(), 1);
    }

    #[test]
    fn rate_of_steps_of_equal_length_includes_the_fixed_time() {
        let rates = after(&[(512, 0); 3]);
        assert!(is_near(rates.prefill_tokens_per_second(), 512.0 / seconds(512, 0), 0.001), "{rates:?}");
        assert_eq!(rates.prefill_fixed_ms(), 0.0);
        assert_eq!(after(&[(512, 0); 2]).prefill_tokens_per_second(), 0.0, "two steps are not enough evidence");
    }

    #[test]
    fn steps_with_prefill_and_decode_update_both_rates() {
        let mut steps = vec![(0, 20); 3];
        steps.extend((0..50).map(|at| (1 + at * 97 % 512, 20)));
        let rates = after(&steps);
        assert!(is_near(rates.prefill_tokens_per_second(), 20_000.0, 0.02), "{rates:?}");
        assert!(is_near(rates.prefill_fixed_ms(), 4.0, 0.02), "{rates:?}");
        assert!(is_near(rates.decode_step_ms(), 8.0, 0.02), "{rates:?}");
        // If all steps have prompt tokens and decoding sequences, neither the time of prompt tokens nor that of sequences can be determined.
        let rates = after(&steps[3..]);
        assert_eq!((rates.prefill_tokens_per_second(), rates.decode_step_ms()), (0.0, 0.0));
    }

    #[test]
    fn prompt_tokens_of_a_step_follow_from_the_limit_on_the_time_between_tokens() {
        let (answers, prompts) = (vec![(0, 20); 3], (0..50).map(|at| (1 + at * 97 % 512, 20)));
        let rates = after(&answers.into_iter().chain(prompts).collect::<Vec<_>>());
        // A step takes 8 ms for 20 answers, and a fixed time of 4 ms. Prompt tokens get the rest of 16 × 8 ms or of `itl_max`, but at least 12 ms.
        for (itl_max, tokens) in [(None, 2_320.0), (Some(30), 360.0), (Some(20), 240.0), (Some(1), 240.0)] {
            let found = rates.prompt_tokens(20, itl_max.map(Duration::from_millis)).expect("both times were measured");
            assert!(is_near(found as f64, tokens, 0.03), "{itl_max:?}: {found}");
        }
        assert_eq!(after(&[(512, 0); 9]).prompt_tokens(20, None), None, "no answer was measured");
        let mut no_time = Rates::default();
        let stats = |tokens, sequences, ms| StepStats {
            prefill_tokens: tokens,
            decode_tokens: sequences,
            duration: Duration::from_millis(ms),
        };
        (0..9).for_each(|_| no_time.record(&stats(512, 0, 30), BUDGET, 512));
        (0..9).for_each(|_| no_time.record(&stats(0, 1, 0), BUDGET, 512));
        assert_eq!(no_time.prompt_tokens(1, None), None, "answers that take no time leave no limit");
    }

    #[test]
    fn share_of_prompts_is_the_mean_of_the_latest_steps_with_prompts() {
        let mut rates = after(&[(0, 20), (0, 20), (0, 20), (200, 0), (400, 0), (500, 0), (200, 0), (400, 0), (500, 0)].repeat(3));
        assert_eq!(rates.prompt_share(), 0.0);
        // Of a step of 30 ms, 360 prompt tokens take 18 ms, answers 8 ms and the fixed time 4 ms.
        (0..200).for_each(|_| rates.record_share(360, 20));
        assert!(is_near(rates.prompt_share(), 18.0 / 30.0, 0.02), "{}", rates.prompt_share());
        rates.record_share(512, 0);
        assert!(is_near(rates.prompt_share(), 0.95 * 0.6 + 0.05, 0.02), "one step changes little: {}", rates.prompt_share());
        (0..200).for_each(|_| rates.record_share(512, 0));
        assert!(is_near(rates.prompt_share(), 1.0, 0.01), "{}", rates.prompt_share());
    }

    #[test]
    fn limit_on_prompt_tokens_is_stable_while_every_step_has_prompts_and_times_vary() {
        let (mut rates, mut random) = (after(&[(0, 20); 9]), 1_u64);
        (0..9).for_each(|at| step(&mut rates, 400 + at % 3 * 50, 0, 1.0));
        for at in 0..3_000 {
            random = tandem_kv::mix(random);
            let noise = 0.97 + 0.06 * (random % 1_000) as f64 / 1e3;
            let tokens = rates.prompt_tokens(20, None).expect("both times were measured");
            assert!((1_900..2_700).contains(&tokens), "step {at}: {tokens}");
            step(&mut rates, if at % 4 == 0 { 1_500 } else { tokens as u32 }, 20, noise);
        }
    }

    #[test]
    fn short_full_steps_keep_the_limit_on_prompt_tokens_and_count_as_measurements() {
        // A slow device takes 20 ms for a prompt token and 60 ms for a decoding sequence.
        let slow = |tokens: u32, sequences: u32| StepStats {
            prefill_tokens: tokens,
            decode_tokens: sequences,
            duration: Duration::from_millis(u64::from(20 * tokens + 60 * sequences)),
        };
        let mut rates = Rates::default();
        (0..9).for_each(|_| rates.record(&slow(0, 1), BUDGET, 512));
        (0..9).for_each(|at| rates.record(&slow(300 + at * 20, 0), BUDGET, 512));
        let before = rates.prefill_measurements();
        for _ in 0..2_000 {
            let tokens = rates.prompt_tokens(1, None).expect("the rate is not forgotten");
            assert!((40..=50).contains(&tokens), "{tokens}");
            rates.record(&slow(tokens as u32, 1), BUDGET, tokens);
        }
        assert!(rates.prefill_measurements() > before + 1_900, "full steps are measurements");
    }

    #[test]
    fn fixed_time_of_steps_is_measured_although_all_steps_are_short() {
        let mut rates = after(&[(512, 0), (512, 0), (512, 0), (92, 0)].repeat(10));
        // Each document is cached except for 92 tokens. With the fixed time, their step takes almost twice as long as 92 tokens of a long step.
        for _ in 0..1_000 {
            step(&mut rates, 92, 0, 1.0);
            assert!(is_near(rates.prefill_tokens_per_second(), 20_000.0, 0.01), "{rates:?}");
            assert!(is_near(rates.prefill_fixed_ms(), 4.0, 0.01), "{rates:?}");
        }
        (0..25).for_each(|_| step(&mut rates, 92, 0, 3.0));
        assert!(is_near(rates.prefill_tokens_per_second(), 20_000.0 / 3.0, 0.1), "{rates:?}");
        assert!(is_near(rates.prefill_fixed_ms(), 12.0, 0.1), "{rates:?}");
    }

    #[test]
    fn rates_follow_a_device_that_becomes_slower() {
        let mut rates = after(&[(512, 0); 50]);
        (0..80).for_each(|at| step(&mut rates, 100 + at % 40 * 10, 0, 3.0));
        assert!(is_near(rates.prefill_tokens_per_second(), 20_000.0 / 3.0, 0.05), "{rates:?}");
        let mut rates = after(&[(0, 8); 50]);
        (0..40).for_each(|_| step(&mut rates, 0, 8, 3.0));
        assert!(is_near(rates.decode_step_ms(), 3.0 * 6.8, 0.05), "{rates:?}");
    }

    /// Returns the fixed time and the time per token, in seconds. They are computed by the textbook formula from all samples with their
    /// decayed weights.
    fn naive(samples: &[Observation], decays: &[f64]) -> (f64, f64) {
        let weights: Vec<f64> = (0..samples.len())
            .map(|at| (1.0 + samples[at].0 / LONG_STEP_TOKENS).powi(-2) * decays[at + 1..].iter().product::<f64>())
            .collect();
        let total: f64 = weights.iter().sum();
        let mean =
            |of: fn(&Observation) -> f64| samples.iter().zip(&weights).map(|(sample, w)| of(sample) * w).sum::<f64>() / total;
        let (mean_x, mean_y) = (mean(|sample| sample.0), mean(|sample| sample.1));
        let sum = |of: &dyn Fn(&Observation) -> f64| samples.iter().zip(&weights).map(|(sample, w)| of(sample) * w).sum::<f64>();
        let slope = sum(&|(x, y)| (x - mean_x) * (y - mean_y)) / sum(&|(x, _)| (x - mean_x).powi(2));
        (mean_y - slope * mean_x, slope)
    }

    proptest! {
        #[test]
        fn fitted_line_equals_naive_weighted_least_squares(
            lengths in vec(1..8_192_u32, 20..80),
            noise in vec(0.97..1.03_f64, 80),
            decays in vec(0.9..1.0_f64, 80),
        ) {
            let mut line = Regression::default();
            let sample = |(length, noise): (&u32, &f64)| (f64::from(*length), seconds(*length, 0) * noise);
            let samples: Vec<Observation> = lengths.iter().zip(&noise).map(sample).collect();
            samples.iter().zip(&decays).for_each(|(sample, decay)| line.add(*sample, *decay));
            let (fixed, each) = naive(&samples, &decays[..samples.len()]);
            if let Some(fit) = line.line().filter(|fit| fit.fixed > 0.0) {
                prop_assert!(is_near(fit.each, each, 1e-6), "{:?} {}", fit, each);
                prop_assert!((fit.fixed - fixed).abs() < 1e-6 * each.max(fixed.abs()).max(1.0), "{:?} {}", fit, fixed);
            }
        }

        /// One step among prompts of any lengths is stalled. Afterwards the rate is right, or there is no rate.
        #[test]
        fn one_stalled_step_does_not_change_the_rate(
            lengths in vec(prop_oneof![1..8_u32, 1..=BUDGET, Just(BUDGET)], 1..60),
            stalled in any::<prop::sample::Index>(),
            stall in 2.0..1_000.0_f64,
        ) {
            let mut rates = Rates::default();
            let stalled = stalled.index(lengths.len());
            for (at, length) in lengths.iter().enumerate() {
                step(&mut rates, *length, 0, if at == stalled { stall } else { 1.0 });
                let rate = rates.prefill_tokens_per_second();
                // If all steps have the same length, the rate includes the fixed time, which is more than half of the time of a step with 64 tokens.
                prop_assert!(rate == 0.0 || (8_500.0..20_500.0).contains(&rate), "{} after {:?}", rate, &lengths[..=at]);
                prop_assert!(rates.prefill_fixed_ms() < 4.2, "{:?}", rates);
            }
        }
    }
}
