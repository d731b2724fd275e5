//! The receiving half of the NCCL path.
//!
//! A peer's entry is created with the ticket that names a communicator. Both ends join the communicator when that ticket's blocks have been
//! written. The prefill worker then opens a control stream, which receives batches until the stream or the communicator ends. A
//! [`PeerConnection`] owns the entry all the time. Dropping it closes the communicator, removes the entry and starts the peer's backoff.

use super::{JOINS_MAX, LABEL};
use crate::{
    Destination, Lifetime, Refused,
    backoff::{PEERS_MAX, PeerBackoff},
    blocking::run_to_end,
    path::{Decision, Grant, Offer, ReceivePath},
};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc, time::Duration};
use tandem_kv::{CommunicatorEnd, KvCommunicator, KvMemory, Ticket};
use tandem_process::retry::error_chain;
use tandem_proto::v1::{PrefillDone, TransferPath};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    task::spawn_blocking,
};

/// The prefill worker must open the control stream within this time after this worker has joined the communicator.
const CONTROL_WAIT: Duration = Duration::from_secs(30);

/// The shortest pause between the failure of a communicator and the next one with the same peer. NCCL keeps a thread for each communicator
/// that the other end did not join.
const BACKOFF_MIN: Duration = Duration::from_secs(1);

/// The receiving ends of a worker's communicators. This value is cheap to clone.
#[derive(Clone)]
pub(crate) struct NcclReceiver(Arc<NcclReceiverState>);

struct NcclReceiverState {
    memory: Arc<dyn KvMemory>,
    ranks: u32,
    destination: Arc<dyn Destination>,
    backoff: PeerBackoff,
    lifetime: Lifetime,
    /// The peers, by the instance id of the prefill worker; at most [`PEERS_MAX`].
    peers: Mutex<HashMap<String, PrefillPeer>>,
    joins: Arc<Semaphore>,
}

struct PrefillPeer {
    communicator_id: Vec<u8>,
    state: PeerState,
}

enum PeerState {
    /// A ticket names the communicator, and no control stream has arrived yet. The control stream receives the connection from this channel
    /// once this end has joined.
    Joining(oneshot::Receiver<PeerConnection>),
    /// A control stream has arrived. It waits until this worker has joined the communicator.
    Claimed,
    Open,
}

/// A peer's entry in [`NcclReceiverState::peers`], with the communicator once this end has joined it.
pub(crate) struct PeerConnection {
    receiver: NcclReceiver,
    peer: String,
    communicator_id: Vec<u8>,
    communicator: Option<Arc<dyn KvCommunicator>>,
}

impl Drop for PeerConnection {
    fn drop(&mut self) {
        let NcclReceiverState { backoff, lifetime, .. } = &*self.receiver.0;
        let entry = self.receiver.0.peers.lock().remove(&self.peer);
        backoff.fail(&self.peer);
        lifetime.shutdown.drop_elsewhere((entry, self.communicator.take()));
    }
}

impl NcclReceiver {
    pub(crate) fn new(memory: Arc<dyn KvMemory>, destination: Arc<dyn Destination>, lifetime: Lifetime) -> Option<Self> {
        let (ranks, backoff) = (memory.nccl_ranks(), PeerBackoff::new(BACKOFF_MIN));
        let (peers, joins) = (Mutex::default(), Arc::new(Semaphore::new(JOINS_MAX)));
        (ranks > 0).then(|| Self(Arc::new(NcclReceiverState { memory, ranks, destination, backoff, lifetime, peers, joins })))
    }

    /// Adds an entry for a peer. Returns `None` if the peer has an entry already, if there are too many peers, or if too many communicators
    /// are being joined.
    fn enter(&self, peer: &str) -> Option<Joining> {
        let mut peers = self.0.peers.lock();
        if peers.len() >= PEERS_MAX || peers.contains_key(peer) {
            return None;
        }
        let permit = Arc::clone(&self.0.joins).try_acquire_owned().ok()?;
        let (joined, connection) = oneshot::channel();
        peers.insert(peer.to_owned(), PrefillPeer { communicator_id: Vec::new(), state: PeerState::Joining(connection) });
        let (receiver, peer) = (self.clone(), peer.to_owned());
        let connection = PeerConnection { receiver, peer, communicator_id: Vec::new(), communicator: None };
        Some(Joining { connection, joined, permit })
    }

    /// Waits until this end has joined the communicator, and returns the connection for a control stream. Returns `None` if no ticket has
    /// named the communicator, if it already has a control stream, or if joining failed.
    pub(crate) async fn claim(&self, communicator_id: &[u8]) -> Option<PeerConnection> {
        let joining = {
            let mut peers = self.0.peers.lock();
            let mut named = peers.values_mut().filter(|peer| !peer.communicator_id.is_empty());
            let peer = named.find(|peer| peer.communicator_id == communicator_id)?;
            match std::mem::replace(&mut peer.state, PeerState::Claimed) {
                PeerState::Joining(connection) => connection,
                claimed => {
                    peer.state = claimed;
                    return None;
                }
            }
        };
        let connection = tokio::select! {
            connection = joining => connection.ok()?,
            () = self.0.lifetime.shutdown.draining() => return None,
        };
        if let Some(peer) = self.0.peers.lock().get_mut(&connection.peer) {
            peer.state = PeerState::Open;
        }
        Some(connection)
    }
}

