//! The tools that a model may call.

use super::{MessageForm, ToolCallParser};
use serde_json::{Value, json};
use tandem_grammar::{CALL_INPUTS_MAX, CallInput, Kind};

/// The parameter of a tool whose input is a text.
pub const INPUT: &str = "input";

/// A tool: a function of the client.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// The function's name.
    pub name: String,
    /// The schema of the arguments; null if the client sent none.
    pub parameters: Value,
    /// Whether the client requires arguments that match the schema.
    pub strict: bool,
    /// Whether only a tool's result describes the tool, not the head of the prompt.
    pub deferred: bool,
    /// The texts that its parameter [`INPUT`] may have, if that is its only parameter and has a grammar.
    pub input: Option<Kind>,
    /// The object that describes the tool, as the client sent it. The template receives it.
    pub definition: Value,
}

/// The client's choice whether the model calls tools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model sees no tools and calls none.
    #[default]
    None,
    /// The model decides whether it calls tools.
    Auto,
    /// The model calls at least one tool.
    Required,
    /// The model calls the tool with this name, once.
    Named(String),
}

/// The tools of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tools {
    /// The tools that the model may call. With [`ToolChoice::None`] the list is empty.
    pub list: Vec<Tool>,
    /// Whether the model may, must or must not call tools.
    pub choice: ToolChoice,
    /// Whether an answer may have more than one call.
    pub parallel: bool,
}

impl Tool {
    /// Returns a tool without `strict`. Its definition is the object that `/v1/chat/completions` would receive for it.
    pub fn function(name: String, description: Option<String>, parameters: Value) -> Self {
        let mut function = json!({ "name": name });
        if let Some(description) = description {
            function["description"] = description.into();
        }
        if !parameters.is_null() {
            function["parameters"] = parameters.clone();
        }
        let definition = json!({ "type": "function", "function": function });
        Self { name, parameters, strict: false, deferred: false, input: None, definition }
    }

    /// Returns the definition as a template receives it.
    pub(super) fn for_template(&self, form: &MessageForm) -> Value {
        let mut definition = self.definition.clone();
        if form.described_tools && definition["function"]["description"].is_null() {
            definition["function"]["description"] = "".into();
        }
        definition
    }

    /// Returns the schema of the call's arguments, as a part of the schema with this JSON pointer.
    fn arguments_schema(&self, pointer: &str) -> Value {
        let mut schema = if self.parameters.is_object() { self.parameters.clone() } else { json!({}) };
        move_references(&mut schema, pointer);
        // Requires an object even if the tool's schema states no type.
        if schema.get("type").is_none() {
            schema["type"] = "object".into();
        }
        schema
    }
}

impl Tools {
    pub(super) fn is_one_call(&self) -> bool {
        !self.parallel || matches!(self.choice, ToolChoice::Named(_))
    }

    /// Returns the texts that an answer may have if it is the input of the required tool; `None` if the answer has another form.
    pub fn required_input(&self) -> Option<&Kind> {
        let ToolChoice::Named(name) = &self.choice else { return None };
        self.list.iter().find(|tool| tool.name == *name)?.input.as_ref()
    }

    /// Returns the constraint on an answer that may call tools whose inputs have a grammar; `None` if there is no such tool, if there are too many, or
    /// if calls are not parsed.
    pub fn call_inputs(&self, parser: ToolCallParser) -> Option<Kind> {
        let input = |tool: &Tool| Some(CallInput { places: parser.input_places(&tool.name), kind: tool.input.clone()? });
        let inputs: Vec<CallInput> = self.list.iter().filter_map(input).collect();
        let can_be = (1..=CALL_INPUTS_MAX).contains(&inputs.len()) && parser != ToolCallParser::None;
        can_be.then_some(Kind::CallInputs(inputs))
    }

    /// Returns the JSON schema of an answer that makes the required calls; `None` if the model may answer with text.
    ///
    /// As in vLLM, the answer is a list of calls or, for a named tool, the arguments of the call only. This does not depend on the model's own format
    /// of tool calls.
    pub fn required_schema(&self) -> Option<Value> {
        match &self.choice {
            ToolChoice::None | ToolChoice::Auto => None,
            ToolChoice::Named(name) => self.list.iter().find(|tool| tool.name == *name).map(|tool| tool.arguments_schema("#")),
            ToolChoice::Required => Some(self.list_schema()),
        }
    }

    /// Returns whether the schema of a required call must be enforced completely, because a tool is `strict`. Otherwise keywords that cannot be
    /// enforced are ignored.
    pub fn are_strict(&self) -> bool {
        self.list.iter().any(|tool| tool.strict)
    }

    /// Returns the structural tag of an answer that is either JSON of the schema `answer`, or calls; `None` if the model's format of calls cannot be
    /// described.
    pub fn calls_or_answer(&self, parser: ToolCallParser, answer: Value) -> Option<Value> {
        let syntax = parser.syntax()?;
        let tag = |tool: &Tool| {
            let name = Value::from(tool.name.as_str());
            let schema = if tool.strict { tool.arguments_schema("#") } else { json!({ "type": "object" }) };
            let begin = format!("{}{{\"name\": {name}, \"{}\": ", syntax.open, syntax.arguments);
            let end = format!("}}{}", syntax.close);
            json!({ "type": "tag", "begin": begin, "content": { "type": "json_schema", "json_schema": schema }, "end": end })
        };
        let tags: Vec<Value> = self.list.iter().map(tag).collect();
        let separator = syntax.separator.unwrap_or_default();
        let is_one = self.is_one_call() || syntax.separator.is_none();
        let calls = json!({
            "type": "tags_with_separator", "tags": tags, "separator": separator, "at_least_one": true, "stop_after_first": is_one,
        });
        let answer = json!({ "type": "json_schema", "json_schema": answer });
        Some(json!({ "type": "structural_tag", "format": { "type": "or", "elements": [answer, calls] } }))
    }

    fn list_schema(&self) -> Value {
        let call = |(index, tool): (usize, &Tool)| {
            let arguments = tool.arguments_schema(&format!("#/items/anyOf/{index}/properties/parameters"));
            json!({
                "type": "object",
                "properties": { "name": { "const": tool.name }, "parameters": arguments },
                "required": ["name", "parameters"],
                "additionalProperties": false,
            })
        };
        let calls: Vec<Value> = self.list.iter().enumerate().map(call).collect();
        let mut schema = json!({ "type": "array", "minItems": 1, "items": { "anyOf": calls } });
        if !self.parallel {
            schema["maxItems"] = 1.into();
        }
        schema
    }
}

/// Changes the references in a schema that becomes the part of another schema at this JSON pointer.
fn move_references(schema: &mut Value, pointer: &str) {
    match schema {
        Value::Object(members) => {
            for (name, value) in members {
                match value {
                    Value::String(target) if name == "$ref" && target.starts_with('#') => target.replace_range(..1, pointer),
                    _ => move_references(value, pointer),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|value| move_references(value, pointer)),
        _ => {}
    }
}
