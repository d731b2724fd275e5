//! A sequence of tokens, and the blocks that hold its KV.

use crate::{Generated, Logits, PrefillChunk, TokenLogprobs, sampling::Sampler};
use std::{sync::Arc, time::Duration};
use tandem_kv::{BlockAccess, BlockId, Namespace, Priority, Ticket, TokenId};

/// The number of a job on its engine. Numbers grow in the order of submission.
pub(crate) type JobId = u64;
/// The job of a sequence, and the number of its sample in the job (0 for a prompt). Values are ordered by the submission of their jobs.
pub(super) type Order = (JobId, u32);
/// A prompt's priority within its account, its due value (`fair::due`) and its age. If several prompts of one priority have the same due value, the
/// oldest is first.
pub(super) type Due = (i32, u64, Order);
/// The requests of one account that rank equally across accounts: this rank, and the account. Flows of one rank take turns.
pub(super) type Flow = (i32, Arc<str>);

/// The request to which a sequence belongs: the properties that determine the sequence's place in the fair order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Owner {
    pub account: Arc<str>,
    pub priority: Priority,
    pub job: JobId,
}

impl Owner {
    pub fn flow(&self) -> Flow {
        (self.priority.across, Arc::clone(&self.account))
    }

    /// Returns whether this request outranks the request of `other`.
    pub fn outranks(&self, other: &Sequence) -> bool {
        self.priority.outranks(other.priority, *self.account == *other.account)
    }
}

/// A prompt or a sample: its tokens, how far their KV is computed, and the blocks that hold the KV.
#[derive(Debug)]
pub(super) struct Sequence {
    pub job: JobId,
    pub order: Order,
    pub account: Arc<str>,
    pub priority: Priority,
    /// The due value of the job's prompt (`fair::due`). Prompts of one account and one priority are computed in the order of these values.
    pub due: u64,
    pub namespace: Namespace,
    pub tokens: Vec<TokenId>,
    /// The number of tokens that all samples of the job share: the prompt, and the common beginning of the tokens that resumed samples had
    /// generated.
    pub prompt_len: usize,
    /// The sequence's blocks, each pinned once for this sequence. A waiting sequence has none.
    pub blocks: Vec<BlockId>,
    pub computed: usize,
    pub committed: usize,
    /// Whether backpressure pauses the sequence because its job's event buffer is full. Nothing is computed for a paused sequence, and its
    /// blocks are the first to be taken for other sequences.
    pub paused: bool,
    /// Whether the prompt may reuse blocks of the prefix cache.
    pub cache_reads: bool,
    pub submitted: Duration,
    /// The time from submission to the first allocation of blocks; `None` before that.
    pub queue_time: Option<Duration>,
    pub chunks: Vec<PrefillChunk>,
    pub role: Role,
}

/// Maximum number of chunks that are recorded for a prompt. All later chunks are merged into the last one.
const CHUNKS_MAX: usize = 64;

/// The kind of a sequence, with the state that only this kind has.
#[derive(Debug)]
pub(super) enum Role {
    /// A prompt whose KV is sent to another worker.
    Prefill(Sending),
    /// A prompt without its last token. When its KV is complete it forks a sequence of role `Sample` for each of its samples.
    Prompt(Box<Prompt>),
    Sample(Box<Sample>),
}

#[derive(Debug, Default)]
pub(super) struct Sending {
    /// The indices in the prompt of the requested blocks that are not reported yet, in descending order, and the form in which the blocks
    /// are reported. `None` until the job requests blocks.
    pub wanted: Option<(Vec<u32>, BlockAccess)>,
    /// Whether the event `Computed` was sent: all tokens of the prefill are computed, and every requested block was reported.
    pub all_reported: bool,
}

#[derive(Debug)]
pub(super) struct Prompt {
    pub sampler: Sampler,
    pub samples: Vec<Generated>,
    /// The number of tokens before the first generated token of a sample: the length of the request's prompt.
    pub boundary: usize,
    /// Maximum number of tokens of a sample, including the prompt.
    pub len_max: usize,
    pub logprobs: Option<PromptLogprobs>,
    /// The reservation for KV from another worker; `None` if this engine computes the KV, and after all of the KV was received.
    pub remote: Option<Remote>,
}

#[derive(Debug)]
pub(super) struct PromptLogprobs {
    pub top: u32,
    pub rows: Vec<Option<TokenLogprobs>>,
}

/// A reservation of blocks into which another worker's KV is written.
#[derive(Debug, Default)]
pub(super) struct Remote {
    pub ticket: Option<Ticket>,
    /// The indices in the prompt of the blocks that are neither written nor being written.
    pub missing: Vec<u32>,
    /// The indices in the prompt of the blocks that are being written while steps run.
    pub writing: Vec<u32>,
    pub first_write: Option<Duration>,
    pub bytes: u64,
}

#[derive(Debug)]
pub(super) struct Sample {
    pub number: u32,
    pub sampler: Sampler,
    /// Whether the mask of the constraint was not ready when the last step sampled.
    pub is_late: bool,
    /// Maximum number of tokens of the sample, including the prompt.
    pub len_max: usize,
}

