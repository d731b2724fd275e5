//! A checked conversation, and the variables that it has in a chat template.

mod hermes;
mod system;

use super::{Message, Tool, Tools, message::MessageForm};
use serde_json::{Map, Value, json};
pub use system::SystemPlaces;

/// The messages and tools of a request, with the client's options for rendering them.
#[derive(Clone, Debug)]
pub struct Conversation {
    /// The messages in order.
    pub messages: Vec<Message>,
    /// The tools that the model may call.
    pub tools: Tools,
    /// The client's options for rendering.
    pub template: TemplateOptions,
}

/// The options for rendering a conversation.
#[derive(Clone, Debug)]
pub struct TemplateOptions {
    /// Documents that the template may quote, as the client sent them.
    pub documents: Vec<Value>,
    /// Further variables of the template, which the client has set.
    pub variables: Map<String, Value>,
    /// Whether the text ends with the beginning of the assistant's next message.
    pub add_generation_prompt: bool,
    /// Whether the answer continues the last message.
    pub continue_final_message: bool,
    /// Whether the head explains calls although it lists no tool, because results of tools describe them all.
    pub explains_calls: bool,
}

/// The abilities of a template.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Abilities {
    /// The form in which the template reads messages; `None` if it cannot render tools, tool calls and their results.
    pub tools: Option<MessageForm>,
    /// Where the template renders system messages.
    pub system: SystemPlaces,
    /// Whether messages of user and assistant have to alternate.
    pub alternates: bool,
}

impl Default for TemplateOptions {
    fn default() -> Self {
        let (documents, variables) = Default::default();
        Self { documents, variables, add_generation_prompt: true, continue_final_message: false, explains_calls: false }
    }
}

impl Conversation {
    /// Returns the variables for a template with these abilities. Tools, calls and results that the template cannot render become texts of the
    /// system, assistant and user messages, and system messages that it cannot render become messages of the user in the same place.
    pub fn variables(&self, abilities: Abilities) -> Map<String, Value> {
        let mut variables = self.template.variables.clone();
        let mut messages = self.messages.clone();
        system::after_results(&mut messages);
        if abilities.tools.is_none() {
            messages = hermes::messages(&messages);
        }
        system::place(&mut messages, abilities.system, abilities.alternates);
        let placeholder = self.template.explains_calls.then(placeholder);
        let shown = self.tools.list.iter().filter(|tool| !tool.deferred).chain(&placeholder);
        let tools: Vec<Value> = match abilities.tools {
            Some(form) => shown.map(|tool| tool.for_template(&form)).collect(),
            None => {
                hermes::describe(&mut messages, shown, abilities.system);
                Vec::new()
            }
        };
        let form = abilities.tools.unwrap_or_default();
        let messages = messages.iter().map(|message| message.for_template(&form)).collect();
        let or_null = |list: Vec<Value>| if list.is_empty() { Value::Null } else { Value::Array(list) };
        variables.insert("messages".to_owned(), messages);
        variables.insert("tools".to_owned(), or_null(tools));
        variables.insert("documents".to_owned(), or_null(self.template.documents.clone()));
        variables.insert("add_generation_prompt".to_owned(), self.template.add_generation_prompt.into());
        variables
    }

    /// Calls `change` for each text of the client that a template may render.
    pub fn for_each_text(&mut self, change: &mut impl FnMut(&mut String)) {
        for message in &mut self.messages {
            let texts = [&mut message.content, &mut message.reasoning, &mut message.name, &mut message.tool_call_id];
            texts.into_iter().flatten().for_each(&mut *change);
            for call in &mut message.tool_calls {
                call.id.iter_mut().for_each(&mut *change);
                change(&mut call.name);
                for_each_member_text(&mut call.arguments, change);
            }
        }
        self.tools.list.iter_mut().for_each(|tool| for_each_value_text(&mut tool.definition, change));
        self.template.documents.iter_mut().for_each(|document| for_each_value_text(document, change));
        self.template.variables.values_mut().for_each(|value| for_each_value_text(value, change));
    }

    /// Appends a mark to the content of the last message, followed by a space. The space shows whether the template trims the content.
    pub fn mark_end(&mut self, mark: &str) {
        if let Some(last) = self.messages.last_mut() {
            let content = last.content.get_or_insert_default();
            content.push_str(mark);
            content.push(' ');
        }
    }

    /// Returns the total size of the client's texts, in bytes.
    pub fn text_bytes(&self) -> usize {
        let message = |message: &Message| {
            let texts = [&message.content, &message.reasoning, &message.name, &message.tool_call_id];
            let calls = message.tool_calls.iter();
            texts.into_iter().flatten().map(String::len).sum::<usize>()
                + calls.map(|call| call.name.len() + members_bytes(&call.arguments)).sum::<usize>()
        };
        self.messages.iter().map(message).sum::<usize>()
            + self.tools.list.iter().map(|tool| value_bytes(&tool.definition)).sum::<usize>()
            + self.template.documents.iter().map(value_bytes).sum::<usize>()
            + members_bytes(&self.template.variables)
    }
}

/// Returns the tool in the head of a conversation whose tools are all deferred, so that the template explains how to call tools. It never changes,
/// because the prompts of all turns begin with it. A call of it stays text.
fn placeholder() -> Tool {
    let description = "Not a tool: no tools are listed here. Results in this conversation describe tools, each between <function> and </function>. \
                       Such a tool is called by its own name.";
    let parameters = json!({ "type": "object", "properties": {} });
    Tool::function("described_later".to_owned(), Some(description.to_owned()), parameters)
}

fn for_each_value_text(value: &mut Value, change: &mut impl FnMut(&mut String)) {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
        Value::String(text) => change(text),
        Value::Array(list) => list.iter_mut().for_each(|value| for_each_value_text(value, change)),
        Value::Object(members) => for_each_member_text(members, change),
    }
}

/// Calls `change` for the names and the values of an object.
fn for_each_member_text(members: &mut Map<String, Value>, change: &mut impl FnMut(&mut String)) {
    let changed = std::mem::take(members).into_iter().map(|(mut name, mut value)| {
        change(&mut name);
        for_each_value_text(&mut value, change);
        (name, value)
    });
    *members = changed.collect();
}

/// Returns the approximate size of a value's JSON in bytes.
fn value_bytes(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 4,
        Value::String(text) => text.len() + 2,
        Value::Array(list) => list.iter().map(value_bytes).sum::<usize>() + 2 * list.len(),
        Value::Object(members) => members_bytes(members),
    }
}

fn members_bytes(members: &Map<String, Value>) -> usize {
    members.iter().map(|(name, value)| name.len() + 6 + value_bytes(value)).sum()
}

#[cfg(test)]
mod tests;
