//! An answer in a terminal, as it arrives: lines end between words, and light Markdown (headings, bold, code) is shown by the style of the text.
//! Only this module writes escape codes; those in an answer are replaced.

use crate::serve::printable;
use unicode_width::UnicodeWidthChar;

/// What begins and ends a block of code.
const FENCE: &str = "```";
/// The maximum number of bytes that are held until the end of a mark, such as the second `**`, arrives. After more bytes, the mark is text.
const HELD_MAX: usize = 200;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum TextStyle {
    #[default]
    Plain,
    Bold,
    Code,
    Dim,
}

impl TextStyle {
    fn escape_code(self) -> &'static str {
        match self {
            Self::Plain => "\x1b[0m",
            Self::Bold => "\x1b[0;1m",
            Self::Code => "\x1b[0;36m",
            Self::Dim => "\x1b[0;2m",
        }
    }
}

/// Breaks lines between words. A word is written when its end has arrived.
struct LineWrap {
    width: usize,
    /// The column after what is written.
    column: usize,
    /// The spaces after what is written. They are written before the next word unless the word begins a line.
    spaces: usize,
    word: String,
    word_width: usize,
    /// The style at the end of the word.
    style: TextStyle,
    written: String,
}

impl LineWrap {
    fn push(&mut self, text: &str, style: TextStyle) {
        if style != self.style {
            self.word.push_str(style.escape_code());
            self.style = style;
        }
        for letter in text.chars() {
            match letter {
                '\n' => {
                    self.end_word();
                    self.written.push('\n');
                    (self.column, self.spaces) = (0, 0);
                }
                ' ' => {
                    self.end_word();
                    self.spaces += 1;
                }
                _ => self.add(letter),
            }
        }
    }

    fn add(&mut self, letter: char) {
        let width = letter.width().unwrap_or(0);
        // A line may end before and after a wide character, because such scripts have no spaces, and within a word that fits on no line.
        let is_wide = width > 1;
        if is_wide || self.word_width + width > self.width {
            self.end_word();
        }
        self.word.push(letter);
        self.word_width += width;
        if is_wide {
            self.end_word();
        }
    }

    /// Writes the word, on the next line if it does not fit on this one.
    fn end_word(&mut self) {
        if self.word_width > 0 {
            if self.column > 0 && self.column + self.spaces + self.word_width > self.width {
                self.written.push('\n');
                self.column = 0;
            } else {
                self.written.extend(std::iter::repeat_n(' ', self.spaces));
                self.column += self.spaces;
            }
            self.spaces = 0;
        }
        self.written.push_str(&self.word);
        self.column += self.word_width;
        self.word.clear();
        self.word_width = 0;
    }
}

/// Whether more of a line may arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LineState {
    Open,
    Complete,
}

/// The text from a mark on.
#[derive(Debug, PartialEq)]
enum MarkedText {
    /// The text between marks of `mark` bytes, which has `len` bytes.
    Span { mark: usize, len: usize, style: TextStyle },
    /// This many bytes are plain text, not a mark.
    Literal(usize),
    /// The end of the mark may still arrive.
    Undecided,
}

/// Formats an answer. Each method returns what has to be written now.
pub(super) struct TerminalAnswer {
    wrap: LineWrap,
    /// The last characters of the current line, whose format is not decided yet.
    held: String,
    /// Whether the kind of the current line is decided.
    is_begun: bool,
    line_style: TextStyle,
    /// Whether the text is within a block of code.
    is_code: bool,
    is_reasoning: bool,
    /// The last formatted character.
    before: char,
}

impl TerminalAnswer {
    /// Creates the format for a terminal with this number of columns.
    pub(super) fn new(width: usize) -> Self {
        let wrap = LineWrap {
            width,
            column: 0,
            spaces: 0,
            word: String::new(),
            word_width: 0,
            style: TextStyle::Plain,
            written: String::new(),
        };
        Self {
            wrap,
            held: String::new(),
            is_begun: false,
            line_style: TextStyle::Plain,
            is_code: false,
            is_reasoning: false,
            before: '\n',
        }
    }

    /// Formats a part of the answer.
    pub(super) fn content(&mut self, text: &str) -> String {
        if std::mem::take(&mut self.is_reasoning) {
            self.wrap.push("\n\n", TextStyle::Plain);
        }
        self.held.push_str(&printable(text));
        while let Some(end) = self.held.find('\n') {
            let line: String = self.held.drain(..=end).collect();
            self.line(&line[..end], LineState::Complete);
            self.end_line();
        }
        let open = std::mem::take(&mut self.held);
        let decided = self.line(&open, LineState::Open);
        open[decided..].clone_into(&mut self.held);
        std::mem::take(&mut self.wrap.written)
    }

