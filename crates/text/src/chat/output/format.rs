//! The formats in which models write tool calls.

mod marked;
mod xml;

use super::json::{Rest, Start, close_object, object};
use crate::chat::Tools;
use clap::ValueEnum;
use serde::Serialize;

/// The format in which a model writes tool calls. The names are vLLM's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum ToolCallParser {
    /// Tool calls are not parsed: they stay in the content.
    #[default]
    None,
    /// The format `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen 2.5, Qwen 3).
    #[value(alias = "qwen")]
    Hermes,
    /// The format `<tool_call><function=…><parameter=…>…` (Qwen 3 Coder).
    #[value(name = "qwen3_coder", alias = "qwen3_xml")]
    #[serde(rename = "qwen3_coder")]
    Qwen3Coder,
    /// The format `{"name": …, "parameters": …}`, which may follow `<|python_tag|>` (Llama 3).
    #[value(name = "llama3_json", alias = "llama4_json")]
    #[serde(rename = "llama3_json")]
    Llama3Json,
    /// The tag `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name{…}` (Mistral).
    Mistral,
    /// The format `<｜tool▁calls▁begin｜>…` (DeepSeek V3, R1 and V3.1).
    #[value(name = "deepseek_v3", alias = "deepseek_v31")]
    #[serde(rename = "deepseek_v3")]
    DeepseekV3,
    /// The format `<|tool_calls_section_begin|>…` (Kimi K2).
    #[value(name = "kimi_k2")]
    #[serde(rename = "kimi_k2")]
    KimiK2,
    /// The format `<tool_call>name<arg_key>…` (GLM 4.5).
    #[value(name = "glm45", alias = "glm47")]
    Glm45,
    /// The whole answer is a call or a list of calls, as JSON.
    Json,
}

/// The texts around a call. A call is `open`, an object with the fields `name` and `arguments`, and `close`.
pub struct CallSyntax {
    pub open: &'static str,
    /// The name of the field with the arguments.
    pub arguments: &'static str,
    pub close: &'static str,
    /// The text between two calls; `None` if an answer has only one call.
    pub separator: Option<&'static str>,
}

/// The text that follows a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// Only closing syntax follows so far. Further text decides what follows.
    Undecided,
    /// Another call begins at this byte.
    Call(usize),
    /// Text begins at this byte.
    Text(usize),
}

const TOOL_CALL: &str = "<tool_call>";
const TOOL_CALL_END: &str = "</tool_call>";

impl ToolCallParser {
    /// Returns the parser for the answers of the model with this chat template, which renders tools.
    pub fn of_template(source: &str) -> Self {
        let has = |text: &str| source.contains(text);
        match () {
            () if has("<|tool_calls_section_begin|>") => Self::KimiK2,
            () if has(marked::DEEPSEEK.section) => Self::DeepseekV3,
            () if has("[TOOL_CALLS]") => Self::Mistral,
            () if has("<function=") => Self::Qwen3Coder,
            () if has("<arg_key>") => Self::Glm45,
            () if has(TOOL_CALL) => Self::Hermes,
            () if has("<|python_tag|>") || (has("<|eot_id|>") && has("\"parameters\"")) => Self::Llama3Json,
            () => Self::Json,
        }
    }

