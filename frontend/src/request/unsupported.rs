//! Parameters that OpenAI or other servers have and this one does not support. To ignore one would give another answer than the
//! client asked for, so it is refused by name, unless its value does not change the answer.
//!
//! The tables are at the request types (`unsupported { … }`) and in [`request`](super::request). A parameter that becomes supported is removed from its table.

use crate::error::{ApiError, Problem};
use serde::{
    Deserialize, Deserializer,
    de::{self, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use std::{borrow::Cow, fmt};

/// The value of such a parameter, as far as its check needs it: a value of any size becomes a few bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Setting {
    /// Absent, null, or an empty string, list or object.
    #[default]
    Nothing,
    Bool(bool),
    Number(f64),
    /// A short string, a list of only this string, or an object with this string as `type`.
    Text(Cow<'static, str>),
    /// Any other value, which may change the answer.
    Other,
}

/// The longest string in a table.
const TEXT_BYTES_MAX: usize = 16;

/// Checks that `found` does not change the answer.
///
/// # Errors
/// It is not empty, not one of the `accepted` values, and not `false`; if `true` is accepted, `false` is a change, too.
pub(crate) fn check(param: &str, found: &Setting, accepted: &[Setting]) -> Result<(), ApiError> {
    let off = *found == Setting::Bool(false) && !accepted.contains(&Setting::Bool(true));
    if off || *found == Setting::Nothing || accepted.contains(found) {
        return Ok(());
    }
    Err(ApiError::invalid(param, Problem::Unsupported))
}

impl From<bool> for Setting {
    fn from(value: bool) -> Self {
        Self::Bool(value)
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

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Setting, E> {
        Ok(Setting::Bool(value))
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

/// An object's key: whether it is `type`.
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
    fn values_are_read_as_far_as_the_check_needs() {
        let text = |text: &'static str| Setting::from(text);
        for (json, expected) in [
            ("null", Setting::Nothing),
            (r#""""#, Setting::Nothing),
            ("[]", Setting::Nothing),
            ("{}", Setting::Nothing),
            ("false", Setting::Bool(false)),
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
    fn only_values_that_change_nothing_are_accepted() {
        let read = |json: &str| serde_json::from_str::<Setting>(json).expect("JSON");
        let passes = |json, accepted: &[Setting]| check("x", &read(json), accepted).is_ok();
        assert!(passes("null", &[]) && passes("false", &[]) && passes("{}", &[]));
        assert!(!passes("0", &[]) && !passes("true", &[]) && !passes(r#""x""#, &[]));
        assert!(passes("true", &[true.into()]) && passes("null", &[true.into()]) && !passes("false", &[true.into()]));
        assert!(passes("0", &[0.into()]) && passes("0.0", &[0.into()]) && !passes("1", &[0.into()]));
        assert!(passes(r#""none""#, &["none".into()]) && !passes(r#""auto""#, &["none".into()]));
    }
}
