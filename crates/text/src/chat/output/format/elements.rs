//! Parses calls whose arguments are elements: texts between tags, with names (Qwen 3 Coder, GLM 4.5, MiniMax M2, DeepSeek V3.2). The schema of a
//! tool determines which of these texts are numbers, lists and so on.
//!
//! A value may contain any tag, such as a file about this format. So a closing tag ends a value only if the next element, or the end of the call,
//! follows. Models sometimes omit closing tags: at the beginning of a line, the next parameter or the end of the call ends a value as well.

use super::{After, ArgumentsReader, Start, types::Types};
use crate::chat::{
    INPUT, Tool, Tools,
    output::{
        json::{ReadProgress, escape_text},
        tags::partial_suffix,
    },
};
use tandem_grammar::InputPlace;

/// The tags of a format.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::chat::output) struct ElementTags {
    /// The tags around the name of the call; empty if the name follows the opening tag of the calls directly.
    pub(super) call: (&'static str, &'static str),
    /// The tag that ends the call's elements; empty if there is none.
    pub(super) call_end: &'static str,
    /// The tag that follows the last element, or the last call.
    pub(super) calls_end: &'static str,
    /// The texts before and after the name of a parameter.
    parameter: (&'static str, &'static str),
    /// The text after name and attributes, before the value.
    value: &'static str,
    value_end: &'static str,
    /// Whether the template writes a line feed before and after each value.
    has_own_lines: bool,
}

pub(super) const QWEN: ElementTags = ElementTags {
    call: ("<function=", ">"),
    call_end: "</function>",
    calls_end: super::TOOL_CALL_END,
    parameter: ("<parameter=", ">"),
    value: "",
    value_end: "</parameter>",
    has_own_lines: true,
};

pub(super) const GLM: ElementTags = ElementTags {
    call: ("", ""),
    call_end: "",
    calls_end: super::TOOL_CALL_END,
    parameter: ("<arg_key>", "</arg_key>"),
    value: "<arg_value>",
    value_end: "</arg_value>",
    has_own_lines: false,
};

pub(super) const MINIMAX: ElementTags = ElementTags {
    call: ("<invoke name=\"", "\">"),
    call_end: "</invoke>",
    calls_end: "</minimax:tool_call>",
    parameter: ("<parameter name=\"", "\""),
    value: ">",
    value_end: "</parameter>",
    has_own_lines: false,
};

pub(super) const DEEPSEEK_V32: ElementTags = ElementTags {
    call: ("<｜DSML｜invoke name=\"", "\">"),
    call_end: "</｜DSML｜invoke>",
    calls_end: "</｜DSML｜function_calls>",
    parameter: ("<｜DSML｜parameter name=\"", "\""),
    value: ">",
    value_end: "</｜DSML｜parameter>",
    has_own_lines: false,
};

/// Maximum length of a name, and of the attributes after a name, in bytes.
const NAME_BYTES_MAX: usize = 256;

/// Whether a text begins with a tag.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Begins {
    Yes,
    No,
    /// The text is too short to tell.
    Perhaps,
}

fn begins(text: &str, tag: &str) -> Begins {
    match () {
        () if tag.is_empty() => Begins::No,
        () if text.starts_with(tag) => Begins::Yes,
        () if tag.starts_with(text) => Begins::Perhaps,
        () => Begins::No,
    }
}

/// The beginning of an element.
enum ElementHead<'a> {
    Parameter { name: &'a str, attributes: &'a str, len: usize },
    Malformed,
    Partial,
}

/// The text up to a tag; `None` if the text is malformed before it.
fn up_to<'a>(text: &'a str, tag: &str) -> Option<Result<&'a str, ()>> {
    match text.find(tag) {
        Some(at) if at <= NAME_BYTES_MAX => Some(Ok(&text[..at])),
        None if text.len() < NAME_BYTES_MAX + tag.len() => Some(Err(())),
        _ => None,
    }
}

/// Whether a tag's text may continue like this: a line feed or another tag in it ends it.
fn is_in_tag(text: &str) -> bool {
    !text.trim_start().contains(['<', '\n'])
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && !text.contains(|char: char| char.is_whitespace() || char == '<' || char == '>')
}

