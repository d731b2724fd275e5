//! The input of a custom tool, read from the arguments that the model writes: `{"input": "TEXT"}`.

use crate::agents::INPUT;
use serde_json::Value;

/// The longest beginning, with white space, before which the text begins.
const HEAD_MAX: usize = 256;

/// Reads the text while the arguments arrive. The texts that it returns together do not depend on how the arguments are split.
#[derive(Default)]
pub(super) struct CustomInput {
    state: State,
    /// What was read before the text begins, or an escape sequence that is not complete.
    held: String,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// Before the text.
    #[default]
    Head,
    Text,
    /// After the text.
    End,
    /// The arguments have another form, which is read when they are complete.
    Other,
}

/// How far a beginning of the arguments goes.
enum Head {
    /// The text begins after this many bytes.
    Text(usize),
    /// More is needed.
    Partial,
    /// The arguments have another form.
    Other,
}

impl CustomInput {
    /// Returns the part of the text that these further arguments have.
    pub(super) fn push(&mut self, arguments: &str) -> String {
        let mut text = String::new();
        let mut rest = arguments;
        if matches!(self.state, State::Head | State::Other) {
            self.held.push_str(arguments);
            match head(&self.held).unwrap_or(Head::Other) {
                _ if self.state == State::Other => return text,
                Head::Partial if self.held.len() <= HEAD_MAX => return text,
                Head::Partial | Head::Other => {
                    self.state = State::Other;
                    return text;
                }
                Head::Text(begins) => {
                    rest = &arguments[arguments.len() - (self.held.len() - begins)..];
                    self.held.clear();
                    self.state = State::Text;
                }
            }
        }
        for char in rest.chars() {
            if self.state != State::Text {
                break;
            }
            // Half of a pair that no other half follows.
            if self.held.len() == 6 && char != '\\' {
                text.push(char::REPLACEMENT_CHARACTER);
                self.held.clear();
            }
            match (self.held.is_empty(), char) {
                (true, '"') => self.state = State::End,
                (true, '\\') => self.held.push(char),
                (true, _) => text.push(char),
                (false, _) => {
                    self.held.push(char);
                    if let Some(decoded) = decoded(&self.held) {
                        text.push_str(&decoded);
                        self.held.clear();
                    }
                }
            }
        }
        text
    }

    /// Returns the rest of the text when the arguments are complete.
    pub(super) fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Text if !held.is_empty() => char::REPLACEMENT_CHARACTER.to_string(),
            State::Text | State::End => String::new(),
            // The member `input` of an object, or its only one, is meant. All else is the text itself.
            State::Head | State::Other => match serde_json::from_str(&held) {
                Ok(Value::Object(members)) => match (members.get(INPUT), members.values().collect::<Vec<_>>().as_slice()) {
                    (Some(Value::String(text)), _) | (_, [Value::String(text)]) => text.clone(),
                    _ => held,
                },
                Ok(Value::String(text)) => text,
                _ => held,
            },
        }
    }
}

/// Returns how far the beginning goes: `{ "input" : "`; `None`: it has another form.
fn head(held: &str) -> Option<Head> {
    let mut at = held;
    let key = format!("\"{INPUT}\"");
    for part in ["{", &key, ":", "\""] {
        at = at.trim_start_matches([' ', '\n', '\r', '\t']);
        if at.len() < part.len() && part.starts_with(at) {
            return Some(Head::Partial);
        }
        at = at.strip_prefix(part)?;
    }
    Some(Head::Text(held.len() - at.len()))
}

/// Returns the text of a complete escape sequence; `None`: more is needed. A sequence that JSON does not have is returned as it is.
fn decoded(sequence: &str) -> Option<String> {
    const UNKNOWN: char = char::REPLACEMENT_CHARACTER;
    let kind = sequence[1..].chars().next()?;
    let parsed = |sequence: &str| serde_json::from_str::<String>(&format!("\"{sequence}\"")).ok();
    if kind != 'u' {
        return Some(parsed(sequence).unwrap_or_else(|| sequence.to_owned()));
    }
    let Some(first) = unit(&sequence[2..])? else { return Some(sequence.to_owned()) };
    if !(0xD800..0xDC00).contains(&first) {
        return Some(char::from_u32(first).unwrap_or(UNKNOWN).to_string());
    }
    // The first half of a pair waits for the second one.
    let rest = &sequence[6..];
    if rest.is_empty() || rest == "\\" {
        return None;
    }
    if let Some(digits) = rest.strip_prefix("\\u") {
        unit(digits)?;
    }
    Some(parsed(sequence).unwrap_or_else(|| format!("{UNKNOWN}{}", decoded(rest).unwrap_or_default())))
}

/// Returns the code unit that four hexadecimal digits give, `Some(None)` if they are none; `None`: more digits are needed.
fn unit(digits: &str) -> Option<Option<u32>> {
    let valid = digits.chars().take(4).all(|digit| digit.is_ascii_hexdigit());
    if valid && digits.len() < 4 {
        return None;
    }
    Some(digits.get(..4).filter(|_| valid).and_then(|digits| u32::from_str_radix(digits, 16).ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(parts: &[&str]) -> String {
        let mut input = CustomInput::default();
        let mut text: String = parts.iter().map(|part| input.push(part)).collect();
        text.push_str(&input.finish());
        text
    }

    #[test]
    fn input_does_not_depend_on_how_arguments_are_split() {
        for (arguments, expected) in [
            (r#"{"input": "*** Begin Patch\n+\ta \"q\" \\ é\n"}"#, "*** Begin Patch\n+\ta \"q\" \\ é\n"),
            (" {\n \"input\"\t:\n\"a\\u00e9\\ud83d\\ude00b\" } ", "aé😀b"),
            (r#"{"input":""}"#, ""),
            (r#"{"input": "cut"#, "cut"),
            ("{\"input\": \"a raw\nline feed\"}", "a raw\nline feed"),
            (r#"{"input": "\x"}"#, "\\x"),
            (r#"{"input": "\ud83d!"}"#, "\u{FFFD}!"),
            (r#"{"input": "\ud83d"}"#, "\u{FFFD}"),
            (r#"{"input": "\ud83d\n\ud83d\u0041\ude00é"}"#, "\u{FFFD}\n\u{FFFD}A\u{FFFD}é"),
            (r#"{"patch": "p"}"#, "p"),
            (r#"{"reason": "r", "input": "i"}"#, "i"),
            (r#"{"a": "b", "c": "d"}"#, r#"{"a": "b", "c": "d"}"#),
            (r#""text""#, "text"),
            ("*** Begin Patch", "*** Begin Patch"),
            (r#"{"input": 7}"#, r#"{"input": 7}"#),
            ("", ""),
        ] {
            assert_eq!(read(&[arguments]), expected, "{arguments}");
            for first in 0..=arguments.len() {
                for second in first..=arguments.len() {
                    let parts = [arguments.get(..first), arguments.get(first..second), arguments.get(second..)];
                    if let [Some(a), Some(b), Some(c)] = parts {
                        assert_eq!(read(&[a, b, c]), expected, "{a:?} {b:?} {c:?}");
                    }
                }
            }
        }
    }
}
