//! The requests that an adapter sends to an engine's server. Each kind of engine implements them with its own protocol.

use crate::http::HttpError;
use futures::stream::BoxStream;
use std::{borrow::Cow, sync::Arc};
use tandem_engine::{Generate, KvHandle, PromptImage, Refusal, Sampling, TokenLogprob, TokenLogprobs};
use tandem_kv::{ImageStart, Namespace, TokenId};
use tandem_process::retry::error_chain;

/// A value that differs between two runs of a server at one address; `None` if the server reports no such value.
pub(crate) type Instance = Option<String>;

#[tonic::async_trait]
pub(crate) trait EngineServer: Send + Sync + 'static {
    /// Checks that the engine can work.
    ///
    /// # Errors
    /// Fails if the server does not answer, or if it reports that the engine has failed.
    async fn check_health(&self) -> Result<Instance, EngineFailure>;

    /// Returns the names of the LoRAs that the server serves now.
    ///
    /// # Errors
    /// Fails if the server does not answer, or answers with an error.
    async fn loras(&self) -> Result<Vec<String>, EngineFailure> {
        Ok(Vec::new())
    }
}

/// The requests to the server of an external engine.
#[tonic::async_trait]
pub(crate) trait Api: EngineServer {
    /// Checks whether the engine supports what the request needs.
    ///
    /// # Errors
    /// Returns a refusal that names the unsupported feature.
    fn check(&self, _generate: &Generate) -> Result<(), Refusal> {
        Ok(())
    }

    /// Computes a prompt. The engine then holds the prompt's KV until another engine pulls it, or has sent the KV in the room.
    ///
    /// # Errors
    /// Fails if the engine refuses the request, or fails without reporting the number of cached tokens.
    async fn export(&self, _call: &EngineCall, _room: Option<RoomCall>) -> Result<Exported, EngineFailure> {
        Err(EngineFailure::Invalid("this worker's engine sends no KV to other engines".to_owned()))
    }

    /// Generates an answer. The last chunk of the answer has [`AnswerChunk::usage`]. If the rest of the stream is read, the
    /// connection can carry another request. Dropping the stream closes the connection, which cancels the request.
    ///
    /// # Errors
    /// Fails if the engine refuses the request or fails. Later failures are items of the stream.
    async fn generate(
        &self,
        call: &EngineCall,
        sampling: &Sampling,
        pull: Option<KvHandle>,
    ) -> Result<BoxStream<'static, Result<AnswerChunk, EngineFailure>>, EngineFailure>;

    /// Returns the logprobs of the prompt's tokens, each with `top` alternatives; `None` for the first token.
    ///
    /// # Errors
    /// Fails if the engine refuses the request or fails.
    async fn prompt_logprobs(&self, call: &EngineCall, top: u32) -> Result<Vec<Option<TokenLogprobs>>, EngineFailure>;

    /// Ends a request early. Its stream still ends with a chunk that has [`AnswerChunk::usage`].
    async fn abort(&self, request_id: &str);
}

/// A request to an external engine.
#[derive(Clone, Debug)]
pub(crate) struct EngineCall {
    pub request_id: String,
    pub namespace: Namespace,
    pub tokens: Vec<TokenId>,
    /// The images of the prompt, in order. Their placeholders are among `tokens`.
    pub images: Arc<[PromptImage]>,
}

impl EngineCall {
    pub fn image_starts(&self) -> Vec<ImageStart> {
        self.images.iter().map(|image| image.start).collect()
    }
}

/// The room in which an engine sends the KV of a prompt to another engine.
#[derive(Debug)]
pub(crate) struct RoomCall {
    pub room: KvHandle,
    /// The parameters with which the engine samples the first token of the answer.
    pub sampling: Sampling,
}

#[derive(Debug)]
pub(crate) struct Exported {
    /// The handle with which another engine pulls the KV; `None` if another engine has received it in a room. An error if the engine holds no KV, as
    /// after an aborted request.
    pub handle: Result<Option<KvHandle>, EngineFailure>,
    /// The number of tokens that the engine found in its prefix cache; `None` if the engine does not report it.
    pub cached_tokens: Option<u32>,
}

