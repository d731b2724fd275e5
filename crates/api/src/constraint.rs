//! The parameters that constrain the text of an answer: those of OpenAI, vLLM and SGLang.

use crate::{
    error::{Problem, RequestError},
    names::{ParamNames, SchemaForm},
    parameters::Common,
};
use serde_json::{Map, Value};
use tandem_grammar::{CONSTRAINT_BYTES_MAX, CallInput, Constraint, InputPlace, Kind};
use tandem_proto::v1::{self, constraint::Choices};

/// A constraint, and the parameter that states it, for errors.
#[derive(Clone, Debug, PartialEq)]
pub struct Stated {
    /// The field that states it.
    pub param: String,
    /// The constraint.
    pub constraint: Constraint,
}

impl Stated {
    /// Checks whether workers can enforce the constraint. Takes milliseconds, up to a second for a very large one.
    ///
    /// # Errors
    /// The constraint cannot be enforced. The error says why.
    pub fn check(&self) -> Result<(), RequestError> {
        tandem_grammar::check(&self.constraint)
            .map_err(|error| RequestError::invalid(&*self.param, Problem::Constraint { problem: error.to_string() }))
    }

    /// Sets the constraint in the parameters for workers.
    pub fn set(&self, sampling: &mut v1::Sampling) {
        let Constraint { kind, begins_after } = self.constraint.clone();
        let mut message = v1::Constraint { begins_after: begins_after.unwrap_or_default(), ..Default::default() };
        message.kind = Some(match kind {
            Kind::JsonSchema { schema, lenient } => {
                message.lenient = lenient;
                v1::constraint::Kind::JsonSchema(schema)
            }
            Kind::JsonObject => v1::constraint::Kind::JsonObject(true),
            Kind::Regex(regex) => v1::constraint::Kind::Regex(regex),
            Kind::Choice(texts) => v1::constraint::Kind::Choice(Choices { texts }),
            Kind::Grammar(grammar) => v1::constraint::Kind::Grammar(grammar),
            Kind::StructuralTag(tags) => v1::constraint::Kind::StructuralTag(tags),
            Kind::CallInputs(inputs) => {
                sampling.call_inputs = inputs.into_iter().map(call_input).collect();
                return;
            }
        });
        sampling.constraint = Some(message);
    }
}

fn call_input(CallInput { places, kind }: CallInput) -> v1::constraint::CallInput {
    let place =
        |InputPlace { begin, head, end, tail }| v1::constraint::InputPlace { begin, head, end: end.unwrap_or_default(), tail };
    let (grammar, regex) = match kind {
        Kind::Regex(regex) => (String::new(), regex),
        Kind::Grammar(grammar) => (grammar, String::new()),
        _ => Default::default(),
    };
    v1::constraint::CallInput { places: places.into_iter().map(place).collect(), grammar, regex }
}

impl Common {
    /// Returns the constraint that the parameters state; `None` if they state none.
    ///
    /// # Errors
    /// Two parameters state a constraint, or a value is not valid.
    pub(crate) fn constraint(&mut self, names: &ParamNames) -> Result<Option<Stated>, RequestError> {
        let stated = [
            self.response_format.take().map(|value| response_format(&value, names)),
            self.structured_outputs.take().map(|value| structured_outputs(&value)),
            self.guided_json.take().map(|value| schema("guided_json", &value, strict)),
            self.guided_regex.take().map(|value| text("guided_regex", &value, Kind::Regex)),
            self.guided_choice.take().map(|value| choice("guided_choice", &value)),
            self.guided_grammar.take().map(|value| text("guided_grammar", &value, Kind::Grammar)),
            self.structural_tag.take().map(|value| structural_tag("structural_tag", &value)),
            self.json_schema.take().map(|value| schema("json_schema", &value, strict)),
            self.regex.take().map(|value| text("regex", &value, Kind::Regex)),
            self.ebnf.take().map(|value| text("ebnf", &value, Kind::Grammar)),
            self.grammar.take().map(|value| text("grammar", &value, Kind::Grammar)),
        ];
        let mut one: Option<Stated> = None;
        for stated in stated.into_iter().flatten() {
            let Some(stated) = stated? else { continue };
            match one {
                Some(first) => return Err(conflict(&stated.param, &first.param)),
                None => one = Some(stated),
            }
        }
        Ok(one)
    }
}

type Checked = Result<Option<Stated>, RequestError>;

pub(crate) fn conflict(param: &str, other: &str) -> RequestError {
    RequestError::invalid(param, Problem::Conflict { other: other.to_owned() })
}

