//! How many workers of one role a load needs to meet the service levels.
//!
//! Prompts wait in a queue of n servers. The probability that a prompt waits is Sakasegawa's approximation, ρ^(√(2(n + 1)) − 1) ("An
//! approximation formula L_q ≃ α·ρ^β/(1 − ρ)", 1977), and the wait of those that do is exponential, with the mean of Allen and Cunneen for
//! services of any distribution. Answers share the device with prompts: a step takes `base` + `per_sequence` × sequences, and a worker that
//! spends the part φ of its time on prompts and generates T tokens a second has the time between tokens base / (1 − φ − per_sequence × T).

use super::arrivals::{ArrivalRates, SizeClass};
use crate::settings::ServiceLevels;
use std::fmt;

/// The part of the prompts that may miss the level for the time to first token although their own computation takes less.
const LATE_MAX: f64 = 0.03;
/// The part of their time that workers may be busy. A higher part leaves no time to catch up after a peak.
const BUSY_MAX: f64 = 0.92;
/// The part of the level for the time between tokens that the mean of all answers may take. Single answers take longer.
const ITL_PART: f64 = 0.85;
/// The part of the KV memory, and of the places in the batch, that running answers may take on average.
const FULL_MAX: f64 = 0.85;
/// The time within which new workers are to compute the prompts that wait too long now.
const BACKLOG_SECONDS: f64 = 60.0;

/// The factor by which the wanted number may exceed the present one. More than that says that something was measured wrongly.
const GROWTH_MAX: usize = 16;

/// The time of a decode step by the number of its sequences, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct StepTime {
    pub(crate) base: f64,
    pub(crate) per_sequence: f64,
}

/// The workers of one role, what arrives for them, and what they can do. ArrivalRates and sizes are those of one worker.
#[derive(Clone, Debug, Default)]
pub(crate) struct RoleState {
    pub(crate) workers: usize,
    pub(crate) rates: ArrivalRates,
    pub(crate) sizes: Vec<SizeClass>,
    /// Prompt tokens that wait on all workers together.
    pub(crate) queued_tokens: f64,
    pub(crate) prefill_tokens_per_second: f64,
    /// The fixed time of a prefill step.
    pub(crate) prefill_fixed_seconds: f64,
    /// The most prompt tokens of a step; 0: not known.
    pub(crate) step_tokens: f64,
    /// The part of a step's time that prompts get while answers run.
    pub(crate) prompt_share: f64,
    /// `None`: the workers generate nothing, or have not measured it.
    pub(crate) step: Option<StepTime>,
    /// The KV memory of a worker in tokens.
    pub(crate) capacity_tokens: f64,
    /// The KV memory that a running answer takes.
    pub(crate) sequence_tokens: f64,
    /// The places in the batch of a worker; 0: not known.
    pub(crate) sequences_max: f64,
}

/// What a smaller number of workers would lack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum WorkerShortage {
    /// This part of the prompts would wait too long.
    Prompts { late: f64 },
    /// Answers would have this time between tokens, in seconds.
    Tokens { itl: f64 },
    /// Running answers would take this part of the KV memory.
    Memory { used: f64 },
    /// Running answers would take this part of the places in the batches.
    Places { used: f64 },
}

impl fmt::Display for WorkerShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |part: f64| (part * 100.0).min(999.0).round();
        match *self {
            Self::Prompts { late } if late >= 1.0 => write!(f, "prompts would arrive faster than they are computed"),
            Self::Prompts { late } => write!(f, "{} % of the prompts would wait too long", percent(late)),
            Self::Tokens { itl } if itl.is_finite() => write!(f, "tokens would take {:.1} ms", itl * 1e3),
            Self::Tokens { .. } => write!(f, "answers would be asked for faster than they are generated"),
            Self::Memory { used } => write!(f, "answers would take {} % of the KV memory", percent(used)),
            Self::Places { used } => write!(f, "answers would take {} % of the places in batches", percent(used)),
        }
    }
}

