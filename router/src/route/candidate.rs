//! The input of a placement: the query, and the state of each worker.

use crate::{rates::Measurement, settings::PrefillPlace};
use std::sync::Arc;
use tandem_kv::ByTier;
use tandem_proto::v1::worker_info::Role;

/// The role of a worker. A decode worker may also prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkerRole {
    /// It computes the KV of prompts for decode workers.
    Prefill,
    /// It generates.
    Decode,
}

impl From<WorkerRole> for Role {
    fn from(role: WorkerRole) -> Self {
        match role {
            WorkerRole::Prefill => Self::Prefill,
            WorkerRole::Decode => Self::Decode,
        }
    }
}

/// A value for each role.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ByRole<T> {
    prefill: T,
    decode: T,
}

impl<T: Copy> ByRole<T> {
    pub fn of(&self, role: WorkerRole) -> T {
        match role {
            WorkerRole::Prefill => self.prefill,
            WorkerRole::Decode => self.decode,
        }
    }

    pub(crate) fn of_mut(&mut self, role: WorkerRole) -> &mut T {
        match role {
            WorkerRole::Prefill => &mut self.prefill,
            WorkerRole::Decode => &mut self.decode,
        }
    }

    pub(crate) fn map<U>(self, to: impl Fn(T) -> U) -> ByRole<U> {
        ByRole { prefill: to(self.prefill), decode: to(self.decode) }
    }
}

/// The work that placements add in a second to all workers of one role together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkerDemand {
    pub prompts: f64,
    /// Prompt tokens to compute.
    pub tokens: f64,
}

/// The request to place.
#[derive(Clone, Copy, Debug)]
pub struct PlacementQuery {
    pub prompt_tokens: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Where the settings allow the prompt to be prefilled.
    pub prefill: PrefillPlace,
    /// Whether logits of prompt tokens are requested.
    pub prompt_logits: bool,
}

impl PlacementQuery {
    /// Returns where the prompt may be prefilled. A prefill worker computes all tokens but the last, and returns no logits. Therefore
    /// prompts whose logits are requested, and prompts of one token, are prefilled on the decode worker, whatever the settings say.
    pub(super) fn allowed_prefill(&self) -> PrefillPlace {
        if self.prompt_logits || self.prompt_tokens <= 1 { PrefillPlace::Local } else { self.prefill }
    }
}

/// The tiers of a worker's cached blocks of a prompt, and what loading these blocks takes.
#[derive(Clone, Debug, PartialEq)]
pub struct TierLoads {
    /// The blocks of [`Candidate::overlap_blocks`] by the tier from which the engine uses them.
    pub blocks: ByTier<u32>,
    /// The milliseconds that loading a token takes from each tier; `None`: not measured.
    pub ms_per_token: ByTier<Option<Measurement>>,
}

/// A worker as one placement sees it: its reported state, and the load of requests placed on it that its report does not include yet.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The role.
    pub role: WorkerRole,
    /// The transfer family: a prefill worker can serve only decode workers of its own family. `None`: the worker never exchanges KV.
    pub family: Option<Arc<str>>,
    /// Whether the worker is a decode worker that computes no prompts.
    pub needs_prefill_worker: bool,
    /// Whether the request must not be placed on the worker.
    pub excluded: bool,
    /// The longest prompt that the worker can take, in tokens: its cache's capacity, or its context length if that is shorter.
    pub tokens_max: u64,
    /// Leading blocks of the prompt that the worker has reported as cached, even if its engine cannot reuse all of them.
    pub held_blocks: u32,
    /// Leading blocks that the worker can reuse according to its reports, or must have cached although it reports late.
    pub reported_blocks: u32,
    /// Leading blocks that the worker has reported, or is about to compute.
    pub known_blocks: u32,
    /// Leading blocks of the prompt that the worker's engine is expected to find in its cache.
    pub overlap_blocks: u32,
    /// The tiers of the blocks of `overlap_blocks`; `None` if no worker reports tiers, so that all are on their devices.
    pub tiers: Option<Box<TierLoads>>,
    /// Leading blocks after `overlap_blocks` that placed requests are about to compute on the worker.
    pub predicted_blocks: u32,
    /// The fraction of the worker's cache that is filled, from 0 to 1. It includes what placed requests are about to store.
    pub cache_filled: f64,
    /// The number of prompt tokens that the worker has still to compute, including those of placed requests that its report does not
    /// include yet.
    pub queued_tokens: u64,
    /// The number of `queued_tokens` that would be computed after this prompt.
    pub behind_tokens: f64,
    /// The number of queued prompts that would be computed after this prompt.
    pub behind_prompts: usize,
    /// Sequences that run or wait on the worker, including those of placed requests that its report does not include yet.
    pub sequences: u32,
    /// Sequences on the worker that have blocks now.
    pub running: u32,
    /// Blocks that the next prompt could take: free blocks, and cached blocks that no sequence uses.
    pub available_blocks: u32,
    /// Blocks of running sequences. They become available when these sequences end.
    pub in_use_blocks: u32,
    /// The expected total number of tokens of the answers of all requests placed on the worker, including tokens that are generated
    /// already.
    pub answer_tokens: u64,
    /// The part of a decode worker's time that it has lately spent on prompts that it prefills itself.
    pub local_share: f64,
    /// The most prompt tokens of a step. A prefill worker sends the KV of a step during the next step; 0: it sends no KV before the prompt
    /// is computed.
    pub step_tokens: u32,
    /// Bytes of KV per block.
    pub block_bytes: u64,
    /// The prefill rate; `None`: not measured.
    pub prefill_tokens_per_second: Option<Measurement>,
    /// The fixed time of a step that computes prompt tokens; `None`: not measured.
    pub prefill_fixed_ms: Option<Measurement>,
    /// The time of a decode step; `None`: not measured.
    pub decode_step_ms: Option<Measurement>,
    /// The part of a full step's time that the worker has lately spent on prompt tokens.
    pub prompt_share: f64,
    /// The bandwidth of the worker's transfers. Only workers that send KV measure it, so it is `None` for decode workers.
    pub transfer_bytes_per_second: Option<Measurement>,
}

impl Candidate {
    /// Whether the prompt fits into the worker's cache and context.
    pub(super) fn fits(&self, query: &PlacementQuery) -> bool {
        u64::from(query.prompt_tokens) <= self.tokens_max
    }

    /// Returns how many cached blocks of the prompt the worker would load to its device.
    pub(crate) fn load_blocks(&self) -> u32 {
        self.tier_blocks()[1..].iter().sum()
    }

    /// Returns the cached blocks of the prompt by the tier from which the engine uses them.
    pub(crate) fn tier_blocks(&self) -> ByTier<u32> {
        self.tiers.as_ref().map_or([self.overlap_blocks, 0, 0, 0], |tiers| tiers.blocks)
    }

    /// Returns how many tokens of the prompt the worker would compute if its first `known_blocks` blocks need not be computed.
    pub(crate) fn new_tokens(&self, query: &PlacementQuery, known_blocks: u64) -> u64 {
        let last_token_computed_on_decode = u64::from(self.role == WorkerRole::Prefill);
        let needed = u64::from(query.prompt_tokens).saturating_sub(last_token_computed_on_decode);
        needed.saturating_sub(known_blocks * u64::from(query.block_size))
    }
}
