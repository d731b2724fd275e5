//! The rate to assume for each worker, from the measurements of all, so that no old or odd measurement excludes a worker for ever.
//!
//! A worker that gets no prompts measures nothing, so a rate that keeps prompts away would never be corrected. Three rules prevent
//! that. A measurement counts less the older it is, and the mean takes its place, until the worker is tried again. Small
//! differences are ignored: equal workers measure different rates, depending on the prompts that they received.
//! Without a measurement the mean counts.
//! Means are geometric: half as fast and twice as fast are equally far off, and one absurd value moves the mean little.

use crate::settings::Costs;
use std::time::Duration;

/// What a worker has measured, and how much it counts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Measured {
    /// More than 0.
    pub value: f64,
    /// 1 when it is new, less the older it is, never 0.
    pub weight: f64,
}

/// The least weight: where all measurements are old, they still say more than a constant.
const WEIGHT_MIN: f64 = 1e-6;

/// Differences up to this factor count as none, and larger ones by so much less. Equal workers' rates differ less than that by the
/// lengths of their prompts; what is left over shows in queues.
const TOLERANCE: f64 = 1.25;

impl Measured {
    /// A value with the time since it was measured; `None` if the value is 0, which means that nothing was measured.
    pub fn new(value: f64, age: Duration, costs: &Costs) -> Option<Self> {
        let half_lives = age.as_secs_f64() / costs.rate_half_life.as_secs_f64();
        (value > 0.0).then(|| Self { value, weight: (-half_lives).exp2().max(WEIGHT_MIN) })
    }
}

/// One kind of measurement of all workers: the weighted mean, or what stands for it while no worker has measured one.
#[derive(Clone, Copy, Debug)]
pub struct Usual(f64);

impl Usual {
    /// Of these measurements.
    pub fn of(measured: impl Iterator<Item = Measured>, otherwise: f64) -> Self {
        let sums = |(logs, weights), one: Measured| (logs + one.value.ln() * one.weight, weights + one.weight);
        let (logs, weights) = measured.fold((0.0, 0.0), sums);
        Self(if weights > 0.0 { f64::exp(logs / weights) } else { otherwise })
    }

    /// The mean.
    pub fn value(&self) -> f64 {
        self.0
    }

    /// What to reckon with for a worker that has measured this.
    pub fn for_worker(&self, own: Option<Measured>) -> f64 {
        let Some(own) = own else { return self.0 };
        let off = own.weight * (own.value / self.0).ln();
        let beyond = (off.abs() - TOLERANCE.ln()).max(0.0).copysign(off);
        self.0 * beyond.exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(value: f64, age_s: u64) -> Measured {
        Measured::new(value, Duration::from_secs(age_s), &Costs::default()).expect("it is measured")
    }

    fn reckoned(all: &[Measured]) -> Vec<f64> {
        let usual = Usual::of(all.iter().copied(), 1.0);
        all.iter().map(|one| usual.for_worker(Some(*one))).collect()
    }

    #[test]
    fn an_old_rate_comes_to_be_the_others() {
        let ratio = |age_s| {
            let [slow, fast, _] = reckoned(&[measured(100.0, age_s), measured(20_000.0, 0), measured(20_000.0, 1)])[..] else {
                unreachable!("as many as were given")
            };
            fast / slow
        };
        assert!(ratio(0) > 50.0, "{}", ratio(0));
        assert!((1..=30).all(|age| ratio(age * 10) <= ratio(age * 10 - 10)));
        assert_eq!(ratio(300), 1.0, "five minutes without a prompt: it is tried again");
        // Where all are old, none says more than another.
        let [slow, fast] = reckoned(&[measured(100.0, 86_400), measured(20_000.0, 86_400)])[..] else { unreachable!("two") };
        assert_eq!(slow, fast);
    }

    #[test]
    fn small_differences_count_as_none_and_larger_ones_are_kept() {
        let [one, other] = reckoned(&[measured(17_000.0, 0), measured(24_000.0, 0)])[..] else { unreachable!("two") };
        assert_eq!(one, other);
        let [slow, fast] = reckoned(&[measured(5_000.0, 0), measured(20_000.0, 0)])[..] else { unreachable!("two") };
        assert!((2.0..4.0).contains(&(fast / slow)), "{slow} {fast}");
    }

    #[test]
    fn without_a_measurement_the_mean_counts_and_without_any_the_constant() {
        let usual = Usual::of([measured(100.0, 0), measured(10_000.0, 0)].into_iter(), 7.0);
        assert!((usual.for_worker(None) - 1_000.0).abs() < 1e-6);
        let none = Usual::of(std::iter::empty(), 7.0);
        assert_eq!((none.value(), none.for_worker(None)), (7.0, 7.0));
        let alone = Usual::of([measured(100.0, 600)].into_iter(), 7.0);
        assert!((alone.for_worker(Some(measured(100.0, 600))) - 100.0).abs() < 1e-9, "there are no others");
        assert_eq!(Measured::new(0.0, Duration::ZERO, &Costs::default()), None);
    }
}
