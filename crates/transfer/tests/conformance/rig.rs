//! A prefill worker's send paths, and a decode worker's receive paths whose memory the test owns.

use crate::device::Device;
use bytes::Bytes;
use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::{Arc, Mutex},
    time::Duration,
};
use tandem_kv::{BlockAccess, BlockId, BlockWrite, KvMemory, ReadyBlock, Ticket};
use tandem_process::Shutdown;
use tandem_proto::{
    channel::{self, Network},
    v1::{self, PrefillDone, TransferPath},
};
use tandem_transfer::{
    Destination, Lifetime, Negotiated, ReceivePaths, Refused, SendPaths, SendSettings, Sent, Transfer, TransferError,
    TransferMode,
};
use tokio::sync::Semaphore;

pub const TICKET: u64 = 0xdead_beef_0000_0007;
pub const BLOCK_BYTES: usize = 256 << 10;
/// The time for which a test waits before it concludes that an operation is blocked.
pub const PENDING: Duration = Duration::from_millis(300);
/// The time limit of every operation that must end, sufficient on the slowest machine.
pub const SOON: Duration = Duration::from_secs(30);
const PEER: &str = "prefill-0";

/// The receiver's memory, with the rules of a worker: a ticket names its missing blocks, and each is written once and completely.
#[derive(Clone)]
pub struct Memory(pub Arc<State>);

pub struct State {
    tickets: Mutex<BTreeMap<Ticket, Issued>>,
    device: Device,
    allowed: Semaphore,
    pub begun: Semaphore,
}

struct Issued {
    block_bytes: usize,
    blocks: BTreeMap<u32, Block>,
}

#[derive(PartialEq)]
enum Block {
    Missing,
    Writing,
    Written(Bytes),
}

impl Memory {
    fn new(device: Device) -> Self {
        let (allowed, begun) = (Semaphore::new(Semaphore::MAX_PERMITS), Semaphore::new(0));
        Self(Arc::new(State { tickets: Mutex::default(), device, allowed, begun }))
    }

    pub fn issue(&self, ticket: u64, missing: impl IntoIterator<Item = u32>) {
        self.issue_for(BLOCK_BYTES, ticket, missing);
    }

    pub fn issue_for(&self, block_bytes: usize, ticket: u64, missing: impl IntoIterator<Item = u32>) {
        let blocks = missing.into_iter().map(|index| (index, Block::Missing)).collect();
        self.0.tickets.lock().expect("no test panics with the lock").insert(named(ticket), Issued { block_bytes, blocks });
    }

    pub fn revoke(&self, ticket: u64) -> BTreeMap<u32, Bytes> {
        let issued =
            self.0.tickets.lock().expect("no test panics with the lock").remove(&named(ticket)).expect("the ticket was issued");
        let written = issued.blocks.into_iter().filter_map(|(index, block)| match block {
            Block::Written(content) => Some((index, content)),
            Block::Missing | Block::Writing => None,
        });
        written.collect()
    }

    pub fn hold(&self) {
        self.0.allowed.forget_permits(usize::MAX);
    }

    pub fn release(&self, writes: usize) {
        self.0.allowed.add_permits(writes);
    }

    async fn pass(&self, yields: u8) {
        self.0.begun.add_permits(1);
        self.0.allowed.acquire().await.expect("the semaphore is open").forget();
        for _ in 0..yields % 4 {
            tokio::task::yield_now().await;
        }
    }
}

#[tonic::async_trait]
impl Destination for Memory {
    async fn write(&self, ticket: Ticket, index: u32, content: Bytes) -> Result<(), Refused> {
        self.pass(content.first().copied().unwrap_or_default()).await;
        let mut tickets = self.0.tickets.lock().expect("no test panics with the lock");
        let Issued { block_bytes, blocks } = tickets.get_mut(&ticket).ok_or(Refused)?;
        let block = blocks.get_mut(&index).filter(|block| **block == Block::Missing).ok_or(Refused)?;
        if content.len() != *block_bytes {
            return Err(Refused);
        }
        *block = Block::Written(content);
        Ok(())
    }

