//! The ways from this worker's KV memory that do not lead through the host: what is offered of them, and the links of those that took it.

use crate::failure::{Ended, Protocol};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};
use tandem_kv::{BlockId, CommunicatorEnd, KvCommunicator, KvMemory, ReadyBlock, Ticket};
use tandem_node::Shutdown;
use tandem_proto::{
    channel::{Channels, Network},
    v1::{self, NcclControlReply, NcclControlRequest, TransferPath, transfer_client::TransferClient},
};
use tandem_worker::Requests;
use tokio::{
    sync::{Semaphore, mpsc, oneshot},
    task::spawn_blocking,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// Links that are made at a time: each takes a thread until the other end joins, 30 seconds per GPU at most.
const JOINS_MAX: usize = 4;
/// Decode workers with a link. Each link takes GPU memory; a cluster has fewer workers.
const PEERS_MAX: usize = 256;

/// Of one worker. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Ways(Arc<Inner>);

struct Inner {
    memory: Option<Arc<dyn KvMemory>>,
    /// With which a process of this host opens all of the memory; empty if none can.
    handle: Vec<u8>,
    offered: Option<v1::TransferCapabilities>,
    channels: Channels,
    lines: Mutex<Lines>,
    /// [`JOINS_MAX`] permits.
    joins: Arc<Semaphore>,
    requests: Requests,
    shutdown: Shutdown,
}

#[derive(Default)]
struct Lines {
    /// By communicator, as long as its task runs.
    open: HashMap<Vec<u8>, Line>,
    /// Addresses of the decode workers with which a link is open or being made.
    peers: HashSet<String>,
}

/// A decode worker's place in [`Lines::peers`].
struct Peer {
    address: String,
    ways: Ways,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.ways.lines().peers.remove(&self.address);
    }
}

/// The sending end of a link: its task takes one transfer after the other.
#[derive(Clone)]
pub(crate) struct Line(mpsc::Sender<Transfer>);

struct Transfer {
    ticket: Ticket,
    blocks: Vec<ReadyBlock>,
    landed: oneshot::Sender<bool>,
}

/// How a ticket's blocks go.
pub(crate) enum Chosen {
    /// Through the host.
    Content,
    /// The receiver copies them.
    Places,
    Line(Line),
}

impl Ways {
    pub(crate) fn new(memory: Option<Arc<dyn KvMemory>>, network: Network, requests: Requests, shutdown: Shutdown) -> Self {
        let handle = |memory: &dyn KvMemory| {
            memory.ipc_handle().unwrap_or_else(|error| {
                tracing::info!(%error, "the KV memory is for no other process of this host");
                Vec::new()
            })
        };
        let handle = memory.as_deref().map(handle).unwrap_or_default();
        let offered = memory
            .as_deref()
            .map(|memory| v1::TransferCapabilities { cuda_ipc: !handle.is_empty(), nccl_ranks: memory.nccl_ranks() });
        let offered = offered.filter(|ways| ways.nccl_ranks > 0 || ways.cuda_ipc);
        let (channels, lines, joins) = (Channels::on(network), Mutex::default(), Arc::new(Semaphore::new(JOINS_MAX)));
        Self(Arc::new(Inner { memory, handle, offered, channels, lines, joins, requests, shutdown }))
    }

    /// What decode workers are told, if there is anything.
    pub(crate) fn offered(&self) -> Option<&v1::TransferCapabilities> {
        self.0.offered.as_ref()
    }

    /// Opens all of the KV memory, so it is only for a decode worker under whose ticket blocks have landed.
    pub(crate) fn ipc_handle(&self) -> &[u8] {
        &self.0.handle
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lines.lock()
    }

    /// How the blocks of a ticket go.
    pub(crate) fn choose(&self, way: TransferPath, communicator: &[u8]) -> Result<Chosen, Ended> {
        match (way, &self.0.offered) {
            (TransferPath::Tcp, _) => Ok(Chosen::Content),
            (TransferPath::CudaIpc, Some(offered)) if offered.cuda_ipc => Ok(Chosen::Places),
            // It may have broken since the decode worker last looked.
            (TransferPath::Nccl, Some(offered)) if offered.nccl_ranks > 0 => {
                self.lines().open.get(communicator).cloned().map(Chosen::Line).ok_or(Ended::LinkGone)
            }
            (TransferPath::CudaIpc | TransferPath::Nccl, _) => Err(Ended::Protocol(Protocol::NotOffered)),
        }
    }

    /// `None` if the decode worker has a place already, or too many others have one.
    fn peer(&self, address: &str) -> Option<Peer> {
        let peers = &mut self.lines().peers;
        let placed = peers.len() < PEERS_MAX && peers.insert(address.to_owned());
        placed.then(|| Peer { address: address.to_owned(), ways: self.clone() })
    }