impl ElementTags {
    /// Returns the form of a call of the tool with this name, whose only argument is a text.
    pub(super) fn input_place(&self, name: &str) -> InputPlace {
        let ((open, close), (before, after)) = (self.call, self.parameter);
        let line = if self.has_own_lines { "\n" } else { "" };
        let attributes = if *self == DEEPSEEK_V32 { " string=\"true\"" } else { "" };
        let parameter = format!("{before}{INPUT}{after}{attributes}");
        let end = format!("{line}{}", self.value_end);
        match self.value {
            // The name has no end of its own.
            value if open.is_empty() => {
                let parameter = parameter.strip_prefix(before).unwrap_or_default();
                InputPlace::new(&[super::TOOL_CALL, name, before], &[parameter, value], Some(&end), &[self.calls_end])
            }
            value => {
                let head = format!("{parameter}{value}{line}");
                InputPlace::new(&[&format!("{open}{name}{close}")], &[&head], Some(&end), &[self.call_end])
            }
        }
    }

    /// Reads the beginning of a call. The tag before its name may have been read.
    pub(super) fn start(&'static self, text: &str) -> Start {
        let begun = text.trim_start();
        let (open, close) = self.call;
        let head = match begins(begun, open) {
            Begins::Perhaps => return Start::Undecided,
            Begins::Yes => &begun[open.len()..],
            Begins::No => begun,
        };
        let name_len = match close {
            "" => head.find(['\n', '<']),
            close => head.find(close),
        };
        let Some(len) = name_len else {
            let is_possible = head.len() <= NAME_BYTES_MAX + close.len() && (close.is_empty() || is_in_tag(head));
            return if is_possible { Start::Undecided } else { Start::NoCall };
        };
        let name = head[..len].trim();
        let elements = head[len + close.len()..].trim_start();
        let at = text.len() - elements.len();
        match self.follows(elements) {
            _ if !is_name(name) || !is_in_tag(&head[..len]) || len > NAME_BYTES_MAX => Start::NoCall,
            Begins::Perhaps => Start::Undecided,
            Begins::No => Start::NoCall,
            Begins::Yes => {
                let arguments = ArgumentsReader::Elements(ElementsReader::new(self, name));
                Start::Call { name: name.to_owned(), at, arguments, nested: false }
            }
        }
    }

    /// Parses the text after a call. Another call may follow without another opening tag.
    pub(super) fn after(&self, text: &str) -> After {
        let rest = text.trim_start();
        let at = text.len() - rest.len();
        match (begins(rest, self.call.0), begins(rest, self.calls_end)) {
            (Begins::Yes, _) => After::Call(at),
            (_, Begins::Yes) => After::Text(at + self.calls_end.len()),
            (Begins::Perhaps, _) | (_, Begins::Perhaps) => After::Undecided,
            (Begins::No, Begins::No) => After::Text(at),
        }
    }

    /// Returns whether the text begins with an element or with the end of the call.
    fn follows(&self, text: &str) -> Begins {
        let all = [self.parameter.0, self.call_end, self.calls_end].map(|tag| begins(text, tag));
        all.into_iter()
            .find(|begins| *begins == Begins::Yes)
            .or(all.into_iter().find(|begins| *begins == Begins::Perhaps))
            .unwrap_or(Begins::No)
    }

    /// Reads the beginning of an element, which begins with the tag of a parameter.
    fn head<'a>(&self, text: &'a str) -> ElementHead<'a> {
        let (open, close) = self.parameter;
        let after = &text[open.len()..];
        let name = match up_to(after, close) {
            Some(Ok(name)) if close.starts_with('<') || is_in_tag(name) => name,
            Some(Err(())) if close.starts_with('<') || is_in_tag(after) => return ElementHead::Partial,
            _ => return ElementHead::Malformed,
        };
        if !is_name(name.trim()) {
            return ElementHead::Malformed;
        }
        let rest = &after[name.len() + close.len()..];
        let sure = &rest[..rest.len() - partial_suffix(rest, &[self.value])];
        let attributes = match up_to(rest, self.value) {
            Some(Ok(attributes)) if is_in_tag(attributes) => attributes,
            Some(Err(())) if is_in_tag(sure) => return ElementHead::Partial,
            _ => return ElementHead::Malformed,
        };
        let len = open.len() + name.len() + close.len() + attributes.len() + self.value.len();
        ElementHead::Parameter { name: name.trim(), attributes, len }
    }
}

