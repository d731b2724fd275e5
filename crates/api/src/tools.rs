//! The tools of a request and the choice between them, as clients of OpenAI's API send them.

use super::{
    fields::{Bounded, Reader, readable},
    limits::NAME_CHARS_MAX,
    names::ParamNames,
};
use crate::error::{Problem, RequestError, at_most};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{
    Deserialize,
    de::{self, MapAccess, Visitor, value::MapAccessDeserializer},
};
use serde_json::{Value, json};
use std::{borrow::Cow, collections::HashSet};
use tandem_grammar::Kind;
use tandem_text::chat::{Tool, ToolChoice, Tools};

/// The maximum number of tools of a request. OpenAI's API allows 128.
pub(crate) const TOOLS_MAX: usize = 1024;

/// The fields of a request that concern tools.
pub(crate) struct RawTools {
    pub(crate) tools: Vec<Definition>,
    pub(crate) choice: Option<RawChoice>,
    pub(crate) parallel: Option<bool>,
}

/// The definition of a tool, as in `/v1/chat/completions`.
#[derive(Debug, Default)]
pub(crate) struct Definition {
    /// The path of the request's field that defines the tool, for errors.
    pub(crate) at: String,
    pub(crate) value: Value,
    /// Whether the model sees the tool only after a tool's result refers to it (`defer_loading`).
    pub(crate) deferred: bool,
    /// The constraint on the free text that is the tool's input.
    pub(crate) input: Option<Kind>,
}

/// Returns the tools of a chat.
pub(crate) fn definitions(tools: Option<Bounded<Value, TOOLS_MAX>>) -> Result<Vec<Definition>, RequestError> {
    let Bounded(given) = tools.unwrap_or_default();
    at_most("tools", given.len(), TOOLS_MAX, "tools")?;
    let definition = |(index, value)| Definition { at: format!("tools[{index}]"), value, ..Definition::default() };
    Ok(given.into_iter().enumerate().map(definition).collect())
}

#[derive(Deserialize)]
struct RawTool {
    #[serde(rename = "type")]
    kind: Option<String>,
    function: Option<RawFunction>,
}

#[derive(Deserialize)]
struct RawFunction {
    name: Option<String>,
    #[serde(default)]
    parameters: Value,
    strict: Option<bool>,
}

/// The field `tool_choice`.
#[derive(Debug)]
pub(crate) enum RawChoice {
    Mode(String),
    Object(ChoiceObject),
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct ChoiceObject {
    #[serde(rename = "type")]
    kind: Option<String>,
    function: Option<Named>,
    allowed_tools: Option<AllowedTools>,
}

#[derive(Debug, Deserialize)]
struct Named {
    name: Option<String>,
}

#[derive(Debug, Deserialize)]
struct AllowedTools {
    mode: Option<String>,
    #[serde(default)]
    tools: Vec<AllowedTool>,
}

#[derive(Debug, Deserialize)]
struct AllowedTool {
    function: Option<Named>,
}

impl RawChoice {
    /// Returns the choice of the function with this name.
    pub(crate) fn function(name: Option<String>) -> Self {
        Self::Object(ChoiceObject { function: Some(Named { name }), ..ChoiceObject::default() })
    }

    /// Returns the choice among the functions with these names.
    pub(crate) fn allowed(mode: Option<String>, names: impl Iterator<Item = Option<String>>) -> Self {
        let tools = names.map(|name| AllowedTool { function: Some(Named { name }) }).collect();
        let (kind, allowed_tools) = (Some("allowed_tools".to_owned()), Some(AllowedTools { mode, tools }));
        Self::Object(ChoiceObject { kind, allowed_tools, function: None })
    }
}

readable! {
    [] RawChoice, deserialize_any, "'none', 'auto', 'required' or an object",

    fn visit_str<E: de::Error>(self, mode: &str) -> Result<RawChoice, E> {
        Ok(RawChoice::Mode(mode.to_owned()))
    }

    fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<RawChoice, A::Error> {
        ChoiceObject::deserialize(MapAccessDeserializer::new(object)).map(RawChoice::Object)
    }
}

impl JsonSchema for RawChoice {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "ToolChoice".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let function = json!({ "type": "object", "properties": { "name": { "type": "string" } }, "required": ["name"] });
        let named = |kinds: Value| json!({ "type": "object", "properties": { "type": { "enum": kinds }, "function": function }, "required": ["function"] });
        let tools = json!({ "type": "array", "minItems": 1, "items": named(json!(["function"])) });
        let properties = json!({ "mode": { "enum": ["auto", "required"] }, "tools": tools });
        let allowed = json!({ "type": "object", "properties": properties, "required": ["mode", "tools"] });
        json_schema!({ "anyOf": [
            { "enum": ["none", "auto", "required"] },
            named(json!(["function", null])),
            {
                "type": "object",
                "properties": { "type": { "const": "allowed_tools" }, "allowed_tools": allowed },
                "required": ["type", "allowed_tools"],
            },
        ] })
    }
}

