//! Text to tokens and tokens to text: tokenizers, chat templates, conversations, and the parts of an answer (reasoning, content, tool calls).
//!
//! [`ServedModel`] has a model's tokenizer, template and parsers. A prompt is rendered by its [`ChatTemplate`] and encoded by its [`Tokenizer`].
//! An answer's bytes become text in a [`Detokenizer`], end at a [`StopMatcher`]'s strings, and are split by an [`OutputParser`](chat::OutputParser).

pub mod chat;
mod detokenizer;
mod encoding_cache;
mod error;
mod model;
mod stop;
mod template;
mod tokenizer;

pub use detokenizer::Detokenizer;
pub use encoding_cache::{EncodingCache, EncodingMetrics, NamespaceEncodings};
pub use error::ServedModelError;
pub use model::ServedModel;
pub use stop::StopMatcher;
pub use template::{ChatTemplate, RenderError};
pub use tokenizer::{EncodeError, Special, Tokenizer};
