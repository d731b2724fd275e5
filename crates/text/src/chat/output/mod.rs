//! Splits a model's text into reasoning, content and tool calls while it is generated.
//!
//! The result does not depend on how the text is split into chunks, so streamed and not streamed answers are equal. Text is held back only while it
//! may be the beginning of a tag or of a tool call. Text that looks like a tool call at first and turns out to be none becomes content.

mod calls;
mod format;
mod harmony;
mod json;
mod piece;
mod reasoning;
mod tags;

pub use format::ToolCallParser;
pub(crate) use json::repaired;
pub use piece::{Piece, Pieces};
pub use reasoning::ReasoningParser;

use super::Tools;
use calls::Calls;
use harmony::{Harmony, HarmonyPart};
use reasoning::{FindCalls, ReasoningSplitter};
use std::sync::Arc;

/// The settings of splitting an answer.
#[derive(Clone, Debug, Default)]
pub struct OutputFormat {
    /// How reasoning is separated from the answer.
    pub reasoning: ReasoningFormat,
    /// How tool calls are found.
    pub tools: ToolFormat,
}

/// How reasoning is split from the rest of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReasoningFormat {
    /// How the model marks its reasoning.
    pub parser: ReasoningParser,
    /// Whether the prompt ends within reasoning: the template has written the tag that opens it.
    pub is_open: bool,
    /// Whether the client has asked not to receive the reasoning.
    pub is_hidden: bool,
}

/// How tool calls are found in an answer.
#[derive(Clone, Debug, Default)]
pub struct ToolFormat {
    /// How the model writes tool calls.
    pub parser: ToolCallParser,
    /// The tools that the model may call.
    pub tools: Arc<Tools>,
}

impl OutputFormat {
    /// Returns the text that ends the reasoning with which the answer begins; `None` if the answer does not begin with reasoning.
    pub fn reasoning_end(&self) -> Option<&'static str> {
        if self.is_harmony() {
            return Some(harmony::FINAL);
        }
        let tags = self.reasoning.parser.tags().filter(|_| self.reasoning.is_open);
        tags.map(|(_, end)| end)
    }

    fn is_harmony(&self) -> bool {
        self.reasoning.parser == ReasoningParser::Harmony || self.tools.parser == ToolCallParser::Harmony
    }
}

/// Splits the text of one sample into deltas of reasoning, content and tool calls.
pub struct OutputParser {
    /// Splits the answer into messages, if the model writes Harmony.
    harmony: Option<Harmony>,
    reasoning: Option<ReasoningSplitter>,
    hides_reasoning: bool,
    calls: Option<Calls>,
}

impl OutputParser {
    /// Returns a parser for one sample.
    pub fn new(format: &OutputFormat) -> Self {
        Self {
            harmony: format.is_harmony().then(Harmony::default),
            reasoning: ReasoningSplitter::new(format.reasoning),
            hides_reasoning: format.reasoning.is_hidden,
            calls: Calls::new(&format.tools),
        }
    }

    /// Adds a chunk of text.
    pub fn push(&mut self, text: &str, pieces: &mut Pieces) {
        if let Some(mut harmony) = self.harmony.take() {
            harmony.push(text, |part| self.message_part(part, pieces));
            self.harmony = Some(harmony);
            return;
        }
        self.through_reasoning(pieces, text, |reasoning, calls, thoughts, answer| reasoning.push(text, calls, thoughts, answer));
    }

    /// Returns whether the special token with this name may be a tag.
    pub fn has_tag(&self, name: &str) -> bool {
        let is_of_message = self.harmony.is_some() && Harmony::has_tag(name);
        is_of_message || self.calls.is_some() || self.reasoning.as_ref().is_some_and(|reasoning| reasoning.wants(name))
    }

    /// Adds the name of a special token. The name has an effect only if it is a tag of the model's reasoning or tool calls, and is never content.
    pub fn special(&mut self, name: &str, pieces: &mut Pieces) {
        let is_tag = match &self.harmony {
            Some(_) => Harmony::has_tag(name),
            None => self.reasoning.as_ref().is_some_and(|reasoning| reasoning.wants(name)),
        };
        if is_tag {
            return self.push(name, pieces);
        }
        let Some(calls) = &self.calls else { return };
        if self.reasoning.as_ref().is_some_and(|reasoning| !reasoning.is_past()) {
            if !calls.opens_with(name) {
                return;
            }
            // Some models begin a tool call without closing their reasoning.
            self.through_reasoning(pieces, "", ReasoningSplitter::leave);
        }
        if let Some(calls) = &mut self.calls {
            calls.special(name, pieces);
        }
    }

    /// Ends the text.
    pub fn finish(&mut self, pieces: &mut Pieces) {
        if let Some(mut harmony) = self.harmony.take() {
            harmony.finish(|part| self.message_part(part, pieces));
        }
        self.through_reasoning(pieces, "", ReasoningSplitter::finish);
        if let Some(calls) = &mut self.calls {
            calls.finish(pieces);
        }
    }

    fn message_part(&mut self, part: HarmonyPart<'_>, pieces: &mut Pieces) {
        match part {
            HarmonyPart::Reasoning(text) if !self.hides_reasoning => pieces.reasoning(text),
            HarmonyPart::Reasoning(_) => {}
            HarmonyPart::Content(text) | HarmonyPart::Arguments(text) => self.answer(text, pieces),
            HarmonyPart::Final => self.calls.iter_mut().for_each(Calls::restart),
            HarmonyPart::Call(name) => self.calls.iter_mut().for_each(|calls| calls.begin(name, pieces)),
            HarmonyPart::CallEnd => self.calls.iter_mut().for_each(|calls| calls.end(pieces)),
        }
    }

    /// Calls `step` with the reasoning, and adds the reasoning text and the answer text that `step` returns. If the model has no reasoning, adds
    /// `text`.
    fn through_reasoning(
        &mut self,
        pieces: &mut Pieces,
        text: &str,
        step: impl FnOnce(&mut ReasoningSplitter, Option<&dyn FindCalls>, &mut String, &mut String),
    ) {
        let Some(reasoning) = &mut self.reasoning else { return self.answer(text, pieces) };
        let (mut thoughts, mut answer) = (String::new(), String::new());
        step(reasoning, self.calls.as_ref().map(|calls| calls as &dyn FindCalls), &mut thoughts, &mut answer);
        if !self.hides_reasoning {
            pieces.reasoning(&thoughts);
        }
        self.answer(&answer, pieces);
    }

    fn answer(&mut self, text: &str, pieces: &mut Pieces) {
        match &mut self.calls {
            Some(calls) => calls.push(text, pieces),
            None => pieces.content(text),
        }
    }

    /// Returns whether the text so far ends within reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningSplitter::is_inside)
            || self.harmony.as_ref().is_some_and(Harmony::is_reasoning)
    }

    /// Returns whether the next text is a part of a call that a constraint enforces. Stop strings have no effect there.
    pub fn is_in_constrained_call(&self) -> bool {
        !self.is_reasoning() && self.calls.as_ref().is_some_and(Calls::is_in_constrained_call)
    }

    /// Returns whether the text so far has tool calls and the last one is complete.
    pub fn has_complete_calls(&self) -> bool {
        self.calls.as_ref().is_some_and(Calls::are_complete)
    }

    /// Returns whether the answer is complete whatever text follows: it may have only one tool call, and has it.
    pub fn is_complete(&self) -> bool {
        self.calls.as_ref().is_some_and(Calls::is_complete)
    }
}

#[cfg(test)]
mod tests;
