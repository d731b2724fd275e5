//! The events of a job.

use crate::{TokenLogprobs, WriteRefused};
use std::time::Duration;
use tandem_kv::{ReadyBlock, Ticket, TokenId};

/// An event of a job. A prefill's are, in this order: `Scheduled`, `BlocksReady`…, `Computed`. A generation's: `Scheduled` or `Reserved`, `Started`,
/// `PromptLogprobs` if they were asked for, `Token`…, one `Finished` per sample. `Revoked`, `WriteRefused` (both before `Started`) and `Failed` may
/// come at any time; each is the job's last event.
#[derive(Clone, Debug)]
pub enum Event {
    /// The prompt has its blocks, and its prefill begins on this worker.
    Scheduled {
        /// Tokens found in this worker's prefix cache: at most the prompt less one token, a multiple of the block size; 0 if nothing was found
        /// or caching is off.
        cached_tokens: u32,
    },
    /// The prompt has its blocks; another worker may write KV into those that are missing.
    Reserved {
        /// The one-time right to write them.
        ticket: Ticket,
        /// Indices from the prompt's start. None: the prompt starts immediately.
        missing_blocks: Vec<u32>,
    },
    /// Prefill: blocks that [`crate::Job::send_blocks`] asked for are computed. They stay unchanged in the KV memory until the job is dropped.
    BlocksReady(Vec<ReadyBlock>),
    /// Prefill: the prompt is computed, in these chunks, and every block asked for has been reported as ready.
    Computed(Vec<PrefillChunk>),
    /// All of the prompt's KV is in this worker's memory. If another worker computed it, that worker has confirmed the transfer.
    Started(Started),
    /// The logprobs of the prompt's tokens; `None` for the first token, which has no preceding context.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// A new token was generated.
    Token {
        /// Index of the continuation, from 0.
        sample: u32,
        /// The token; a stop token is reported as well.
        token: TokenId,
        /// The logprobs of the token; `None` if the request does not want them.
        logprobs: Option<TokenLogprobs>,
    },
    /// A continuation has ended.
    Finished {
        /// Index of the continuation, from 0.
        sample: u32,
        /// The reason for which it ended.
        reason: FinishReason,
    },
    /// The blocks reserved for another worker's KV were taken back, for sequences that already run.
    Revoked,
    /// A write that the ticket does not allow ended the reservation; the blocks written so far were dropped.
    WriteRefused(WriteRefused),
    /// The engine failed; the job cannot continue.
    Failed,
}

/// How a prompt's KV was obtained.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Started {
    /// Time from submission to the allocation of blocks.
    pub queue: Duration,
    /// Time from the first block written to the confirmation of all.
    pub kv_transfer: Duration,
    /// Bytes written by another worker.
    pub kv_transfer_bytes: u64,
    /// The chunks in which this worker computed it, in order; none if another worker did, or it was cached.
    pub chunks: Vec<PrefillChunk>,
}

/// The part of a prompt that one step computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillChunk {
    /// Time from the allocation of blocks to the step's start.
    pub begun: Duration,
    /// Duration of the whole step, which may have computed other sequences, too.
    pub took: Duration,
    /// Tokens of this prompt.
    pub tokens: u32,
}

/// Why a continuation has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was sampled: the last token reported.
    Stop(TokenId),
    /// `max_tokens` or the context's end was reached.
    Length,
}