    async fn begin_write(&self, ticket: Ticket, indices: Vec<u32>) -> Result<Box<dyn BlockWrite>, Refused> {
        self.pass(indices.first().map_or(0, |index| *index as u8)).await;
        let mut tickets = self.0.tickets.lock().expect("no test panics with the lock");
        let Issued { block_bytes, blocks } = tickets.get_mut(&ticket).ok_or(Refused)?;
        if !indices.iter().all(|index| blocks.get(index) == Some(&Block::Missing)) {
            return Err(Refused);
        }
        blocks.extend(indices.iter().map(|index| (*index, Block::Writing)));
        let places = indices.iter().map(|_| self.0.device.reserve(*block_bytes)).collect();
        Ok(Box::new(Write { memory: self.clone(), ticket, indices, places, complete: false }))
    }

    async fn confirm(&self, _: Ticket) {}

    async fn refuse(&self, _: Ticket) -> Refused {
        Refused
    }

    fn path_refused(&self, _: &'static str, _: &'static str) {}
}

struct Write {
    memory: Memory,
    ticket: Ticket,
    indices: Vec<u32>,
    places: Vec<BlockId>,
    complete: bool,
}

impl BlockWrite for Write {
    fn blocks(&self) -> &[BlockId] {
        &self.places
    }

    fn complete(mut self: Box<Self>) {
        self.complete = true;
    }
}

impl Drop for Write {
    fn drop(&mut self) {
        let State { tickets, device, .. } = &*self.memory.0;
        if let Some(issued) = tickets.lock().expect("no test panics with the lock").get_mut(&self.ticket) {
            for (index, place) in self.indices.iter().zip(&self.places) {
                let block = if self.complete { Block::Written(device.read(*place)) } else { Block::Missing };
                issued.blocks.insert(*index, block);
            }
        }
    }
}

pub struct Rig {
    pub path: TransferPath,
    pub address: String,
    pub memory: Memory,
    pub source: Device,
    send: SendPaths,
    pub receive: ReceivePaths,
    negotiated: tokio::sync::Mutex<BTreeMap<u64, (v1::Ticket, Negotiated)>>,
    server: Mutex<Option<ServerGuard>>,
}

pub struct Sending {
    transfer: Transfer,
    source: Device,
}

impl Sending {
    pub async fn send(&mut self, index: u32, payload: Bytes) -> Result<(), TransferError> {
        self.send_all(vec![(index, payload)]).await
    }

    pub async fn send_all(&mut self, blocks: Vec<(u32, Bytes)>) -> Result<(), TransferError> {
        let copied = self.transfer.access() == BlockAccess::Copied;
        let ready = blocks.into_iter().map(|(index, payload)| {
            let content = if copied { payload.to_vec() } else { Vec::new() };
            ReadyBlock { index, block: self.source.store(payload), content }
        });
        let ready = ready.collect();
        self.transfer.send(ready).await
    }

    pub async fn interrupted(&mut self) -> TransferError {
        self.transfer.interrupted().await
    }

    pub async fn finish(self) -> Result<Sent, TransferError> {
        self.transfer.finish().await
    }
}

