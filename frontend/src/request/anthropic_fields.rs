//! The fields of Anthropic's Messages API.

use super::{
    fields::{Reader, readable},
    messages::Content,
};
use serde::{
    Deserialize,
    de::{self, SeqAccess, Visitor},
};
use serde_json::{Map, Value};

/// A message of the user or the assistant.
#[derive(Deserialize)]
pub(super) struct Turn {
    pub(super) role: Option<String>,
    pub(super) content: Option<Blocks>,
}

/// The content of a message or the system prompt: one text, or a list of content blocks.
pub(super) enum Blocks {
    Text(String),
    List(Vec<Block>),
}

/// A content block. Which fields it has depends on its type.
#[derive(Deserialize)]
pub(super) struct Block {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) text: Option<String>,
    pub(super) thinking: Option<String>,
    pub(super) id: Option<String>,
    pub(super) name: Option<String>,
    pub(super) input: Option<Map<String, Value>>,
    pub(super) tool_use_id: Option<String>,
    #[serde(default)]
    pub(super) content: Content,
    pub(super) is_error: Option<bool>,
}

#[derive(Deserialize)]
pub(super) struct Choice {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) name: Option<String>,
    pub(super) disable_parallel_tool_use: Option<bool>,
}

#[derive(Deserialize)]
pub(super) struct Thinking {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) display: Option<String>,
}

#[derive(Default, Deserialize)]
pub(super) struct OutputConfig {
    pub(super) effort: Option<String>,
    pub(super) format: Option<Value>,
}

readable! {
    [] Blocks, deserialize_any, "a string or a list of content blocks",

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Blocks, E> {
        Ok(Blocks::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Blocks, A::Error> {
        Vec::deserialize(de::value::SeqAccessDeserializer::new(list)).map(Blocks::List)
    }
}
