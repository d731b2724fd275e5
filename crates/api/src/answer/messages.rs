//! Writes answers in the format of Anthropic's Messages API. A stream has `message_start`, then the start, deltas and stop of each content
//! block, then `message_delta` with the stop reason and the usage, then `message_stop`.

use super::{
    AnswerContext, AnswerFailure, AnswerFormat, AnswerPart, Delta, FinishReason, Usage,
    sse::{write_json, write_named},
};
use serde_json::{Value, json};
use tandem_text::chat::Piece;

/// The event that Anthropic's API sends in pauses. Its clients skip it.
const PING: &[u8] = b"event: ping\ndata: {\"type\": \"ping\"}\n\n";

#[derive(Default)]
pub(super) struct MessageFormat {
    /// The content of the answer. The last block may be open. The blocks of a streamed answer have no text.
    blocks: Vec<Block>,
    /// Whether the last block may still grow.
    open: bool,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
}

enum Block {
    Thinking(String),
    Text(String),
    ToolUse { id: String, name: String, input: String },
}

impl MessageFormat {
    fn message(&self, context: &AnswerContext, content: Vec<Value>) -> Value {
        json!({
            "id": context.id,
            "type": "message",
            "role": "assistant",
            "model": context.model.id,
            "content": content,
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": usage(&context.usage, 0),
        })
    }

    fn delta(&mut self, context: &AnswerContext, out: &mut Vec<u8>, delta: Delta) {
        for piece in delta.pieces {
            match piece {
                Piece::Reasoning(text) => {
                    if !self.open || !matches!(self.blocks.last(), Some(Block::Thinking(_))) {
                        self.begin(context, out, Block::Thinking(String::new()));
                    }
                    self.grow(context, out, &text);
                }
                Piece::Content(text) => {
                    let mut text = text.as_str();
                    if !self.open || !matches!(self.blocks.last(), Some(Block::Text(_))) {
                        // A text after another block begins with a line feed, which separates it from the text before that block.
                        text = text.strip_prefix('\n').filter(|_| !self.blocks.is_empty()).unwrap_or(text);
                        self.begin(context, out, Block::Text(String::new()));
                    }
                    self.grow(context, out, text);
                }
                Piece::ToolCall { id, name, .. } => self.begin(context, out, Block::ToolUse { id, name, input: String::new() }),
                Piece::Arguments { text, .. } => self.grow(context, out, &text),
            }
        }
        if let Some(finish) = delta.finish {
            self.stop_reason = Some(match finish {
                FinishReason::Stop if delta.stop_string.is_some() => "stop_sequence",
                FinishReason::Stop => "end_turn",
                FinishReason::Length => "max_tokens",
                FinishReason::ToolCalls => "tool_use",
            });
            self.stop_sequence = delta.stop_string;
        }
    }

    /// Closes the open block, and begins another one.
    fn begin(&mut self, context: &AnswerContext, out: &mut Vec<u8>, block: Block) {
        self.close(context, out);
        let content = match &block {
            Block::ToolUse { id, name, .. } => tool_use(id, name, json!({})),
            Block::Thinking(_) | Block::Text(_) => block.json(),
        };
        let start = json!({ "type": "content_block_start", "index": self.blocks.len(), "content_block": content });
        self.blocks.push(block);
        self.open = true;
        event(context, out, &start);
    }

    /// Appends a text to the open block.
    fn grow(&mut self, context: &AnswerContext, out: &mut Vec<u8>, text: &str) {
        let index = self.blocks.len().saturating_sub(1);
        let Some(block) = self.blocks.last_mut() else { return };
        if context.stream.is_none() {
            block.text().push_str(text);
            return;
        }
        let delta = match block {
            Block::Thinking(_) => json!({ "type": "thinking_delta", "thinking": text }),
            Block::Text(_) => json!({ "type": "text_delta", "text": text }),
            Block::ToolUse { .. } => json!({ "type": "input_json_delta", "partial_json": text }),
        };
        event(context, out, &json!({ "type": "content_block_delta", "index": index, "delta": delta }));
    }

