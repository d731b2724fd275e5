//! Distributions of times. Percentiles are computed only in this module.

use hdrhistogram::Histogram;
use serde::Serialize;
use std::time::Duration;

/// The number of significant digits: a percentile differs from the exact value by at most 0.1%, however many values there are.
const DIGITS: u8 = 3;
/// The longest time that can be recorded, in microseconds: a day. A longer time is recorded as a day.
const LONGEST_US: u64 = 24 * 60 * 60 * 1_000_000;
/// The percentiles at which a distribution's curve has points.
const CURVE: [f64; 22] = [
    0.0, 1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 75.0, 80.0, 85.0, 90.0, 92.5, 95.0, 97.0, 98.0, 99.0, 99.5, 99.9,
    100.0,
];

/// A set of times, in memory whose size does not depend on the number of times.
#[derive(Clone, Debug)]
pub(super) struct Distribution {
    histogram: Histogram<u64>,
    /// The exact sum of the times, from which the mean is computed. The histogram's values are rounded.
    sum: Duration,
    max_us: u64,
}

/// Mean and percentiles of a set of times, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimeSummary {
    /// The number of times.
    pub count: u64,
    /// The mean.
    pub mean_ms: f64,
    /// The median.
    pub p50_ms: f64,
    /// The 90th percentile.
    pub p90_ms: f64,
    /// The 99th percentile.
    pub p99_ms: f64,
    /// The longest time.
    pub max_ms: f64,
    /// The curve of the distribution, for plots: pairs of a percentile and its time in milliseconds, in ascending order.
    pub curve: Vec<(f64, f64)>,
}

impl Default for Distribution {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, LONGEST_US, DIGITS).expect("the bounds are valid constants");
        Self { histogram, sum: Duration::ZERO, max_us: 0 }
    }
}

impl Distribution {
    pub(super) fn add(&mut self, time: Duration) {
        self.add_many(time, 1);
    }

    /// Adds `count` equal times.
    pub(super) fn add_many(&mut self, time: Duration, count: u32) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let us = us.min(LONGEST_US);
        self.histogram.saturating_record_n(us, u64::from(count));
        self.max_us = self.max_us.max(if count > 0 { us } else { 0 });
        self.sum = self.sum.saturating_add(time.saturating_mul(count));
    }

    /// Returns the mean and the percentiles; `None` if there are no times.
    pub(super) fn summary(&self) -> Option<TimeSummary> {
        let count = self.histogram.len();
        if count == 0 {
            return None;
        }
        let max_us = self.max_us;
        // The histogram counts similar times together and returns the upper end of their range, which may exceed the longest time.
        let percentile = |percent: f64| self.histogram.value_at_percentile(percent).min(max_us) as f64 / 1e3;
        Some(TimeSummary {
            count,
            mean_ms: self.sum.as_secs_f64() * 1e3 / count as f64,
            p50_ms: percentile(50.0),
            p90_ms: percentile(90.0),
            p99_ms: percentile(99.0),
            max_ms: max_us as f64 / 1e3,
            curve: CURVE.iter().map(|&percent| (percent, percentile(percent))).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_match_the_sorted_values() {
        let mut state = 7_u64;
        let mut times: Vec<u64> = (0..5_000)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                // The values range from microseconds to minutes, so all ranges of the histogram are used.
                1 << (state >> 59) | (state >> 40 & 0xfff)
            })
            .collect();
        let mut distribution = Distribution::default();
        times.iter().for_each(|&us| distribution.add(Duration::from_micros(us)));
        times.sort_unstable();
        let found = distribution.summary().expect("there are times");
        let exact = |percent: f64| times[((times.len() as f64 * percent / 100.0).ceil() as usize).max(1) - 1] as f64 / 1e3;
        for (percent, ms) in found.curve.iter().copied().chain([(50.0, found.p50_ms), (90.0, found.p90_ms), (99.0, found.p99_ms)])
        {
            assert!((ms - exact(percent)).abs() <= exact(percent) * 0.001, "p{percent}: {ms} instead of {}", exact(percent));
        }
        let mean = times.iter().sum::<u64>() as f64 / times.len() as f64 / 1e3;
        assert!((found.mean_ms - mean).abs() < 1e-6 * mean);
        assert_eq!((found.count, found.max_ms), (5_000, times[4_999] as f64 / 1e3));
    }

    #[test]
    fn adding_many_equal_times_at_once_equals_adding_each() {
        let (mut one, mut many) = (Distribution::default(), Distribution::default());
        (0..9).for_each(|_| one.add(Duration::from_millis(20)));
        one.add(Duration::from_millis(70));
        many.add_many(Duration::from_millis(20), 9);
        many.add_many(Duration::from_millis(70), 1);
        assert_eq!(one.summary(), many.summary());
        let found = many.summary().expect("there are times");
        assert_eq!((found.mean_ms, found.max_ms), (25.0, 70.0));
        assert!((found.p50_ms - 20.0).abs() <= 0.02, "{found:?}");
    }

    #[test]
    fn empty_distribution_has_no_percentiles_and_extreme_times_are_recorded() {
        let mut distribution = Distribution::default();
        assert_eq!(distribution.summary(), None);
        distribution.add(Duration::ZERO);
        distribution.add(Duration::from_secs(1 << 40));
        let found = distribution.summary().expect("there are times");
        assert_eq!((found.count, found.p50_ms), (2, 0.0));
        assert!(found.max_ms >= 24.0 * 3_600_000.0);
    }
}
