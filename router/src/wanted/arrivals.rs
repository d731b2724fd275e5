//! What arrives for the workers of one role: now, and in the near future.

use std::time::Duration;
use tokio::time::Instant;

/// The ages at which an arrival has half the weight of the latest one, in the two means from which a trend is computed. The shorter one is
/// long enough for some dozens of requests, the longer one is about as long as workers take to start.
const HALF_LIVES: [Duration; 2] = [Duration::from_secs(45), Duration::from_secs(240)];
/// A difference between the two means is a trend if it exceeds this many standard deviations of the shorter one, with random arrivals.
const TREND_DEVIATIONS: f64 = 2.0;
/// The load is expected to grow at most by this factor while workers start: a trend that is steeper is one step that has ended already.
const GROWTH_MAX: f64 = 1.5;
/// The least time over which a rate is computed.
const WATCHED_MIN: Duration = Duration::from_secs(15);
/// Prompts are counted by the binary logarithm of their new tokens, up to this one.
const SIZES: usize = 24;

/// What arrives in a second for all workers of one role together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ArrivalRates {
    pub(crate) prompts: f64,
    pub(crate) answers: f64,
    /// Prompt tokens to compute.
    pub(crate) new_tokens: f64,
    /// Prompt tokens that are expected to be cached on the worker that computes the prompt.
    pub(crate) cached_tokens: f64,
    /// Expected tokens of answers.
    pub(crate) answer_tokens: f64,
}

/// Prompts with similar numbers of new tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct SizeClass {
    /// The weight of these prompts among all prompts.
    pub(crate) weight: f64,
    /// The mean number of their new tokens.
    pub(crate) tokens: f64,
}

/// The arrivals for the workers of one role, in which older arrivals have less weight.
#[derive(Clone, Debug, Default)]
pub(crate) struct RoleArrivals {
    /// The sums for each of [`HALF_LIVES`].
    sums: [ArrivalRates; 2],
    sizes: [SizeClass; SIZES],
    /// The times of the first and of the latest arrival.
    since: Option<(Instant, Instant)>,
}

impl ArrivalRates {
    pub(crate) fn scaled(self, by: f64) -> Self {
        let Self { prompts, answers, new_tokens, cached_tokens, answer_tokens } = self;
        Self {
            prompts: prompts * by,
            answers: answers * by,
            new_tokens: new_tokens * by,
            cached_tokens: cached_tokens * by,
            answer_tokens: answer_tokens * by,
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            prompts: self.prompts + other.prompts,
            answers: self.answers + other.answers,
            new_tokens: self.new_tokens + other.new_tokens,
            cached_tokens: self.cached_tokens + other.cached_tokens,
            answer_tokens: self.answer_tokens + other.answer_tokens,
        }
    }
}

impl RoleArrivals {
    /// Adds a prompt, an answer, or both: one request in the sense of [`ArrivalRates`].
    pub(crate) fn add(&mut self, request: ArrivalRates, now: Instant) {
        self.advance(now);
        self.sums = self.sums.map(|sums| sums.plus(request));
        if request.prompts > 0.0 {
            let class = (request.new_tokens.max(1.0).log2() as usize).min(SIZES - 1);
            self.sizes[class].weight += 1.0;
            self.sizes[class].tokens += request.new_tokens;
        }
    }

    /// Returns the rates now, and the factor by which they are expected to have grown after `horizon`. The trend is that of Holt's linear
    /// method, with means of two ages: a mean of age τ lags behind a linear trend by τ.
    pub(crate) fn forecast(&mut self, horizon: Duration, now: Instant) -> (ArrivalRates, f64) {
        self.advance(now);
        let Some((first, _)) = self.since else { return (ArrivalRates::default(), 1.0) };
        let ages = HALF_LIVES.map(|half_life| half_life.as_secs_f64() / std::f64::consts::LN_2);
        // Sums over less time than their age are divided by the time that they cover. Requests that come together just before the first
        // decision are no rate.
        let watched = now.duration_since(first).max(WATCHED_MIN).as_secs_f64();
        let covered = ages.map(|age| age * (1.0 - (-watched / age).exp()));
        let [fast, slow] = [0, 1].map(|at| self.sums[at].scaled(1.0 / covered[at]));
        let [recent, earlier] = [fast, slow].map(|rates| rates.prompts + rates.answers);
        let (rise, deviation) = (recent - earlier, (recent / covered[0]).sqrt());
        if recent <= 0.0 || rise.abs() <= TREND_DEVIATIONS * deviation || watched < ages[1] {
            return (fast, 1.0);
        }
        let per_second = rise / (ages[1] - ages[0]);
        let level = recent + per_second * ages[0];
        let growth = ((level + per_second * horizon.as_secs_f64()) / recent).clamp(1.0 / GROWTH_MAX, GROWTH_MAX);
        (fast, growth)
    }

