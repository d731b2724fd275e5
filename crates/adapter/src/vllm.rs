//! Support for a stock vLLM server as an engine.

mod client;
mod connect;
mod handle;
mod metrics;
mod request;
mod response;

pub use connect::{VllmSettings, connect, inspect};
