//! Converts structural tags to Lark grammars. A structural tag describes free text with constrained parts between tags.
//!
//! There are two forms: the older form lists structures and triggers; the newer form, of XGrammar, nests formats.

use crate::{
    GrammarError,
    lark::{UnenforcedKeywords, literal, with_options},
};
use serde::Deserialize;
use serde_json::Value;

pub(crate) fn to_lark(tags: &str) -> Result<String, GrammarError> {
    let tags: StructuralTag =
        serde_json::from_str(tags).map_err(|error| GrammarError::invalid(format!("not a structural tag: {error}")))?;
    let format = match tags {
        StructuralTag { format: Some(format), .. } => format,
        StructuralTag { structures: Some(structures), triggers: Some(triggers), .. } => {
            let tag = |of: Structure| TagContent {
                begin: of.begin,
                content: Box::new(TagFormat::JsonSchema { json_schema: of.schema }),
                end: of.end.into(),
            };
            let tags = structures.into_iter().map(tag).collect();
            TagFormat::TriggeredTags(TriggeredTags { triggers, tags, at_least_one: false, stop_after_first: false })
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
    format: Option<TagFormat>,
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
enum TagFormat {
    ConstString { value: String },
    JsonSchema { json_schema: Value },
    Regex { pattern: String },
    AnyText {},
    Sequence { elements: Vec<TagFormat> },
    Or { elements: Vec<TagFormat> },
    Tag(TagContent),
    TriggeredTags(TriggeredTags),
    TagsWithSeparator(TagsWithSeparator),
}

#[derive(Deserialize)]
struct TagContent {
    begin: String,
    content: Box<TagFormat>,
    end: TagEnd,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TagEnd {
    One(String),
    Any(Vec<String>),
}

impl From<String> for TagEnd {
    fn from(end: String) -> Self {
        Self::One(end)
    }
}

#[derive(Deserialize)]
struct TriggeredTags {
    triggers: Vec<String>,
    tags: Vec<TagContent>,
    #[serde(default)]
    at_least_one: bool,
    #[serde(default)]
    stop_after_first: bool,
}

#[derive(Deserialize)]
struct TagsWithSeparator {
    tags: Vec<TagContent>,
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
    fn expression(&mut self, format: &TagFormat, is_last: bool, depth: usize) -> Result<String, GrammarError> {
        if depth > DEPTH_MAX {
            return Err(GrammarError::TooLarge { found: depth, max: DEPTH_MAX, unit: "nested formats" });
        }
        match format {
            TagFormat::ConstString { value } => Ok(literal(value)),
            TagFormat::JsonSchema { json_schema } => {
                Ok(format!("%json {}", with_options(json_schema.clone(), UnenforcedKeywords::Refused)?))
            }
            TagFormat::Regex { pattern } => Ok(format!("/{}/", llguidance::regex_to_lark(pattern, ""))),
            TagFormat::AnyText {} if is_last => Ok("TEXT".to_owned()),
            TagFormat::AnyText {} => {
                Err(GrammarError::invalid("'any_text' must be the last element or the content of a tag that has an end"))
            }
            TagFormat::Sequence { elements } => {
                let last = elements.len().saturating_sub(1);
                let all = elements.iter().enumerate();
                let all = all.map(|(i, element)| self.expression(element, is_last && i == last, depth + 1));
                Ok(format!("({})", all.collect::<Result<Vec<_>, _>>()?.join(" ")))
            }
            TagFormat::Or { elements } => {
                let all = elements.iter().map(|element| self.expression(element, is_last, depth + 1));
                Ok(format!("({})", all.collect::<Result<Vec<_>, _>>()?.join(" | ")))
            }
            TagFormat::Tag(tag) => {
                let rest = self.tag(&tag.begin, tag, depth)?;
                Ok(format!("({rest})"))
            }
            TagFormat::TriggeredTags(tags) => self.triggered(tags, is_last, depth),
            TagFormat::TagsWithSeparator(tags) => {
                let each = tags.tags.iter().map(|tag| self.tag(&tag.begin, tag, depth)).collect::<Result<Vec<_>, _>>()?;
                let each = self.rule("", &each.join(" | "));
                let more = if tags.stop_after_first { String::new() } else { format!("({} {each})*", literal(&tags.separator)) };
                Ok(format!("({each} {more}){}", if tags.at_least_one { "" } else { "?" }))
            }
        }
    }

    /// Returns the expression for a tag whose opening text still lacks `begin`.
    fn tag(&mut self, begin: &str, tag: &TagContent, depth: usize) -> Result<String, GrammarError> {
        let ends = match &tag.end {
            TagEnd::One(end) => vec![literal(end)],
            TagEnd::Any(ends) => ends.iter().map(|end| literal(end)).collect(),
        };
        let end = format!("({})", ends.join(" | "));
        let rest = match (&*tag.content, ends.iter().any(|end| end == "\"\"")) {
            (TagFormat::AnyText {}, false) => self.rule("[lazy]", &format!("TEXT {end}")),
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
