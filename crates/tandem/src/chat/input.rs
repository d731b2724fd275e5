//! The user's messages: lines that are edited in a terminal, or the lines of a pipe.

use anyhow::{Context, Result};
use rustyline::{DefaultEditor, error::ReadlineError};
use std::io::{IsTerminal, Lines, StdinLock, stdin, stdout};

const PROMPT: &str = "> ";
/// The prompt within a message of several lines.
const NEXT_PROMPT: &str = ". ";
/// What begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";

/// The source of the user's messages.
pub(super) enum UserInput {
    Terminal(Box<DefaultEditor>),
    Piped(Lines<StdinLock<'static>>),
}

/// What the user has entered.
#[derive(Debug, PartialEq)]
pub(super) enum EnteredLine {
    /// A line, which may be a command.
    Text(String),
    /// The lines of a message between quotes, which is no command.
    Quoted(String),
    /// The user has pressed Ctrl-C.
    Interrupted,
    /// The end of the input, or Ctrl-D.
    End,
}

impl UserInput {
    pub(super) fn open() -> Result<Self> {
        if stdin().is_terminal() && stdout().is_terminal() {
            let editor = DefaultEditor::new().context("cannot read from this terminal; write the messages to stdin instead")?;
            return Ok(Self::Terminal(Box::new(editor)));
        }
        Ok(Self::Piped(stdin().lines()))
    }

    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// Returns the next line or quoted message. Blocks.
    pub(super) fn next(&mut self) -> Result<EnteredLine> {
        let entered = self.line(PROMPT)?;
        with_quoted_lines(entered, || self.line(NEXT_PROMPT))
    }

    /// Drops the lines of a paste that are not answered yet. The terminal itself has dropped what it had not delivered when Ctrl-C was
    /// pressed.
    pub(super) fn drop_pasted(&mut self) -> Result<()> {
        let Self::Terminal(editor) = self else { return Ok(()) };
        // The editor has read ahead. The new one has the same history.
        let mut new = DefaultEditor::new().context("the terminal cannot be read")?;
        std::mem::swap(new.history_mut(), editor.history_mut());
        **editor = new;
        Ok(())
    }

    fn line(&mut self, prompt: &str) -> Result<EnteredLine> {
        match self {
            Self::Terminal(editor) => match editor.readline(prompt) {
                Ok(text) => {
                    editor.add_history_entry(&text).context("the line cannot be added to the input history")?;
                    Ok(EnteredLine::Text(text))
                }
                Err(ReadlineError::Interrupted) => Ok(EnteredLine::Interrupted),
                Err(ReadlineError::Eof) => Ok(EnteredLine::End),
                Err(error) => Err(error).context("the terminal cannot be read"),
            },
            Self::Piped(lines) => match lines.next() {
                Some(line) => Ok(EnteredLine::Text(line.context("the input cannot be read")?)),
                None => Ok(EnteredLine::End),
            },
        }
    }
}

/// Returns the message of several lines that this line begins, if the line begins with quotes, or else the line. The end of the input ends
/// the message, and Ctrl-C drops it.
fn with_quoted_lines(entered: EnteredLine, mut next: impl FnMut() -> Result<EnteredLine>) -> Result<EnteredLine> {
    let EnteredLine::Text(line) = &entered else { return Ok(entered) };
    let Some(begun) = line.trim_start().strip_prefix(QUOTES) else { return Ok(entered) };
    let mut text = begun.to_owned();
    while !text.trim_end().ends_with(QUOTES) {
        match next()? {
            EnteredLine::Text(line) => {
                text.push('\n');
                text.push_str(&line);
            }
            EnteredLine::End => return Ok(EnteredLine::Quoted(text.trim_matches('\n').to_owned())),
            other => return Ok(other),
        }
    }
    let text = text.trim_end().strip_suffix(QUOTES).unwrap_or_default();
    Ok(EnteredLine::Quoted(text.trim_matches('\n').to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entered(lines: &[&str]) -> EnteredLine {
        let mut lines = lines.iter().map(|line| EnteredLine::Text((*line).to_owned()));
        let first = lines.next().expect("there is a line");
        with_quoted_lines(first, || Ok(lines.next().unwrap_or(EnteredLine::End))).expect("the lines can be read")
    }

    #[test]
    fn lines_between_quotes_are_one_message() {
        let quoted = |text: &str| EnteredLine::Quoted(text.to_owned());
        for (lines, expected) in [
            (&["hello", "\"\"\""][..], EnteredLine::Text("hello".to_owned())),
            (&["\"\"\"", "one", "", "/clear", "\"\"\"", "next"], quoted("one\n\n/clear")),
            (&["\"\"\"one", "two\"\"\" "], quoted("one\ntwo")),
            (&["\"\"\"one\"\"\""], quoted("one")),
            (&["\"\"\"", "never ended"], quoted("never ended")),
        ] {
            assert_eq!(entered(lines), expected, "{lines:?}");
        }
        let first = EnteredLine::Text("\"\"\"one".to_owned());
        let dropped = with_quoted_lines(first, || Ok(EnteredLine::Interrupted)).expect("the lines can be read");
        assert_eq!(dropped, EnteredLine::Interrupted);
    }
}
