//! Parses calls in the format of Gemma 4: `<|tool_call>call:name{key:value,…}<tool_call|>`. Texts are between quotation marks of their own, and names
//! have none.

use super::{ArgumentsReader, CALL_GEMMA_END, Start};
use crate::chat::output::{
    json::{ReadProgress, constant, escape_text},
    tags::partial_suffix,
};
use serde_json::Value;

const CALL: &str = "call:";
pub(super) const QUOTE: &str = "<|\"|>";
/// Maximum number of bytes of a name.
const NAME_BYTES_MAX: usize = 256;

/// Reads the beginning of a call, after its opening tag.
pub(super) fn start(text: &str) -> Start {
    let begun = text.trim_start();
    let Some(named) = begun.strip_prefix(CALL) else {
        return if CALL.starts_with(begun) { Start::Undecided } else { Start::NoCall };
    };
    match named.split_once('{') {
        Some((name, rest)) if name.len() <= NAME_BYTES_MAX && !name.contains(char::is_whitespace) => {
            let arguments = ArgumentsReader::Gemma(GemmaReader::default());
            Start::Call { name: name.to_owned(), at: text.len() - rest.len() - 1, arguments, nested: false }
        }
        None if named.len() <= NAME_BYTES_MAX && !named.contains(char::is_whitespace) => Start::Undecided,
        _ => Start::NoCall,
    }
}

/// Reads the arguments of a call, and writes them as a JSON object.
#[derive(Clone, Debug, Default)]
pub(in crate::chat::output) struct GemmaReader {
    /// The brackets that close the open objects and lists, innermost last.
    closing: String,
    /// Whether a name may follow, not a value.
    expects_name: bool,
    in_text: bool,
    /// Whether a comma was read, and nothing after it.
    has_comma: bool,
    /// A name, number or constant so far.
    bare: String,
}

impl GemmaReader {
    pub(super) fn has_tag(name: &str) -> bool {
        [QUOTE, CALL_GEMMA_END].contains(&name)
    }

    pub(super) fn read(&mut self, text: &str, is_ended: bool, out: &mut String) -> ReadProgress {
        let mut at = 0;
        while at < text.len() {
            let rest = &text[at..];
            if self.in_text {
                let end = rest.find(QUOTE);
                let len = end.unwrap_or_else(|| rest.len() - if is_ended { 0 } else { partial_suffix(rest, &[QUOTE]) });
                escape_text(&rest[..len], out);
                if end.is_none() {
                    return ReadProgress::Later(at + len);
                }
                out.push('"');
                self.in_text = false;
                at += len + QUOTE.len();
            } else if rest.starts_with(QUOTE) {
                self.end_bare(out);
                self.end_comma(out);
                out.push('"');
                self.in_text = true;
                at += QUOTE.len();
            } else if rest.starts_with(CALL_GEMMA_END) {
                self.end_bare(out);
                out.extend(std::mem::take(&mut self.closing).chars().rev());
                return ReadProgress::Complete(at);
            } else if !is_ended && [QUOTE, CALL_GEMMA_END].iter().any(|tag| tag.starts_with(rest)) {
                return ReadProgress::Later(at);
            } else if let Some(char) = rest.chars().next() {
                at += char.len_utf8();
                if self.next(char, out) {
                    return ReadProgress::Complete(at);
                }
            }
        }
        if is_ended {
            self.end_bare(out);
        }
        ReadProgress::Later(at)
    }

    /// Reads a character outside of texts. Returns whether it completes the arguments.
    fn next(&mut self, char: char, out: &mut String) -> bool {
        match char {
            '{' | '[' if self.bare.trim().is_empty() => {
                self.closing.push(if char == '{' { '}' } else { ']' });
                self.end_comma(out);
                out.push(char);
                self.expects_name = char == '{';
            }
            '}' | ']' => {
                self.end_bare(out);
                self.closing.pop();
                // A comma before a closing bracket is dropped.
                self.has_comma = false;
                out.push(char);
                return self.closing.is_empty();
            }
            ',' => {
                self.end_bare(out);
                self.has_comma = true;
                self.expects_name = self.closing.ends_with('}');
            }
            ':' if self.expects_name => {
                self.end_bare(out);
                out.push(':');
                self.expects_name = false;
            }
            _ => self.bare.push(char),
        }
        false
    }

    fn end_comma(&mut self, out: &mut String) {
        if std::mem::take(&mut self.has_comma) {
            out.push(',');
        }
    }

    /// Ends a word without quotes, and writes it: a name as a string; a value as it is if it is valid JSON, else as a string.
    fn end_bare(&mut self, out: &mut String) {
        let word = std::mem::take(&mut self.bare);
        let word = constant(word.trim());
        if word.is_empty() {
            return;
        }
        self.end_comma(out);
        let is_json = |value: Value| value.is_string() || !self.expects_name;
        if serde_json::from_str(word).is_ok_and(is_json) {
            out.push_str(word);
        } else {
            out.push('"');
            escape_text(word, out);
            out.push('"');
        }
    }
}
