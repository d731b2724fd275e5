//! The numbers of a worker from which its costs are computed, in as little memory as possible: placements read those of every worker.

use super::candidate::{Candidate, FamilyId, PlacementQuery, WorkerRole};
use crate::{prefill_queue::Behind, rates::Measurement};

/// The numbers of a [`Candidate`] that do not depend on the prompt. A measurement of weight 0 was not made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WorkerNumbers {
    pub(crate) tokens_max: u64,
    pub(crate) queued_tokens: u64,
    pub(super) answer_tokens: u64,
    pub(super) block_bytes: u64,
    pub(super) cache_filled: f64,
    pub(super) local_share: f64,
    pub(super) prompt_share: f64,
    pub(super) prefill_tokens_per_second: Measurement,
    pub(super) prefill_fixed_ms: Measurement,
    pub(super) decode_step_ms: Measurement,
    pub(super) transfer_bytes_per_second: Measurement,
    pub(super) sequences: u32,
    pub(super) available_blocks: u32,
    pub(super) in_use_blocks: u32,
    pub(super) step_tokens: u32,
    pub(crate) family: Option<FamilyId>,
    pub(crate) role: WorkerRole,
    pub(super) needs_prefill_worker: bool,
}

/// The numbers of a [`Candidate`] that depend on the prompt.
#[derive(Clone, Copy, Debug)]
pub struct OfPrompt {
    pub(crate) overlap_blocks: u32,
    /// The blocks of the overlap that the worker would load to its device.
    pub(crate) load_blocks: u32,
    pub(crate) predicted_blocks: u32,
    pub(crate) queued_tokens: u64,
    pub(crate) behind_tokens: f64,
    pub(crate) behind_prompts: usize,
}

impl WorkerNumbers {
    /// Whether the prompt fits into the worker's cache and context.
    pub(crate) fn fits(&self, query: &PlacementQuery) -> bool {
        u64::from(query.prompt_tokens) <= self.tokens_max
    }
}

impl From<&Candidate> for WorkerNumbers {
    fn from(worker: &Candidate) -> Self {
        Self {
            tokens_max: worker.tokens_max,
            queued_tokens: worker.queued_tokens,
            answer_tokens: worker.answer_tokens,
            block_bytes: worker.block_bytes,
            cache_filled: worker.cache_filled,
            local_share: worker.local_share,
            prompt_share: worker.prompt_share,
            prefill_tokens_per_second: worker.prefill_tokens_per_second.unwrap_or_default(),
            prefill_fixed_ms: worker.prefill_fixed_ms.unwrap_or_default(),
            decode_step_ms: worker.decode_step_ms.unwrap_or_default(),
            transfer_bytes_per_second: worker.transfer_bytes_per_second.unwrap_or_default(),
            sequences: worker.sequences,
            available_blocks: worker.available_blocks,
            in_use_blocks: worker.in_use_blocks,
            step_tokens: worker.step_tokens,
            family: worker.family,
            role: worker.role,
            needs_prefill_worker: worker.needs_prefill_worker,
        }
    }
}

impl From<&Candidate> for OfPrompt {
    fn from(worker: &Candidate) -> Self {
        let &Candidate { overlap_blocks, predicted_blocks, queued_tokens, behind_tokens, behind_prompts, .. } = worker;
        let load_blocks = worker.load_blocks();
        Self { overlap_blocks, load_blocks, predicted_blocks, queued_tokens, behind_tokens, behind_prompts }
    }
}

impl OfPrompt {
    /// Records which queued prompts would be computed after this one. The request does not wait for prompts that it outranks, and their
    /// delay adds no cost.
    #[inline]
    pub(crate) fn with_behind(self, behind: Behind) -> Self {
        Self {
            behind_tokens: self.queued_tokens as f64 * behind.share,
            behind_prompts: behind.requests,
            queued_tokens: (self.queued_tokens as f64 * (1.0 - behind.outranked)) as u64,
            ..self
        }
    }
}