impl Rig {
    async fn start(mode: TransferMode, device: impl Fn() -> Device, path: TransferPath) -> Self {
        let (source, destination) = (device(), device());
        let memory = Memory::new(destination.clone());
        let shutdown = Shutdown::default();
        let lifetime = Lifetime::new(shutdown, std::future::pending());
        let receive = ReceivePaths::new(memory.clone(), Some(Arc::new(destination) as Arc<dyn KvMemory>), mode, lifetime.clone());
        // When this runtime is shut down, every connection is closed, as when a process is killed.
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("the runtime can be built");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
        listener.set_nonblocking(true).expect("the socket supports non-blocking mode");
        let address = listener.local_addr().expect("the listener is bound").to_string();
        let service = receive.service();
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).expect("the listener joins the runtime");
            let incoming = channel::incoming(listener);
            channel::server().add_service(service).serve_with_incoming(incoming).await.expect("the server does not fail");
        });
        let send = SendPaths::new(SendSettings {
            instance_id: PEER.to_owned(),
            mode,
            memory: Some(Arc::new(source.clone())),
            block_bytes: BLOCK_BYTES,
            network: Network::default(),
            lifetime,
        });
        let (negotiated, server) = (tokio::sync::Mutex::default(), Mutex::new(Some(ServerGuard(Some(runtime)))));
        let rig = Self { path, address, memory, source, send, receive, negotiated, server };
        rig.prepare(1 << 50).await;
        rig
    }

    /// Sends prompts of one block each, with tickets numbered from `first`, until a prompt's block takes the rig's path. Returns the number
    /// of prompts before it, whose blocks took another path.
    pub async fn prepare(&self, first: u64) -> u64 {
        for ticket in first.. {
            self.memory.issue(ticket, 0..1);
            let mut sending = self.open(ticket).await;
            sending.send(0, block(0)).await.expect("the receiver still needs the block");
            let ipc_handle = sending.finish().await.expect("the receiver still needs the block").ipc_handle;
            let mut negotiated = self.negotiated.lock().await;
            let (issued, negotiated) = negotiated.get_mut(&ticket).expect("the ticket was opened");
            negotiated.confirmed(&PrefillDone { ipc_handle, ..PrefillDone::default() }).await;
            assert_eq!(self.memory.revoke(ticket).len(), 1);
            if issued.path() == self.path {
                return ticket - first;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        unreachable!("the loop over tickets never ends")
    }

    /// Negotiates a path for the ticket. Returns the ticket as the decode worker sends it to a prefill worker, and the negotiated path.
    pub async fn negotiate(&self, peer: &str, ticket: u64) -> (v1::Ticket, Negotiated) {
        let (secret, address) = (named(ticket), self.address.clone());
        let mut issued = v1::Ticket { ticket: secret.as_bytes().to_vec(), address, ..v1::Ticket::default() };
        let negotiated = self.receive.negotiate(peer, self.send.capabilities(), secret, &mut issued).await;
        (issued, negotiated)
    }

    pub async fn open(&self, ticket: u64) -> Sending {
        let mut negotiated = self.negotiated.lock().await;
        let (issued, _) = match negotiated.entry(ticket) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(self.negotiate(PEER, ticket).await),
        };
        self.sending(issued.clone())
    }

    pub fn sending(&self, ticket: v1::Ticket) -> Sending {
        Sending { transfer: self.send.open(ticket).expect("the ticket is valid"), source: self.source.clone() }
    }

    pub fn open_ticket(&self, ticket: v1::Ticket) -> Result<Transfer, TransferError> {
        self.send.open(ticket)
    }

    pub async fn send(&self, ticket: u64, index: u32, payload: Bytes) -> Result<(), TransferError> {
        let mut sending = self.open(ticket).await;
        sending.send(index, payload).await?;
        sending.finish().await.map(drop)
    }

    pub fn disconnect(&self) {
        drop(self.server.lock().expect("no test panics with the lock").take());
    }

    /// Returns whether blocks of another size than the receiver's can be sent. Communicators move blocks of one size.
    pub fn sends_any_size(&self) -> bool {
        self.path != TransferPath::Nccl
    }
}

pub async fn host() -> Rig {
    Rig::start(TransferMode::Tcp, || Device::new(true, 1), TransferPath::Tcp).await
}

pub async fn simulated() -> Rig {
    let mode = TransferMode::Simulated { block: Duration::from_micros(20) };
    Rig::start(mode, || Device::new(true, 1), TransferPath::Tcp).await
}

pub async fn ipc() -> Rig {
    Rig::start(TransferMode::Auto, || Device::new(true, 1), TransferPath::CudaIpc).await
}

pub async fn nccl() -> Rig {
    Rig::start(TransferMode::Auto, || Device::new(false, 1), TransferPath::Nccl).await
}

struct ServerGuard(Option<tokio::runtime::Runtime>);

impl Drop for ServerGuard {
    fn drop(&mut self) {
        self.0.take().expect("a value is dropped once").shutdown_background();
    }
}

pub fn named(number: u64) -> Ticket {
    Ticket::from_bytes(u128::from(number).to_be_bytes())
}

pub fn block(index: u32) -> Bytes {
    let mut state = u64::from(index) * 2 + 1;
    let mut bytes = Vec::with_capacity(BLOCK_BYTES);
    while bytes.len() < BLOCK_BYTES {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        bytes.extend((state >> 11).to_le_bytes());
    }
    bytes.into()
}
