//! Methods of Python's types that the engine's own set lacks, or that differ from Python in the engine.

use super::python::is_space;
use minijinja::{
    Error, ErrorKind, State, Value,
    value::{Kwargs, Tuple, ValueKind, from_args},
};
use std::ops::Range;

/// Calls the method of a string, list or dictionary.
pub(super) fn call(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match (value.as_str(), value.kind()) {
        (Some(text), ValueKind::String) => string(text, method, args)?,
        (_, ValueKind::Seq | ValueKind::Iterable) => list(value, method, args)?,
        (_, ValueKind::Map) if method == "copy" => Some(value.clone()),
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// The filter `trim`.
pub(super) fn trim(value: &Value, chars: Option<&str>) -> String {
    strip(&super::python::str(value), chars).to_owned()
}

fn list(value: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match method {
        "copy" => Ok(Some(value.clone())),
        "index" => {
            let (item,): (&Value,) = from_args(args)?;
            for (index, other) in value.try_iter()?.checked().enumerate() {
                if other? == *item {
                    return Ok(Some(index.into()));
                }
            }
            Err(Error::new(ErrorKind::InvalidOperation, "index: the value is not in the list"))
        }
        _ => Ok(None),
    }
}

fn string(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let one = || from_args::<(&str,)>(args).map(|(text,)| text);
    let chars = || from_args::<(Option<&str>,)>(args).map(|(chars,)| chars);
    let parts = |parts: [&str; 3]| Value::from(Tuple::from(parts.map(Value::from)));
    Ok(Some(match method {
        "strip" => strip(text, chars()?).into(),
        "lstrip" => text.trim_start_matches(stripped(chars()?)).into(),
        "rstrip" => text.trim_end_matches(stripped(chars()?)).into(),
        "removeprefix" => text.strip_prefix(one()?).unwrap_or(text).into(),
        "removesuffix" => text.strip_suffix(one()?).unwrap_or(text).into(),
        "split" => split(text, args, Side::Left)?,
        "rsplit" => split(text, args, Side::Right)?,
        "splitlines" => {
            let (keep,): (Option<bool>,) = from_args(args)?;
            lines(text, keep.unwrap_or(false)).into_iter().map(Value::from).collect()
        }
        "partition" => {
            let separator = one()?;
            parts(text.split_once(separator).map_or([text, "", ""], |(before, after)| [before, separator, after]))
        }
        "rpartition" => {
            let separator = one()?;
            parts(text.rsplit_once(separator).map_or(["", "", text], |(before, after)| [before, separator, after]))
        }
        "find" | "rfind" | "index" | "rindex" => {
            let (wanted, within) = within(text, args)?;
            let part = &text[within.clone()];
            let found = if method.starts_with('r') { part.rfind(wanted) } else { part.find(wanted) };
            match found {
                Some(at) => text[..within.start + at].chars().count().into(),
                None if method.ends_with("find") => Value::from(-1),
                None => return Err(Error::new(ErrorKind::InvalidOperation, "index: the text is not found")),
            }
        }
        // The engine's own methods do not support a start or an end.
        "startswith" | "endswith" | "count" if args.len() > 1 => {
            let (wanted, within) = within(text, args)?;
            let part = &text[within];
            match method {
                "startswith" => part.starts_with(wanted).into(),
                "endswith" => part.ends_with(wanted).into(),
                _ => part.matches(wanted).count().into(),
            }
        }
        "title" => {
            from_args::<()>(args)?;
            title(text).into()
        }
        _ => return Ok(None),
    }))
}

fn strip<'a>(text: &'a str, chars: Option<&str>) -> &'a str {
    text.trim_start_matches(stripped(chars)).trim_end_matches(stripped(chars))
}

/// Returns a function that says whether a character is one of `chars` or, for `None`, a space.
fn stripped(chars: Option<&str>) -> impl Fn(char) -> bool {
    move |char| chars.map_or_else(|| is_space(char), |chars| chars.contains(char))
}

/// The side of the text at which a split with `maxsplit` begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

fn split(text: &str, args: &[Value], side: Side) -> Result<Value, Error> {
    let (separator, max, kwargs): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let named: Option<String> = kwargs.get("sep")?;
    let max = match max {
        Some(max) => Some(max),
        None => kwargs.get("maxsplit")?,
    };
    kwargs.assert_all_used()?;
    let max = max.and_then(|max| usize::try_from(max).ok()).unwrap_or(usize::MAX - 1);
    let parts: Vec<&str> = match separator.or(named.as_deref()) {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "split: the separator is empty")),
        Some(separator) if side == Side::Left => text.splitn(max + 1, separator).collect(),
        Some(separator) => reversed(text.rsplitn(max + 1, separator)),
        None => words(text, max, side),
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

fn reversed<'a>(parts: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut parts: Vec<_> = parts.collect();
    parts.reverse();
    parts
}

/// Splits at white space, at most `max` times.
fn words(text: &str, max: usize, side: Side) -> Vec<&str> {
    let (left, mut rest, mut words) = (side == Side::Left, text, Vec::new());
    loop {
        rest = if left { rest.trim_start_matches(is_space) } else { rest.trim_end_matches(is_space) };
        if rest.is_empty() {
            break;
        }
        let end = if left { rest.find(is_space) } else { rest.rfind(is_space) };
        let Some(end) = end.filter(|_| words.len() < max) else {
            words.push(rest);
            break;
        };
        if left {
            words.push(&rest[..end]);
            rest = &rest[end..];
        } else {
            let after = end + rest[end..].chars().next().map_or(0, char::len_utf8);
            words.push(&rest[after..]);
            rest = &rest[..after];
        }
    }
    if left { words } else { reversed(words.into_iter()) }
}

/// Splits at the line ends that Python knows.
fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let is_end =
        |char: char| matches!(char, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let (mut lines, mut rest) = (Vec::new(), text);
    while let Some(at) = rest.find(is_end) {
        let len = if rest[at..].starts_with("\r\n") { 2 } else { rest[at..].chars().next().map_or(0, char::len_utf8) };
        lines.push(&rest[..if keep_ends { at + len } else { at }]);
        rest = &rest[at + len..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// Reads the arguments of a search: a text, and optionally the first and the end character to be searched. Returns the searched bytes.
fn within<'a>(text: &str, args: &'a [Value]) -> Result<(&'a str, Range<usize>), Error> {
    let (wanted, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let chars = if start.is_some() || end.is_some() { text.chars().count() as i64 } else { 0 };
    let byte = |index: i64| {
        let index = if index < 0 { (index + chars).max(0) } else { index };
        text.char_indices().nth(index as usize).map_or(text.len(), |(at, _)| at)
    };
    let (start, end) = (start.map_or(0, byte), end.map_or(text.len(), byte));
    Ok((wanted, start..end.max(start)))
}

/// Writes each letter after another character in upper case, and all others in lower case.
fn title(text: &str) -> String {
    let mut inside_word = false;
    let mut titled = String::with_capacity(text.len());
    for char in text.chars() {
        if inside_word {
            titled.extend(char.to_lowercase());
        } else {
            titled.extend(char.to_uppercase());
        }
        inside_word = char.is_alphabetic();
    }
    titled
}
