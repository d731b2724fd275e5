//! The rate to assume for each worker. It is estimated from the measurements of all workers, so that no old or outlying measurement
//! excludes a worker forever.
//!
//! A worker that receives no prompts measures nothing. So a low measured rate could keep prompts from a worker forever. Three rules prevent
//! this. The weight of a measurement decreases with its age, in favour of the mean of all workers. Small differences are ignored: even
//! equal workers measure different rates, depending on the prompts that they receive. A worker without a measurement is
//! assumed to have the mean rate. Means are geometric: half as fast and twice as fast are equally far from the mean, and one absurd value
//! changes it little.

use crate::settings::Costs;
use std::time::Duration;

/// A measured value and its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measurement {
    /// The natural logarithm of the value.
    log: f64,
    /// The weight: 1 for a new measurement, less for an older one, never 0.
    pub weight: f64,
}

/// The logarithms of the values that a worker has measured; `None` for a value that it has not measured. They are computed once for each
/// report of the worker, not for each placement.
#[derive(Clone, Copy, Debug, Default)]
pub struct MeasuredLogs {
    pub prefill_tokens_per_second: Option<f64>,
    pub prefill_fixed_ms: Option<f64>,
    pub decode_step_ms: Option<f64>,
    pub transfer_bytes_per_second: Option<f64>,
}

/// The minimum weight of a measurement. It is not 0: if all measurements are old, their mean is still a better estimate than a constant.
const WEIGHT_MIN: f64 = 1e-6;

/// Differences from the mean up to this factor are ignored. Larger differences are reduced by this factor. Equal workers measure rates that
/// differ by less than this factor, because their prompts have different lengths. If unequal workers differ by less, the lengths of their
/// queues show the difference.
///
/// The constant is the natural logarithm of the factor 1.25.
const TOLERANCE_LOG: f64 = 0.223_143_551_314_209_76;

impl Measurement {
    pub fn new(log: f64, weight: f64) -> Self {
        Self { log, weight }
    }

    /// Returns the logarithm of a measured value; `None` for the value 0, which means that nothing was measured.
    pub fn log(value: f64) -> Option<f64> {
        (value > 0.0).then(|| value.ln())
    }

    /// Returns the weight of a measurement of this age.
    pub fn weight(age: Duration, costs: &Costs) -> f64 {
        let half_lives = age.as_secs_f64() / costs.rate_half_life.as_secs_f64();
        (-half_lives).exp2().max(WEIGHT_MIN)
    }
}

/// The weighted geometric mean of one kind of measurement over all workers, or a default while no worker has measured one.
#[derive(Clone, Copy, Debug)]
pub struct MeanRate {
    value: f64,
    log: f64,
}

impl MeanRate {
    /// Returns the mean of these measurements, or `default` if there are none.
    pub fn of(measurements: impl Iterator<Item = Measurement>, default: f64) -> Self {
        let sums = |(logs, weights), one: Measurement| (logs + one.log * one.weight, weights + one.weight);
        let (logs, weights) = measurements.fold((0.0, 0.0), sums);
        if weights > 0.0 {
            Self { value: f64::exp(logs / weights), log: logs / weights }
        } else {
            Self { value: default, log: default.ln() }
        }
    }

    /// Returns the mean of all workers.
    pub fn value(&self) -> f64 {
        self.value
    }

    /// Returns the rate to assume for a worker with this measurement.
    pub fn for_worker(&self, own: Option<Measurement>) -> f64 {
        let deviation = own.map_or(0.0, |own| own.weight * (own.log - self.log));
        if deviation.abs() <= TOLERANCE_LOG {
            return self.value;
        }
        self.value * (deviation.abs() - TOLERANCE_LOG).copysign(deviation).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(value: f64, age_s: u64) -> Measurement {
        let log = Measurement::log(value).expect("the value is not 0");
        Measurement::new(log, Measurement::weight(Duration::from_secs(age_s), &Costs::default()))
    }

    /// Returns the rates to assume for workers with these measurements.
    fn assumed_rates(all: &[Measurement]) -> Vec<f64> {
        let mean = MeanRate::of(all.iter().copied(), 1.0);
        all.iter().map(|one| mean.for_worker(Some(*one))).collect()
    }

    #[test]
    fn old_rate_of_a_worker_approaches_the_mean() {
        let ratio = |age_s| {
            let [slow, fast, _] = assumed_rates(&[measured(100.0, age_s), measured(20_000.0, 0), measured(20_000.0, 1)])[..]
            else {
                unreachable!("one rate per measurement")
            };
            fast / slow
        };
        assert!(ratio(0) > 50.0, "{}", ratio(0));
        assert!((1..=30).all(|age| ratio(age * 10) <= ratio(age * 10 - 10)));
        assert_eq!(ratio(300), 1.0, "after five minutes without a prompt the worker is tried again");
        // Measurements of the same age have the same weight.
        let [slow, fast] = assumed_rates(&[measured(100.0, 86_400), measured(20_000.0, 86_400)])[..] else {
            unreachable!("one rate per measurement")
        };
        assert_eq!(slow, fast);
    }

    #[test]
    fn small_rate_differences_are_ignored_and_large_differences_are_kept() {
        let rates = |one, other| match assumed_rates(&[measured(one, 0), measured(other, 0)])[..] {
            [one, other] => (one, other),
            _ => unreachable!("one rate per measurement"),
        };
        let (one, other) = rates(17_000.0, 24_000.0);
        assert_eq!(one, other);
        let (slow, fast) = rates(5_000.0, 20_000.0);
        assert!((2.0..4.0).contains(&(fast / slow)), "{slow} {fast}");
    }

    #[test]
    fn rate_of_a_worker_without_a_measurement_is_the_mean_or_else_the_default() {
        let mean = MeanRate::of([measured(100.0, 0), measured(10_000.0, 0)].into_iter(), 7.0);
        assert!((mean.for_worker(None) - 1_000.0).abs() < 1e-6);
        let none = MeanRate::of(std::iter::empty(), 7.0);
        assert_eq!((none.value(), none.for_worker(None)), (7.0, 7.0));
        let only_own = MeanRate::of([measured(100.0, 600)].into_iter(), 7.0);
        assert!(
            (only_own.for_worker(Some(measured(100.0, 600))) - 100.0).abs() < 1e-9,
            "the mean of one worker is its measurement"
        );
        assert_eq!(Measurement::log(0.0), None);
        assert_eq!(TOLERANCE_LOG, 1.25_f64.ln());
    }
}