impl RawTools {
    /// Checks the tools.
    ///
    /// # Errors
    /// A tool is incomplete, or the choice names a tool that the request does not have.
    pub(crate) fn check(self, names: &ParamNames) -> Result<Tools, RequestError> {
        let mut known = HashSet::new();
        let mut list = Vec::with_capacity(self.tools.len());
        for Definition { at, value, deferred, input } in self.tools {
            let tool = Tool { deferred, input, ..tool(value, &at, names)? };
            if !known.insert(tool.name.clone()) {
                let rule = "is the name of another tool, too; give each tool a name of its own";
                return Err(RequestError::invalid(format!("{at}{}.name", names.function), Problem::Rule { rule }));
            }
            list.push(tool);
        }
        let (choice, allowed) = choice(self.choice, &known, names)?;
        if let Some(allowed) = allowed {
            list.retain(|tool| allowed.contains(&tool.name));
        }
        if choice == ToolChoice::None {
            list.clear();
        }
        Ok(Tools { list, choice, parallel: self.parallel.unwrap_or(true) })
    }
}

fn tool(definition: Value, at: &str, names: &ParamNames) -> Result<Tool, RequestError> {
    let typed = |source: serde_json::Error| RequestError::Type { param: at.to_owned(), source };
    let missing = |path: &str| RequestError::invalid(format!("{at}{}{path}", names.function), Problem::Missing);
    let RawTool { kind, function } = RawTool::deserialize(&definition).map_err(typed)?;
    if let Some(kind) = kind.filter(|kind| kind != "function") {
        return Err(RequestError::invalid(format!("{at}.type"), Problem::ToolType { kind }));
    }
    let function = function.ok_or_else(|| missing(""))?;
    let name = function.name.ok_or_else(|| missing(".name"))?;
    let param = format!("{at}{}.name", names.function);
    if name.is_empty() {
        return Err(RequestError::invalid(param, Problem::Empty));
    }
    if name.chars().count() > NAME_CHARS_MAX {
        return Err(RequestError::invalid(param, Problem::TooMany { max: NAME_CHARS_MAX, unit: "characters" }));
    }
    if !(function.parameters.is_null() || function.parameters.is_object()) {
        let rule = "must be an object: the JSON schema of the arguments";
        return Err(RequestError::invalid(format!("{at}{}", names.parameters), Problem::Rule { rule }));
    }
    let strict = function.strict.unwrap_or(false);
    Ok(Tool { name, parameters: function.parameters, strict, deferred: false, input: None, definition })
}

/// Returns the choice and the names of the tools among which the model may choose, if the client limits them.
fn choice(
    given: Option<RawChoice>,
    known: &HashSet<String>,
    names: &ParamNames,
) -> Result<(ToolChoice, Option<HashSet<String>>), RequestError> {
    const CHOICE: &str = "tool_choice";
    let has_tools = !known.is_empty();
    let ParamNames { function: in_function, allowed_tools: in_allowed, .. } = names;
    let missing = |path: String| RequestError::invalid(format!("{CHOICE}{path}"), Problem::Missing);
    let unknown = |path: String| {
        let rule = "must be the name of one of 'tools'";
        RequestError::invalid(format!("{CHOICE}{path}"), Problem::Rule { rule })
    };
    let (choice, allowed) = match given {
        None if has_tools => (ToolChoice::Auto, None),
        None => (ToolChoice::None, None),
        Some(RawChoice::Mode(mode)) if mode == "none" => (ToolChoice::None, None),
        Some(RawChoice::Mode(mode)) => (self::mode(&mode, CHOICE, "'none', 'auto', 'required'")?, None),
        Some(RawChoice::Object(ChoiceObject { kind, function, allowed_tools })) => match kind.as_deref() {
            Some("function") | None => {
                let path = format!("{in_function}.name");
                let name = function.and_then(|function| function.name).ok_or_else(|| missing(path.clone()))?;
                if has_tools && !known.contains(&name) {
                    return Err(unknown(path));
                }
                (ToolChoice::Named(name), None)
            }
            Some("allowed_tools") => {
                let AllowedTools { mode, tools } = allowed_tools.ok_or_else(|| missing((*in_allowed).to_owned()))?;
                let mode = mode.ok_or_else(|| missing(format!("{in_allowed}.mode")))?;
                let choice = self::mode(&mode, &format!("{CHOICE}{in_allowed}.mode"), "'auto', 'required'")?;
                let mut allowed = HashSet::new();
                for (index, tool) in tools.into_iter().enumerate() {
                    let path = format!("{in_allowed}.tools[{index}]{in_function}.name");
                    let name = tool.function.and_then(|function| function.name).ok_or_else(|| missing(path.clone()))?;
                    if !known.contains(&name) {
                        return Err(unknown(path));
                    }
                    allowed.insert(name);
                }
                if allowed.is_empty() {
                    return Err(RequestError::invalid(format!("{CHOICE}{in_allowed}.tools"), Problem::Empty));
                }
                (choice, Some(allowed))
            }
            Some(_) => {
                let allowed = "'function', 'allowed_tools'";
                return Err(RequestError::invalid("tool_choice.type", Problem::Choice { allowed }));
            }
        },
    };
    match choice {
        ToolChoice::Auto if !has_tools => Ok((ToolChoice::None, None)),
        ToolChoice::Required | ToolChoice::Named(_) if !has_tools => {
            Err(RequestError::invalid(CHOICE, Problem::Rule { rule: "requires a tool call, but the request has no 'tools'" }))
        }
        choice => Ok((choice, allowed)),
    }
}

