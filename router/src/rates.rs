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
use tokio::time::Instant;

/// A measured value and its weight. The default has the weight 0: nothing was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measurement {
    /// The natural logarithm of the value.
    log: f64,
    /// The weight: 1 for a new measurement, less for an older one.
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

    /// Returns the measurement with its weight at the present, if `weight` is a stamp of [`Ages`] and `scale` its present scale.
    #[inline]
    pub fn aged(self, scale: f64) -> Self {
        let least = if self.weight > 0.0 { WEIGHT_MIN } else { 0.0 };
        Self { weight: (self.weight * scale).max(least), ..self }
    }
}

/// Weighs measurements by their age with one power for each report and one for each placement. A report gets a *stamp*, which grows with
/// time. The weight of a measurement is its stamp times the present *scale*, which decreases as stamps grow.
#[derive(Clone, Copy, Debug)]
pub struct Ages {
    epoch: Instant,
    half_life: Duration,
}

/// Stamps must stay below the largest number, 2 to the power 1,024.
const HALF_LIVES_MAX: f64 = 512.0;

impl Ages {
    pub fn new(now: Instant, costs: &Costs) -> Self {
        Self { epoch: now, half_life: costs.rate_half_life }
    }

    fn half_lives(&self, now: Instant) -> f64 {
        now.duration_since(self.epoch).as_secs_f64() / self.half_life.as_secs_f64()
    }

    /// Returns the stamp of a measurement that is made now.
    pub fn stamp(&self, now: Instant) -> f64 {
        self.half_lives(now).exp2()
    }

    pub fn scale(&self, now: Instant) -> f64 {
        (-self.half_lives(now)).exp2()
    }

    /// Begins a new epoch if stamps become too large. Then the caller must multiply all stamps by the returned factor.
    pub fn renew(&mut self, now: Instant) -> Option<f64> {
        let is_old = self.half_lives(now) > HALF_LIVES_MAX;
        let scale = is_old.then(|| self.scale(now))?;
        self.epoch = now;
        Some(scale.max(f64::MIN_POSITIVE))
    }
}

/// The sums for the weighted geometric mean of one kind of measurement.
#[derive(Clone, Copy, Debug, Default)]
pub struct RateSums {
    logs: f64,
    weights: f64,
}

impl RateSums {
    pub fn add(&mut self, one: Measurement) {
        self.logs += one.log * one.weight;
        self.weights += one.weight;
    }

    /// Returns the mean, or `default` if nothing was added.
    pub fn mean(self, default: f64) -> MeanRate {
        let Self { logs, weights } = self;
        if weights > 0.0 {
            MeanRate { value: f64::exp(logs / weights), log: logs / weights }
        } else {
            MeanRate { value: default, log: default.ln() }
        }
    }
}

/// The weighted geometric mean of one kind of measurement over all workers, or a default while no worker has measured one.
#[derive(Clone, Copy, Debug)]
pub struct MeanRate {
    value: f64,
    log: f64,
}

impl MeanRate {
    /// Returns the mean of all workers.
    pub fn value(&self) -> f64 {
        self.value
    }

    /// Returns the rate to assume for a worker with this measurement.
    #[inline]
    pub fn for_worker(&self, own: Measurement) -> f64 {
        let deviation = own.weight * (own.log - self.log);
        // The deviation is not a number if nothing was measured and the default is 0, whose logarithm is infinite.
        if deviation.is_nan() || deviation.abs() <= TOLERANCE_LOG {
            return self.value;
        }
        self.value * (deviation.abs() - TOLERANCE_LOG).copysign(deviation).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mean_of(measurements: impl IntoIterator<Item = Measurement>, default: f64) -> MeanRate {
        let mut sums = RateSums::default();
        measurements.into_iter().for_each(|one| sums.add(one));
        sums.mean(default)
    }

    fn measured(value: f64, age_s: u64) -> Measurement {
        let log = Measurement::log(value).expect("the value is not 0");
        Measurement::new(log, Measurement::weight(Duration::from_secs(age_s), &Costs::default()))
    }

    /// Returns the rates to assume for workers with these measurements.
    fn assumed_rates(all: &[Measurement]) -> Vec<f64> {
        let mean = mean_of(all.iter().copied(), 1.0);
        all.iter().map(|one| mean.for_worker(*one)).collect()
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
        let mean = mean_of([measured(100.0, 0), measured(10_000.0, 0)], 7.0);
        assert!((mean.for_worker(Measurement::default()) - 1_000.0).abs() < 1e-6);
        let none = mean_of([], 7.0);
        assert_eq!((none.value(), none.for_worker(Measurement::default())), (7.0, 7.0));
        let only_own = mean_of([measured(100.0, 600)], 7.0);
        assert!((only_own.for_worker(measured(100.0, 600)) - 100.0).abs() < 1e-9, "the mean of one worker is its measurement");
        assert_eq!(Measurement::log(0.0), None);
        assert_eq!(TOLERANCE_LOG, 1.25_f64.ln());
    }

    #[test]
    fn stamps_give_the_weights_of_ages_also_after_a_new_epoch() {
        let (start, costs) = (Instant::now(), Costs::default());
        let mut ages = Ages::new(start, &costs);
        let after = |s| start + Duration::from_secs(s);
        let mut stamps = [0, 10, 500].map(|s| ages.stamp(after(s)));
        for now in [500, 15_000, 20_000, 20_001] {
            if let Some(factor) = ages.renew(after(now)) {
                stamps.iter_mut().for_each(|stamp| *stamp *= factor);
            }
            for (stamp, made) in stamps.iter().zip([0, 10, 500]) {
                let weight = Measurement::new(1.0, *stamp).aged(ages.scale(after(now))).weight;
                let expected = Measurement::weight(Duration::from_secs(now - made), &costs);
                assert!((weight / expected - 1.0).abs() < 1e-9, "{now} {made}: {weight} {expected}");
            }
        }
        assert_eq!(ages.epoch, after(20_000));
    }
}
