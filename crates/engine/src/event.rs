//! The events of a job: one prefill or one generation that an engine runs.

use crate::{Refusal, TokenLogprobs, WriteRefused};
use std::{fmt, time::Duration};
use tandem_kv::{ByTier, ReadyBlock, Ticket, TokenId};

/// An event of a job.
///
/// A prefill has the events `Scheduled`, `BlocksReady` (any number) and `Computed`, in this order. A generation has `Scheduled` or `Reserved`,
/// `Started`, `PromptLogprobs` if they were requested, `Token` (any number), and one `Finished` per sample. `Revoked` and `WriteRefused` (both before
/// `Started`), `Refused` and `Failed` (at any time) end the job: no other event follows.
///
/// A job of an external engine (a process that a worker drives) begins with `Submitted`. Its prefill ends with `Exported` in place of `Computed`. A
/// generation with [`crate::KvSource::Handle`] has neither `Scheduled` nor `Reserved`. The last event of such a job may also be `PullFailed`.
#[derive(Clone, Debug)]
pub enum Event {
    /// The prompt's blocks are allocated, and its prefill begins on this worker.
    Scheduled {
        /// The number of prompt tokens found in this worker's prefix cache: at most the prompt's length minus one; 0 if nothing was found or
        /// caching is off. `None` if the external engine does not report it.
        cached: Option<CachedTokens>,
    },
    /// The request has left the worker's queue, and has a place in the external engine. `Scheduled` follows as soon as the external engine
    /// reports that the prompt is scheduled: at the earliest with the first token.
    Submitted,
    /// The prompt's blocks are allocated. Another worker may write the KV of the missing blocks.
    Reserved {
        /// The one-time right to write the missing blocks.
        ticket: Ticket,
        /// The indices of the missing blocks in the prompt. If there are none, the prompt starts immediately.
        missing_blocks: Vec<u32>,
    },
    /// These blocks of a prefill are computed. The job requested them with [`crate::Job::send_blocks`]. The blocks stay unchanged until the job is dropped.
    BlocksReady(Vec<ReadyBlock>),
    /// The prompt of a prefill is computed, in these chunks, and every requested block was reported as ready. If an external engine has computed
    /// the prompt for a room, it has also sent the KV.
    Computed(Vec<PrefillChunk>),
    /// The external engine has computed the prompt of a prefill and holds its KV for another engine.
    Exported(KvHandle),
    /// All of the prompt's KV is in this worker's memory. If another worker computed the KV, that worker has confirmed the transfer.
    Started(Started),
    /// The logprobs of the prompt's tokens; `None` for the first token, which has no preceding context.
    PromptLogprobs(Vec<Option<TokenLogprobs>>),
    /// A new token was generated.
    Token {
        /// The number of the sample, from 0.
        sample: u32,
        /// The id of the token. A stop token is reported as well.
        token: TokenId,
        /// The logprobs of the token; `None` if the request does not want them.
        logprobs: Option<TokenLogprobs>,
    },
    /// A sample has ended.
    Finished {
        /// The number of the sample, from 0.
        sample: u32,
        /// The reason why the sample has ended.
        reason: FinishReason,
    },
    /// The blocks that were reserved for KV from another worker were taken back, because sequences that already run need them.
    Revoked,
    /// A write that the ticket does not allow ended the reservation; the blocks written so far were dropped.
    WriteRefused(WriteRefused),
    /// The external engine could not pull the prompt's KV with the handle.
    PullFailed,
    /// The external engine refused the job after its submission, or the job's constraint cannot be enforced any further.
    Refused(Refusal),
    /// The engine failed; the job cannot continue.
    Failed,
}

/// The numbers of a prompt's tokens that were found in a worker's prefix cache, by the tier that held them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedTokens(pub ByTier<u32>);

impl CachedTokens {
    /// Returns a count of tokens that were all found in the device's memory.
    pub fn on_device(tokens: u32) -> Self {
        Self([tokens, 0, 0, 0])
    }

    /// Returns the number of tokens that were found in all tiers together.
    pub fn total(self) -> u32 {
        self.0.iter().sum()
    }
}

/// The right to pull one prompt's KV from the external engine that computed it. It can be used once, before it expires.
#[derive(Clone, PartialEq, Eq)]
pub struct KvHandle {
    /// The engine's own description of the KV, which only engines of the same family can read. It is secret and is never logged.
    pub bytes: Vec<u8>,
    /// The time for which the engine is certain to hold the KV, counted from the creation of this value.
    pub valid_for: Duration,
    /// The chunks in which the prompt was computed, as far as the engine reports them.
    pub chunks: Vec<PrefillChunk>,
}

impl KvHandle {
    /// Returns the handle of the KV that another engine sends in a room: a meeting that both engines know by its number. `address` is the
    /// host:port at which the engines meet.
    pub fn of_room(address: &str, room: u64, valid_for: Duration) -> Self {
        Self { bytes: format!("{room}@{address}").into_bytes(), valid_for, chunks: Vec::new() }
    }

    /// Returns the address and the number of a room; `None` if this is not the handle of a room.
    pub fn room(&self) -> Option<(&str, u64)> {
        let (room, address) = std::str::from_utf8(&self.bytes).ok()?.split_once('@')?;
        Some((address, room.parse().ok()?))
    }
}

impl fmt::Debug for KvHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvHandle").field("valid_for", &self.valid_for).finish_non_exhaustive()
    }
}

/// The way in which a prompt's KV was obtained.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Started {
    /// The time from the submission of the job to the allocation of its blocks.
    pub queue: Duration,
    /// The time from the write of the first block to the confirmation of all blocks; zero if no block came from another worker.
    pub kv_transfer: Duration,
    /// The number of bytes that another worker has written.
    pub kv_transfer_bytes: u64,
    /// The chunks that this worker computed, in order; empty if another worker computed the prompt, or if the prompt was cached.
    pub chunks: Vec<PrefillChunk>,
}

/// The tokens of a prompt that one engine step computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillChunk {
    /// The time from the allocation of the prompt's blocks to the start of the step.
    pub begun: Duration,
    /// The duration of the whole step, which may have computed other sequences, too.
    pub took: Duration,
    /// The number of prompt tokens in the chunk.
    pub tokens: u32,
}

/// The reason why a sample has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// This stop token was sampled. It is the last token that was reported.
    Stop(TokenId),
    /// The text is complete, and its constraint does not allow it to continue.
    Complete,
    /// The sample has reached `max_tokens` or the end of the model's context.
    Length,
}
