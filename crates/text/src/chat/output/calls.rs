//! Separates tool calls from the content of an answer.

use super::{
    ToolCallParser, ToolFormat,
    format::{After, ArgumentsReader, Start},
    json::ReadProgress,
    piece::{Piece, Pieces},
    reasoning::FindCalls,
    tags::{next_try, partial_suffix},
};
use crate::chat::{ToolChoice, Tools};
use std::sync::Arc;

#[derive(Clone)]
pub(super) struct Calls {
    /// The model's own format, which determines the form of ids.
    model: ToolCallParser,
    parser: ToolCallParser,
    tools: Arc<Tools>,
    state: CallState,
    /// The text that was received and is not processed yet.
    held: String,
    /// The length at which `held` is parsed again.
    next_try: usize,
    /// Line feeds at the end of the content. They are dropped if a call follows, because templates write them again.
    line_feeds: usize,
    /// The names of the special tokens in the text. They are tags and never content.
    specials: Vec<String>,
    count: usize,
    /// Whether the last call ended before its arguments were complete.
    is_cut: bool,
    /// Whether the last call is of a tool whose input has a grammar.
    has_grammar: bool,
    /// Whether the answer has content or a call so far.
    begun: bool,
    /// Whether the text follows directly after a call.
    follows_call: bool,
    /// Whether the answer has content so far.
    has_content: bool,
    is_ended: bool,
}

#[derive(Clone, Debug)]
enum CallState {
    Text,
    /// The text in `held` may begin with a call, after an opening tag of this many bytes.
    Start {
        tag: usize,
    },
    /// The text in `held` continues the arguments of the latest call.
    Arguments {
        reader: ArgumentsReader,
        nested: bool,
    },
    After {
        nested: bool,
    },
    /// The answer has its only call, so all further text is ignored.
    Complete,
}

impl Calls {
    /// Returns `None` if the answer has no tool calls.
    pub(super) fn new(format: &ToolFormat) -> Option<Self> {
        let tools = &format.tools;
        let (parser, state) = match &tools.choice {
            ToolChoice::None => return None,
            ToolChoice::Auto if format.parser == ToolCallParser::None => return None,
            ToolChoice::Auto => (format.parser, CallState::Text),
            // The answer is JSON of the schema that `Tools::required_schema` returns, or the input that `Tools::required_input` describes.
            ToolChoice::Required | ToolChoice::Named(_) => (ToolCallParser::Json, CallState::Text),
        };
        let (held, specials, tools) = (String::new(), Vec::new(), Arc::clone(tools));
        let model = format.parser;
        Some(Self {
            model,
            parser,
            tools,
            state,
            held,
            next_try: 0,
            line_feeds: 0,
            specials,
            count: 0,
            is_cut: false,
            has_grammar: false,
            begun: false,
            follows_call: false,
            has_content: false,
            is_ended: false,
        })
    }

    /// Returns whether there are calls, and the last one is complete.
    pub(super) fn are_complete(&self) -> bool {
        self.count > 0 && !self.is_cut && !matches!(self.state, CallState::Arguments { .. })
    }

