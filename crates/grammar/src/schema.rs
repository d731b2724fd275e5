//! Bounds JSON schemas before llguidance sees them, because it follows schemas and references by recursion and compares properties with each
//! other. Also finds problems that llguidance would notice only while a text is generated.

use crate::{GrammarError, lark::UnenforcedKeywords};
use regex_automata::meta::Regex;
use serde_json::{Map, Value};
use std::collections::HashSet;

/// Maximum number of schemas that a text may have to meet: each property, item and alternative is one, and so is each schema that is referenced.
pub(crate) const SCHEMAS_MAX: usize = 16_384;
/// Maximum number of levels of nested schemas and references.
pub(crate) const LEVELS_MAX: usize = 256;
/// Maximum number of properties of one object. The time to compile an object grows with their square.
pub(crate) const PROPERTIES_MAX: usize = 512;
/// Maximum number of values of all `enum`s.
pub(crate) const ENUM_VALUES_MAX: usize = 32_768;
/// Maximum number of `patternProperties` of one object.
const PATTERNS_MAX: usize = 64;
/// Maximum memory of a pattern that is compared with the names of properties.
const PATTERN_BYTES_MAX: usize = 1 << 20;
/// Maximum number of references to an `$anchor` or `$id`, which are not followed here.
const NAMED_REFERENCES_MAX: usize = 64;

/// The keywords whose value is one schema.
const ONE: [&str; 3] = ["items", "additionalItems", "additionalProperties"];
/// The keywords whose value is a list of schemas.
const LISTS: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
/// The keywords whose value maps names to schemas.
const MAPS: [&str; 2] = ["properties", "patternProperties"];

/// Checks the sizes of a schema, and everything else that llguidance checks too late. Keywords that cannot be
/// enforced are removed, or the schema is refused.
pub(crate) fn bounded(mut schema: Value, unenforced: UnenforcedKeywords) -> Result<Value, GrammarError> {
    let dropped = Walk { root: &schema, nodes: Vec::new(), referenced: HashSet::new(), unenforced, dropped: Vec::new() }.run()?;
    for Dropped { object, keyword, entry } in dropped {
        let Some(Value::Object(object)) = schema.pointer_mut(&object) else { continue };
        match (entry, object.get_mut(keyword)) {
            (Some(entry), Some(Value::Object(entries))) => entries.remove(&entry),
            _ => object.remove(keyword),
        };
    }
    Ok(schema)
}

struct Walk<'a> {
    root: &'a Value,
    nodes: Vec<Node<'a>>,
    /// The targets of references that were followed. llguidance compiles each target once.
    referenced: HashSet<*const Value>,
    unenforced: UnenforcedKeywords,
    dropped: Vec<Dropped>,
}

/// A schema, and how it was reached.
struct Node<'a> {
    value: &'a Value,
    parent: usize,
    /// The steps from the parent; none for the root and for the target of a reference.
    steps: [Option<PathStep<'a>>; 2],
    /// The JSON pointer of a reference's target.
    pointer: &'a str,
    level: usize,
}

#[derive(Clone, Copy)]
enum PathStep<'a> {
    Key(&'a str),
    Index(usize),
}

/// A keyword, or one entry of its value, that is removed from a schema. `object` is the JSON pointer of the schema that has the keyword.
struct Dropped {
    object: String,
    keyword: &'static str,
    entry: Option<String>,
}

impl<'a> Walk<'a> {
    fn run(mut self) -> Result<Vec<Dropped>, GrammarError> {
        let (mut enum_values, mut named_references) = (0, 0);
        let mut open = Vec::new();
        self.add(&mut open, Node { value: self.root, parent: 0, steps: [None; 2], pointer: "", level: 1 })?;
        while let Some(at) = open.pop() {
            let Value::Object(object) = self.nodes[at].value else { continue };
            let from = open.len();
            if let Some(Value::String(reference)) = object.get("$ref") {
                match reference.strip_prefix('#').and_then(|pointer| Some((pointer, self.root.pointer(pointer)?))) {
                    Some((pointer, value)) if self.referenced.insert(std::ptr::from_ref(value)) => {
                        self.add(
                            &mut open,
                            Node { value, parent: at, steps: [None; 2], pointer, level: self.nodes[at].level + 1 },
                        )?;
                    }
                    Some(_) => {}
                    None => named_references += 1,
                }
            }
            enum_values += object.get("enum").and_then(Value::as_array).map_or(0, Vec::len);
            self.check_patterns(at, object)?;
            self.add_nested(&mut open, at, object)?;
            limit(enum_values, ENUM_VALUES_MAX, "values of 'enum'")?;
            limit(named_references, NAMED_REFERENCES_MAX, "references to an '$anchor' or '$id'")?;
            // llguidance compiles the first nested schema first. Levels are counted in its order.
            open[from..].reverse();
        }
        Ok(self.dropped)
    }

    fn add(&mut self, open: &mut Vec<usize>, node: Node<'a>) -> Result<(), GrammarError> {
        limit(self.nodes.len() + 1, SCHEMAS_MAX, "schemas")?;
        if node.level > LEVELS_MAX {
            let place = self.place(node.parent);
            return Err(GrammarError::Schema {
                place,
                problem: format!("schemas and references are nested in more than {LEVELS_MAX} levels"),
            });
        }
        open.push(self.nodes.len());
        self.nodes.push(node);
        Ok(())
    }