    fn close(&mut self, context: &AnswerContext, out: &mut Vec<u8>) {
        if std::mem::take(&mut self.open) {
            event(context, out, &json!({ "type": "content_block_stop", "index": self.blocks.len() - 1 }));
        }
    }
}

impl AnswerFormat for MessageFormat {
    fn write(&mut self, context: &AnswerContext, out: &mut Vec<u8>, _: usize, part: AnswerPart) {
        match part {
            AnswerPart::Started { .. } => {
                let mut message = self.message(context, Vec::new());
                if let Some(estimate) = context.cached_estimate {
                    message["usage"] = usage(&context.usage, estimate);
                    message["tandem"] = json!({ "cached_tokens_source": "router_estimate" });
                }
                event(context, out, &json!({ "type": "message_start", "message": message }));
            }
            AnswerPart::Delta(delta) => self.delta(context, out, delta),
            AnswerPart::PromptLogprobs { .. } => {}
        }
    }

    fn write_end(&mut self, context: &AnswerContext, out: &mut Vec<u8>) {
        self.close(context, out);
        if context.stream.is_some() {
            let stop = json!({ "stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence });
            let mut delta = json!({ "type": "message_delta", "delta": stop, "usage": usage(&context.usage, 0) });
            add_details(context, &mut delta);
            event(context, out, &delta);
            event(context, out, &json!({ "type": "message_stop" }));
            return;
        }
        let content: Vec<Value> = self.blocks.iter().map(Block::json).collect();
        if self.stop_reason == Some("tool_use") && content.iter().all(|block| block["type"] != "tool_use") {
            self.stop_reason = Some("end_turn");
        }
        let mut message = self.message(context, content);
        add_details(context, &mut message);
        write_json(out, &message);
    }

    fn write_error(&mut self, context: &AnswerContext, out: &mut Vec<u8>, failure: &AnswerFailure<'_>) {
        write_named(out, "error", &failure.anthropic_body(&context.request_id));
    }

    fn keep_alive(&self) -> &'static [u8] {
        PING
    }
}

/// Writes an event, which has the name of its type, if the answer is streamed.
fn event(context: &AnswerContext, out: &mut Vec<u8>, data: &Value) {
    if context.stream.is_some() {
        write_named(out, data["type"].as_str().unwrap_or_default(), data);
    }
}

fn add_details(context: &AnswerContext, data: &mut Value) {
    if let Some(details) = &context.details {
        data["tandem"] = details.clone();
    }
}

impl Block {
    fn text(&mut self) -> &mut String {
        match self {
            Self::Thinking(text) | Self::Text(text) | Self::ToolUse { input: text, .. } => text,
        }
    }

    fn json(&self) -> Value {
        match self {
            // Only Anthropic's models sign their thinking.
            Self::Thinking(text) => json!({ "type": "thinking", "thinking": text, "signature": "" }),
            Self::Text(text) => json!({ "type": "text", "text": text }),
            // If the arguments are not an object, because the call was cut off or is malformed, the model's text is returned as text.
            Self::ToolUse { id, name, input } => match serde_json::from_str::<Value>(input) {
                Ok(input @ Value::Object(_)) => tool_use(id, name, input),
                Ok(_) | Err(_) => json!({ "type": "text", "text": format!("{name}{input}") }),
            },
        }
    }
}

fn tool_use(id: &str, name: &str, input: Value) -> Value {
    json!({ "type": "tool_use", "id": id, "name": name, "input": input })
}

/// Returns Anthropic's object `usage`. The three counts of input tokens add up to the prompt. Nothing is charged for storing tokens in a
/// cache, so tokens that were not cached are all plain input. `estimate` stands for unknown cached tokens, because clients expect integers.
fn usage(usage: &Usage, estimate: u32) -> Value {
    let cached = usage.prompt_tokens_details.cached_tokens.unwrap_or(estimate);
    json!({
        "input_tokens": usage.prompt_tokens - cached.min(usage.prompt_tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    })
}
