//! The settings of the connection to a server of any kind.

use crate::{
    llama_cpp::{self, LlamaCppSettings},
    server::{ConnectError, Connected, ServerDescription},
    vllm::{self, VllmSettings},
};

/// The settings of the connection to an engine's server.
#[derive(Clone, Debug)]
pub enum ServerSettings {
    /// A vLLM server.
    Vllm(VllmSettings),
    /// A llama.cpp server.
    LlamaCpp(LlamaCppSettings),
}

impl ServerSettings {
    /// Returns the server's address.
    pub fn url(&self) -> &str {
        match self {
            Self::Vllm(settings) => &settings.url,
            Self::LlamaCpp(settings) => &settings.url,
        }
    }

    /// Returns the settings for one data-parallel rank of the server. A llama.cpp server has one, which needs no name.
    pub fn with_rank(self, rank: u32) -> Self {
        match self {
            Self::Vllm(settings) => Self::Vllm(VllmSettings { rank: Some(rank), ..settings }),
            Self::LlamaCpp(settings) => Self::LlamaCpp(settings),
        }
    }

    /// Waits until the server answers, and returns what it says of itself.
    ///
    /// # Errors
    /// The settings are invalid, or the server cannot be used.
    pub async fn inspect(&self) -> Result<ServerDescription, ConnectError> {
        match self {
            Self::Vllm(settings) => vllm::inspect(settings).await,
            Self::LlamaCpp(settings) => llama_cpp::inspect(settings).await,
        }
    }

    /// Waits until the server answers, and connects to it.
    ///
    /// # Errors
    /// The settings are invalid, or the server cannot be used.
    pub async fn connect(self) -> Result<Connected, ConnectError> {
        match self {
            Self::Vllm(settings) => vllm::connect(settings).await,
            Self::LlamaCpp(settings) => llama_cpp::connect(settings).await,
        }
    }
}
