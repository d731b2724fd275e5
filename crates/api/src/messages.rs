//! The messages of a conversation, as clients of OpenAI's API send them.

use super::{
    agents::DeferredTools,
    fields::{Bounded, MESSAGES_MAX, Reader, readable},
    images::{self, ImageParts, ImageUrl},
    schema::{ObjectSchema, OneOf, SERVED, described},
    unsupported::{self, Setting},
};
use crate::error::{Problem, RequestError, at_most};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{
    Deserialize,
    de::{self, SeqAccess, Visitor},
};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use tandem_text::chat::{Message, Role, ToolCall};

/// The type, and the field's name, of the content part in which OpenAI's models refuse to answer.
const REFUSAL: &str = "refusal";

/// A message as the client sent it.
#[derive(Deserialize)]
pub(crate) struct RawMessage {
    role: Option<String>,
    #[serde(default)]
    content: Content,
    name: Option<String>,
    tool_calls: Option<Vec<RawCall>>,
    tool_call_id: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    refusal: Option<String>,
    #[serde(default)]
    function_call: Setting,
}

#[derive(Deserialize)]
struct RawCall {
    id: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    function: Option<CalledFunction>,
    /// The call's position, which some clients copy from streams. The order of the list is the same.
    #[serde(rename = "index")]
    _index: Option<serde::de::IgnoredAny>,
}

#[derive(Deserialize)]
struct CalledFunction {
    name: Option<String>,
    /// JSON text in OpenAI's API; some clients send the object.
    #[serde(default)]
    arguments: Value,
}

/// The content of a message: one text or a list of parts.
#[derive(Default)]
pub(crate) enum Content {
    #[default]
    None,
    Text(String),
    Parts(Vec<Part>),
}

/// A content part. Fields of parts that are not texts are skipped.
#[derive(Deserialize)]
pub(crate) struct Part {
    #[serde(rename = "type")]
    kind: Option<String>,
    text: Option<String>,
    refusal: Option<String>,
    /// The tool that a part of type `tool_reference` names.
    #[serde(default)]
    tool_name: Value,
    #[serde(default)]
    title: Value,
    /// The texts of a part of type `search_result`.
    #[serde(default)]
    content: Value,
    #[serde(default)]
    source: Value,
    /// The image of a part of type `image_url` or `input_image`.
    image_url: Option<ImageUrl>,
    #[serde(default)]
    uuid: Setting,
    #[serde(default)]
    file_id: Setting,
}

