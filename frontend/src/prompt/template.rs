//! Renders a conversation with a model's chat template.

mod abilities;
mod client;
mod environment;
mod json;
mod method;
mod python;

pub(crate) use client::{SOURCE_BYTES_MAX as CLIENT_SOURCE_BYTES_MAX, STACK_BYTES as CLIENT_STACK_BYTES};

use crate::{chat::Abilities, model::error::ServedModelError};
use minijinja::{Environment, Error, ErrorKind, context, value::Serde};
use serde_json::{Map, Value};
use std::{collections::HashSet, io};

/// The template of ChatML, the conversation format of `--engine sim`.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
     {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

const NAME: &str = "chat";

/// The maximum number of instructions for one rendering. The templates of the supported families need fewer than 300 per message. This
/// limit allows 600 per message for the maximum number of messages; executing it takes about half a second.
const STEPS_MAX: u64 = 10_000_000;
/// The maximum text size for the short conversations with which [`ChatTemplate::new`] tests a template. Templates with a built-in system
/// message write a few KB.
const PROBE_BYTES_MAX: usize = 1 << 20;

/// A model's chat template, compiled.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    /// The names of the variables that the template reads.
    reads: HashSet<String>,
    abilities: Abilities,
}

/// Why a conversation cannot be rendered.
#[derive(Debug)]
pub(crate) enum RenderError {
    /// The template refuses the conversation, or its execution fails.
    Refused(Error),
    /// The template executes more than [`STEPS_MAX`] instructions.
    Steps,
    /// The text is longer than the caller allows.
    TooLong,
}

/// A writer that fails beyond `max` bytes.
struct Bounded {
    bytes: Vec<u8>,
    max: usize,
}

impl io::Write for Bounded {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + text.len() > self.max {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ChatTemplate {
    /// Compiles a template as Hugging Face's `transformers` does. To find out what the template can render, and whether it ends, renders
    /// short conversations, which the template may refuse.
    ///
    /// # Errors
    /// The template does not compile, or exceeds the limits for a short conversation.
    pub(crate) fn new(source: &str, bos: &str, eos: &str) -> Result<Self, ServedModelError> {
        Self::compile(environment::environment(jiff::Zoned::now)?, source, environment::rewrite(source), bos, eos)
    }

    /// Compiles a client's template, whose values cannot be nested deeply. This and the rendering need a stack of [`CLIENT_STACK_BYTES`].
    ///
    /// # Errors
    /// As for [`ChatTemplate::new`].
    pub(crate) fn of_client(source: &str, bos: &str, eos: &str) -> Result<Self, ServedModelError> {
        let mut environment = environment::environment(jiff::Zoned::now)?;
        client::add_filters(&mut environment, STEPS_MAX);
        let rewritten = client::rewrite(&environment::rewrite(source))?;
        Self::compile(environment, source, rewritten, bos, eos)
    }

    fn compile(
        mut environment: Environment<'static>,
        source: &str,
        rewritten: String,
        bos: &str,
        eos: &str,
    ) -> Result<Self, ServedModelError> {
        environment.set_fuel(Some(STEPS_MAX));
        environment.add_template_owned(NAME, rewritten)?;
        let reads = environment.get_template(NAME)?.undeclared_variables(false);
        let (source, bos, eos) = (source.to_owned(), bos.to_owned(), eos.to_owned());
        let mut template = Self { environment, source, bos, eos, reads, abilities: Abilities::default() };
        let endless = |_| ServedModelError::TemplateEndless(STEPS_MAX, PROBE_BYTES_MAX);
        template.abilities = abilities::probe(&template, PROBE_BYTES_MAX).map_err(endless)?;
        Ok(template)
    }

    /// Compiles a client's template for the same model.
    ///
    /// # Errors
    /// As for [`ChatTemplate::of_client`].
    pub(crate) fn replaced(&self, source: &str) -> Result<Self, ServedModelError> {
        Self::of_client(source, &self.bos, &self.eos)
    }

    pub(crate) fn source(&self) -> &str {
        &self.source
    }

    pub(crate) fn abilities(&self) -> Abilities {
        self.abilities
    }

    /// Whether the template reads the variable of this name.
    pub(crate) fn reads(&self, name: &str) -> bool {
        self.reads.contains(name)
    }

    /// Returns the template of `--engine sim`.
    pub(crate) fn chatml() -> Self {
        Self::new(CHATML, "", "<|im_end|>").expect("the built-in template compiles")
    }

    /// Renders a conversation, whose variables are [`Conversation::variables`](crate::chat::Conversation::variables). The text has at most
    /// `bytes_max` bytes.
    ///
    /// # Errors
    /// The template refuses the conversation, or exceeds [`STEPS_MAX`] or `bytes_max`.
    pub(crate) fn render(&self, variables: Map<String, Value>, bytes_max: usize) -> Result<String, RenderError> {
        let context = context! { bos_token => self.bos.as_str(), eos_token => self.eos.as_str(), ..Serde(variables) };
        let mut text = Bounded { bytes: Vec::new(), max: bytes_max };
        let rendered = self.environment.get_template(NAME).and_then(|template| template.render_captured_to(context, &mut text));
        match rendered.map_err(|error| (error.kind(), error)) {
            Ok(_) => Ok(String::from_utf8(text.bytes).expect("templates write whole strings")),
            Err((ErrorKind::OutOfFuel, _)) => Err(RenderError::Steps),
            Err((ErrorKind::WriteFailure, _)) => Err(RenderError::TooLong),
            Err((_, error)) => Err(RenderError::Refused(error)),
        }
    }
}

#[cfg(test)]
mod tests;
