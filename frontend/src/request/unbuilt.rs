//! Parameters that OpenAI or other servers know and this one has not built. Ignoring one would give an answer that differs from what
//! the client asked for, so it is refused by name, unless it is set to what happens anyway.
//!
//! The tables are at the request types (`unbuilt { … }`) and in [`request`](super::request). A parameter that gets built leaves its table.

use crate::error::{ApiError, Problem};
use serde::{
    Deserialize, Deserializer,
    de::{self, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use std::{borrow::Cow, fmt};

/// What such a parameter is set to, as far as a refusal needs it. A value of any size becomes a few bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Setting {
    /// It is absent, null, or an empty text, list or object.
    #[default]
    Nothing,
    Switch(bool),
    Number(f64),
    /// A short text, a list of nothing but this text, or an object with this text as `type`.
    Text(Cow<'static, str>),
    /// Anything else.
    Other,
}

/// The longest text in a table.
const TEXT_BYTES_MAX: usize = 16;

/// Refuses `found` unless it sets nothing, switches something off, or is one of the values that say what happens anyway (`usual`).
/// If that is `true`, then switching off is a change.
pub(crate) fn check(param: &str, found: &Setting, usual: &[Setting]) -> Result<(), ApiError> {
    let off = *found == Setting::Switch(false) && !usual.contains(&Setting::Switch(true));
    if off || *found == Setting::Nothing || usual.contains(found) {
        return Ok(());
    }
    Err(ApiError::invalid(param, Problem::Unsupported))
}

impl From<bool> for Setting {
    fn from(switch: bool) -> Self {
        Self::Switch(switch)
    }
}

impl From<i32> for Setting {
    fn from(number: i32) -> Self {
        Self::Number(number.into())
    }
}

impl From<&'static str> for Setting {
    fn from(text: &'static str) -> Self {
        Self::Text(text.into())
    }
}

impl<'de> Deserialize<'de> for Setting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SettingVisitor)
    }
}

struct SettingVisitor;

impl<'de> Visitor<'de> for SettingVisitor {
    type Value = Setting;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<Setting, E> {
        Ok(Setting::Nothing)
    }

    fn visit_bool<E: de::Error>(self, switch: bool) -> Result<Setting, E> {
        Ok(Setting::Switch(switch))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Setting, E> {
        Ok(Setting::Number(number as f64))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Setting, E> {
        Ok(Setting::Number(number as f64))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Setting, E> {
        Ok(Setting::Number(number))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Setting, E> {
        Ok(match text {
            "" => Setting::Nothing,
            _ if text.len() <= TEXT_BYTES_MAX => Setting::Text(text.to_owned().into()),
            _ => Setting::Other,
        })
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Setting, A::Error> {
        let mut whole = match list.next_element()? {
            None => return Ok(Setting::Nothing),
            Some(first @ Setting::Text(_)) => first,
            Some(_) => Setting::Other,
        };
        while let Some(next) = list.next_element::<Setting>()? {
            if next != whole {
                whole = Setting::Other;
            }
        }
        Ok(whole)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Setting, A::Error> {
        let mut whole = Setting::Nothing;
        while let Some(Key { is_type }) = object.next_key()? {
            match (is_type.then(|| object.next_value()).transpose()?, &whole) {
                (Some(kind @ Setting::Text(_)), _) => whole = kind,
                (Some(_), _) | (None, Setting::Nothing) => whole = Setting::Other,
                (None, _) => {}
            }
            if !is_type {
                object.next_value::<IgnoredAny>()?;
            }
        }
        Ok(whole)
    }
}

/// A key of an object; only one name matters.
struct Key {
    is_type: bool,
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;
        impl Visitor<'_> for KeyVisitor {
            type Value = Key;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a key")
            }

            fn visit_str<E: de::Error>(self, key: &str) -> Result<Key, E> {
                Ok(Key { is_type: key == "type" })
            }
        }
        deserializer.deserialize_str(KeyVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_as_what_a_refusal_needs() {
        let text = |text: &'static str| Setting::from(text);
        for (json, expected) in [
            ("null", Setting::Nothing),
            (r#""""#, Setting::Nothing),
            ("[]", Setting::Nothing),
            ("{}", Setting::Nothing),
            ("false", Setting::Switch(false)),
            ("1", Setting::Number(1.0)),
            ("1.0", Setting::Number(1.0)),
            ("-1", Setting::Number(-1.0)),
            (r#""none""#, text("none")),
            (r#""a text longer than that""#, Setting::Other),
            (r#"["text","text"]"#, text("text")),
            (r#"["text","audio"]"#, Setting::Other),
            (r#"[1,1]"#, Setting::Other),
            (r#"[[],[]]"#, Setting::Other),
            (r#"{"type":"text"}"#, text("text")),
            (r#"{"x":[1],"type":"text","y":1}"#, text("text")),
            (r#"{"type":7}"#, Setting::Other),
            (r#"{"x":{"type":"text"}}"#, Setting::Other),
        ] {
            assert_eq!(serde_json::from_str::<Setting>(json).expect(json), expected, "{json}");
        }
    }

    #[test]
    fn what_happens_anyway_passes_and_the_rest_is_refused() {
        let read = |json: &str| serde_json::from_str::<Setting>(json).expect("JSON");
        let passes = |json, usual: &[Setting]| check("x", &read(json), usual).is_ok();
        assert!(passes("null", &[]) && passes("false", &[]) && passes("{}", &[]));
        assert!(!passes("0", &[]) && !passes("true", &[]) && !passes(r#""x""#, &[]));
        assert!(passes("true", &[true.into()]) && passes("null", &[true.into()]) && !passes("false", &[true.into()]));
        assert!(passes("0", &[0.into()]) && passes("0.0", &[0.into()]) && !passes("1", &[0.into()]));
        assert!(passes(r#""none""#, &["none".into()]) && !passes(r#""auto""#, &["none".into()]));
    }
}
