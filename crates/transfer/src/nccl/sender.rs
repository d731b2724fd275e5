//! The sending half of the NCCL path.

use super::{JOINS_MAX, LABEL};
use crate::{Lifetime, Progress, Refused, SendPath, TransferError, backoff::PEERS_MAX};
use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc};
use tandem_kv::{BlockAccess, BlockId, CommunicatorEnd, KvCommunicator, KvMemory, ReadyBlock, Ticket};
use tandem_process::retry::error_chain;
use tandem_proto::{
    channel::{Channels, status_text},
    v1::{NcclControlReply, NcclControlRequest, transfer_client::TransferClient},
};
use tokio::{
    sync::{Semaphore, mpsc, oneshot},
    task::spawn_blocking,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

struct BlockBatch {
    ticket: Ticket,
    blocks: Vec<ReadyBlock>,
    written: oneshot::Sender<bool>,
}

/// Sends one ticket's blocks over a communicator. Each call of `send` queues one batch of blocks.
pub(crate) struct NcclPath {
    ticket: Ticket,
    batches: mpsc::Sender<BlockBatch>,
}

#[tonic::async_trait]
impl SendPath for NcclPath {
    fn label(&self) -> &'static str {
        LABEL
    }

    fn access(&self) -> BlockAccess {
        BlockAccess::InPlace
    }

    async fn send(&mut self, blocks: Vec<ReadyBlock>) -> Result<Progress, TransferError> {
        let (written, reply) = oneshot::channel();
        let batch = BlockBatch { ticket: self.ticket, blocks, written };
        self.batches.send(batch).await.map_err(|_| TransferError::Closed(None))?;
        match reply.await {
            Ok(true) => Ok(Progress::Sent),
            Ok(false) => Err(Refused.into()),
            Err(_) => Err(TransferError::Closed(None)),
        }
    }

    async fn interrupted(&mut self) -> TransferError {
        self.batches.closed().await;
        TransferError::Closed(None)
    }

    async fn finish(self: Box<Self>) -> Result<(), TransferError> {
        // Each call of `send` has waited until its blocks were written, so all blocks are written now.
        Ok(())
    }
}

/// The sending ends of a worker's communicators. This value is cheap to clone.
#[derive(Clone)]
pub(crate) struct NcclSender(Arc<NcclSenderState>);

struct NcclSenderState {
    memory: Arc<dyn KvMemory>,
    channels: Channels,
    lifetime: Lifetime,
    /// The peers, by the decode worker's address. There are at most [`PEERS_MAX`], because each communicator occupies GPU memory.
    peers: Mutex<HashMap<String, DecodePeer>>,
    joins: Arc<Semaphore>,
}

struct DecodePeer {
    communicator_id: Vec<u8>,
    batches: Option<mpsc::Sender<BlockBatch>>,
}

impl NcclSender {
    pub(crate) fn new(memory: Arc<dyn KvMemory>, channels: Channels, lifetime: Lifetime) -> Self {
        let (peers, joins) = (Mutex::default(), Arc::new(Semaphore::new(JOINS_MAX)));
        Self(Arc::new(NcclSenderState { memory, channels, lifetime, peers, joins }))
    }

    pub(crate) fn open(&self, communicator_id: &[u8], ticket: Ticket) -> Option<NcclPath> {
        let peers = self.0.peers.lock();
        let peer = peers.values().find(|peer| peer.communicator_id == communicator_id)?;
        Some(NcclPath { ticket, batches: peer.batches.clone()? })
    }

    /// Joins a communicator in a new task, and then sends its batches. The caller must have written blocks at `address` under a ticket that
    /// names the communicator. Otherwise an attacker could make this worker connect to the address in the communicator's id, and occupy a
    /// thread until the other end has joined, too.
    pub(crate) fn join(&self, address: String, communicator_id: Vec<u8>) {
        let permit = Arc::clone(&self.0.joins).try_acquire_owned();
        let (Ok(permit), Some(mut connection)) = (permit, self.enter(&address, &communicator_id)) else {
            return tracing::debug!(
                decode = address,
                "not joining an NCCL communicator: one exists for this decode worker, or too many are open or being joined; \
                 KV is still sent over TCP"
            );
        };
        let (memory, id) = (Arc::clone(&self.0.memory), communicator_id.clone());
        self.0.lifetime.shutdown.spawn(async move {
            let joining = spawn_blocking(move || {
                // The thread holds the permit, because it may run longer than the task that waits for it.
                let _permit = permit;
                memory.join(&id, CommunicatorEnd::Sender)
            });
            let joined = tokio::select! {
                joined = joining => joined.expect("joining a communicator does not panic"),
                () = connection.sender.0.lifetime.shutdown.draining() => return,
            };
            match joined {
                Ok(communicator) => {
                    connection.communicator = Some(communicator);
                    let reason = connection.serve(communicator_id).await;
                    tracing::info!(reason, decode = address, "NCCL communicator closed");
                }
                Err(error) => {
                    let error = error_chain(&error);
                    tracing::warn!(error, decode = address, "cannot join the NCCL communicator; KV is still sent over TCP");
                }
            }
        });
    }

