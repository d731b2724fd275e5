//! The user's messages: lines that are edited in a terminal, or the lines of a pipe.

use anyhow::{Context, Result};
use rustyline::{DefaultEditor, error::ReadlineError};
use std::io::{IsTerminal, Lines, StdinLock, stdin, stdout};

const PROMPT: &str = "> ";

/// The source of the user's messages.
pub(super) enum UserInput {
    Terminal(Box<DefaultEditor>),
    Piped(Lines<StdinLock<'static>>),
}

/// What the user has entered.
pub(super) enum EnteredLine {
    Text(String),
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

    /// Returns the next line. Blocks.
    pub(super) fn next(&mut self) -> Result<EnteredLine> {
        match self {
            Self::Terminal(editor) => match editor.readline(PROMPT) {
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