    pub(super) fn is_in_constrained_call(&self) -> bool {
        match self.tools.choice {
            ToolChoice::Required | ToolChoice::Named(_) => true,
            ToolChoice::None | ToolChoice::Auto => self.has_grammar && matches!(self.state, CallState::Arguments { .. }),
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        matches!(self.state, CallState::Complete)
    }

    pub(super) fn opens_with(&self, tag: &str) -> bool {
        self.parser.opens().contains(&tag)
    }

    /// Begins a further text: a call without tags may be at its beginning.
    pub(super) fn restart(&mut self) {
        self.begun = false;
    }

    /// Begins a call, unless the model may not call the tool.
    pub(super) fn begin(&mut self, name: &str, pieces: &mut Pieces) {
        if !self.is_complete() && self.knows(name) {
            self.call(name.to_owned(), pieces);
            self.state = CallState::Arguments { reader: ArgumentsReader::json(&[]), nested: false };
        }
    }

    /// Ends the call that [`begin`](Self::begin) has begun.
    pub(super) fn end(&mut self, pieces: &mut Pieces) {
        self.advance(pieces);
        if let CallState::Arguments { reader, .. } = &self.state {
            if reader.is_empty() {
                pieces.arguments(self.count - 1, "{}");
            } else {
                self.is_cut = true;
            }
            self.state = CallState::After { nested: false };
        }
        self.advance(pieces);
    }

    pub(super) fn push(&mut self, text: &str, pieces: &mut Pieces) {
        self.held.push_str(text);
        if self.held.len() >= self.next_try {
            self.advance(pieces);
        }
    }

    pub(super) fn special(&mut self, name: &str, pieces: &mut Pieces) {
        self.advance(pieces);
        match &self.state {
            CallState::Text if !self.opens_with(name) => return,
            // No special token is part of such an input, so this one ends the answer.
            CallState::Arguments { reader: ArgumentsReader::Input { .. }, .. } => {
                self.is_ended = true;
                return self.advance(pieces);
            }
            CallState::Arguments { reader, nested } if !reader.has_tag(name) => {
                self.state = CallState::After { nested: *nested };
                self.is_cut = true;
            }
            _ => {}
        }
        if !self.specials.iter().any(|known| known == name) {
            self.specials.push(name.to_owned());
        }
        self.push(name, pieces);
    }

    pub(super) fn finish(&mut self, pieces: &mut Pieces) {
        self.is_ended = true;
        self.advance(pieces);
        if !self.follows_call {
            pieces.content(&"\n".repeat(std::mem::take(&mut self.line_feeds)));
        }
    }

    fn advance(&mut self, pieces: &mut Pieces) {
        while self.step(pieces) {}
        self.next_try = next_try(self.held.len());
    }

    /// Processes a part of the text. Returns whether another part can be processed.
    fn step(&mut self, pieces: &mut Pieces) -> bool {
        match &mut self.state {
            CallState::Text => return self.text(pieces),
            CallState::Start { tag } => {
                let tag = *tag;
                match self.parser.start(&self.held[tag..]) {
                    Start::Undecided if !self.is_ended => return false,
                    Start::Call { name, at, arguments, nested } if self.knows(&name) => {
                        self.call(name, pieces);
                        self.held.drain(..tag + at);
                        self.state = CallState::Arguments { reader: arguments, nested };
                    }
                    Start::Whole { name, arguments, end } if self.knows(&name) => {
                        let index = self.call(name, pieces);
                        pieces.arguments(index, &arguments);
                        self.held.drain(..tag + end);
                        self.state = CallState::After { nested: false };
                    }
                    Start::Undecided | Start::NoCall | Start::Call { .. } | Start::Whole { .. } => {
                        let tag: String = self.held.drain(..tag).collect();
                        self.content(&tag, pieces);
                        self.begun = true;
                        self.state = CallState::Text;
                    }
                }
            }
            CallState::Arguments { .. } => {
                if !self.arguments(pieces) {
                    return false;
                }
            }
            CallState::After { .. } if self.tools.is_one_call() => self.state = CallState::Complete,
            CallState::After { nested } => match self.parser.after(&self.held, *nested) {
                After::Undecided if !self.is_ended => return false,
                // Only closing syntax is left in the text.
                After::Undecided => {
                    self.held.clear();
                    self.state = CallState::Text;
                }
                After::Call(at) => {
                    self.held.drain(..at);
                    self.state = CallState::Start { tag: 0 };
                }
                After::Text(at) => {
                    self.held.drain(..at);
                    self.state = CallState::Text;
                }
            },
            CallState::Complete => {
                self.held.clear();
                return false;
            }
        }
        !self.held.is_empty() || matches!(self.state, CallState::After { .. })
    }

    /// Reads the text as arguments. Returns whether these are complete.
    fn arguments(&mut self, pieces: &mut Pieces) -> bool {
        let CallState::Arguments { reader, nested } = &mut self.state else { return false };
        let (mut json, nested) = (String::new(), *nested);
        let progress = reader.read(&self.held, self.is_ended, &self.tools, &mut json);
        pieces.arguments(self.count - 1, &json);
        let (ReadProgress::Later(read) | ReadProgress::Complete(read)) = progress;
        self.held.drain(..read);
        if matches!(progress, ReadProgress::Later(_)) {
            return false;
        }
        if let CallState::Arguments { reader, .. } = std::mem::replace(&mut self.state, CallState::After { nested }) {
            self.content(&reader.stray(), pieces);
        }
        true
    }

    fn text(&mut self, pieces: &mut Pieces) -> bool {
        if let (ToolChoice::Named(name), Some(_), false) = (&self.tools.choice, self.tools.required_input(), self.begun) {
            if self.held.is_empty() {
                return false;
            }
            let name = name.clone();
            self.call(name, pieces);
            self.state = CallState::Arguments { reader: ArgumentsReader::Input { begun: false }, nested: false };
            return true;
        }
        if !self.begun && self.parser.has_untagged_calls() {
            let begun = self.held.trim_start();
            if begun.is_empty() && !self.is_ended {
                return false;
            }
            if begun.starts_with(['{', '[']) {
                let tag = self.held.len() - begun.len();
                self.state = if let ToolChoice::Named(name) = &self.tools.choice {
                    let name = name.clone();
                    self.held.drain(..tag);
                    self.call(name, pieces);
                    CallState::Arguments { reader: ArgumentsReader::json(&[]), nested: false }
                } else {
                    CallState::Start { tag }
                };
                return true;
            }
        }
        let opens = self.parser.opens();
        let found = opens.iter().filter_map(|tag| Some((self.held.find(tag)?, tag.len()))).min();
        let end = match found {
            Some((at, _)) => at,
            None if self.is_ended => self.held.len(),
            None => self.held.len() - partial_suffix(&self.held, opens),
        };
        let text: String = self.held.drain(..end).collect();
        self.content(&text, pieces);
        if let Some((_, tag)) = found {
            self.state = CallState::Start { tag };
        }
        found.is_some()
    }

    /// Returns whether the model may call a tool with this name. A call of another tool is content, like a malformed call.
    fn knows(&self, name: &str) -> bool {
        self.tools.list.iter().any(|tool| tool.name == name)
    }

    fn call(&mut self, name: String, pieces: &mut Pieces) -> usize {
        let index = self.count;
        self.has_grammar = self.tools.list.iter().any(|tool| tool.name == name && tool.input.is_some());
        pieces.tool_call(index, self.model.new_id(), name);
        self.count += 1;
        (self.begun, self.follows_call, self.line_feeds, self.is_cut) = (true, true, 0, false);
        index
    }

    fn content(&mut self, text: &str, pieces: &mut Pieces) {
        let visible = self.specials.iter().fold(text.to_owned(), |text, name| text.replace(name, ""));
        let visible = if self.follows_call { visible.trim_start_matches('\n') } else { visible.as_str() };
        if visible.is_empty() {
            return;
        }
        // A line feed remains between the texts before and after calls.
        self.line_feeds += usize::from(self.follows_call && self.has_content);
        (self.begun, self.follows_call) = (true, false);
        let body = visible.trim_end_matches('\n');
        if !body.is_empty() {
            pieces.content(&"\n".repeat(std::mem::take(&mut self.line_feeds)));
            pieces.content(body);
            self.has_content = true;
        }
        self.line_feeds += visible.len() - body.len();
    }
}

impl FindCalls for Calls {
    fn possible_call(&self, text: &str) -> Option<usize> {
        let opens = self.parser.opens();
        let mut found: Vec<_> = opens.iter().flat_map(|tag| text.match_indices(tag).map(|(at, tag)| (at, tag.len()))).collect();
        found.sort_unstable();
        let begins = |(at, tag): &(usize, usize)| match self.parser.start(&text[at + tag..]) {
            Start::Undecided => true,
            Start::Call { name, .. } | Start::Whole { name, .. } => self.knows(&name),
            Start::NoCall => false,
        };
        let partial = Some(text.len() - partial_suffix(text, opens)).filter(|at| *at < text.len());
        found.into_iter().find(begins).map(|(at, _)| at).or(partial)
    }

    fn ends_with_call(&self, text: &str) -> bool {
        let (mut calls, mut pieces) = (self.clone(), Pieces::default());
        calls.push(text, &mut pieces);
        let ends_with_text = matches!(pieces.into_vec().last(), Some(Piece::Content(_)));
        calls.count > self.count && calls.are_complete() && !ends_with_text
    }
}
