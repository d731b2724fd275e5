//! What coding agents send besides functions: tools in namespaces, tools whose input is free text (`custom`), and hosted tools, which the
//! API's own server would run, such as `web_search`.
//!
//! The model sees functions only. A tool in a namespace has the name `NAMESPACE__NAME`. A custom tool is a function with one string
//! parameter, `input`. Hosted tools are left out.

use crate::{
    error::{Problem, RequestError, at_most},
    tools::{Definition, TOOLS_MAX},
};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use tandem_grammar::Kind;
pub use tandem_text::chat::INPUT;

/// A tool as the client knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The namespace; `None` if the tool is in none.
    pub namespace: Option<String>,
    /// The name within the namespace.
    pub name: String,
    /// Whether the tool's input is free text.
    pub is_custom: bool,
}

/// The tools of a request, as the model sees them.
#[derive(Debug, Default)]
pub(crate) struct Converted {
    /// The functions, defined as in `/v1/chat/completions`.
    pub(crate) functions: Vec<Definition>,
    /// The tools that the client knows under another name or in another form, by the name that the model sees.
    pub(crate) origins: BTreeMap<String, Origin>,
    /// The types of tools that were left out.
    pub(crate) left_out: BTreeSet<String>,
    /// The number of tools so far, including those that are left out.
    count: usize,
}

/// Returns the name under which the model sees a tool.
pub(crate) fn visible(namespace: Option<&str>, name: &str) -> String {
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}__{name}"))
}

impl Converted {
    /// Converts the tools of a request of OpenAI's Responses API.
    ///
    /// # Errors
    /// Fails if a tool is incomplete, or if there are too many tools.
    pub(crate) fn responses(tools: Vec<Value>) -> Result<Self, RequestError> {
        let mut converted = Self::default();
        for (index, tool) in tools.into_iter().enumerate() {
            converted.add(tool, None, &format!("tools[{index}]"))?;
        }
        Ok(converted)
    }

    fn add(&mut self, tool: Value, namespace: Option<&str>, at: &str) -> Result<(), RequestError> {
        self.count += 1;
        at_most("tools", self.count, TOOLS_MAX, "tools")?;
        let object = "must be an object: the definition of a tool";
        let Value::Object(mut tool) = tool else { return Err(RequestError::invalid(at, Problem::Rule { rule: object })) };
        let kind = match tool.remove("type") {
            None => "function".to_owned(),
            Some(Value::String(kind)) => kind,
            Some(_) => {
                return Err(RequestError::invalid(
                    format!("{at}.type"),
                    Problem::Rule { rule: "must be a string: the type of the tool" },
                ));
            }
        };
        match kind.as_str() {
            "namespace" if namespace.is_none() => {
                let (name, before) = (name(&tool, at)?, self.functions.len());
                let Some(Value::Array(tools)) = tool.remove("tools") else {
                    return Err(RequestError::invalid(format!("{at}.tools"), Problem::Missing));
                };
                for (index, tool) in tools.into_iter().enumerate() {
                    self.add(tool, Some(&name), &format!("{at}.tools[{index}]"))?;
                }
                let described = tool.get("description").and_then(Value::as_str).zip(self.functions.get_mut(before));
                if let Some((text, first)) = described {
                    let function = &mut first.value["function"];
                    let own = function["description"].as_str().map(|own| format!("\n\n{own}")).unwrap_or_default();
                    function["description"] = format!("Tools of {name}: {text}{own}").into();
                }
            }
            "custom" => {
                let function = json!({
                    "name": name(&tool, at)?,
                    "description": custom_description(&tool),
                    "parameters": {
                        "type": "object", "properties": { INPUT: { "type": "string" } }, "required": [INPUT], "additionalProperties": false,
                    },
                });
                let Value::Object(function) = function else { return Ok(()) };
                self.push(function, namespace, true, at)?;
                self.functions.iter_mut().last().into_iter().for_each(|last| last.input = input(&tool));
            }
            "function" => {
                // Some clients send a function in the form of `/v1/chat/completions`.
                let function = match tool.remove("function") {
                    Some(Value::Object(function)) => function,
                    _ => tool,
                };
                self.push(function, namespace, false, at)?;
            }
            _ => {
                self.left_out.insert(kind);
            }
        }
        Ok(())
    }

