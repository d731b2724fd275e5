//! Converts structural tags to Lark grammars. A structural tag describes free text with constrained parts between tags.
//!
//! There are two forms: the older form lists structures and triggers; the newer form, of XGrammar, nests formats.

use crate::{
    GrammarError,
    lark::{literal, with_options},
};
use serde::Deserialize;
use serde_json::Value;

pub(crate) fn to_lark(tags: &str) -> Result<String, GrammarError> {
    let tags: StructuralTag =
        serde_json::from_str(tags).map_err(|error| GrammarError::invalid(format!("not a structural tag: {error}")))?;
    let format = match tags {
        StructuralTag { format: Some(format), .. } => format,
        StructuralTag { structures: Some(structures), triggers: Some(triggers), .. } => {
            let tag = |of: Structure| Tag {
                begin: of.begin,
                content: Box::new(Format::JsonSchema { json_schema: of.schema }),
                end: of.end.into(),
            };
            let tags = structures.into_iter().map(tag).collect();
            Format::TriggeredTags(TriggeredTags { triggers, tags, at_least_one: false, stop_after_first: false })
        }
        _ => return Err(GrammarError::invalid("a structural tag needs 'format', or 'structures' and 'triggers'")),
    };
    let mut lark = Lark::default();
    let start = lark.expression(&format, true, 0)?;
    Ok(format!("start: {start}\n{}TEXT: {TEXT}\n", lark.rules))
}

const TEXT: &str = r"/(.|\n)*/";
/// Maximum number of levels of nested formats.
const DEPTH_MAX: usize = 32;

