//! A checked message of a conversation.

use super::output::repaired;
use serde_json::{Map, Value, json};

/// A message's author.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The operator of the application.
    System,
    /// The person or program that asks.
    User,
    /// The model.
    Assistant,
    /// The message is the result of a tool call.
    Tool,
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// The message's author.
    pub role: Role,
    /// The text of the message; `None` for an assistant's message that has only tool calls.
    pub content: Option<String>,
    /// The reasoning before an earlier answer of the model.
    pub reasoning: Option<String>,
    /// The author's name, which some templates write.
    pub name: Option<String>,
    /// The tool calls of an earlier answer of the model.
    pub tool_calls: Vec<ToolCall>,
    /// The id of the call whose result the message is.
    pub tool_call_id: Option<String>,
}

/// A tool call in an assistant's earlier message.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The id by which the result refers to the call.
    pub id: Option<String>,
    /// The tool's name.
    pub name: String,
    /// The arguments by name.
    pub arguments: Map<String, Value>,
}

impl Role {
    /// Returns the name that templates use.
    pub fn label(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

impl Message {
    /// Returns a message that has only a text.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: Some(content.into()), reasoning: None, name: None, tool_calls: Vec::new(), tool_call_id: None }
    }

    /// Adds a paragraph to the text.
    pub fn add_text(&mut self, text: &str) {
        add(&mut self.content, text);
    }

    /// Adds a paragraph to the reasoning.
    pub fn add_reasoning(&mut self, text: &str) {
        add(&mut self.reasoning, text);
    }

    /// Appends to the content, after the separator if there is content.
    pub(super) fn append(&mut self, separator: &str, text: &str) {
        let content = self.content.get_or_insert_default();
        if !content.is_empty() {
            content.push_str(separator);
        }
        content.push_str(text);
    }

    /// Returns the message as a template receives it. As in vLLM, a message has a field only if the client sent it, and reasoning has both of its
    /// names.
    pub(super) fn for_template(&self, form: &MessageForm) -> Value {
        let mut fields = Map::new();
        fields.insert("role".to_owned(), self.role.label().into());
        let content = self.content.clone().or_else(|| (!form.null_content).then(String::new));
        fields.insert("content".to_owned(), content.into());
        let named = [
            ("name", &self.name),
            ("tool_call_id", &self.tool_call_id),
            ("reasoning", &self.reasoning),
            ("reasoning_content", &self.reasoning),
        ];
        for (name, value) in named {
            if let Some(value) = value {
                fields.insert(name.to_owned(), value.as_str().into());
            }
        }
        let thinks = form.thinking && !self.tool_calls.is_empty() && self.content.as_deref().unwrap_or_default().is_empty();
        if let Some(reasoning) = self.reasoning.as_deref().filter(|_| thinks) {
            fields.insert("thinking".to_owned(), reasoning.into());
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(|call| call.for_template(form));
            fields.insert("tool_calls".to_owned(), calls.collect());
        }
        fields.into()
    }
}

fn add(text: &mut Option<String>, more: &str) {
    match text {
        Some(text) => text.extend(["\n", more]),
        None => *text = Some(more.to_owned()),
    }
}

impl ToolCall {
    /// Parses the arguments of a call, which clients send as JSON text. A model wrote the text earlier, so an error would end the conversation: a text
    /// that is no object, and cannot be repaired to one, becomes the parameter `arguments`.
    pub fn arguments(text: &str) -> Map<String, Value> {
        let parsed = serde_json::from_str(text).ok().or_else(|| repaired(text));
        match parsed {
            Some(Value::Object(arguments)) => arguments,
            None | Some(Value::Null) if text.trim().is_empty() || text.trim() == "null" => Map::new(),
            other => Map::from_iter([("arguments".to_owned(), other.unwrap_or_else(|| text.into()))]),
        }
    }

    fn for_template(&self, form: &MessageForm) -> Value {
        let arguments = Value::Object(self.arguments.clone());
        let arguments = if form.text_arguments { arguments.to_string().into() } else { arguments };
        let mut call = json!({ "type": "function", "function": { "name": self.name, "arguments": arguments } });
        if let Some(id) = &self.id {
            call["id"] = id.as_str().into();
        }
        call
    }
}

/// The form in which a template reads messages. [`ChatTemplate`](crate::ChatTemplate) determines it when it is compiled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MessageForm {
    /// Whether the template shows tool calls only in messages whose content is null.
    pub null_content: bool,
    /// Whether the template reads the arguments of tool calls as JSON text, not as an object.
    pub text_arguments: bool,
    /// Whether the template refuses tools without a description.
    pub described_tools: bool,
    /// Whether the template reads the reasoning before calls from the field `thinking`, and refuses it if there is content as well (gpt-oss).
    pub thinking: bool,
}
