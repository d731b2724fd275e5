//! Parses calls that are JSON objects with a name and arguments.

use super::ArgumentsReader;
use crate::chat::output::json::{JsonReader, ReadProgress, repaired};
use serde_json::Value;

/// The beginning of a text at a position where a call may begin.
#[derive(Clone, Debug)]
pub(in crate::chat::output) enum Start {
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
                ReadProgress::Later(_) => Start::Undecided,
                ReadProgress::Complete(end) => whole_object(&json, end).unwrap_or(Start::NoCall),
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
                ReadProgress::Later(_) => Rest::Undecided,
                ReadProgress::Complete(end) => Rest::Closed(end),
            }
        }
        Some(_) => Rest::Open,
    }
}
