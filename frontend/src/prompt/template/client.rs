//! Rewrites a client's chat template so that its values cannot be nested without a limit.
//!
//! Values are dropped, compared and printed by functions that call themselves for each level, so a value that is nested deeply enough would
//! overflow the stack and end the process. A template can nest values without a limit only through what outlives an expression: variables,
//! members of namespaces, and arguments of macros that call themselves. So each of these gets its value through a filter that limits the depth.
//! One expression, and the blocks around it, can only nest as deeply as the source is long; [`STACK_BYTES`] is enough for that
//! (a test tries the deepest ones).

use super::{environment, python};
use minijinja::{
    Environment, Error, ErrorKind, Value,
    machinery::{Span, Token, tokenize},
    value::{Tuple, ValueKind},
};
use std::{
    borrow::Cow,
    fmt::Write,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// The maximum length of a client's template, in bytes. The longest templates of known models have 20 KB.
pub(crate) const SOURCE_BYTES_MAX: usize = 64 << 10;
/// The stack on which a client's template is compiled and rendered. Each byte of the source adds at most one level to a syntax tree or a value,
/// and a level takes less than 2 KiB.
pub(crate) const STACK_BYTES: usize = 128 << 20;

/// The filter for the values of variables and arguments.
const VARIABLE: &str = "tandem_variable";
/// The filter for the values of a namespace's members. They must not be namespaces, or a namespace could contain itself.
const MEMBER: &str = "tandem_member";

type Tokens<'a> = [(Token<'a>, Span)];

/// Returns the template with the filters, which [`add_filters`] defines.
///
/// # Errors
/// The template is malformed, or has blocks that a client's template must not have.
pub(super) fn rewrite(source: &str) -> Result<String, Error> {
    let tokens = tokenize(source, false, environment::syntax()?).collect::<Result<Vec<_>, _>>()?;
    let mut insertions: Vec<(u32, String)> = Vec::new();
    let mut rest = &tokens[..];
    while let Some(start) = rest.iter().position(|(token, _)| matches!(token, Token::BlockStart)) {
        let block = &rest[start + 1..];
        // A block without an end is malformed, which the compiler reports.
        let Some(end) = block.iter().position(|(token, _)| matches!(token, Token::BlockEnd)) else { break };
        match &block[..end] {
            [(Token::Ident("set"), _), set @ ..] => insertions.extend(of_set(set)),
            [(Token::Ident("macro"), _), head @ ..] => {
                insertions.extend(of_macro(source, head, block[end].1));
            }
            [(Token::Ident(name @ ("block" | "extends" | "from" | "import" | "include")), _), ..] => {
                return Err(refused(format!("the tag '{name}' is not supported in a template of a request")));
            }
            [(Token::Ident("for"), _), .., (Token::Ident("recursive"), _)] => {
                return Err(refused("recursive loops are not supported in a template of a request; use a macro"));
            }
            _ => {}
        }
        rest = &block[end..];
    }
    let (mut rewritten, mut copied) = (String::with_capacity(source.len() * 2), 0);
    for (at, text) in insertions {
        let at = at as usize;
        rewritten.push_str(&source[copied..at]);
        rewritten.push_str(&text);
        copied = at;
    }
    rewritten.push_str(&source[copied..]);
    Ok(rewritten)
}