    fn push(
        &mut self,
        mut function: Map<String, Value>,
        namespace: Option<&str>,
        is_custom: bool,
        at: &str,
    ) -> Result<(), RequestError> {
        if namespace.is_some() || is_custom {
            let name = name(&function, at)?;
            let visible = visible(namespace, &name);
            function.insert("name".to_owned(), visible.as_str().into());
            self.origins.insert(visible, Origin { namespace: namespace.map(str::to_owned), name, is_custom });
        }
        let value = json!({ "type": "function", "function": function });
        self.functions.push(Definition { at: at.to_owned(), value, ..Definition::default() });
        Ok(())
    }
}

fn name(tool: &Map<String, Value>, at: &str) -> Result<String, RequestError> {
    let name = tool.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
    name.map(str::to_owned).ok_or_else(|| RequestError::invalid(format!("{at}.name"), Problem::Missing))
}

/// Returns the description of a custom tool, with the form of its input.
fn custom_description(tool: &Map<String, Value>) -> String {
    let mut description = tool.get("description").and_then(Value::as_str).unwrap_or_default().to_owned();
    let format = tool.get("format").unwrap_or(&Value::Null);
    if let Some(definition) = format["definition"].as_str() {
        let syntax = format["syntax"].as_str().unwrap_or("given");
        description.push_str(&format!("\n\nThe text `{INPUT}` must match this {syntax} grammar:\n{definition}"));
    }
    description
}

/// Returns the constraint on a custom tool's input; `None` if the tool has neither a Lark grammar nor a regular expression.
fn input(tool: &Map<String, Value>) -> Option<Kind> {
    let format = tool.get("format")?;
    let definition = format["definition"].as_str()?.to_owned();
    match format["syntax"].as_str()? {
        "lark" => Some(Kind::Grammar(definition)),
        "regex" => Some(Kind::Regex(definition)),
        _ => None,
    }
}

/// The tools that the model sees only after a tool's result refers to them (`defer_loading`), by name.
#[derive(Debug, Default)]
pub(crate) struct DeferredTools {
    descriptions: BTreeMap<String, String>,
    referenced: BTreeSet<String>,
}

impl DeferredTools {
    pub(crate) fn of(definitions: &[Definition]) -> Self {
        let function = |definition: &Definition| {
            let function = &definition.value["function"];
            Some((function["name"].as_str()?.to_owned(), function.to_string()))
        };
        let descriptions = definitions.iter().filter(|definition| definition.deferred).filter_map(function).collect();
        Self { descriptions, referenced: BTreeSet::new() }
    }

    /// Returns the text of a reference to a tool. Only the first reference describes the tool: descriptions can be long, and references
    /// many.
    pub(crate) fn reference(&mut self, name: &str) -> String {
        match self.descriptions.get(name) {
            Some(description) if self.referenced.insert(name.to_owned()) => format!("<function>{description}</function>"),
            _ => format!("[tool: {name}]"),
        }
    }

