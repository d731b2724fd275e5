//! Parses calls in the formats of DeepSeek and Kimi: calls are between tags, and another tag separates the name from the arguments.

use super::{After, ArgumentsReader, Start};

pub(super) struct Marked {
    pub(super) section: &'static str,
    pub(super) call: &'static str,
    pub(super) arguments: &'static str,
    call_end: &'static str,
    section_end: &'static str,
    /// The tags that end a call's arguments even if these are not complete.
    ends: &'static [&'static str],
}

/// DeepSeek V3 and R1 write `function`, the tag, the name and the arguments in a block of Markdown. V3.1 writes name, tag and arguments.
pub(super) const DEEPSEEK: Marked = Marked {
    section: "<｜tool▁calls▁begin｜>",
    call: "<｜tool▁call▁begin｜>",
    arguments: "<｜tool▁sep｜>",
    call_end: "<｜tool▁call▁end｜>",
    section_end: "<｜tool▁calls▁end｜>",
    ends: &["<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```"],
};

/// Kimi K2 writes `functions.name:index`, the tag and the arguments.
pub(super) const KIMI: Marked = Marked {
    section: "<|tool_calls_section_begin|>",
    call: "<|tool_call_begin|>",
    arguments: "<|tool_call_argument_begin|>",
    call_end: "<|tool_call_end|>",
    section_end: "<|tool_calls_section_end|>",
    ends: &["<|tool_call_end|>", "<|tool_calls_section_end|>"],
};

/// Maximum number of bytes before a call's arguments. A text without arguments up to this position is no call.
const HEAD_BYTES_MAX: usize = 1024;

impl Marked {
    pub(super) fn start(&self, text: &str) -> Start {
        let begun = text.trim_start();
        if self.call.starts_with(begun) && begun.len() < self.call.len() {
            return Start::Undecided;
        }
        let is_long = text.len() > HEAD_BYTES_MAX + self.call_end.len();
        let undecided = || if is_long { Start::NoCall } else { Start::Undecided };
        let head = begun.strip_prefix(self.call).unwrap_or(begun);
        let Some((before, after)) = head.split_once(self.arguments) else { return undecided() };
        let (brace, end) = (after.find('{'), after.find(self.call_end));
        // A call without arguments has none.
        let Some(begin) = brace.into_iter().chain(end).min() else { return undecided() };
        // DeepSeek V3 has the name between the tag and the block of Markdown.
        let (name, between) = match after[..begin].trim() {
            "" => (before, ""),
            named => named.split_once('\n').unwrap_or((named, "")),
        };
        let at = text.len() - after.len() + begin;
        if at > HEAD_BYTES_MAX || !matches!(between.trim(), "" | "```json" | "```") {
            return Start::NoCall;
        }
        let name = name.trim();
        let name = name.strip_prefix("functions.").unwrap_or(name);
        let name = name.rsplit_once(':').filter(|(_, index)| index.parse::<u32>().is_ok()).map_or(name, |(name, _)| name);
        let name = name.to_owned();
        match brace {
            Some(brace) if brace == begin => Start::Call { name, at, arguments: ArgumentsReader::json(self.ends), nested: false },
            _ => Start::Whole { name, arguments: "{}".to_owned(), end: at },
        }
    }

    pub(super) fn after(&self, text: &str) -> After {
        let rest = text.trim_start_matches(|char: char| char.is_whitespace() || char == '`');
        if is_beginning(rest, self.call_end) {
            return After::Undecided;
        }
        let rest = rest.strip_prefix(self.call_end).unwrap_or(rest).trim_start();
        let at = text.len() - rest.len();
        match rest.strip_prefix(self.section_end) {
            Some(_) => After::Text(at + self.section_end.len()),
            None if rest.starts_with(self.call) => After::Call(at),
            None if is_beginning(rest, self.call) || is_beginning(rest, self.section_end) => After::Undecided,
            None => After::Text(at),
        }
    }
}

/// Returns whether the text is the beginning of a tag, but not the whole tag.
fn is_beginning(text: &str, tag: &str) -> bool {
    tag.starts_with(text) && text.len() < tag.len()
}
