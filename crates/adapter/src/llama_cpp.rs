//! Support for llama.cpp's server as an engine.
//!
//! Requests have token ids as input and output, over the server's own `POST /completion`. The server publishes no KV events, so its cache is assumed
//! from the requests that were routed to it. It exchanges no KV, so its worker prefills the prompts that it decodes. It does not separate namespaces,
//! so with prefix caching its worker serves only requests without a cache salt and without an account.

mod client;
mod connect;
mod lost;
mod request;
mod response;

pub use connect::{LlamaCppSettings, connect, inspect};
