//! The deltas of an answer.

/// A delta of a sample's answer. All endpoints that answer conversations convert these deltas to their own formats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A part of the reasoning.
    Reasoning(String),
    /// A part of the answer itself.
    Content(String),
    /// The beginning of a tool call. The calls of a sample are counted from 0.
    ToolCall {
        /// The number of the call.
        index: usize,
        /// The call's id, by which its result refers to it.
        id: String,
        /// The tool's name.
        name: String,
    },
    /// A part of the JSON text of a call's arguments, which is the concatenation of all these parts.
    Arguments {
        /// The number of the call.
        index: usize,
        /// The part of the JSON text.
        text: String,
    },
}

/// Deltas in order. Consecutive texts of the same kind are joined.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Pieces(Vec<Piece>);

impl From<Vec<Piece>> for Pieces {
    fn from(pieces: Vec<Piece>) -> Self {
        Self(pieces)
    }
}

impl Pieces {
    /// Returns the deltas in order.
    pub fn into_vec(self) -> Vec<Piece> {
        self.0
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Reasoning(last)) => last.push_str(text),
            _ => self.0.push(Piece::Reasoning(text.to_owned())),
        }
    }

    pub(super) fn content(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Content(last)) => last.push_str(text),
            _ => self.0.push(Piece::Content(text.to_owned())),
        }
    }

    pub(super) fn tool_call(&mut self, index: usize, id: String, name: String) {
        self.0.push(Piece::ToolCall { index, id, name });
    }

    pub(super) fn arguments(&mut self, index: usize, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Arguments { text: last, .. }) => last.push_str(text),
            _ => self.0.push(Piece::Arguments { index, text: text.to_owned() }),
        }
    }
}
