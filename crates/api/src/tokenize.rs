//! The requests of `/tokenize` and `/detokenize`.

use super::{
    ChatRequest,
    fields::Id,
    parameters::continued_or_begun,
    schema::{NAMES_MODEL, SERVED},
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::json;
use std::borrow::Cow;

/// The fields of a chat that determine its prompt.
const OF_PROMPT: [&str; 9] = [
    "messages",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "enable_thinking",
    "chat_template_kwargs",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
];

/// A request for the tokens of a text. If it has `messages`, it is read as a `ChatRequest` as well.
#[derive(Deserialize)]
pub struct TokenizeRequest {
    /// The model's id.
    pub model: Option<String>,
    /// The text to encode.
    pub prompt: Option<String>,
    /// Present if the body is a conversation, which is then parsed as a chat.
    pub messages: Option<IgnoredAny>,
    /// Whether the model's beginning-of-sequence token is added.
    pub add_special_tokens: Option<bool>,
    /// Whether the answer has the text of each token.
    pub return_token_strs: Option<bool>,
}

impl JsonSchema for TokenizeRequest {
    fn schema_name() -> Cow<'static, str> {
        "TokenizeRequest".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let model = json!({ "type": ["string", "null"], SERVED: "model" });
        let switch = json!({ "type": ["boolean", "null"] });
        let text = json_schema!({
            "type": "object",
            "properties": {
                "model": model, "prompt": { "type": "string" }, "messages": { "type": "null" }, "add_special_tokens": switch,
                "return_token_strs": switch,
            },
            "required": ["prompt"],
            SERVED: NAMES_MODEL,
        });
        // The schema lists only the fields of a chat that affect its prompt. The chat's other fields are accepted, too.
        let mut chat = ChatRequest::json_schema(generator);
        let mut properties = chat.remove("properties").unwrap_or_default();
        if let Some(properties) = properties.as_object_mut() {
            properties.retain(|name, _| OF_PROMPT.contains(&name.as_str()));
            let own = [
                ("model", model),
                ("prompt", json!({ "type": "null" })),
                ("add_special_tokens", json!({ "enum": [false, null] })),
                ("return_token_strs", switch),
            ];
            properties.extend(own.map(|(name, schema)| (name.to_owned(), schema)));
        }
        let chat = json_schema!({
            "type": "object", "properties": properties, "required": ["messages"], "anyOf": continued_or_begun(), SERVED: NAMES_MODEL,
            "description": "A conversation with the fields of a chat. The fields that concern the prompt are listed.",
        });
        json_schema!({ "anyOf": [text, chat] })
    }
}

/// A request for the text of tokens.
#[derive(Deserialize, JsonSchema)]
#[schemars(extend("x-served" = "names model"))]
pub struct DetokenizeRequest {
    /// The model's id.
    #[schemars(extend("x-served" = "model"))]
    pub model: Option<String>,
    /// The token ids to decode.
    #[schemars(required)]
    pub tokens: Option<Vec<Id>>,
}
