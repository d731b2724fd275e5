//! Support for a stock SGLang server as an engine.
//!
//! Requests have token ids as input and output, over the server's own `POST /generate`. KV events are vLLM's, with the cache salt in a field of its
//! own. A server computes whole requests, or one half of each: then it sends or receives the KV in a room.

mod client;
mod connect;
mod info;
mod request;
mod response;

pub use connect::{SglangSettings, connect, inspect};
