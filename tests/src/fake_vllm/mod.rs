//! A fake vLLM server without a model, for tests. It sends the same bytes as a stock server; its payloads were recorded with vLLM 0.32.0.

pub mod engine;
pub mod events;
pub mod images;
mod openai;
pub mod server;
pub mod tokenizer;

pub use server::{FakeSettings, FakeVllm};
