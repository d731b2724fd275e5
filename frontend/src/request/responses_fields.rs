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

pub(super) const INCLUDE_MAX: usize = 16;

/// The conversation, as one text of the user or as items.
pub(super) enum Input {
    Text(String),
    Items(Bounded<Item, MESSAGES_MAX>),
}

/// An item of the input. Which fields it has depends on its type.
#[derive(Deserialize)]
pub(super) struct Item {
    #[serde(rename = "type")]
    pub(super) kind: Option<String>,
    pub(super) role: Option<String>,
    #[serde(default)]
    pub(super) content: Content,
    #[serde(default)]
    pub(super) summary: Content,
    pub(super) encrypted_content: Option<String>,
    pub(super) call_id: Option<String>,
    pub(super) name: Option<String>,
    pub(super) arguments: Option<String>,
    #[serde(default)]
    pub(super) output: Content,
}

#[derive(Default, Deserialize)]
pub(super) struct TextConfig {
    pub(super) format: Option<Value>,
    pub(super) verbosity: Option<String>,
}

#[derive(Default, Deserialize)]
pub(super) struct Reasoning {
    pub(super) effort: Option<String>,
    pub(super) summary: Option<String>,
    pub(super) generate_summary: Option<String>,
}

readable! {
    [] Input, deserialize_any, "a string or a list of items",

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Input, E> {
        Ok(Input::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Input, A::Error> {
        Bounded::deserialize(de::value::SeqAccessDeserializer::new(list)).map(Input::Items)
    }
}
