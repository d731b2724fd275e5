//! Collects the outcomes of requests, in memory whose size does not depend on their number.

use super::{
    Balance, ErrorCount, Fact, Goodput, Late, Report, Requests, Tokens, WorkerShare,
    distribution::Distribution,
    outcome::{CachedCount, FailureClass, MeasuredAnswer, PrefixTokens, RequestOutcome},
    timeline::Timeline,
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};

/// A request counts as late if it is sent more than this time after it was due.
const LATE: Duration = Duration::from_millis(10);
/// The maximum length in characters of a failure's message in a report.
const MESSAGE_MAX: usize = 200;

/// The service levels that a request must meet to count towards the goodput.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slo {
    /// The maximum time to first token.
    pub ttft: Option<Duration>,
    /// The maximum mean time between two tokens of the answer.
    pub itl: Option<Duration>,
    /// The maximum time to the end of the answer.
    pub e2e: Option<Duration>,
}

/// Collects the outcomes of a run.
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    slo: Slo,
    last_end: Duration,
    requests: u64,
    answered: u64,
    stopped: u64,
    good: u64,
    errors: BTreeMap<FailureClass, (u64, String)>,
    ttft: Distribution,
    itl: Distribution,
    e2e: Distribution,
    lateness: Distribution,
    late: u64,
    tokens: Tokens,
    prefix: Option<PrefixTokens>,
    workers: BTreeMap<Arc<str>, WorkerShare>,
    timeline: Timeline,
}

impl Slo {
    /// Returns whether any service level is set.
    pub fn is_set(&self) -> bool {
        *self != Self::default()
    }

    /// Returns whether the answer meets all service levels that are set. An answer with fewer than two tokens meets the level for the time
    /// between tokens; one without a token does not meet the level for the time to first token.
    pub fn is_met(&self, outcome: &RequestOutcome) -> bool {
        let Ok(answer) = &outcome.result else { return false };
        let within = |time: Option<Duration>, max: Option<Duration>, without: bool| {
            max.is_none_or(|max| time.map_or(without, |time| time <= max))
        };
        within(outcome.ttft(), self.ttft, false)
            && within(answer.mean_itl(), self.itl, true)
            && within(outcome.e2e(), self.e2e, false)
    }
}

impl Recorder {
    /// Creates a recorder without outcomes.
    pub fn new(slo: Slo) -> Self {
        Self { slo, ..Self::default() }
    }

    /// Adds a worker with its roles, so that the balance includes the worker even if it receives no request.
    pub fn add_worker(&mut self, name: &str, roles: Roles) {
        let share = worker(&mut self.workers, &Arc::from(name));
        share.prefills |= roles.prefills;
        share.decodes |= roles.decodes;
    }

    /// Adds the outcome of a request.
    pub fn add(&mut self, outcome: &RequestOutcome) {
        self.last_end = self.last_end.max(outcome.ended);
        self.requests += 1;
        self.timeline.add(outcome);
        self.lateness.add(outcome.lateness());
        self.late += u64::from(outcome.lateness() > LATE);
        match &outcome.result {
            Ok(answer) => self.add_answer(outcome, answer),
            Err(failure) if failure.class == FailureClass::Stopped => self.stopped += 1,
            Err(failure) => {
                let first = || (0, failure.message.chars().take(MESSAGE_MAX).collect());
                self.errors.entry(failure.class).or_insert_with(first).0 += 1;
            }
        }
    }

    fn add_answer(&mut self, outcome: &RequestOutcome, answer: &MeasuredAnswer) {
        self.answered += 1;
        self.good += u64::from(self.slo.is_met(outcome));
        outcome.ttft().into_iter().for_each(|time| self.ttft.add(time));
        outcome.e2e().into_iter().for_each(|time| self.e2e.add(time));
        answer.gaps.iter().for_each(|gap| self.itl.add_many(gap.length, gap.count));
        self.tokens.add(outcome, answer);
        if let Some(prefix) = &answer.prefix {
            *self.prefix.get_or_insert_default() += prefix;
        }
        let (prompt, cached) = (answer.prompt_tokens.unwrap_or(0), answer.cached.tokens().unwrap_or(0));
        if let Some(name) = &answer.prefill_worker {
            let share = worker(&mut self.workers, name);
            share.prefills = true;
            share.prompts += 1;
            share.prompt_tokens += prompt;
            share.cached_tokens += cached;
        }
        if let Some(name) = &answer.decode_worker {
            let share = worker(&mut self.workers, name);
            share.decodes = true;
            share.answers += 1;
            share.output_tokens += answer.output_tokens;
        }
    }