impl RoleState {
    /// Returns in words what arrives. `growth` is the factor by which the load is expected to grow.
    pub(crate) fn describe(&self, growth: f64) -> String {
        let ArrivalRates { prompts, new_tokens, cached_tokens, answer_tokens, .. } = self.rates.scaled(1.0 / growth);
        let mut text = String::new();
        if prompts >= 0.005 {
            let (each, all) = (new_tokens / prompts, (new_tokens + cached_tokens).max(f64::MIN_POSITIVE));
            let cached = cached_tokens / all * 100.0;
            text = format!("{prompts:.2} prompts/s with {each:.0} new tokens ({cached:.0} % cached)");
        }
        if answer_tokens >= 0.5 {
            let separator = if text.is_empty() { "" } else { ", " };
            text += &format!("{separator}{answer_tokens:.0} answer tokens/s");
        }
        if text.is_empty() {
            "nothing arrives".clone_into(&mut text);
        }
        if (growth - 1.0).abs() >= 0.05 {
            text += &format!(", expected to change by {:+.0} % while a worker starts", (growth - 1.0) * 100.0);
        }
        text
    }

    /// Returns the smallest number of workers that meets the levels, and what one worker less would lack; `None` if the number is 1. More
    /// workers never lack more, so the number is found by doubling and by bisection. It is at most [`GROWTH_MAX`] times the present one.
    pub(crate) fn needed(&self, levels: &ServiceLevels) -> (usize, Option<WorkerShortage>) {
        let most = GROWTH_MAX * self.workers.max(1);
        let (mut few, mut lacking, mut enough) = (0, None, 1);
        while enough < most
            && let Some(shortage) = self.shortage(enough as f64, levels)
        {
            (few, lacking, enough) = (enough, Some(shortage), (2 * enough).min(most));
        }
        while enough - few > 1 {
            let middle = few + (enough - few) / 2;
            match self.shortage(middle as f64, levels) {
                Some(shortage) => (few, lacking) = (middle, Some(shortage)),
                None => enough = middle,
            }
        }
        (enough, lacking)
    }

    /// Returns what this number of workers would lack to meet the levels.
    pub(crate) fn shortage(&self, workers: f64, levels: &ServiceLevels) -> Option<WorkerShortage> {
        let alone = |share: f64| {
            let (rate, fixed) = (self.prefill_tokens_per_second * share, self.prefill_fixed_seconds);
            let steps = move |tokens: f64| if self.step_tokens > 0.0 { (tokens / self.step_tokens).ceil() } else { 1.0 };
            move |tokens: f64| tokens / rate + fixed * steps(tokens)
        };
        let (seconds, undisturbed) = (alone(self.prompt_share), alone(1.0));
        let mean = |of: &dyn Fn(f64) -> f64| self.sizes.iter().map(|class| class.weight * of(class.tokens)).sum::<f64>();
        let service = mean(&seconds);
        // A removed worker takes its share of the cached prefixes along. Prompts compute these tokens again, until others have cached them.
        let lost = ((self.workers as f64 - workers) / self.workers.max(1) as f64).max(0.0);
        let again = if self.rates.new_tokens > 0.0 { self.rates.cached_tokens * lost / self.rates.new_tokens } else { 0.0 };
        let ttft = levels.ttft.map_or(f64::INFINITY, |level| level.as_secs_f64());
        let in_time = if ttft.is_finite() { ttft } else { BACKLOG_SECONDS };
        let rate = self.prefill_tokens_per_second * self.prompt_share;
        let backlog = (self.queued_tokens / rate / in_time - self.workers as f64).max(0.0) * in_time / BACKLOG_SECONDS;
        let offered = self.rates.prompts * service;
        if service > 0.0 {
            if (offered * (1.0 + again) + backlog) / workers > BUSY_MAX {
                return Some(WorkerShortage::Prompts { late: 1.0 });
            }
            let busy = offered / workers;
            let variance = (mean(&|tokens| seconds(tokens).powi(2)) / service.powi(2) - 1.0).max(0.0);
            let waits = busy.powf((2.0 * (workers + 1.0)).sqrt() - 1.0);
            let decline = 2.0 * workers * (1.0 - busy) / (service * (1.0 + variance));
            // A prompt whose own computation takes longer than the level misses it with any number of workers.
            let late = mean(&|tokens| {
                let slack = ttft - seconds(tokens);
                if slack > 0.0 && slack.is_finite() { waits * (-slack * decline).exp() } else { 0.0 }
            });
            if late > LATE_MAX {
                return Some(WorkerShortage::Prompts { late });
            }
        }
        let StepTime { base, per_sequence } = self.step?;
        let prompts_part = self.rates.prompts * mean(&undisturbed) / workers;
        let free = 1.0 - prompts_part - per_sequence * self.rates.answer_tokens / workers;
        if free - prompts_part * again <= 1.0 - BUSY_MAX {
            return Some(WorkerShortage::Tokens { itl: f64::INFINITY });
        }
        let itl = base / free;
        // A level that the shortest step does not meet is met with no number of workers.
        if levels.itl.is_some_and(|level| itl > level.as_secs_f64() * ITL_PART && base * 1.1 < level.as_secs_f64() * ITL_PART) {
            return Some(WorkerShortage::Tokens { itl });
        }
        // Little's law: as many answers run as arrive while one of them takes.
        let running = self.rates.answer_tokens * itl / workers;
        let (memory, places) = (running * self.sequence_tokens / self.capacity_tokens, running / self.sequences_max);
        if memory > FULL_MAX {
            return Some(WorkerShortage::Memory { used: memory });
        }
        (self.sequences_max > 0.0 && places > FULL_MAX).then_some(WorkerShortage::Places { used: places })
    }
}

