//! The types of a tool's parameters, by which a text becomes a number, a list and so on.

use crate::chat::output::json::{constant, repaired};
use serde_json::Value;

/// The most references that are followed in a parameter's schema.
const REFERENCES_MAX: usize = 16;

/// The types that a schema allows. No type: it allows every type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Types {
    text: bool,
    null: bool,
    boolean: bool,
    integer: bool,
    number: bool,
    list: bool,
    object: bool,
}

impl Types {
    pub(super) const TEXT: Self =
        Self { text: true, null: false, boolean: false, integer: false, number: false, list: false, object: false };

    /// Returns the types of a tool's parameter. A parameter that the tool does not have is a text.
    pub(super) fn of(parameters: &Value, name: &str) -> Self {
        let Some(schema) = parameters["properties"].get(name) else { return Self::TEXT };
        let mut types = Self::default();
        types.add(schema, parameters, &mut { REFERENCES_MAX });
        types
    }

    fn add(&mut self, schema: &Value, root: &Value, references: &mut usize) {
        if let Some(target) = schema["$ref"].as_str().and_then(|target| target.strip_prefix('#'))
            && *references > 0
        {
            *references -= 1;
            self.add(root.pointer(target).unwrap_or(&Value::Null), root, references);
        }
        match &schema["type"] {
            Value::String(name) => self.add_named(name),
            Value::Array(names) => names.iter().filter_map(Value::as_str).for_each(|name| self.add_named(name)),
            _ => {}
        }
        schema["enum"].as_array().into_iter().flatten().chain(schema.get("const")).for_each(|value| self.add_of(value));
        for list in ["anyOf", "oneOf", "allOf"] {
            schema[list].as_array().into_iter().flatten().for_each(|schema| self.add(schema, root, references));
        }
    }

    fn add_named(&mut self, name: &str) {
        match name {
            "string" => self.text = true,
            "null" => self.null = true,
            "boolean" => self.boolean = true,
            "integer" => self.integer = true,
            "number" => self.number = true,
            "array" => self.list = true,
            "object" => self.object = true,
            _ => {}
        }
    }

    fn add_of(&mut self, value: &Value) {
        match value {
            Value::Null => self.null = true,
            Value::Bool(_) => self.boolean = true,
            Value::Number(number) if number.is_f64() => self.number = true,
            Value::Number(_) => self.integer = true,
            Value::String(_) => self.text = true,
            Value::Array(_) => self.list = true,
            Value::Object(_) => self.object = true,
        }
    }

    /// Converts a text to a value of these types. A text that is none remains a text.
    pub(super) fn typed(self, text: &str) -> Value {
        let is_any = self == Self::default();
        let trimmed = text.trim();
        let word = match constant(trimmed) {
            word if self.boolean && word.eq_ignore_ascii_case("true") => "true",
            word if self.boolean && word.eq_ignore_ascii_case("false") => "false",
            word => word,
        };
        let parsed = serde_json::from_str(word).ok().or_else(|| repaired(trimmed));
        match parsed {
            // Python's `None` is no value of another type.
            Some(Value::Null) if is_any || self.null || !self.text => Value::Null,
            Some(value @ Value::Bool(_)) if is_any || self.boolean => value,
            Some(Value::Number(number)) if self.integer && !self.number && number.is_f64() => {
                whole(&number).unwrap_or_else(|| text.into())
            }
            Some(value @ Value::Number(_)) if is_any || self.integer || self.number => value,
            Some(value @ Value::Array(_)) if is_any || self.list => value,
            Some(value @ Value::Object(_)) if is_any || self.object => value,
            _ => text.into(),
        }
    }
}

/// Returns a number without a fraction as an integer.
fn whole(number: &serde_json::Number) -> Option<Value> {
    let float = number.as_f64()?;
    let is_whole = float.fract() == 0.0 && float.abs() < 9e15;
    is_whole.then(|| (float as i64).into())
}