impl Sequence {
    pub fn new(owner: Owner, namespace: Namespace, tokens: Vec<TokenId>, role: Role, submitted: Duration) -> Self {
        let Owner { account, priority, job } = owner;
        Self {
            job,
            order: (job, 0),
            account,
            priority,
            due: 0,
            namespace,
            prompt_len: tokens.len(),
            tokens,
            blocks: Vec::new(),
            computed: 0,
            committed: 0,
            paused: false,
            cache_reads: true,
            submitted,
            queue_time: None,
            chunks: Vec::new(),
            role,
        }
    }

    pub fn owner(&self) -> Owner {
        Owner { account: Arc::clone(&self.account), priority: self.priority, job: self.job }
    }

    /// Returns the order in which prompts of one account are computed: by priority, then by due value, then by age.
    pub fn due(&self) -> Due {
        (self.priority.within, self.due, self.order)
    }

    /// Returns whether the request of this sequence outranks the request of `other`.
    pub fn outranks(&self, other: &Self) -> bool {
        self.priority.outranks(other.priority, self.account == other.account)
    }

    /// Returns how many leading tokens must be computed before the sequence generates, forks or is complete.
    pub fn target(&self) -> usize {
        match self.role {
            Role::Prefill(_) | Role::Prompt(_) => self.prompt_len - 1,
            Role::Sample(_) => self.tokens.len(),
        }
    }

    pub fn reuse_max_blocks(&self, block_size: usize) -> usize {
        if self.cache_reads { (self.tokens.len() - 1) / block_size } else { 0 }
    }

    /// Returns how many leading blocks of `other` this sequence may reuse once `other` has computed all tokens up to its target.
    pub fn in_common(&self, other: &Self, block_size: usize) -> usize {
        let equal = other.tokens[..other.target()].iter().zip(&self.tokens).take_while(|(a, b)| a == b).count();
        (equal / block_size).min(self.reuse_max_blocks(block_size))
    }

    /// Returns how many tokens are left to compute up to the target.
    pub fn remaining(&self) -> usize {
        self.target() - self.computed
    }

    /// Returns whether the next step generates a token, rather than computing tokens that are known.
    pub fn is_decoding(&self) -> bool {
        matches!(self.role, Role::Sample(_)) && self.remaining() == 1
    }

    /// Returns whether the sequence waits for its mask, which was late. Until the mask is ready, no step computes the sequence, which keeps its place
    /// and its blocks.
    pub fn awaits_mask(&self) -> bool {
        matches!(&self.role, Role::Sample(sample) if sample.is_late && self.is_decoding() && !sample.sampler.is_ready())
    }

    /// Returns whether the sequence has not generated a token yet, or is a prompt.
    pub fn awaits_first_token(&self) -> bool {
        match &self.role {
            Role::Prefill(_) | Role::Prompt(_) => true,
            Role::Sample(sample) => sample.sampler.generated_len() == 0,
        }
    }

    /// Returns whether steps of this engine still have to compute the KV of known tokens of this sequence.
    pub fn computes_prompt(&self) -> bool {
        !self.is_remote() && !self.is_decoding()
    }

    /// Returns whether the sequence will need more blocks than it was admitted with.
    pub fn grows(&self) -> bool {
        !matches!(self.role, Role::Prefill(_))
    }

    /// Returns whether the sequence's KV comes from another worker and is not complete.
    pub fn is_remote(&self) -> bool {
        matches!(&self.role, Role::Prompt(prompt) if prompt.remote.is_some())
    }

    pub fn samples_left(&self) -> usize {
        match &self.role {
            Role::Prompt(prompt) => prompt.samples.len(),
            _ => 0,
        }
    }

    pub fn wants_prompt_logprobs(&self) -> bool {
        matches!(&self.role, Role::Prompt(prompt) if prompt.logprobs.is_some())
    }

    /// Records that the step that has just ended, after `duration`, computed this many tokens of a prompt.
    pub fn record_chunk(&mut self, tokens: usize, duration: Duration, now: Duration) {
        if matches!(self.role, Role::Sample(_)) {
            return;
        }
        let ended = now.saturating_sub(self.submitted + self.queue_time.unwrap_or_default());
        let chunk = PrefillChunk { begun: ended.saturating_sub(duration), took: duration, tokens: tokens as u32 };
        match self.chunks.get_mut(CHUNKS_MAX - 1) {
            Some(last) => (last.took, last.tokens) = (ended.saturating_sub(last.begun), last.tokens + chunk.tokens),
            None => self.chunks.push(chunk),
        }
    }

    /// Returns which logits to request for a chunk that ends before position `end`.
    pub fn logits(&self, end: usize) -> Logits<'_> {
        match &self.role {
            Role::Prompt(prompt) if prompt.logprobs.is_some() => Logits::All,
            Role::Sample(sample) if end == self.tokens.len() => Logits::Sample(sample.sampler.request(end as u32)),
            _ => Logits::None,
        }
    }
}