    /// Formats a part of the reasoning, which has no Markdown.
    pub(super) fn reasoning(&mut self, text: &str) -> String {
        self.is_reasoning = true;
        self.wrap.push(&printable(text), TextStyle::Dim);
        std::mem::take(&mut self.wrap.written)
    }

    /// Ends the answer, and adds this line to it.
    pub(super) fn end(&mut self, last: &str) -> String {
        let open = std::mem::take(&mut self.held);
        self.line(&open, LineState::Complete);
        self.is_code = false;
        self.wrap.push("\n", TextStyle::Plain);
        self.wrap.push(&format!("{last}\n"), TextStyle::Plain);
        std::mem::take(&mut self.wrap.written)
    }

    fn end_line(&mut self) {
        self.wrap.push("\n", TextStyle::Plain);
        (self.is_begun, self.line_style, self.before) = (false, TextStyle::Plain, '\n');
    }

    fn format(&mut self, text: &str, style: TextStyle) {
        self.before = text.chars().next_back().unwrap_or(self.before);
        if self.is_code {
            // Lines of code are not wrapped.
            let width = std::mem::replace(&mut self.wrap.width, usize::MAX);
            self.wrap.push(text, style);
            self.wrap.end_word();
            self.wrap.width = width;
        } else {
            self.wrap.push(text, style);
        }
    }

    /// Formats the rest of a line as far as its format is decided. Returns the number of formatted bytes.
    fn line(&mut self, text: &str, state: LineState) -> usize {
        let mut at = 0;
        if !self.is_begun {
            let trimmed = text.trim_start_matches(' ');
            let hashes = trimmed.len() - trimmed.trim_start_matches('#').len();
            let may_be_heading = !self.is_code && hashes == trimmed.len() && hashes <= 6;
            let begins_block = trimmed.starts_with(FENCE);
            let may_change = begins_block || FENCE.starts_with(trimmed) || may_be_heading;
            if may_change && state == LineState::Open && text.len() <= HELD_MAX {
                return 0;
            }
            self.is_begun = true;
            if begins_block && !trimmed.trim_start_matches('`').contains('`') {
                self.format(text, TextStyle::Dim);
                self.is_code = !self.is_code;
                return text.len();
            }
            if !self.is_code && (1..=6).contains(&hashes) && trimmed[hashes..].starts_with(' ') {
                self.line_style = TextStyle::Bold;
                at = text.len() - trimmed.len() + hashes + 1;
            }
        }
        if self.is_code {
            self.format(text, TextStyle::Code);
            return text.len();
        }
        at + self.spans(&text[at..], state)
    }

    /// Formats a text with bold words and code as far as its format is decided. Returns the number of formatted bytes.
    fn spans(&mut self, text: &str, state: LineState) -> usize {
        let mut at = 0;
        while let Some(plain) = text[at..].find(['`', '*']) {
            self.format(&text[at..at + plain], self.line_style);
            at += plain;
            let rest = &text[at..];
            match marked(rest, self.before, state) {
                MarkedText::Undecided => return at,
                MarkedText::Literal(len) => {
                    self.format(&rest[..len], self.line_style);
                    at += len;
                }
                MarkedText::Span { mark, len, style } => {
                    let inner = &rest[mark..mark + len];
                    if style == TextStyle::Code {
                        self.format(inner, style);
                    } else {
                        let outer = std::mem::replace(&mut self.line_style, style);
                        self.spans(inner, LineState::Complete);
                        self.line_style = outer;
                    }
                    at += len + 2 * mark;
                }
            }
        }
        self.format(&text[at..], self.line_style);
        text.len()
    }
}

