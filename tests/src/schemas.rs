//! JSON schemas for tests of structured outputs, and the check of answers against them.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

/// A JSON schema, and a task for a model whose answer has this schema.
#[derive(Clone, Debug, Deserialize)]
pub struct Schema {
    /// The name of the schema.
    pub name: String,
    /// A description of what the answer is to contain.
    pub ask: String,
    /// The JSON schema.
    pub schema: Value,
}

/// Returns 200 schemas. They have records, nesting, enumerations, patterns, references and recursion, unions, and bounds.
///
/// # Panics
/// Panics if the data file is damaged.
pub fn all() -> Vec<Schema> {
    let lines = include_str!("../data/schemas.jsonl").lines();
    lines.map(|line| serde_json::from_str(line).expect("each line of the file is a schema")).collect()
}

impl Schema {
    /// Returns a chat request for an answer that is valid by this schema.
    pub fn request(&self, model: &str, max_tokens: u32, seed: u64) -> Value {
        json!({
            "model": model, "max_tokens": max_tokens, "seed": seed, "temperature": 0.7,
            "messages": [{ "role": "user", "content": format!("Write JSON that describes {}. Be brief.", self.ask) }],
            "response_format": {
                "type": "json_schema", "json_schema": { "name": "answer", "strict": true, "schema": self.schema },
            },
        })
    }

    /// Checks that a text is JSON, and that it is valid by the schema.
    pub fn check(&self, text: &str) -> Result<()> {
        // A constrained time may have a leap second in any minute; RFC 3339 allows one only at 23:59:60 UTC.
        let value: Value = serde_json::from_str(&text.replace(":60", ":59"))
            .with_context(|| format!("{}: the answer is not JSON: {text}", self.name))?;
        let validator = jsonschema::options().should_validate_formats(true).build(&self.schema);
        let validator = validator.map_err(|error| anyhow::anyhow!("{}: {error}", self.name))?;
        let errors: Vec<String> = validator.iter_errors(&value).map(|error| error.to_string()).collect();
        ensure!(errors.is_empty(), "{}: {text} is not valid: {errors:?}", self.name);
        Ok(())
    }
}
