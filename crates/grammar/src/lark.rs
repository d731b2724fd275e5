//! Writes parts of Lark grammars: literals and JSON schemas.

use crate::GrammarError;
use llguidance::JsonCompileOptions;
use serde_json::Value;

/// A regular expression for the white space between the parts of a JSON text. Its length is bounded, because small models may generate white space
/// without end.
const JSON_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,32}";

/// What happens to keywords of a schema that cannot be enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnenforcedKeywords {
    /// A schema with such a keyword is refused.
    Refused,
    Ignored,
}

/// Returns the schema with the compiler's options. Options that the client wrote into the schema are dropped.
pub(crate) fn with_options(mut schema: Value, unenforced: UnenforcedKeywords) -> Result<Value, GrammarError> {
    match &mut schema {
        Value::Bool(true) => schema = serde_json::json!({}),
        Value::Object(_) => {}
        _ => return Err(GrammarError::invalid("a schema must be an object")),
    }
    // llguidance enforces `oneOf` only if it can tell the alternatives apart.
    let lenient = unenforced == UnenforcedKeywords::Ignored;
    let options = JsonCompileOptions { whitespace_pattern: Some(JSON_SPACE.to_owned()), lenient, ..Default::default() };
    options.apply_to(&mut schema);
    Ok(schema)
}

/// Returns a text as a literal of a Lark grammar, which has JSON's escapes.
pub(crate) fn literal(text: &str) -> String {
    Value::String(text.to_owned()).to_string().replace('\u{7f}', "\\u007f")
}