fn mode(mode: &str, param: &str, allowed: &'static str) -> Result<ToolChoice, RequestError> {
    match mode {
        "auto" => Ok(ToolChoice::Auto),
        "required" => Ok(ToolChoice::Required),
        _ => Err(RequestError::invalid(param, Problem::Choice { allowed })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(tools: Value, choice: Value) -> Result<Tools, String> {
        let tools = serde_json::from_value(tools).map_err(|error| error.to_string())?;
        let choice = serde_json::from_value(choice).map_err(|error| error.to_string())?;
        let tools = definitions(tools).map_err(|error| error.to_string())?;
        RawTools { tools, choice, parallel: None }.check(&ParamNames::CHAT).map_err(|error| error.to_string())
    }

    fn function(name: &str) -> Value {
        json!({ "type": "function", "function": { "name": name, "parameters": { "type": "object" } } })
    }

    #[test]
    fn tool_choice_determines_which_tools_the_model_sees() {
        let both = json!([function("a"), function("b")]);
        let named = |name: &str| json!({ "type": "function", "function": { "name": name } });
        let allowed = |mode: &str| json!({ "type": "allowed_tools", "allowed_tools": { "mode": mode, "tools": [named("b")] } });
        for (tools, given, choice, names) in [
            (both.clone(), json!(null), ToolChoice::Auto, vec!["a", "b"]),
            (both.clone(), json!("auto"), ToolChoice::Auto, vec!["a", "b"]),
            (both.clone(), json!("none"), ToolChoice::None, vec![]),
            (both.clone(), json!("required"), ToolChoice::Required, vec!["a", "b"]),
            (both.clone(), named("b"), ToolChoice::Named("b".to_owned()), vec!["a", "b"]),
            (both.clone(), allowed("auto"), ToolChoice::Auto, vec!["b"]),
            (both, allowed("required"), ToolChoice::Required, vec!["b"]),
            (json!(null), json!("auto"), ToolChoice::None, vec![]),
            (json!([]), json!(null), ToolChoice::None, vec![]),
            (json!([]), json!("none"), ToolChoice::None, vec![]),
        ] {
            let tools = read(tools, given.clone()).expect("the choice is valid");
            let found: Vec<&str> = tools.list.iter().map(|tool| &*tool.name).collect();
            assert_eq!((tools.choice, found), (choice, names), "{given}");
        }
    }

    #[test]
    fn error_names_the_field_at_fault() {
        let one = json!([function("a")]);
        for (tools, choice, expected) in [
            (json!([{ "type": "function" }]), json!(null), "'tools[0].function'"),
            (json!([{ "function": {} }]), json!(null), "'tools[0].function.name'"),
            (json!([function("")]), json!(null), "'tools[0].function.name' must not be empty"),
            (json!([function("a"), function("a")]), json!(null), "'tools[1].function.name'"),
            (json!([{ "type": "custom", "custom": { "name": "a" } }]), json!(null), "'custom'"),
            (json!([{ "type": "web_search" }]), json!(null), "'web_search'"),
            (json!([{ "function": { "name": "a", "parameters": [] } }]), json!(null), "'tools[0].function.parameters'"),
            (json!([{ "function": 7 }]), json!(null), "'tools[0]'"),
            (json!([]), json!("required"), "'tool_choice'"),
            (one.clone(), json!("maybe"), "'none', 'auto', 'required'"),
            (one.clone(), json!({ "type": "function" }), "'tool_choice.function.name'"),
            (one.clone(), json!({ "type": "function", "function": { "name": "b" } }), "'tool_choice.function.name'"),
            (one.clone(), json!({ "type": "grammar" }), "'tool_choice.type'"),
            (one.clone(), json!({ "type": "allowed_tools" }), "'tool_choice.allowed_tools'"),
            (one, json!({ "type": "allowed_tools", "allowed_tools": { "mode": "auto" } }), "'tool_choice.allowed_tools.tools'"),
        ] {
            let error = read(tools, choice).expect_err(expected);
            assert!(error.contains(expected), "{error} must contain {expected}");
        }
    }
}
