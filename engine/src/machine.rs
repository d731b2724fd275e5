//! Which chunks make a step: admission, chunked prefill, continuous batching, preemption. A plain state machine.

use crate::{Sampling, TokenLogprobs};
use bytes::Bytes;
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
    /// Written block by block under a ticket ([`Event::Reserved`]).
    Remote,
}

/// What a job hears, in this order: `Scheduled` or `Reserved`, (`Blocks`…`Computed` | `Started`, `PromptLogprobs`?, `Token`…, one `Finished` a sample).
/// `Failed` may come at any time and is the last.
#[derive(Clone, Debug)]
pub enum Event {
    /// Blocks are taken; prefill begins here. Tokens found in this worker's prefix cache; 0 when nothing was or caching is off.
    Scheduled {
        /// At most the prompt less one token, a multiple of the block size.
        cached_tokens: u32,
    },
    /// Blocks are taken; KV may be written into those which are missing (indices from the prompt's start).
    Reserved {
        /// The one-time right to write.
        ticket: u64,
        /// None missing: the prompt starts at once.
        missing_blocks: Vec<u32>,
    },
    /// Prefill: a finished block that [`crate::Job::send_blocks`] asked for.
    Block {
        /// From the prompt's start.
        index: u32,
        /// Its KV.
        payload: Bytes,
    },
    /// Prefill: all is computed, and every block asked for has been told.
    Computed,
    /// The prompt's KV is all here.
    Started(Started),
    /// Of the prompt's tokens; the first has none.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// A new token.
    Token {
        /// Which continuation, from 0.
        sample: u32,
        /// The token; a stop token is told as well.
        token: TokenId,
        /// When asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// A continuation has ended.
    Finished {
        /// Which continuation.
        sample: u32,
        /// Why.
        reason: FinishReason,
    },
    /// The engine failed; nothing more comes.
    Failed,
}

/// How the prompt's KV came here.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Started {
    /// From submission to the taking of blocks.
    pub queue: std::time::Duration,
    /// From the first block written to the last.
    pub kv_transfer: std::time::Duration,
    /// Written by another worker.
    pub kv_transfer_bytes: u64,
}

/// Why a continuation has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn: the last token told.
    Stop(TokenId),
    /// `max_tokens` or the context's end was reached.
    Length,
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
