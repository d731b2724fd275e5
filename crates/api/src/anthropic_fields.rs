//! The fields of Anthropic's Messages API.

use super::{
    fields::{Reader, readable},
    images::ImageSource,
    messages::Content,
};
use serde::{
    Deserialize,
    de::{self, SeqAccess, Visitor},
};
use serde_json::{Map, Value};

/// A message of the user or the assistant.
#[derive(Deserialize)]
pub(crate) struct Turn {
    pub(crate) role: Option<String>,
    pub(crate) content: Option<Blocks>,
}

/// The content of a message or the system prompt: one text, or a list of content blocks.
pub(crate) enum Blocks {
    Text(String),
    List(Vec<Block>),
}

/// A content block. Which fields it has depends on its type.
#[derive(Deserialize)]
pub(crate) struct Block {
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
    pub(crate) text: Option<String>,
    pub(crate) thinking: Option<String>,
    pub(crate) id: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) input: Option<Map<String, Value>>,
    pub(crate) tool_use_id: Option<String>,
    #[serde(default)]
    pub(crate) content: Content,
    pub(crate) is_error: Option<bool>,
    /// The source of an image.
    pub(crate) source: Option<ImageSource>,
}

#[derive(Deserialize)]
pub(crate) struct Choice {
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) disable_parallel_tool_use: Option<bool>,
}

#[derive(Deserialize)]
pub(crate) struct Thinking {
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
    pub(crate) display: Option<String>,
}

#[derive(Default, Deserialize)]
pub(crate) struct OutputConfig {
    pub(crate) effort: Option<String>,
    pub(crate) format: Option<Value>,
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
