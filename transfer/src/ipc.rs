//! The receiving end of the CUDA IPC path. It copies the blocks that the sender announces on a `Push` stream from the sender's GPU.
//!
//! The memory of a peer is open only while blocks of a prompt are copied from it, because an open mapping keeps the peer's GPU memory
//! allocated even after the peer's process has ended.

use crate::{
    Destination, Lifetime, Refused,
    backoff::{BACKOFF_MAX, PEERS_MAX, PeerBackoff},
    blocking::run_to_end,
    path::{Decision, Grant, Offer, ReceivePath},
    push::IPC_LABEL,
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};
use tandem_kv::{BlockId, KvMemory, PeerMemory, Ticket};
use tandem_node::retry::error_chain;
use tandem_proto::v1::{PrefillDone, ReadyBlocks, TransferPath};
use tokio::task::spawn_blocking;

/// Opens the memories of a worker's peers and copies blocks from them. Cheap to clone.
#[derive(Clone)]
pub(crate) struct IpcReceiver(Arc<Inner>);

struct Inner {
    memory: Arc<dyn KvMemory>,
    destination: Arc<dyn Destination>,
    backoff: PeerBackoff,
    lifetime: Lifetime,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The peers, by the instance id of the prefill worker; at most [`PEERS_MAX`].
    peers: HashMap<String, Peer>,
    /// The peer's memory from which the blocks of each live ticket are copied.
    sources: HashMap<Ticket, Arc<dyn PeerMemory>>,
}

struct Peer {
    /// The IPC handle that the peer sent in a `PrefillDone`.
    ipc_handle: Vec<u8>,
    open: Option<Weak<dyn PeerMemory>>,
}

impl IpcReceiver {
    pub(crate) fn new(memory: Arc<dyn KvMemory>, destination: Arc<dyn Destination>, lifetime: Lifetime) -> Self {
        // A memory cannot be opened if it is on another host. That does not change soon, so the pauses between retries are long from the
        // start.
        let backoff = PeerBackoff::new(BACKOFF_MAX);
        Self(Arc::new(Inner { memory, destination, backoff, lifetime, state: Mutex::default() }))
    }

    /// Returns the memory of a peer. Opens it if it is not open yet. Returns `None` if it cannot be opened.
    async fn open(&self, peer: &str, ipc_handle: Vec<u8>) -> Option<Arc<dyn PeerMemory>> {
        let open = self.0.state.lock().peers.get(peer).and_then(|peer| peer.open.as_ref()?.upgrade());
        if open.is_some() {
            return open;
        }
        let memory = Arc::clone(&self.0.memory);
        match spawn_blocking(move || memory.open_peer(&ipc_handle)).await.expect("opening does not panic") {
            Ok(opened) => {
                if let Some(peer) = self.0.state.lock().peers.get_mut(peer) {
                    peer.open = Some(Arc::downgrade(&opened));
                }
                Some(opened)
            }
            Err(error) => {
                let error = error_chain(&error);
                tracing::debug!(
                    error,
                    peer,
                    "cannot open this peer's KV memory over CUDA IPC; its KV takes another transfer path"
                );
                self.0.backoff.fail(peer);
                None
            }
        }
    }

    /// Copies the blocks that the sender announced as ready. They are copied from the peer's memory that belongs to the ticket.
    pub(crate) async fn copy(&self, ticket: Ticket, ready: ReadyBlocks) -> Result<(), Refused> {
        let Inner { destination, lifetime, state, .. } = &*self.0;
        let ReadyBlocks { block_indices, source_blocks } = ready;
        let source = state.lock().sources.get(&ticket).cloned();
        let Some(source) = source.filter(|_| source_blocks.len() == block_indices.len()) else {
            return Err(destination.refuse(ticket).await);
        };
        let write = destination.begin_write(ticket, block_indices).await?;
        let copying = move || {
            let blocks: Vec<_> = source_blocks.into_iter().map(BlockId).zip(write.blocks().iter().copied()).collect();
            let copied = source.copy(&blocks).inspect_err(|error| {
                let error = error_chain(error);
                tracing::warn!(error, "cannot copy a prompt's KV blocks from the prefill worker's GPU; the transfer is aborted");
            });
            // If the reservation has ended meanwhile, this was the last use of the peer's memory, and the drop closes it. That must happen
            // before the engine is notified that the write has ended.
            drop(source);
            copied.map(|()| write.complete()).map_err(|_| Refused)
        };
        run_to_end(&lifetime.shutdown, copying).await.unwrap_or(Err(Refused))
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

/// Accompanies a ticket that requests the peer's IPC handle.
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
            // Entries of workers that have ended are not removed one by one. So when there are too many, all entries are dropped. Later
            // tickets request the handles of running workers again.
            peers.clear();
        }
        peers.insert(self.peer, Peer { ipc_handle: done.ipc_handle.clone(), open: None });
    }
}

/// Owns a ticket's entry in [`State::sources`]. Dropping it removes the entry.
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
