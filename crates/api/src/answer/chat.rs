//! The JSON of a chat's answer: `message` of a complete answer, `delta` of a chunk.

use schemars::JsonSchema;
use serde::Serialize;
use tandem_text::chat::Piece;

/// A part of a message. As in vLLM, reasoning is sent under its older and its newer name.
#[derive(Default, JsonSchema, Serialize)]
pub(super) struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta<'a>; 1]>,
}

/// The beginning of a tool call, or a part of its arguments.
#[derive(JsonSchema, Serialize)]
struct CallDelta<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionDelta<'a>,
}

#[derive(JsonSchema, Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

#[derive(JsonSchema, Serialize)]
pub(super) struct ChatMessage<'a> {
    role: &'static str,
    content: Option<&'a str>,
    refusal: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    tool_calls: &'a [Call],
}

/// A message that grows while it is generated.
#[derive(Debug, Default)]
pub(super) struct WholeMessage {
    content: String,
    reasoning: String,
    calls: Vec<Call>,
}

#[derive(Debug, JsonSchema, Serialize)]
struct Call {
    id: String,
    r#type: &'static str,
    function: Function,
}

#[derive(Debug, JsonSchema, Serialize)]
struct Function {
    name: String,
    arguments: String,
}

impl<'a> ChatDelta<'a> {
    /// Returns the first part of a message, which has no text.
    pub(super) fn role() -> Self {
        Self { role: Some("assistant"), content: Some(""), ..Self::default() }
    }

    pub(super) fn content(text: &'a str) -> Self {
        Self { content: Some(text), ..Self::default() }
    }

    pub(super) fn new(piece: &'a Piece) -> Self {
        match piece {
            Piece::Content(text) => Self::content(text),
            Piece::Reasoning(text) => Self { reasoning_content: Some(text), reasoning: Some(text), ..Self::default() },
            Piece::ToolCall { index, id, name } => Self::call(CallDelta {
                index: *index,
                id: Some(id),
                kind: Some("function"),
                function: FunctionDelta { name: Some(name), arguments: "" },
            }),
            Piece::Arguments { index, text } => {
                let function = FunctionDelta { name: None, arguments: text };
                Self::call(CallDelta { index: *index, id: None, kind: None, function })
            }
        }
    }

    fn call(call: CallDelta<'a>) -> Self {
        Self { tool_calls: Some([call]), ..Self::default() }
    }
}

impl WholeMessage {
    pub(super) fn push(&mut self, piece: Piece) {
        match piece {
            Piece::Content(text) => self.content.push_str(&text),
            Piece::Reasoning(text) => self.reasoning.push_str(&text),
            Piece::ToolCall { id, name, .. } => {
                let function = Function { name, arguments: String::new() };
                self.calls.push(Call { id, r#type: "function", function });
            }
            Piece::Arguments { index, text } => {
                if let Some(call) = self.calls.get_mut(index) {
                    call.function.arguments.push_str(&text);
                }
            }
        }
    }

    /// Returns the message; its content is null if it has only tool calls.
    pub(super) fn written(&self) -> ChatMessage<'_> {
        let reasoning = (!self.reasoning.is_empty()).then_some(self.reasoning.as_str());
        ChatMessage {
            role: "assistant",
            content: (!self.content.is_empty() || self.calls.is_empty()).then_some(&self.content),
            refusal: None,
            reasoning_content: reasoning,
            reasoning,
            tool_calls: &self.calls,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pieces() -> Vec<Piece> {
        let call = |index: usize| Piece::ToolCall { index, id: format!("c{index}"), name: "f".to_owned() };
        let arguments = |index: usize, text: &str| Piece::Arguments { index, text: text.to_owned() };
        vec![
            Piece::Reasoning("a".to_owned()),
            Piece::Content("b".to_owned()),
            call(0),
            arguments(0, "{"),
            arguments(0, "}"),
            call(1),
        ]
    }

    #[test]
    fn message_that_is_not_streamed_has_reasoning_content_and_tool_calls() {
        let mut message = WholeMessage::default();
        let written = |message: &WholeMessage| serde_json::to_value(message.written()).expect("messages can be serialized");
        assert_eq!(written(&message), json!({ "role": "assistant", "content": "", "refusal": null }));
        pieces().into_iter().for_each(|piece| message.push(piece));
        let call = |id: &str, arguments: &str| json!({ "id": id, "type": "function", "function": { "name": "f", "arguments": arguments } });
        let expected = json!({
            "role": "assistant", "content": "b", "refusal": null, "reasoning_content": "a", "reasoning": "a",
            "tool_calls": [call("c0", "{}"), call("c1", "")],
        });
        assert_eq!(written(&message), expected);
        let mut silent = WholeMessage::default();
        pieces().into_iter().skip(2).for_each(|piece| silent.push(piece));
        assert_eq!(written(&silent)["content"], Value::Null);
    }

    #[test]
    fn first_chunk_of_a_call_has_its_name_and_later_chunks_its_arguments() {
        let chunks: Vec<Value> =
            pieces().iter().map(|piece| serde_json::to_value(ChatDelta::new(piece)).expect("chunks can be serialized")).collect();
        let begin = |index: usize| {
            json!({ "tool_calls": [{
                "index": index, "id": format!("c{index}"), "type": "function", "function": { "name": "f", "arguments": "" },
            }] })
        };
        let arguments = |text: &str| json!({ "tool_calls": [{ "index": 0, "function": { "arguments": text } }] });
        let expected = [
            json!({ "reasoning_content": "a", "reasoning": "a" }),
            json!({ "content": "b" }),
            begin(0),
            arguments("{"),
            arguments("}"),
            begin(1),
        ];
        assert_eq!(chunks, expected);
    }
}
