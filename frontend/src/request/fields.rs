//! Fields that may have more than one JSON type. Each is read by a visitor that names the expected types, because an untagged
//! enum would only say that nothing matched.

use serde::{
    Deserialize, Deserializer,
    de::{self, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use std::{fmt, marker::PhantomData};
use tandem_kv::TokenId;

/// Prompts in one request.
pub(super) const PROMPTS_MAX: usize = 128;
/// More stop strings than any client needs, and few enough to search for all at every token.
pub(super) const STOPS_MAX: usize = 16;

/// A list that builds at most one element more than `MAX`: enough for a check of its length to refuse it.
pub(crate) struct Bounded<T, const MAX: usize>(pub(crate) Vec<T>);

/// An object of numbers, bounded in the same way. Its members are in their order, duplicates included.
#[derive(Default)]
pub(crate) struct BoundedMap<const MAX: usize>(pub(crate) Vec<(String, f64)>);

/// A message's content as one text: content parts are joined by line feeds, null is empty.
#[derive(Default)]
pub(crate) struct Content(pub(crate) String);

/// `stop`: one string or several.
#[derive(Default)]
pub(crate) struct Stop(pub(crate) Vec<String>);

/// `prompt`: one prompt or several, each as text or token ids.
#[cfg_attr(test, derive(Debug, PartialEq))]
pub(crate) enum PromptInput {
    Texts(Vec<String>),
    Tokens(Vec<Vec<TokenId>>),
}

/// An integer; `5.0` is one, too, because some clients write all numbers so.
#[derive(Clone, Copy)]
pub(crate) struct Whole(pub(crate) i64);

#[derive(Deserialize)]
struct RawPart {
    r#type: String,
    text: Option<String>,
}

#[derive(Deserialize)]
#[serde(try_from = "RawPart")]
struct TextPart(String);

impl TryFrom<RawPart> for TextPart {
    type Error = PartError;

    fn try_from(part: RawPart) -> Result<Self, PartError> {
        if part.r#type != "text" {
            return Err(PartError::Kind);
        }
        part.text.map(Self).ok_or(PartError::NoText)
    }
}

#[derive(Debug, thiserror::Error)]
enum PartError {
    #[error("only content parts of type 'text' are supported")]
    Kind,
    #[error("a content part of type 'text' needs the field 'text'")]
    NoText,
}

impl<T, const MAX: usize> Default for Bounded<T, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for Bounded<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListVisitor<T, const MAX: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for ListVisitor<T, MAX> {
            type Value = Bounded<T, MAX>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a sequence")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
                rest(Vec::new(), list, MAX).map(Bounded)
            }
        }
        deserializer.deserialize_seq(ListVisitor(PhantomData))
    }
}

impl<'de, const MAX: usize> Deserialize<'de> for BoundedMap<MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapVisitor<const MAX: usize>;
        impl<'de, const MAX: usize> Visitor<'de> for MapVisitor<MAX> {
            type Value = BoundedMap<MAX>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a map")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while members.len() <= MAX
                    && let Some(member) = object.next_entry()?
                {
                    members.push(member);
                }
                while object.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(BoundedMap(members))
            }
        }
        deserializer.deserialize_map(MapVisitor)
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ContentVisitor;
        impl<'de> Visitor<'de> for ContentVisitor {
            type Value = Content;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string, a list of content parts or null")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Content, E> {
                Ok(Content(text.to_owned()))
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<Content, E> {
                Ok(Content(text))
            }

            fn visit_unit<E: de::Error>(self) -> Result<Content, E> {
                Ok(Content::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Content, A::Error> {
                let mut text = String::new();
                let mut first = true;
                while let Some(TextPart(part)) = parts.next_element()? {
                    if !std::mem::take(&mut first) {
                        text.push('\n');
                    }
                    text.push_str(&part);
                }
                Ok(Content(text))
            }
        }
        deserializer.deserialize_any(ContentVisitor)
    }
}

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StopVisitor;
        impl<'de> Visitor<'de> for StopVisitor {
            type Value = Stop;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string or a list of strings")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Stop, E> {
                Ok(Stop(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Stop, A::Error> {
                rest(Vec::new(), list, STOPS_MAX).map(Stop)
            }
        }
        deserializer.deserialize_any(StopVisitor)
    }
}

impl<'de> Deserialize<'de> for Whole {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct WholeVisitor;
        impl Visitor<'_> for WholeVisitor {
            type Value = Whole;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a whole number")
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Whole, E> {
                Ok(Whole(number))
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Whole, E> {
                let invalid = |_| E::invalid_value(de::Unexpected::Unsigned(number), &self);
                number.try_into().map(Whole).map_err(invalid)
            }

            fn visit_f64<E: de::Error>(self, number: f64) -> Result<Whole, E> {
                /// Beyond it an f64 cannot represent every integer.
                const EXACT: f64 = (1_u64 << f64::MANTISSA_DIGITS) as f64;
                if number.fract() == 0.0 && number.abs() <= EXACT {
                    return Ok(Whole(number as i64));
                }
                Err(E::invalid_type(de::Unexpected::Float(number), &self))
            }
        }
        deserializer.deserialize_any(WholeVisitor)
    }
}

/// The first element of a list, which decides what the list holds.
enum First {
    Text(String),
    Token(TokenId),
    Tokens(Vec<TokenId>),
}

impl<'de> Deserialize<'de> for First {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FirstVisitor;
        impl<'de> Visitor<'de> for FirstVisitor {
            type Value = First;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string, a token id or a list of token ids")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<First, E> {
                Ok(First::Text(text.to_owned()))
            }

