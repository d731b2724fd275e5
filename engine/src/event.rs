//! The events of a job.

use crate::{TokenLogprobs, WriteRefused};
use std::time::Duration;
use tandem_kv::{ReadyBlock, Ticket, TokenId};

/// An event of a job. A prefill's events are, in this order: `Scheduled`, `BlocksReady`…, `Computed`. A generation's: `Scheduled` or `Reserved`,
/// `Started`, `PromptLogprobs` if they were requested, `Token`…, one `Finished` per sample. `Revoked` and `WriteRefused` (both before `Started`) and
/// `Failed` (at any time) end the job: no other event follows.
#[derive(Clone, Debug)]
pub enum Event {
    /// The prompt has its blocks, and its prefill begins on this worker.
    Scheduled {
        /// Tokens found in this worker's prefix cache: a multiple of the block size, and less than the prompt's tokens.
        cached_tokens: u32,
    },
    /// The prompt has its blocks; another worker may write the KV of the missing ones.
    Reserved {
        /// The one-time right to write them.
        ticket: Ticket,
        /// The indices of the missing blocks in the prompt. If there are none, the prompt starts immediately.
        missing_blocks: Vec<u32>,
    },
    /// Prefill: these of the requested blocks ([`crate::Job::send_blocks`]) are computed. They stay unchanged until the job is dropped.
    BlocksReady(Vec<ReadyBlock>),
    /// Prefill: the prompt is computed, in these chunks, and every requested block was reported as ready.
    Computed(Vec<PrefillChunk>),
    /// All of the prompt's KV is in this worker's memory. If another worker computed it, that worker has confirmed the transfer.
    Started(Started),
    /// The logprobs of the prompt's tokens; `None` for the first token, which has no preceding context.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// A new token was generated.
    Token {
        /// The number of the sample, from 0.
        sample: u32,
        /// The token; a stop token is reported as well.
        token: TokenId,
        /// The logprobs of the token, if the request wants them.
        logprobs: Option<TokenLogprobs>,
    },
    /// A sample has ended.
    Finished {
        /// The number of the sample, from 0.
        sample: u32,
        /// Why it ended.
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
    /// The chunks that this worker computed, in order; none if another worker computed the prompt, or it was cached.
    pub chunks: Vec<PrefillChunk>,
}

/// The tokens of a prompt that one step computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillChunk {
    /// Time from the allocation of blocks to the step's start.
    pub begun: Duration,
    /// Duration of the whole step, which may have computed other sequences, too.
    pub took: Duration,
    /// The number of tokens.
    pub tokens: u32,
}

/// Why a sample has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was sampled: the last token reported.
    Stop(TokenId),
    /// `max_tokens` or the context's end was reached.
    Length,
}
