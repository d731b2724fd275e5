//! Enforces constraints on generated text: a JSON schema, a regular expression, a choice, or a grammar.
//!
//! A frontend [`check`]s a constraint. A worker [compiles](Vocabulary::compile) it for its model's vocabulary into a [`Matcher`], which reports
//! before each token which tokens are allowed. The parser is llguidance (docs/adr/027-structured-outputs.md).
//!
//! Constraints come from clients. llguidance follows rules, references and nested schemas by recursion and without limits, so they are counted
//! before it sees them, and it runs on a thread with a large stack.

mod call_step;
mod ebnf;
mod error;
mod input_matcher;
mod lark;
mod marker;
mod mask;
mod matcher;
mod rules;
mod schema;
mod source;
mod stack;
mod structural_tag;
mod vocabulary;

pub use ebnf::is_ebnf;
pub use error::{GrammarError, MatchError};
pub use mask::Mask;
pub use matcher::Matcher;
pub use stack::{StackError, on_large_stack};
pub use vocabulary::Vocabulary;

/// A constraint on a generated text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Constraint {
    /// The texts that the constraint allows.
    pub kind: Kind,
    /// If set, everything up to and including the first occurrence of this text, the marker, is free, and the constraint applies to the rest. An
    /// answer that ends without the marker has no constraint. Reasoning models need this: their marker is for example `</think>`.
    pub begins_after: Option<String>,
}

/// The texts that a constraint allows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The text must be JSON that is valid by a schema.
    JsonSchema {
        /// The JSON schema, as text.
        schema: String,
        /// Whether keywords that cannot be enforced are ignored. If not, a schema that has such a keyword is refused.
        lenient: bool,
    },
    /// The text must be a JSON object.
    JsonObject,
    /// The regular expression must match the whole text.
    Regex(String),
    /// The text must be one of these.
    Choice(Vec<String>),
    /// The text must be a sentence of this grammar. It is written in llguidance's variant of Lark, or in the EBNF of llama.cpp (GBNF), vLLM and
    /// SGLang, with rules `name ::= …` and the start rule `root`.
    Grammar(String),
    /// The text may be free, except between certain tags. The tags and their constraints are described in JSON, as for vLLM and SGLang.
    StructuralTag(String),
    /// The text is free, except the calls of these tools.
    CallInputs(Vec<CallInput>),
}

/// A tool whose input is a text, and the ways in which a model writes calls of it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CallInput {
    /// The ways to write a call.
    pub places: Vec<InputPlace>,
    /// The texts that the input may be: [`Kind::Grammar`] or [`Kind::Regex`].
    pub kind: Kind,
}

/// A way to write a call of a tool. There may be white space before each part but the first one. An empty part stands for letters and digits, or
/// nothing.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct InputPlace {
    /// The parts up to the end of the tool's name. Where a text has them, the constraint applies.
    pub begin: Vec<String>,
    /// The parts before the input.
    pub head: Vec<String>,
    /// The text that ends the input, which does not have it; `None` if the input is a string of JSON, and `head` ends with its quotation mark.
    pub end: Option<String>,
    /// The parts after the input.
    pub tail: Vec<String>,
}

impl InputPlace {
    /// Returns the way to write a call with these parts.
    pub fn new(begin: &[&str], head: &[&str], end: Option<&str>, tail: &[&str]) -> Self {
        let texts = |parts: &[&str]| parts.iter().map(|part| (*part).to_owned()).collect();
        Self { begin: texts(begin), head: texts(head), end: end.map(str::to_owned), tail: texts(tail) }
    }
}

impl From<Kind> for Constraint {
    fn from(kind: Kind) -> Self {
        Self { kind, begins_after: None }
    }
}

impl Constraint {
    /// Returns the total length of all texts of the constraint in bytes, without the marker.
    pub fn text_bytes(&self) -> usize {
        match &self.kind {
            Kind::JsonSchema { schema: text, .. } | Kind::Regex(text) | Kind::Grammar(text) | Kind::StructuralTag(text) => {
                text.len()
            }
            Kind::JsonObject => 0,
            Kind::Choice(texts) => texts.iter().map(String::len).sum(),
            Kind::CallInputs(inputs) => inputs.iter().map(CallInput::text_bytes).sum(),
        }
    }
}

impl CallInput {
    fn text_bytes(&self) -> usize {
        let texts = |place: &InputPlace| {
            let InputPlace { begin, head, end, tail } = place;
            // Each part needs memory besides its text.
            begin.iter().chain(head).chain(end).chain(tail).map(|text| text.len() + 1).sum::<usize>()
        };
        let kind = if let Kind::Grammar(text) | Kind::Regex(text) = &self.kind { text.len() } else { 0 };
        kind + self.places.iter().map(texts).sum::<usize>()
    }
}

/// Maximum size of a constraint in bytes: the total length of all its texts.
pub const CONSTRAINT_BYTES_MAX: usize = 256 * 1024;
/// Maximum number of texts of a choice.
pub const CHOICES_MAX: usize = 4_096;

/// Maximum number of tools whose inputs a constraint may have.
pub const CALL_INPUTS_MAX: usize = 32;
/// Maximum number of ways to write a call of one tool.
const PLACES_MAX: usize = 4;

/// Checks whether the constraint can be enforced. Blocks its thread for milliseconds, and up to about a second for a very large
/// constraint.
///
/// # Errors
/// Returns a [`GrammarError`] with the problem and the part of the constraint that has it.
pub fn check(constraint: &Constraint) -> Result<(), GrammarError> {
    Vocabulary::bytes().compile(constraint, &[]).map(drop)
}

#[cfg(test)]
mod tests;