    /// Returns the report of the outcomes so far. `facts` are the settings of the run, and other facts that help to interpret its figures.
    pub fn report(&self, name: impl Into<String>, facts: Vec<Fact>) -> Report {
        let seconds = self.last_end.as_secs_f64();
        let per_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let errors = self.errors.iter().map(|(class, (count, example))| ErrorCount {
            class: class.to_string(),
            count: *count,
            example: example.clone(),
        });
        let workers: Vec<WorkerShare> = self.workers.values().cloned().collect();
        let goodput = self.slo.is_set().then(|| {
            let ms = |time: Option<Duration>| time.map(|time| time.as_secs_f64() * 1e3);
            // A request that was stopped neither met nor missed the service levels, so it is not counted.
            let ended = self.requests - self.stopped;
            Goodput {
                slo_ttft_ms: ms(self.slo.ttft),
                slo_itl_ms: ms(self.slo.itl),
                slo_e2e_ms: ms(self.slo.e2e),
                requests: self.good,
                per_second: per_second(self.good),
                share: if ended == 0 { 0.0 } else { self.good as f64 / ended as f64 },
            }
        });
        Report {
            name: name.into(),
            facts,
            seconds,
            requests: Requests {
                sent: self.requests,
                answered: self.answered,
                failed: self.requests - self.answered - self.stopped,
                stopped: self.stopped,
                answered_per_second: per_second(self.answered),
            },
            errors: errors.collect(),
            ttft: self.ttft.summary(),
            itl: self.itl.summary(),
            e2e: self.e2e.summary(),
            goodput,
            tokens: Tokens {
                prompt_per_second: per_second(self.tokens.prompt),
                output_per_second: per_second(self.tokens.output),
                ..self.tokens.clone()
            },
            prefix: self.prefix.clone(),
            late: Late { requests: self.late, lateness: self.lateness.summary() },
            balance: Balance::of(&workers),
            workers,
            timeline: self.timeline.clone(),
        }
    }
}

/// The roles of a worker: whether it computes prompts, and whether it generates answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Roles {
    /// The worker computes prompts.
    pub prefills: bool,
    /// The worker generates answers.
    pub decodes: bool,
}

fn worker<'a>(workers: &'a mut BTreeMap<Arc<str>, WorkerShare>, name: &Arc<str>) -> &'a mut WorkerShare {
    workers.entry(Arc::clone(name)).or_insert_with(|| WorkerShare { name: name.to_string(), ..WorkerShare::default() })
}

impl Tokens {
    fn add(&mut self, outcome: &RequestOutcome, answer: &MeasuredAnswer) {
        let prompt = answer.prompt_tokens.unwrap_or(0);
        self.prompt += prompt;
        self.output += answer.output_tokens;
        match answer.cached {
            CachedCount::Counted(tokens) => self.cached_counted += tokens,
            CachedCount::Estimated(tokens) => self.cached_estimated += tokens,
            CachedCount::Unmarked(tokens) => self.cached_unmarked += tokens,
            CachedCount::Unknown => self.answers_without_cached += 1,
        }
        if answer.prompt_tokens.is_some() && answer.cached != CachedCount::Unknown {
            self.prompt_with_cached += prompt;
        }
        let differs = |found: Option<u64>, expected: Option<u64>| {
            u64::from(found.zip(expected).is_some_and(|(found, expected)| found != expected))
        };
        self.other_prompt_length += differs(answer.prompt_tokens, outcome.expected.prompt_tokens);
        self.other_answer_length += differs(Some(answer.output_tokens), outcome.expected.output_tokens);
    }
}

impl Balance {
    /// Returns the balance of the load among these workers; `None` if there are no workers.
    fn of(workers: &[WorkerShare]) -> Option<Self> {
        let ratio = |loads: Vec<u64>| {
            let (sum, max) = (loads.iter().sum::<u64>(), loads.iter().max().copied().unwrap_or(0));
            (sum > 0).then(|| max as f64 * loads.len() as f64 / sum as f64)
        };
        let computed = workers.iter().filter(|worker| worker.prefills).map(WorkerShare::computed_tokens).collect();
        let generated = workers.iter().filter(|worker| worker.decodes).map(|worker| worker.output_tokens).collect();
        (!workers.is_empty()).then(|| Self { computed_max_to_mean: ratio(computed), output_max_to_mean: ratio(generated) })
    }
}
