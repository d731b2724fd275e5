//! The fields of a request that this server does not know.

use super::parameters::WITHOUT_EFFECT;
use serde_ignored::Path;
use std::collections::BTreeSet;

/// The maximum number of fields that are named.
const NAMES_MAX: usize = 16;
/// The maximum length of a name, in bytes.
const NAME_BYTES_MAX: usize = 64;
/// The last name if more fields were ignored than are named.
const FURTHER: &str = "...";

/// The names of ignored fields. A field of an object in a list is named once for the whole list: `messages[].mood`.
#[derive(Debug, Default)]
pub struct Ignored {
    names: BTreeSet<String>,
    further: bool,
}

impl Ignored {
    pub(crate) fn add(&mut self, path: &Path<'_>) {
        if matches!(path, Path::Map { parent: Path::Root, key } if WITHOUT_EFFECT.contains(&key.as_str())) {
            return;
        }
        if self.names.len() < NAMES_MAX {
            let mut name = String::new();
            write(path, &mut name);
            self.names.insert(name);
        } else {
            self.further = true;
        }
    }

    /// Adds the name of another part of the request that has no effect on the answer.
    pub fn add_name(&mut self, name: &str) {
        let mut shown = String::new();
        write_name(name, &mut shown);
        if self.names.len() < NAMES_MAX {
            self.names.insert(shown);
        } else {
            self.further = true;
        }
    }

    /// Returns the fields that were also ignored when the body was parsed as another type.
    pub fn also_in(mut self, other: &Self) -> Self {
        self.names.retain(|name| other.names.contains(name));
        self
    }

    /// Returns the names, joined by commas, as ASCII; `None` if no field was ignored.
    pub fn joined(&self) -> Option<String> {
        let further = self.further.then_some(FURTHER);
        let names: Vec<_> = self.names.iter().map(String::as_str).chain(further).collect();
        (!names.is_empty()).then(|| names.join(", "))
    }
}

/// Appends a part of a name. Characters that are unusual in names become `?`.
fn write_name(part: &str, name: &mut String) {
    let usual = |char: char| if char.is_ascii_alphanumeric() || "_-.:/".contains(char) { char } else { '?' };
    let room = NAME_BYTES_MAX.saturating_sub(name.len());
    name.extend(part.chars().take(room).map(usual));
}

/// Appends the path's name. Characters that are unusual in names become `?`, so that the name is ASCII and has no comma.
fn write(path: &Path<'_>, name: &mut String) {
    match path {
        Path::Root => {}
        Path::Seq { parent, .. } => {
            write(parent, name);
            name.push_str("[]");
        }
        Path::Map { parent, key } => {
            write(parent, name);
            if !name.is_empty() {
                name.push('.');
            }
            write_name(key, name);
            if key.is_empty() {
                name.push('?');
            }
        }
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => write(parent, name),
    }
}

#[cfg(test)]
mod tests {
    use crate::{ChatRequest, CompletionRequest, parse};
    use serde_json::json;

    fn named(body: &str) -> Option<String> {
        let (_, ignored) = parse::<ChatRequest>(body.as_bytes(), 100_000).expect("the request can be parsed");
        ignored.joined()
    }

    #[test]
    fn unknown_fields_are_named_and_known_ones_are_not() {
        for (body, expected) in [
            (json!({ "messages": [], "user": "u", "store": false, "temperature": 1, "service_tier": "flex" }), None),
            (json!({ "temprature": 1, "max_token": 5 }), Some("max_token, temprature")),
            (
                json!({ "messages": [{ "role": "user", "mood": 1 }, { "mood": 2 }], "stream_options": { "x": {} } }),
                Some("messages[].mood, stream_options.x"),
            ),
            // The members of an unsupported parameter are not fields of the request.
            (json!({ "response_format": { "type": "text", "strict": [{ "a": 1 }] } }), None),
            (json!({ "prompt": "of the other endpoint" }), Some("prompt")),
        ] {
            assert_eq!(named(&body.to_string()).as_deref(), expected, "{body}");
        }
        assert!(parse::<CompletionRequest>(br#"{"messages":[]}"#, 10).expect("it can be parsed").1.joined().is_some());
    }

    #[test]
    fn names_are_ascii_and_bounded() {
        assert_eq!(named(r#"{"n\n: x, ünï":1,"":2}"#).as_deref(), Some("?, n?:?x???n?"));
        let many: String = (0..10_000).map(|number| format!(r#""unknown-{number:06}":[{{}}],"#)).collect();
        let header = named(&format!(r#"{{{many}"{}":1}}"#, "x".repeat(10_000))).expect("fields are ignored");
        assert!(header.starts_with("unknown-000000, unknown-000001, ") && header.ends_with(", unknown-000015, ..."), "{header}");
        let long = named(&format!(r#"{{"{}":1}}"#, "x".repeat(10_000))).expect("the field is ignored");
        assert_eq!(long.len(), 64);
    }
}
