//! Drives an engine in another process, such as a stock vLLM server, as a worker's back end.

mod event;
mod mirror;
mod salt;
pub mod vllm;

pub use event::{BlocksRemoved, BlocksStored, EngineEvent, EngineHash, ExtraKeys, Medium};
pub use mirror::{Mirror, MirrorSettings, PrefixTiers, Unroutable, WrongBlockSize};
pub use salt::cache_salt;
