//! The figures of a run over time, in at most [`BINS_MAX`] bins of equal length.

use super::outcome::RequestOutcome;
use serde::Serialize;
use std::time::Duration;

/// The maximum number of bins. More bins would not be visible in a plot.
const BINS_MAX: usize = 240;
/// The length of a bin at the beginning of a run. The length doubles whenever the run would need too many bins.
const FIRST_LENGTH: Duration = Duration::from_millis(250);

/// The figures of a run over time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timeline {
    /// The length of each bin.
    #[serde(rename = "bin_seconds", serialize_with = "seconds")]
    pub bin: Duration,
    /// The bins in order. The first bin begins with the run.
    pub bins: Vec<Bin>,
}

/// The figures of one bin.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Bin {
    /// The number of requests that were due.
    pub due: u64,
    /// The number of requests whose answer was complete.
    pub answered: u64,
    /// The number of requests that failed or were stopped.
    pub failed: u64,
    /// The number of tokens that arrived.
    pub output_tokens: u64,
    /// The number of prompt tokens in the requests that were due. Only requests whose number of cached tokens is known are counted.
    pub prompt_tokens: u64,
    /// The number of cached tokens among `prompt_tokens`.
    pub cached_tokens: u64,
    /// The number of requests that were due and later received a first token.
    pub first_tokens: u64,
    /// The sum of the TTFTs of the requests in `first_tokens`, in milliseconds.
    pub ttft_sum_ms: f64,
    /// The longest TTFT of the requests in `first_tokens`, in milliseconds.
    pub ttft_max_ms: f64,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { bin: FIRST_LENGTH, bins: Vec::new() }
    }
}

impl Timeline {
    pub(super) fn add(&mut self, outcome: &RequestOutcome) {
        let ttft_ms = outcome.ttft().map(|ttft| ttft.as_secs_f64() * 1e3);
        let answer = outcome.result.as_ref().ok();
        let due = self.at(outcome.due);
        due.due += 1;
        if let Some(ms) = ttft_ms {
            due.first_tokens += 1;
            due.ttft_sum_ms += ms;
            due.ttft_max_ms = due.ttft_max_ms.max(ms);
        }
        if let Some((prompt, cached)) = answer.and_then(|answer| Some((answer.prompt_tokens?, answer.cached.tokens()?))) {
            due.prompt_tokens += prompt;
            due.cached_tokens += cached;
        }
        let ended = self.at(outcome.ended);
        match answer {
            Some(_) => ended.answered += 1,
            None => ended.failed += 1,
        }
        if let Some((answer, mut at)) = answer.and_then(|answer| Some((answer, answer.first_token?))) {
            self.at(at).output_tokens += 1;
            for gap in &answer.gaps {
                at += gap.length.saturating_mul(gap.count);
                self.at(at).output_tokens += u64::from(gap.count);
            }
        }
    }

    /// Returns the same timeline, merged into at most `max` bins.
    pub(super) fn coarser(&self, max: usize) -> Self {
        let merged = u32::try_from(self.bins.len().div_ceil(max).max(1)).expect("the number of bins is small");
        Self { bin: self.bin * merged, bins: self.merged(merged as usize) }
    }

    /// Returns the bins merged in groups of this many consecutive bins.
    fn merged(&self, count: usize) -> Vec<Bin> {
        self.bins.chunks(count).map(|bins| bins.iter().fold(Bin::default(), Bin::merged)).collect()
    }

    /// Returns the bin that contains this time.
    fn at(&mut self, time: Duration) -> &mut Bin {
        let index = loop {
            let index = time.as_nanos() / self.bin.as_nanos();
            match usize::try_from(index) {
                Ok(index) if index < BINS_MAX => break index,
                _ => self.halve(),
            }
        };
        if self.bins.len() <= index {
            self.bins.resize_with(index + 1, Bin::default);
        }
        &mut self.bins[index]
    }

