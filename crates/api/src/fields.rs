//! Fields that have a bounded size or accept more than one JSON type. Each has a visitor. The errors of a visitor name the expected types,
//! which the errors of an untagged enum would not.

use serde::{
    Deserialize,
    de::{self, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use std::marker::PhantomData;
use tandem_kv::TokenId;

pub(crate) const PROMPTS_MAX: usize = 128;
/// The maximum number of messages in a conversation. Their length is limited only by the maximum size of a body.
pub(crate) const MESSAGES_MAX: usize = 16_384;
/// The maximum number of entries of `logit_bias`, as in OpenAI's API.
pub(crate) const LOGIT_BIASES_MAX: usize = 1024;
pub(crate) const STOP_TOKENS_MAX: usize = 256;
/// The maximum number of stop strings. No client needs more, and searching the text for this many at every token is fast.
pub(crate) const STOPS_MAX: usize = 16;

/// The maximum number of tokens in `allowed_token_ids`: more than the vocabulary of any model.
pub(crate) const ALLOWED_TOKENS_MAX: usize = 1 << 20;
pub(crate) const BAD_WORDS_MAX: usize = 128;
/// The maximum number of tokens in `logprob_token_ids`, as many as there may be alternatives.
pub(crate) const LOGPROB_TOKENS_MAX: usize = 20;

/// A list that keeps at most `MAX` + 1 elements and skips all others. By the extra element, a later check knows that the list is too long.
pub struct Bounded<T, const MAX: usize>(pub Vec<T>);

/// An object whose values are numbers. It keeps at most `MAX` + 1 entries, like [`Bounded`]. The entries keep their order, and several may
/// have the same name.
#[derive(Default)]
pub struct BoundedMap<const MAX: usize>(pub Vec<(String, f64)>);

/// The field `stop`, which is one string or a list of strings.
#[derive(Default)]
pub struct Stop(pub Vec<String>);

/// The field `prompt`, which is one prompt or a list of prompts.
#[cfg_attr(test, derive(Debug, PartialEq))]
pub struct Prompts(pub Vec<Input>);

/// A prompt.
#[cfg_attr(test, derive(Debug, PartialEq))]
pub enum Input {
    /// A text, which is not encoded yet.
    Text(String),
    /// Token ids.
    Tokens(Vec<TokenId>),
}

/// An integer. A number such as `5.0` is accepted as an integer, because some clients write all numbers with a decimal point.
#[derive(Clone, Copy)]
pub struct Whole(pub i64);

/// A token's id, which may be written as `5.0` as well.
pub struct Id(pub TokenId);

/// Returns the ids of a list.
pub fn ids(list: Vec<Id>) -> Vec<TokenId> {
    list.into_iter().map(|Id(id)| id).collect()
}

impl<T, const MAX: usize> Default for Bounded<T, MAX> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

/// The visitor that reads a `T`.
pub(crate) struct Reader<T>(pub(crate) PhantomData<T>);

/// Implements `Deserialize` for a type. Takes the methods of the type's visitor, and the expected types that its errors name.
macro_rules! readable {
    ([$($generics:tt)*] $value:ty, $deserialize:ident, $expected:literal, $($methods:tt)*) => {
        impl<'de, $($generics)*> serde::Deserialize<'de> for $value {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                deserializer.$deserialize(Reader(std::marker::PhantomData::<Self>))
            }
        }

        impl<'de, $($generics)*> Visitor<'de> for Reader<$value> {
            type Value = $value;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str($expected)
            }

            $($methods)*
        }
    };
}
pub(crate) use readable;

readable! {
    [T: Deserialize<'de>, const MAX: usize] Bounded<T, MAX>, deserialize_seq, "a sequence",

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
        rest(Vec::new(), list, MAX).map(Bounded)
    }
}