/// Classifies the text `rest`, which starts with a mark's character. `before` is the character before `rest`.
fn marked(rest: &str, before: char, state: LineState) -> MarkedText {
    let mark = rest.chars().next().unwrap_or_default();
    let after = rest.trim_start_matches(mark);
    let run = rest.len() - after.len();
    let may_end_later = state == LineState::Open && rest.len() <= HELD_MAX;
    if after.is_empty() && may_end_later {
        return MarkedText::Undecided;
    }
    let span = if mark == '`' {
        let mark = &rest[..run];
        let is_end = |at: &usize| !after[..*at].ends_with('`') && !after[at + run..].starts_with('`');
        let end = after.match_indices(mark).map(|(at, _)| at).find(is_end);
        // A mark at the end of what has arrived may be incomplete.
        let end = end.filter(|at| at + run < after.len() || !may_end_later);
        end.map(|len| MarkedText::Span { mark: run, len, style: TextStyle::Code })
    } else {
        // As in `2**8`, `2 ** 8` and `* item`, stars need not be marks.
        if run < 2 || before.is_alphanumeric() || !after.starts_with(|next: char| !next.is_whitespace()) {
            return MarkedText::Literal(run);
        }
        let inner = &rest[2..];
        let is_end = |at: &usize| *at > 0 && !inner[..*at].ends_with(char::is_whitespace);
        let end = inner.match_indices("**").map(|(at, _)| at).find(is_end);
        end.map(|len| MarkedText::Span { mark: 2, len, style: TextStyle::Bold })
    };
    match span {
        Some(span) => span,
        None if may_end_later => MarkedText::Undecided,
        None => MarkedText::Literal(run),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Formats an answer whose pieces have this number of characters. Styles are shown as `<b>`, `<c>`, `<d>` and `</>`.
    fn formatted_in(width: usize, answer: &str, piece: usize) -> String {
        let mut format = TerminalAnswer::new(width);
        let letters: Vec<char> = answer.chars().collect();
        let mut written: String = letters.chunks(piece).map(|piece| format.content(&piece.iter().collect::<String>())).collect();
        written += &format.end("[end]");
        let styles = [("\x1b[0;1m", "<b>"), ("\x1b[0;36m", "<c>"), ("\x1b[0;2m", "<d>"), ("\x1b[0m", "</>")];
        styles.iter().fold(written, |text, (code, name)| text.replace(code, name))
    }

    fn formatted(width: usize, answer: &str) -> String {
        let whole = formatted_in(width, answer, usize::MAX);
        for piece in 1..5 {
            assert_eq!(formatted_in(width, answer, piece), whole, "the format depends on how the answer arrives");
        }
        whole.strip_suffix("\n[end]\n").expect("the last line is added").to_owned()
    }

    #[test]
    fn lines_end_between_words_and_wide_characters() {
        for (width, answer, expected) in [
            (10, "the going is good", "the going\nis good"),
            (10, "0123456789 a", "0123456789\na"),
            (10, "0123456789abc d", "0123456789\nabc d"),
            (10, "a 0123456789abc", "a\n0123456789\nabc"),
            (6, "漢字漢字漢字", "漢字漢\n字漢字"),
            (7, "e\u{301}te\u{301} fini", "e\u{301}te\u{301}\nfini"),
            (20, "a\n\n  b c\n", "a\n\n  b c\n"),
            (5, "a b c d  e", "a b c\nd  e"),
        ] {
            assert_eq!(formatted(width, answer), expected, "{answer:?} in {width} columns");
        }
    }

    #[test]
    fn marks_become_styles_only_in_pairs() {
        for (answer, expected) in [
            ("a **b c** d", "a <b>b c</> d"),
            ("call `f(*x)` now", "call <c>f(*x)</> now"),
            ("**use `x` here**", "<b>use <c>x<b> here</>"),
            ("``a ` b``", "<c>a ` b</>"),
            ("2**8 and 2 ** 8 and f(**kwargs)", "2**8 and 2 ** 8 and f(**kwargs)"),
            ("* item\n* **two**", "* item\n* <b>two</>"),
            ("an ` alone\nand `code`", "an ` alone\nand <c>code</>"),
            ("***both***", "<b>*both</>*"),
            ("# Head **x**\ntext", "<b>Head x</>\ntext"),
            ("#hashtag and ####### seven", "#hashtag and ####### seven"),
        ] {
            assert_eq!(formatted(200, answer), expected, "{answer:?}");
        }
    }

    #[test]
    fn code_between_fences_is_not_wrapped() {
        let answer = "See:\n```rust\nfn main() { a_long_call(); }\n  # **no** `marks`\n```\n**done**";
        let expected = "See:\n<d>```rust</>\n<c>fn main() { a_long_call(); }</>\n<c>  # **no** `marks`</>\n<d>```</>\n<b>done</>";
        assert_eq!(formatted(20, answer), expected);
        assert_eq!(formatted(200, "```x``` is code"), "<c>x</> is code");
    }

    #[test]
    fn mark_without_an_end_does_not_delay_a_long_line() {
        let mut format = TerminalAnswer::new(1_000);
        assert_eq!(format.content("**never closed "), "");
        let written = format.content(&"word ".repeat(60));
        assert!(written.starts_with("**never closed word word"), "{written}");
    }

    #[test]
    fn escape_codes_of_an_answer_do_not_reach_the_terminal() {
        let shown = formatted(80, "\u{1b}[31mred\u{1b}]0;title\u{7} **\u{1b}[2J**\r\n");
        assert!(!shown.chars().any(|letter| letter.is_control() && letter != '\n'), "{shown:?}");
    }

    #[test]
    fn reasoning_is_dim_and_above_the_answer() {
        let mut format = TerminalAnswer::new(80);
        let written = format.reasoning("I think **so** ") + &format.content("Yes.") + &format.end("[end]");
        assert_eq!(written, "\u{1b}[0;2mI think **so**\u{1b}[0m\n\nYes.\n[end]\n");
    }
}
