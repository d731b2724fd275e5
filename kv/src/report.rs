//! What a worker reports after a step: its cache's changes, and its load.

use crate::KvEvent;
use std::time::Duration;

/// What the router scores by.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    /// With blocks: in the running batch, or waiting for KV from elsewhere.
    pub running_sequences: u32,
    /// Jobs without blocks.
    pub waiting_requests: u32,
    /// Tokens of waiting prompts, and what is left of running ones.
    pub pending_prefill_tokens: u64,
    /// Hold nothing.
    pub free_blocks: u32,
    /// Reusable, unused.
    pub cached_blocks: u32,
    /// Pinned.
    pub in_use_blocks: u32,
    /// Prompt tokens that the device computes in a second, without the fixed time of each step; 0 while there is no evidence.
    pub prefill_tokens_per_second: f64,
    /// Long prefill steps that the rate was fitted to since the start. Short ones are fitted, too, but do not replace what long ones said.
    pub prefill_measurements: u64,
    /// Fixed time of a step that computes prompt tokens; 0 while it is not known.
    pub prefill_fixed_ms: f64,
    /// What a step takes to continue its sequences; 0 while there is no evidence.
    pub decode_step_ms: f64,
    /// Sequences pushed back since the start.
    pub preemptions: u64,
}

/// One engine step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepStats {
    /// Tokens of prompts.
    pub prefill_tokens: u32,
    /// Tokens that continue a sequence, one each.
    pub decode_tokens: u32,
    /// Device time, simulated time included.
    pub duration: Duration,
}

/// What happened in a worker since its last batch.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvBatch {
    /// Id of the last change made, those of `events` included.
    pub last_event_id: u64,
    /// In order of their ids.
    pub events: Vec<KvEvent>,
    /// After them.
    pub load: Load,
    /// Requests whose work `load` has come to include.
    pub included_request_ids: Vec<String>,
    /// The step that ended with this batch, if one did.
    pub step: Option<StepStats>,
}
