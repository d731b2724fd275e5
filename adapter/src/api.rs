//! What an adapter needs of an engine's server: one request in, tokens out. Each kind of engine implements it over its own protocol.

use crate::http::HttpError;
use futures::stream::BoxStream;
use std::borrow::Cow;
use tandem_engine::{KvHandle, Refusal, Sampling, TokenLogprobs};
use tandem_kv::{Namespace, TokenId};

/// A server that computes requests.
#[tonic::async_trait]
pub(crate) trait Api: Send + Sync + 'static {
    /// Computes a prompt and holds its KV for another engine.
    ///
    /// # Errors
    /// The engine refused the request or failed.
    async fn export(&self, call: &Call) -> Result<Exported, EngineFailure>;

    /// Generates. The stream ends with a chunk that has [`Chunk::usage`]; dropping it cancels the request.
    ///
    /// # Errors
    /// The engine refused the request or failed; so do the stream's items.
    async fn generate(
        &self,
        call: &Call,
        sampling: &Sampling,
        pull: Option<KvHandle>,
    ) -> Result<BoxStream<'static, Result<Chunk, EngineFailure>>, EngineFailure>;

    /// Returns the logprobs of the prompt's tokens with `top` alternatives; `None` for the first token.
    ///
    /// # Errors
    /// The engine refused the request or failed.
    async fn prompt_logprobs(&self, call: &Call, top: u32) -> Result<Vec<Option<TokenLogprobs>>, EngineFailure>;

    /// Ends a request. What it has reported by then, it still reports: its stream ends with the usage.
    async fn abort(&self, request_id: &str);
}

/// One request to the engine.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// Unique in the engine.
    pub request_id: String,
    pub namespace: Namespace,
    pub tokens: Vec<TokenId>,
}

/// A prompt that the engine has computed.
#[derive(Debug)]
pub(crate) struct Exported {
    pub handle: KvHandle,
    /// Tokens that the engine found in its prefix cache; `None`: it does not report them.
    pub cached_tokens: Option<u32>,
}

/// A part of an answer.
#[derive(Debug, Default)]
pub(crate) struct Chunk {
    pub tokens: Vec<(TokenId, Option<TokenLogprobs>)>,
    pub finish: Option<Finish>,
    /// Set in the last chunk only.
    pub usage: Option<Usage>,
}

/// Why an answer has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// The last token is one of the stop tokens.
    Stop,
    Length,
    Aborted,
}

/// What the engine reports about a request at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Tokens that the engine found in its prefix cache; `None`: it does not report them.
    pub cached_tokens: Option<u32>,
}

/// Why the engine did not serve a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineFailure {
    /// It takes no more requests now.
    #[error("the engine is at capacity: {0}")]
    Full(String),
    /// It can never serve this request.
    #[error("the engine refuses the request: {0}")]
    Invalid(String),
    /// It refuses the adapter, not the request.
    #[error("the engine does not accept calls from this worker (HTTP {status}): {message}; check its address, key and version")]
    Denied { status: u16, message: String },
    /// It failed while it served the request.
    #[error("the engine failed: {0}")]
    Failed(String),
    /// It cannot be reached, or its answer broke.
    #[error("the connection to the engine failed")]
    Connection(#[from] HttpError),
    /// It sent what its protocol does not allow.
    #[error("the engine sent an invalid answer: {0}")]
    Protocol(String),
}

impl EngineFailure {
    /// The refusal that a worker reports, if the request and not the engine is at fault.
    pub fn refusal(&self) -> Option<Refusal> {
        match self {
            Self::Full(_) => Some(Refusal::Full),
            Self::Invalid(message) => {
                Some(Refusal::Unsupported(Cow::Owned(format!("the engine refuses the request: {message}"))))
            }
            Self::Denied { .. } | Self::Failed(_) | Self::Connection(_) | Self::Protocol(_) => None,
        }
    }
}
