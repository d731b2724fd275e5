//! The expected lengths of answers to one model, learned from the answers that have ended.
//!
//! A router knows only the limit `max_tokens` of an answer that has not ended. Programs set a limit for each kind of request, so requests
//! with similar limits have answers of similar lengths. Therefore there is a mean for each class of limits, from a power of two to the next
//! one.

/// A moving average: the plain mean of the first values, later a mean in which the latest values have the most weight.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MovingMean {
    mean: f64,
    /// The number of values, up to [`WINDOW`].
    count: u32,
}

/// After this many values, each new value has the weight 1 / `WINDOW`. Lengths of answers vary by an order of magnitude, so a mean of much
/// fewer values would vary too.
const WINDOW: u32 = 50;

impl MovingMean {
    pub(crate) fn record(&mut self, value: f64) {
        self.count = (self.count + 1).min(WINDOW);
        self.mean += (value - self.mean) / f64::from(self.count);
    }

    /// Returns the mean; `None` before the first value.
    pub(crate) fn get(&self) -> Option<f64> {
        (self.count > 0).then_some(self.mean)
    }
}

/// The lengths of one model's answers.
#[derive(Clone, Debug, Default)]
pub(crate) struct AnswerLengths {
    /// The mean length of answers with a limit, by the limit's binary logarithm.
    by_limit: [MovingMean; u32::BITS as usize],
    /// The mean length of all answers.
    all: MovingMean,
}

impl AnswerLengths {
    /// Records the length of an answer that has ended, in tokens for each sample. `max_tokens` is the limit that its request had; 0: no
    /// known limit.
    pub(crate) fn record(&mut self, max_tokens: u32, tokens: f64) {
        let tokens = if max_tokens == 0 { tokens } else { tokens.min(f64::from(max_tokens)) };
        if let Some(class) = max_tokens.checked_ilog2() {
            self.by_limit[class as usize].record(tokens);
        }
        self.all.record(tokens);
    }

    /// Returns the mean length of all answers; `None` before the first one.
    pub(crate) fn mean(&self) -> Option<f64> {
        self.all.get()
    }

    /// Returns the expected length of an answer with this limit, in tokens for each sample; `default`, or the limit if that is less, before
    /// the first answer.
    pub(crate) fn expected(&self, max_tokens: u32, default: f64) -> f64 {
        let of_class = max_tokens.checked_ilog2().and_then(|class| self.by_limit[class as usize].get());
        let expected = of_class.or(self.all.get()).unwrap_or(default);
        if max_tokens == 0 { expected } else { expected.min(f64::from(max_tokens)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moving_mean_follows_the_latest_values() {
        let mut mean = MovingMean::default();
        assert_eq!(mean.get(), None);
        [1.0, 2.0, 6.0].into_iter().for_each(|value| mean.record(value));
        assert_eq!(mean.get(), Some(3.0));
        (0..1_000).for_each(|_| mean.record(50.0));
        assert!(mean.get().is_some_and(|mean| mean > 49.9), "{mean:?}");
        (0..WINDOW).for_each(|_| mean.record(0.0));
        assert!(mean.get().is_some_and(|mean| (15.0..20.0).contains(&mean)), "{mean:?}");
    }

    #[test]
    fn expected_length_is_that_of_similar_limits_and_never_exceeds_the_limit() {
        let mut lengths = AnswerLengths::default();
        assert_eq!((lengths.expected(0, 300.0), lengths.expected(7, 300.0)), (300.0, 7.0));
        (0..30).for_each(|_| lengths.record(16, 10.0));
        (0..30).for_each(|_| lengths.record(4_096, 2_000.0));
        assert_eq!((lengths.expected(16, 300.0), lengths.expected(5_000, 300.0)), (10.0, 2_000.0));
        // A limit of another class: the mean of all answers, at most the limit.
        assert!((900.0..1_100.0).contains(&lengths.expected(100_000, 300.0)), "{lengths:?}");
        assert_eq!(lengths.expected(100, 300.0), 100.0);
        assert!(lengths.expected(0, 300.0) > 900.0);
        // A reported length above the limit is recorded as the limit.
        lengths.record(1, 1e9);
        assert_eq!(lengths.expected(1, 300.0), 1.0);
    }
}
