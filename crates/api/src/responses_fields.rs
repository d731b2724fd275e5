//! The fields of OpenAI's Responses API.

use super::{
    fields::{Bounded, MESSAGES_MAX, Reader, readable},
    messages::Content,
};
use serde::{
    Deserialize,
    de::{self, SeqAccess, Visitor},
};
use serde_json::Value;

pub(crate) const INCLUDE_MAX: usize = 16;

/// The conversation, as one text of the user or as items.
pub(crate) enum ResponsesInput {
    Text(String),
    Items(Bounded<Item, MESSAGES_MAX>),
}

/// An item of the input. Which fields it has depends on its type.
#[derive(Deserialize)]
pub(crate) struct Item {
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
    pub(crate) role: Option<String>,
    #[serde(default)]
    pub(crate) content: Content,
    #[serde(default)]
    pub(crate) summary: Content,
    pub(crate) call_id: Option<String>,
    pub(crate) name: Option<String>,
    pub(crate) namespace: Option<String>,
    #[serde(default)]
    pub(crate) arguments: Value,
    pub(crate) input: Option<String>,
    #[serde(default)]
    pub(crate) output: Value,
}

#[derive(Default, Deserialize)]
pub(crate) struct TextConfig {
    pub(crate) format: Option<Value>,
    pub(crate) verbosity: Option<String>,
}

#[derive(Default, Deserialize)]
pub(crate) struct Reasoning {
    pub(crate) effort: Option<String>,
    pub(crate) summary: Option<String>,
    pub(crate) generate_summary: Option<String>,
}

readable! {
    [] ResponsesInput, deserialize_any, "a string or a list of items",

    fn visit_str<E: de::Error>(self, text: &str) -> Result<ResponsesInput, E> {
        Ok(ResponsesInput::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<ResponsesInput, A::Error> {
        Bounded::deserialize(de::value::SeqAccessDeserializer::new(list)).map(ResponsesInput::Items)
    }
}
