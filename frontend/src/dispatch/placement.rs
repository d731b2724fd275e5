//! A router's placement. The message's optional fields are checked when it is converted from the wire format.

use std::time::Duration;
use tandem_proto::v1;

/// The workers that a router chose for a prompt.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    pub(crate) decode: PlacedWorker,
    /// The prefill worker; `None`: the decode worker computes the prompt itself.
    pub(crate) prefill: Option<PlacedWorker>,
    /// The number of tokens in a block; 0 if the router has no information about caches.
    pub(crate) block_size: u32,
    /// How long the prompt is estimated to wait in the queue; zero if the router does not know.
    pub(crate) wait: Duration,
    /// The facts about the prompt's prefix; `None` if the router sent none.
    pub(crate) prefix: Option<v1::PrefixFacts>,
    /// The chosen engine and its alternatives, if the request is for an observed engine.
    pub(crate) endpoints: Vec<v1::EngineEndpoint>,
}

#[derive(Clone, Debug)]
pub(crate) struct PlacedWorker {
    pub(crate) worker: v1::WorkerRef,
    /// The number of leading blocks of the prompt that the worker was known to have cached.
    pub(crate) overlap_blocks: u32,
}

impl Placement {
    /// Converts the placement that a router sent; `None` if it has no decode worker.
    pub(crate) fn from_wire(placement: v1::Placement) -> Option<Self> {
        let v1::Placement { decode, prefill, block_size, wait_ms, prefix, endpoints } = placement;
        let placed = |v1::Candidate { worker, overlap_blocks, .. }| Some(PlacedWorker { worker: worker?, overlap_blocks });
        let wait = Duration::from_millis(wait_ms.into());
        Some(Self { decode: placed(decode?)?, prefill: prefill.and_then(placed), block_size, wait, prefix, endpoints })
    }

    /// Returns the name of the placed worker with this instance id, or the id itself if neither worker has it.
    pub(super) fn name_of<'a>(&'a self, instance_id: &'a str) -> &'a str {
        let mut placed = self.prefill.iter().chain([&self.decode]).map(|placed| &placed.worker);
        placed.find(|worker| worker.instance_id == instance_id).map_or(instance_id, |worker| &worker.worker_id)
    }

    /// Returns the worker that computes the prompt.
    pub(crate) fn prefilling(&self) -> &PlacedWorker {
        self.prefill.as_ref().unwrap_or(&self.decode)
    }
}