readable! {
    [const MAX: usize] BoundedMap<MAX>, deserialize_map, "a map",

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

readable! {
    [] Stop, deserialize_any, "a string or a list of strings",

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Stop, E> {
        Ok(Stop(vec![text.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Stop, A::Error> {
        rest(Vec::new(), list, STOPS_MAX).map(Stop)
    }
}

readable! {
    [] Whole, deserialize_any, "a whole number",

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Whole, E> {
        Ok(Whole(number))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Whole, E> {
        let invalid = |_| E::invalid_value(de::Unexpected::Unsigned(number), &self);
        number.try_into().map(Whole).map_err(invalid)
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Whole, E> {
        /// The largest number such that an f64 represents it and all smaller natural numbers exactly.
        const EXACT: f64 = (1_u64 << f64::MANTISSA_DIGITS) as f64;
        if number.fract() == 0.0 && number.abs() <= EXACT {
            return Ok(Whole(number as i64));
        }
        Err(E::invalid_type(de::Unexpected::Float(number), &self))
    }
}

/// The first element of the list `prompt`. It determines the type of the other elements.
enum First {
    Text(String),
    Token(Id),
    Tokens(Vec<Id>),
}

readable! {
    [] Id, deserialize_any, "a token id",

    fn visit_u64<E: de::Error>(self, id: u64) -> Result<Id, E> {
        TokenId::try_from(id).map(Id).map_err(|_| E::invalid_value(de::Unexpected::Unsigned(id), &self))
    }

    fn visit_f64<E: de::Error>(self, id: f64) -> Result<Id, E> {
        let whole = id as TokenId;
        if f64::from(whole) == id { Ok(Id(whole)) } else { Err(E::invalid_value(de::Unexpected::Float(id), &self)) }
    }
}

readable! {
    [] First, deserialize_any, "a string, a token id or a list of token ids",

    fn visit_str<E: de::Error>(self, text: &str) -> Result<First, E> {
        Ok(First::Text(text.to_owned()))
    }

    fn visit_u64<E: de::Error>(self, id: u64) -> Result<First, E> {
        Reader(PhantomData::<Id>).visit_u64(id).map(First::Token)
    }

    fn visit_f64<E: de::Error>(self, id: f64) -> Result<First, E> {
        Reader(PhantomData::<Id>).visit_f64(id).map(First::Token)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<First, A::Error> {
        rest(Vec::new(), list, usize::MAX).map(First::Tokens)
    }
}

readable! {
    [] Prompts, deserialize_any, "a string, a list of strings, a list of token ids or a list of lists of token ids",

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts(vec![Input::Text(text.to_owned())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Prompts, A::Error> {
        Ok(Prompts(match list.next_element()? {
            None => Vec::new(),
            Some(First::Text(text)) => rest(vec![text], list, PROMPTS_MAX)?.into_iter().map(Input::Text).collect(),
            Some(First::Token(token)) => vec![Input::Tokens(ids(rest(vec![token], list, usize::MAX)?))],
            Some(First::Tokens(tokens)) => {
                rest(vec![tokens], list, PROMPTS_MAX)?.into_iter().map(|tokens| Input::Tokens(ids(tokens))).collect()
            }
        }))
    }
}

/// Appends the list's remaining elements until there are `max` + 1 elements. All later elements are skipped.
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
    use serde::Deserializer;

    #[test]
    fn prompt_may_be_one_or_several_texts_or_lists_of_token_ids() {
        let texts = |texts: &[&str]| texts.iter().map(|text| Input::Text((*text).to_owned())).collect();
        let cases: [(&str, Vec<Input>); 6] = [
            (r#""a""#, texts(&["a"])),
            (r#"["a", "b"]"#, texts(&["a", "b"])),
            ("[1, 2]", vec![Input::Tokens(vec![1, 2])]),
            ("[1.0, 2, 3e0]", vec![Input::Tokens(vec![1, 2, 3])]),
            ("[[1], [2, 3]]", vec![Input::Tokens(vec![1]), Input::Tokens(vec![2, 3])]),
            ("[]", texts(&[])),
        ];
        for (json, expected) in cases {
            assert_eq!(serde_json::from_str::<Prompts>(json).expect(json).0, expected, "{json}");
        }
        for json in ["1", "{}", r#"["a", 1]"#, r#"[1, "a"]"#, "[[1], 2]", "[-1]", "[4294967296]", "[1.5]", "[[[1]]]", "true"] {
            assert!(serde_json::from_str::<Prompts>(json).is_err(), "{json}");
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
    fn list_beyond_its_limit_is_built_only_up_to_the_limit() {
        thread_local!(static BUILT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) });
        struct Counted;
        impl<'de> Deserialize<'de> for Counted {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                BUILT.set(BUILT.get() + 1);
                IgnoredAny::deserialize(deserializer).map(|_| Self)
            }
        }
        let list = format!("[{}]", vec!["{}"; 100_000].join(","));
        let Bounded(built) = serde_json::from_str::<Bounded<Counted, 10>>(&list).expect("the text is JSON");
        assert_eq!((built.len(), BUILT.get()), (11, 11));
        let object = format!("{{{}}}", vec![r#""1":2"#; 100_000].join(","));
        let BoundedMap(built) = serde_json::from_str::<BoundedMap<10>>(&object).expect("the text is JSON");
        assert_eq!(built.len(), 11);
        let Stop(built) = serde_json::from_str(&format!("[{}]", vec![r#""a""#; 100_000].join(","))).expect("the text is JSON");
        assert_eq!(built.len(), STOPS_MAX + 1);
        for element in [r#""a""#, "[1]"] {
            let list = format!("[{}]", vec![element; 100_000].join(","));
            let Prompts(built) = serde_json::from_str(&list).expect("the text is JSON");
            assert_eq!(built.len(), PROMPTS_MAX + 1, "of {element}");
        }
        // Skipped elements must be valid JSON, too.
        assert!(serde_json::from_str::<Bounded<Counted, 1>>("[1,2,3,x]").is_err());
    }
}
