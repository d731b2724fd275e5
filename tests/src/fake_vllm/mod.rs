//! A vLLM server without a model, for tests: what a stock server sends, byte for byte, from payloads recorded with vLLM 0.32.0.

pub mod engine;
pub mod events;
pub mod server;
pub mod tokenizer;

pub use server::{FakeSettings, FakeVllm};
