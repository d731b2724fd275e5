//! How fast the device is: a fixed time of each step and a time for each token, fitted to the latest steps.
//!
//! Prompt tokens and continued sequences each have a line of their own, fitted by least squares. A step that computes both counts
//! for each line with the time that the other line does not explain. Without evidence there is no rate: steps of a few tokens take a
//! step's fixed time, and dividing the one by the other says nothing about a longer prompt.

use tandem_kv::StepStats;

/// Of the latest steps.
#[derive(Debug, Default)]
pub(super) struct Rates {
    prefill: Line,
    decode: Line,
    prefill_measurements: u64,
}

/// What is left of the evidence after a full chunk of prompt tokens, or after a step that continues sequences.
const FADE: f64 = 0.9;

/// Tokens of a step up to which steps count alike. Longer ones take longer and their times vary more, so they count by the inverse
/// square of their length. Steps of at least this mean length tell a rate even if all have the same length: a step's fixed time
/// is then a minor part.
const REACH: f64 = 64.0;

/// The least weighted sum of squared distances from the mean length from which a line's slope is read: a quarter of what one long
/// step adds to many short ones.
const SPREAD_MIN: f64 = REACH * REACH / 4.0;

/// A slope of fewer standard errors may be chance.
const STANDARD_ERRORS_MIN: f64 = 3.0;

/// Steps of similar length (each class begins at twice the length of the one before), of which the middle one counts.
const CLASSES: usize = 16;

impl Rates {
    /// Takes a step into account.
    pub fn measure(&mut self, stats: &StepStats, chunk_budget: u32) {
        let seconds = stats.duration.as_secs_f64();
        let (tokens, sequences) = (f64::from(stats.prefill_tokens), f64::from(stats.decode_tokens));
        // While the one part's time is not known, a step of both kinds says nothing about the other part. What a token takes in
        // steps of one length does not tell what the others take.
        let of_sequences = || self.decode.line().map(|line| line.at(sequences)).or(self.decode.mean());
        let prefill_seconds = if sequences > 0.0 { of_sequences().map(|part| seconds - part) } else { Some(seconds) };
        let of_tokens = || self.prefill.line().map(|line| line.at(tokens));
        let decode_seconds = if tokens > 0.0 { of_tokens().map(|part| seconds - part) } else { Some(seconds) };
        if let Some(prefill_seconds) = prefill_seconds.filter(|seconds| tokens > 0.0 && *seconds > 0.0) {
            // By tokens and not by steps: many steps of a few tokens do not push out what a long one has told.
            let is_added = self.prefill.take(tokens, prefill_seconds, FADE.powf(tokens / f64::from(chunk_budget)));
            let is_long = tokens >= REACH.min(f64::from(chunk_budget));
            self.prefill_measurements += u64::from(is_added && is_long);
        }
        // What is left beside a long chunk is little and may be negative by chance. It counts all the same: without the negative
        // ones the mean would be too high.
        if let Some(decode_seconds) = decode_seconds.filter(|_| sequences > 0.0) {
            self.decode.take(sequences, decode_seconds, FADE);
        }
    }

    /// Without the fixed time of a step; 0 while there is no evidence.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        self.prefill.fit().map_or(0.0, |fit| fit.each.recip())
    }

    /// Steps that the rate was fitted to and that had at least 64 tokens, or a full chunk if that is less. Shorter ones hardly replace
    /// what these have said: while only such come, the rate is as old as the last long step.
    pub fn prefill_measurements(&self) -> u64 {
        self.prefill_measurements
    }

    /// Of a step that computes prompt tokens; 0 while there is no evidence.
    pub fn prefill_fixed_ms(&self) -> f64 {
        self.prefill.fit().map_or(0.0, |fit| fit.fixed * 1e3)
    }

    /// The mean of the latest steps; 0 while there is no evidence.
    pub fn decode_step_ms(&self) -> f64 {
        self.decode.mean().map_or(0.0, |seconds| seconds.max(0.0) * 1e3)
    }
}

/// A step: its length (tokens or sequences) and its seconds.
type Sample = (f64, f64);

/// Weighted sums over steps, of which older ones have faded.
#[derive(Debug, Default)]
struct Line {
    /// The latest steps of each class of lengths, the oldest first.
    latest: [Vec<Sample>; CLASSES],
    samples: f64,
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
    yy: f64,
}

/// Seconds of a step: fixed, and for each token.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Fit {
    fixed: f64,
    each: f64,
}

impl Line {
    /// Adds the middle one, by its time for a token, of the latest three steps of similar length. A step that stalled, the first
    /// one of a device among them, is never the middle one; two in a row are no accident. Whether there were three.
    fn take(&mut self, x: f64, y: f64, fade: f64) -> bool {
        let latest = &mut self.latest[(x.log2() as usize).min(CLASSES - 1)];
        latest.push((x, y));
        let [first, second, third] = latest[..] else { return false };
        let mut sorted = [first, second, third];
        sorted.sort_by(|(x, y), (other_x, other_y)| (y / x).total_cmp(&(other_y / other_x)));
        latest.remove(0);
        self.add(sorted[1], fade);
        true
    }

