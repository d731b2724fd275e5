//! What a rendering may use: bytes, visited values, nesting and time. The model's publisher is not trusted, so no message may make a template
//! end the process or hold others up. The engine itself counts only instructions.
//!
//! Values are dropped, compared and printed by functions that call themselves for each level, so values must not be nested without a
//! limit. Values can grow from step to step only through what outlives an expression: variables, members of namespaces, and arguments of
//! macros. [`instrument`](super::instrument) passes each of these through a filter of this module. One expression, and the blocks around it,
//! can only nest as deeply as the source is long, for which the thread has enough stack.

use super::python;
use minijinja::{
    Environment, Error, ErrorKind, Value,
    value::{Kwargs, Tuple, ValueKind},
};
use std::{
    borrow::Cow,
    cell::Cell,
    time::{Duration, Instant},
};

/// The filter for the values of variables and arguments.
pub(super) const VARIABLE: &str = "tandem_variable";
/// The filter for the values of a namespace's members, which must not be namespaces: otherwise a namespace could contain itself.
pub(super) const MEMBER: &str = "tandem_member";
/// The filter for the results of operations that make values.
pub(super) const MADE: &str = "tandem_made";
/// The filter for slices. Slices of lists are not copies.
pub(super) const SLICED: &str = "tandem_sliced";
/// The filter that checks the time. Returns its value unchanged.
pub(super) const TICK: &str = "tandem_tick";
/// The filter for the operands of an operation that multiplies. Its value is a tuple of the operands and the operation's name. Returns the
/// operands.
pub(super) const OPERANDS: &str = "tandem_operands";

/// The operations whose results may be much larger than their operands.
pub(super) const MULTIPLYING: [&str; 14] = [
    "*",
    "batch",
    "format",
    "indent",
    "join",
    "lines",
    "list",
    "pprint",
    "replace",
    "rsplit",
    "slice",
    "split",
    "splitlines",
    "sum",
];

/// The bytes that a rendering may use: `BYTES_MAX`, and `BYTES_PER_BYTE` more for each byte of its variables.
const BYTES_MAX: usize = 64 << 20;
const BYTES_PER_BYTE: usize = 16;
/// The maximum total bytes of all values that become members of namespaces. A namespace is printed without checks, with all its members.
const MEMBERS_MAX: usize = 1 << 30;
/// The maximum number of values that the filters visit.
const VISITS_MAX: u64 = 10_000_000;
/// The maximum time of a rendering. The longest conversations of known templates need less than a second.
const TIME_MAX: Duration = Duration::from_secs(5);
/// The bytes that a value takes besides its text.
const VALUE_BYTES: usize = 32;

/// What the rendering on this thread may still use.
#[derive(Clone, Copy)]
struct RemainingLimits {
    bytes: usize,
    members: usize,
    visits: u64,
    end: Instant,
}

thread_local! {
    static LEFT: Cell<Option<RemainingLimits>> = const { Cell::new(None) };
}

#[expect(clippy::disallowed_methods, reason = "the limit is on computing time, which passes while a test's clock is paused")]
fn now() -> Instant {
    Instant::now()
}

/// Begins a rendering on this thread, of variables with this many bytes of text.
pub(super) fn begin(input_bytes: usize) {
    let bytes = BYTES_MAX.saturating_add(input_bytes.saturating_mul(BYTES_PER_BYTE));
    python::set_text_max(bytes);
    LEFT.set(Some(RemainingLimits { bytes, members: MEMBERS_MAX, visits: VISITS_MAX, end: now() + TIME_MAX }));
}

fn exhausted(what: &'static str) -> Error {
    Error::new(ErrorKind::OutOfFuel, what)
}

fn left() -> Result<RemainingLimits, Error> {
    LEFT.get().ok_or_else(|| exhausted("no rendering has begun"))
}

/// Subtracts bytes from those that the rendering may still use.
fn spend(bytes: usize) -> Result<(), Error> {
    let left = left()?;
    let bytes = left.bytes.checked_sub(bytes).ok_or_else(|| exhausted("the template makes too much text"))?;
    LEFT.set(Some(RemainingLimits { bytes, ..left }));
    python::set_text_max(bytes);
    Ok(())
}

/// Subtracts the bytes of a written text.
pub(super) fn write(bytes: usize) -> Result<(), Error> {
    spend(bytes).map_err(|error| Error::new(ErrorKind::WriteFailure, error.to_string()))
}

/// Checks that this many bytes are left, without subtracting them.
pub(super) fn ensure(bytes: usize) -> Result<(), Error> {
    if bytes <= left()?.bytes { Ok(()) } else { Err(exhausted("the template makes too much text")) }
}