    /// Returns the classes of prompts by their numbers of new tokens. The weights add up to 1, or are all 0 if no prompt has arrived.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = SizeClass> + Clone {
        let all: f64 = self.sizes.iter().map(|class| class.weight).sum();
        self.sizes
            .iter()
            .filter(|class| class.weight > 0.0)
            .map(move |class| SizeClass { weight: class.weight / all, tokens: class.tokens / class.weight })
    }

    fn advance(&mut self, now: Instant) {
        let (_, last) = *self.since.get_or_insert((now, now));
        let seconds = now.duration_since(last).as_secs_f64();
        let kept = HALF_LIVES.map(|half_life| (-seconds / half_life.as_secs_f64()).exp2());
        for (sums, kept) in self.sums.iter_mut().zip(kept) {
            *sums = sums.scaled(kept);
        }
        for class in &mut self.sizes {
            *class = SizeClass { weight: class.weight * kept[1], tokens: class.tokens * kept[1] };
        }
        self.since = self.since.map(|(first, _)| (first, now.max(last)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT: ArrivalRates =
        ArrivalRates { prompts: 1.0, answers: 1.0, new_tokens: 700.0, cached_tokens: 300.0, answer_tokens: 50.0 };

    /// Returns the forecast for four minutes after `seconds` of arrivals, `rate(t)` in each second t.
    fn forecast(seconds: u64, rate: impl Fn(u64) -> u64) -> (ArrivalRates, f64) {
        let (mut arrivals, start) = (RoleArrivals::default(), Instant::now());
        for second in 0..seconds {
            let count = rate(second);
            for part in 0..count {
                arrivals.add(PROMPT, start + Duration::from_secs_f64(second as f64 + part as f64 / count as f64));
            }
        }
        arrivals.forecast(Duration::from_secs(240), start + Duration::from_secs(seconds))
    }

    #[test]
    fn steady_arrivals_have_their_rate_from_the_first_minute_and_no_trend() {
        for seconds in [30, 300, 3_000] {
            let (now, growth) = forecast(seconds, |_| 10);
            assert!((9.5..10.5).contains(&now.prompts), "{now:?} after {seconds} s");
            assert!((now.new_tokens / now.prompts - 700.0).abs() < 1e-6 && growth == 1.0, "{now:?} {growth}");
        }
    }

    #[test]
    fn requests_that_come_together_are_no_rate() {
        let (mut arrivals, now) = (RoleArrivals::default(), Instant::now());
        (0..50).for_each(|_| arrivals.add(PROMPT, now));
        let (rates, growth) = arrivals.forecast(Duration::from_secs(240), now + Duration::from_millis(10));
        assert!(rates.prompts < 5.0 && growth == 1.0, "{rates:?} {growth}");
    }

    #[test]
    fn linear_growth_is_continued_and_a_step_is_not_taken_for_an_endless_rise() {
        // 10/s after 2,000 s, and 0.005/s more in each second: 11.2/s after four minutes.
        let (now, growth) = forecast(2_000, |second| second / 200 + 1);
        assert!((10.9..12.0).contains(&(now.prompts * growth)), "{now:?} {growth}");
        let (now, growth) = forecast(1_200, |second| if second < 1_140 { 4 } else { 12 });
        assert!(now.prompts * growth < 12.0 * GROWTH_MAX && growth > 1.0, "{now:?} {growth}");
        let (_, growth) = forecast(2_000, |second| 20 - second / 200);
        assert!((1.0 / GROWTH_MAX..1.0).contains(&growth), "{growth}");
    }

    #[test]
    fn sizes_are_means_of_similar_prompts() {
        let (mut arrivals, now) = (RoleArrivals::default(), Instant::now());
        for tokens in [100.0, 100.0, 120.0, 9_000.0] {
            arrivals.add(ArrivalRates { new_tokens: tokens, ..PROMPT }, now);
        }
        let sizes: Vec<_> = arrivals.sizes().collect();
        assert_eq!(sizes.len(), 2);
        assert!((sizes[0].weight - 0.75).abs() < 1e-9 && (sizes[0].tokens - 320.0 / 3.0).abs() < 1e-9, "{sizes:?}");
        assert!((sizes[1].weight - 0.25).abs() < 1e-9 && (sizes[1].tokens - 9_000.0).abs() < 1e-9, "{sizes:?}");
    }
}
