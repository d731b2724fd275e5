//! The receiving end of the CUDA IPC path. It copies the blocks that the sender announces on a `Push` stream from the sender's GPU.
//!
//! The memory of a peer stays open for a minute after its last use, because opening it takes the driver milliseconds and may wait for all
//! work of the GPU. It does not stay open for longer, because an open mapping keeps the peer's GPU memory allocated even after the peer's
//! process has ended.

#[cfg(test)]
mod tests;

use crate::{
    Destination, Lifetime, Refused,
    backoff::{BACKOFF_MAX, PEERS_MAX, PeerBackoff},
    blocking::run_to_end,
    path::{Decision, Grant, Offer, ReceivePath},
    push::IPC_LABEL,
};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc, time::Duration};
use tandem_kv::{BlockId, DeviceTransferError, KvMemory, PeerMemory, Ticket};
use tandem_process::retry::error_chain;
use tandem_proto::v1::{PrefillDone, ReadyBlocks, TransferPath};
use tokio::{task::spawn_blocking, time::Instant};
use tonic::Status;

/// How long a peer's memory stays open after its last use.
const IDLE_MAX: Duration = Duration::from_secs(60);

/// Opens the memories of a worker's peers and copies blocks from them. It is cheap to clone.
#[derive(Clone)]
pub(crate) struct IpcReceiver(Arc<Inner>);

struct Inner {
    memory: Arc<dyn KvMemory>,
    destination: Arc<dyn Destination>,
    backoff: PeerBackoff,
    lifetime: Lifetime,
    state: Mutex<ShareState>,
}

#[derive(Default)]
struct ShareState {
    peers: HashMap<String, Peer>,
    sources: HashMap<Ticket, Arc<dyn PeerMemory>>,
}

struct Peer {
    ipc_handle: Vec<u8>,
    open: Option<Opened>,
}

/// The open memory of a peer.
struct Opened {
    memory: Arc<dyn PeerMemory>,
    used: Instant,
}

impl IpcReceiver {
    pub(crate) fn new(memory: Arc<dyn KvMemory>, destination: Arc<dyn Destination>, lifetime: Lifetime) -> Self {
        // The memory of a peer on another host can never be opened, so the pauses between retries are long from the start.
        let backoff = PeerBackoff::new(BACKOFF_MAX);
        Self(Arc::new(Inner { memory, destination, backoff, lifetime, state: Mutex::default() }))
    }

    async fn open(&self, peer: &str, ipc_handle: Vec<u8>) -> Option<Arc<dyn PeerMemory>> {
        if let Some(open) = self.0.state.lock().peers.get_mut(peer).and_then(|peer| peer.open.as_mut()) {
            open.used = Instant::now();
            return Some(Arc::clone(&open.memory));
        }
        let memory = Arc::clone(&self.0.memory);
        match spawn_blocking(move || memory.open_peer(&ipc_handle)).await.expect("opening a peer's memory does not panic") {
            Ok(memory) => {
                let open = Opened { memory: Arc::clone(&memory), used: Instant::now() };
                let replaced = self.0.state.lock().peers.get_mut(peer).map(|peer| peer.open.replace(open));
                self.0.lifetime.shutdown.drop_elsewhere(replaced.flatten().map(|open| open.memory));
                self.close_when_idle(peer.to_owned());
                Some(memory)
            }
            Err(error) => {
                self.refused(peer, &error);
                None
            }
        }
    }

    /// Closes the peer's memory when it was not used for [`IDLE_MAX`], or when the worker drains.
    fn close_when_idle(&self, peer: String) {
        let (inner, shutdown) = (Arc::downgrade(&self.0), self.0.lifetime.shutdown.clone());
        let draining = shutdown.clone();
        let waiting = async move {
            while let Some(idle_at) = inner.upgrade().and_then(|inner| inner.close_if_idle(&peer)) {
                tokio::select! {
                    () = tokio::time::sleep_until(idle_at) => {}
                    () = draining.draining() => {}
                }
            }
        };
        shutdown.spawn(waiting);
    }

    /// Records that a peer's memory cannot be opened.
    fn refused(&self, peer: &str, error: &DeviceTransferError) {
        let reason = match error {
            DeviceTransferError::OtherHost => "other_host",
            DeviceTransferError::Unreachable(_) => "unreachable",
            DeviceTransferError::Failed(_) => "failed",
        };
        self.0.destination.path_refused(IPC_LABEL, reason);
        let chain = error_chain(error);
        if matches!(error, DeviceTransferError::OtherHost) {
            tracing::debug!(peer, "this peer is on another host; its KV takes another transfer path than CUDA IPC");
        } else {
            // The backoff limits this warning to one in a few minutes for each peer.
            tracing::warn!(
                error = chain,
                peer,
                "cannot open this peer's KV memory over CUDA IPC, so its KV takes a slower transfer path; both workers need a common IPC namespace, and each must see the other's GPU in CUDA_VISIBLE_DEVICES"
            );
        }
        self.0.backoff.fail(peer);
    }

