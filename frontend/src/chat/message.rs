//! A checked message of a conversation.

use serde_json::{Map, Value, json};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    System,
    User,
    Assistant,
    /// The message is the result of a tool call.
    Tool,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Message {
    pub(crate) role: Role,
    /// The text of the message; `None` for an assistant's message that has only tool calls.
    pub(crate) content: Option<String>,
    pub(crate) reasoning: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) tool_calls: Vec<ToolCall>,
    /// The id of the call whose result the message is.
    pub(crate) tool_call_id: Option<String>,
}

/// A tool call in an assistant's earlier message.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ToolCall {
    pub(crate) id: Option<String>,
    pub(crate) name: String,
    pub(crate) arguments: Map<String, Value>,
}

impl Role {
    pub(crate) fn label(self) -> &'static str {
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
    pub(crate) fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: Some(content.into()), reasoning: None, name: None, tool_calls: Vec::new(), tool_call_id: None }
    }

    /// Adds a paragraph to the text.
    pub(crate) fn add_text(&mut self, text: &str) {
        add(&mut self.content, text);
    }

    /// Adds a paragraph to the reasoning.
    pub(crate) fn add_reasoning(&mut self, text: &str) {
        add(&mut self.reasoning, text);
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
    /// Parses the arguments of a call, which clients send as JSON text. As in vLLM, `{}` replaces a text that is not a JSON object: a model has
    /// written it earlier, and an error would end the conversation.
    pub(crate) fn arguments(text: &str) -> Map<String, Value> {
        serde_json::from_str(text).unwrap_or_default()
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

/// The form in which a template reads messages. [`ChatTemplate`](crate::prompt::ChatTemplate) determines it when it is compiled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MessageForm {
    /// Whether the template shows tool calls only in messages whose content is null.
    pub(crate) null_content: bool,
    /// Whether the template reads the arguments of tool calls as JSON text, not as an object.
    pub(crate) text_arguments: bool,
}