    fn add(&mut self, (x, y): Sample, fade: f64) {
        let weight = (1.0 + x / REACH).powi(-2);
        let added = [1.0, weight, weight * x, weight * y, weight * x * x, weight * x * y, weight * y * y];
        let Self { samples, weight, x, y, xx, xy, yy, .. } = self;
        for (sum, added) in [samples, weight, x, y, xx, xy, yy].into_iter().zip(added) {
            *sum = *sum * fade + added;
        }
    }

    /// Time of a step of the mean length.
    fn mean(&self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.y / self.weight)
    }

    /// A token's time and, if it is known, the fixed one; `None` while the steps tell neither.
    fn fit(&self) -> Option<Fit> {
        let is_long = || self.weight > 0.0 && self.x / self.weight >= REACH;
        self.line().or_else(|| is_long().then(|| self.through_zero()))
    }

    /// The line through steps of different lengths; `None` while they are too much alike, or their times vary too much.
    fn line(&self) -> Option<Fit> {
        if self.weight <= 0.0 {
            return None;
        }
        let (mean_x, mean_y) = (self.x / self.weight, self.y / self.weight);
        let spread = self.xx - self.x * mean_x;
        let together = self.xy - self.x * mean_y;
        let slope = together / spread;
        let unexplained = (self.yy - self.y * mean_y - slope * together).max(0.0) / (self.samples - 2.0).max(1.0);
        let is_clear = spread >= SPREAD_MIN && slope > STANDARD_ERRORS_MIN * (unexplained / spread).sqrt();
        let fixed = mean_y - slope * mean_x;
        is_clear.then(|| if fixed > 0.0 { Fit { fixed, each: slope } } else { self.through_zero() })
    }

    fn through_zero(&self) -> Fit {
        Fit { fixed: 0.0, each: self.xy / self.xx }
    }
}

impl Fit {
    /// Seconds of a step of this length.
    fn at(self, x: f64) -> f64 {
        self.fixed + self.each * x
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*};
    use std::time::Duration;

    const BUDGET: u32 = 512;

    /// The simulator's default device: 20,000 tokens/s and 4 ms; 6 ms and 0.1 ms a sequence.
    fn seconds(tokens: u32, sequences: u32) -> f64 {
        let prefill = if tokens > 0 { 0.004 + f64::from(tokens) / 20_000.0 } else { 0.0 };
        prefill + if sequences > 0 { 0.006 + 0.000_1 * f64::from(sequences) } else { 0.0 }
    }

