//! Writes answers in the format of OpenAI's Responses API: an object with a list of output items. The events of a stream build the same
//! object step by step.

use super::{
    AnswerContext, AnswerFailure, AnswerFormat, AnswerPart, Delta, FinishReason, TokenLogprobs, Usage,
    custom_input::CustomInput,
    envelope::{ChatToken, Logprobs},
    sse::{write_json, write_named},
};
use crate::agents::{INPUT, Origin};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use tandem_text::chat::Piece;

pub(super) struct ResponseFormat {
    /// The fields of the object that repeat the request.
    request: Map<String, Value>,
    /// The client's own tools, by the names that the model sees.
    origins: BTreeMap<String, Origin>,
    items: Vec<Item>,
    /// Whether the last item may still grow.
    open: bool,
    finish: Option<FinishReason>,
    /// The number of the next event.
    sequence_number: u64,
}

/// An item of the answer's output.
struct Item {
    id: String,
    content: ItemContent,
    /// The text, the reasoning, or the arguments or input of a call.
    text: String,
    /// Reads a custom tool's input from its arguments; `None` for other items.
    input: Option<CustomInput>,
    logprobs: Vec<ChatToken>,
    status: &'static str,
}

#[derive(Clone, PartialEq)]
enum ItemContent {
    Reasoning,
    Message,
    Call { id: String, tool: Origin },
}

impl ResponseFormat {
    pub(super) fn new(request: Map<String, Value>, origins: BTreeMap<String, Origin>) -> Self {
        Self { request, origins, items: Vec::new(), open: false, finish: None, sequence_number: 0 }
    }

    /// Returns the response object.
    fn object(&self, context: &AnswerContext, status: &str, error: Value) -> Value {
        let ended = !matches!(status, "in_progress");
        let incomplete = (status == "incomplete").then(|| json!({ "reason": "max_output_tokens" }));
        let mut object = self.request.clone();
        let own = [
            ("id", json!(context.id)),
            ("object", json!("response")),
            ("created_at", json!(context.created)),
            ("completed_at", json!(context.completed.filter(|_| status == "completed"))),
            ("status", json!(status)),
            ("error", error),
            ("incomplete_details", json!(incomplete)),
            ("model", json!(context.model.id)),
            ("output", self.items.iter().map(Item::json).collect()),
            ("usage", if ended { usage(&context.usage) } else { Value::Null }),
        ];
        object.extend(own.map(|(name, value)| (name.to_owned(), value)));
        if let Some(details) = &context.details {
            object.insert("tandem".to_owned(), details.clone());
        }
        Value::Object(object)
    }

    fn delta(&mut self, context: &AnswerContext, out: &mut Vec<u8>, delta: Delta) {
        let mut logprobs = Some(delta.logprobs);
        for piece in delta.pieces {
            match piece {
                Piece::Reasoning(text) => {
                    self.continue_with(context, out, ItemContent::Reasoning);
                    self.grow(context, out, &text, Vec::new());
                }
                Piece::Content(text) => {
                    // A text after another item begins with a line feed, which separates it from the text before that item.
                    let is_next = self.items.last().is_some_and(|item| !matches!(item.content, ItemContent::Message));
                    let text = text.strip_prefix('\n').filter(|_| is_next).unwrap_or(&text);
                    self.continue_with(context, out, ItemContent::Message);
                    self.grow(context, out, text, logprobs.take().unwrap_or_default());
                }
                Piece::ToolCall { id, name, .. } => {
                    let tool = self.origins.get(&name).cloned().unwrap_or_else(|| Origin { name, ..Origin::default() });
                    self.begin(context, out, ItemContent::Call { id, tool });
                }
                Piece::Arguments { text, .. } => self.grow(context, out, &text, Vec::new()),
            }
        }
        self.finish = self.finish.or(delta.finish);
    }

    /// Begins an item with this content, unless the open item has such content.
    fn continue_with(&mut self, context: &AnswerContext, out: &mut Vec<u8>, content: ItemContent) {
        if !self.open || self.items.last().is_none_or(|item| item.content != content) {
            self.begin(context, out, content);
        }
    }

