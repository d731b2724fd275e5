//! The receiving end of transfers. It chooses the transfer path of each ticket from the capabilities of both workers. A path on which a
//! transfer to a peer has failed is not chosen for this peer for some time.

use crate::{
    Destination, Lifetime, TransferMode, TransferService,
    ipc::IpcReceiver,
    nccl::NcclReceiver,
    path::{Decision, Grant, Offer, ReceivePath},
    push::HOST_LABEL,
};
use std::sync::Arc;
use tandem_kv::{KvMemory, Ticket};
use tandem_proto::v1::{self, PrefillDone, TransferCapabilities, transfer_server::TransferServer};

/// The transfer paths on which a decode worker can receive blocks.
pub struct ReceivePaths {
    destination: Arc<dyn Destination>,
    ipc: Option<IpcReceiver>,
    nccl: Option<NcclReceiver>,
}

/// The transfer path that was chosen for a ticket. The ticket's blocks can be received while this value exists.
pub struct Negotiated {
    destination: Arc<dyn Destination>,
    ticket: Ticket,
    label: &'static str,
    grant: Option<Box<dyn Grant>>,
}

impl ReceivePaths {
    /// Returns the transfer paths that the worker may use in this mode. `memory` is the engine's KV memory; `None` if other devices cannot
    /// access it.
    pub fn new(destination: impl Destination, memory: Option<Arc<dyn KvMemory>>, mode: TransferMode, lifetime: Lifetime) -> Self {
        let destination: Arc<dyn Destination> = Arc::new(destination);
        let memory = memory.filter(|_| mode == TransferMode::Auto);
        let ipc = memory.clone().map(|memory| IpcReceiver::new(memory, Arc::clone(&destination), lifetime.clone()));
        let nccl = memory.and_then(|memory| NcclReceiver::new(memory, Arc::clone(&destination), lifetime));
        Self { destination, ipc, nccl }
    }

    /// Returns the gRPC service that receives blocks.
    pub fn service(&self) -> TransferServer<TransferService> {
        TransferService::server(Arc::clone(&self.destination), self.ipc.clone(), self.nccl.clone())
    }

    /// Returns the metric label of the host path, which is always available.
    pub fn fallback_label() -> &'static str {
        HOST_LABEL
    }

    /// Chooses the path of a ticket's blocks, and sets the fields of `ticket` for that path. `peer` is the instance id of the prefill
    /// worker, `offered` its transfer capabilities. At most one path is prepared for later tickets.
    pub async fn negotiate(
        &self,
        peer: &str,
        offered: Option<&TransferCapabilities>,
        secret: Ticket,
        ticket: &mut v1::Ticket,
    ) -> Negotiated {
        let destination = Arc::clone(&self.destination);
        let mut negotiated = Negotiated { destination, ticket: secret, label: HOST_LABEL, grant: None };
        let Some(capabilities) = offered else { return negotiated };
        let paths: [Option<&dyn ReceivePath>; 2] =
            [self.ipc.as_ref().map(|ipc| ipc as _), self.nccl.as_ref().map(|nccl| nccl as _)];
        for path in paths.into_iter().flatten() {
            match path.offer(Offer { peer, capabilities, secret, ticket }).await {
                Decision::Accepted { label, grant } => {
                    (negotiated.label, negotiated.grant) = (label, grant);
                    break;
                }
                Decision::Prepares(grant) => {
                    negotiated.grant = Some(grant);
                    break;
                }
                Decision::Unavailable => {}
            }
        }
        negotiated
    }
}

impl Negotiated {
    /// Returns the path's label in metrics.
    pub fn label(&self) -> &'static str {
        self.label
    }

    /// Lets the destination use the ticket's blocks. Continues the preparation of a path for later tickets, if one has begun. Must be
    /// called when the prefill worker has confirmed that all of the blocks were written.
    pub async fn confirmed(&mut self, done: &PrefillDone) {
        self.destination.confirm(self.ticket).await;
        if let Some(grant) = self.grant.take() {
            grant.confirmed(done);
        }
    }
}