readable! {
    [] Content, deserialize_any, "a string, a list of content parts or null",

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Content, E> {
        Ok(Content::Text(text.to_owned()))
    }

    fn visit_unit<E: de::Error>(self) -> Result<Content, E> {
        Ok(Content::None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Content, A::Error> {
        let mut parts = Vec::new();
        while let Some(part) = list.next_element()? {
            parts.push(part);
        }
        Ok(Content::Parts(parts))
    }
}

impl JsonSchema for RawMessage {
    fn schema_name() -> Cow<'static, str> {
        "Message".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = ObjectSchema::default();
        let roles = OneOf(&["system", "developer", "user", "assistant", "tool", "function"]);
        schema.required::<String>(generator, "role", &[&roles]);
        schema.optional::<Content>(generator, "content", &[]);
        for name in ["name", "tool_call_id", "reasoning", "reasoning_content", "refusal"] {
            schema.optional::<String>(generator, name, &[]);
        }
        schema.optional::<Vec<RawCall>>(generator, "tool_calls", &[]);
        schema.unsupported(generator, "function_call", &[]);
        // Only messages of the assistant have tool calls and refusals.
        let texts = json!({ "items": { "properties": { "type": { "enum": ["text", "image_url"] } } } });
        let others = json!({ "properties": { "tool_calls": { "type": ["array", "null"], "maxItems": 0 }, "content": texts } });
        schema.either(others, json!({ "properties": { "role": { "const": "assistant" } } }));
        let without_images = json!({ "items": { "properties": { "type": { "enum": ["text", "refusal"] } } } });
        let texts = json!({ "properties": { "content": without_images } });
        schema.either(texts, json!({ "properties": { "role": { "const": "user" } } }));
        schema.finish()
    }
}

described! {
    [] Content, _generator => {
        let string = json!({ "type": "string" });
        let part = |kind: &str, other: &str| {
            let properties = json!({ "type": { "const": kind }, kind: string, other: { "type": ["string", "null"] } });
            json!({ "type": "object", "properties": properties, "required": ["type", kind] })
        };
        let url = json!({ "type": "string", "pattern": "^data:image/(png|jpeg|webp|gif);base64," });
        let object = json!({ "type": "object", "properties": { "url": url }, "required": ["url"] });
        let image = json!({ "type": { "const": "image_url" }, "image_url": { "anyOf": [url, object] } });
        let image = json!({ "type": "object", "properties": image, "required": ["type", "image_url"], SERVED: "image" });
        let parts = json!({ "anyOf": [part("text", "refusal"), part("refusal", "text"), image] });
        json_schema!({ "anyOf": [{ "type": ["string", "null"] }, { "type": "array", "items": parts }] })
    }
}

described! {
    [] RawCall, _generator => {
        let function = json!({ "type": "object", "properties": { "name": { "type": "string" } }, "required": ["name"] });
        let properties = json!({ "id": { "type": ["string", "null"] }, "type": { "enum": ["function", null] }, "function": function });
        json_schema!({ "type": "object", "properties": properties, "required": ["function"] })
    }
}

/// Checks the messages.
///
/// # Errors
/// There is no message, or one of them is incomplete or has parts that are not text.
pub(crate) fn check(
    messages: Option<Bounded<RawMessage, MESSAGES_MAX>>,
    images: &mut ImageParts,
) -> Result<Vec<Message>, RequestError> {
    let Bounded(messages) = messages.ok_or_else(|| RequestError::invalid("messages", Problem::Missing))?;
    if messages.is_empty() {
        return Err(RequestError::invalid("messages", Problem::Empty));
    }
    at_most("messages", messages.len(), MESSAGES_MAX, "messages")?;
    messages.into_iter().enumerate().map(|(index, message)| message.check(&format!("messages[{index}]"), images)).collect()
}

impl RawMessage {
    fn check(self, at: &str, images: &mut ImageParts) -> Result<Message, RequestError> {
        let param = |field: &str| format!("{at}.{field}");
        let role = match self.role.as_deref() {
            None => return Err(RequestError::invalid(param("role"), Problem::Missing)),
            // `developer` is the newer name of `system`, and `tool` of `function`. Chat templates know only `system` and `tool`.
            Some("system" | "developer") => Role::System,
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            Some("tool" | "function") => Role::Tool,
            Some(_) => {
                let allowed = "'system', 'developer', 'user', 'assistant', 'tool'";
                return Err(RequestError::invalid(param("role"), Problem::Choice { allowed }));
            }
        };
        unsupported::check(&param("function_call"), &self.function_call, &[])?;
        let calls = self.tool_calls.unwrap_or_default();
        if !calls.is_empty() && role != Role::Assistant {
            return Err(RequestError::invalid(
                param("tool_calls"),
                Problem::Rule { rule: "is only allowed in messages of the assistant" },
            ));
        }
        let calls = calls.into_iter().enumerate().map(|(index, call)| call.check(&format!("{at}.tool_calls[{index}]")));
        let tool_calls = calls.collect::<Result<Vec<_>, _>>()?;
        let kinds: &[&str] = if role == Role::Assistant { &["text", REFUSAL] } else { &["text"] };
        let content = match self.content.text(&param("content"), kinds, (role == Role::User).then_some(images))? {
            Some(content) => Some(content),
            None if !tool_calls.is_empty() => None,
            // OpenAI's answers have a refusal in place of a text.
            None => Some(self.refusal.unwrap_or_default()),
        };
        let reasoning = self.reasoning_content.or(self.reasoning);
        Ok(Message { role, content, reasoning, name: self.name, tool_calls, tool_call_id: self.tool_call_id })
    }
}

impl RawCall {
    fn check(self, at: &str) -> Result<ToolCall, RequestError> {
        if self.kind.is_some_and(|kind| kind != "function") {
            return Err(RequestError::invalid(format!("{at}.type"), Problem::Choice { allowed: "'function'" }));
        }
        let function = self.function.ok_or_else(|| RequestError::invalid(format!("{at}.function"), Problem::Missing))?;
        let name = function.name.ok_or_else(|| RequestError::invalid(format!("{at}.function.name"), Problem::Missing))?;
        let arguments = match function.arguments {
            Value::String(text) => ToolCall::arguments(&text),
            Value::Object(object) => object,
            _ => Map::new(),
        };
        Ok(ToolCall { id: self.id, name, arguments })
    }
}

impl Content {
    /// Returns the text, with marks for the images, which are added to `images`. `kinds` are the types of parts that are accepted. Images are
    /// accepted if `images` is set and the model reads images.
    ///
    /// # Errors
    /// A part is incomplete, or its type is not accepted.
    pub(crate) fn text(
        self,
        at: &str,
        kinds: &[&str],
        mut images: Option<&mut ImageParts>,
    ) -> Result<Option<String>, RequestError> {
        let parts = match self {
            Self::None => return Ok(None),
            Self::Text(text) => return Ok(Some(text)),
            Self::Parts(parts) => parts,
        };
        let before = images.as_deref().map_or(0, ImageParts::len);
        let part = |(index, part): (usize, Part)| {
            let at = format!("{at}[{index}]");
            let missing = |field: &str| RequestError::invalid(format!("{at}.{field}"), Problem::Missing);
            match (part.kind.as_deref(), images.as_deref_mut().filter(|images| images.are_read())) {
                (Some(kind), Some(images)) if images::KINDS.contains(&kind) => {
                    unsupported::check(&format!("{at}.uuid"), &part.uuid, &[])?;
                    unsupported::check(&format!("{at}.file_id"), &part.file_id, &[])?;
                    images.add_url(&at, part.image_url)
                }
                (Some(kind), _) if !kinds.contains(&kind) => {
                    Err(RequestError::invalid(&*at, Problem::Part { kind: kind.to_owned() }))
                }
                (Some(REFUSAL), _) => part.refusal.ok_or_else(|| missing(REFUSAL)),
                (Some(_), _) => part.text.ok_or_else(|| missing("text")),
                (None, _) => Err(missing("type")),
            }
        };
        let texts = parts.into_iter().enumerate().map(part).collect::<Result<Vec<_>, _>>()?;
        Ok(Some(images::joined(&texts, images.map_or(0, |images| images.len()) - before)))
    }
}

impl Content {
    /// Returns the text of a tool's result. A part that the model cannot read becomes a text that names it: an error would end the
    /// conversation, because every later request repeats the result. A part that refers to a deferred tool describes it.
    ///
    /// # Errors
    /// A part is incomplete.
    pub(crate) fn result_text(self, at: &str, deferred: &mut DeferredTools) -> Result<String, RequestError> {
        let parts = match self {
            Self::None => return Ok(String::new()),
            Self::Text(text) => return Ok(text),
            Self::Parts(parts) => parts,
        };
        let part = |(index, part): (usize, Part)| {
            let at = format!("{at}[{index}]");
            let kind = part.kind.ok_or_else(|| RequestError::invalid(format!("{at}.type"), Problem::Missing))?;
            let titled = |text: String| part.title.as_str().into_iter().chain([&*text]).collect::<Vec<_>>().join("\n");
            Ok(match kind.as_str() {
                "text" | "input_text" | "output_text" => {
                    part.text.ok_or_else(|| RequestError::invalid(format!("{at}.text"), Problem::Missing))?
                }
                "tool_reference" => deferred.reference(part.tool_name.as_str().unwrap_or_default()),
                "search_result" => {
                    let content = Self::deserialize(part.content).unwrap_or_default();
                    titled(content.result_text(&format!("{at}.content"), deferred)?)
                }
                "document" if part.source["type"] == "text" => {
                    titled(part.source["data"].as_str().unwrap_or_default().to_owned())
                }
                _ => format!("[{kind} omitted: the model reads only text]"),
            })
        };
        let texts = parts.into_iter().enumerate().map(part).collect::<Result<Vec<_>, RequestError>>()?;
        Ok(texts.join("\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(message: Value) -> Result<Message, String> {
        let raw: RawMessage = serde_json::from_value(message).map_err(|error| error.to_string())?;
        raw.check("messages[0]", &mut ImageParts::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn text_parts_of_a_message_are_joined_into_one_text() {
        let text = |text: &str| json!({ "type": "text", "text": text });
        for (content, expected) in [
            (json!("a"), "a"),
            (json!(null), ""),
            (json!([]), ""),
            (json!([text("a"), text(""), { "type": "text", "text": "b", "x": 1 }]), "a\n\nb"),
        ] {
            let message = read(json!({ "role": "user", "content": content })).expect("the content is valid");
            assert_eq!(message, Message::new(Role::User, expected), "{content}");
        }
        let refusal = json!({ "role": "assistant", "content": [text("a"), { "type": "refusal", "refusal": "no" }] });
        assert_eq!(read(refusal).expect("assistants may refuse").content.as_deref(), Some("a\nno"));
        let refusal = json!({ "role": "assistant", "content": null, "refusal": "no" });
        assert_eq!(read(refusal).expect("assistants may refuse").content.as_deref(), Some("no"));
        for content in [json!(1), json!({}), json!(["a"]), json!([{ "type": "text" }]), json!([{ "text": "a" }])] {
            assert!(read(json!({ "role": "user", "content": content })).is_err(), "{content}");
        }
    }

    #[test]
    fn error_names_the_part_that_is_not_text() {
        for (kind, value) in
            [("image_url", json!({ "url": "data:" })), ("input_audio", json!({ "data": "" })), ("file", json!({}))]
        {
            let content = json!([{ "type": "text", "text": "what is this?" }, { "type": kind, kind: value }]);
            let error = read(json!({ "role": "user", "content": content })).expect_err(kind);
            assert!(error.contains("'messages[0].content[1]'") && error.contains(&format!("'{kind}'")), "{error}");
        }
        let refusal = json!({ "role": "user", "content": [{ "type": "refusal", "refusal": "no" }] });
        assert!(read(refusal).expect_err("users do not refuse").contains("'refusal'"));
    }

    #[test]
    fn tool_calls_of_earlier_answers_are_read() {
        let call =
            |arguments: Value| json!({ "id": "c1", "type": "function", "function": { "name": "f", "arguments": arguments } });
        let message = |calls: Value| json!({ "role": "assistant", "content": null, "tool_calls": calls });
        for (arguments, expected) in [
            (json!(r#"{"b": 1, "a": [2]}"#), json!({ "b": 1, "a": [2] })),
            (json!({ "b": 1 }), json!({ "b": 1 })),
            (json!(""), json!({})),
            (json!("{broken"), json!({ "arguments": "{broken" })),
            (json!("[1]"), json!({ "arguments": [1] })),
            (json!(null), json!({})),
        ] {
            let message = read(message(json!([call(arguments.clone())]))).expect("the call is valid");
            let expected = expected.as_object().cloned().unwrap_or_default();
            let call = ToolCall { id: Some("c1".to_owned()), name: "f".to_owned(), arguments: expected };
            assert_eq!((message.content, message.tool_calls), (None, vec![call]), "{arguments}");
        }
        for (calls, param) in [
            (json!([{}]), "messages[0].tool_calls[0].function"),
            (json!([call(json!("{}")), { "function": {} }]), "messages[0].tool_calls[1].function.name"),
            (json!([{ "type": "custom", "custom": {} }]), "messages[0].tool_calls[0].type"),
        ] {
            let error = read(message(calls)).expect_err(param);
            assert!(error.contains(&format!("'{param}'")), "{error}");
        }
        let user = json!({ "role": "user", "content": "a", "tool_calls": [call(json!("{}"))] });
        assert!(read(user).expect_err("users call no tools").contains("messages[0].tool_calls"));
    }

    #[test]
    fn tool_results_and_reasoning_are_read() {
        let result =
            read(json!({ "role": "tool", "tool_call_id": "c1", "name": "f", "content": "7" })).expect("the result is valid");
        let expected =
            Message { name: Some("f".to_owned()), tool_call_id: Some("c1".to_owned()), ..Message::new(Role::Tool, "7") };
        assert_eq!(result, expected);
        for field in ["reasoning", "reasoning_content"] {
            let message = read(json!({ "role": "assistant", "content": "a", field: "because" })).expect("the message is valid");
            assert_eq!(message.reasoning.as_deref(), Some("because"));
        }
    }
}
