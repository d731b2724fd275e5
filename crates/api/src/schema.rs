//! The JSON schemas of requests, made from the types and the limits with which their fields are checked.

use super::{
    fields::{Bounded, BoundedMap, Id, PROMPTS_MAX, Prompts, STOPS_MAX, Stop, Whole},
    limits::{NAME_CHARS_MAX, RESERVED, Range, STOP_CHARS_MAX, VARIABLES_MAX},
    unsupported::Setting,
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema, transform::Transform};
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// A placeholder in a schema. Its value says which limits of the served models [`OfModels`] inserts in its place.
pub(crate) const SERVED: &str = "x-served";
/// The value of [`SERVED`] in the schema of a request that need not name the model if there is only one.
pub(crate) const NAMES_MODEL: &str = "names model";

/// A limit on a field's values.
pub trait Limit {
    /// Adds the limit to the schema of a field's type.
    fn apply(&self, schema: &mut Schema);
}

/// At most this many characters, and at least one.
pub struct Chars(pub usize);
/// A whole number of at least this value.
pub struct AtLeast(pub i64);
/// A number of tokens of at least this value, which fits into the context.
pub struct TokenCount(pub i64);
/// A list with at least one element.
pub struct NotEmpty;
/// A limit on each element of a list.
pub struct Each<L>(pub L);
/// The id of a token.
pub struct TokenIds;
/// The id of a served model.
pub struct ModelId;
pub struct OneOf(pub &'static [&'static str]);
/// Both limits.
pub struct Both<A, B>(pub A, pub B);
/// A limit on the numbers of an object.
pub struct Entries<L>(pub L);
/// A number of tokens, or -1.
pub struct Truncated;
/// A value whose JSON schema the function returns.
pub struct Form(pub fn() -> Value);
/// A list of tools.
pub struct Tools;
/// A reasoning effort that is valid for all served models.
pub struct Efforts;
/// Variables of a chat template.
pub struct Variables;

fn insert(schema: &mut Schema, name: &str, value: impl Into<Value>) {
    schema.insert(name.to_owned(), value.into());
}

impl Limit for Range {
    fn apply(&self, schema: &mut Schema) {
        for (name, bound) in [("minimum", self.low), ("maximum", self.high)] {
            let whole = bound.fract() == 0.0;
            insert(schema, name, if whole { json!(bound as i64) } else { json!(bound) });
        }
    }
}

impl Limit for Chars {
    fn apply(&self, schema: &mut Schema) {
        insert(schema, "minLength", 1);
        insert(schema, "maxLength", self.0);
    }
}

impl Limit for AtLeast {
    fn apply(&self, schema: &mut Schema) {
        insert(schema, "minimum", self.0);
    }
}

impl Limit for TokenCount {
    fn apply(&self, schema: &mut Schema) {
        AtLeast(self.0).apply(schema);
        insert(schema, SERVED, "context");
    }
}

impl Limit for NotEmpty {
    fn apply(&self, schema: &mut Schema) {
        insert(schema, "minItems", 1);
    }
}

impl<L: Limit> Limit for Each<L> {
    fn apply(&self, schema: &mut Schema) {
        if let Some(items) = schema.get_mut("items").and_then(|items| <&mut Schema>::try_from(items).ok()) {
            self.0.apply(items);
        }
    }
}

impl Limit for TokenIds {
    fn apply(&self, schema: &mut Schema) {
        insert(schema, SERVED, "token");
    }
}

impl Limit for ModelId {
    fn apply(&self, schema: &mut Schema) {
        insert(schema, SERVED, "model");
    }
}

impl Limit for OneOf {
    fn apply(&self, schema: &mut Schema) {
        insert(schema, "enum", json!(self.0));
    }
}

impl<A: Limit, B: Limit> Limit for Both<A, B> {
    fn apply(&self, schema: &mut Schema) {
        self.0.apply(schema);
        self.1.apply(schema);
    }
}

impl<L: Limit> Limit for Entries<L> {
    fn apply(&self, schema: &mut Schema) {
        if let Some(numbers) = schema.get_mut("additionalProperties").and_then(|numbers| <&mut Schema>::try_from(numbers).ok()) {
            self.0.apply(numbers);
        }
    }
}

impl Limit for Truncated {
    fn apply(&self, schema: &mut Schema) {
        insert(schema, "minimum", -1);
        insert(schema, "not", json!({ "const": 0 }));
    }
}

impl Limit for Form {
    fn apply(&self, schema: &mut Schema) {
        if let Ok(form) = Schema::try_from((self.0)()) {
            *schema = form;
        }
    }
}

impl Limit for Tools {
    fn apply(&self, schema: &mut Schema) {
        let parameters = json!({ "type": ["object", "null"], "description": "The JSON schema of the arguments." });
        let name = json!({ "type": "string", "minLength": 1, "maxLength": NAME_CHARS_MAX });
        let function = json!({
            "type": "object",
            "properties": {
                "name": name, "parameters": parameters, "strict": { "type": ["boolean", "null"] },
            },
            "required": ["name"],
        });
        let properties = json!({ "type": { "enum": ["function", null] }, "function": function });
        insert(schema, "items", json!({ "type": "object", "properties": properties, "required": ["function"] }));
    }
}

