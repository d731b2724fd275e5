//! The filter `tojson`: Python's `json.dumps`, without the escapes for HTML of Jinja2's own filter.

use super::{limits, python};
use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, ValueKind},
};
use std::fmt::Write;

struct JsonWriter {
    text: String,
    ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sorted: bool,
}

/// The filter `tojson`, whose arguments are those of Python's `json.dumps`.
pub(super) fn tojson(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let argument =
        |positional: Option<Value>, name| positional.map_or_else(|| named.get::<Option<Value>>(name), |value| Ok(Some(value)));
    let ensure_ascii = argument(ensure_ascii, "ensure_ascii")?;
    let indent = argument(indent, "indent")?;
    let separators = argument(separators, "separators")?;
    let sort_keys = argument(None, "sort_keys")?;
    named.assert_all_used()?;

    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let indent = match indent {
        Some(indent) if indent.kind() == ValueKind::String => {
            Some(python::str(&indent).chars().take(INDENT_MAX as usize).collect())
        }
        Some(indent) => Some(" ".repeat(i64::try_from(indent)?.clamp(0, INDENT_MAX) as usize)),
        None => None,
    };
    let (item_separator, key_separator) = match separators {
        Some(pair) => (python::str(&pair.get_item_by_index(0)?), python::str(&pair.get_item_by_index(1)?)),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let (text, ascii, sorted) = (String::new(), is_true(ensure_ascii), is_true(sort_keys));
    let mut writer = JsonWriter { text, ascii, indent, item_separator, key_separator, sorted };
    writer.value(value, 0)?;
    Ok(writer.text)
}

const INDENT_MAX: i64 = 100;

impl JsonWriter {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        limits::ensure(self.text.len())?;
        match value.kind() {
            _ if depth == python::DEPTH_MAX => return Err(invalid("tojson: the value is nested too deeply")),
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.text += &number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                self.block('[', ']', items, depth, |writer, item| writer.value(&item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                if self.sorted {
                    keys.sort();
                }
                self.block('{', '}', keys, depth, |writer, key| {
                    writer.key(&key)?;
                    writer.value(&value.get_item(&key)?, depth + 1)
                })?;
            }
            other => return Err(invalid(format!("tojson: a value of type {other} has no JSON"))),
        }
        Ok(())
    }

    fn block(
        &mut self,
        open: char,
        close: char,
        items: Vec<Value>,
        depth: usize,
        mut write: impl FnMut(&mut Self, Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.text.push(open);
        let empty = items.is_empty();
        for (index, item) in items.into_iter().enumerate() {
            if index > 0 {
                self.text += &self.item_separator;
            }
            self.line(depth + 1);
            write(self, item)?;
        }
        if !empty {
            self.line(depth);
        }
        self.text.push(close);
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            self.text += &indent.repeat(depth);
        }
    }

    fn key(&mut self, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default()),
            ValueKind::None => self.string("null"),
            ValueKind::Bool => self.string(if key.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.string(&number(key)),
            other => return Err(invalid(format!("tojson: a value of type {other} cannot be a key"))),
        }
        self.text += &self.key_separator;
        Ok(())
    }

    fn string(&mut self, own: &str) {
        self.text.push('"');
        for char in own.chars() {
            match char {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                ..' ' => self.escape(char),
                '\u{7f}'.. if self.ascii => self.escape(char),
                _ => self.text.push(char),
            }
        }
        self.text.push('"');
    }

    fn escape(&mut self, char: char) {
        for unit in char.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            let _ = write!(self.text, "\\u{unit:04x}");
        }
    }
}

fn number(value: &Value) -> String {
    match python::as_float(value) {
        Some(number) if number.is_nan() => "NaN".to_owned(),
        Some(number) if number.is_infinite() => if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned(),
        Some(number) => python::float(number),
        None => value.to_string(),
    }
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}
