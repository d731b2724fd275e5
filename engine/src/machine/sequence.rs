//! One sequence of tokens and its blocks.

use crate::{Generated, Logits, PrefillChunk, TokenLogprobs, sampling::Sampler};
use std::{sync::Arc, time::Duration};
use tandem_kv::{BlockAccess, BlockId, Namespace, Ticket, TokenId};

/// A job's number on its engine.
pub(crate) type JobId = u64;
/// A job and the number of a sample of it.
pub(super) type Order = (JobId, u32);

/// Tokens, how far their KV is computed, and the blocks that hold it.
#[derive(Debug)]
pub(super) struct Sequence {
    pub job: JobId,
    /// Lower goes first: order of submission, samples of a job by their number.
    pub order: Order,
    /// The job's account; empty if the request has none.
    pub account: Arc<str>,
    /// When the job's prompt is due among those of its account.
    pub due: u64,
    pub namespace: Namespace,
    pub tokens: Vec<TokenId>,
    /// Of the tokens at the start: a prompt, with what all its resumed samples have generated alike.
    pub prompt_len: usize,
    /// Pinned once each for this sequence.
    pub blocks: Vec<BlockId>,
    /// Leading tokens whose KV is in the blocks.
    pub computed: usize,
    /// Leading blocks that were offered to the cache.
    pub committed: usize,
    /// Its job's listener is behind: nothing is computed, and its blocks are the first to be taken for others.
    pub paused: bool,
    /// Blocks may be matched in the cache.
    pub cache_reads: bool,
    pub submitted: Duration,
    /// While it waits: leading blocks that were in the cache when it was last looked.
    pub found: usize,
    /// While it waits: who was before it and will compute the most of what it needs, and how many leading blocks that is.
    pub ahead: Option<(JobId, usize)>,
    /// Who computes the blocks that this one needs next, while it waits for them.
    pub twin: Option<Twin>,
    /// From submission to the first taking of blocks; set then.
    pub queued: Option<Duration>,
    /// What steps have computed of a prompt.
    pub chunks: Vec<PrefillChunk>,
    pub role: Role,
}

/// Chunks that are remembered of a prompt, the last with all that come after it.
const CHUNKS_MAX: usize = 64;

/// What a sequence is for.
#[derive(Debug)]
pub(super) enum Role {
    Prefill(Sending),
    /// Computes or receives the prompt less its last token, then becomes a sequence of role `Sample` for each of `samples`.
    Prompt(Box<Prompt>),
    Sample(Box<Sample>),
}

/// The blocks of a prefill that are sent to another worker.
#[derive(Debug, Default)]
pub(super) struct Sending {
    /// Indices of those not reported yet, in descending order, and how to report them; `None` until they are known.
    pub wanted: Option<(Vec<u32>, BlockAccess)>,
    /// `Computed` was reported: all is computed, and every block was reported.
    pub all_reported: bool,
}

#[derive(Debug)]
pub(super) struct Prompt {
    pub sampler: Sampler,
    /// At least one.
    pub samples: Vec<Generated>,
    /// Tokens before those that samples generate.
    pub boundary: usize,
    /// Tokens a sample may reach, the prompt's included.
    pub len_max: usize,
    pub logprobs: Option<PromptLogprobs>,
    /// Set while another worker's KV is being received.
    pub remote: Option<Remote>,
}

#[derive(Debug)]
pub(super) struct PromptLogprobs {
    pub top: u32,
    pub rows: Vec<Option<TokenLogprobs>>,
}

/// A reservation that another worker's KV is written into.
#[derive(Debug, Default)]
pub(super) struct Remote {
    /// `None` before blocks are allocated.
    pub ticket: Option<Ticket>,
    /// Indices of blocks that are neither written nor being written.
    pub missing: Vec<u32>,
    /// Indices of blocks that are being written while steps run.
    pub writing: Vec<u32>,
    pub first_write: Option<Duration>,
    pub bytes: u64,
}

#[derive(Debug)]
pub(super) struct Sample {
    pub number: u32,
    pub sampler: Sampler,
    pub len_max: usize,
}

/// A sequence with blocks that is about to compute, or to receive, what another one needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Twin {
    /// Its place in the order.
    pub order: Order,
    /// Leading blocks the two have in common, and both want.
    pub blocks: usize,
    pub since: Duration,
}

impl Sequence {
    /// Tokens that are to be computed before the sequence goes on to something else.
    pub fn target(&self) -> usize {
        match self.role {
            Role::Prefill(_) | Role::Prompt(_) => self.prompt_len - 1,
            Role::Sample(_) => self.tokens.len(),
        }
    }

    /// Leading blocks that may come from the cache.
    pub fn reuse_max_blocks(&self, block_size: usize) -> usize {
        if self.cache_reads { (self.tokens.len() - 1) / block_size } else { 0 }
    }

    /// Leading blocks that this one may reuse when `other` has come to its target.
    pub fn in_common(&self, other: &Self, block_size: usize) -> usize {
        let alike = other.tokens[..other.target()].iter().zip(&self.tokens).take_while(|(a, b)| a == b).count();
        (alike / block_size).min(self.reuse_max_blocks(block_size))
    }

    pub fn remaining(&self) -> usize {
        self.target() - self.computed
    }

    /// Continues by one token, rather than computing what is known.
    pub fn is_decoding(&self) -> bool {
        matches!(self.role, Role::Sample(_)) && self.remaining() == 1
    }

    /// Needs more blocks than it took when it was admitted.
    pub fn grows(&self) -> bool {
        !matches!(self.role, Role::Prefill(_))
    }

    /// Waits for KV, here or not yet.
    pub fn is_remote(&self) -> bool {
        matches!(&self.role, Role::Prompt(prompt) if prompt.remote.is_some())
    }

    /// Samples of a prompt that have not started.
    pub fn samples_left(&self) -> usize {
        match &self.role {
            Role::Prompt(prompt) => prompt.samples.len(),
            _ => 0,
        }
    }

    pub fn wants_prompt_logprobs(&self) -> bool {
        matches!(&self.role, Role::Prompt(prompt) if prompt.logprobs.is_some())
    }

    /// A step that took `duration` and has just ended computed so many tokens.
    pub fn note_chunk(&mut self, tokens: usize, duration: Duration, now: Duration) {
        if matches!(self.role, Role::Sample(_)) {
            return;
        }
        let ended = now.saturating_sub(self.submitted + self.queued.unwrap_or_default());
        let chunk = PrefillChunk { begun: ended.saturating_sub(duration), took: duration, tokens: tokens as u32 };
        match self.chunks.get_mut(CHUNKS_MAX - 1) {
            Some(last) => (last.took, last.tokens) = (ended.saturating_sub(last.begun), last.tokens + chunk.tokens),
            None => self.chunks.push(chunk),
        }
    }

    /// The logits to request for a chunk that ends before position `end`.
    pub fn logits(&self, end: usize) -> Logits<'_> {
        match &self.role {
            Role::Prompt(prompt) if prompt.logprobs.is_some() => Logits::All,
            Role::Sample(sample) if end == self.tokens.len() => Logits::Sample(sample.sampler.request(end as u32)),
            _ => Logits::None,
        }
    }
}
