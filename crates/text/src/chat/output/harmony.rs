//! Parses Harmony, the format of gpt-oss. An answer has several messages, each with a header and a body:
//!
//! ```text
//! <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>
//! ```
//!
//! The prompt ends with the beginning of the first header. The channel `analysis` has the reasoning. A message to a function is a call of it. All
//! other bodies are content.

use super::tags::partial_suffix;

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const CONSTRAIN: &str = "<|constrain|>";
const MESSAGE: &str = "<|message|>";
/// The tags that end a body.
const ENDS: [&str; 4] = ["<|end|>", "<|return|>", "<|call|>", START];
/// The tag after which an answer has no further header.
pub(super) const FINAL: &str = "<|channel|>final<|message|>";
/// Maximum number of bytes of a header. A longer one is content.
const HEADER_BYTES_MAX: usize = 512;

/// A part of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HarmonyPart<'a> {
    Reasoning(&'a str),
    Content(&'a str),
    /// The last message begins.
    Final,
    /// A message to this function begins.
    Call(&'a str),
    Arguments(&'a str),
    /// The message to a function ends.
    CallEnd,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Harmony {
    state: MessageState,
    /// The text that is not processed yet.
    held: String,
    /// Whether a message of reasoning had text so far.
    has_reasoning: bool,
    /// Whether another message had text so far.
    has_content: bool,
    /// Whether the message has no text so far.
    is_new: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum MessageState {
    #[default]
    Header,
    Reasoning,
    Content,
    Call,
}

impl Harmony {
    pub(super) fn has_tag(name: &str) -> bool {
        [CHANNEL, CONSTRAIN, MESSAGE].contains(&name) || ENDS.contains(&name)
    }

    pub(super) fn is_reasoning(&self) -> bool {
        self.state == MessageState::Reasoning
    }

    /// Adds a text, which may have tags, and calls `visit` for each part that it completes.
    pub(super) fn push(&mut self, text: &str, mut visit: impl FnMut(HarmonyPart<'_>)) {
        self.held.push_str(text);
        while self.step(&mut visit) {}
    }

    /// Ends the answer.
    pub(super) fn finish(&mut self, mut visit: impl FnMut(HarmonyPart<'_>)) {
        let text = std::mem::take(&mut self.held);
        match self.state {
            MessageState::Header if is_header(&text) => {}
            MessageState::Header => visit(HarmonyPart::Content(&text)),
            _ => self.body(&text, &mut visit),
        }
        if self.state == MessageState::Call {
            visit(HarmonyPart::CallEnd);
        }
    }

    /// Processes a part of the text. Returns whether another part can be processed.
    fn step(&mut self, visit: &mut impl FnMut(HarmonyPart<'_>)) -> bool {
        if self.state == MessageState::Header {
            let end = self.held.find(MESSAGE).unwrap_or_else(|| self.held.len() - partial_suffix(&self.held, &[MESSAGE]));
            // A text without a header is content, such as JSON that a constraint enforces.
            if !is_header(&self.held[..end]) {
                self.state = MessageState::Content;
                return true;
            }
            let Some((header, body)) = self.held.split_once(MESSAGE) else { return false };
            let (channel, recipient) = parts(header);
            self.state = match (channel, recipient.and_then(|recipient| recipient.strip_prefix("functions."))) {
                (_, Some(name)) => {
                    visit(HarmonyPart::Call(name));
                    MessageState::Call
                }
                ("analysis", None) => MessageState::Reasoning,
                ("final", None) => {
                    visit(HarmonyPart::Final);
                    MessageState::Content
                }
                _ => MessageState::Content,
            };
            self.is_new = true;
            self.held = body.to_owned();
            return !self.held.is_empty();
        }
        let found = ENDS.iter().filter_map(|tag| Some((self.held.find(tag)?, *tag))).min();
        let len = found.map_or_else(|| self.held.len() - partial_suffix(&self.held, &ENDS), |(at, _)| at);
        let text: String = self.held.drain(..len).collect();
        self.body(&text, visit);
        let Some((_, tag)) = found else { return false };
        self.held.drain(..tag.len());
        if self.state == MessageState::Call {
            visit(HarmonyPart::CallEnd);
        }
        self.state = MessageState::Header;
        !self.held.is_empty()
    }

    /// Visits a text of a message. A line feed separates it from the text of an earlier message of its kind.
    fn body(&mut self, text: &str, visit: &mut impl FnMut(HarmonyPart<'_>)) {
        let has_text = match self.state {
            _ if text.is_empty() => return,
            MessageState::Call => return visit(HarmonyPart::Arguments(text)),
            MessageState::Reasoning => &mut self.has_reasoning,
            MessageState::Header | MessageState::Content => &mut self.has_content,
        };
        let separator = if std::mem::take(&mut self.is_new) && *has_text { "\n" } else { "" };
        *has_text = true;
        let text = format!("{separator}{text}");
        visit(if self.is_reasoning() { HarmonyPart::Reasoning(&text) } else { HarmonyPart::Content(&text) });
    }
}

/// Returns whether the text may be a header that is not complete.
fn is_header(text: &str) -> bool {
    let text = text.trim_start();
    let text = text.strip_prefix(START).unwrap_or(text);
    let rest = text.strip_prefix("assistant").unwrap_or(text).trim_start();
    let begins = |tag: &&str| rest.starts_with(*tag) || tag.starts_with(rest);
    let may_begin = ["assistant", "to=", CHANNEL, MESSAGE, START].iter().any(begins);
    may_begin && text.len() <= HEADER_BYTES_MAX
}

/// Returns the channel and the recipient in a header. The recipient may be before or after the channel.
fn parts(header: &str) -> (&str, Option<&str>) {
    let word = |text: &str| text.len() - text.trim_start_matches(|char: char| !char.is_whitespace() && char != '<').len();
    let channel = header.rsplit_once(CHANNEL).map_or("", |(_, channel)| &channel[..word(channel)]);
    let recipient = header.rsplit_once("to=").map(|(_, recipient)| &recipient[..word(recipient)]);
    (channel, recipient)
}
