//! Turns the rows of a trace into requests before they are due, so that a due request can be sent at once.

use crate::{
    prompt::{LocalTokenizer, PromptKind, PromptMaker},
    report::Expected,
    request::{BodyFields, PreparedRequest},
    trace::{ConversationTrace, Load, Row},
};
use fastrand::Rng;
use serde_json::Value;
use std::time::Duration;

/// The assumed number of bytes per token of a recorded answer. It is used if no local tokenizer can count the answer's tokens.
const TOKEN_BYTES: usize = 4;

/// A row of a trace that is ready to be sent.
#[derive(Debug)]
pub(crate) struct Planned {
    /// The time at which the row is due, counted from the beginning of the run; `None`: as soon as there is capacity.
    pub(crate) at: Option<Duration>,
    pub(crate) work: PlannedWork,
}

#[derive(Debug)]
pub(crate) enum PlannedWork {
    Request { request: PreparedRequest, expected: Expected },
    Conversation { steps: Vec<PlannedStep>, tools: Option<Value> },
}

/// A request of a conversation. It lacks the messages before it, because these contain the server's answers.
#[derive(Debug)]
pub(crate) struct PlannedStep {
    pub(crate) messages: Vec<Value>,
    pub(crate) answer_tokens: Option<u64>,
}

/// The rule for the times at which requests are sent.
#[derive(Debug)]
pub(crate) enum RequestTimes {
    /// Requests are sent at the times of the trace, divided by `speed`.
    Trace { speed: f64 },
    /// Requests arrive independently of each other, `per_second` of them on average.
    Random { per_second: f64, rng: Rng, last: Duration },
    /// Requests have no times: the next one is sent when another has ended.
    Closed,
}

/// Plans the rows of a trace.
#[derive(Debug)]
pub(crate) struct Planner {
    pub(crate) bodies: BodyFields,
    pub(crate) times: RequestTimes,
    /// Makes the prompts of traces without text; `None` for traces with text.
    pub(crate) prompts: Option<PromptMaker>,
    /// The form in which the prompts of a trace without text are sent.
    pub(crate) kind: PromptKind,
    pub(crate) tokenizer: Option<LocalTokenizer>,
}

impl RequestTimes {
    fn next(&mut self, recorded: Option<Duration>) -> Option<Duration> {
        match self {
            Self::Closed => None,
            Self::Trace { speed } => recorded.map(|at| at.div_f64(*speed)),
            Self::Random { per_second, rng, last } => {
                let at = *last;
                // The times between independent arrivals are distributed exponentially.
                *last += Duration::from_secs_f64(-(1.0 - rng.f64()).ln() / *per_second);
                Some(at)
            }
        }
    }
}

impl Planner {
    pub(crate) fn plan(&mut self, row: Row) -> Planned {
        let at = self.times.next(row.at);
        let work = match row.load {
            Load::Blocks(blocks) => {
                let prompts = self.prompts.as_ref().expect("a trace of blocks has prompts");
                let prompt = prompts.prompt(row.index, &blocks);
                let request = self.bodies.completion(&prompt, blocks.output_length, self.kind);
                // A chat template adds tokens, so the number of prompt tokens of a chat is not known.
                let prompt_tokens = (self.kind != PromptKind::Chat).then_some(blocks.input_length);
                let expected = Expected { prompt_tokens, output_tokens: request.max_tokens };
                PlannedWork::Request { request, expected }
            }
            Load::Chat(chat) => PlannedWork::Request { request: self.bodies.chat(chat), expected: Expected::default() },
            Load::Conversation(ConversationTrace { steps, tools }) => {
                let steps = steps.into_iter().map(|step| PlannedStep {
                    answer_tokens: step.answer.as_deref().map(|answer| self.tokens(answer)),
                    messages: step.messages,
                });
                PlannedWork::Conversation { steps: steps.collect(), tools }
            }
        };
        Planned { at, work }
    }

    /// Returns the number of tokens in a recorded answer.
    fn tokens(&self, answer: &str) -> u64 {
        let counted = self.tokenizer.as_ref().and_then(|tokenizer| tokenizer.tokens(answer).ok());
        counted.unwrap_or(answer.len().div_ceil(TOKEN_BYTES) as u64).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_times_follow_the_trace_and_the_speed() {
        let mut times = RequestTimes::Trace { speed: 4.0 };
        assert_eq!(times.next(Some(Duration::from_secs(2))), Some(Duration::from_millis(500)));
        assert_eq!(RequestTimes::Closed.next(Some(Duration::from_secs(2))), None);
    }

    #[test]
    fn random_times_have_the_mean_rate_and_the_spread_of_independent_arrivals() {
        let mut times = RequestTimes::Random { per_second: 50.0, rng: Rng::with_seed(1), last: Duration::ZERO };
        let at: Vec<f64> = (0..20_000).filter_map(|_| times.next(None)).map(|at| at.as_secs_f64()).collect();
        let gaps: Vec<f64> = at.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let deviation = (gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
        assert!((mean * 50.0 - 1.0).abs() < 0.03 && (deviation / mean - 1.0).abs() < 0.05, "mean {mean}, deviation {deviation}");
        assert_eq!(at[0], 0.0);
    }
}