    fn step(rates: &mut Rates, tokens: u32, sequences: u32, slower: f64) {
        let duration = Duration::from_secs_f64(seconds(tokens, sequences) * slower);
        rates.measure(&StepStats { prefill_tokens: tokens, decode_tokens: sequences, duration }, BUDGET);
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
    fn tiny_prompts_tell_no_rate() {
        let mut rates = after(&vec![(1, 0); 1_000]);
        assert_eq!((rates.prefill_tokens_per_second(), rates.prefill_fixed_ms()), (0.0, 0.0));
        // Nor do they hide the rate once there is evidence, or make it forgotten.
        (0..3).for_each(|_| step(&mut rates, 400, 0, 1.0));
        (0..3_000).for_each(|_| step(&mut rates, 2, 0, 1.0));
        assert!(is_near(rates.prefill_tokens_per_second(), 20_000.0, 0.01), "{rates:?}");
        assert!(is_near(rates.prefill_fixed_ms(), 4.0, 0.01), "{rates:?}");
        // Evidence that is not renewed ends.
        (0..100_000).for_each(|_| step(&mut rates, 2, 0, 1.0));
        assert_eq!(rates.prefill_tokens_per_second(), 0.0, "{rates:?}");
    }

    #[test]
    fn short_steps_do_not_renew_the_rate() {
        let mut rates = after(&[(512, 0); 3]);
        assert_eq!(rates.prefill_measurements(), 1);
        (0..3_000).for_each(|at| step(&mut rates, 1 + at % 63, 0, 1.0));
        assert_eq!(rates.prefill_measurements(), 1);
        step(&mut rates, 512, 0, 1.0);
        assert_eq!(rates.prefill_measurements(), 2);
        // Where no chunk is longer, a full one is long.
        let mut rates = Rates::default();
        let stats = StepStats { prefill_tokens: 16, decode_tokens: 0, duration: Duration::from_millis(5) };
        (0..3).for_each(|_| rates.measure(&stats, 16));
        assert_eq!(rates.prefill_measurements(), 1);
    }

    #[test]
    fn steps_of_one_length_tell_the_rate_at_that_length() {
        let rates = after(&[(512, 0); 3]);
        assert!(is_near(rates.prefill_tokens_per_second(), 512.0 / seconds(512, 0), 0.001), "{rates:?}");
        assert_eq!(rates.prefill_fixed_ms(), 0.0);
        assert_eq!(after(&[(512, 0); 2]).prefill_tokens_per_second(), 0.0, "two steps are no evidence");
    }

    #[test]
    fn steps_of_both_kinds_count_for_both() {
        let mut steps = vec![(0, 20); 3];
        steps.extend((0..50).map(|at| (1 + at * 97 % 512, 20)));
        let rates = after(&steps);
        assert!(is_near(rates.prefill_tokens_per_second(), 20_000.0, 0.02), "{rates:?}");
        assert!(is_near(rates.prefill_fixed_ms(), 4.0, 0.02), "{rates:?}");
        assert!(is_near(rates.decode_step_ms(), 8.0, 0.02), "{rates:?}");
        // Nothing tells the two parts of such steps alone.
        let rates = after(&steps[3..]);
        assert_eq!((rates.prefill_tokens_per_second(), rates.decode_step_ms()), (0.0, 0.0));
    }

    #[test]
    fn a_slower_device_is_noticed() {
        let mut rates = after(&[(512, 0); 50]);
        (0..80).for_each(|at| step(&mut rates, 100 + at % 40 * 10, 0, 3.0));
        assert!(is_near(rates.prefill_tokens_per_second(), 20_000.0 / 3.0, 0.05), "{rates:?}");
        let mut rates = after(&[(0, 8); 50]);
        (0..40).for_each(|_| step(&mut rates, 0, 8, 3.0));
        assert!(is_near(rates.decode_step_ms(), 3.0 * 6.8, 0.05), "{rates:?}");
    }

    /// The same line without sums: every step with the weight it has now.
    fn naive(samples: &[Sample], fades: &[f64]) -> (f64, f64) {
        let weights: Vec<f64> = (0..samples.len())
            .map(|at| (1.0 + samples[at].0 / REACH).powi(-2) * fades[at + 1..].iter().product::<f64>())
            .collect();
        let total: f64 = weights.iter().sum();
        let mean = |of: fn(&Sample) -> f64| samples.iter().zip(&weights).map(|(sample, w)| of(sample) * w).sum::<f64>() / total;
        let (mean_x, mean_y) = (mean(|sample| sample.0), mean(|sample| sample.1));
        let sum = |of: &dyn Fn(&Sample) -> f64| samples.iter().zip(&weights).map(|(sample, w)| of(sample) * w).sum::<f64>();
        let slope = sum(&|(x, y)| (x - mean_x) * (y - mean_y)) / sum(&|(x, _)| (x - mean_x).powi(2));
        (mean_y - slope * mean_x, slope)
    }

    proptest! {
        #[test]
        fn the_line_equals_a_naive_fit(
            lengths in vec(1..8_192_u32, 20..80),
            noise in vec(0.97..1.03_f64, 80),
            fades in vec(0.9..1.0_f64, 80),
        ) {
            let mut line = Line::default();
            let sample = |(length, noise): (&u32, &f64)| (f64::from(*length), seconds(*length, 0) * noise);
            let samples: Vec<Sample> = lengths.iter().zip(&noise).map(sample).collect();
            samples.iter().zip(&fades).for_each(|(sample, fade)| line.add(*sample, *fade));
            let (fixed, each) = naive(&samples, &fades[..samples.len()]);
            if let Some(fit) = line.line().filter(|fit| fit.fixed > 0.0) {
                prop_assert!(is_near(fit.each, each, 1e-6), "{:?} {}", fit, each);
                prop_assert!((fit.fixed - fixed).abs() < 1e-6 * each.max(fixed.abs()).max(1.0), "{:?} {}", fit, fixed);
            }
        }

        /// Prompts of any lengths, a stalled step anywhere among them: the rate is right, or there is none.
        #[test]
        fn one_stalled_step_does_not_bend_the_line(
            lengths in vec(prop_oneof![1..8_u32, 1..=BUDGET, Just(BUDGET)], 1..60),
            stalled in any::<prop::sample::Index>(),
            stall in 2.0..1_000.0_f64,
        ) {
            let mut rates = Rates::default();
            let stalled = stalled.index(lengths.len());
            for (at, length) in lengths.iter().enumerate() {
                step(&mut rates, *length, 0, if at == stalled { stall } else { 1.0 });
                let rate = rates.prefill_tokens_per_second();
                // Steps of one length contain their fixed time: at 64 tokens that is more than half.
                prop_assert!(rate == 0.0 || (8_500.0..20_500.0).contains(&rate), "{} after {:?}", rate, &lengths[..=at]);
                prop_assert!(rates.prefill_fixed_ms() < 4.2, "{:?}", rates);
            }
        }
    }
}