    fn begin(&mut self, context: &AnswerContext, out: &mut Vec<u8>, content: ItemContent) {
        self.close(context, out, "completed");
        let prefix = match content {
            ItemContent::Reasoning => "rs",
            ItemContent::Message => "msg",
            ItemContent::Call { tool: Origin { is_custom: true, .. }, .. } => "ctc",
            ItemContent::Call { .. } => "fc",
        };
        let index = self.items.len();
        let id = format!("{prefix}_{}_{index}", context.request_id);
        let input = content.is_custom().then(CustomInput::default);
        let item = Item { id, content, text: String::new(), input, logprobs: Vec::new(), status: "in_progress" };
        let (added, part) = (item.json(), item.part());
        self.items.push(item);
        self.open = true;
        self.event(context, out, "response.output_item.added", json!({ "output_index": index, "item": added }));
        if let Some(part) = part {
            self.item_event(context, out, "response.content_part.added", json!({ "content_index": 0, "part": part }));
        }
    }

    /// Appends a text to the open item.
    fn grow(&mut self, context: &AnswerContext, out: &mut Vec<u8>, text: &str, logprobs: Vec<TokenLogprobs>) {
        let logprobs = Logprobs { model: &context.model, tokens: &logprobs, as_ids: false }.tokens();
        let Some(item) = self.items.last_mut() else { return };
        let text = match &mut item.input {
            Some(input) => input.push(text),
            None => text.to_owned(),
        };
        if text.is_empty() && item.input.is_some() {
            return;
        }
        item.text.push_str(&text);
        let event = match item.content {
            ItemContent::Reasoning => json!({ "content_index": 0, "delta": text }),
            ItemContent::Message => json!({ "content_index": 0, "delta": text, "logprobs": logprobs }),
            ItemContent::Call { .. } => json!({ "delta": text }),
        };
        item.logprobs.extend(logprobs);
        let kind = item.content.event();
        self.item_event(context, out, &format!("{kind}.delta"), event);
    }

    /// Ends the open item.
    fn close(&mut self, context: &AnswerContext, out: &mut Vec<u8>, status: &'static str) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let Some(item) = self.items.last_mut() else { return };
        let rest = item.input.as_mut().map(CustomInput::finish).filter(|rest| !rest.is_empty());
        if let Some(rest) = rest {
            item.text.push_str(&rest);
            let kind = item.content.event();
            self.item_event(context, out, &format!("{kind}.delta"), json!({ "delta": rest }));
        }
        let Some(item) = self.items.last_mut() else { return };
        item.status = if item.is_cut() { "incomplete" } else { status };
        let done = match &item.content {
            ItemContent::Reasoning => json!({ "content_index": 0, "text": item.text }),
            ItemContent::Message => json!({ "content_index": 0, "text": item.text, "logprobs": item.logprobs }),
            ItemContent::Call { tool, .. } if tool.is_custom => json!({ "input": item.text }),
            ItemContent::Call { tool, .. } => json!({ "name": tool.name, "arguments": item.text }),
        };
        let (kind, part, item) = (item.content.event(), item.part(), item.json());
        self.item_event(context, out, &format!("{kind}.done"), done);
        if let Some(part) = part {
            self.item_event(context, out, "response.content_part.done", json!({ "content_index": 0, "part": part }));
        }
        self.event(context, out, "response.output_item.done", json!({ "output_index": self.items.len() - 1, "item": item }));
    }

    /// Writes an event about the last item.
    fn item_event(&mut self, context: &AnswerContext, out: &mut Vec<u8>, kind: &str, mut data: Value) {
        data["item_id"] = json!(self.items.last().map(|item| &item.id));
        data["output_index"] = json!(self.items.len() - 1);
        self.event(context, out, kind, data);
    }

    fn event(&mut self, context: &AnswerContext, out: &mut Vec<u8>, kind: &str, mut data: Value) {
        if context.stream.is_none() {
            return;
        }
        data["type"] = kind.into();
        data["sequence_number"] = self.sequence_number.into();
        self.sequence_number += 1;
        write_named(out, kind, &data);
    }
}

