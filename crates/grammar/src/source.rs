//! Converts constraints to llguidance's form.

use crate::{
    CALL_INPUTS_MAX, CHOICES_MAX, CONSTRAINT_BYTES_MAX, CallInput, Constraint, GrammarError, Kind, PLACES_MAX, ebnf,
    input_matcher::OUTER,
    lark::{UnenforcedKeywords, literal, with_options},
    rules, schema, structural_tag,
};
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::Value;

pub(crate) fn of(constraint: &Constraint) -> Result<TopLevelGrammar, GrammarError> {
    check_size(constraint)?;
    match &constraint.kind {
        Kind::JsonSchema { schema, lenient } => {
            let schema =
                serde_json::from_str(schema).map_err(|error| GrammarError::invalid(format!("not valid JSON: {error}")))?;
            let unenforced = if *lenient { UnenforcedKeywords::Ignored } else { UnenforcedKeywords::Refused };
            let schema = schema::bounded(schema, unenforced)?;
            Ok(TopLevelGrammar::from_json_schema(with_options(schema, unenforced)?))
        }
        Kind::JsonObject => {
            let object = with_options(serde_json::json!({ "type": "object" }), UnenforcedKeywords::Refused)?;
            Ok(TopLevelGrammar::from_json_schema(object))
        }
        Kind::Regex(regex) => Ok(TopLevelGrammar::from_regex(whole_text(regex))),
        Kind::Choice(texts) => choice(texts),
        Kind::Grammar(grammar) if ebnf::is_ebnf(grammar) => bounded_lark(ebnf::to_lark(grammar)?),
        Kind::Grammar(grammar) => bounded_lark(grammar.clone()),
        Kind::StructuralTag(tags) => bounded_lark(structural_tag::to_lark(tags)?),
        Kind::CallInputs(_) => Err(GrammarError::invalid("inputs of tools have no grammar of their own")),
    }
}

/// Returns the grammar of each input, followed by the byte that ends it.
pub(crate) fn of_inputs(constraint: &Constraint, inputs: &[CallInput]) -> Result<Vec<TopLevelGrammar>, GrammarError> {
    check_size(constraint)?;
    let of_input = |input: &CallInput| {
        let kind @ (Kind::Grammar(_) | Kind::Regex(_)) = &input.kind else {
            return Err(GrammarError::invalid("the input of a tool needs a grammar or a regular expression"));
        };
        if let Kind::Grammar(lark) = kind
            && !ebnf::is_ebnf(lark)
            && let Some(token) = rules::special_token(lark)?
        {
            return Err(GrammarError::invalid(format!("the input of a tool cannot contain the special token {token}")));
        }
        let mut grammar = of(&Constraint::from(kind.clone()))?;
        grammar.grammars.iter_mut().for_each(|grammar| grammar.name = Some("input".to_owned()));
        grammar.grammars.insert(0, GrammarWithLexer::from_lark(OUTER.to_owned()));
        Ok(grammar)
    };
    inputs.iter().map(of_input).collect()
}

fn bounded_lark(lark: String) -> Result<TopLevelGrammar, GrammarError> {
    rules::check(&lark)?;
    Ok(TopLevelGrammar::from_lark(lark))
}

fn check_size(constraint: &Constraint) -> Result<(), GrammarError> {
    if let Kind::Choice(texts) = &constraint.kind
        && texts.len() > CHOICES_MAX
    {
        return Err(GrammarError::TooLarge { found: texts.len(), max: CHOICES_MAX, unit: "choices" });
    }
    if let Kind::CallInputs(inputs) = &constraint.kind {
        let places = inputs.iter().map(|input| input.places.len()).max().unwrap_or_default();
        for (found, max, unit) in
            [(inputs.len(), CALL_INPUTS_MAX, "tools with a grammar"), (places, PLACES_MAX, "forms of a call")]
        {
            if found > max {
                return Err(GrammarError::TooLarge { found, max, unit });
            }
        }
    }
    let (found, max) = (constraint.text_bytes(), CONSTRAINT_BYTES_MAX);
    if found > max { Err(GrammarError::TooLarge { found, max, unit: "bytes" }) } else { Ok(()) }
}

/// Returns the regular expression without anchors. The anchors are redundant, because the expression has to match the whole text.
fn whole_text(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(rest) if rest.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 0 => rest,
        _ => regex,
    }
}

fn choice(texts: &[String]) -> Result<TopLevelGrammar, GrammarError> {
    if texts.is_empty() {
        return Err(GrammarError::invalid("a choice needs at least one text"));
    }
    let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
    Ok(TopLevelGrammar::from_lark(format!("start: {}", texts.join(" | "))))
}

/// Returns the error for a message of llguidance. If the message names a keyword or a format, the error also names the part of the schema that
/// contains it.
pub(crate) fn explain(schema: &str, message: &str) -> GrammarError {
    let message = message.lines().next().unwrap_or_default().trim();
    let schema: Value = serde_json::from_str(schema).unwrap_or_default();
    let found = if let Some((_, keys)) = message.split_once("Unimplemented keys: ") {
        let key = keys.split('"').nth(1).unwrap_or_default();
        let place = place(&schema, "$", &|object| object.contains_key(key));
        place.map(|place| (place, format!("the keyword '{key}' is not supported")))
    } else if let Some((_, format)) = message.split_once("Unknown format: ") {
        let place = place(&schema, "$", &|object| object.get("format").and_then(Value::as_str) == Some(format));
        place.map(|place| (place, format!("the format '{format}' is not supported")))
    } else if message.contains("oneOf constraints are not supported") {
        let place = place(&schema, "$", &|object| object.contains_key("oneOf"));
        place.map(|place| (place, "the alternatives of 'oneOf' overlap; use 'anyOf'".to_owned()))
    } else {
        None
    };
    match found {
        Some((place, problem)) => GrammarError::Schema { place, problem },
        None => GrammarError::invalid(message),
    }
}

fn place(schema: &Value, path: &str, wanted: &impl Fn(&serde_json::Map<String, Value>) -> bool) -> Option<String> {
    /// The keywords whose values map names to schemas.
    const NAMED: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];
    /// The keywords whose values are data, which may look like schemas.
    const DATA: [&str; 4] = ["const", "enum", "default", "examples"];
    match schema {
        Value::Object(object) if wanted(object) => Some(path.to_owned()),
        Value::Object(object) => object.iter().find_map(|(key, value)| match value {
            _ if DATA.contains(&key.as_str()) => None,
            Value::Object(named) if NAMED.contains(&key.as_str()) => {
                named.iter().find_map(|(name, schema)| place(schema, &format!("{path}.{key}.{name}"), wanted))
            }
            value => place(value, &format!("{path}.{key}"), wanted),
        }),
        Value::Array(list) => list.iter().enumerate().find_map(|(i, value)| place(value, &format!("{path}[{i}]"), wanted)),
        _ => None,
    }
}