/// Subtracts the bytes of a namespace's new member.
fn spend_member(value: &Value) -> Result<(), Error> {
    let weight = weight(value)?;
    let left = left()?;
    let members = left.members.checked_sub(weight).ok_or_else(|| exhausted("the template keeps too much text"))?;
    LEFT.set(Some(RemainingLimits { members, ..left }));
    Ok(())
}

pub(super) fn tick() -> Result<(), Error> {
    if now() < left()?.end { Ok(()) } else { Err(exhausted("the template takes too much time")) }
}

fn visit() -> Result<(), Error> {
    let left = left()?;
    let visits = left.visits.checked_sub(1).ok_or_else(|| exhausted("the template makes too many values"))?;
    LEFT.set(Some(RemainingLimits { visits, ..left }));
    if visits % 1024 == 0 { tick() } else { Ok(()) }
}

/// Adds the filters that the instrumented template applies.
pub(super) fn add_filters(environment: &mut Environment<'static>) {
    let kept = |value: &Value, bounded: Option<Value>| bounded.unwrap_or_else(|| value.clone());
    environment.add_filter(MEMBER, move |value: &Value| {
        let member = bounded(value, 0).map(|bounded| kept(value, bounded))?;
        spend_member(&member).map(|()| member)
    });
    environment.add_filter(VARIABLE, move |value: &Value| {
        if !is_engines_own(value) {
            return bounded(value, 0).map(|bounded| kept(value, bounded));
        }
        if is_namespace(value) {
            for name in value.try_iter()? {
                bounded(&value.get_item(&name)?, 1)?;
            }
        }
        Ok(value.clone())
    });
    environment.add_filter(MADE, |value: Value| made(&value).map(|()| value));
    environment.add_filter(SLICED, |value: Value| {
        tick()?;
        spend(value.as_str().map_or(0, str::len))?;
        Ok::<_, Error>(value)
    });
    environment.add_filter(TICK, |value: Value| tick().map(|()| value));
    environment.add_filter(OPERANDS, |operands: &Value| {
        let mut operands: Vec<Value> = operands.try_iter()?.collect();
        let operation = operands.pop().unwrap_or_default();
        ensure(estimate(operation.as_str().unwrap_or_default(), &operands)?)?;
        // The engine unpacks a list with its first item on top of the stack.
        operands.reverse();
        Ok::<_, Error>(Value::from(Tuple::from(operands)))
    });
}

/// Subtracts the bytes of a value that an operation has made.
pub(super) fn made(value: &Value) -> Result<(), Error> {
    tick()?;
    match value.as_str() {
        Some(text) => spend(text.len()),
        None => {
            if !is_engines_own(value) || is_namespace(value) {
                ensure(weight(value)?)?;
            }
            spend(VALUE_BYTES * value.len().unwrap_or_default())
        }
    }
}

/// Checks that the value is nested at most [`python::DEPTH_MAX`] levels deep. Values that are computed when they are read, such as slices, can be
/// nested without visible depth, so they become lists. Returns the value with these lists; `None`: the value has none.
fn bounded(value: &Value, depth: usize) -> Result<Option<Value>, Error> {
    visit()?;
    if depth > python::DEPTH_MAX {
        return Err(refused(format!("a value is nested more than {} levels deep", python::DEPTH_MAX)));
    }
    let mut changed = value.kind() == ValueKind::Iterable;
    let mut inner = |value: Value| {
        let bounded = bounded(&value, depth + 1)?;
        changed |= bounded.is_some();
        Ok::<_, Error>(bounded.unwrap_or(value))
    };
    match value.kind() {
        ValueKind::Undefined | ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::String | ValueKind::Bytes => {
            Ok(None)
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter()?.checked().map(|item| inner(item?)).collect::<Result<Vec<_>, _>>()?;
            if changed {
                spend(VALUE_BYTES * items.len())?;
            }
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
            let found = if is_namespace(value) { "a namespace" } else { "a macro or another object" };
            Err(refused(format!("{found} cannot be kept within another value")))
        }
    }
}

/// Checks that all of these values can be printed within the limit. Of the engine's objects, only namespaces are permitted: others hide their size.
pub(super) fn ensure_all(values: &[Value]) -> Result<(), Error> {
    ensure(values.iter().try_fold(0_usize, |sum, value| Ok::<_, Error>(sum.saturating_add(weight(value)?)))?)
}

/// Checks that the operation's result fits into the limit. The first operand is the object to which the operation is applied.
pub(super) fn ensure_operation(name: &str, operands: &[Value]) -> Result<(), Error> {
    if MULTIPLYING.contains(&name) { ensure(estimate(name, operands)?) } else { Ok(()) }
}

