//! A conversation in the form that chat templates need, and the deltas of an answer: reasoning, content and tool calls.

mod conversation;
mod message;
mod output;
mod tool;

pub use conversation::{Abilities, Conversation, SystemPlaces, TemplateOptions};
pub use message::{Message, MessageForm, Role, ToolCall};
pub use output::{OutputFormat, OutputParser, Piece, Pieces, ReasoningFormat, ToolFormat};
pub use output::{ReasoningParser, ToolCallParser};
pub use tool::{INPUT, Tool, ToolChoice, Tools};