    fn enter(&self, address: &str, communicator_id: &[u8]) -> Option<JoinedPeer> {
        let mut peers = self.0.peers.lock();
        if peers.len() >= PEERS_MAX || peers.contains_key(address) {
            return None;
        }
        peers.insert(address.to_owned(), DecodePeer { communicator_id: communicator_id.to_vec(), batches: None });
        Some(JoinedPeer { sender: self.clone(), address: address.to_owned(), communicator: None })
    }
}

/// This end of a peer's communicator, once it is joined. Dropping it closes the communicator and removes the peer's entry from
/// [`NcclSenderState::peers`].
struct JoinedPeer {
    sender: NcclSender,
    address: String,
    communicator: Option<Arc<dyn KvCommunicator>>,
}

impl Drop for JoinedPeer {
    fn drop(&mut self) {
        let NcclSenderState { peers, lifetime, .. } = &*self.sender.0;
        peers.lock().remove(&self.address);
        lifetime.shutdown.drop_elsewhere(self.communicator.take());
    }
}

impl JoinedPeer {
    async fn serve(&self, communicator_id: Vec<u8>) -> String {
        let Self { sender, address, .. } = self;
        let Ok(channel) = sender.0.channels.to(address) else { return "the decode worker's address is invalid".to_owned() };
        let (batches, mut queue) = mpsc::channel(1);
        // From now on blocks can be queued, because tickets may name the communicator as soon as the control stream is open.
        if let Some(peer) = sender.0.peers.lock().get_mut(address) {
            peer.batches = Some(batches);
        }
        let (requests, receiver) = mpsc::channel(1);
        let first = NcclControlRequest { communicator: communicator_id, ..NcclControlRequest::default() };
        // The channel is empty and has capacity for one message, so this cannot fail.
        let _ = requests.try_send(first);
        let mut replies = match TransferClient::new(channel).nccl_control(ReceiverStream::new(receiver)).await {
            Ok(replies) => replies.into_inner(),
            Err(status) => return status.to_string(),
        };
        loop {
            let batch = tokio::select! {
                batch = queue.recv() => batch,
                reply = reply(&mut replies) => {
                    return reply.err().unwrap_or_else(|| "the decode worker sent a reply without a request".to_owned());
                }
                () = sender.0.lifetime.drained.clone() => return "this worker has drained".to_owned(),
            };
            let Some(BlockBatch { ticket, blocks, written }) = batch else {
                return "the communicator is no longer in use".to_owned();
            };
            if written.is_closed() {
                continue;
            }
            let (block_indices, blocks): (Vec<u32>, Vec<BlockId>) =
                blocks.into_iter().map(|ready| (ready.index, ready.block)).unzip();
            let ticket = ticket.as_bytes().to_vec();
            let request = NcclControlRequest { ticket, block_indices, ..NcclControlRequest::default() };
            if requests.send(request).await.is_err() {
                return "the control stream is closed".to_owned();
            }
            // The receiver now expects this batch, so the batch is sent even if its prompt's transfer has ended.
            let Some(communicator) = self.communicator.clone() else { return "the communicator is closed".to_owned() };
            let sending = spawn_blocking(move || communicator.send(&blocks));
            let (sent, reply) = tokio::join!(sending, reply(&mut replies));
            match (sent.expect("sending blocks does not panic"), reply) {
                (Ok(()), Ok(reply)) => drop(written.send(reply.written)),
                (Err(error), _) => return error_chain(&error),
                (_, Err(reason)) => return reason,
            }
        }
    }
}

async fn reply(replies: &mut Streaming<NcclControlReply>) -> Result<NcclControlReply, String> {
    let reply = replies.message().await.map_err(|status| status_text(&status))?;
    reply.ok_or_else(|| "the decode worker has closed the control stream".to_owned())
}
