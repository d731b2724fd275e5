//! The CUDA IPC path: the sender announces blocks on a `Push` stream, and the receiver copies them from the sender's GPU.
//!
//! A peer's memory is open only while a prompt's blocks are copied from it: a mapping would keep the GPU memory of a worker that has ended.

use crate::{
    Destination, Lifetime, Progress, Refused, SendPath, TransferError,
    blocking::run_to_end,
    negotiate::{Backoff, PEERS_MAX},
    path::{Decision, Grant, Offer, ReceivePath},
    push::Push,
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};
use tandem_kv::{BlockAccess, BlockId, KvMemory, PeerMemory, ReadyBlock, Ticket};
use tandem_proto::v1::{PrefillDone, PushRequest, ReadyBlocks, TransferPath};
use tokio::task::spawn_blocking;

const LABEL: &str = "cuda_ipc";

pub(crate) struct IpcPath(pub(crate) Push);

#[tonic::async_trait]
impl SendPath for IpcPath {
    fn label(&self) -> &'static str {
        LABEL
    }

    fn access(&self) -> BlockAccess {
        BlockAccess::InPlace
    }

    async fn send(&mut self, blocks: Vec<ReadyBlock>) -> Result<Progress, TransferError> {
        let count = blocks.len();
        let (block_indices, source_blocks) = blocks.into_iter().map(|ready| (ready.index, ready.block.0)).unzip();
        let ready_blocks = Some(ReadyBlocks { block_indices, source_blocks });
        self.0.send(PushRequest { ready_blocks, ..PushRequest::default() }, count).await?;
        Ok(Progress::Announced)
    }

    async fn interrupted(&mut self) -> TransferError {
        self.0.interrupted().await
    }

    async fn finish(self: Box<Self>) -> Result<(), TransferError> {
        self.0.finish().await
    }
}

/// The receiving half. Cheap to clone.
#[derive(Clone)]
pub(crate) struct IpcReceiver(Arc<Inner>);

struct Inner {
    memory: Arc<dyn KvMemory>,
    destination: Arc<dyn Destination>,
    backoff: Arc<Backoff>,
    lifetime: Lifetime,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By the prefill worker's instance; at most [`PEERS_MAX`].
    peers: HashMap<String, Peer>,
    /// The memories that the blocks of live tickets are copied from.
    sources: HashMap<Ticket, Arc<dyn PeerMemory>>,
}

struct Peer {
    /// From a `PrefillDone`.
    ipc_handle: Vec<u8>,
    open: Option<Weak<dyn PeerMemory>>,
}

impl IpcReceiver {
    pub(crate) fn new(
        memory: Arc<dyn KvMemory>,
        destination: Arc<dyn Destination>,
        backoff: Arc<Backoff>,
        lifetime: Lifetime,
    ) -> Self {
        Self(Arc::new(Inner { memory, destination, backoff, lifetime, state: Mutex::default() }))
    }

    /// Returns the memory of a peer with this handle, open.
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
                tracing::debug!(%error, peer, "the peer's KV memory cannot be opened");
                self.0.backoff.fail(peer);
                None
            }
        }
    }

    /// Copies announced blocks from the ticket's source.
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
            let copied = source.copy(&blocks).inspect_err(|error| tracing::warn!(%error, "blocks were not copied"));
            // If the reservation has ended, this closes the memory: before the engine sees that the blocks are free.
            drop(source);
            copied.map(|()| write.complete()).map_err(|_| Refused)
        };
        run_to_end(&lifetime.shutdown, copying).await.unwrap_or(Err(Refused))
    }
}

#[tonic::async_trait]
impl ReceivePath for IpcReceiver {
    fn label(&self) -> &'static str {
        LABEL
    }

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
        Decision::Accepted(Some(Box::new(Source { ticket: secret, receiver: self.clone() })))
    }
}

/// A ticket that asks for the peer's handle.
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
            // The handles of workers that still run are asked for again.
            peers.clear();
        }
        peers.insert(self.peer, Peer { ipc_handle: done.ipc_handle.clone(), open: None });
    }
}

/// A ticket's entry in [`State::sources`].
struct Source {
    ticket: Ticket,
    receiver: IpcReceiver,
}

impl Grant for Source {
    fn confirmed(self: Box<Self>, _: &PrefillDone) {}
}

impl Drop for Source {
    fn drop(&mut self) {
        let source = self.receiver.0.state.lock().sources.remove(&self.ticket);
        self.receiver.0.lifetime.shutdown.drop_elsewhere(source);
    }
}
