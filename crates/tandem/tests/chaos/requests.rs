//! The clients' requests, and the checks of their answers.

use crate::rig::Outcome;
use serde_json::{Value, json};
use std::time::Duration;
use tandem_tests::{Endpoint, prose};
use tokio::time::Instant;

/// Returns request `number`. Half of the requests are greedy, half are sampled with a seed. Requests with different salts have equal
/// answers, but share no cached blocks.
pub fn request(number: usize, salt: &str, prompt_tokens: usize, max_tokens: usize) -> Value {
    let mut text = prose(&number.to_string(), prompt_tokens);
    text.truncate(prompt_tokens);
    let sampling = if number.is_multiple_of(2) { ("temperature", 0) } else { ("seed", number) };
    let options = json!({
        "max_tokens": max_tokens, "ignore_eos": true, "cache_salt": salt, sampling.0: sampling.1,
        "stream": true, "stream_options": { "include_usage": true },
    });
    Endpoint::Chat.request("sim", &text, options)
}

/// The parts of an answer that must be the same with and without a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerText {
    text: String,
    finish_reason: String,
    prompt_tokens: u64,
    completion_tokens: u64,
}

/// Returns the parts of a complete answer that must be the same with and without a fault; `None` if the request has failed.
pub fn answer_text(outcome: &Outcome) -> Option<AnswerText> {
    let answer = outcome.as_ref().ok().filter(|answer| answer.status == 200 && answer.done)?;
    let finish = answer.frames.iter().find_map(|frame| frame["choices"][0]["finish_reason"].as_str())?;
    Some(AnswerText {
        text: answer.text(0),
        finish_reason: finish.to_owned(),
        prompt_tokens: answer.usage("/prompt_tokens"),
        completion_tokens: answer.usage("/completion_tokens"),
    })
}

pub fn largest_gap(arrivals: &[Instant]) -> Duration {
    arrivals.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
}

/// Returns the time from a fault until the answer continued: the end of the longest gap between two chunks that includes the fault or begins just
/// after it. `None` if the answer had ended before the fault.
pub fn recovery(sent: Instant, arrivals: &[Instant], fault_at: Instant) -> Option<Duration> {
    /// Chunks that were in flight when the fault occurred arrive within this time.
    const IN_FLIGHT: Duration = Duration::from_millis(100);
    let all: Vec<Instant> = [sent].iter().chain(arrivals).copied().collect();
    let around = all.windows(2).filter(|pair| pair[0] < fault_at + IN_FLIGHT && pair[1] > fault_at);
    around.max_by_key(|pair| pair[1] - pair[0]).map(|pair| pair[1] - fault_at)
}

pub fn undisturbed(outcomes: &[Outcome]) -> Vec<AnswerText> {
    outcomes
        .iter()
        .map(|outcome| answer_text(outcome).unwrap_or_else(|| panic!("a request failed without a fault: {outcome:?}")))
        .collect()
}