impl Limit for Efforts {
    fn apply(&self, schema: &mut Schema) {
        insert(schema, SERVED, "effort");
    }
}

impl Limit for Variables {
    fn apply(&self, schema: &mut Schema) {
        insert(schema, "maxProperties", VARIABLES_MAX);
        insert(schema, "propertyNames", json!({ "not": { "enum": RESERVED } }));
    }
}

/// Adds to schemas what depends on the served models: the ids, the range of token ids, the context length, the reasoning efforts.
#[derive(Clone)]
pub struct OfModels {
    /// The ids of the models.
    pub ids: Vec<String>,
    /// The number of token ids.
    pub vocab_size: usize,
    /// The longest context in tokens.
    pub context_length: u32,
    /// The reasoning efforts that are valid for all models.
    pub efforts: &'static [&'static str],
    /// Whether a model reads images.
    pub images: bool,
}

impl Transform for OfModels {
    fn transform(&mut self, schema: &mut Schema) {
        match schema.remove(SERVED).as_ref().and_then(Value::as_str) {
            Some("token") => {
                insert(schema, "minimum", 0);
                insert(schema, "maximum", self.vocab_size - 1);
            }
            Some("token names") => insert(schema, "propertyNames", json!({ "pattern": below(self.vocab_size) })),
            Some("image") if !self.images => *schema = false.into(),
            Some("context") => insert(schema, "maximum", self.context_length),
            Some("effort") => {
                let efforts = self.efforts.iter().map(|effort| json!(effort)).chain([Value::Null]);
                insert(schema, "enum", efforts.collect::<Vec<_>>());
            }
            Some(NAMES_MODEL) if self.ids.len() > 1 => {
                if let Some(required) = schema.ensure_object().entry("required").or_insert_with(|| json!([])).as_array_mut() {
                    required.push("model".into());
                }
            }
            Some("model") => {
                let mut ids: Vec<Value> = self.ids.iter().map(|id| json!(id)).collect();
                insert(schema, "examples", ids.clone());
                if schema.get("type").and_then(Value::as_array).is_some_and(|types| types.contains(&json!("null"))) {
                    ids.push(Value::Null);
                }
                insert(schema, "enum", ids);
            }
            _ => {}
        }
    }
}

/// Returns a regular expression for the decimal numbers below `limit`, which is at least 1.
fn below(limit: usize) -> String {
    let largest = (limit - 1).to_string();
    let len = largest.len();
    // The numbers with fewer digits; and, for each digit of the largest number, those with the same digits before it and a smaller digit in
    // its place.
    let mut forms: Vec<String> = (1..len).map(|digits| format!("[0-9]{{{digits}}}")).collect();
    for (at, digit) in largest.char_indices() {
        let smaller = char::from_u32(u32::from(digit) - 1).filter(char::is_ascii_digit);
        if let Some(smaller) = smaller {
            forms.push(format!("{}[0-{smaller}][0-9]{{{}}}", &largest[..at], len - at - 1));
        }
    }
    forms.push(largest);
    format!("^0*({})$", forms.join("|"))
}

/// The schema of an object, whose fields are added one by one.
#[derive(Default)]
pub struct ObjectSchema {
    properties: Map<String, Value>,
    required: Vec<&'static str>,
    rules: Vec<Value>,
}

impl ObjectSchema {
    /// Adds a field that may be absent or null.
    pub fn optional<T: JsonSchema>(&mut self, generator: &mut SchemaGenerator, name: &'static str, limits: &[&dyn Limit]) {
        let schema = limited::<T>(generator, limits);
        let nullable = match schema.get("type") {
            Some(Value::String(kind)) if schema.get("enum").is_none() => {
                let types = json!([kind, "null"]);
                let mut schema = schema;
                insert(&mut schema, "type", types);
                schema
            }
            _ => json_schema!({ "anyOf": [schema, { "type": "null" }] }),
        };
        self.properties.insert(name.to_owned(), nullable.into());
    }

    pub fn required<T: JsonSchema>(&mut self, generator: &mut SchemaGenerator, name: &'static str, limits: &[&dyn Limit]) {
        self.properties.insert(name.to_owned(), limited::<T>(generator, limits).into());
        self.required.push(name);
    }