/// Returns what is inserted for `{% set … %}`: with `=` the value goes through the filter, without it the text if it has filters of its own.
fn of_set(set: &Tokens<'_>) -> Vec<(u32, String)> {
    let is_operator = |(token, _): &(Token<'_>, Span)| matches!(token, Token::Assign | Token::Pipe);
    let (Some(at), Some((_, last))) = (set.iter().position(is_operator), set.last()) else { return Vec::new() };
    let is_member = set[..at].iter().any(|(token, _)| matches!(token, Token::Dot));
    let filter = if is_member { MEMBER } else { VARIABLE };
    match &set[at] {
        (Token::Assign, span) => vec![(span.end_offset, "(".to_owned()), (last.end_offset, format!(")|{filter}"))],
        _ => vec![(last.end_offset, format!("|{filter}"))],
    }
}

/// Returns what is inserted after the head of a macro: its arguments go through the filter.
fn of_macro(source: &str, head: &Tokens<'_>, end: Span) -> Option<(u32, String)> {
    let end_tag = &source[end.start_offset as usize..end.end_offset as usize];
    let (mut text, mut depth) = (String::new(), 0);
    for pair in head.windows(2) {
        match &pair[0].0 {
            Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => depth += 1,
            Token::ParenClose | Token::BracketClose | Token::BraceClose => depth -= 1,
            _ => {}
        }
        if let (Token::ParenOpen | Token::Comma, Token::Ident(name)) = (&pair[0].0, &pair[1].0)
            && depth == 1
        {
            // Writing to a string cannot fail.
            let _ = write!(text, "{{% set {name} = {name}|{VARIABLE} {end_tag}");
        }
    }
    (!text.is_empty()).then_some((end.end_offset, text))
}

/// Adds the filters to the environment of one template. They visit at most `values_max` values in all of its renderings.
pub(super) fn add_filters(environment: &mut Environment<'static>, values_max: u64) {
    let left = Arc::new(AtomicU64::new(values_max));
    let of_member = Arc::clone(&left);
    let kept = |value: &Value, bounded: Option<Value>| bounded.unwrap_or_else(|| value.clone());
    environment.add_filter(MEMBER, move |value: &Value| bounded(value, 0, &of_member).map(|bounded| kept(value, bounded)));
    environment.add_filter(VARIABLE, move |value: &Value| {
        if !is_namespace(value) {
            return bounded(value, 0, &left).map(|bounded| kept(value, bounded));
        }
        for name in value.try_iter()? {
            bounded(&value.get_item(&name)?, 1, &left)?;
        }
        Ok(value.clone())
    });
}

/// Checks that the value is nested at most [`python::DEPTH_MAX`] levels deep. Values that are computed when they are read, such as slices, can be
/// nested without visible depth, so they become lists. Returns the value with these lists; `None`: the value has none.
fn bounded(value: &Value, depth: usize, left: &AtomicU64) -> Result<Option<Value>, Error> {
    let visited = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
    visited.map_err(|_| Error::new(ErrorKind::OutOfFuel, "the template assigns too many values"))?;
    if depth > python::DEPTH_MAX {
        return Err(refused(format!("a value is nested more than {} levels deep", python::DEPTH_MAX)));
    }
    let mut changed = value.kind() == ValueKind::Iterable;
    let mut inner = |value: Value| {
        let bounded = bounded(&value, depth + 1, left)?;
        changed |= bounded.is_some();
        Ok::<_, Error>(bounded.unwrap_or(value))
    };
    match value.kind() {
        ValueKind::Undefined | ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::String | ValueKind::Bytes => {
            Ok(None)
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.checked().map(|item| inner(item?)).collect::<Result<Vec<_>, _>>()?;
            Ok(changed.then(|| if value.is_tuple() { Tuple::from(items).into() } else { items.into() }))
        }
        ValueKind::Map if !is_engines_own(value) => {
            let member = |name: Result<Value, Error>| {
                let name = name?;
                let member = inner(value.get_item(&name)?)?;
                Ok::<_, Error>((inner(name)?, member))
            };
            let members = value.try_iter()?.checked().map(member).collect::<Result<Vec<_>, _>>()?;
            Ok(changed.then(|| Value::from_pairs(members)))
        }
        _ => {
            let found = if is_namespace(value) { "a namespace within another value" } else { "a macro or another object" };
            Err(refused(format!("{found} cannot be assigned in a template of a request")))
        }
    }
}

fn is_namespace(value: &Value) -> bool {
    has_type(value, "::Namespace")
}

/// Whether the value looks like a dictionary, but holds more than its members.
fn is_engines_own(value: &Value) -> bool {
    ["::Namespace", "::Macro", "::Loop", "::Module"].into_iter().any(|name| has_type(value, name))
}

fn has_type(value: &Value, name: &str) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with(name))
}

fn refused(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests;
