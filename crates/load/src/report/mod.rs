//! The report of a run: outcomes in; a table, JSON or an HTML page out. Its times are those of a real or of a simulated clock.
//!
//! ```
//! use std::time::Duration;
//! use tandem_load::report::{self, Expected, MeasuredAnswer, Recorder, RequestOutcome, Slo};
//!
//! let mut recorder = Recorder::new(Slo::default());
//! let ms = Duration::from_millis;
//! let answer = MeasuredAnswer { first_token: Some(ms(30)), output_tokens: 1, ..MeasuredAnswer::default() };
//! recorder.add(&RequestOutcome { due: ms(10), sent: ms(10), ended: ms(35), expected: Expected::default(), result: Ok(answer) });
//! let report = recorder.report("example", Vec::new());
//! assert_eq!(report.ttft.as_ref().map(|ttft| ttft.mean_ms), Some(20.0));
//! print!("{}", report::text(&report));
//! let page = report::html("An example", None, &[report]);
//! # assert!(page.contains("An example"));
//! ```

mod chart;
mod distribution;
mod format;
mod outcome;
mod page;
mod plan;
mod recorder;
#[cfg(test)]
mod tests;
mod text;
mod timeline;

pub use distribution::TimeSummary;
pub use outcome::{CAUSES_MAX, CachedCount, Expected, Failure, FailureClass, Gap, MeasuredAnswer, PrefixTokens, RequestOutcome};
pub use page::html;
pub use plan::{PlanSummary, TriedCluster};
pub use recorder::{Recorder, Roles, Slo};
pub use text::{comparison, text};
pub use timeline::{Bin, Timeline};

use serde::Serialize;

/// The figures of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The name of the run, which distinguishes it from others in one comparison.
    pub name: String,
    /// The settings of the run, and what else the reader should know.
    pub facts: Vec<Fact>,
    /// The time from the beginning of the run to the end of its last request.
    pub seconds: f64,
    /// The numbers of requests, by outcome.
    pub requests: Requests,
    /// The failures by class.
    pub errors: Vec<ErrorCount>,
    /// The time from when a request should have been sent to its first token; `None` if no token arrived.
    pub ttft: Option<TimeSummary>,
    /// The time between two tokens of an answer.
    pub itl: Option<TimeSummary>,
    /// The time from when a request should have been sent to the end of its answer.
    pub e2e: Option<TimeSummary>,
    /// The requests that met the service levels; `None` if none were set.
    pub goodput: Option<Goodput>,
    /// The tokens of all complete answers.
    pub tokens: Tokens,
    /// What could have been cached of the prompts, and why the rest was not; `None` if the server does not report it.
    pub prefix: Option<PrefixTokens>,
    /// How late requests were sent, compared with when they were due.
    pub late: Late,
    /// How evenly the load was spread; `None` if the workers are not known.
    pub balance: Option<Balance>,
    /// The share of each worker in the load; empty if the workers are not known.
    pub workers: Vec<WorkerShare>,
    /// The course of the run.
    pub timeline: Timeline,
}

/// A setting, or another fact about a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fact {
    /// The name of the setting.
    pub name: String,
    /// The value, as text.
    pub value: String,
}

impl Fact {
    /// Makes a fact.
    pub fn new(name: impl Into<String>, value: impl ToString) -> Self {
        Self { name: name.into(), value: value.to_string() }
    }
}

/// The number of requests of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Requests {
    /// All requests.
    pub sent: u64,
    /// The requests with a complete answer.
    pub answered: u64,
    /// The requests that failed.
    pub failed: u64,
    /// The requests in flight when the run was stopped.
    pub stopped: u64,
    /// The complete answers per second.
    pub answered_per_second: f64,
}

/// The failures of one class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorCount {
    /// The class, such as `HTTP status 503`.
    pub class: String,
    /// The number of failures.
    pub count: u64,
    /// The message of the first one.
    pub example: String,
}

