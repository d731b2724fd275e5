//! llama.cpp's server as an engine.
//!
//! Requests have token ids as input and output, over the server's own `POST /completion`. The server publishes no KV events, so its cache is
//! assumed from the requests that were routed to it, and it exchanges no KV: its worker decodes and prefills its own prompts. It does not keep
//! namespaces apart, so with prefix caching it serves only requests that share one.

mod client;
mod connect;
mod lost;
mod request;
mod response;

pub use connect::{LlamaCppSettings, connect, inspect};
