//! Separates the reasoning at the beginning of an answer from the rest.

use super::{
    ReasoningFormat,
    tags::{next_try, partial_suffix},
};
use clap::ValueEnum;
use serde::Serialize;

/// The tags with which a model marks its reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum ReasoningParser {
    /// The whole answer is content.
    #[default]
    None,
    /// The tags are `<think>` and `</think>` (DeepSeek R1, Qwen 3, GLM 4.5, MiniMax).
    #[value(aliases = ["deepseek_r1", "qwen3", "glm45"])]
    Think,
    /// The tags are `[THINK]` and `[/THINK]` (Magistral).
    Mistral,
    /// The tags are `◁think▷` and `◁/think▷` (Kimi).
    Kimi,
    /// The tags are `<seed:think>` and `</seed:think>` (Seed-OSS).
    SeedOss,
    /// The tags are `<|START_THINKING|>` and `<|END_THINKING|>` (Command A).
    Cohere,
    /// The tags are `<|channel>` and `<channel|>` (Gemma 4). The reasoning begins with the channel's name.
    Gemma4,
    /// The channel `analysis` of Harmony (gpt-oss). Tool calls are parsed as well.
    #[value(alias = "openai_gptoss")]
    Harmony,
}

/// The tags that open and close reasoning.
pub(super) type Tags = (&'static str, &'static str);

impl ReasoningParser {
    /// Returns the parser of the model with this chat template.
    pub fn of_template(source: &str) -> Self {
        let closes = |parser: &Self| parser.tags().is_some_and(|(_, close)| source.contains(close));
        if source.contains(super::harmony::FINAL) {
            return Self::Harmony;
        }
        [Self::SeedOss, Self::Gemma4, Self::Mistral, Self::Kimi, Self::Cohere, Self::Think]
            .into_iter()
            .find(closes)
            .unwrap_or_default()
    }

    pub(super) fn tags(self) -> Option<Tags> {
        match self {
            Self::None | Self::Harmony => None,
            Self::Gemma4 => Some(("<|channel>", "<channel|>")),
            Self::Think => Some(("<think>", "</think>")),
            Self::Mistral => Some(("[THINK]", "[/THINK]")),
            Self::Kimi => Some(("◁think▷", "◁/think▷")),
            Self::SeedOss => Some(("<seed:think>", "</seed:think>")),
            Self::Cohere => Some(("<|START_THINKING|>", "<|END_THINKING|>")),
        }
    }

    /// Whether the text ends with the tag that opens reasoning.
    pub fn ends_with_open_tag(self, text: &str) -> bool {
        self.tags().is_some_and(|(open, _)| text.trim_end().ends_with(open))
    }

    /// Returns whether the text ends within reasoning: its last opening tag has no closing tag.
    pub fn is_left_open(self, text: &str) -> bool {
        self.tags().is_some_and(|(open, close)| text.rfind(open) > text.rfind(close))
    }
}

/// Finds tool calls in reasoning.
pub(super) trait FindCalls {
    /// Returns where a call may begin in a text, even if the text is too short to tell.
    fn possible_call(&self, text: &str) -> Option<usize>;

    /// Returns whether the text, which begins with the opening tag of a call, ends with a complete call.
    fn ends_with_call(&self, text: &str) -> bool;
}

/// Splits a text at the tags of reasoning. Line feeds next to a tag are dropped, because templates write them again.
pub(super) struct ReasoningSplitter {
    tags: Tags,
    /// A text that may follow the opening tag and is not reasoning.
    label: &'static str,
    state: ReasoningState,
    held: String,
    /// The bytes of `held` in which no closing tag begins.
    searched: usize,
    /// The length at which `held` is searched for calls again.
    next_try: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReasoningState {
    /// The text has only white space so far.
    Before,
    Inside {
        /// Whether the reasoning has text.
        begun: bool,
    },
    /// The reasoning has ended, and no other text has followed.
    Closed,
    After,
}

impl ReasoningSplitter {
    /// Returns a splitter for one sample; `None` if the model marks no reasoning.
    pub(super) fn new(format: ReasoningFormat) -> Option<Self> {
        let tags = format.parser.tags()?;
        let state = if format.is_open { ReasoningState::Inside { begun: false } } else { ReasoningState::Before };
        let label = if format.parser == ReasoningParser::Gemma4 { "thought\n" } else { "" };
        Some(Self { tags, label, state, held: String::new(), searched: 0, next_try: 0 })
    }

    pub(super) fn is_inside(&self) -> bool {
        matches!(self.state, ReasoningState::Inside { .. })
    }