    fn add_nested(&mut self, open: &mut Vec<usize>, at: usize, object: &'a Map<String, Value>) -> Result<(), GrammarError> {
        let level = self.nodes[at].level + 1;
        for (keyword, value) in object {
            let step = PathStep::Key(keyword);
            let node = |value, second| Node { value, parent: at, steps: [Some(step), second], pointer: "", level };
            match value {
                Value::Object(_) if ONE.contains(&&**keyword) => self.add(open, node(value, None))?,
                Value::Object(named) if MAPS.contains(&&**keyword) => {
                    let max = if keyword == MAPS[0] { PROPERTIES_MAX } else { PATTERNS_MAX };
                    if named.len() > max {
                        let problem = format!("'{keyword}' has {} entries, more than the limit of {max}", named.len());
                        return Err(GrammarError::Schema { place: self.place(at), problem });
                    }
                    named.iter().try_for_each(|(name, value)| self.add(open, node(value, Some(PathStep::Key(name)))))?;
                }
                Value::Array(list) if LISTS.contains(&&**keyword) => {
                    list.iter().enumerate().try_for_each(|(i, value)| self.add(open, node(value, Some(PathStep::Index(i)))))?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks that all patterns are supported, and that no property is described twice. llguidance notices the latter only when it cannot
    /// continue a text.
    fn check_patterns(&mut self, at: usize, object: &'a Map<String, Value>) -> Result<(), GrammarError> {
        if let Some(Value::String(pattern)) = object.get("pattern")
            && let Err(problem) = supported(pattern)
        {
            self.refuse(at, "pattern", None, problem)?;
        }
        let (Some(Value::Object(patterns)), properties) = (object.get(MAPS[1]), object.get(MAPS[0]).and_then(Value::as_object))
        else {
            return Ok(());
        };
        for pattern in patterns.keys().take(PATTERNS_MAX) {
            let problem = match supported(pattern) {
                Err(problem) => Some(problem),
                Ok(()) => overlap(pattern, properties),
            };
            if let Some(problem) = problem {
                self.refuse(at, MAPS[1], Some(pattern), problem)?;
            }
        }
        Ok(())
    }

    fn refuse(&mut self, at: usize, keyword: &'static str, entry: Option<&str>, problem: String) -> Result<(), GrammarError> {
        if self.unenforced == UnenforcedKeywords::Refused {
            return Err(GrammarError::Schema { place: self.place(at), problem });
        }
        self.dropped.push(Dropped { object: self.written(at, "", "/", "/"), keyword, entry: entry.map(str::to_owned) });
        Ok(())
    }

    /// Returns the path of a schema for error messages, such as `$.properties.to`.
    fn place(&self, at: usize) -> String {
        self.written(at, "$", ".", "[")
    }

    /// Returns the path of a schema from the root, with these texts before everything, each key and each index.
    fn written(&self, mut at: usize, root: &str, key: &str, index: &str) -> String {
        let mut parts = Vec::new();
        let is_pointer = index == "/";
        loop {
            let node = &self.nodes[at];
            for step in node.steps.iter().rev().flatten() {
                parts.push(match step {
                    PathStep::Key(name) if is_pointer => format!("{key}{}", name.replace('~', "~0").replace('/', "~1")),
                    PathStep::Key(name) => format!("{key}{name}"),
                    PathStep::Index(i) if is_pointer => format!("{index}{i}"),
                    PathStep::Index(i) => format!("{index}{i}]"),
                });
            }
            if node.steps[0].is_none() {
                parts.push(if is_pointer { node.pointer.to_owned() } else { node.pointer.replace('/', key) });
                break;
            }
            at = node.parent;
        }
        parts.push(root.to_owned());
        parts.reverse();
        parts.concat()
    }
}

fn limit(found: usize, max: usize, unit: &'static str) -> Result<(), GrammarError> {
    if found > max { Err(GrammarError::TooLarge { found, max, unit }) } else { Ok(()) }
}

/// Checks that llguidance supports the pattern. It builds no automaton for the whole pattern, so repetitions may be long.
fn supported(pattern: &str) -> Result<(), String> {
    let problem = |error| format!("the pattern '{pattern}' is not supported: {}", syntax_problem(&error));
    regex_syntax::parse(pattern).map(drop).map_err(problem)
}

/// Returns why the pattern cannot be enforced together with these properties: it describes one of them as well, or it needs too much memory to be
/// compared with them.
fn overlap(pattern: &str, properties: Option<&Map<String, Value>>) -> Option<String> {
    let properties = properties.filter(|properties| !properties.is_empty())?;
    let config = Regex::config().nfa_size_limit(Some(PATTERN_BYTES_MAX));
    let Ok(regex) = Regex::builder().configure(config).build(pattern) else {
        return Some(format!(
            "the pattern '{pattern}' of 'patternProperties' is too large to be compared with 'properties'; shorten it"
        ));
    };
    let name = properties.keys().take(PROPERTIES_MAX).find(|name| regex.is_match(name.as_bytes()))?;
    Some(format!("'properties' and the pattern '{pattern}' of 'patternProperties' both describe '{name}'; describe it once"))
}

fn syntax_problem(error: &regex_syntax::Error) -> String {
    match error {
        regex_syntax::Error::Parse(error) => error.kind().to_string(),
        regex_syntax::Error::Translate(error) => error.kind().to_string(),
        other => other.to_string(),
    }
}
