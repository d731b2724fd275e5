//! What a job asks of an engine, and why it may be refused.

use crate::Sampling;
use tandem_kv::{Namespace, TokenId};

/// Compute the KV of all tokens of a prompt but the last, and hold it until the job is dropped.
#[derive(Clone, Debug)]
pub struct Prefill {
    /// Told to the router when the work shows in the load.
    pub request_id: String,
    /// Whose KV may be reused.
    pub namespace: Namespace,
    /// At least one token.
    pub prompt: Vec<TokenId>,
}

/// Continue a prompt.
#[derive(Clone, Debug)]
pub struct Generate {
    /// Told to the router when the work shows in the load.
    pub request_id: String,
    /// Whose KV may be reused.
    pub namespace: Namespace,
    /// At least one token.
    pub prompt: Vec<TokenId>,
    /// How tokens are chosen. Sample `i` draws as a request of its own with `seed + i` would.
    pub sampling: Sampling,
    /// How many continuations.
    pub samples: u32,
    /// Where the prompt's KV comes from.
    pub kv: KvSource,
    /// Logprobs of the prompt's own tokens, with this many alternatives; the prompt is then computed without cache reads.
    pub prompt_logprobs: Option<u32>,
}

/// Where the KV of a prompt (all tokens but the last) comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSource {
    /// Computed here.
    Local,
    /// Written block by block under a ticket ([`crate::Event::Reserved`]).
    Remote,
}

/// Why a job is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The queue is full; try again later or elsewhere.
    #[error("the worker's queue is full")]
    Full,
    /// Longer than the model's context.
    #[error("prompt and new tokens need {needed} positions, the context has {context_length}")]
    BeyondContext {
        /// Prompt and `max_tokens`.
        needed: u32,
        /// The model's limit.
        context_length: u32,
    },
    /// Longer than the whole cache.
    #[error("the request needs {needed_blocks} KV blocks, the worker has {capacity_blocks}")]
    BeyondCapacity {
        /// Prompt and `max_tokens` of all samples.
        needed_blocks: u32,
        /// All blocks of the worker.
        capacity_blocks: u32,
    },
    /// Prompts have at least one token, requests at least one sample.
    #[error("the prompt is empty")]
    Empty,
    /// The engine has failed or is shut down.
    #[error("the engine is gone")]
    Gone,
}