#[derive(Debug, Default)]
pub(crate) struct AnswerChunk {
    pub tokens: Vec<(TokenId, Option<TokenLogprobs>)>,
    pub finish: Option<Finish>,
    /// The number of tokens that the engine found in its prefix cache, if it reports this number before its answer ends.
    pub counted: Option<u32>,
    /// The engine's report about the request, in the last chunk; `None` in all other chunks.
    pub usage: Option<EngineUsage>,
}

/// The logprobs that a request asked for.
#[derive(Default)]
pub(crate) struct WantedLogprobs {
    /// The number of alternatives; `None` if no logprobs were requested.
    pub top: Option<u32>,
    /// The tokens that are reported as alternatives. If the list is empty, the likeliest tokens are reported.
    pub tokens: Vec<TokenId>,
}

impl WantedLogprobs {
    pub fn of(sampling: &Sampling) -> Self {
        Self { top: sampling.logprobs, tokens: sampling.logprob_token_ids.clone() }
    }

    /// Returns a token's logprob with the requested ones of its alternatives, which are ordered by likelihood.
    pub fn choose(&self, logprob: f32, alternatives: &[TokenLogprob]) -> TokenLogprobs {
        let requested = |token: &TokenId| alternatives.iter().find(|alternative| alternative.token == *token).copied();
        let top = match self.tokens.is_empty() {
            true => alternatives.iter().take(self.top.unwrap_or(0) as usize).copied().collect(),
            false => self.tokens.iter().filter_map(requested).collect(),
        };
        TokenLogprobs { logprob, top }
    }
}

/// The reason why an answer has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    Stop,
    Length,
    Aborted,
}

/// The engine's report about a request that has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EngineUsage {
    /// The number of tokens that the engine found in its prefix cache; `None` if the engine does not report it.
    pub cached_tokens: Option<u32>,
    /// The number of the prompt's tokens, with those of its images; `None` if the engine does not report it.
    pub prompt_tokens: Option<u32>,
}

impl EngineUsage {
    /// Logs an error if the engine counts other tokens of a prompt with images than the frontend. The engine then has other blocks than those
    /// that the router expects, so hits are lost. `expected` is the number of the call's tokens when it was sent.
    pub fn check(&self, call: &EngineCall, expected: usize) {
        if let Some(found) = self.prompt_tokens.filter(|found| *found as usize != expected && !call.images.is_empty()) {
            tracing::error!(
                found,
                expected,
                "the engine counts other tokens of a prompt with images than the frontend; the renderer and the engine must run the same model and version"
            );
        }
    }
}

/// The reason why the engine did not serve a request.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineFailure {
    #[error("the engine is at capacity: {0}")]
    Full(String),
    /// The engine can never serve this request.
    #[error("the engine refuses the request: {0}")]
    Invalid(String),
    /// The engine has unloaded the LoRA that the request names.
    #[error("the engine does not serve the LoRA {0:?} any more")]
    Unloaded(String),
    /// The engine refuses all calls of the adapter, for example because its key is wrong.
    #[error("the engine does not accept calls from this worker (HTTP {status}): {message}; check its address, key and version")]
    Denied { status: u16, message: String },
    /// The engine failed while it served the request.
    #[error("the engine failed: {0}")]
    Failed(String),
    /// The engine is unreachable, or the connection was lost before the answer was complete.
    #[error("the connection to the engine failed")]
    Connection(#[from] HttpError),
    /// The engine's answer violates the protocol.
    #[error("the engine sent an invalid answer: {0}")]
    Protocol(String),
}

impl EngineFailure {
    /// Returns the refusal that the worker reports, or `None` if the worker reports a failure.
    pub fn refusal(&self) -> Option<Refusal> {
        match self {
            Self::Full(_) => Some(Refusal::Full),
            Self::Invalid(message) => {
                Some(Refusal::Unsupported(Cow::Owned(format!("the engine refuses the request: {message}"))))
            }
            Self::Unloaded(lora) => Some(Refusal::Unloaded(lora.clone())),
            Self::Denied { .. } | Self::Protocol(_) => Some(Refusal::Unusable(Cow::Owned(self.to_string()))),
            Self::Connection(error) if error.cannot_have_ended_the_server() => {
                Some(Refusal::Unusable(Cow::Owned(error_chain(error))))
            }
            // The request may have ended the engine, so the worker reports a failure.
            Self::Failed(_) | Self::Connection(_) => None,
        }
    }
}
