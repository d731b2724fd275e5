//! Rows that contain a whole conversation.

use super::Problem;
use serde_json::{Map, Value, json};

/// A conversation. The recorded answers are not sent: each request repeats the answers that the server gave during the replay.
#[derive(Clone, Debug, PartialEq)]
pub struct ConversationTrace {
    /// The requests of the conversation, in order.
    pub steps: Vec<ConversationStep>,
    /// The tools of all requests; `None` if the row has none.
    pub tools: Option<Value>,
}

/// One request of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct ConversationStep {
    /// The messages that follow the answer to the previous request.
    pub messages: Vec<Value>,
    /// The recorded answer, whose length limits the length of the server's answer; `None` if the trace has no answer here.
    pub answer: Option<String>,
}

impl ConversationTrace {
    /// Reads `messages` with `role` and `content`, or ShareGPT's `conversations` with `from` and `value`. Answers at the beginning of a
    /// conversation, before any other message, are skipped; some recordings have them.
    pub(super) fn parse(value: Value) -> Result<Self, Problem> {
        let Value::Object(mut row) = value else { return Err(Problem::Json("the row is not an object".to_owned())) };
        let (field, list) = match (row.remove("messages"), row.remove("conversations")) {
            (Some(list), _) => ("messages", list),
            (None, Some(list)) => ("conversations", list),
            (None, None) => return Err(Problem::Missing("messages")),
        };
        let Value::Array(list) = list else { return Err(Problem::Json(format!("`{field}` is not a list"))) };
        let (mut steps, mut pending) = (Vec::new(), Vec::new());
        for message in list {
            let message = normalised(message, field)?;
            if message["role"] != "assistant" {
                pending.push(message);
            } else if pending.iter().any(|message: &Value| message["role"] != "system") {
                let answer = message["content"].as_str().map(str::to_owned);
                steps.push(ConversationStep { messages: std::mem::take(&mut pending), answer });
            }
        }
        if pending.iter().any(|message| message["role"] != "system") {
            steps.push(ConversationStep { messages: pending, answer: None });
        }
        if steps.is_empty() {
            return Err(Problem::Nothing);
        }
        Ok(Self { steps, tools: row.remove("tools") })
    }
}

/// Returns the message with the field names and roles of OpenAI's API. `field` is the name of the row's list of messages, for the error.
fn normalised(message: Value, field: &str) -> Result<Value, Problem> {
    let Value::Object(mut message) = message else { return Err(Problem::Json(format!("`{field}` is not a list of objects"))) };
    if let (Some(from), Some(value)) = (message.get("from").and_then(Value::as_str), message.get("value")) {
        let role = match from {
            "human" | "user" => "user",
            "system" => "system",
            "tool" => "tool",
            // Recordings of ShareGPT name the assistant by the name of its product.
            "gpt" | "chatgpt" | "bing" | "bard" | "assistant" => "assistant",
            other => return Err(Problem::Json(format!("`from` is {other:?}, not human, gpt, system or tool"))),
        };
        let fields = [("role", json!(role)), ("content", value.clone())];
        message = fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>();
    }
    if message.get("role").and_then(Value::as_str).is_none() {
        return Err(Problem::Json("a message has no `role`".to_owned()));
    }
    Ok(Value::Object(message))
}
