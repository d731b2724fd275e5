//! The outcome of one request.

use serde::Serialize;
use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

/// The outcome of one request. All times are counted from the beginning of the run.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestOutcome {
    /// The time at which the request was due. In an open loop it follows from the trace; in a closed loop it is the time at which the request
    /// was sent.
    pub due: Duration,
    /// The time at which the request was sent.
    pub sent: Duration,
    /// The time at which the answer was complete or the request failed.
    pub ended: Duration,
    /// The expected numbers of tokens in the prompt and in the answer.
    pub expected: Expected,
    /// The complete answer, or the reason why there is none.
    pub result: Result<MeasuredAnswer, Failure>,
}

/// The numbers of tokens that a trace specifies for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// The number of tokens in the prompt; `None` if the trace does not specify it.
    pub prompt_tokens: Option<u64>,
    /// The number of tokens in the answer; `None` if the trace does not specify it.
    pub output_tokens: Option<u64>,
}

/// The measurements of a complete answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MeasuredAnswer {
    /// The time at which the first token arrived; `None` if the answer has no token.
    pub first_token: Option<Duration>,
    /// The times between consecutive tokens, in order.
    pub gaps: Vec<Gap>,
    /// The number of prompt tokens, as the server counted them; `None` if the server did not report it.
    pub prompt_tokens: Option<u64>,
    /// The number of generated tokens.
    pub output_tokens: u64,
    /// The number of cached prompt tokens.
    pub cached: CachedCount,
    /// What could have been cached of the prompt; `None` if the server does not report it.
    pub prefix: Option<PrefixTokens>,
    /// The worker that computed the prompt; `None` if the answer does not name it.
    pub prefill_worker: Option<Arc<str>>,
    /// The worker that generated the answer; `None` if the answer does not name it.
    pub decode_worker: Option<Arc<str>>,
}

/// The tokens of prompts that could have been cached, that were predicted to be, and that were. Sums over the prompts of which the server reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PrefixTokens {
    /// All tokens of the prompts.
    pub prompt_tokens: u64,
    /// The tokens that some worker had cached.
    pub possible_tokens: u64,
    /// The tokens that a worker that could have computed the prompt had cached.
    pub eligible_tokens: u64,
    /// The tokens that the chosen worker was expected to have cached.
    pub chosen_tokens: u64,
    /// The tokens that were found in the chosen worker's cache.
    pub found_tokens: u64,
    /// The tokens that were not found, by cause: at most [`CAUSES_MAX`] causes.
    pub uncached: BTreeMap<String, u64>,
}

/// The maximum number of causes in [`PrefixTokens`].
pub const CAUSES_MAX: usize = 16;

impl std::ops::AddAssign<&Self> for PrefixTokens {
    fn add_assign(&mut self, other: &Self) {
        self.prompt_tokens = self.prompt_tokens.saturating_add(other.prompt_tokens);
        self.possible_tokens = self.possible_tokens.saturating_add(other.possible_tokens);
        self.eligible_tokens = self.eligible_tokens.saturating_add(other.eligible_tokens);
        self.chosen_tokens = self.chosen_tokens.saturating_add(other.chosen_tokens);
        self.found_tokens = self.found_tokens.saturating_add(other.found_tokens);
        for (cause, tokens) in &other.uncached {
            if self.uncached.len() < CAUSES_MAX || self.uncached.contains_key(cause) {
                let sum = self.uncached.entry(cause.clone()).or_default();
                *sum = sum.saturating_add(*tokens);
            }
        }
    }
}

/// One or more gaps of equal length between consecutive tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The time between one token and the next.
    pub length: Duration,
    /// The number of consecutive gaps of this length.
    pub count: u32,
}

/// The number of a prompt's cached tokens, and how it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachedCount {
    /// The server marks the number as counted by the worker that computed the prompt.
    Counted(u64),
    /// The server marks the number as an estimate.
    Estimated(u64),
    /// The server reports the number without either mark.
    Unmarked(u64),
    /// The server does not report cached tokens.
    #[default]
    Unknown,
}

/// The reason why a request has no complete answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The class by which failures are counted.
    pub class: FailureClass,
    /// A message about this failure, in one sentence.
    pub message: String,
}

/// The classes of failures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureClass {
    /// The server answered with this HTTP status.
    Status(u16),
    /// The server was unreachable, or the connection was lost before the answer began.
    Connection,
    /// The answer was not complete within the time limit.
    Timeout,
    /// The server reported an error within the stream.
    ErrorEvent,
    /// The stream ended without its last event.
    CutStream,
    /// The stream does not follow the OpenAI API.
    MalformedStream,
    /// The run was stopped before the answer was complete.
    Stopped,
}

impl fmt::Display for FailureClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => write!(f, "HTTP status {status}"),
            Self::Connection => f.write_str("connection"),
            Self::Timeout => f.write_str("timeout"),
            Self::ErrorEvent => f.write_str("error in the stream"),
            Self::CutStream => f.write_str("cut stream"),
            Self::MalformedStream => f.write_str("malformed stream"),
            Self::Stopped => f.write_str("stopped"),
        }
    }
}

impl CachedCount {
    /// Returns the number of cached tokens; `None` if it is unknown.
    pub fn tokens(self) -> Option<u64> {
        match self {
            Self::Counted(tokens) | Self::Estimated(tokens) | Self::Unmarked(tokens) => Some(tokens),
            Self::Unknown => None,
        }
    }
}

impl RequestOutcome {
    /// Returns the time from when the request was due to its first token; `None` if there is no token.
    pub fn ttft(&self) -> Option<Duration> {
        let first = self.result.as_ref().ok()?.first_token?;
        Some(first.saturating_sub(self.due))
    }

    /// Returns the time from when the request was due to the end of its answer; `None` if it failed.
    pub fn e2e(&self) -> Option<Duration> {
        self.result.is_ok().then(|| self.ended.saturating_sub(self.due))
    }

    /// Returns how much later than due the request was sent.
    pub fn lateness(&self) -> Duration {
        self.sent.saturating_sub(self.due)
    }
}

impl MeasuredAnswer {
    /// Returns the mean time between two tokens; `None` if there are fewer than two. Unlike `gaps`, it does not depend on how many tokens
    /// a server sends at once.
    pub fn mean_itl(&self) -> Option<Duration> {
        let gaps = u32::try_from(self.output_tokens.saturating_sub(1)).unwrap_or(u32::MAX);
        let sum = self.gaps.iter().map(|gap| gap.length.saturating_mul(gap.count)).fold(Duration::ZERO, Duration::saturating_add);
        sum.checked_div(gaps)
    }
}
