//! Parses calls in the formats of Qwen 3 Coder and GLM 4.5: the arguments are texts between tags. The schema of a tool determines which of these
//! texts are numbers, lists and so on. A call is parsed only when it is complete.

use super::TOOL_CALL_END;
use crate::chat::{Tools, output::json::Start};
use serde_json::{Map, Value};

pub(super) const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
const KEY: (&str, &str) = ("<arg_key>", "</arg_key>");
const VALUE: (&str, &str) = ("<arg_value>", "</arg_value>");

/// Reads `<function=name><parameter=key>value</parameter>…</function>`. The opening tag of the function may have been read.
pub(super) fn function(text: &str, tools: &Tools) -> Start {
    let begun = text.trim_start();
    let head = begun.strip_prefix(FUNCTION).unwrap_or(begun);
    if head.len() == begun.len() && FUNCTION.starts_with(begun) {
        return Start::Undecided;
    }
    let Some((name, rest)) = head.split_once('>') else { return Start::Undecided };
    let Some((body, rest)) = rest.split_once(FUNCTION_END) else { return Start::Undecided };
    let schema = schema(tools, name);
    let mut arguments = Map::new();
    for parameter in body.split(PARAMETER).skip(1) {
        let Some((key, value)) = parameter.split_once('>') else { return Start::NoCall };
        let value = value.rsplit_once(PARAMETER_END).map_or(value, |(value, _)| value);
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key.to_owned(), typed(value, schema.and_then(|schema| schema.get(key))));
    }
    whole(name, arguments, text.len() - rest.len())
}

/// Reads `name<arg_key>key</arg_key><arg_value>value</arg_value>…`, up to the closing tag.
pub(super) fn arguments(text: &str, tools: &Tools) -> Start {
    let Some((call, _)) = text.split_once(TOOL_CALL_END) else { return Start::Undecided };
    let before = call.trim_start();
    let before = before.split_once(KEY.0).map_or(before, |(before, _)| before);
    let name = before.split_once('\n').map_or(before, |(name, _)| name).trim();
    let schema = schema(tools, name);
    let mut arguments = Map::new();
    for argument in call.split(KEY.0).skip(1) {
        let pair = argument.split_once(KEY.1).and_then(|(key, rest)| Some((key, rest.trim_start().strip_prefix(VALUE.0)?)));
        let Some((key, value)) = pair else { return Start::NoCall };
        let value = value.rsplit_once(VALUE.1).map_or(value, |(value, _)| value);
        arguments.insert(key.trim().to_owned(), typed(value, schema.and_then(|schema| schema.get(key.trim()))));
    }
    whole(name, arguments, call.len())
}

fn whole(name: &str, arguments: Map<String, Value>, end: usize) -> Start {
    Start::Whole { name: name.trim().to_owned(), arguments: Value::Object(arguments).to_string(), end }
}

/// Returns the schemas of the tool's parameters.
fn schema<'a>(tools: &'a Tools, name: &str) -> Option<&'a Map<String, Value>> {
    let tool = tools.list.iter().find(|tool| tool.name == name.trim())?;
    tool.parameters.get("properties")?.as_object()
}

/// Converts a parameter's text to a value that its schema allows. A text that is none of the allowed types remains a text.
fn typed(text: &str, schema: Option<&Value>) -> Value {
    let mut types = Vec::new();
    if let Some(schema) = schema {
        collect_types(schema, &mut types);
    }
    let python = match text.trim() {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        text => text,
    };
    let fits = |value: &Value| {
        types.iter().any(|name| match *name {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "integer" => value.is_i64() || value.is_u64(),
            "number" => value.is_number(),
            "array" => value.is_array(),
            "object" => value.is_object(),
            _ => false,
        })
    };
    serde_json::from_str(python).ok().filter(fits).unwrap_or_else(|| text.into())
}

fn collect_types<'a>(schema: &'a Value, types: &mut Vec<&'a str>) {
    match &schema["type"] {
        Value::String(name) => types.push(name),
        Value::Array(names) => types.extend(names.iter().filter_map(Value::as_str)),
        _ => {}
    }
    for list in ["anyOf", "oneOf", "allOf"] {
        schema[list].as_array().into_iter().flatten().for_each(|schema| collect_types(schema, types));
    }
}
