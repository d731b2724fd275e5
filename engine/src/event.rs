//! What a job hears from an engine.

use crate::{TokenLogprobs, WriteRefused};
use bytes::Bytes;
use std::time::Duration;
use tandem_kv::{BlockId, Ticket, TokenId};

/// What a job hears, in this order: `Scheduled` or `Reserved`, (`Block`… or `Ready`…, `Computed` | `Started`, `PromptLogprobs`?, `Token`…, one `Finished` a sample).
/// `Revoked`, `WriteRefused` (before `Started`) and `Failed` may come at any time and are the last.
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
        ticket: Ticket,
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
    /// Prefill: finished blocks that [`crate::Job::show_blocks`] asked for: index from the prompt's start, and place in the KV memory.
    Ready(Vec<(u32, BlockId)>),
    /// Prefill: all is computed, chunk by chunk, and every block asked for has been told. The blocks are held until the job is dropped.
    Computed(Vec<PrefillChunk>),
    /// The prompt's KV is all here, and confirmed if it came from elsewhere.
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
    /// The blocks reserved for KV from elsewhere were taken back, for sequences that already run. Nothing more comes.
    Revoked,
    /// A write that the ticket does not allow ended the reservation; what had landed was dropped. Nothing more comes.
    WriteRefused(WriteRefused),
    /// The engine failed. Nothing more comes.
    Failed,
}

/// How the prompt's KV came here.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Started {
    /// From submission to the taking of blocks.
    pub queue: Duration,
    /// From the first block written to the confirmation that all are there.
    pub kv_transfer: Duration,
    /// Written by another worker.
    pub kv_transfer_bytes: u64,
    /// Computed here, in their order; none if it came from elsewhere, or was cached.
    pub chunks: Vec<PrefillChunk>,
}

/// What one step computed of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillChunk {
    /// From the taking of blocks to the step's beginning.
    pub begun: Duration,
    /// The whole step, with what it computed for others.
    pub took: Duration,
    /// Of this prompt.
    pub tokens: u32,
}

/// Why a continuation has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn: the last token told.
    Stop(TokenId),
    /// `max_tokens` or the context's end was reached.
    Length,
}