#[derive(Deserialize)]
struct StructuralTag {
    format: Option<Format>,
    structures: Option<Vec<Structure>>,
    triggers: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct Structure {
    begin: String,
    schema: Value,
    end: String,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Format {
    ConstString { value: String },
    JsonSchema { json_schema: Value },
    Regex { pattern: String },
    AnyText {},
    Sequence { elements: Vec<Format> },
    Or { elements: Vec<Format> },
    Tag(Tag),
    TriggeredTags(TriggeredTags),
    TagsWithSeparator(TagsWithSeparator),
}

#[derive(Deserialize)]
struct Tag {
    begin: String,
    content: Box<Format>,
    end: End,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum End {
    One(String),
    Any(Vec<String>),
}

impl From<String> for End {
    fn from(end: String) -> Self {
        Self::One(end)
    }
}

#[derive(Deserialize)]
struct TriggeredTags {
    triggers: Vec<String>,
    tags: Vec<Tag>,
    #[serde(default)]
    at_least_one: bool,
    #[serde(default)]
    stop_after_first: bool,
}

#[derive(Deserialize)]
struct TagsWithSeparator {
    tags: Vec<Tag>,
    separator: String,
    #[serde(default)]
    at_least_one: bool,
    #[serde(default)]
    stop_after_first: bool,
}

#[derive(Default)]
struct Lark {
    rules: String,
    count: usize,
}

impl Lark {
    fn rule(&mut self, attributes: &str, body: &str) -> String {
        let name = format!("rule_{}", self.count);
        self.count += 1;
        self.rules += &format!("{name}{attributes}: {body}\n");
        name
    }

    /// Returns the expression for a format. `is_last` says whether the format is the last part of the text.
    fn expression(&mut self, format: &Format, is_last: bool, depth: usize) -> Result<String, GrammarError> {
        if depth > DEPTH_MAX {
            return Err(GrammarError::TooLarge { found: depth, max: DEPTH_MAX, unit: "nested formats" });
        }
        match format {
            Format::ConstString { value } => Ok(literal(value)),
            Format::JsonSchema { json_schema } => Ok(format!("%json {}", with_options(json_schema.clone(), false)?)),
            Format::Regex { pattern } => Ok(format!("/{}/", llguidance::regex_to_lark(pattern, ""))),
            Format::AnyText {} if is_last => Ok("TEXT".to_owned()),
            Format::AnyText {} => {
                Err(GrammarError::invalid("'any_text' must be the last element or the content of a tag that has an end"))
            }
            Format::Sequence { elements } => {
                let last = elements.len().saturating_sub(1);
                let all = elements.iter().enumerate();
                let all = all.map(|(i, element)| self.expression(element, is_last && i == last, depth + 1));
                Ok(format!("({})", all.collect::<Result<Vec<_>, _>>()?.join(" ")))
            }
            Format::Or { elements } => {
                let all = elements.iter().map(|element| self.expression(element, is_last, depth + 1));
                Ok(format!("({})", all.collect::<Result<Vec<_>, _>>()?.join(" | ")))
            }
            Format::Tag(tag) => {
                let rest = self.tag(&tag.begin, tag, depth)?;
                Ok(format!("({rest})"))
            }
            Format::TriggeredTags(tags) => self.triggered(tags, is_last, depth),
            Format::TagsWithSeparator(tags) => {
                let each = tags.tags.iter().map(|tag| self.tag(&tag.begin, tag, depth)).collect::<Result<Vec<_>, _>>()?;
                let each = self.rule("", &each.join(" | "));
                let more = if tags.stop_after_first { String::new() } else { format!("({} {each})*", literal(&tags.separator)) };
                Ok(format!("({each} {more}){}", if tags.at_least_one { "" } else { "?" }))
            }
        }
    }

    /// Returns the expression for a tag whose opening text still lacks `begin`.
    fn tag(&mut self, begin: &str, tag: &Tag, depth: usize) -> Result<String, GrammarError> {
        let ends = match &tag.end {
            End::One(end) => vec![literal(end)],
            End::Any(ends) => ends.iter().map(|end| literal(end)).collect(),
        };
        let end = format!("({})", ends.join(" | "));
        let rest = match (&*tag.content, ends.iter().any(|end| end == "\"\"")) {
            (Format::AnyText {}, false) => self.rule("[lazy]", &format!("TEXT {end}")),
            (content, _) => format!("{} {end}", self.expression(content, false, depth + 1)?),
        };
        Ok(format!("{} {rest}", literal(begin)))
    }

    fn triggered(&mut self, tags: &TriggeredTags, is_last: bool, depth: usize) -> Result<String, GrammarError> {
        if tags.tags.is_empty() {
            return Err(GrammarError::invalid("a structural tag needs at least one tag"));
        }
        let mut of_triggers: Vec<(&String, Vec<String>)> = tags.triggers.iter().map(|trigger| (trigger, Vec::new())).collect();
        for tag in &tags.tags {
            let trigger = of_triggers.iter_mut().find(|(trigger, _)| !trigger.is_empty() && tag.begin.starts_with(*trigger));
            let Some((trigger, rests)) = trigger else {
                return Err(GrammarError::invalid(format!("no trigger begins the tag '{}'", tag.begin)));
            };
            rests.push(self.tag(&tag.begin[trigger.len()..], tag, depth)?);
        }
        let of_triggers = of_triggers.into_iter().filter(|(_, rests)| !rests.is_empty());
        let calls: Vec<String> = of_triggers
            .map(|(trigger, rests)| {
                let free = self.rule("[lazy]", &format!("TEXT {}", literal(trigger)));
                self.rule("", &format!("{free} ({})", rests.join(" | ")))
            })
            .collect();
        let calls = format!("({})", calls.join(" | "));
        if !is_last {
            return Err(GrammarError::invalid("'triggered_tags' must be the last element"));
        }
        Ok(match (tags.at_least_one, tags.stop_after_first) {
            (true, true) => calls,
            (true, false) => format!("{calls}+ TEXT"),
            (false, true) => format!("({calls} | TEXT)"),
            (false, false) => format!("{calls}* TEXT"),
        })
    }
}