/// Learns the time of a decode step from pairs of a number of sequences and a time, of which older ones have less weight, by least squares.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StepTimes {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl StepTimes {
    /// The weight that all pairs keep when a new round of pairs is added.
    const KEPT: f64 = 0.98;
    /// While all steps have similar numbers of sequences, the time of a step is assumed to be this part for its sequences.
    const PART_OF_SEQUENCES: f64 = 0.25;
    /// The largest part of a step's time that its sequences may take.
    const PART_MAX: f64 = 0.9;
    /// The weight of this assumption, as a part of the square of the mean number of sequences.
    const ASSUMED: f64 = 0.01;

    pub(crate) fn next_round(&mut self) {
        let Self { weight, x, y, xx, xy } = *self;
        *self =
            Self { weight: weight * Self::KEPT, x: x * Self::KEPT, y: y * Self::KEPT, xx: xx * Self::KEPT, xy: xy * Self::KEPT };
    }

    /// Adds a step with this many sequences.
    pub(crate) fn add(&mut self, sequences: f64, seconds: f64) {
        self.weight += 1.0;
        self.x += sequences;
        self.y += seconds;
        self.xx += sequences * sequences;
        self.xy += sequences * seconds;
    }

    pub(crate) fn fit(&self) -> Option<StepTime> {
        if self.weight <= 0.0 || self.x <= 0.0 {
            return None;
        }
        let [x, y, xx, xy] = [self.x, self.y, self.xx, self.xy].map(|sum| sum / self.weight);
        let (assumed, weight) = (Self::PART_OF_SEQUENCES * y / x, Self::ASSUMED * x * x);
        let per_sequence =
            ((xy - x * y + assumed * weight) / ((xx - x * x).max(0.0) + weight)).clamp(0.0, Self::PART_MAX * y / x);
        Some(StepTime { base: y - per_sequence * x, per_sequence })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn levels(ttft_ms: u64, itl_ms: u64) -> ServiceLevels {
        let level = |ms| (ms > 0).then(|| Duration::from_millis(ms));
        ServiceLevels { ttft: level(ttft_ms), itl: level(itl_ms) }
    }

    /// Prompts of 2,000 tokens at 20,000 tokens/s: 0.1 s each.
    fn prompts(per_second: f64) -> RoleState {
        RoleState {
            workers: 4,
            rates: ArrivalRates { prompts: per_second, new_tokens: per_second * 2_000.0, ..ArrivalRates::default() },
            sizes: vec![SizeClass { weight: 1.0, tokens: 2_000.0 }],
            prefill_tokens_per_second: 20_000.0,
            prompt_share: 1.0,
            capacity_tokens: 500_000.0,
            sequence_tokens: 1.0,
            ..RoleState::default()
        }
    }

    #[test]
    fn idle_cluster_needs_one_worker() {
        assert_eq!(RoleState { workers: 4, ..RoleState::default() }.needed(&levels(1_000, 20)), (1, None));
        assert_eq!(prompts(0.0).needed(&levels(1_000, 20)), (1, None));
    }

    #[test]
    fn prompts_need_their_work_and_less_spare_time_in_larger_clusters() {
        let many = |per_second: f64| RoleState { workers: 100, ..prompts(per_second) };
        let spare = |per_second: f64| many(per_second).needed(&levels(500, 0)).0 as f64 / (per_second * 0.1);
        let spares = [20.0, 100.0, 1_000.0].map(spare);
        assert!(spares.is_sorted_by(|one, other| one >= other), "{spares:?}");
        assert!((1.08..1.15).contains(&spares[2]), "{spares:?}");
        assert_eq!(prompts(1e9).needed(&levels(500, 0)).0, GROWTH_MAX * 4, "a demand that cannot be true has a limit");
        // A level that leaves no time to wait needs more workers.
        assert!(prompts(20.0).needed(&levels(150, 0)).0 > prompts(20.0).needed(&levels(2_000, 0)).0);
    }

    #[test]
    fn waiting_prompts_and_lost_caches_need_further_workers() {
        let state = prompts(20.0);
        let (needed, lacking) = state.needed(&levels(500, 0));
        assert!(matches!(lacking, Some(WorkerShortage::Prompts { .. })), "{lacking:?}");
        let waiting = RoleState { queued_tokens: 10_000_000.0, ..state.clone() };
        assert!(waiting.needed(&levels(500, 0)).0 > needed + 4);
        let warm =
            RoleState { rates: ArrivalRates { cached_tokens: 120_000.0, ..state.rates }, workers: 2 * needed, ..state.clone() };
        assert!(warm.needed(&levels(500, 0)).0 > needed, "half of the cached tokens would be computed again");
        let cold = RoleState { workers: 1, ..warm };
        assert_eq!(cold.needed(&levels(500, 0)).0, needed, "a new worker takes no cached prefix along");
    }

    #[test]
    fn answers_need_step_time_memory_and_places() {
        let answers = RoleState {
            rates: ArrivalRates { answer_tokens: 10_000.0, ..ArrivalRates::default() },
            step: Some(StepTime { base: 0.006, per_sequence: 0.000_1 }),
            sequence_tokens: 2_000.0,
            ..prompts(0.0)
        };
        // 10,000 tokens/s take one second of `per_sequence` time a second. A level of 20 ms × 0.85 leaves 65 % of each worker's time.
        assert_eq!(answers.needed(&levels(0, 20)).0, 2);
        assert!(
            matches!(answers.needed(&levels(0, 8)), (9, Some(WorkerShortage::Tokens { .. }))),
            "{:?}",
            answers.needed(&levels(0, 8))
        );
        assert_eq!(answers.needed(&levels(0, 5)).0, answers.needed(&levels(1_000, 0)).0, "no number of workers meets 5 ms");
        let small = RoleState { capacity_tokens: 20_000.0, ..answers.clone() };
        assert!(
            matches!(small.needed(&levels(0, 20)), (8.., Some(WorkerShortage::Memory { .. }))),
            "{:?}",
            small.needed(&levels(0, 20))
        );
        let few = RoleState { sequences_max: 10.0, ..answers };
        assert!(
            matches!(few.needed(&levels(0, 20)), (8.., Some(WorkerShortage::Places { .. }))),
            "{:?}",
            few.needed(&levels(0, 20))
        );
    }

    #[test]
    fn step_time_is_fitted_and_assumed_where_all_steps_are_alike() {
        let mut times = StepTimes::default();
        assert_eq!(times.fit(), None);
        times.add(20.0, 0.008);
        let assumed = times.fit().expect("a step was added");
        assert!((assumed.per_sequence - 0.000_1).abs() < 1e-9 && (assumed.base - 0.006).abs() < 1e-9, "{assumed:?}");
        for sequences in [1.0, 10.0, 40.0, 100.0] {
            times.next_round();
            times.add(sequences, 0.01 + 0.000_2 * sequences);
        }
        let fitted = times.fit().expect("steps were added");
        assert!((fitted.per_sequence - 0.000_2).abs() < 0.000_03 && (fitted.base - 0.01).abs() < 0.002, "{fitted:?}");
    }
}
