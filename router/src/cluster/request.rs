//! A request to place, and the error of a request that cannot be placed.

use crate::route::NoEligibleWorker;
use std::{collections::BTreeSet, sync::Arc, time::Duration};
use tandem_kv::{InstanceId, Priority, RequestId, SequenceHash};
use tandem_proto::v1::{EqualPrompt, WantedEndpoints, WorkerInfo};

/// A request to place.
#[derive(Clone)]
pub(crate) struct PlacementRequest {
    pub(crate) request_id: RequestId,
    /// The requested model's id; empty: the only model that members serve.
    pub(crate) model: String,
    /// Sequence hashes of the prompt's full blocks.
    pub(crate) hashes: Arc<[SequenceHash]>,
    pub(crate) prompt_tokens: u32,
    /// Sequences that the request generates.
    pub(crate) samples: u32,
    /// The minimum number of tokens of each sample.
    pub(crate) min_tokens: u32,
    /// The maximum number of tokens of each sample; 0: not known.
    pub(crate) max_tokens: u32,
    /// Whether logits of prompt tokens are requested.
    pub(crate) prompt_logits: bool,
    /// Whether the prompt has images.
    pub(crate) has_images: bool,
    pub(crate) account: Arc<str>,
    pub(crate) priority: Priority,
    /// The longest time for which the request may wait in the queue; `None`: it may wait without a limit, or it has already been placed
    /// once.
    pub(crate) max_wait: Option<Duration>,
    /// The workers on which an equal prompt of the same request was placed.
    pub(crate) equal_prompt: Option<EqualPrompt>,
    /// The number of leading blocks that a recent prompt in another cache namespace has as well.
    pub(crate) other_namespace_blocks: u32,
    /// The engines among which to choose, each observed by a worker; `None`: the request is placed on workers that serve requests.
    pub(crate) endpoints: Option<WantedEndpoints>,
}

impl PlacementRequest {
    /// Returns whether the request may be placed on this worker, as far as it matters how requests reach the worker's engine.
    pub(crate) fn may_reach(&self, worker: &WorkerInfo) -> bool {
        let endpoint = &worker.engine_endpoint;
        match &self.endpoints {
            None => endpoint.is_empty(),
            Some(wanted) => !endpoint.is_empty() && (!wanted.only_listed || wanted.listed.binary_search(endpoint).is_ok()),
        }
    }
}

/// Instances that have failed a request.
#[derive(Debug, Default)]
pub(crate) struct Excluded {
    /// All instances that have failed the request. They are excluded while other workers can take it.
    pub(crate) failed: BTreeSet<InstanceId>,
    /// The instances in `failed` that may be broken. They are always excluded. The other instances in `failed` were at capacity or timed
    /// out.
    pub(crate) suspect: BTreeSet<InstanceId>,
}

/// Why a request is not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum PlacementError {
    #[error(transparent)]
    NoEligibleWorker(#[from] NoEligibleWorker),
    #[error("no worker serves the requested model; start one or wait until it is up")]
    NoWorkerOfModel,
    #[error("the workers serve several models; the request must name one of them")]
    NoModelNamed,
    #[error("the router has reached its limit of bookings; try again later")]
    TooManyBookings,
    #[error("the request has failed on the maximum number of placements; try again later")]
    TooManyAttempts,
    #[error("the request would wait in the queue for longer than its limit; try again in {} seconds", .retry_after.as_secs_f64().ceil())]
    Overloaded {
        /// The time until the estimated wait is within the limit, if no other request is placed meanwhile.
        retry_after: Duration,
    },
}
