//! What clients ask, and what an answer must be for them.

use crate::rig::Outcome;
use serde_json::{Value, json};
use std::time::Duration;
use tandem_tests::{Endpoint, prose};
use tokio::time::Instant;

/// Half of them greedy, half drawn by a seed. Prompts of another salt share no cache with these, but their answers.
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

/// The part of an answer that must not depend on faults: text, finish reason, tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnswerText {
    text: String,
    finish_reason: String,
    prompt_tokens: u64,
    completion_tokens: u64,
}

/// `None`: it has failed.
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

/// The longest wait between two pieces of the answer.
pub fn largest_gap(arrivals: &[Instant]) -> Duration {
    arrivals.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default()
}

/// How long after `struck` the answer went on, judged by its longest wait from then on. What was on its way then came still.
pub fn recovery(asked: Instant, arrivals: &[Instant], struck: Instant) -> Option<Duration> {
    const ON_ITS_WAY: Duration = Duration::from_millis(100);
    let all: Vec<Instant> = [asked].iter().chain(arrivals).copied().collect();
    let around = all.windows(2).filter(|pair| pair[0] < struck + ON_ITS_WAY && pair[1] > struck);
    around.max_by_key(|pair| pair[1] - pair[0]).map(|pair| pair[1] - struck)
}

/// What answers are without a fault.
pub fn undisturbed(outcomes: &[Outcome]) -> Vec<AnswerText> {
    outcomes.iter().map(|outcome| answer_text(outcome).unwrap_or_else(|| panic!("nothing disturbed it: {outcome:?}"))).collect()
}
