//! Writes answers in the format of OpenAI's Responses API: an object with a list of output items. The events of a stream build the same
//! object step by step.

use super::super::{
    answer::Run,
    format::{ChatToken, Logprobs},
    sse::{Format, write_named},
};
use crate::{
    clock::unix_time,
    error::ApiError,
    stream::{AnswerEvent, Delta, FinishReason, TokenLogprobs},
    usage::Usage,
};
use serde_json::{Map, Value, json};
use tandem_text::chat::Piece;

pub(in crate::http) struct ResponseFormat {
    run: Run,
    streamed: bool,
    /// The fields of the object that repeat the request.
    request: Map<String, Value>,
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
    /// The text, the reasoning or the arguments.
    text: String,
    logprobs: Vec<ChatToken>,
    status: &'static str,
}

#[derive(Clone, PartialEq)]
enum ItemContent {
    Reasoning,
    Message,
    Call { id: String, name: String },
}

impl ResponseFormat {
    pub(in crate::http) fn new(run: Run, streamed: bool, request: Map<String, Value>) -> Self {
        Self { run, streamed, request, items: Vec::new(), open: false, finish: None, sequence_number: 0 }
    }

    /// Returns the whole object.
    fn object(&self, status: &str, error: Value) -> Value {
        let ended = !matches!(status, "in_progress");
        let incomplete = (status == "incomplete").then(|| json!({ "reason": "max_output_tokens" }));
        let mut object = self.request.clone();
        let own = [
            ("id", json!(self.run.id)),
            ("object", json!("response")),
            ("created_at", json!(self.run.created)),
            ("completed_at", json!((status == "completed").then(|| unix_time().as_secs()))),
            ("status", json!(status)),
            ("error", error),
            ("incomplete_details", json!(incomplete)),
            ("model", json!(self.run.model.id)),
            ("output", self.items.iter().map(Item::json).collect()),
            ("usage", if ended { usage(&self.run.progress.usage()) } else { Value::Null }),
        ];
        object.extend(own.map(|(name, value)| (name.to_owned(), value)));
        if ended && self.run.details {
            object.insert("tandem".to_owned(), json!(self.run.progress.details()));
        }
        Value::Object(object)
    }

    fn delta(&mut self, out: &mut Vec<u8>, delta: Delta) {
        let mut logprobs = Some(delta.logprobs);
        for piece in delta.pieces {
            match piece {
                Piece::Reasoning(text) => {
                    self.continue_with(out, ItemContent::Reasoning);
                    self.grow(out, &text, Vec::new());
                }
                Piece::Content(text) => {
                    self.continue_with(out, ItemContent::Message);
                    self.grow(out, &text, logprobs.take().unwrap_or_default());
                }
                Piece::ToolCall { id, name, .. } => self.begin(out, ItemContent::Call { id, name }),
                Piece::Arguments { text, .. } => self.grow(out, &text, Vec::new()),
            }
        }
        self.finish = self.finish.or(delta.finish);
    }

    /// Begins an item with this content, unless the open item has such content.
    fn continue_with(&mut self, out: &mut Vec<u8>, content: ItemContent) {
        if !self.open || self.items.last().is_none_or(|item| item.content != content) {
            self.begin(out, content);
        }
    }

    fn begin(&mut self, out: &mut Vec<u8>, content: ItemContent) {
        self.close(out, "completed");
        let prefix = match content {
            ItemContent::Reasoning => "rs",
            ItemContent::Message => "msg",
            ItemContent::Call { .. } => "fc",
        };
        let index = self.items.len();
        let id = format!("{prefix}_{}_{index}", self.run.request_id);
        let item = Item { id, content, text: String::new(), logprobs: Vec::new(), status: "in_progress" };
        let (added, part) = (item.json(), item.part());
        self.items.push(item);
        self.open = true;
        self.event(out, "response.output_item.added", json!({ "output_index": index, "item": added }));
        if let Some(part) = part {
            self.item_event(out, "response.content_part.added", json!({ "content_index": 0, "part": part }));
        }
    }

    /// Appends a text to the open item.
    fn grow(&mut self, out: &mut Vec<u8>, text: &str, logprobs: Vec<TokenLogprobs>) {
        let logprobs = Logprobs { model: &self.run.model, tokens: &logprobs, as_ids: false }.tokens();
        let Some(item) = self.items.last_mut() else { return };
        item.text.push_str(text);
        let event = match item.content {
            ItemContent::Reasoning => json!({ "content_index": 0, "delta": text }),
            ItemContent::Message => json!({ "content_index": 0, "delta": text, "logprobs": logprobs }),
            ItemContent::Call { .. } => json!({ "delta": text }),
        };
        item.logprobs.extend(logprobs);
        let kind = item.content.event();
        self.item_event(out, &format!("{kind}.delta"), event);
    }

