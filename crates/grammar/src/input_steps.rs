//! The steps of a call of a tool whose input is a text, byte by byte.

use llguidance::toktrie::TokTrie;

/// Maximum number of bytes of white space between two parts of a format. Small models may write white space without end.
const SPACES_MAX: u8 = 32;

/// The parts of a call from the tool's name to its end.
pub(crate) struct Form {
    /// The parts before the input.
    pub head: Vec<Vec<u8>>,
    /// The text that ends the input; `None` if the input is written as JSON, whose opening quotation mark is the end of the head.
    pub end: Option<Vec<u8>>,
    /// The parts after the input.
    pub tail: Vec<Vec<u8>>,
}

impl Form {
    /// Returns the step of the input's first byte.
    pub fn input(&self) -> Step {
        match self.end {
            None => Step::Json(JsonStep::Text),
            Some(_) => Step::Raw(RawStep { ended: 0, complete: false, is_text: true }),
        }
    }
}

/// The progress in parts that follow each other. There may be white space before a part. An empty part stands for letters and digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Parts {
    part: usize,
    at: usize,
    spaces: u8,
}

impl Parts {
    /// Returns the progress after a byte; `None` if the byte does not continue the parts.
    pub fn after(mut self, parts: &[Vec<u8>], byte: u8) -> Option<Self> {
        loop {
            let part = parts.get(self.part)?;
            if part.is_empty() {
                if byte.is_ascii_alphanumeric() {
                    return Some(self);
                }
                self = Self { part: self.part + 1, at: 0, spaces: 0 };
                continue;
            }
            if part[self.at] == byte {
                let ends = self.at + 1 == part.len();
                return Some(if ends {
                    Self { part: self.part + 1, ..Self::default() }
                } else {
                    Self { at: self.at + 1, ..self }
                });
            }
            // The name of a special token has a marker before it.
            let is_space = byte.is_ascii_whitespace() && self.spaces < SPACES_MAX;
            return match self.at {
                0 if is_space => Some(Self { spaces: self.spaces + 1, ..self }),
                0 if byte == TokTrie::SPECIAL_TOKEN_MARKER => Some(self),
                _ => None,
            };
        }
    }

    pub fn has_begun(self) -> bool {
        (self.part, self.at) > (0, 0)
    }

    pub fn is_complete(self, parts: &[Vec<u8>]) -> bool {
        self.part == parts.len()
    }

    /// Returns the least number of bytes that are missing.
    pub fn missing(self, parts: &[Vec<u8>]) -> usize {
        (parts.iter().skip(self.part).map(Vec::len).sum::<usize>()).saturating_sub(self.at)
    }
}

/// What the next byte of a call belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Head(Parts),
    /// A string of JSON.
    Json(JsonStep),
    /// A text up to its end.
    Raw(RawStep),
    Tail(Parts),
    /// The call is complete. All further text is free.
    Done,
}

/// What the next byte of a string of JSON belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JsonStep {
    Text,
    Escape,
    /// The digits of `\uXXXX`: their number and value so far, and the first half of the character, if it has two.
    Digits {
        count: u8,
        value: u16,
        high: Option<u16>,
    },
    /// The backslash of the second half of a character.
    Half(u16),
    /// The letter `u` of the second half.
    HalfEscape(u16),
}

/// The progress of a text that a certain text ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawStep {
    /// The number of bytes of the end with which the text ends.
    ended: usize,
    /// Whether the text before these bytes may be the whole input.
    complete: bool,
    /// Whether these bytes may be text of the input.
    is_text: bool,
}

/// An input to which bytes can be added on trial.
pub(crate) trait Text {
    /// Adds a byte. Returns whether an input can continue so; if not, nothing is added.
    fn push(&mut self, byte: u8) -> bool;
    /// Returns whether the text so far may be the whole input.
    fn is_complete(&mut self) -> bool;
}

impl Step {
    /// Returns the step after a byte; `None` if the byte is not allowed. The text may then have further bytes, which the caller takes back.
    pub fn after(self, form: &Form, byte: u8, text: &mut impl Text) -> Option<Self> {
        match self {
            Self::Head(parts) => {
                let parts = parts.after(&form.head, byte)?;
                Some(if parts.is_complete(&form.head) { form.input() } else { Self::Head(parts) })
            }
            Self::Json(JsonStep::Text) if byte == b'"' => text.is_complete().then(|| tail(form)),
            Self::Json(step) => step.after(byte, text).map(Self::Json),
            Self::Raw(step) => {
                let end = form.end.as_deref().unwrap_or_default();
                let step = step.after(end, byte, text)?;
                Some(if step.ended == end.len() { tail(form) } else { Self::Raw(step) })
            }
            Self::Tail(parts) => {
                let parts = parts.after(&form.tail, byte)?;
                Some(if parts.is_complete(&form.tail) { Self::Done } else { Self::Tail(parts) })
            }
            Self::Done => Some(Self::Done),
        }
    }
}

fn tail(form: &Form) -> Step {
    if form.tail.is_empty() { Step::Done } else { Step::Tail(Parts::default()) }
}

impl JsonStep {
    fn after(self, byte: u8, text: &mut impl Text) -> Option<Self> {
        match self {
            Self::Text if byte == b'\\' => Some(Self::Escape),
            Self::Text => (byte >= b' ' && text.push(byte)).then_some(Self::Text),
            Self::Escape => {
                let meant = match byte {
                    b'"' | b'\\' | b'/' => byte,
                    b'b' => 8,
                    b'f' => 12,
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    b'u' => return Some(Self::Digits { count: 0, value: 0, high: None }),
                    _ => return None,
                };
                text.push(meant).then_some(Self::Text)
            }
            Self::Digits { count, value, high } => {
                let value = value << 4 | char::from(byte).to_digit(16)? as u16;
                if count < 3 {
                    return Some(Self::Digits { count: count + 1, value, high });
                }
                let units = high.into_iter().chain([value]);
                match char::decode_utf16(units).next()? {
                    Ok(char) => {
                        let mut bytes = [0; 4];
                        char.encode_utf8(&mut bytes).bytes().all(|byte| text.push(byte)).then_some(Self::Text)
                    }
                    Err(_) if high.is_none() && value < 0xDC00 => Some(Self::Half(value)),
                    Err(_) => None,
                }
            }
            Self::Half(high) => (byte == b'\\').then_some(Self::HalfEscape(high)),
            Self::HalfEscape(high) => (byte == b'u').then_some(Self::Digits { count: 0, value: 0, high: Some(high) }),
        }
    }
}

impl RawStep {
    fn after(self, end: &[u8], byte: u8, text: &mut impl Text) -> Option<Self> {
        // The end may be the name of a special token, which has a marker before it.
        let is_marker = byte == TokTrie::SPECIAL_TOKEN_MARKER;
        let begins = is_marker || byte == end[0];
        let (ended, complete) = match () {
            () if !is_marker && byte == end[self.ended] && self.ended > 0 => (self.ended + 1, self.complete),
            () if begins => {
                (usize::from(!is_marker), if self.is_text { text.is_complete() } else { self.ended == 0 && self.complete })
            }
            () => (0, false),
        };
        if ended == end.len() {
            return complete.then_some(Self { ended, complete, is_text: false });
        }
        let is_text = self.is_text && !is_marker && text.push(byte);
        (is_text || ((ended > 0 || is_marker) && complete)).then_some(Self { ended, complete, is_text })
    }
}