            fn visit_u64<E: de::Error>(self, id: u64) -> Result<First, E> {
                let invalid = || E::invalid_value(de::Unexpected::Unsigned(id), &"a token id");
                TokenId::try_from(id).map(First::Token).map_err(|_| invalid())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<First, A::Error> {
                rest(Vec::new(), list, usize::MAX).map(First::Tokens)
            }
        }
        deserializer.deserialize_any(FirstVisitor)
    }
}

impl<'de> Deserialize<'de> for PromptInput {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptVisitor;
        impl<'de> Visitor<'de> for PromptVisitor {
            type Value = PromptInput;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string, a list of strings, a list of token ids or a list of lists of token ids")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<PromptInput, E> {
                Ok(PromptInput::Texts(vec![text.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptInput, A::Error> {
                Ok(match list.next_element()? {
                    None => PromptInput::Texts(Vec::new()),
                    Some(First::Text(text)) => PromptInput::Texts(rest(vec![text], list, PROMPTS_MAX)?),
                    Some(First::Token(token)) => PromptInput::Tokens(vec![rest(vec![token], list, usize::MAX)?]),
                    Some(First::Tokens(tokens)) => PromptInput::Tokens(rest(vec![tokens], list, PROMPTS_MAX)?),
                })
            }
        }
        deserializer.deserialize_any(PromptVisitor)
    }
}

/// Builds the elements of a list, up to one more than `max`, and skips the others.
fn rest<'de, T: Deserialize<'de>, A: SeqAccess<'de>>(mut elements: Vec<T>, mut list: A, max: usize) -> Result<Vec<T>, A::Error> {
    while elements.len() <= max {
        let Some(element) = list.next_element()? else { return Ok(elements) };
        elements.push(element);
    }
    while list.next_element::<IgnoredAny>()?.is_some() {}
    Ok(elements)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_read_from_every_json_type() {
        let texts = |texts: &[&str]| PromptInput::Texts(texts.iter().map(|text| (*text).to_owned()).collect());
        let cases = [
            (r#""a""#, texts(&["a"])),
            (r#"["a", "b"]"#, texts(&["a", "b"])),
            ("[1, 2]", PromptInput::Tokens(vec![vec![1, 2]])),
            ("[[1], [2, 3]]", PromptInput::Tokens(vec![vec![1], vec![2, 3]])),
            ("[]", texts(&[])),
        ];
        for (json, expected) in cases {
            assert_eq!(serde_json::from_str::<PromptInput>(json).expect(json), expected, "{json}");
        }
        for json in ["1", "{}", r#"["a", 1]"#, r#"[1, "a"]"#, "[[1], 2]", "[-1]", "[4294967296]", "[1.5]", "[[[1]]]", "true"] {
            assert!(serde_json::from_str::<PromptInput>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn integers_may_be_written_as_floats() {
        for (json, expected) in [("5", 5), ("5.0", 5), ("-1", -1), ("1e3", 1000), ("-0.0", 0)] {
            assert_eq!(serde_json::from_str::<Whole>(json).expect(json).0, expected, "{json}");
        }
        for json in ["1.5", "1e30", "18446744073709551615", "true", "\"5\"", "[5]"] {
            let error = serde_json::from_str::<Whole>(json).map(|_| ()).expect_err(json);
            assert!(error.to_string().contains("expected a whole number"), "{json}: {error}");
        }
    }

    #[test]
    fn contents_are_joined_into_one_text() {
        let cases = [
            (r#""a""#, "a"),
            ("null", ""),
            ("[]", ""),
            (r#"[{"type":"text","text":"a"},{"type":"text","text":""},{"type":"text","text":"b","x":1}]"#, "a\n\nb"),
        ];
        for (json, expected) in cases {
            assert_eq!(serde_json::from_str::<Content>(json).expect(json).0, expected, "{json}");
        }
        for json in ["1", "{}", r#"["a"]"#, r#"[{"type":"image_url"}]"#, r#"[{"type":"text"}]"#, r#"[{"text":"a"}]"#] {
            assert!(serde_json::from_str::<Content>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn long_list_is_built_only_as_far_as_its_refusal_needs() {
        thread_local!(static BUILT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) });
        struct Counted;
        impl<'de> Deserialize<'de> for Counted {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                BUILT.set(BUILT.get() + 1);
                IgnoredAny::deserialize(deserializer).map(|_| Self)
            }
        }
        let list = format!("[{}]", vec!["{}"; 100_000].join(","));
        let Bounded(built) = serde_json::from_str::<Bounded<Counted, 10>>(&list).expect("it is JSON");
        assert_eq!((built.len(), BUILT.get()), (11, 11));
        let object = format!("{{{}}}", vec![r#""1":2"#; 100_000].join(","));
        let BoundedMap(built) = serde_json::from_str::<BoundedMap<10>>(&object).expect("it is JSON");
        assert_eq!(built.len(), 11);
        let Stop(built) = serde_json::from_str(&format!("[{}]", vec![r#""a""#; 100_000].join(","))).expect("it is JSON");
        assert_eq!(built.len(), STOPS_MAX + 1);
        for element in [r#""a""#, "[1]"] {
            let list = format!("[{}]", vec![element; 100_000].join(","));
            let built = match serde_json::from_str(&list).expect("it is JSON") {
                PromptInput::Texts(texts) => texts.len(),
                PromptInput::Tokens(lists) => lists.len(),
            };
            assert_eq!(built, PROMPTS_MAX + 1, "of {element}");
        }
        // Skipped elements must be valid JSON, too.
        assert!(serde_json::from_str::<Bounded<Counted, 1>>("[1,2,3,x]").is_err());
    }
}
