//! The input of a custom tool, read from the arguments that the model writes: `{"input": "TEXT"}`.

use crate::agents::INPUT;
use serde_json::Value;

/// The maximum number of bytes before the text, including white space.
const HEAD_MAX: usize = 256;

/// Reads the text while the arguments arrive. The text is the same however the arguments are split.
#[derive(Default)]
pub(super) struct CustomInput {
    state: State,
    /// The arguments before the text, or an incomplete escape sequence in it.
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

/// What the first bytes of the arguments are.
enum InputHead {
    /// The arguments have the expected form, and the input's text begins after this many bytes.
    Text(usize),
    /// The beginning is incomplete.
    Partial,
    /// The arguments have another form.
    Other,
}

impl CustomInput {
    /// Returns the text in these further arguments.
    pub(super) fn push(&mut self, arguments: &str) -> String {
        let mut text = String::new();
        let mut rest = arguments;
        if matches!(self.state, State::Head | State::Other) {
            self.held.push_str(arguments);
            match head(&self.held).unwrap_or(InputHead::Other) {
                _ if self.state == State::Other => return text,
                InputHead::Partial if self.held.len() <= HEAD_MAX => return text,
                InputHead::Partial | InputHead::Other => {
                    self.state = State::Other;
                    return text;
                }
                InputHead::Text(begins) => {
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
            // Replaces the held first half of a surrogate pair, because no second half follows.
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

    /// Returns the rest of the text. Must be called when the arguments are complete.
    pub(super) fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Text if !held.is_empty() => char::REPLACEMENT_CHARACTER.to_string(),
            State::Text | State::End => String::new(),
            // The text is the member `input` of an object, or the object's only member. Other arguments are the text themselves.
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

/// Compares the beginning of the arguments with `{ "input" : "`. Returns `None` if it differs.
fn head(held: &str) -> Option<InputHead> {
    let mut at = held;
    let key = format!("\"{INPUT}\"");
    for part in ["{", &key, ":", "\""] {
        at = at.trim_start_matches([' ', '\n', '\r', '\t']);
        if at.len() < part.len() && part.starts_with(at) {
            return Some(InputHead::Partial);
        }
        at = at.strip_prefix(part)?;
    }
    Some(InputHead::Text(held.len() - at.len()))
}

/// Returns the text of an escape sequence; `None` if the sequence is incomplete. A sequence that JSON does not have is returned unchanged.
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
    // The first half of a surrogate pair: the second one is needed.
    let rest = &sequence[6..];
    if rest.is_empty() || rest == "\\" {
        return None;
    }
    if let Some(digits) = rest.strip_prefix("\\u") {
        unit(digits)?;
    }
    Some(parsed(sequence).unwrap_or_else(|| format!("{UNKNOWN}{}", decoded(rest).unwrap_or_default())))
}

/// Returns the code unit of four hexadecimal digits; `Some(None)` if they are not hexadecimal; `None` if more digits are needed.
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
    fn input_is_the_same_however_arguments_are_split() {
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