    pub(super) fn is_past(&self) -> bool {
        matches!(self.state, ReasoningState::Closed | ReasoningState::After)
    }

    /// Returns whether the special token with this name would open or close reasoning at this point of the text.
    pub(super) fn wants(&self, name: &str) -> bool {
        match self.state {
            ReasoningState::Before => name == self.tags.0,
            ReasoningState::Inside { .. } => name == self.tags.1,
            ReasoningState::Closed | ReasoningState::After => false,
        }
    }

    /// Adds a chunk of text. What may be a call of `calls` is held, until the reasoning is closed after it.
    pub(super) fn push(&mut self, text: &str, calls: Option<&dyn FindCalls>, thoughts: &mut String, answer: &mut String) {
        self.held.push_str(text);
        let open = self.tags.0;
        loop {
            match self.state {
                ReasoningState::Before => {
                    let begun = self.held.trim_start();
                    if let Some(rest) = begun.strip_prefix(open) {
                        // A model may write the opening tag again after the template has written it.
                        self.held = rest.to_owned();
                        self.state = ReasoningState::Inside { begun: false };
                    } else if open.starts_with(begun) {
                        return;
                    } else {
                        self.state = ReasoningState::After;
                    }
                }
                ReasoningState::Inside { begun } => {
                    if !begun {
                        let blank = self.held.len() - self.held.trim_start_matches('\n').len();
                        self.held.drain(..blank);
                        self.searched = self.searched.saturating_sub(blank);
                        if let Some(rest) = self.held.strip_prefix(open) {
                            self.held = rest.to_owned();
                            continue;
                        }
                        if let Some(rest) = self.held.strip_prefix(self.label).filter(|_| !self.label.is_empty()) {
                            self.held = rest.to_owned();
                            self.label = "";
                            continue;
                        }
                        if open.starts_with(&self.held) || (!self.label.is_empty() && self.label.starts_with(&self.held)) {
                            return;
                        }
                    }
                    if !self.thought(calls, thoughts) {
                        return;
                    }
                }
                ReasoningState::Closed => {
                    let blank = self.held.len() - self.held.trim_start_matches('\n').len();
                    self.held.drain(..blank);
                    if self.held.is_empty() {
                        return;
                    }
                    self.state = ReasoningState::After;
                }
                ReasoningState::After => {
                    answer.extend(self.held.drain(..));
                    return;
                }
            }
        }
    }

    /// Moves the text that is reasoning to `thoughts`. Returns whether the reasoning ends with it.
    fn thought(&mut self, calls: Option<&dyn FindCalls>, thoughts: &mut String) -> bool {
        let close = self.tags.1;
        if let Some(at) = self.held[self.searched..].find(close) {
            let end = self.searched + at;
            thoughts.push_str(self.held[..end].trim_end_matches('\n'));
            self.held.drain(..end + close.len());
            self.state = ReasoningState::Closed;
            return true;
        }
        self.searched = self.held.len() - partial_suffix(&self.held, &[close]);
        if self.held.len() >= self.next_try {
            let call = calls.and_then(|calls| calls.possible_call(&self.held));
            let kept = call.map_or(self.searched, |at| at.min(self.searched));
            let sent = self.held[..kept].trim_end_matches('\n').len();
            thoughts.extend(self.held.drain(..sent));
            self.searched -= sent;
            self.next_try = next_try(self.held.len());
            if sent > 0 {
                self.state = ReasoningState::Inside { begun: true };
            }
        }
        false
    }

    /// Ends the reasoning without its closing tag.
    pub(super) fn leave(&mut self, _: Option<&dyn FindCalls>, thoughts: &mut String, answer: &mut String) {
        self.finish(None, thoughts, answer);
        self.state = ReasoningState::After;
    }

    /// Ends the answer. A complete call at the end of reasoning that was not closed is a call: some models do not close it.
    pub(super) fn finish(&mut self, calls: Option<&dyn FindCalls>, thoughts: &mut String, answer: &mut String) {
        if self.is_inside() {
            let call =
                calls.and_then(|calls| calls.possible_call(&self.held).filter(|at| calls.ends_with_call(&self.held[*at..])));
            let rest = call.map(|at| self.held.split_off(at));
            let thought = std::mem::replace(&mut self.held, rest.clone().unwrap_or_default());
            thoughts.push_str(if rest.is_some() { thought.trim_end_matches('\n') } else { &thought });
        }
        answer.extend(self.held.drain(..));
    }
}