    /// Makes this worker's end of a link, in a task that then belongs to it. Only for a communicator that was named by a ticket under which
    /// blocks have landed at `address`: joining connects to where the communicator's name says, and takes a thread until the other end has
    /// joined too. So a decode worker has at most one link or join.
    pub(crate) fn join(&self, address: &str, communicator: Vec<u8>) {
        let Some(memory) = self.0.memory.clone().filter(|memory| memory.nccl_ranks() > 0) else { return };
        let (Ok(joining), Some(peer)) = (Arc::clone(&self.0.joins).try_acquire_owned(), self.peer(address)) else {
            tracing::debug!(decode = address, "no link is made now; its prompts' KV goes over TCP");
            return;
        };
        let (ways, address, name) = (self.clone(), address.to_owned(), communicator.clone());
        let shutdown = self.0.shutdown.clone();
        self.0.shutdown.spawn(async move {
            let _peer = peer;
            let linking = spawn_blocking(move || {
                // The thread may go on after the task that waits for it.
                let _joining = joining;
                memory.join(&name, CommunicatorEnd::Sender)
            });
            let linked = tokio::select! {
                linked = linking => linked.expect("making a link does not panic"),
                () = shutdown.draining() => return,
            };
            match linked {
                Ok(link) => {
                    let held = Held { link: Some(link), communicator: communicator.clone(), ways: ways.clone() };
                    let why = ways.hold(&held, &address, communicator).await;
                    tracing::info!(why, decode = address, "a link has ended");
                }
                Err(error) => tracing::warn!(%error, decode = address, "no link; its prompts' KV goes over TCP"),
            }
        });
    }

    /// Serves a link until it or its stream breaks, or this worker drains and has nothing more to send: why.
    async fn hold(&self, held: &Held, address: &str, communicator: Vec<u8>) -> String {
        let Ok(channel) = self.0.channels.to(address) else { return format!("{address} is no address") };
        // A ticket may name it as soon as the other end knows of the stream.
        let (line, mut transfers) = mpsc::channel(1);
        self.lines().open.insert(communicator.clone(), Line(line));
        let (requests, receiver) = mpsc::channel(1);
        let first = NcclControlRequest { communicator, ..NcclControlRequest::default() };
        // There is room for it.
        let _ = requests.try_send(first);
        let mut replies = match TransferClient::new(channel).nccl_control(ReceiverStream::new(receiver)).await {
            Ok(replies) => replies.into_inner(),
            Err(status) => return status.to_string(),
        };
        let idle = async |replies: &mut Streaming<NcclControlReply>| match replies.message().await {
            Ok(Some(_)) => "a reply to nothing".to_owned(),
            Ok(None) => "the decode worker has closed it".to_owned(),
            Err(status) => status.to_string(),
        };
        loop {
            let transfer = tokio::select! {
                transfer = transfers.recv() => transfer,
                why = idle(&mut replies) => return why,
                () = self.0.requests.drained() => return "this worker leaves".to_owned(),
            };
            let Some(Transfer { ticket, blocks, landed }) = transfer else { return "nobody can use it".to_owned() };
            if landed.is_closed() {
                continue;
            }
            let (block_indices, blocks): (Vec<u32>, Vec<BlockId>) =
                blocks.into_iter().map(|ready| (ready.index, ready.block)).unzip();
            if requests
                .send(NcclControlRequest { ticket: ticket.as_bytes().to_vec(), block_indices, ..NcclControlRequest::default() })
                .await
                .is_err()
            {
                return "its stream has ended".to_owned();
            }
            // It was told: it goes on to its end, whoever waits for it.
            let Some(link) = held.link.clone() else { return "it was dropped".to_owned() };
            let sending = spawn_blocking(move || link.send(&blocks));
            let (sent, reply) = tokio::join!(sending, replies.message());
            match (sent.expect("sending does not panic"), reply) {
                (Ok(()), Ok(Some(reply))) => drop(landed.send(reply.written)),
                (Err(error), _) => return error.to_string(),
                (_, Ok(None)) => return "the decode worker has closed it".to_owned(),
                (_, Err(status)) => return status.to_string(),
            }
        }
    }
}

/// A link, as long as its task runs.
struct Held {
    /// `None` when it is dropped.
    link: Option<Arc<dyn KvCommunicator>>,
    communicator: Vec<u8>,
    ways: Ways,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ways.lines().open.remove(&self.communicator);
        self.ways.0.shutdown.drop_elsewhere(self.link.take());
    }
}

impl Line {
    /// Returns when the blocks are in the decode worker's memory.
    pub(crate) async fn send(&self, ticket: Ticket, blocks: Vec<ReadyBlock>) -> Result<(), Ended> {
        let (landed, answer) = oneshot::channel();
        self.0.send(Transfer { ticket, blocks, landed }).await.map_err(|_| Ended::LinkGone)?;
        match answer.await {
            Ok(true) => Ok(()),
            Ok(false) => Err(tandem_transfer::TransferError::from(tandem_transfer::Refused).into()),
            Err(_) => Err(Ended::LinkGone),
        }
    }
}
