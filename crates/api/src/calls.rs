//! The constraints that follow from the choice of tools.

use super::{
    constraint::{Stated, conflict},
    options::Options,
};
use crate::error::RequestError;
use serde_json::{Value, json};
use tandem_grammar::{Constraint, Kind};
use tandem_text::chat::{ToolCallParser, ToolChoice, Tools};

/// Adds the constraint that makes the model call the required tools. If tools are optional and the text is constrained to JSON, the
/// constraint allows either calls or the JSON. If the text is free, only the inputs of custom tools with a grammar are constrained.
///
/// # Errors
/// The text is constrained, and the model's format of tool calls cannot be part of the constraint.
pub(crate) fn constrain(options: &mut Options, tools: &Tools, parser: ToolCallParser) -> Result<(), RequestError> {
    let lenient = !tools.are_strict();
    let schema = || Some(Kind::JsonSchema { schema: tools.required_schema()?.to_string(), lenient });
    if let Some(kind) = tools.required_input().cloned().or_else(schema) {
        // An answer with a required call has no other text, so a constraint on that text has no effect.
        options.constraint = None;
        return options.constrain(Stated { param: "tools".to_owned(), constraint: kind.into() });
    }
    if tools.choice != ToolChoice::Auto {
        return Ok(());
    }
    let Some(stated) = options.constraint.take() else {
        let inputs = tools.call_inputs(parser);
        return inputs.map_or(Ok(()), |kind| options.constrain(Stated { param: "tools".to_owned(), constraint: kind.into() }));
    };
    let schema = match &stated.constraint.kind {
        Kind::JsonSchema { schema, .. } => serde_json::from_str(schema).unwrap_or(Value::Null),
        Kind::JsonObject => json!({ "type": "object" }),
        // These constraints remain as the client wrote them: if tool calls are wanted, the constraint itself allows them.
        Kind::Regex(_) | Kind::Choice(_) | Kind::Grammar(_) | Kind::StructuralTag(_) | Kind::CallInputs(_) => {
            return options.constrain(stated);
        }
    };
    let tag = tools.calls_or_answer(parser, schema).ok_or_else(|| conflict(&stated.param, "tools"))?;
    options.constrain(Stated { constraint: Constraint::from(Kind::StructuralTag(tag.to_string())), ..stated })
}
