//! The JSON schemas of the parameters that constrain the text of an answer.

use serde_json::{Value, json};

/// Returns the JSON schema of a string.
pub(crate) fn text_form() -> Value {
    json!({ "type": "string", "minLength": 1 })
}

/// Returns the JSON schema of a list of strings.
pub(crate) fn choices_form() -> Value {
    json!({ "type": "array", "minItems": 1, "items": { "type": "string" } })
}

/// Returns the JSON schema of a schema or a structural tag.
pub(crate) fn schema_or_text_form() -> Value {
    json!({ "type": ["object", "string"] })
}

/// Returns the JSON schema of `response_format`.
pub(crate) fn response_format_form() -> Value {
    let of_type = |name: &str| json!({ "type": "object", "properties": { "type": { "const": name } }, "required": ["type"] });
    let with = |name: &str, field: &str, schema: Value, is_required: bool| {
        let mut form = of_type(name);
        form["properties"][field] = schema;
        if is_required {
            form["required"] = json!(["type", field]);
        }
        form
    };
    let properties = json!({
        "name": { "type": "string", "minLength": 1 }, "strict": { "type": ["boolean", "null"] }, "schema": schema_or_text_form(),
    });
    let named = json!({ "type": "object", "properties": properties, "required": ["name", "schema"] });
    json!({ "anyOf": [
        { "const": "text" },
        of_type("text"),
        with("json_object", "schema", json!({ "type": ["object", "string", "null"] }), false),
        with("json_schema", "json_schema", named, true),
        of_type("structural_tag"),
    ] })
}

/// Returns the JSON schema of `structured_outputs`.
pub(crate) fn structured_outputs_form() -> Value {
    let one = |name: &str, form: Value| json!({ "type": "object", "properties": { name: form }, "required": [name], "additionalProperties": { "type": "null" } });
    json!({ "anyOf": [
        one("json", schema_or_text_form()),
        one("json_object", json!({ "const": true })),
        one("regex", text_form()),
        one("choice", choices_form()),
        one("grammar", text_form()),
        one("structural_tag", schema_or_text_form()),
    ] })
}