/// Reads the elements of a call, and writes them as a JSON object. A value that can only be a text is written while it arrives.
#[derive(Clone, Debug)]
pub(in crate::chat::output) struct ElementsReader {
    tags: &'static ElementTags,
    tool: String,
    /// The names of the parameters so far.
    names: Vec<String>,
    /// The value that is being read; `None` between elements.
    value: Option<ValueReader>,
    /// What is between elements and is none.
    pub(super) stray: String,
}

#[derive(Clone, Debug)]
struct ValueReader {
    types: Types,
    /// Whether a line feed after the opening tag was skipped, or there is none.
    has_begun: bool,
    /// Whether nothing was read since then.
    is_fresh: bool,
}

/// Where a value ends.
enum ValueStop {
    /// It ends before byte `at`; what follows begins at byte `next`.
    At { at: usize, next: usize },
    /// It does not end before this byte.
    Later(usize),
}

impl ElementsReader {
    fn new(tags: &'static ElementTags, tool: &str) -> Self {
        Self { tags, tool: tool.to_owned(), names: Vec::new(), value: None, stray: String::new() }
    }

    /// Returns whether the tag is a part of the format.
    pub(super) fn has_tag(&self, name: &str) -> bool {
        let ElementTags { call_end, calls_end, parameter, value, value_end, .. } = self.tags;
        [*call_end, *calls_end, parameter.0, parameter.1, *value, *value_end].contains(&name)
    }

    pub(super) fn read(&mut self, text: &str, is_ended: bool, tools: &Tools, out: &mut String) -> ReadProgress {
        let tool = tools.list.iter().find(|tool| tool.name == self.tool);
        let mut at = 0;
        loop {
            let rest = &text[at..];
            let progress = if self.value.is_some() {
                self.value(rest, is_ended, tool, out)
            } else {
                self.between(rest, is_ended, tool, out)
            };
            match progress {
                ReadProgress::Complete(end) => return ReadProgress::Complete(at + end),
                ReadProgress::Later(0) => return ReadProgress::Later(at),
                ReadProgress::Later(used) => at += used,
            }
        }
    }

    /// Reads the text between elements.
    fn between(&mut self, text: &str, is_ended: bool, tool: Option<&Tool>, out: &mut String) -> ReadProgress {
        let rest = text.trim_start();
        let at = text.len() - rest.len();
        if at > 0 {
            if !self.stray.is_empty() {
                self.stray.push_str(&text[..at]);
            }
            return ReadProgress::Later(at);
        }
        let tags = self.tags;
        let end = |out: &mut String, end: usize| {
            out.push_str(if self.names.is_empty() { "{}" } else { "}" });
            ReadProgress::Complete(end)
        };
        match () {
            // The answer ends between elements, or within the end of the call.
            () if is_ended && [tags.call_end, tags.calls_end].iter().any(|tag| tag.starts_with(rest)) => {
                return end(out, rest.len());
            }
            () if begins(rest, tags.call_end) == Begins::Yes => return end(out, tags.call_end.len()),
            () if begins(rest, tags.calls_end) == Begins::Yes => return end(out, 0),
            () if begins(rest, tags.parameter.0) == Begins::Yes => match tags.head(rest) {
                ElementHead::Parameter { name, attributes, len } => {
                    self.begin(name, attributes, tool, out);
                    return ReadProgress::Later(len);
                }
                ElementHead::Partial if is_ended => return self.cut(rest, out),
                ElementHead::Partial => return ReadProgress::Later(0),
                ElementHead::Malformed => {}
            },
            () if tags.follows(rest) == Begins::Perhaps => {
                return if is_ended { self.cut(rest, out) } else { ReadProgress::Later(0) };
            }
            () => {}
        }
        let next = rest.char_indices().skip(1).find(|(at, _)| tags.follows(&rest[*at..]) != Begins::No);
        let len = next.map_or(rest.len(), |(at, _)| at);
        self.stray.push_str(&rest[..len]);
        ReadProgress::Later(len)
    }

    /// Writes the beginning of an element within which the answer ends, so that the arguments do not look complete.
    fn cut(&self, text: &str, out: &mut String) -> ReadProgress {
        out.push(if self.names.is_empty() { '{' } else { ',' });
        out.push_str(text);
        ReadProgress::Later(0)
    }

