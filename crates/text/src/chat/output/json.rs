//! Reads the JSON of tool calls while it arrives, and repairs what has only one meaning.

use super::format::ArgumentsReader;
use serde_json::Value;

/// Reads an object or list that a model writes, and writes it as JSON. It repairs control characters and unknown escapes in strings, strings in
/// single quotes, Python's and JavaScript's names of constants, and commas before closing brackets. Everything else is copied.
#[derive(Clone, Debug, Default)]
pub(super) struct JsonReader {
    /// The brackets that close the open objects and lists, innermost last.
    closing: String,
    position: Position,
    /// A comma and the white space after it, until it is known whether a value follows.
    comma: String,
    /// A number or a name that may continue, or the digits of an escaped character.
    word: String,
    /// Whether something outside of strings has no meaning in JSON.
    is_broken: bool,
    /// Whether reading stops there.
    is_strict: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Position {
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
pub(super) enum Progress {
    /// The text was read up to this byte, and more text is needed.
    Later(usize),
    /// The value ends before this byte.
    Complete(usize),
}

impl JsonReader {
    /// Returns a reader that stops where the text has no meaning in JSON. `closing`: the brackets that close the objects and lists around the text.
    fn strict(closing: &str) -> Self {
        Self { closing: closing.to_owned(), is_strict: true, ..Self::default() }
    }

    /// Reads the next chunk, and appends JSON to `out`. `ends`: tags that end the value even if it is not complete. Its open objects and lists are then
    /// closed.
    pub(super) fn read(&mut self, text: &str, ends: &[&str], out: &mut String) -> Progress {
        for (at, char) in text.char_indices() {
            if self.position == Position::BetweenStrings {
                if ends.iter().any(|tag| text[at..].starts_with(tag)) {
                    self.close(out);
                    return Progress::Complete(at);
                }
                if ends.iter().any(|tag| tag.starts_with(&text[at..])) {
                    return Progress::Later(at);
                }
            }
            if self.next(char, out) || (self.is_strict && self.is_broken) {
                return Progress::Complete(at + char.len_utf8());
            }
        }
        Progress::Later(text.len())
    }

    /// Ends the text within the value.
    pub(super) fn finish(&mut self, out: &mut String) {
        match self.position {
            Position::BetweenStrings => self.end_word(out),
            Position::Escape(_) | Position::Digits(_) => self.word.clear(),
            Position::String(_) => {}
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.closing.is_empty()
    }

    pub(super) fn is_between_strings(&self) -> bool {
        self.position == Position::BetweenStrings
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
            Position::String(quote) => self.in_string(char, quote, out),
            Position::Escape(quote) => {
                self.position = Position::String(quote);
                match char {
                    '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => out.extend(['\\', char]),
                    'u' => self.position = Position::Digits(quote),
                    '\'' => out.push('\''),
                    // A backslash that escapes nothing, as in a regular expression.
                    _ => {
                        out.push_str("\\\\");
                        self.in_string(char, quote, out);
                    }
                }
            }
            Position::Digits(quote) if char.is_ascii_hexdigit() => {
                self.word.push(char);
                if self.word.len() == 4 {
                    out.push_str("\\u");
                    out.extend(self.word.drain(..));
                    self.position = Position::String(quote);
                }
            }
            Position::Digits(quote) => {
                out.push_str("\\\\u");
                out.extend(self.word.drain(..));
                self.position = Position::String(quote);
                self.in_string(char, quote, out);
            }
            Position::BetweenStrings => return self.between_strings(char, out),
        }
        false
    }

    fn in_string(&mut self, char: char, quote: char, out: &mut String) {
        match char {
            '\\' => self.position = Position::Escape(quote),
            _ if char == quote => {
                out.push('"');
                self.position = Position::BetweenStrings;
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
                        self.position = Position::String(char);
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

/// Returns a text that a model wrote as a JSON object or list, after repairs; `None` if it has another meaning or none.
pub(crate) fn repaired(text: &str) -> Option<Value> {
    let (mut reader, mut json) = (JsonReader::default(), String::new());
    let text = text.trim();
    match reader.read(text, &[], &mut json) {
        Progress::Complete(end) if end == text.len() && text.starts_with(['{', '[']) => serde_json::from_str(&json).ok(),
        Progress::Complete(_) | Progress::Later(_) => None,
    }
}

/// The beginning of a text at a position where a call may begin.
#[derive(Clone, Debug)]
pub(super) enum Start {
    /// Further text decides whether a call begins.
    Undecided,
    /// The text does not begin with a tool call.
    NoCall,
    /// A call begins. Its arguments begin at byte `at`. `nested` is true if they are the value of an object's field.
    Call { name: String, at: usize, arguments: ArgumentsReader, nested: bool },
    /// The text begins with a complete call, which ends before byte `end`.
    Whole { name: String, arguments: String, end: usize },
}

/// The reason why [`object`] has no result yet.
enum ObjectStop {
    Undecided,
    NoCall,
    /// The order or the types of the fields are unusual, so the object can be parsed only when it is complete.
    Unusual,
}

/// Reads an object with the fields `name` and `arguments` (or `parameters`). The tags `ends` end it even if it is not complete.
pub(super) fn object(text: &str, ends: &'static [&'static str]) -> Start {
    match usual_object(&mut Cursor { text, at: 0 }, ends) {
        Ok(call) => call,
        Err(ObjectStop::Undecided) => Start::Undecided,
        Err(ObjectStop::NoCall) => Start::NoCall,
        Err(ObjectStop::Unusual) => {
            let (mut reader, mut json) = (JsonReader::strict(""), String::new());
            match reader.read(text, ends, &mut json) {
                _ if reader.is_broken => Start::NoCall,
                Progress::Later(_) => Start::Undecided,
                Progress::Complete(end) => whole_object(&json, end).unwrap_or(Start::NoCall),
            }
        }
    }
}

/// Parses an object whose name precedes its arguments, so that the arguments need not be complete.
fn usual_object(cursor: &mut Cursor<'_>, ends: &'static [&'static str]) -> Result<Start, ObjectStop> {
    let mut name = None;
    cursor.expect('{')?;
    loop {
        let field = cursor.string()?;
        match field.as_str() {
            "name" | "type" | "id" => {
                cursor.expect(':')?;
                if cursor.peek()? != '"' {
                    return Err(ObjectStop::Unusual);
                }
                let value = cursor.string()?;
                if field == "name" {
                    name = Some(value);
                }
            }
            "arguments" | "parameters" => {
                cursor.expect(':')?;
                return match (name, cursor.peek()?) {
                    (Some(name), '{') => {
                        Ok(Start::Call { name, at: cursor.at, arguments: ArgumentsReader::json(ends), nested: true })
                    }
                    _ => Err(ObjectStop::Unusual),
                };
            }
            "function" => return Err(ObjectStop::Unusual),
            _ => return Err(ObjectStop::NoCall),
        }
        match cursor.peek()? {
            ',' => cursor.at += 1,
            _ => return Err(ObjectStop::Unusual),
        }
    }
}

fn whole_object(text: &str, end: usize) -> Option<Start> {
    let call: Value = serde_json::from_str(text).ok()?;
    let call = call.get("function").filter(|function| function.is_object()).unwrap_or(&call);
    let name = call.get("name").or_else(|| call.get("function"))?.as_str()?.to_owned();
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => repaired(text).filter(Value::is_object)?.to_string(),
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(_) => return None,
    };
    Some(Start::Whole { name, arguments, end })
}

struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl Cursor<'_> {
    /// Returns the next character that is not white space.
    fn peek(&mut self) -> Result<char, ObjectStop> {
        let rest = &self.text[self.at..];
        let begun = rest.trim_start();
        self.at += rest.len() - begun.len();
        begun.chars().next().ok_or(ObjectStop::Undecided)
    }

    fn expect(&mut self, wanted: char) -> Result<(), ObjectStop> {
        if self.peek()? != wanted {
            return Err(ObjectStop::NoCall);
        }
        self.at += wanted.len_utf8();
        Ok(())
    }

    fn string(&mut self) -> Result<String, ObjectStop> {
        match self.peek()? {
            '"' => {}
            // A string in single quotes.
            '\'' => return Err(ObjectStop::Unusual),
            _ => return Err(ObjectStop::NoCall),
        }
        let rest = &self.text[self.at..];
        let mut is_escaped = false;
        let closes = |(_, byte): &(usize, u8)| {
            let escaped = std::mem::take(&mut is_escaped);
            is_escaped = *byte == b'\\' && !escaped;
            *byte == b'"' && !escaped
        };
        let (end, _) = rest.bytes().enumerate().skip(1).find(closes).ok_or(ObjectStop::Undecided)?;
        self.at += end + 1;
        serde_json::from_str(&rest[..=end]).map_err(|_| ObjectStop::NoCall)
    }
}

/// The rest of an object whose last value has been parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rest {
    Undecided,
    /// The object ends before this byte.
    Closed(usize),
    /// The object does not end in this text.
    Open,
}

/// Skips an object's further fields and its closing brace.
pub(super) fn close_object(text: &str) -> Rest {
    match text.trim_start().chars().next() {
        None => Rest::Undecided,
        Some('}' | ',') => {
            let mut reader = JsonReader::strict("}");
            match reader.read(text, &[], &mut String::new()) {
                _ if reader.is_broken => Rest::Open,
                Progress::Later(_) => Rest::Undecided,
                Progress::Complete(end) => Rest::Closed(end),
            }
        }
        Some(_) => Rest::Open,
    }
}
