//! Parses the JSON of tool calls while it arrives.

use serde_json::Value;

/// Finds the end of an object or list whose JSON arrives in chunks.
#[derive(Clone, Debug, Default)]
pub(super) struct Scanner {
    depth: u32,
    in_text: bool,
    is_escaped: bool,
}

/// The end of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueEnd {
    /// The value does not end in this text.
    Later,
    /// The value is complete and ends before this byte.
    Complete(usize),
    /// The value is malformed: JSON does not allow this byte at its position.
    Broken(usize),
}

impl Scanner {
    /// Returns a scanner inside an object, whose end it finds.
    pub(super) fn within_object() -> Self {
        Self { depth: 1, ..Self::default() }
    }

    /// Scans the next chunk.
    pub(super) fn scan(&mut self, chunk: &str) -> ValueEnd {
        for (at, byte) in chunk.bytes().enumerate() {
            if self.in_text {
                match byte {
                    _ if self.is_escaped => self.is_escaped = false,
                    b'\\' => self.is_escaped = true,
                    b'"' => self.in_text = false,
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' => self.in_text = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return ValueEnd::Complete(at + 1);
                    }
                }
                b' ' | b'\n' | b'\r' | b'\t' | b',' | b':' | b'+' | b'-' | b'.' | b'0'..=b'9' | b'a'..=b'z' | b'E' => {}
                _ => return ValueEnd::Broken(at),
            }
        }
        ValueEnd::Later
    }
}

/// The beginning of a text at a position where a call may begin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// Further text decides whether a call begins.
    Undecided,
    /// The text does not begin with a tool call.
    NoCall,
    /// A call begins. Its arguments are a JSON object that begins at byte `at`. `nested` is true if the object is the value of another object's
    /// field.
    Call { name: String, at: usize, nested: bool },
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

/// Reads an object with the fields `name` and `arguments` (or `parameters`).
pub(super) fn object(text: &str) -> Start {
    match usual_object(&mut Cursor { text, at: 0 }) {
        Ok(call) => call,
        Err(ObjectStop::Undecided) => Start::Undecided,
        Err(ObjectStop::NoCall) => Start::NoCall,
        Err(ObjectStop::Unusual) => match Scanner::default().scan(text) {
            ValueEnd::Later => Start::Undecided,
            ValueEnd::Broken(_) => Start::NoCall,
            ValueEnd::Complete(end) => whole_object(&text[..end], end).unwrap_or(Start::NoCall),
        },
    }
}

/// Parses an object whose name precedes its arguments, so that the arguments need not be complete.
fn usual_object(cursor: &mut Cursor<'_>) -> Result<Start, ObjectStop> {
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
                    (Some(name), '{') => Ok(Start::Call { name, at: cursor.at, nested: true }),
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
    let call: Value = serde_json::from_str(text.trim_start()).ok()?;
    let call = call.get("function").filter(|function| function.is_object()).unwrap_or(&call);
    let name = call.get("name").or_else(|| call.get("function"))?.as_str()?.to_owned();
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) if serde_json::from_str(text).is_ok_and(|value: Value| value.is_object()) => text.clone(),
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
        if self.peek()? != '"' {
            return Err(ObjectStop::NoCall);
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
        Some('}' | ',') => match Scanner::within_object().scan(text) {
            ValueEnd::Later => Rest::Undecided,
            ValueEnd::Complete(end) => Rest::Closed(end),
            ValueEnd::Broken(_) => Rest::Open,
        },
        Some(_) => Rest::Open,
    }
}
