//! Rows that contain the body of a chat request.

use super::Problem;
use serde_json::{Map, Value};

/// A chat request.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRow {
    /// The fields of the body, such as `messages` and `tools`.
    pub body: Map<String, Value>,
}

impl ChatRow {
    /// Reads a row, which is the body itself or a line of a file for OpenAI's batch API. Such a line has the body in its field `body`.
    pub(super) fn parse(value: Value) -> Result<Self, Problem> {
        let Value::Object(mut row) = value else { return Err(Problem::Json("the row is not an object".to_owned())) };
        let mut body = match row.remove("body") {
            Some(Value::Object(body)) if !row.contains_key("messages") => body,
            _ => row,
        };
        match body.get("messages") {
            None => return Err(Problem::Missing("messages")),
            Some(Value::Array(messages)) if messages.is_empty() => return Err(Problem::Nothing),
            Some(Value::Array(messages)) if messages.iter().all(Value::is_object) => {}
            Some(_) => return Err(Problem::Json("`messages` is not a list of objects".to_owned())),
        }
        body.remove("timestamp");
        Ok(Self { body })
    }
}
