//! The back end of a worker whose engine is another process, such as a stock vLLM server.

mod adapter;
mod api;
mod calls;
mod engine_load;
mod event;
mod failure;
mod grammar;
mod http;
mod job;
pub mod kv_events;
pub mod llama_cpp;
mod mirror;
mod served;
mod server;
mod server_failed;
mod settings;
pub mod sglang;
mod shared;
mod slots;
pub mod vllm;

pub use adapter::Adapter;
pub use event::{BlocksRemoved, BlocksStored, EngineEvent, EngineHash, ExtraKeys, UnknownMedium};
pub use http::ClientError;
pub use mirror::{Mirror, MirrorSettings, Unroutable, WrongBlockSize};
pub use server::{ConnectError, Connected, EngineEnded, ModelDescription, ServerDescription};
pub use server_failed::ServerFailed;
pub use settings::ServerSettings;
