//! The template engine with the settings, functions, filters and methods of Hugging Face's `transformers`. It renders templates of models
//! byte for byte as `apply_chat_template` does.

use super::{json, limits, method, python};
use minijinja::{
    Environment, Error, ErrorKind, State, Value, filters,
    syntax::SyntaxConfig,
    value::{Kwargs, Rest, ValueKind},
};

/// Returns the time for `strftime_now`.
pub type TemplateClock = fn() -> jiff::Zoned;

/// The prefix under which the engine's own filters stay available where this module replaces them. The space keeps templates from naming them.
const ENGINES_PREFIX: &str = "engine's ";
/// The engine's own filters that apply an operation to each item.
const ENGINES: [&str; 5] = ["engine's map", "engine's select", "engine's reject", "engine's selectattr", "engine's rejectattr"];

/// Returns an environment without templates.
pub(super) fn environment(clock: TemplateClock) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(syntax()?);
    environment.set_formatter(|output, _, value| match value.as_str() {
        Some(text) => limits::write(text.len()).and_then(|()| Ok(output.write_str(text)?)),
        None => {
            let text = python::str(value);
            limits::write(text.len()).and_then(|()| Ok(output.write_str(&text)?))
        }
    });
    // `debug` would print all variables, without a limit on their bytes.
    environment.remove_global("debug");
    limits::add_filters(&mut environment);
    environment.set_unknown_method_callback(method::call);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", move |format: &str| strftime(&clock(), format));
    environment.add_function("cycler", |items: Rest<Value>| {
        limits::ensure_all(&items)?;
        minijinja_contrib::globals::cycler(items.to_vec())
    });
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_filter(ENGINES[0], filters::map);
    environment.add_filter(ENGINES[1], filters::select);
    environment.add_filter(ENGINES[2], filters::reject);
    environment.add_filter(ENGINES[3], filters::selectattr);
    environment.add_filter(ENGINES[4], filters::rejectattr);
    for engines in ENGINES {
        let name = engines.trim_start_matches(ENGINES_PREFIX);
        environment.add_filter(name, move |state: &mut State<'_, '_>, value: &Value, args: Rest<Value>, named: Kwargs| {
            let has_named = named.args().next().is_some();
            let named = has_named.then(|| named.into());
            for_each(state, engines, value, &args.iter().cloned().chain(named).collect::<Vec<_>>())
        });
    }
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("string", |value: &Value| python::str(value));
    environment.add_filter("join", join);
    environment.add_filter("replace", replace);
    environment.add_filter("trim", method::trim);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("escape", escape);
    environment.add_filter("e", escape);
    environment.add_test("sequence", is_iterable);
    environment.add_test("iterable", is_iterable);
    Ok(environment)
}

pub(super) fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()
}

/// Unlike in the engine, texts and dictionaries are sequences, and `none` is not iterable.
fn is_iterable(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), Seq | Iterable | Map | String | Undefined)
}

/// Rewrites what Jinja2 and `transformers` understand but the engine does not: line ends of other systems, and `generation` blocks, which
/// mark an answer for training. A `with` block has the same text and the same scope.
pub(super) fn rewrite(source: &str) -> String {
    const START: &str = "{%";
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut rewritten = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = rest.find(START) {
        let (before, tag) = rest.split_at(at + START.len());
        rewritten.push_str(before);
        let name = tag.trim_start_matches(['-', '+']).trim_start();
        let names = [("generation", "with"), ("endgeneration", "endwith")];
        let renamed = names.into_iter().find_map(|(name_there, name_here)| {
            let after = name.strip_prefix(name_there)?;
            after.trim_start().trim_start_matches(['-', '+']).starts_with("%}").then_some((after, name_here))
        });
        rest = tag;
        if let Some((after, name_here)) = renamed {
            rewritten.push_str(&tag[..tag.len() - name.len()]);
            rewritten.push_str(name_here);
            rest = after;
        }
    }
    rewritten + rest
}

