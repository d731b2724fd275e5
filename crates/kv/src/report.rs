//! The report of a worker after a step: the changes of its cache, and its load.

use crate::{ByTier, KvEvent};
use std::time::Duration;

/// The load of a worker, from which the router estimates costs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    /// The number of sequences with blocks: they are in the running batch, or wait for KV that another worker sends.
    pub running_sequences: u32,
    /// The number of sequences that wait for blocks.
    pub waiting_requests: u32,
    /// The number of prompt tokens of waiting and running sequences that are still to be computed.
    pub pending_prefill_tokens: u64,
    /// Number of blocks without content.
    pub free_blocks: u32,
    /// The number of blocks with reusable KV that no sequence uses.
    pub cached_blocks: u32,
    /// The number of blocks pinned by sequences.
    pub in_use_blocks: u32,
    /// The number of blocks in each tier; all 0 if the worker holds blocks on its device only. A block in two tiers counts in both.
    pub tier_blocks: ByTier<u32>,
    /// Prompt tokens that the device computes per second, without the fixed time of each step; 0 while it is unknown.
    pub prefill_tokens_per_second: f64,
    /// The number of long prefill steps since the worker's start from which `prefill_tokens_per_second` was computed. That rate depends on
    /// short steps too, but mainly on long ones.
    pub prefill_measurements: u64,
    /// Fixed time of a step that computes prompt tokens, in milliseconds; 0 while it is unknown.
    pub prefill_fixed_ms: f64,
    /// Mean time that a step takes for its decoding sequences, in milliseconds; 0 while it is unknown.
    pub decode_step_ms: f64,
    /// The fraction of a full step's time, from 0 to 1, that prompt tokens have lately taken while answers were running; 0 while it is
    /// unknown.
    pub prompt_share: f64,
    /// The number of preemptions since the start of the engine.
    pub preemptions: u64,
    /// The number of failed checks of the engine's invariants since the start. Each one shows a bug.
    pub invariant_violations: u32,
    /// The number of CUDA graphs that the GPU's driver has refused since the start of the engine.
    pub refused_graphs: u64,
}

/// The work of one engine step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepStats {
    /// Number of prompt tokens computed.
    pub prefill_tokens: u32,
    /// The number of tokens computed for decoding sequences, one for each sequence.
    pub decode_tokens: u32,
    /// The time that the device took for the step. For a simulated device, this is the simulated time.
    pub duration: Duration,
}

/// One report of a worker: the changes of its cache since the previous report, and its load.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KvBatch {
    /// The id of the worker's last change. If `events` is not empty, this is the id of the last event in it.
    pub last_event_id: u64,
    /// Changes of the cache, in the order of their ids.
    pub events: Vec<KvEvent>,
    /// The load of the worker after these changes.
    pub load: Load,
    /// Requests whose work is included in this load and was not included in the load of the previous batch.
    pub included_request_ids: Vec<String>,
    /// The step that ended with this batch; `None` if no step did.
    pub step: Option<StepStats>,
}
