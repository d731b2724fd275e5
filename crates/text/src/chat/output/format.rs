//! The formats in which models write tool calls.

mod elements;
mod gemma;
mod inputs;
mod marked;
mod object;
mod types;

pub(super) use object::Start;

use super::json::{JsonReader, ReadProgress, escape_text};
use crate::chat::{INPUT, Tools};
use clap::ValueEnum;
use object::{Rest, close_object, object};
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
    /// The format `<tool_call><function=…><parameter=…>…` (Qwen 3 Coder, Qwen 3.5).
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
    /// The format `<minimax:tool_call><invoke name=…>…` (MiniMax M2).
    #[value(name = "minimax_m2")]
    #[serde(rename = "minimax_m2")]
    MinimaxM2,
    /// The format `<｜DSML｜function_calls>…` (DeepSeek V3.2).
    #[value(name = "deepseek_v32")]
    #[serde(rename = "deepseek_v32")]
    DeepseekV32,
    /// The format `<|tool_call>call:name{…}` (Gemma 4).
    Gemma4,
    /// The calls of Harmony (gpt-oss): messages to a function. Reasoning is parsed as well.
    #[value(alias = "openai")]
    Harmony,
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
const CALL_GEMMA_END: &str = "<tool_call|>";

/// Reads the arguments of a call while they arrive, and writes them as JSON.
#[derive(Clone, Debug)]
pub(super) enum ArgumentsReader {
    Json {
        reader: JsonReader,
        ends: &'static [&'static str],
    },
    Elements(elements::ElementsReader),
    Gemma(gemma::GemmaReader),
    /// The whole text is the input of a tool.
    Input {
        begun: bool,
    },
}

impl ArgumentsReader {
    /// Returns a reader of an object. The tags `ends` end it even if it is not complete.
    pub(super) fn json(ends: &'static [&'static str]) -> Self {
        Self::Json { reader: JsonReader::default(), ends }
    }

    /// Reads a text that follows the text read so far, and appends JSON to `out`.
    pub(super) fn read(&mut self, text: &str, is_ended: bool, tools: &Tools, out: &mut String) -> ReadProgress {
        match self {
            Self::Elements(reader) => reader.read(text, is_ended, tools, out),
            Self::Gemma(reader) => reader.read(text, is_ended, out),
            Self::Input { begun } => {
                if !std::mem::replace(begun, true) {
                    out.push_str(&format!("{{\"{INPUT}\": \""));
                }
                escape_text(text, out);
                if !is_ended {
                    return ReadProgress::Later(text.len());
                }
                out.push_str("\"}");
                ReadProgress::Complete(text.len())
            }
            Self::Json { reader, ends } => {
                let progress = reader.read(text, ends, out);
                match progress {
                    // The answer ends within a tag that ends the arguments.
                    ReadProgress::Later(at) if is_ended && at < text.len() => {
                        reader.close(out);
                        return ReadProgress::Complete(at);
                    }
                    ReadProgress::Later(_) if is_ended => reader.finish(out),
                    ReadProgress::Later(_) | ReadProgress::Complete(_) => {}
                }
                progress
            }
        }
    }

    /// Returns whether no arguments were read so far.
    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::Json { reader, .. } if reader.is_empty())
    }

    /// Returns whether a special token with this name is a part of the arguments. Otherwise it ends them.
    pub(super) fn has_tag(&self, name: &str) -> bool {
        match self {
            Self::Json { reader, ends } => ends.contains(&name) && reader.is_between_strings(),
            Self::Elements(reader) => reader.has_tag(name),
            Self::Gemma(_) => gemma::GemmaReader::has_tag(name),
            Self::Input { .. } => false,
        }
    }

    /// Returns the text within the arguments that is no argument.
    pub(super) fn stray(self) -> String {
        if let Self::Elements(reader) = self { reader.stray.trim_end().to_owned() } else { String::new() }
    }
}

