//! The ways from this worker's KV memory that do not lead through the host: what is offered of them, and the links of those that took it.

use crate::failure::{Ended, Protocol};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tandem_engine::{KvMemory, Link, LinkEnd};
use tandem_kv::{BlockId, Ticket};
use tandem_node::{Shutdown, worker::Requests};
use tandem_proto::{
    link::{Channels, Network},
    v1::{self, LinkReply, LinkRequest, Way, transfer_client::TransferClient},
};
use tokio::{
    sync::{mpsc, oneshot},
    task::spawn_blocking,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// Of one worker. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Ways(Arc<Inner>);

struct Inner {
    memory: Option<Arc<dyn KvMemory>>,
    offered: Option<v1::Ways>,
    channels: Channels,
    /// By communicator, as long as its task runs.
    lines: Mutex<HashMap<Vec<u8>, Line>>,
    requests: Requests,
    shutdown: Shutdown,
}

/// The sending end of a link: its task takes one transfer after the other.
#[derive(Clone)]
pub(crate) struct Line(mpsc::Sender<Transfer>);

struct Transfer {
    ticket: Ticket,
    blocks: Vec<(u32, BlockId)>,
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
            memory.handle().unwrap_or_else(|error| {
                tracing::info!(%error, "the KV memory is for no other process of this host");
                Vec::new()
            })
        };
        let offered = memory.as_deref().map(|memory| v1::Ways { cuda_ipc: handle(memory), nccl: memory.link_devices() });
        let offered = offered.filter(|ways| ways.nccl > 0 || !ways.cuda_ipc.is_empty());
        Self(Arc::new(Inner { memory, offered, channels: Channels::on(network), lines: Mutex::default(), requests, shutdown }))
    }

    /// What decode workers are told, if there is anything.
    pub(crate) fn offered(&self) -> Option<&v1::Ways> {
        self.0.offered.as_ref()
    }

    fn lines(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Line>> {
        self.0.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a ticket asks for. A communicator that is only to be joined is being joined when this returns.
    pub(crate) fn choose(&self, way: Way, address: &str, communicator: Vec<u8>) -> Result<Chosen, Ended> {
        let Some(memory) = self.0.memory.as_ref().filter(|_| self.0.offered.is_some()) else {
            return if way == Way::Tcp { Ok(Chosen::Content) } else { Err(Ended::Protocol(Protocol::NotOffered)) };
        };
        match way {
            Way::Tcp => {
                if !communicator.is_empty() {
                    self.join(memory, address, communicator);
                }
                Ok(Chosen::Content)
            }
            Way::CudaIpc => Ok(Chosen::Places),
            // It may have broken since the decode worker last looked.
            Way::Nccl => self.lines().get(&communicator).cloned().map(Chosen::Line).ok_or(Ended::LinkGone),
        }
    }

    /// Makes our end of a link, in a task that then belongs to it.
    fn join(&self, memory: &Arc<dyn KvMemory>, address: &str, communicator: Vec<u8>) {
        let (ways, memory, address, name) = (self.clone(), Arc::clone(memory), address.to_owned(), communicator.clone());
        let shutdown = self.0.shutdown.clone();
        self.0.shutdown.spawn(async move {
            let linking = spawn_blocking(move || memory.link(&name, LinkEnd::Sends));
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
        self.lines().insert(communicator.clone(), Line(line));
        let (requests, receiver) = mpsc::channel(1);
        let first = LinkRequest { communicator, ..LinkRequest::default() };
        // There is room for it.
        let _ = requests.try_send(first);
        let mut replies = match TransferClient::new(channel).link(ReceiverStream::new(receiver)).await {
            Ok(replies) => replies.into_inner(),
            Err(status) => return status.to_string(),
        };
        let idle = async |replies: &mut Streaming<LinkReply>| match replies.message().await {
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
            let (block_indices, blocks): (Vec<u32>, Vec<BlockId>) = blocks.into_iter().unzip();
            if requests
                .send(LinkRequest { ticket: ticket.as_bytes().to_vec(), block_indices, ..LinkRequest::default() })
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
                (Ok(()), Ok(Some(reply))) => drop(landed.send(reply.landed)),
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
    link: Option<Arc<dyn Link>>,
    communicator: Vec<u8>,
    ways: Ways,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.ways.lines().remove(&self.communicator);
        self.ways.0.shutdown.drop_elsewhere(self.link.take());
    }
}

impl Line {
    /// Returns when the blocks are in the decode worker's memory.
    pub(crate) async fn send(&self, ticket: Ticket, blocks: Vec<(u32, BlockId)>) -> Result<(), Ended> {
        let (landed, answer) = oneshot::channel();
        self.0.send(Transfer { ticket, blocks, landed }).await.map_err(|_| Ended::LinkGone)?;
        match answer.await {
            Ok(true) => Ok(()),
            Ok(false) => Err(tandem_transfer::TransferError::from(tandem_transfer::Refused).into()),
            Err(_) => Err(Ended::LinkGone),
        }
    }
}
