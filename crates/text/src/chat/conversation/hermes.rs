//! Writes tools as texts of messages, for templates that cannot render tools. The texts have the format of Hermes and Qwen 2.5, which most
//! models have seen in training.

use super::system::SystemPlaces;
use crate::chat::{Message, Role, Tool};
use serde_json::{Value, json};

/// Returns the messages without tool calls and tool messages.
pub(super) fn messages(given: &[Message]) -> Vec<Message> {
    let mut messages: Vec<Message> = Vec::with_capacity(given.len() + 1);
    let mut follows_result = false;
    for message in given {
        let is_result = message.role == Role::Tool;
        if is_result {
            let result = format!("<tool_response>\n{}\n</tool_response>", text(message));
            // Many templates require that user and assistant messages alternate, so the results of one answer become one message.
            match messages.last_mut().filter(|_| follows_result) {
                Some(previous) => previous.append("\n", &result),
                None => messages.push(Message::new(Role::User, result)),
            }
        } else {
            messages.push(with_calls_as_text(message));
        }
        follows_result = is_result;
    }
    messages
}

fn text(message: &Message) -> &str {
    message.content.as_deref().unwrap_or_default()
}

fn with_calls_as_text(message: &Message) -> Message {
    let mut plain = Message { tool_calls: Vec::new(), tool_call_id: None, ..message.clone() };
    for call in &message.tool_calls {
        let call = json!({ "name": call.name, "arguments": call.arguments });
        plain.append("\n", &format!("<tool_call>\n{call}\n</tool_call>"));
    }
    plain
}

/// Describes the tools, if there are any, in the system message at the head, or in the first user message if the template has no system message.
pub(super) fn describe<'a>(messages: &mut Vec<Message>, tools: impl Iterator<Item = &'a Tool>, places: SystemPlaces) {
    let list: Vec<String> = tools.map(|tool| Value::to_string(&tool.definition)).collect();
    if list.is_empty() {
        return;
    }
    let description = format!(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within \
         <tools></tools> XML tags:\n<tools>\n{}\n</tools>\n\nFor each function call, return a json object with function name and \
         arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{{\"name\": <function-name>, \"arguments\": \
         <args-json-object>}}\n</tool_call>",
        list.join("\n")
    );
    let system = places != SystemPlaces::Never;
    let role = if system { Role::System } else { Role::User };
    if let Some(first) = messages.first_mut().filter(|first| system && first.role == role) {
        return first.append("\n\n", &description);
    }
    match messages.iter_mut().find(|message| !system && message.role == role) {
        Some(first) => first.content = Some(format!("{description}\n\n{}", text(first))),
        None => messages.insert(0, Message::new(role, description)),
    }
}