    /// Returns the tags with which calls begin.
    pub(super) fn opens(self) -> &'static [&'static str] {
        match self {
            Self::None | Self::Json => &[],
            Self::Hermes | Self::Glm45 => &[TOOL_CALL],
            Self::Qwen3Coder => &[TOOL_CALL, xml::FUNCTION],
            Self::Llama3Json => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]"],
            Self::DeepseekV3 => &[marked::DEEPSEEK.section, marked::DEEPSEEK.call],
            Self::KimiK2 => &[marked::KIMI.section, marked::KIMI.call],
        }
    }

    /// Returns the syntax of calls; `None` if they are not JSON with fixed fields between fixed texts.
    pub fn syntax(self) -> Option<CallSyntax> {
        match self {
            Self::Hermes => {
                Some(CallSyntax { open: "<tool_call>\n", arguments: "arguments", close: "\n</tool_call>", separator: Some("\n") })
            }
            Self::Llama3Json => Some(CallSyntax { open: "", arguments: "parameters", close: "", separator: Some("; ") }),
            Self::Json => Some(CallSyntax { open: "", arguments: "parameters", close: "", separator: None }),
            Self::None | Self::Qwen3Coder | Self::Mistral | Self::DeepseekV3 | Self::KimiK2 | Self::Glm45 => None,
        }
    }

    pub(super) fn has_untagged_calls(self) -> bool {
        matches!(self, Self::Llama3Json | Self::Json)
    }

    /// Reads the beginning of a call, after its opening tag.
    pub(super) fn start(self, text: &str, tools: &Tools) -> Start {
        match self {
            Self::None => Start::NoCall,
            Self::Hermes => object(text),
            Self::Llama3Json | Self::Json => listed(text),
            Self::Mistral => mistral(text),
            Self::DeepseekV3 => marked::DEEPSEEK.start(text),
            Self::KimiK2 => marked::KIMI.start(text),
            Self::Qwen3Coder => xml::function(text, tools),
            Self::Glm45 => xml::arguments(text, tools),
        }
    }

    /// Parses the text that follows a call. `nested` is true if the call's arguments were the value of an object's field.
    pub(super) fn after(self, text: &str, nested: bool) -> After {
        let closed = match if nested { close_object(text) } else { Rest::Closed(0) } {
            Rest::Undecided => return After::Undecided,
            Rest::Closed(end) => end,
            Rest::Open => 0,
        };
        let rest = &text[closed..];
        let after = match self {
            Self::Hermes | Self::Qwen3Coder | Self::Glm45 => tag_end(rest),
            Self::None | Self::Llama3Json | Self::Json | Self::Mistral => list_rest(rest),
            Self::DeepseekV3 => marked::DEEPSEEK.after(rest),
            Self::KimiK2 => marked::KIMI.after(rest),
        };
        match after {
            After::Undecided => After::Undecided,
            After::Call(at) => After::Call(closed + at),
            After::Text(at) => After::Text(closed + at),
        }
    }

    /// Makes an id for a call. Mistral's templates accept only ids of nine letters and digits.
    pub(super) fn new_id(self) -> String {
        let random = uuid::Uuid::new_v4().simple().to_string();
        if self == Self::Mistral { random[..9].to_owned() } else { format!("call_{random}") }
    }
}

/// Reads an object or the first object of a list.
fn listed(text: &str) -> Start {
    let begun = text.trim_start();
    match begun.strip_prefix('[') {
        Some(rest) => shifted(object(rest), text.len() - rest.len()),
        None => object(text),
    }
}

/// Reads an object, a list of objects, or a name that is followed by the arguments.
fn mistral(text: &str) -> Start {
    const ID: &str = "[CALL_ID]";
    const ARGUMENTS: &str = "[ARGS]";
    let begun = text.trim_start();
    if begun.is_empty() || begun.starts_with(['[', '{']) {
        return listed(text);
    }
    let is_name = |char: char| char.is_ascii_alphanumeric() || "_-.".contains(char);
    let rest = begun.trim_start_matches(is_name);
    let name = &begun[..begun.len() - rest.len()];
    let mut left = rest.trim_start();
    if let Some(id) = left.strip_prefix(ID) {
        left = id.trim_start_matches(is_name);
    }
    let left = left.strip_prefix(ARGUMENTS).unwrap_or(left).trim_start();
    match left.chars().next() {
        Some('{') if !name.is_empty() => Start::Call { name: name.to_owned(), at: text.len() - left.len(), nested: false },
        None => Start::Undecided,
        Some('[') if ID.starts_with(left) || ARGUMENTS.starts_with(left) => Start::Undecided,
        Some(_) => Start::NoCall,
    }
}

fn shifted(start: Start, by: usize) -> Start {
    match start {
        Start::Call { name, at, nested } => Start::Call { name, at: at + by, nested },
        Start::Whole { name, arguments, end } => Start::Whole { name, arguments, end: end + by },
        Start::Undecided | Start::NoCall => start,
    }
}

/// Skips `</tool_call>`, and braces that a model has written once too often.
fn tag_end(text: &str) -> After {
    let rest = text.trim_start_matches(|char: char| char.is_whitespace() || char == '}');
    let at = text.len() - rest.len();
    match rest.strip_prefix(TOOL_CALL_END) {
        Some(_) => After::Text(at + TOOL_CALL_END.len()),
        None if TOOL_CALL_END.starts_with(rest) => After::Undecided,
        None => After::Text(at),
    }
}

/// Skips the comma or semicolon before a further call, or the end of a list.
fn list_rest(text: &str) -> After {
    let rest = text.trim_start();
    let at = |rest: &str| text.len() - rest.len();
    match rest.chars().next() {
        None => After::Undecided,
        Some('{') => After::Call(at(rest)),
        Some(']') => After::Text(at(rest) + 1),
        Some(',' | ';') => match rest[1..].trim_start() {
            "" => After::Undecided,
            next if next.starts_with('{') => After::Call(at(next)),
            _ => After::Text(at(rest)),
        },
        Some(_) => After::Text(at(rest)),
    }
}