/// Applies one of the [`ENGINES`] to each item, with the checks that [`limits`] has where a template names an operation.
fn for_each(state: &mut State<'_, '_>, engines: &str, items: &Value, args: &[Value]) -> Result<Vec<Value>, Error> {
    let mapped = args.first().filter(|_| engines == ENGINES[0]).and_then(Value::as_str);
    if mapped.is_some_and(|name| name.starts_with(ENGINES_PREFIX)) {
        return Err(ErrorKind::UnknownFilter.into());
    }
    let with = |first: Value, others: &[Value]| std::iter::once(first).chain(others.iter().cloned()).collect::<Vec<_>>();
    let mut all = Vec::new();
    for item in items.try_iter()?.checked() {
        let item = item?;
        limits::tick()?;
        if let Some(name) = mapped {
            limits::ensure_operation(name, &with(item.clone(), &args[1..]))?;
        }
        for value in state.apply_filter(engines, &with(vec![item].into(), args))?.try_iter()? {
            if mapped.is_some() {
                limits::made(&value)?;
            }
            all.push(value);
        }
    }
    Ok(all)
}

fn raise_exception(message: &Value) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, python::str(message)))
}

fn strftime(now: &jiff::Zoned, format: &str) -> Result<String, Error> {
    let failed = |error| Error::new(ErrorKind::InvalidOperation, "strftime_now: the format is invalid").with_source(error);
    jiff::fmt::strtime::format(format, now).map_err(failed)
}

fn join(
    state: &mut State<'_, '_>,
    value: &Value,
    separator: Option<&Value>,
    attribute: Option<&Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let named = |name| kwargs.get::<Option<Value>>(name);
    let separator = match separator {
        Some(separator) => Some(separator.clone()),
        None => named("d")?,
    };
    let attribute = match attribute {
        Some(attribute) => Some(attribute.clone()),
        None => named("attribute")?,
    };
    kwargs.assert_all_used()?;
    let separator = separator.as_ref().map(python::str).unwrap_or_default();
    let values = match attribute {
        Some(attribute) => state.apply_filter("map", &[value.clone(), Kwargs::from_iter([("attribute", attribute)]).into()])?,
        None => value.clone(),
    };
    let mut text = String::new();
    for (index, item) in values.try_iter()?.checked().enumerate() {
        if index > 0 {
            text += &separator;
        }
        text += &python::str(&item?);
    }
    Ok(text)
}

fn replace(value: &Value, old: &Value, new: &Value, count: Option<i64>) -> String {
    let (text, old, new) = (python::str(value), python::str(old), python::str(new));
    match count.and_then(|count| usize::try_from(count).ok()) {
        Some(count) => text.replacen(&old, &new, count),
        None => text.replace(&old, &new),
    }
}

/// Like the engine's own filter, but an undefined value has length 0.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { filters::length(value) }
}

/// Like the engine's own filter, but `boolean` may also be a keyword argument.
fn default(value: &Value, other: Option<Value>, boolean: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    let other = other.map_or_else(|| named.get::<Option<Value>>("default_value"), |other| Ok(Some(other)))?;
    let boolean = boolean.map_or_else(|| named.get::<Option<Value>>("boolean"), |boolean| Ok(Some(boolean)))?;
    named.assert_all_used()?;
    let absent = value.is_undefined() || boolean.is_some_and(|boolean| boolean.is_true()) && !value.is_true();
    Ok(if absent { other.unwrap_or_else(|| "".into()) } else { value.clone() })
}

/// Like the engine's own filter, but a value that is not a number becomes 0, or `default` if it is given.
fn int(state: &State<'_, '_>, value: &Value, default: Option<Value>, base: Option<u32>, named: Kwargs) -> Value {
    filters::int(state, value, default.clone(), base, named).unwrap_or_else(|_| default.unwrap_or_else(|| 0.into()))
}

/// Like the engine's own filter, but a value that is not a number becomes 0.0, or `default` if it is given.
fn float(state: &State<'_, '_>, value: &Value, default: Option<Value>, named: Kwargs) -> Value {
    filters::float(state, value, default.clone(), named).unwrap_or_else(|_| default.unwrap_or_else(|| 0.0.into()))
}

/// Writes the entities of Jinja2.
fn escape(value: &Value) -> String {
    let text = python::str(value).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    text.replace('"', "&#34;").replace('\'', "&#39;")
}

#[cfg(test)]
mod tests;