    /// Removes the deferred tools to which no result refers. The model does not know them, so it must not be made to call them.
    pub(crate) fn remove_unknown(&self, definitions: &mut Vec<Definition>) {
        let is_known = |definition: &Definition| {
            !definition.deferred
                || definition.value["function"]["name"].as_str().is_none_or(|name| self.referenced.contains(name))
        };
        definitions.retain(is_known);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(tools: Value) -> Result<Converted, String> {
        Converted::responses(tools.as_array().expect("the tools are a list").clone()).map_err(|error| error.to_string())
    }

    #[test]
    fn all_tools_but_hosted_ones_become_functions() {
        let function = |name: &str| json!({ "type": "function", "name": name, "parameters": { "type": "object" } });
        let grammar = json!({ "type": "grammar", "syntax": "lark", "definition": "start: \"x\"" });
        let found = converted(json!([
            function("f"),
            { "type": "custom", "name": "patch", "description": "d", "format": grammar },
            { "type": "namespace", "name": "mcp", "description": "d", "tools": [function("f"), { "type": "custom", "name": "c" }] },
            { "type": "web_search" },
            { "type": "image_generation", "x": 1 },
            { "type": "web_search", "y": 2 },
        ]))
        .expect("the tools are valid");
        let names: Vec<&Value> = found.functions.iter().map(|function| &function.value["function"]["name"]).collect();
        assert_eq!(names, ["f", "patch", "mcp__f", "mcp__c"]);
        let at: Vec<&str> = found.functions.iter().map(|function| &*function.at).collect();
        assert_eq!(at, ["tools[0]", "tools[1]", "tools[2].tools[0]", "tools[2].tools[1]"]);
        assert_eq!(found.functions[0].value["function"], json!({ "name": "f", "parameters": { "type": "object" } }));
        let custom = &found.functions[1].value["function"];
        assert_eq!(custom["parameters"]["required"], json!(["input"]));
        let description = custom["description"].as_str().expect("it is a string");
        assert!(description.starts_with("d\n") && description.ends_with("lark grammar:\nstart: \"x\""), "{description}");
        let description = |index: usize| found.functions[index].value["function"]["description"].clone();
        assert_eq!(
            (description(2), description(3)),
            (json!("Tools of mcp: d"), json!("")),
            "the first tool has the namespace's description"
        );
        assert_eq!(found.functions[1].input, Some(Kind::Grammar("start: \"x\"".to_owned())));
        let origin = |namespace: Option<&str>, name: &str, is_custom| Origin {
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
            is_custom,
        };
        assert_eq!(
            found.origins,
            BTreeMap::from([
                ("patch".to_owned(), origin(None, "patch", true)),
                ("mcp__f".to_owned(), origin(Some("mcp"), "f", false)),
                ("mcp__c".to_owned(), origin(Some("mcp"), "c", true)),
            ])
        );
        assert_eq!(Vec::from_iter(found.left_out), ["image_generation", "web_search"]);
    }

    #[test]
    fn incomplete_tool_is_refused_with_its_position() {
        for (tools, expected) in [
            (json!([{ "type": "custom" }]), "'tools[0].name' is required"),
            (json!([{ "type": "web_search" }, { "type": "namespace", "tools": [] }]), "'tools[1].name' is required"),
            (json!([{ "type": "namespace", "name": "n" }]), "'tools[0].tools' is required"),
            (json!([{ "type": "namespace", "name": "n", "tools": [7] }]), "'tools[0].tools[0]' must be an object"),
            (
                json!([{ "type": "namespace", "name": "n", "tools": [{ "type": "function" }] }]),
                "'tools[0].tools[0].name' is required",
            ),
            (json!([{ "type": 5, "name": "f" }]), "'tools[0].type' must be a string"),
            (json!([[]]), "'tools[0]' must be an object"),
            (
                json!([{ "type": "namespace", "name": "n", "tools": [{ "type": "custom" }] }]),
                "'tools[0].tools[0].name' is required",
            ),
        ] {
            let error = converted(tools).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
        let many = vec![json!({ "type": "function", "name": "f" }); TOOLS_MAX];
        let two = json!([{ "type": "namespace", "name": "a", "tools": many }, { "type": "function", "name": "f" }]);
        assert!(converted(two).expect_err("there are too many").contains("at most 1024 tools"));
        let hosted: Vec<Value> = (0..=TOOLS_MAX).map(|number| json!({ "type": number.to_string() })).collect();
        assert!(converted(json!(hosted)).expect_err("there are too many").contains("at most 1024 tools"));
        // Namespaces cannot be nested: the inner one is left out.
        let nested = json!([{ "type": "namespace", "name": "a", "tools": [{ "type": "namespace", "name": "b", "tools": [] }] }]);
        assert_eq!(Vec::from_iter(converted(nested).expect("it is left out").left_out), ["namespace"]);
    }
}
