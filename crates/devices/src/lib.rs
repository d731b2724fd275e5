//! The devices that compute models: each implements [`Engine`](tandem_engine::Engine).

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod sim;
