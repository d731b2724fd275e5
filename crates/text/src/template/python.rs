//! Prints values as Python does.

use minijinja::{Value, value::ValueKind};
use std::{cell::Cell, fmt::Write};

thread_local! {
    static TEXT_MAX: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Sets the maximum length in bytes of texts that this thread prints. A longer text is cut, and its rendering fails.
pub(super) fn set_text_max(bytes: usize) {
    TEXT_MAX.set(bytes);
}

/// Returns `str(value)`. An undefined value is empty, as in Jinja2.
pub(super) fn str(value: &Value) -> String {
    let mut text = String::new();
    match value.as_str() {
        Some(own) => text.push_str(own),
        None if value.is_undefined() => {}
        None => write_repr(value, &mut text, DEPTH_MAX),
    }
    text
}

/// Maximum number of nested lists and dictionaries that are printed. Python prints about 1,000, and the JSON of a request has at most 128.
pub(super) const DEPTH_MAX: usize = 200;

/// Returns `repr(number)` of a Python float: the shortest digits that give the same number, with an exponent if it is below -4 or above 15.
pub(super) fn float(number: f64) -> String {
    if !number.is_finite() {
        return if number.is_nan() { "nan".to_owned() } else { format!("{number}") };
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse().unwrap_or(0) {
        -4..16 => {
            let plain = number.to_string();
            if plain.contains('.') { plain } else { plain + ".0" }
        }
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, i32::abs(exponent)),
    }
}

/// Returns the number if it is a Python float.
pub(super) fn as_float(value: &Value) -> Option<f64> {
    (value.kind() == ValueKind::Number && !value.is_integer()).then(|| f64::try_from(value.clone()).ok()).flatten()
}

fn write_repr(value: &Value, text: &mut String, depth: usize) {
    let ends_here = depth == 0 || text.len() > TEXT_MAX.get();
    let mut list = |value: &Value, open, close| {
        text.push(open);
        let (mut items, mut after) = (value.try_iter().into_iter().flatten(), "");
        let tuple_of_one = value.is_tuple() && value.len() == Some(1);
        for item in items.by_ref() {
            text.push_str(after);
            write_repr(&item, text, depth - 1);
            after = ", ";
        }
        text.push_str(if tuple_of_one { "," } else { "" });
        text.push(close);
    };
    match value.kind() {
        _ if ends_here => text.push_str("..."),
        ValueKind::String => quote(value.as_str().unwrap_or_default(), text),
        ValueKind::Undefined => text.push_str("Undefined"),
        ValueKind::Seq if value.is_tuple() => list(value, '(', ')'),
        ValueKind::Seq | ValueKind::Iterable => list(value, '[', ']'),
        ValueKind::Map => {
            text.push('{');
            let mut after = "";
            for key in value.try_iter().into_iter().flatten() {
                text.push_str(after);
                write_repr(&key, text, depth - 1);
                text.push_str(": ");
                write_repr(&value.get_item(&key).unwrap_or_default(), text, depth - 1);
                after = ", ";
            }
            text.push('}');
        }
        _ => match as_float(value) {
            Some(number) => text.push_str(&float(number)),
            None => text.push_str(&value.to_string()),
        },
    }
}

/// Writes `repr(text)`: in single quotes, or in double quotes if the text has only single ones.
fn quote(own: &str, text: &mut String) {
    let quote = if own.contains('\'') && !own.contains('"') { '"' } else { '\'' };
    text.push(quote);
    for char in own.chars() {
        let escaped = match char {
            '\n' => "\\n",
            '\r' => "\\r",
            '\t' => "\\t",
            '\\' => "\\\\",
            _ if char == quote => {
                text.push('\\');
                text.push(char);
                continue;
            }
            _ if is_printed(char) => {
                text.push(char);
                continue;
            }
            _ => {
                // Writing to a string cannot fail.
                let _ = match u32::from(char) {
                    code @ ..0x100 => write!(text, "\\x{code:02x}"),
                    code @ ..0x1_0000 => write!(text, "\\u{code:04x}"),
                    code => write!(text, "\\U{code:08x}"),
                };
                continue;
            }
        };
        text.push_str(escaped);
    }
    text.push(quote);
}

/// Returns whether Python prints the character of a quoted text as it is. Python escapes control and format characters, and white space except
/// blanks. It also escapes characters that Unicode has not assigned, which this function does not detect.
fn is_printed(char: char) -> bool {
    let format = matches!(char,
        '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e000}'..='\u{f8ff}' | '\u{e0001}'..='\u{e007f}' | '\u{f0000}'..);
    char == ' ' || !(char.is_control() || char.is_whitespace() || format)
}

/// Returns whether Python's `str.isspace` is true for the character: Unicode's white space and four separators of ASCII.
pub(super) fn is_space(char: char) -> bool {
    char.is_whitespace() || matches!(char, '\u{1c}'..='\u{1f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_printed_as_python_prints_them() {
        for (number, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1e-4, "0.0001"),
            (1.5e-5, "1.5e-05"),
            (9_007_199_254_740_993.0, "9007199254740992.0"),
            (1e16, "1e+16"),
            (-1.25e300, "-1.25e+300"),
            (5e-324, "5e-324"),
            (f64::INFINITY, "inf"),
            (f64::NEG_INFINITY, "-inf"),
            (f64::NAN, "nan"),
        ] {
            assert_eq!(float(number), text);
        }
    }

    #[test]
    fn deep_values_are_printed_without_overflow() {
        let deep = (0..100_000).fold(Value::from(1), |inner, _| {
            let outer = Value::from(vec![inner.clone()]);
            std::mem::forget(inner);
            outer
        });
        assert!(str(&deep).contains("..."));
        // The value is not dropped, because dropping it would recurse too deeply.
        std::mem::forget(deep);
    }
}