    /// Ends the open item.
    fn close(&mut self, out: &mut Vec<u8>, status: &'static str) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        let Some(item) = self.items.last_mut() else { return };
        item.status = status;
        let done = match &item.content {
            ItemContent::Reasoning => json!({ "content_index": 0, "text": item.text }),
            ItemContent::Message => json!({ "content_index": 0, "text": item.text, "logprobs": item.logprobs }),
            ItemContent::Call { name, .. } => json!({ "name": name, "arguments": item.text }),
        };
        let (kind, part, item) = (item.content.event(), item.part(), item.json());
        self.item_event(out, &format!("{kind}.done"), done);
        if let Some(part) = part {
            self.item_event(out, "response.content_part.done", json!({ "content_index": 0, "part": part }));
        }
        self.event(out, "response.output_item.done", json!({ "output_index": self.items.len() - 1, "item": item }));
    }

    /// Writes an event about the last item.
    fn item_event(&mut self, out: &mut Vec<u8>, kind: &str, mut data: Value) {
        data["item_id"] = json!(self.items.last().map(|item| &item.id));
        data["output_index"] = json!(self.items.len() - 1);
        self.event(out, kind, data);
    }

    fn event(&mut self, out: &mut Vec<u8>, kind: &str, mut data: Value) {
        if !self.streamed {
            return;
        }
        data["type"] = kind.into();
        data["sequence_number"] = self.sequence_number.into();
        self.sequence_number += 1;
        write_named(out, kind, &data);
    }
}

impl Format for ResponseFormat {
    fn run(&mut self) -> &mut Run {
        &mut self.run
    }

    fn write(&mut self, out: &mut Vec<u8>, _: usize, event: AnswerEvent) -> Result<(), ApiError> {
        match event {
            AnswerEvent::Started(_) if self.streamed => {
                let object = self.object("in_progress", Value::Null);
                self.event(out, "response.created", json!({ "response": object.clone() }));
                self.event(out, "response.in_progress", json!({ "response": object }));
            }
            AnswerEvent::Delta(delta) => self.delta(out, delta),
            _ => {}
        }
        Ok(())
    }

    fn write_end(&mut self, out: &mut Vec<u8>) {
        let status = if self.finish == Some(FinishReason::Length) { "incomplete" } else { "completed" };
        self.close(out, status);
        let object = self.object(status, Value::Null);
        if self.streamed {
            self.event(out, &format!("response.{status}"), json!({ "response": object }));
        } else {
            serde_json::to_writer(out, &object).expect("the keys of an answer are strings");
        }
    }

    fn write_error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        // These are the codes of this API for errors of a server.
        let code = if error.status().is_server_error() { "server_error" } else { "invalid_prompt" };
        let object = self.object("failed", json!({ "code": code, "message": error.message() }));
        self.event(out, "response.failed", json!({ "response": object }));
    }
}

impl ItemContent {
    /// Returns the beginning of the types of the events with which an item of this kind grows.
    fn event(&self) -> &'static str {
        match self {
            Self::Reasoning => "response.reasoning_text",
            Self::Message => "response.output_text",
            Self::Call { .. } => "response.function_call_arguments",
        }
    }
}

impl Item {
    fn json(&self) -> Value {
        let Self { id, text, status, .. } = self;
        // An item that has only begun has no content part yet.
        let parts: Vec<Value> = self.part().filter(|_| *status != "in_progress").into_iter().collect();
        match &self.content {
            ItemContent::Reasoning => json!({
                "type": "reasoning", "id": id, "summary": [], "content": parts, "encrypted_content": null, "status": status,
            }),
            ItemContent::Message => {
                json!({ "type": "message", "id": id, "status": status, "role": "assistant", "content": parts })
            }
            ItemContent::Call { id: call_id, name } => json!({
                "type": "function_call", "id": id, "call_id": call_id, "name": name, "arguments": text, "status": status,
            }),
        }
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

/// Returns the object `usage`. Nothing is charged for writing to a cache.
fn usage(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": { "cached_tokens": usage.prompt_tokens_details.cached_tokens, "cache_write_tokens": 0 },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": { "reasoning_tokens": usage.completion_tokens_details.reasoning_tokens },
        "total_tokens": usage.total_tokens,
    })
}