impl AnswerFormat for ResponseFormat {
    fn write(&mut self, context: &AnswerContext, out: &mut Vec<u8>, _: usize, part: AnswerPart) {
        match part {
            AnswerPart::Started { .. } if context.stream.is_some() => {
                let object = self.object(context, "in_progress", Value::Null);
                self.event(context, out, "response.created", json!({ "response": object.clone() }));
                self.event(context, out, "response.in_progress", json!({ "response": object }));
            }
            AnswerPart::Delta(delta) => self.delta(context, out, delta),
            AnswerPart::Started { .. } | AnswerPart::PromptLogprobs { .. } => {}
        }
    }

    fn write_end(&mut self, context: &AnswerContext, out: &mut Vec<u8>) {
        let status = if self.finish == Some(FinishReason::Length) { "incomplete" } else { "completed" };
        self.close(context, out, status);
        let object = self.object(context, status, Value::Null);
        if context.stream.is_some() {
            self.event(context, out, &format!("response.{status}"), json!({ "response": object }));
        } else {
            write_json(out, &object);
        }
    }

    fn write_error(&mut self, context: &AnswerContext, out: &mut Vec<u8>, failure: &AnswerFailure<'_>) {
        // The codes are those of OpenAI's Responses API.
        let code = if failure.status >= 500 { "server_error" } else { "invalid_prompt" };
        let object = self.object(context, "failed", json!({ "code": code, "message": failure.message }));
        self.event(context, out, "response.failed", json!({ "response": object }));
    }
}

impl ItemContent {
    /// Returns the prefix of the event types that add to an item of this kind.
    fn event(&self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text",
            Self::Message => "response.output_text",
            Self::Call { .. } if self.is_custom() => "response.custom_tool_call_input",
            Self::Call { .. } => "response.function_call_arguments",
        }
    }

    fn is_custom(&self) -> bool {
        matches!(self, Self::Call { tool, .. } if tool.is_custom)
    }
}

impl Item {
    fn json(&self) -> Value {
        let Self { id, text, status, .. } = self;
        // An item that has only begun has no content part yet.
        let parts: Vec<Value> = self.part().filter(|_| *status != "in_progress").into_iter().collect();
        match &self.content {
            ItemContent::Reasoning => json!({
                "type": "reasoning", "id": id, "summary": [], "content": parts, "status": status,
            }),
            ItemContent::Message => {
                json!({ "type": "message", "id": id, "status": status, "role": "assistant", "content": parts })
            }
            ItemContent::Call { id: call_id, tool: Origin { namespace, name, is_custom } } => {
                let (kind, field) = if *is_custom { ("custom_tool_call", INPUT) } else { ("function_call", "arguments") };
                let mut call = json!({ "type": kind, "id": id, "call_id": call_id, "name": name, field: text, "status": status });
                if let Some(namespace) = namespace {
                    call["namespace"] = namespace.as_str().into();
                }
                call
            }
        }
    }

    /// Returns whether the item is a call whose arguments are no JSON, because the answer ended within them.
    fn is_cut(&self) -> bool {
        let is_function = matches!(&self.content, ItemContent::Call { tool, .. } if !tool.is_custom);
        is_function && serde_json::from_str::<Map<String, Value>>(&self.text).is_err()
    }

    /// Returns the item's content part; `None`: the item is a call, which has none.
    fn part(&self) -> Option<Value> {
        match self.content {
            ItemContent::Reasoning => Some(json!({ "type": "reasoning_text", "text": self.text })),
            ItemContent::Message => {
                Some(json!({ "type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs }))
            }
            ItemContent::Call { .. } => None,
        }
    }
}

/// Returns the object `usage`. Writing to a cache costs nothing, so it counts as 0 tokens.
fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0 },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": usage.completion_tokens_details.reasoning_tokens },
        "total_tokens": usage.total_tokens,
    })
}
