//! The cost of a long answer, which arrives in single characters, is proportional to its length.

use super::*;
use std::time::{Duration, Instant};

#[test]
#[expect(clippy::disallowed_methods, reason = "it measures")]
fn long_answers_are_parsed_in_linear_time() {
    const BYTES: usize = 100_000;
    // Even a build without optimization needs a fraction of this. Parsing the whole text again with each character needs a multiple.
    const TIME_MAX: Duration = Duration::from_secs(4);
    let long: String = "a <b> } , 12".chars().cycle().take(BYTES).collect();
    let (spaces, braces) = (" ".repeat(BYTES), "}".repeat(BYTES));
    for (parser, text) in [
        (ToolCallParser::Hermes, format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{\"text\": \"{long}\"}}}}</tool_call>")),
        (ToolCallParser::Hermes, format!("<tool_call>{{\"arguments\": {{\"text\": \"{long}\"}}, \"name\": \"f\"}}</tool_call>")),
        (ToolCallParser::Hermes, format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{}}{braces}</tool_call>")),
        (ToolCallParser::Json, format!("{{\"name\": \"f\", \"parameters\": {{}}}}{spaces}")),
        (ToolCallParser::Qwen3Coder, format!("<function=f><parameter=text>\n{long}\n</parameter></function>")),
        (ToolCallParser::Qwen3Coder, format!("<function=f><parameter=list>\n[\"{long}\"]\n</parameter></function>")),
        (ToolCallParser::Gemma4, format!("<|tool_call>call:f{{text:<|\"|>{long}<|\"|>}}<tool_call|>")),
        (ToolCallParser::Harmony, format!("<|channel|>commentary to=functions.f<|message|>{{\"a\": \"{long}\"}}<|call|>")),
    ] {
        for thoughts in [ReasoningParser::None, ReasoningParser::Think] {
            let format = OutputFormat { reasoning: reasoning(thoughts, true).reasoning, ..format(parser) };
            let began = Instant::now();
            let deltas = split(&format, text.split("").filter(|char| !char.is_empty()));
            assert!(began.elapsed() < TIME_MAX, "{parser:?} {thoughts:?} {}: {:?}", &text[..40], began.elapsed());
            let is_call = thoughts == ReasoningParser::None || parser != ToolCallParser::Json;
            assert_eq!(deltas.iter().any(|delta| delta.starts_with("call 0 f")), is_call, "{}", &text[..40]);
        }
    }
    // A text that looks like many calls, in one chunk.
    let began = Instant::now();
    let text = "<tool_call>{\"name\": \"".repeat(BYTES / 20);
    assert_eq!(split(&format(ToolCallParser::Hermes), [&*text]), [format!("text {text}")]);
    assert!(began.elapsed() < TIME_MAX, "{:?}", began.elapsed());
}