/// The requests that met all service levels that were set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// The maximum time to first token.
    pub slo_ttft_ms: Option<f64>,
    /// The maximum mean time between the tokens of an answer.
    pub slo_itl_ms: Option<f64>,
    /// The maximum time to the end of the answer.
    pub slo_e2e_ms: Option<f64>,
    /// The number of requests that met all of these levels.
    pub requests: u64,
    /// The number of these requests per second.
    pub per_second: f64,
    /// The share of these requests in all that were answered or failed.
    pub share: f64,
}

/// The tokens of all complete answers and their prompts.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Tokens {
    /// The number of prompt tokens.
    pub prompt: u64,
    /// The prompt tokens per second.
    pub prompt_per_second: f64,
    /// The number of generated tokens.
    pub output: u64,
    /// The generated tokens per second.
    pub output_per_second: f64,
    /// The cached tokens that the server marks as counted by the worker that computed the prompt.
    pub cached_counted: u64,
    /// The cached tokens that the server marks as estimated.
    pub cached_estimated: u64,
    /// The cached tokens that the server reports without such a mark.
    pub cached_unmarked: u64,
    /// The prompt tokens of the answers whose number of cached tokens is known.
    pub prompt_with_cached: u64,
    /// The answers whose number of cached tokens is not known.
    pub answers_without_cached: u64,
    /// The number of answers whose prompt has another number of tokens than the trace specifies.
    pub other_prompt_length: u64,
    /// The number of answers that have another number of tokens than the trace specifies.
    pub other_answer_length: u64,
}

impl Tokens {
    /// Returns the number of all cached tokens: counted, estimated and unmarked.
    pub fn cached(&self) -> u64 {
        self.cached_counted + self.cached_estimated + self.cached_unmarked
    }

    /// Returns the share of prompt tokens that were cached, over the prompts whose number of cached tokens is known.
    pub fn hit_rate(&self) -> Option<f64> {
        (self.prompt_with_cached > 0).then(|| self.cached() as f64 / self.prompt_with_cached as f64)
    }
}

/// How late requests were sent, compared with when they were due.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Late {
    /// The requests that were sent more than 10 ms late.
    pub requests: u64,
    /// The delays of all requests.
    pub lateness: Option<TimeSummary>,
}

/// How evenly the load was spread: the load of the busiest worker divided by the mean. 1 is even.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Balance {
    /// The balance of computed prompt tokens, over the workers that compute prompts; `None` if they computed none.
    pub computed_max_to_mean: Option<f64>,
    /// The balance of generated tokens, over the workers that generate; `None` if they generated none.
    pub output_max_to_mean: Option<f64>,
}

/// One worker's share of the load.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct WorkerShare {
    /// The worker's name.
    pub name: String,
    /// Whether the worker computes prompts.
    pub prefills: bool,
    /// Whether the worker generates answers.
    pub decodes: bool,
    /// The number of prompts that the worker computed.
    pub prompts: u64,
    /// The tokens of these prompts, cached ones included.
    pub prompt_tokens: u64,
    /// The cached tokens of these prompts.
    pub cached_tokens: u64,
    /// The number of answers that the worker generated.
    pub answers: u64,
    /// The tokens of these answers.
    pub output_tokens: u64,
}

impl WorkerShare {
    /// Returns the prompt tokens that the worker computed.
    pub fn computed_tokens(&self) -> u64 {
        self.prompt_tokens.saturating_sub(self.cached_tokens)
    }
}

/// Returns the reports as JSON: `{"reports": [{"name": …}, …]}`, with a newline at the end. `plan` is the search that the reports are from.
pub fn json(plan: Option<&PlanSummary>, reports: &[Report]) -> String {
    #[derive(Serialize)]
    struct Document<'a> {
        #[serde(skip_serializing_if = "Option::is_none")]
        plan: Option<&'a PlanSummary>,
        reports: &'a [Report],
    }
    serde_json::to_string_pretty(&Document { plan, reports }).expect("a report has only texts, numbers and lists") + "\n"
}
