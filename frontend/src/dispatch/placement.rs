//! A router's decision as the frontend uses it: the wire's optional fields are checked here, once.

use tandem_kv::{InstanceId, WorkerId};
use tandem_proto::v1;

/// The workers that a router chose for a prompt.
#[derive(Clone, Debug)]
pub(crate) struct Placement {
    pub(crate) decode: PlacedWorker,
    /// The prefill worker; `None`: the decode worker prefills.
    pub(crate) prefill: Option<PlacedWorker>,
    /// Tokens in a block; 0 in a reply of a router that knows nothing of caches.
    pub(crate) block_size: u32,
}

/// A worker of a placement.
#[derive(Clone, Debug)]
pub(crate) struct PlacedWorker {
    pub(crate) worker_id: WorkerId,
    pub(crate) instance_id: InstanceId,
    /// `host:port` of the worker's gRPC.
    pub(super) address: String,
    signature: Vec<u8>,
    /// Leading blocks of the prompt that the worker was known to hold.
    pub(crate) overlap_blocks: u32,
}

impl Placement {
    /// The placement that a router sent; `None` if it names no decode worker.
    pub(crate) fn from_wire(placement: v1::Placement) -> Option<Self> {
        let worker = |v1::Candidate { worker, overlap_blocks, .. }: v1::Candidate| {
            let v1::WorkerRef { worker_id, instance_id, address, signature } = worker?;
            let (worker_id, instance_id) = (worker_id.into(), instance_id.into());
            Some(PlacedWorker { worker_id, instance_id, address, signature, overlap_blocks })
        };
        let v1::Placement { decode, prefill, block_size } = placement;
        Some(Self { decode: worker(decode?)?, prefill: prefill.and_then(worker), block_size })
    }

    /// The worker that computes the prompt.
    pub(crate) fn prefilling(&self) -> &PlacedWorker {
        self.prefill.as_ref().unwrap_or(&self.decode)
    }
}

impl PlacedWorker {
    /// The worker as it goes over the wire, with the router's signature.
    pub(super) fn wire(&self) -> v1::WorkerRef {
        v1::WorkerRef {
            worker_id: self.worker_id.to_string(),
            instance_id: self.instance_id.to_string(),
            address: self.address.clone(),
            signature: self.signature.clone(),
        }
    }
}