fn stated(param: impl Into<String>, kind: Kind) -> Checked {
    Ok(Some(Stated { param: param.into(), constraint: kind.into() }))
}

fn expected(param: impl Into<String>, rule: &'static str) -> RequestError {
    RequestError::invalid(param, Problem::Rule { rule })
}

fn response_format(value: &Value, names: &ParamNames) -> Checked {
    let param = names.response_format;
    if *value == Value::String("text".to_owned()) {
        return Ok(None);
    }
    let Some(object) = value.as_object() else { return Err(expected(param, "must be an object")) };
    match object.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        // Some servers take a schema here as well.
        Some("json_object") => match object.get("schema") {
            None | Some(Value::Null) => stated(param, Kind::JsonObject),
            Some(given) => schema(&format!("{param}.schema"), given, strict),
        },
        Some("json_schema") => {
            let (param, form) = (names.json_schema, names.schema_form);
            let nested = object.get("json_schema").filter(|nested| !nested.is_null());
            let named = match form {
                SchemaForm::Nested => nested.and_then(Value::as_object),
                SchemaForm::Flat => nested.map_or(Some(object), Value::as_object),
                SchemaForm::Unnamed => Some(object),
            };
            let named = named.ok_or_else(|| expected(param, "must be an object with 'name' and 'schema'"))?;
            let is_named = form != SchemaForm::Unnamed;
            if is_named && named.get("name").and_then(Value::as_str).is_none_or(str::is_empty) {
                return Err(RequestError::invalid(format!("{param}.name"), Problem::Missing));
            }
            let kind = match named.get("strict").filter(|_| is_named) {
                None | Some(Value::Null | Value::Bool(true)) => strict,
                Some(Value::Bool(false)) => lenient,
                Some(_) => return Err(expected(format!("{param}.strict"), "must be true or false")),
            };
            let param = format!("{param}.schema");
            let given = named.get("schema").filter(|schema| !schema.is_null());
            schema(&param, given.ok_or_else(|| RequestError::invalid(&*param, Problem::Missing))?, kind)
        }
        Some("structural_tag") => structural_tag(param, value),
        _ => Err(RequestError::invalid(
            format!("{param}.type"),
            Problem::Choice { allowed: "'text', 'json_object', 'json_schema', 'structural_tag'" },
        )),
    }
}

fn structured_outputs(value: &Value) -> Checked {
    const PARAM: &str = "structured_outputs";
    /// Options of vLLM that would change the constraint.
    const OPTIONS: [&str; 3] = ["disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"];
    let Some(object) = value.as_object() else { return Err(expected(PARAM, "must be an object")) };
    let mut one: Option<Stated> = None;
    for (key, value) in object.iter().filter(|(_, value)| !value.is_null()) {
        let param = format!("{PARAM}.{key}");
        let stated = match key.as_str() {
            "json" => schema(&param, value, strict)?,
            "regex" => text(&param, value, Kind::Regex)?,
            "choice" => choice(&param, value)?,
            "grammar" => text(&param, value, Kind::Grammar)?,
            "structural_tag" => structural_tag(&param, value)?,
            "json_object" if *value == Value::Bool(true) => stated(&*param, Kind::JsonObject)?,
            "json_object" if *value == Value::Bool(false) => None,
            option if OPTIONS.contains(&option) && *value == Value::Bool(false) => None,
            _ => return Err(RequestError::invalid(param, Problem::Unsupported)),
        };
        match (&one, stated) {
            (Some(first), Some(second)) => return Err(conflict(&second.param, &first.param)),
            (None, Some(first)) => one = Some(first),
            (_, None) => {}
        }
    }
    let one = one
        .ok_or_else(|| expected(PARAM, "must have one of 'json', 'json_object', 'regex', 'choice', 'grammar', 'structural_tag'"));
    one.map(Some)
}

/// Reads a schema: an object, or a string that contains one.
fn schema(param: &str, value: &Value, kind: fn(String) -> Kind) -> Checked {
    let schema = match value {
        Value::String(text) => text.clone(),
        Value::Object(_) => value.to_string(),
        _ => return Err(expected(param, "must be a JSON schema: an object, or a string that contains one")),
    };
    bounded(param, schema.len())?;
    stated(param, kind(schema))
}

fn strict(schema: String) -> Kind {
    Kind::JsonSchema { schema, lenient: false }
}

fn lenient(schema: String) -> Kind {
    Kind::JsonSchema { schema, lenient: true }
}