/// Returns about how many bytes the value has when it is printed. A part that it contains several times is added as often.
///
/// # Errors
/// The value has an object of the engine that hides its size.
fn weight(value: &Value) -> Result<usize, Error> {
    visit()?;
    let own = VALUE_BYTES + value.as_str().map_or(0, str::len);
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            value.try_iter()?.checked().try_fold(own, |sum, item| Ok(sum.saturating_add(weight(&item?)?)))
        }
        ValueKind::Map if !is_engines_own(value) || is_namespace(value) => {
            value.try_iter()?.checked().try_fold(own, |sum, name| {
                let name = name?;
                Ok(sum.saturating_add(weight(&name)?).saturating_add(weight(&value.get_item(&name)?)?))
            })
        }
        _ if is_engines_own(value) => Err(refused("a macro or another object cannot be within another value or a text")),
        _ => Ok(own),
    }
}

/// Returns the maximum size of the operation's result, in bytes. The first operand is the object to which the operation is applied.
fn estimate(operation: &str, operands: &[Value]) -> Result<usize, Error> {
    let mut all = Vec::new();
    for value in operands {
        if value.is_kwargs() {
            let named = Kwargs::try_from(value.clone())?;
            all.extend(named.args().map(|name| named.peek::<Value>(name)).collect::<Result<Vec<_>, _>>()?);
        } else {
            all.push(value.clone());
        }
    }
    let text = |at: usize| all.get(at).map(python::str).unwrap_or_default();
    let size = |value: &Value| value.as_str().map_or_else(|| value.len().unwrap_or(1), str::len);
    let number = all.iter().filter_map(|value| usize::try_from(value.clone()).ok()).max().unwrap_or(0);
    let matches = |text: &str, part: &str| if part.is_empty() { text.len() + 1 } else { text.matches(part).count() };
    Ok(match operation {
        "*" => {
            let bytes = |value: &Value| value.as_str().map_or_else(|| value.len().unwrap_or(0) * VALUE_BYTES, str::len);
            all.iter().map(bytes).max().unwrap_or(0).saturating_mul(number)
        }
        "batch" | "slice" => number.saturating_mul(2 * VALUE_BYTES),
        "indent" => (matches(&text(0), "\n") + 1).saturating_mul(number.max(all.iter().skip(1).map(size).max().unwrap_or(0))),
        "format" => {
            let format = text(0);
            let widths = format.split(|char: char| !char.is_ascii_digit()).filter(|width| !width.is_empty());
            let widest = widths.map(|width| width.parse().unwrap_or(usize::MAX)).max().unwrap_or(0);
            let texts = all.iter().skip(1).try_fold(0_usize, |sum, value| Ok::<_, Error>(sum.saturating_add(weight(value)?)))?;
            format.matches(['%', '{']).count().saturating_mul(widest.saturating_add(number).saturating_add(texts))
        }
        "join" => all.iter().map(|value| size(value).max(1)).fold(1, usize::saturating_mul),
        "replace" => matches(&text(0), &text(1)).saturating_mul(text(2).len()),
        "pprint" => {
            all.iter().try_fold(0_usize, |sum, value| Ok::<_, Error>(sum.saturating_add(weight(value)?)))?.saturating_mul(32)
        }
        "sum" => {
            let items = all.first().map(Value::try_iter).transpose()?.into_iter().flatten();
            if items.into_iter().all(|item| item.kind() == ValueKind::Number) {
                0
            } else {
                weight(&all[0])?.saturating_mul(size(&all[0]))
            }
        }
        // A text is divided into parts, each of which is a separate value.
        _ => {
            let text = all.first().and_then(Value::as_str).unwrap_or_default();
            let parts = match all.get(1).and_then(Value::as_str) {
                Some(part) if !part.is_empty() => matches(text, part),
                _ if operation == "list" => text.len(),
                _ => text.chars().filter(|char| python::is_space(*char)).count(),
            };
            parts.saturating_mul(2 * VALUE_BYTES)
        }
    })
}

/// Whether the value is an object of the engine, which may hold more than its visible members.
fn is_engines_own(value: &Value) -> bool {
    value.kind() == ValueKind::Plain
        || ["::Namespace", "::Macro", "::Loop", "::Module"].into_iter().any(|name| has_type(value, name))
}

fn is_namespace(value: &Value) -> bool {
    has_type(value, "::Namespace")
}

fn has_type(value: &Value, name: &str) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with(name))
}

fn refused(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests;
