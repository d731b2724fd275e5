//! Renders a conversation with a model's chat template.

mod abilities;
mod environment;
mod instrument;
mod json;
mod limits;
mod method;
mod python;

use crate::{chat::Abilities, error::ServedModelError};
use instrument::Program;
use minijinja::{
    AutoEscape, Environment, Error, ErrorKind, context,
    machinery::{eval, make_string_output},
    value::Serde,
};
use serde_json::{Map, Value};
use std::collections::HashSet;
use tandem_grammar::{StackError, on_large_stack};

/// The template of ChatML, the conversation format of `--engine sim`.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
     {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

const NAME: &str = "chat";
const THREAD: &str = "tandem-template";

/// The maximum length of a template, in bytes. The longest templates of known models have 20 KB. Each byte adds at most one level to a syntax
/// tree or a value, for which the stack of [`on_large_stack`] is enough.
const SOURCE_BYTES_MAX: usize = 64 << 10;

/// The maximum number of instructions for one rendering. The templates of the supported families need fewer than 300 per message. This
/// limit allows 600 per message for the maximum number of messages; executing it takes about half a second.
const STEPS_MAX: u64 = 10_000_000;
/// The maximum text size for the short conversations with which [`ChatTemplate::new`] tests a template. Templates with a built-in system
/// message write a few KB.
const PROBE_BYTES_MAX: usize = 1 << 20;

/// A model's chat template, compiled.
pub struct ChatTemplate {
    environment: Environment<'static>,
    program: Program,
    source: String,
    bos: String,
    eos: String,
    /// The names of the variables that the template reads.
    reads: HashSet<String>,
    abilities: Abilities,
}

/// Why a conversation cannot be rendered.
#[derive(Debug)]
pub enum RenderError {
    /// The template refuses the conversation, or its execution fails.
    Refused(Error),
    /// The template executes too many instructions, or exceeds its limits on memory and time.
    Exhausted,
    /// The text is longer than the caller allows.
    TooLong,
    /// The thread for the template cannot be started, or the rendering panicked.
    Failed(StackError),
}

impl ChatTemplate {
    /// Compiles a template as Hugging Face's `transformers` does. To find out what the template can render, and whether it ends, renders
    /// short conversations, which the template may refuse.
    ///
    /// # Errors
    /// The template is too long, does not compile, or exceeds the limits for a short conversation.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, ServedModelError> {
        if source.len() > SOURCE_BYTES_MAX {
            return Err(ServedModelError::TemplateLength(source.len(), SOURCE_BYTES_MAX));
        }
        on_large_stack(THREAD, || Self::compile(source, bos, eos))?
    }

    fn compile(source: &str, bos: &str, eos: &str) -> Result<Self, ServedModelError> {
        let mut environment = environment::environment(jiff::Zoned::now)?;
        environment.set_fuel(Some(STEPS_MAX));
        let rewritten = instrument::rewrite(&environment::rewrite(source))?;
        let reads = environment.template_from_named_str(NAME, &rewritten)?.undeclared_variables(false);
        let program = instrument::compile(NAME, rewritten)?;
        let (source, bos, eos) = (source.to_owned(), bos.to_owned(), eos.to_owned());
        let mut template = Self { environment, program, source, bos, eos, reads, abilities: Abilities::default() };
        let endless = |_| ServedModelError::TemplateEndless(STEPS_MAX, PROBE_BYTES_MAX);
        template.abilities = abilities::probe(&template, PROBE_BYTES_MAX).map_err(endless)?;
        Ok(template)
    }

    /// Returns the text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns what the template can render.
    pub fn abilities(&self) -> Abilities {
        self.abilities
    }

    /// Whether the template reads the variable of this name.
    pub fn reads(&self, name: &str) -> bool {
        self.reads.contains(name)
    }

    /// Returns the template of `--engine sim`.
    pub fn chatml() -> Self {
        Self::new(CHATML, "", "<|im_end|>").expect("the built-in template compiles")
    }

    /// Renders a conversation, whose variables are [`Conversation::variables`](crate::chat::Conversation::variables). The text has at most
    /// `bytes_max` bytes.
    ///
    /// # Errors
    /// The template refuses the conversation, or exceeds its limits, among them `bytes_max`.
    pub fn render(&self, variables: Map<String, Value>, bytes_max: usize) -> Result<String, RenderError> {
        on_large_stack(THREAD, || self.render_here(variables, bytes_max)).unwrap_or_else(|error| Err(RenderError::Failed(error)))
    }

    /// Renders a conversation on this thread, which must have a large stack.
    fn render_here(&self, variables: Map<String, Value>, bytes_max: usize) -> Result<String, RenderError> {
        let input_bytes = variables.values().map(text_bytes).sum();
        let context = context! { bos_token => self.bos.as_str(), eos_token => self.eos.as_str(), ..Serde(variables) };
        let rendered = evaluate(&self.environment, &self.program, context, input_bytes);
        match rendered.map_err(|error| (error.kind(), error)) {
            Ok(text) if text.len() > bytes_max => Err(RenderError::TooLong),
            Ok(text) => Ok(text),
            Err((ErrorKind::OutOfFuel, _)) => Err(RenderError::Exhausted),
            Err((ErrorKind::WriteFailure, _)) => Err(RenderError::TooLong),
            Err((_, error)) => Err(RenderError::Refused(error)),
        }
    }
}

/// Renders a template whose variables have this many bytes of text.
fn evaluate(
    environment: &Environment<'static>,
    program: &Program,
    variables: minijinja::Value,
    input_bytes: usize,
) -> Result<String, Error> {
    limits::begin(input_bytes);
    let mut text = String::new();
    let mut output = make_string_output(&mut text);
    eval(environment, &program.main, variables, &program.blocks, &mut output, AutoEscape::None)?;
    Ok(text)
}

/// Returns the size of all texts in the value, in bytes.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(members) => members.iter().map(|(name, member)| name.len() + text_bytes(member)).sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

#[cfg(test)]
mod tests;