fn text(param: &str, value: &Value, kind: fn(String) -> Kind) -> Checked {
    match value.as_str() {
        Some("") => Err(RequestError::invalid(param, Problem::Empty)),
        Some(text) => {
            bounded(param, text.len())?;
            stated(param, kind(text.to_owned()))
        }
        None => Err(expected(param, "must be a string")),
    }
}

fn choice(param: &str, value: &Value) -> Checked {
    let texts =
        value.as_array().map(|texts| texts.iter().map(|text| text.as_str().map(str::to_owned)).collect::<Option<Vec<_>>>());
    match texts.flatten() {
        Some(texts) if !texts.is_empty() => {
            bounded(param, texts.iter().map(String::len).sum())?;
            stated(param, Kind::Choice(texts))
        }
        Some(_) => Err(RequestError::invalid(param, Problem::Empty)),
        None => Err(expected(param, "must be a list of strings")),
    }
}

/// Reads a structural tag: an object, or a string that contains one.
fn structural_tag(param: &str, value: &Value) -> Checked {
    let tags = match value {
        Value::String(text) => text.clone(),
        Value::Object(object) => tag_of(object).to_string(),
        _ => return Err(expected(param, "must be a structural tag: an object, or a string that contains one")),
    };
    bounded(param, tags.len())?;
    stated(param, Kind::StructuralTag(tags))
}

fn tag_of(object: &Map<String, Value>) -> Value {
    let mut object = object.clone();
    object.insert("type".to_owned(), "structural_tag".into());
    object.into()
}