impl ToolCallParser {
    /// Returns the parser for the answers of the model with this chat template, which renders tools.
    pub fn of_template(source: &str) -> Self {
        let has = |text: &str| source.contains(text);
        match () {
            () if has("<|tool_calls_section_begin|>") => Self::KimiK2,
            () if has(marked::DEEPSEEK.section) => Self::DeepseekV3,
            () if has("[TOOL_CALLS]") => Self::Mistral,
            () if has("<|channel|>") => Self::Harmony,
            () if has("<|tool_call>") => Self::Gemma4,
            () if has("<minimax:tool_call>") => Self::MinimaxM2,
            () if has("｜DSML｜") => Self::DeepseekV32,
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
            Self::None | Self::Json | Self::Harmony => &[],
            Self::Hermes | Self::Glm45 => &[TOOL_CALL],
            Self::Qwen3Coder => &[TOOL_CALL, elements::QWEN.call.0],
            Self::Llama3Json => &["<|python_tag|>"],
            Self::Mistral => &["[TOOL_CALLS]"],
            Self::DeepseekV3 => &[marked::DEEPSEEK.section, marked::DEEPSEEK.call],
            Self::KimiK2 => &[marked::KIMI.section, marked::KIMI.call],
            Self::MinimaxM2 => &["<minimax:tool_call>"],
            Self::DeepseekV32 => &["<｜DSML｜function_calls>"],
            Self::Gemma4 => &["<|tool_call>"],
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
            _ => None,
        }
    }

    pub(super) fn has_untagged_calls(self) -> bool {
        matches!(self, Self::Llama3Json | Self::Json)
    }

    /// Reads the beginning of a call, after its opening tag.
    pub(super) fn start(self, text: &str) -> Start {
        match self {
            Self::None | Self::Harmony => Start::NoCall,
            Self::Hermes => listed(text, &[TOOL_CALL_END]),
            Self::Llama3Json | Self::Json => listed(text, &[]),
            Self::Mistral => mistral(text),
            Self::DeepseekV3 => marked::DEEPSEEK.start(text),
            Self::KimiK2 => marked::KIMI.start(text),
            Self::Qwen3Coder => elements::QWEN.start(text),
            Self::Glm45 => elements::GLM.start(text),
            Self::MinimaxM2 => elements::MINIMAX.start(text),
            Self::DeepseekV32 => elements::DEEPSEEK_V32.start(text),
            Self::Gemma4 => gemma::start(text),
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
            Self::Hermes => next_object(rest).unwrap_or_else(|| tag_end(rest, TOOL_CALL_END)),
            Self::Qwen3Coder | Self::Glm45 => tag_end(rest, TOOL_CALL_END),
            Self::Gemma4 => tag_end(rest, CALL_GEMMA_END),
            Self::MinimaxM2 => elements::MINIMAX.after(rest),
            Self::DeepseekV32 => elements::DEEPSEEK_V32.after(rest),
            Self::Harmony => After::Text(0),
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

/// Reads an object or the first object of a list. The tags `ends` end it even if it is not complete.
fn listed(text: &str, ends: &'static [&'static str]) -> Start {
    let begun = text.trim_start();
    match begun.strip_prefix('[') {
        Some(rest) => shifted(object(rest, ends), text.len() - rest.len()),
        None => object(text, ends),
    }
}

/// Reads an object, a list of objects, or a name that is followed by the arguments.
fn mistral(text: &str) -> Start {
    const ID: &str = "[CALL_ID]";
    const ARGUMENTS: &str = "[ARGS]";
    let begun = text.trim_start();
    if begun.is_empty() || begun.starts_with(['[', '{']) {
        return listed(text, &[]);
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
        Some('{') if !name.is_empty() => {
            let (name, at) = (name.to_owned(), text.len() - left.len());
            Start::Call { name, at, arguments: ArgumentsReader::json(&[]), nested: false }
        }
        None => Start::Undecided,
        Some('[') if ID.starts_with(left) || ARGUMENTS.starts_with(left) => Start::Undecided,
        Some(_) => Start::NoCall,
    }
}

fn shifted(start: Start, by: usize) -> Start {
    match start {
        Start::Call { name, at, arguments, nested } => Start::Call { name, at: at + by, arguments, nested },
        Start::Whole { name, arguments, end } => Start::Whole { name, arguments, end: end + by },
        Start::Undecided | Start::NoCall => start,
    }
}

/// Finds a further call before the closing tag; `None` if there is none.
fn next_object(text: &str) -> Option<After> {
    let rest = text.trim_start_matches(|char: char| char.is_whitespace() || "},".contains(char));
    match rest.chars().next() {
        None => Some(After::Undecided),
        Some('{') => Some(After::Call(text.len() - rest.len())),
        Some(_) => None,
    }
}

/// Skips the closing tag of a call, and closing brackets before it, even those that a model has written once too often.
fn tag_end(text: &str, tag: &str) -> After {
    let rest = text.trim_start_matches(|char: char| char.is_whitespace() || "}]".contains(char));
    let at = text.len() - rest.len();
    match rest.strip_prefix(tag) {
        Some(_) => After::Text(at + tag.len()),
        None if tag.starts_with(rest) => After::Undecided,
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