    /// Copies blocks from the memory that the ticket's reservation opened.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` if the ticket does not allow the write or the blocks cannot be copied, and `ABORTED` if the copy did not run to its
    /// end, because the process ends or because of a bug.
    pub(crate) async fn copy(&self, ticket: Ticket, ready: ReadyBlocks) -> Result<(), Status> {
        let Inner { destination, lifetime, state, .. } = &*self.0;
        let ReadyBlocks { block_indices, source_blocks } = ready;
        let source = state.lock().sources.get(&ticket).cloned();
        let Some(source) = source.filter(|_| source_blocks.len() == block_indices.len()) else {
            return Err(destination.refuse(ticket).await.into());
        };
        let write = destination.begin_write(ticket, block_indices).await?;
        let copying = move || {
            let blocks: Vec<_> = source_blocks.into_iter().map(BlockId).zip(write.blocks().iter().copied()).collect();
            let copied = source.copy(&blocks).inspect_err(|error| {
                let error = error_chain(error);
                tracing::warn!(error, "cannot copy a prompt's KV blocks from the prefill worker's GPU; the transfer is aborted");
            });
            // This drop closes the peer's memory if the reservation and the peer's entry have ended meanwhile. The memory must be closed before
            // the engine is notified that the write has ended.
            drop(source);
            copied.map(|()| write.complete()).map_err(|_| Refused)
        };
        let copied = run_to_end(&lifetime.shutdown, copying).await;
        let unfinished = || Status::aborted("the copy of the blocks from the prefill worker's GPU did not run to its end");
        copied.ok_or_else(unfinished)?.map_err(Status::from)
    }
}

#[tonic::async_trait]
impl ReceivePath for IpcReceiver {
    async fn offer(&self, offer: Offer<'_>) -> Decision {
        let Offer { peer, capabilities, secret, ticket } = offer;
        if !capabilities.cuda_ipc {
            return Decision::Unavailable;
        }
        let ipc_handle = self.0.state.lock().peers.get(peer).map(|peer| peer.ipc_handle.clone());
        let Some(ipc_handle) = ipc_handle else {
            ticket.wants_ipc_handle = true;
            return Decision::Prepares(Box::new(WantsHandle { receiver: self.clone(), peer: peer.to_owned() }));
        };
        if self.0.backoff.is_open(peer) {
            return Decision::Unavailable;
        }
        let Some(memory) = self.open(peer, ipc_handle).await else { return Decision::Unavailable };
        self.0.state.lock().sources.insert(secret, memory);
        ticket.path = TransferPath::CudaIpc.into();
        Decision::Accepted { label: IPC_LABEL, grant: Some(Box::new(Source { ticket: secret, receiver: self.clone() })) }
    }
}

impl Inner {
    /// Closes the peer's memory if it is idle or the worker drains. Otherwise returns the time at which it will be idle; `None` if it is not
    /// open.
    fn close_if_idle(&self, peer: &str) -> Option<Instant> {
        let mut state = self.state.lock();
        let peer = state.peers.get_mut(peer)?;
        let open = peer.open.as_mut()?;
        if Arc::strong_count(&open.memory) > 1 {
            open.used = Instant::now();
        }
        let idle_at = open.used + IDLE_MAX;
        if !self.lifetime.shutdown.is_draining() && Instant::now() < idle_at {
            return Some(idle_at);
        }
        let closed = peer.open.take().map(|open| open.memory);
        drop(state);
        self.lifetime.shutdown.drop_elsewhere(closed);
        None
    }
}

struct WantsHandle {
    receiver: IpcReceiver,
    peer: String,
}

impl Grant for WantsHandle {
    fn confirmed(self: Box<Self>, done: &PrefillDone) {
        if done.ipc_handle.is_empty() {
            return;
        }
        let peers = &mut self.receiver.0.state.lock().peers;
        if peers.len() >= PEERS_MAX {
            // Entries of workers that have ended are not removed individually. When there are too many entries, all of them are dropped; later
            // tickets request the handles of running workers again.
            let open: Vec<_> = peers.drain().filter_map(|(_, peer)| peer.open).map(|open| open.memory).collect();
            self.receiver.0.lifetime.shutdown.drop_elsewhere(open);
        }
        let new = Peer { ipc_handle: done.ipc_handle.clone(), open: None };
        let replaced = peers.insert(self.peer, new).and_then(|peer| peer.open);
        self.receiver.0.lifetime.shutdown.drop_elsewhere(replaced.map(|open| open.memory));
    }
}

/// Owns a ticket's entry in [`ShareState::sources`]. Dropping it removes the entry.
struct Source {
    ticket: Ticket,
    receiver: IpcReceiver,
}

impl Grant for Source {}

impl Drop for Source {
    fn drop(&mut self) {
        let source = self.receiver.0.state.lock().sources.remove(&self.ticket);
        self.receiver.0.lifetime.shutdown.drop_elsewhere(source);
    }
}