fn bounded(param: &str, bytes: usize) -> Result<(), RequestError> {
    crate::error::at_most(param, bytes, CONSTRAINT_BYTES_MAX, "bytes")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn checked(set: impl FnOnce(&mut Common)) -> Result<Option<Constraint>, String> {
        let mut given = Common::default();
        set(&mut given);
        given
            .constraint(&ParamNames::CHAT)
            .map(|stated| stated.map(|stated| stated.constraint))
            .map_err(|error| error.to_string())
    }

    fn format(value: Value) -> Result<Option<Kind>, String> {
        checked(|given| given.response_format = Some(value)).map(|constraint| constraint.map(|constraint| constraint.kind))
    }

    #[test]
    fn every_structured_output_parameter_is_parsed() {
        let schema = |lenient| Kind::JsonSchema { schema: r#"{"type":"object"}"#.to_owned(), lenient };
        let object = || json!({ "type": "object" });
        assert_eq!(format(json!({ "type": "text" })), Ok(None));
        assert_eq!(format(json!({ "type": "json_object" })), Ok(Some(Kind::JsonObject)));
        assert_eq!(format(json!({ "type": "json_object", "schema": object() })), Ok(Some(schema(false))));
        for (strict, lenient) in [(json!(true), false), (json!(null), false), (json!(false), true)] {
            let named = json!({ "name": "n", "strict": strict, "schema": object() });
            assert_eq!(format(json!({ "type": "json_schema", "json_schema": named })), Ok(Some(schema(lenient))));
        }
        let tags = json!({ "type": "structural_tag", "structures": [], "triggers": [] });
        assert_eq!(format(tags.clone()), Ok(Some(Kind::StructuralTag(tags.to_string()))));

        let regex = || Kind::Regex("a+".to_owned());
        let choice = || Kind::Choice(vec!["a".to_owned(), "b".to_owned()]);
        let grammar = || Kind::Grammar("root ::= \"a\"".to_owned());
        type Set = fn(&mut Common, Value);
        let sets: [(Set, Value, Kind); 16] = [
            (|given, value| given.structured_outputs = Some(value), json!({ "json": object(), "regex": null }), schema(false)),
            (|given, value| given.structured_outputs = Some(value), json!({ "json": object().to_string() }), schema(false)),
            (|given, value| given.structured_outputs = Some(value), json!({ "json_object": true }), Kind::JsonObject),
            (
                |given, value| given.structured_outputs = Some(value),
                json!({ "regex": "a+", "disable_any_whitespace": false }),
                regex(),
            ),
            (|given, value| given.structured_outputs = Some(value), json!({ "choice": ["a", "b"] }), choice()),
            (|given, value| given.structured_outputs = Some(value), json!({ "grammar": "root ::= \"a\"" }), grammar()),
            (
                |given, value| given.structured_outputs = Some(value),
                json!({ "structural_tag": tags }),
                Kind::StructuralTag(tags.to_string()),
            ),
            (|given, value| given.guided_json = Some(value), object(), schema(false)),
            (|given, value| given.guided_regex = Some(value), json!("a+"), regex()),
            (|given, value| given.guided_choice = Some(value), json!(["a", "b"]), choice()),
            (|given, value| given.guided_grammar = Some(value), json!("root ::= \"a\""), grammar()),
            (|given, value| given.structural_tag = Some(value), json!(tags.to_string()), Kind::StructuralTag(tags.to_string())),
            (|given, value| given.json_schema = Some(value), json!(object().to_string()), schema(false)),
            (|given, value| given.regex = Some(value), json!("a+"), regex()),
            (|given, value| given.ebnf = Some(value), json!("root ::= \"a\""), grammar()),
            (|given, value| given.grammar = Some(value), json!("root ::= \"a\""), grammar()),
        ];
        for (set, value, kind) in sets {
            assert_eq!(checked(|given| set(given, value.clone())), Ok(Some(kind.into())), "{value}");
        }
        assert_eq!(checked(|_| {}), Ok(None));
    }

    #[test]
    fn invalid_constraint_is_refused_with_the_name_of_its_field() {
        for (value, message) in [
            (json!("json"), "'response_format' must be an object."),
            (json!({ "type": "xml" }), "'response_format.type' must be one of"),
            (json!({ "type": "json_schema" }), "'response_format.json_schema' must be an object"),
            (json!({ "type": "json_schema", "json_schema": { "schema": {} } }), "'response_format.json_schema.name' is required"),
            (
                json!({ "type": "json_schema", "json_schema": { "name": "n" } }),
                "'response_format.json_schema.schema' is required",
            ),
            (
                json!({ "type": "json_schema", "json_schema": { "name": "n", "schema": 3 } }),
                "'response_format.json_schema.schema' must be",
            ),
            (
                json!({ "type": "json_schema", "json_schema": { "name": "n", "strict": 1, "schema": {} } }),
                "strict' must be true or false",
            ),
        ] {
            let error = format(value.clone()).expect_err("the value is invalid");
            assert!(error.contains(message), "{value}: {error}");
        }
        for (value, message) in [
            (json!({}), "'structured_outputs' must have one of"),
            (json!({ "json_object": false }), "'structured_outputs' must have one of"),
            (json!({ "regex": "" }), "'structured_outputs.regex' must not be empty"),
            (json!({ "choice": ["a", 1] }), "'structured_outputs.choice' must be a list of strings"),
            (json!({ "choice": [] }), "'structured_outputs.choice' must not be empty"),
            (json!({ "regex": "a", "whitespace_pattern": "x" }), "'structured_outputs.whitespace_pattern' is not supported"),
            (json!({ "regex": "a", "choice": ["a"] }), "cannot be combined with 'structured_outputs."),
        ] {
            let error = checked(|given| given.structured_outputs = Some(value.clone())).expect_err("the value is invalid");
            assert!(error.contains(message), "{value}: {error}");
        }
        let long = checked(|given| given.regex = Some("a".repeat(CONSTRAINT_BYTES_MAX + 1).into()));
        assert!(long.is_err_and(|error| error.contains("'regex' must have at most")));
    }

    #[test]
    fn two_constraints_are_refused_with_the_names_of_both_fields() {
        let both = checked(|given| {
            given.response_format = Some(json!({ "type": "json_object" }));
            given.regex = Some(json!("a"));
        });
        assert_eq!(both, Err("'regex' cannot be combined with 'response_format'.".to_owned()));
        let text = checked(|given| {
            given.response_format = Some(json!({ "type": "text" }));
            given.regex = Some(json!("a"));
        });
        assert_eq!(text, Ok(Some(Kind::Regex("a".to_owned()).into())), "the format 'text' states no constraint");
    }

    #[test]
    fn message_for_workers_has_the_whole_constraint() {
        let kind = |schema: &str| Kind::JsonSchema { schema: schema.to_owned(), lenient: false };
        let constraint = Constraint { kind: kind(r#"{"type":"null"}"#), begins_after: Some("</think>".to_owned()) };
        let stated = Stated { param: "p".to_owned(), constraint };
        let sent = v1::constraint::Kind::JsonSchema(r#"{"type":"null"}"#.to_owned());
        let mut sampling = v1::Sampling::default();
        stated.set(&mut sampling);
        let sent = v1::Constraint { kind: Some(sent), begins_after: "</think>".to_owned(), lenient: false };
        assert_eq!(sampling.constraint, Some(sent));
        stated.check().expect("the schema is valid");
        let stated = Stated { constraint: kind(r#"{"not":{}}"#).into(), ..stated };
        let refused = stated.check().expect_err("the keyword is not supported").to_string();
        assert_eq!(refused, "'p' cannot be enforced: at $, the keyword 'not' is not supported.");
    }
}