    fn begin(&mut self, name: &str, attributes: &str, tool: Option<&Tool>, out: &mut String) {
        let types = match attributes.trim() {
            "string=\"true\"" => Types::TEXT,
            "string=\"false\"" => Types::default(),
            _ => tool.map_or(Types::TEXT, |tool| Types::of(&tool.parameters, name)),
        };
        out.push(if self.names.is_empty() { '{' } else { ',' });
        out.push('"');
        escape_text(name, out);
        out.push_str(if types == Types::TEXT { "\":\"" } else { "\":" });
        self.names.push(name.to_owned());
        self.value = Some(ValueReader { types, has_begun: !self.tags.has_own_lines, is_fresh: true });
    }

    /// Reads a value.
    fn value(&mut self, text: &str, is_ended: bool, tool: Option<&Tool>, out: &mut String) -> ReadProgress {
        let Some(value) = &mut self.value else { return ReadProgress::Later(0) };
        let types = value.types;
        if !value.has_begun && !text.is_empty() {
            value.has_begun = true;
            if text.starts_with('\n') {
                return ReadProgress::Later(1);
            }
        }
        match self.stop(text, is_ended, tool) {
            ValueStop::At { at, next } => {
                // The line feed before the tag that ends the value, or that follows a value without one, is no part of the value.
                let is_in_value = next > at && !self.tags.has_own_lines;
                let part = text[..at].strip_suffix('\n').filter(|_| !is_in_value).unwrap_or(&text[..at]);
                if types == Types::TEXT {
                    escape_text(part, out);
                    out.push('"');
                } else {
                    out.push_str(&types.typed(part).to_string());
                }
                self.value = None;
                // If nothing was consumed, the next element may begin at this place, so it is read at once.
                if next > 0 { ReadProgress::Later(next) } else { self.between(text, is_ended, tool, out) }
            }
            ValueStop::Later(safe) => {
                let len = if is_ended { text.len() } else { safe };
                match types == Types::TEXT {
                    true => escape_text(&text[..len], out),
                    // The answer ends within a value.
                    false if is_ended => out.push_str(text),
                    false => return ReadProgress::Later(0),
                }
                if let Some(value) = &mut self.value {
                    value.is_fresh &= len == 0;
                }
                ReadProgress::Later(len)
            }
        }
    }

    fn stop(&self, text: &str, is_ended: bool, tool: Option<&Tool>) -> ValueStop {
        let ElementTags { call_end, calls_end, parameter, value_end, .. } = self.tags;
        let end = if call_end.is_empty() { calls_end } else { call_end };
        let is_fresh = self.value.as_ref().is_some_and(|value| value.is_fresh);
        let later = |at: usize| ValueStop::Later(at - usize::from(text[..at].ends_with('\n')));
        for (at, _) in text.match_indices('<') {
            let (before, tail) = text.split_at(at);
            let begins_line = if at == 0 { is_fresh } else { before.ends_with('\n') };
            let closing = begins(tail, value_end);
            let ends_value = match closing {
                Begins::Yes => {
                    let after = tail[value_end.len()..].trim_start();
                    if after.is_empty() { Begins::Perhaps } else { self.tags.follows(after) }
                }
                _ if !begins_line => closing,
                _ => match (begins(tail, parameter.0), begins(tail, end)) {
                    (Begins::Yes, _) => match self.tags.head(tail) {
                        ElementHead::Parameter { name, .. } if self.is_next(name, tool) => Begins::Yes,
                        ElementHead::Parameter { .. } | ElementHead::Malformed => Begins::No,
                        ElementHead::Partial => Begins::Perhaps,
                    },
                    (_, Begins::Yes) => {
                        let after = tail[end.len()..].trim_start();
                        if after.is_empty() { Begins::Perhaps } else { begins(after, calls_end) }
                    }
                    (Begins::No, Begins::No) => closing,
                    _ => Begins::Perhaps,
                },
            };
            let is_whole_tag = closing == Begins::Yes || (begins_line && begins(tail, end) == Begins::Yes);
            match ends_value {
                Begins::Perhaps if !is_ended => return later(at),
                Begins::Yes | Begins::Perhaps if ends_value == Begins::Yes || is_whole_tag => {
                    let next = at + if closing == Begins::Yes { value_end.len() } else { 0 };
                    return ValueStop::At { at, next };
                }
                _ => {}
            }
        }
        later(text.len() - partial_suffix(text, &[value_end]))
    }

    /// Returns whether the tool has a parameter with this name that has no value yet.
    fn is_next(&self, name: &str, tool: Option<&Tool>) -> bool {
        let is_known = tool.is_some_and(|tool| tool.parameters["properties"].get(name).is_some());
        is_known && !self.names.iter().any(|known| known == name)
    }
}
