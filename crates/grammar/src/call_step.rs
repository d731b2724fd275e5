//! The steps of a call of a tool whose input is a text, byte by byte.

use llguidance::toktrie::TokTrie;

/// Maximum number of bytes of white space between two parts of a format. Small models may write white space without end.
const SPACES_MAX: u8 = 32;

/// The parts of a call from the tool's name to its end.
pub(crate) struct CallForm {
    /// The parts before the input.
    pub head: Vec<Vec<u8>>,
    /// The text that ends the input; `None` if the input is written as JSON, whose opening quotation mark is the end of the head.
    pub end: Option<Vec<u8>>,
    /// The parts after the input.
    pub tail: Vec<Vec<u8>>,
}

impl CallForm {
    /// Returns the step of the input's first byte.
    pub fn input(&self) -> CallStep {
        match self.end {
            None => CallStep::Json(JsonStep::Text),
            Some(_) => CallStep::Raw(RawStep { ended: 0, complete: false, is_text: true }),
        }
    }
}

/// The progress in parts that follow each other. There may be white space before a part. An empty part stands for letters and digits, or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PartsRead {
    part: usize,
    at: usize,
    spaces: u8,
}

impl PartsRead {
    pub const START: Self = Self { part: 0, at: 0, spaces: 0 };

    /// Returns the progress after a byte; `None` if the byte does not continue the parts.
    pub fn after(mut self, parts: &[Vec<u8>], byte: u8) -> Option<Self> {
        loop {
            let part = parts.get(self.part)?;
            match self.at {
                at if part.get(at) == Some(&byte) && at + 1 == part.len() => return Some(self.next()),
                at if part.get(at) == Some(&byte) => return Some(Self { at: at + 1, ..self }),
                _ if part.is_empty() && byte.is_ascii_alphanumeric() => return Some(Self { at: 1, ..self }),
                0 if byte.is_ascii_whitespace() && self.spaces < SPACES_MAX => {
                    return Some(Self { spaces: self.spaces + 1, ..self });
                }
                // The name of a special token has a marker before it.
                0 if byte == TokTrie::SPECIAL_TOKEN_MARKER => return Some(self),
                _ if part.is_empty() => self = self.next(),
                _ => return None,
            }
        }
    }

    fn next(self) -> Self {
        Self { part: self.part + 1, ..Self::START }
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
pub(crate) enum CallStep {
    Head(PartsRead),
    /// A string of JSON.
    Json(JsonStep),
    /// A text up to its end.
    Raw(RawStep),
    Tail(PartsRead),
    /// The call is complete. All further text is free.
    Done,
}

/// What the next byte of a string of JSON belongs to. As in llguidance's own strings with a pattern, only the characters that need it are escaped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JsonStep {
    Text,
    /// The byte after a backslash.
    Escape,
    /// The digits of `\uXXXX`: their number and value so far.
    Digits {
        count: u8,
        value: u8,
    },
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
    /// Returns whether an input can continue with this byte.
    fn allows(&mut self, byte: u8) -> bool;
    /// Returns whether the text so far may be the whole input.
    fn is_complete(&mut self) -> bool;
}

/// The text of an input whose first byte was not read yet.
impl Text for () {
    fn push(&mut self, _: u8) -> bool {
        false
    }

    fn allows(&mut self, _: u8) -> bool {
        false
    }

    fn is_complete(&mut self) -> bool {
        false
    }
}

impl CallStep {
    pub const HEAD: Self = Self::Head(PartsRead::START);
    const TAIL: Self = Self::Tail(PartsRead::START);

    /// Returns the step after a byte; `None` if the byte is not allowed. The text may then have further bytes, which the caller takes back.
    pub fn after(self, form: &CallForm, byte: u8, text: &mut impl Text) -> Option<Self> {
        match self {
            Self::Head(parts) => {
                let parts = parts.after(&form.head, byte)?;
                Some(if parts.is_complete(&form.head) { form.input() } else { Self::Head(parts) })
            }
            Self::Json(JsonStep::Text) if byte == b'"' => text.is_complete().then_some(Self::TAIL),
            Self::Json(step) => step.after(byte, text).map(Self::Json),
            Self::Raw(step) => {
                let end = form.end.as_deref().unwrap_or_default();
                let step = step.after(end, byte, text)?;
                Some(if step.ended == end.len() { Self::TAIL } else { Self::Raw(step) })
            }
            Self::Tail(parts) => {
                let parts = parts.after(&form.tail, byte)?;
                Some(if parts.is_complete(&form.tail) { Self::Done } else { Self::Tail(parts) })
            }
            Self::Done => Some(Self::Done),
        }
    }
}

/// The letters after a backslash, each with the byte that it stands for.
const ESCAPES: [(u8, u8); 7] = [(b'"', b'"'), (b'\\', b'\\'), (b'b', 8), (b'f', 12), (b'n', b'\n'), (b'r', b'\r'), (b't', b'\t')];

impl JsonStep {
    fn after(self, byte: u8, text: &mut impl Text) -> Option<Self> {
        let digit = || char::from(byte).to_digit(16).map(|digit| digit as u8);
        let next = match self {
            Self::Text if byte == b'\\' => Self::Escape,
            Self::Text => return (byte >= b' ' && text.push(byte)).then_some(Self::Text),
            Self::Escape if byte == b'u' => Self::Digits { count: 0, value: 0 },
            Self::Escape => {
                let (_, meant) = ESCAPES.iter().find(|(letter, _)| *letter == byte)?;
                return text.push(*meant).then_some(Self::Text);
            }
            Self::Digits { count: 3, value } => return text.push(value << 4 | digit()?).then_some(Self::Text),
            // Only the control characters need such an escape.
            Self::Digits { count, value: 0 } if digit()? <= u8::from(count == 2) => {
                Self::Digits { count: count + 1, value: digit()? }
            }
            Self::Digits { .. } => return None,
        };
        // What an escape begins with is allowed only if the input can continue with one of the characters.
        let meant = match next {
            Self::Digits { count: 3, value } => value << 4..(value + 1) << 4,
            _ => 0..b' ',
        };
        let others: &[u8] = if next == Self::Escape { b"\"\\" } else { b"" };
        meant.chain(others.iter().copied()).any(|byte| text.allows(byte)).then_some(next)
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
