//! Parameters of OpenAI's API and of other servers that this server does not support. A request with such a parameter is refused, unless
//! the parameter's value does not change the answer.

use super::fields::{Reader, readable};
use crate::error::{Problem, RequestError};
use serde::{
    Deserialize,
    de::{self, IntoDeserializer, MapAccess, SeqAccess, Visitor, value},
};

/// The value of an unsupported parameter, reduced to the information that decides whether the value is accepted.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Setting {
    /// The parameter is absent or null, or is an empty string, list or object.
    #[default]
    Nothing,
    Bool(bool),
    Number(f64),
    /// A short string, a list of only this string, or an object with this string as `type`.
    Text(String),
    /// Any other value, which may change the answer.
    Other,
}

/// The maximum length of a [`Setting::Text`] in bytes. Longer strings are [`Setting::Other`].
const TEXT_BYTES_MAX: usize = 16;

/// Checks that the value `found` does not change the answer.
///
/// # Errors
/// The value is neither empty, nor one of `accepted`, nor `false`. If `true` is accepted, `false` changes the answer and is an error.
pub fn check(param: &str, found: &Setting, accepted: &[Setting]) -> Result<(), RequestError> {
    let off = *found == Setting::Bool(false) && !accepted.contains(&Setting::Bool(true));
    if off || *found == Setting::Nothing || accepted.contains(found) {
        return Ok(());
    }
    let problem = if param == "chat_template" { Problem::Template } else { Problem::Unsupported };
    Err(RequestError::invalid(param, problem))
}

/// Converts an accepted value to a [`Setting`], as the value of a request would be converted.
pub fn accepted<'de>(value: impl IntoDeserializer<'de, value::Error>) -> Setting {
    Setting::deserialize(value.into_deserializer()).expect("the tables have only numbers, texts and booleans")
}

readable! {
    [] Setting, deserialize_any, "any value",

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
            _ if text.len() <= TEXT_BYTES_MAX => Setting::Text(text.to_owned()),
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
        while let Some(key) = object.next_key::<String>()? {
            let value: Setting = object.next_value()?;
            match (value, &whole) {
                (kind @ Setting::Text(_), _) if key == "type" => whole = kind,
                (_, Setting::Text(_)) if key != "type" => {}
                _ => whole = Setting::Other,
            }
        }
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_value_becomes_the_setting_that_the_check_compares() {
        let text = |text: &str| Setting::Text(text.to_owned());
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
    fn unsupported_parameter_is_accepted_only_if_its_value_has_no_effect() {
        let read = |json: &str| serde_json::from_str::<Setting>(json).expect("the setting is JSON");
        let passes = |json, table: &[Setting]| check("x", &read(json), table).is_ok();
        assert!(passes("null", &[]) && passes("false", &[]) && passes("{}", &[]));
        assert!(!passes("0", &[]) && !passes("true", &[]) && !passes(r#""x""#, &[]));
        assert!(passes("true", &[accepted(true)]) && passes("null", &[accepted(true)]) && !passes("false", &[accepted(true)]));
        assert!(passes("0", &[accepted(0)]) && passes("0.0", &[accepted(0)]) && !passes("1", &[accepted(0)]));
        assert!(passes(r#""none""#, &[accepted("none")]) && !passes(r#""auto""#, &[accepted("none")]));
    }
}
