//! Reads the JSON of tool calls while it arrives, and repairs what has only one meaning.

use serde_json::Value;

/// Reads an object or list that a model writes, and writes it as JSON. It repairs control characters and unknown escapes in strings, strings in
/// single quotes, Python's and JavaScript's names of constants, and commas before closing brackets. Everything else is copied.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonReader {
    /// The brackets that close the open objects and lists, innermost last.
    closing: String,
    position: JsonPosition,
    /// A comma and the white space after it, until it is known whether a value follows.
    comma: String,
    /// A number or a name that may continue, or the digits of an escaped character.
    word: String,
    /// Whether something outside of strings has no meaning in JSON.
    pub(super) is_broken: bool,
    /// Whether reading stops there.
    is_strict: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum JsonPosition {
    #[default]
    BetweenStrings,
    /// Within a string that this quotation mark closes.
    String(char),
    /// After a backslash.
    Escape(char),
    /// Within the four digits after `\u`.
    Digits(char),
}

/// How far a reader has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadProgress {
    /// The text was read up to this byte, and more text is needed.
    Later(usize),
    /// The value ends before this byte.
    Complete(usize),
}

impl JsonReader {
    /// Returns a reader that stops where the text has no meaning in JSON. `closing`: the brackets that close the objects and lists around the text.
    pub(super) fn strict(closing: &str) -> Self {
        Self { closing: closing.to_owned(), is_strict: true, ..Self::default() }
    }

    /// Reads the next chunk, and appends JSON to `out`. `ends`: tags that end the value even if it is not complete. Its open objects and lists are then
    /// closed.
    pub(super) fn read(&mut self, text: &str, ends: &[&str], out: &mut String) -> ReadProgress {
        for (at, char) in text.char_indices() {
            if self.position == JsonPosition::BetweenStrings {
                if ends.iter().any(|tag| text[at..].starts_with(tag)) {
                    self.close(out);
                    return ReadProgress::Complete(at);
                }
                if ends.iter().any(|tag| tag.starts_with(&text[at..])) {
                    return ReadProgress::Later(at);
                }
            }
            if self.next(char, out) || (self.is_strict && self.is_broken) {
                return ReadProgress::Complete(at + char.len_utf8());
            }
        }
        ReadProgress::Later(text.len())
    }

    /// Ends the text within the value.
    pub(super) fn finish(&mut self, out: &mut String) {
        match self.position {
            JsonPosition::BetweenStrings => self.end_word(out),
            JsonPosition::Escape(_) | JsonPosition::Digits(_) => self.word.clear(),
            JsonPosition::String(_) => {}
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.closing.is_empty()
    }

    pub(super) fn is_between_strings(&self) -> bool {
        self.position == JsonPosition::BetweenStrings
    }

    /// Ends the value, and closes its open objects and lists.
    pub(super) fn close(&mut self, out: &mut String) {
        self.end_word(out);
        self.comma.clear();
        out.extend(std::mem::take(&mut self.closing).chars().rev());
    }

    /// Reads a character. Returns whether it completes the value.
    fn next(&mut self, char: char, out: &mut String) -> bool {
        match self.position {
            JsonPosition::String(quote) => self.in_string(char, quote, out),
            JsonPosition::Escape(quote) => {
                self.position = JsonPosition::String(quote);
                match char {
                    '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => out.extend(['\\', char]),
                    'u' => self.position = JsonPosition::Digits(quote),
                    '\'' => out.push('\''),
                    // A backslash that escapes nothing, as in a regular expression.
                    _ => {
                        out.push_str("\\\\");
                        self.in_string(char, quote, out);
                    }
                }
            }
            JsonPosition::Digits(quote) if char.is_ascii_hexdigit() => {
                self.word.push(char);
                if self.word.len() == 4 {
                    out.push_str("\\u");
                    out.extend(self.word.drain(..));
                    self.position = JsonPosition::String(quote);
                }
            }
            JsonPosition::Digits(quote) => {
                out.push_str("\\\\u");
                out.extend(self.word.drain(..));
                self.position = JsonPosition::String(quote);
                self.in_string(char, quote, out);
            }
            JsonPosition::BetweenStrings => return self.between_strings(char, out),
        }
        false
    }

    fn in_string(&mut self, char: char, quote: char, out: &mut String) {
        match char {
            '\\' => self.position = JsonPosition::Escape(quote),
            _ if char == quote => {
                out.push('"');
                self.position = JsonPosition::BetweenStrings;
            }
            _ => escape(char, out),
        }
    }

    fn between_strings(&mut self, char: char, out: &mut String) -> bool {
        let is_space = matches!(char, ' ' | '\n' | '\r' | '\t');
        if char.is_ascii_alphanumeric() || "+-._".contains(char) {
            self.end_comma(out);
            self.word.push(char);
            return false;
        }
        self.end_word(out);
        match char {
            '}' | ']' => {
                // A comma before a closing bracket is dropped.
                out.extend(self.comma.drain(..).skip(1));
                out.push(char);
                self.is_broken |= self.closing.pop() != Some(char);
                return self.closing.is_empty();
            }
            _ if is_space && !self.comma.is_empty() => self.comma.push(char),
            ',' => {
                self.end_comma(out);
                self.comma.push(char);
            }
            _ => {
                self.end_comma(out);
                match char {
                    '"' | '\'' => {
                        self.position = JsonPosition::String(char);
                        out.push('"');
                    }
                    '{' | '[' => {
                        self.closing.push(if char == '{' { '}' } else { ']' });
                        out.push(char);
                    }
                    _ => {
                        self.is_broken |= !is_space && char != ':';
                        out.push(char);
                    }
                }
            }
        }
        false
    }

    fn end_comma(&mut self, out: &mut String) {
        out.extend(self.comma.drain(..));
    }

    fn end_word(&mut self, out: &mut String) {
        let word = constant(&self.word);
        self.is_broken |= !word.is_empty() && serde_json::from_str::<Value>(word).is_err();
        out.push_str(word);
        self.word.clear();
    }
}

/// Returns JSON's name of a constant of Python or JavaScript; any other word as it is.
pub(super) fn constant(word: &str) -> &str {
    match word {
        "True" => "true",
        "False" => "false",
        "None" | "NaN" | "Infinity" | "-Infinity" => "null",
        _ => word,
    }
}

/// Appends a character of a string as JSON.
fn escape(char: char, out: &mut String) {
    match char {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\0'..' ' => out.push_str(&format!("\\u{:04x}", u32::from(char))),
        _ => out.push(char),
    }
}

/// Appends a text to a string of JSON.
pub(super) fn escape_text(text: &str, out: &mut String) {
    text.chars().for_each(|char| escape(char, out));
}

/// Repairs and parses a JSON object or list that a model wrote; `None` if the text is not exactly one object or list, or cannot be repaired.
pub(crate) fn repaired(text: &str) -> Option<Value> {
    let (mut reader, mut json) = (JsonReader::default(), String::new());
    let text = text.trim();
    match reader.read(text, &[], &mut json) {
        ReadProgress::Complete(end) if end == text.len() && text.starts_with(['{', '[']) => serde_json::from_str(&json).ok(),
        ReadProgress::Complete(_) | ReadProgress::Later(_) => None,
    }
}