    /// Adds an unsupported field, which is accepted if its value has no effect.
    pub fn unsupported(&mut self, generator: &mut SchemaGenerator, name: &'static str, accepted: &[Setting]) {
        let schema = match accepted {
            [] => generator.subschema_for::<Setting>(),
            [Setting::Bool(true)] => without_effect(json!({ "const": true })),
            [Setting::Bool(false) | Setting::Nothing | Setting::Other] => generator.subschema_for::<Setting>(),
            [Setting::Number(number)] => without_effect_or_false(json!({ "const": number })),
            [Setting::Text(text)] | [Setting::Text(text), ..] => without_effect_or_false(json!({ "anyOf": [
                { "const": text },
                { "type": "array", "minItems": 1, "items": { "const": text } },
                { "type": "object", "properties": { "type": { "const": text } }, "required": ["type"] },
            ] })),
            [_, ..] => generator.subschema_for::<Setting>(),
        };
        self.properties.insert(name.to_owned(), schema.into());
    }

    /// Adds a field that must be absent or null.
    pub fn forbid(&mut self, name: &'static str) {
        self.properties.insert(name.to_owned(), json!({ "type": "null" }));
    }

    /// Adds a rule: the object must satisfy one of the schemas, or both. Generators of requests understand this form better than `if`.
    pub fn either(&mut self, one: Value, other: Value) {
        self.rules.push(json!({ "anyOf": [one, other] }));
    }

    pub fn finish(self) -> Schema {
        let Self { properties, required, rules } = self;
        let mut schema = json_schema!({ "type": "object", "properties": properties, "required": required });
        if !rules.is_empty() {
            insert(&mut schema, "allOf", rules);
        }
        schema
    }
}

fn limited<T: JsonSchema>(generator: &mut SchemaGenerator, limits: &[&dyn Limit]) -> Schema {
    let mut schema = generator.subschema_for::<T>();
    limits.iter().for_each(|limit| limit.apply(&mut schema));
    schema
}

/// Returns the schema of values that are empty, or that the schema `accepted` allows.
fn without_effect(accepted: Value) -> Schema {
    json_schema!({ "anyOf": [
        { "type": "null" },
        { "type": "string", "maxLength": 0 },
        { "type": "array", "maxItems": 0 },
        { "type": "object", "maxProperties": 0 },
        accepted,
    ] })
}

fn without_effect_or_false(accepted: Value) -> Schema {
    without_effect(json!({ "anyOf": [{ "const": false }, accepted] }))
}

/// Implements `JsonSchema` for a type that has a visitor.
macro_rules! described {
    ([$($generics:tt)*] $type:ty, $generator:ident => $schema:expr) => {
        impl<$($generics)*> JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema($generator: &mut SchemaGenerator) -> Schema {
                $schema
            }
        }
    };
}
pub(crate) use described;

described! { [] Whole, _generator => json_schema!({ "type": "integer", "minimum": i64::MIN, "maximum": i64::MAX }) }

described! {
    [T: JsonSchema, const MAX: usize] Bounded<T, MAX>,
    generator => json_schema!({ "type": "array", "items": generator.subschema_for::<T>(), "maxItems": MAX })
}

described! {
    [const MAX: usize] BoundedMap<MAX>,
    _generator => json_schema!({
        "type": "object", "maxProperties": MAX, "additionalProperties": { "type": "number" }, SERVED: "token names",
    })
}

described! {
    [] Stop, _generator => {
        let stop = json!({ "type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX });
        json_schema!({ "anyOf": [stop, { "type": "array", "maxItems": STOPS_MAX, "items": stop }] })
    }
}

described! {
    [] Prompts, _generator => {
        let text = json!({ "type": "string", "minLength": 1 });
        let tokens = json!({ "type": "array", "minItems": 1, "items": { "type": "integer", SERVED: "token" } });
        let several = |of: &Value| json!({ "type": "array", "minItems": 1, "maxItems": PROMPTS_MAX, "items": of });
        json_schema!({ "anyOf": [text, several(&text), tokens, several(&tokens)] })
    }
}

described! { [] Id, _generator => json_schema!({ "type": "integer", SERVED: "token" }) }

impl JsonSchema for Setting {
    fn schema_name() -> Cow<'static, str> {
        "Unsupported".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let mut schema = without_effect(json!({ "const": false }));
        insert(&mut schema, "description", "A parameter that is not supported. Only values without effect are accepted.");
        schema
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    /// Returns the numbers that the regular expression of [`below`] matches.
    fn matching(limit: usize, numbers: Range<usize>) -> Vec<usize> {
        let regex = regex::Regex::new(&below(limit)).expect("the expression is valid");
        numbers.filter(|number| regex.is_match(&number.to_string())).collect()
    }

    #[test]
    fn expression_matches_exactly_the_numbers_below_the_limit() {
        for limit in [1, 2, 9, 10, 11, 100, 101, 258, 1_000, 4_096, 9_999] {
            assert_eq!(matching(limit, 0..12_000), (0..limit).collect::<Vec<_>>(), "below {limit}");
        }
        let regex = regex::Regex::new(&below(258)).expect("the expression is valid");
        assert!(regex.is_match("007") && regex.is_match("0"));
        assert!(["", "-1", "+1", "1 ", "258", "0258"].iter().all(|text| !regex.is_match(text)));
    }
}
