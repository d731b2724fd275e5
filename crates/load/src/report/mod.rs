//! Makes the report of a run from the outcomes of its requests, as a table, JSON or an HTML page. The times may come from a real clock or
//! from a simulation.
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
pub use format::percent;
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
    /// The name of the run, which distinguishes it from other runs in a comparison.
    pub name: String,
    /// The settings of the run, and other facts that help to interpret its figures.
    pub facts: Vec<Fact>,
    /// The time from the beginning of the run to the end of its last request.
    pub seconds: f64,
    /// The numbers of requests, by outcome.
    pub requests: Requests,
    /// The failures by class.
    pub errors: Vec<ErrorCount>,
    /// The TTFT, counted from the time at which a request was due; `None` if no token arrived.
    pub ttft: Option<TimeSummary>,
    /// The time between two consecutive tokens of an answer; `None` if no answer has two tokens.
    pub itl: Option<TimeSummary>,
    /// The time from when a request was due to the end of its answer; `None` if no answer is complete.
    pub e2e: Option<TimeSummary>,
    /// The requests that met the service levels; `None` if no service levels were set.
    pub goodput: Option<Goodput>,
    /// The token counts of all complete answers and their prompts.
    pub tokens: Tokens,
    /// What could have been cached of the prompts, and why the rest was not; `None` if the server does not report it.
    pub prefix: Option<PrefixTokens>,
    /// How much later than due the requests were sent.
    pub late: Late,
    /// How evenly the load was divided among the workers; `None` if the workers are not known.
    pub balance: Option<Balance>,
    /// The share of each worker in the load; empty if the workers are not known.
    pub workers: Vec<WorkerShare>,
    /// The figures of the run over time.
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

/// The numbers of requests of a run, by outcome.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Requests {
    /// The number of requests that were sent.
    pub sent: u64,
    /// The number of requests with a complete answer.
    pub answered: u64,
    /// The number of requests that failed.
    pub failed: u64,
    /// The number of requests that were in flight when the run was stopped.
    pub stopped: u64,
    /// The number of complete answers per second.
    pub answered_per_second: f64,
}

/// The failures of one class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ErrorCount {
    /// The name of the class, such as `HTTP status 503`.
    pub class: String,
    /// The number of failures of this class.
    pub count: u64,
    /// The message of the first failure of this class.
    pub example: String,
}

/// The requests that met all service levels that were set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Goodput {
    /// The service level: the maximum time to first token.
    pub slo_ttft_ms: Option<f64>,
    /// The service level: the maximum mean time between the tokens of an answer.
    pub slo_itl_ms: Option<f64>,
    /// The service level: the maximum time to the end of the answer.
    pub slo_e2e_ms: Option<f64>,
    /// The number of requests that met all levels that were set.
    pub requests: u64,
    /// The number of requests per second that met all levels.
    pub per_second: f64,
    /// The fraction of the answered and failed requests that met all levels, from 0 to 1.
    pub share: f64,
}

/// The token counts of all complete answers and their prompts.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Tokens {
    /// The number of prompt tokens.
    pub prompt: u64,
    /// The number of prompt tokens per second.
    pub prompt_per_second: f64,
    /// The number of generated tokens.
    pub output: u64,
    /// The number of generated tokens per second.
    pub output_per_second: f64,
    /// The number of cached tokens that the server marks as counted by the worker that computed the prompt.
    pub cached_counted: u64,
    /// The number of cached tokens that the server marks as estimated.
    pub cached_estimated: u64,
    /// The number of cached tokens that the server reports without either mark.
    pub cached_unmarked: u64,
    /// The number of prompt tokens in the requests whose number of cached tokens is known.
    pub prompt_with_cached: u64,
    /// The number of answers whose number of cached tokens is not known.
    pub answers_without_cached: u64,
    /// The number of answers whose prompt does not have the number of tokens that the trace specifies.
    pub other_prompt_length: u64,
    /// The number of answers that do not have the number of tokens that the trace specifies.
    pub other_answer_length: u64,
}

impl Tokens {
    /// Returns the number of all cached tokens: counted, estimated and unmarked.
    pub fn cached(&self) -> u64 {
        self.cached_counted + self.cached_estimated + self.cached_unmarked
    }

    /// Returns the fraction of prompt tokens that were cached. Only prompts whose number of cached tokens is known are counted.
    pub fn hit_rate(&self) -> Option<f64> {
        (self.prompt_with_cached > 0).then(|| self.cached() as f64 / self.prompt_with_cached as f64)
    }
}

/// How much later than due the requests were sent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Late {
    /// The number of requests that were sent more than 10 ms late.
    pub requests: u64,
    /// The delays of all requests.
    pub lateness: Option<TimeSummary>,
}

/// How evenly the load was divided: the load of the busiest worker divided by the mean load. 1 means that all loads are equal.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Balance {
    /// The balance of computed prompt tokens among the workers that compute prompts; `None` if no prompt token was computed.
    pub computed_max_to_mean: Option<f64>,
    /// The balance of generated tokens among the workers that generate; `None` if no token was generated.
    pub output_max_to_mean: Option<f64>,
}

/// One worker's share in the load.
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
    /// The number of tokens in the prompts that the worker computed, including cached tokens.
    pub prompt_tokens: u64,
    /// The number of cached tokens among `prompt_tokens`.
    pub cached_tokens: u64,
    /// The number of answers that the worker generated.
    pub answers: u64,
    /// The number of tokens that the worker generated.
    pub output_tokens: u64,
}

impl WorkerShare {
    /// Returns the number of prompt tokens that the worker computed.
    pub fn computed_tokens(&self) -> u64 {
        self.prompt_tokens.saturating_sub(self.cached_tokens)
    }
}

/// Returns the reports as JSON, `{"reports": [{"name": …}, …]}`, with a newline at the end. If the reports come from a search for the
/// smallest cluster, `plan` is its result.
pub fn json(plan: Option<&PlanSummary>, reports: &[Report]) -> String {
    #[derive(Serialize)]
    struct Document<'a> {
        #[serde(skip_serializing_if = "Option::is_none")]
        plan: Option<&'a PlanSummary>,
        reports: &'a [Report],
    }
    serde_json::to_string_pretty(&Document { plan, reports }).expect("a report has only texts, numbers and lists") + "\n"
}