#[tonic::async_trait]
impl ReceivePath for NcclReceiver {
    async fn offer(&self, offer: Offer<'_>) -> Decision {
        let Offer { peer, capabilities, ticket, .. } = offer;
        if capabilities.nccl_ranks != self.0.ranks {
            return Decision::Unavailable;
        }
        if let Some(PrefillPeer { communicator_id, state: PeerState::Open }) = self.0.peers.lock().get(peer) {
            (ticket.path, ticket.communicator) = (TransferPath::Nccl.into(), communicator_id.clone());
            return Decision::Accepted { label: LABEL, grant: None };
        }
        if self.0.backoff.is_open(peer) {
            return Decision::Unavailable;
        }
        let Some(mut joining) = self.enter(peer) else { return Decision::Unavailable };
        let memory = Arc::clone(&self.0.memory);
        match spawn_blocking(move || memory.new_communicator_id()).await.expect("creating a communicator's id does not panic") {
            Ok(id) => {
                if let Some(entry) = self.0.peers.lock().get_mut(peer) {
                    entry.communicator_id = id.clone();
                }
                joining.connection.communicator_id = id.clone();
                ticket.communicator = id;
                Decision::Prepares(Box::new(joining))
            }
            Err(error) => {
                let error = error_chain(&error);
                tracing::warn!(error, peer, "cannot create an NCCL communicator; the KV of this peer is still received over TCP");
                Decision::Unavailable
            }
        }
    }
}

/// A communicator that a ticket names and that this end has not joined yet.
struct Joining {
    connection: PeerConnection,
    joined: oneshot::Sender<PeerConnection>,
    permit: OwnedSemaphorePermit,
}

impl Grant for Joining {
    fn confirmed(self: Box<Self>, _: &PrefillDone) {
        let shutdown = self.connection.receiver.0.lifetime.shutdown.clone();
        shutdown.spawn(self.join());
    }
}

impl Joining {
    async fn join(self) {
        let Self { mut connection, joined, permit } = self;
        let (receiver, peer, id) = (connection.receiver.clone(), connection.peer.clone(), connection.communicator_id.clone());
        let NcclReceiverState { memory, lifetime, peers, .. } = &*receiver.0;
        let memory = Arc::clone(memory);
        let joining = spawn_blocking(move || {
            // The permit is held by the thread, which may run longer than the task that waits for it.
            let _permit = permit;
            memory.join(&id, CommunicatorEnd::Receiver)
        });
        let communicator = tokio::select! {
            joined = joining => joined.expect("joining a communicator does not panic"),
            () = lifetime.shutdown.draining() => return,
        };
        match communicator {
            Ok(communicator) => connection.communicator = Some(communicator),
            Err(error) => {
                let error = error_chain(&error);
                return tracing::warn!(
                    error,
                    peer,
                    "cannot join the NCCL communicator; the KV of this peer is still received over TCP"
                );
            }
        }
        let id = connection.communicator_id.clone();
        if joined.send(connection).is_err() {
            return;
        }
        // If the sender has failed, it never opens the control stream.
        tokio::select! {
            () = tokio::time::sleep(CONTROL_WAIT) => {}
            () = lifetime.shutdown.draining() => {}
        }
        let unclaimed = {
            let mut peers = peers.lock();
            let joining = |peer: &&mut PrefillPeer| peer.communicator_id == id && matches!(peer.state, PeerState::Joining(_));
            peers.get_mut(&peer).filter(joining).map(|peer| std::mem::replace(&mut peer.state, PeerState::Claimed))
        };
        drop(unclaimed);
    }
}

impl PeerConnection {
    /// Receives the sender's next batch; returns whether its blocks were written. A batch that the ticket does not allow is received and
    /// discarded. Returns `None` if the communicator is broken.
    pub(crate) async fn receive(&self, ticket: Ticket, block_indices: Vec<u32>) -> Option<bool> {
        let NcclReceiverState { destination, backoff, lifetime, .. } = &*self.receiver.0;
        let (communicator, count) = (self.communicator.clone()?, block_indices.len());
        let write = destination.begin_write(ticket, block_indices).await;
        let receiving = move || match write {
            Ok(write) => {
                let blocks: Vec<_> = write.blocks().iter().copied().map(Some).collect();
                communicator.receive(&blocks).map(|()| write.complete()).map(|()| true)
            }
            Err(Refused) => communicator.receive(&vec![None; count]).map(|()| false),
        };
        let received = run_to_end(&lifetime.shutdown, receiving).await?;
        match &received {
            Ok(_) => backoff.succeed(&self.peer),
            Err(error) => {
                let error = error_chain(error);
                tracing::warn!(error, peer = self.peer, "cannot receive KV blocks over the NCCL communicator");
            }
        }
        received.ok()
    }

    pub(crate) fn drained(&self) -> impl Future<Output = ()> + Send + 'static {
        self.receiver.0.lifetime.drained.clone()
    }
}
