//! Parameters that are known and not built: refused when they would change the answer, ignored when they would not.

use crate::error::{ApiError, Problem};
use serde::{
    Deserialize, Deserializer,
    de::{self, MapAccess, SeqAccess, Visitor},
};
use std::fmt;

/// What such a parameter was set to, as far as it decides: nothing of it is built, however large it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unbuilt {
    /// `false`, or an empty text, list or object.
    Off,
    /// The text "none".
    Nothing,
    /// The text "text", a list of it, or an object of this type.
    Text,
    TextList,
    TextObject,
    /// Anything else.
    Set,
}

/// Refuses a parameter unless it is absent or says what happens anyway.
pub(super) fn refuse(param: &str, value: Option<Unbuilt>) -> Result<(), ApiError> {
    let harmless = match value {
        None | Some(Unbuilt::Off) => true,
        Some(Unbuilt::Nothing) => matches!(param, "tool_choice" | "function_call"),
        Some(Unbuilt::TextList) => param == "modalities",
        Some(Unbuilt::TextObject) => param == "response_format",
        Some(Unbuilt::Text | Unbuilt::Set) => false,
    };
    if harmless { Ok(()) } else { Err(ApiError::invalid(param, Problem::Unsupported)) }
}

impl<'de> Deserialize<'de> for Unbuilt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Probe;
        impl<'de> Visitor<'de> for Probe {
            type Value = Unbuilt;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("any value")
            }

            fn visit_bool<E: de::Error>(self, on: bool) -> Result<Unbuilt, E> {
                Ok(if on { Unbuilt::Set } else { Unbuilt::Off })
            }

            fn visit_i64<E: de::Error>(self, _: i64) -> Result<Unbuilt, E> {
                Ok(Unbuilt::Set)
            }

            fn visit_u64<E: de::Error>(self, _: u64) -> Result<Unbuilt, E> {
                Ok(Unbuilt::Set)
            }

            fn visit_f64<E: de::Error>(self, _: f64) -> Result<Unbuilt, E> {
                Ok(Unbuilt::Set)
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Unbuilt, E> {
                Ok(match text {
                    "" => Unbuilt::Off,
                    "none" => Unbuilt::Nothing,
                    "text" => Unbuilt::Text,
                    _ => Unbuilt::Set,
                })
            }

            fn visit_unit<E: de::Error>(self) -> Result<Unbuilt, E> {
                Ok(Unbuilt::Off)
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Unbuilt, A::Error> {
                let mut found = Unbuilt::Off;
                while let Some(element) = list.next_element::<Unbuilt>()? {
                    let text_so_far = matches!(found, Unbuilt::Off | Unbuilt::TextList);
                    found = if element == Unbuilt::Text && text_so_far { Unbuilt::TextList } else { Unbuilt::Set };
                }
                Ok(found)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Unbuilt, A::Error> {
                let (mut empty, mut of_type_text) = (true, false);
                while let Some(key) = object.next_key::<String>()? {
                    let value = object.next_value::<Unbuilt>()?;
                    empty = false;
                    if key == "type" {
                        of_type_text = value == Unbuilt::Text;
                    }
                }
                Ok(if empty {
                    Unbuilt::Off
                } else if of_type_text {
                    Unbuilt::TextObject
                } else {
                    Unbuilt::Set
                })
            }
        }
        deserializer.deserialize_any(Probe)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_values_that_change_nothing_are_ignored() {
        for (param, json, ignored) in [
            ("tools", "null", true),
            ("tools", "false", true),
            ("tools", "[]", true),
            ("tools", "{}", true),
            ("tools", "\"\"", true),
            ("tools", "[0]", false),
            ("tools", "[null]", false),
            ("tools", "true", false),
            ("tools", "7", false),
            ("tools", "-7.5", false),
            ("tools", "\"none\"", false),
            ("tool_choice", "\"none\"", true),
            ("tool_choice", "\"auto\"", false),
            ("modalities", "[\"text\",\"text\"]", true),
            ("modalities", "[\"text\",\"audio\"]", false),
            ("modalities", "[\"audio\",\"text\"]", false),
            ("response_format", "{\"type\":\"text\"}", true),
            ("response_format", "{\"type\":\"json_object\"}", false),
            ("response_format", "{\"kind\":\"text\"}", false),
        ] {
            let value: Option<Unbuilt> = serde_json::from_str(json).expect(json);
            assert_eq!(refuse(param, value).is_ok(), ignored, "{param}: {json}");
        }
    }
}