    /// Merges each pair of bins.
    fn halve(&mut self) {
        self.bin = self.bin.saturating_mul(2);
        self.bins = self.merged(2);
    }
}

impl Bin {
    fn merged(self, other: &Self) -> Self {
        Self {
            due: self.due + other.due,
            answered: self.answered + other.answered,
            failed: self.failed + other.failed,
            output_tokens: self.output_tokens + other.output_tokens,
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
            cached_tokens: self.cached_tokens + other.cached_tokens,
            first_tokens: self.first_tokens + other.first_tokens,
            ttft_sum_ms: self.ttft_sum_ms + other.ttft_sum_ms,
            ttft_max_ms: self.ttft_max_ms.max(other.ttft_max_ms),
        }
    }
}

fn seconds<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::outcome::{CachedCount, Expected, Failure, FailureClass, Gap, MeasuredAnswer};

    fn outcome(due_ms: u64, result: Result<MeasuredAnswer, Failure>) -> RequestOutcome {
        let due = Duration::from_millis(due_ms);
        RequestOutcome { due, sent: due, ended: due + Duration::from_millis(600), expected: Expected::default(), result }
    }

    fn answer(due_ms: u64) -> MeasuredAnswer {
        MeasuredAnswer {
            first_token: Some(Duration::from_millis(due_ms + 100)),
            gaps: vec![Gap { length: Duration::from_millis(50), count: 4 }, Gap { length: Duration::from_millis(200), count: 1 }],
            prompt_tokens: Some(100),
            output_tokens: 6,
            cached: CachedCount::Counted(60),
            ..MeasuredAnswer::default()
        }
    }

    #[test]
    fn each_count_is_in_the_bin_of_its_time() {
        let mut timeline = Timeline::default();
        timeline.add(&outcome(0, Ok(answer(0))));
        timeline.add(&outcome(300, Err(Failure { class: FailureClass::Timeout, message: String::new() })));
        let bin = |due, answered, failed, output_tokens| Bin { due, answered, failed, output_tokens, ..Bin::default() };
        let first = Bin {
            prompt_tokens: 100,
            cached_tokens: 60,
            first_tokens: 1,
            ttft_sum_ms: 100.0,
            ttft_max_ms: 100.0,
            ..bin(1, 0, 0, 1)
        };
        assert_eq!(timeline.bins, [first, bin(1, 0, 0, 4), bin(0, 1, 0, 1), bin(0, 0, 1, 0)]);
    }

    #[test]
    fn merging_bins_of_a_timeline_keeps_its_sums() {
        let mut timeline = Timeline::default();
        for at in 0..10 {
            timeline.add(&outcome(at * 250, Ok(answer(at * 250))));
        }
        let coarse = timeline.coarser(4);
        assert_eq!((timeline.bins.len(), coarse.bins.len(), coarse.bin), (12, 4, FIRST_LENGTH * 3));
        assert_eq!(coarse.bins.iter().map(|bin| bin.due).collect::<Vec<_>>(), [3, 3, 3, 1]);
        assert_eq!(timeline.coarser(12), timeline);
    }

    #[test]
    fn long_run_has_few_bins_with_the_same_sums() {
        let mut timeline = Timeline::default();
        let hour_ms = 3_600_000;
        for second in 0..3_600 {
            timeline.add(&outcome(second * 1_000, Ok(answer(second * 1_000))));
        }
        assert!(timeline.bins.len() <= BINS_MAX);
        assert!(timeline.bin.as_millis() as u64 * timeline.bins.len() as u64 >= hour_ms);
        let sum = timeline.bins.iter().fold(Bin::default(), Bin::merged);
        assert_eq!((sum.due, sum.answered, sum.output_tokens, sum.cached_tokens), (3_600, 3_600, 21_600, 216_000));
        assert_eq!((sum.ttft_sum_ms, sum.ttft_max_ms), (360_000.0, 100.0));
    }
}
