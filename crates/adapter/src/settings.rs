//! The settings of the connection to a server of any kind.

use crate::{
    llama_cpp::{self, LlamaCppSettings},
    server::{ConnectError, Connected, ServerDescription},
    sglang::{self, SglangSettings},
    vllm::{self, VllmSettings},
};

/// The settings of the connection to an engine's server.
#[derive(Clone, Debug)]
pub enum ServerSettings {
    /// The engine is a vLLM server.
    Vllm(VllmSettings),
    /// The engine is a llama.cpp server.
    LlamaCpp(LlamaCppSettings),
    /// The engine is a SGLang server.
    Sglang(SglangSettings),
}

impl ServerSettings {
    /// Returns the server's address.
    pub fn url(&self) -> &str {
        match self {
            Self::Vllm(settings) => &settings.url,
            Self::LlamaCpp(settings) => &settings.url,
            Self::Sglang(settings) => &settings.url,
        }
    }

    /// Returns these settings for one data-parallel rank of the server. A llama.cpp server has only one rank, so its settings do not change.
    pub fn with_rank(self, rank: u32) -> Self {
        match self {
            Self::Vllm(settings) => Self::Vllm(settings.with_rank(rank)),
            Self::LlamaCpp(settings) => Self::LlamaCpp(settings),
            Self::Sglang(settings) => Self::Sglang(settings.with_rank(rank)),
        }
    }

    /// Waits until the server answers, and returns the server's description.
    ///
    /// # Errors
    /// Fails if the settings are invalid, or if the server cannot be used.
    pub async fn inspect(&self) -> Result<ServerDescription, ConnectError> {
        match self {
            Self::Vllm(settings) => vllm::inspect(settings).await,
            Self::LlamaCpp(settings) => llama_cpp::inspect(settings).await,
            Self::Sglang(settings) => sglang::inspect(settings).await,
        }
    }

    /// Waits until the server answers, and connects to it.
    ///
    /// # Errors
    /// Fails if the settings are invalid, or if the server cannot be used.
    pub async fn connect(self) -> Result<Connected, ConnectError> {
        match self {
            Self::Vllm(settings) => vllm::connect(settings).await,
            Self::LlamaCpp(settings) => llama_cpp::connect(settings).await,
            Self::Sglang(settings) => sglang::connect(settings).await,
        }
    }
}
