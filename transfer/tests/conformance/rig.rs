//! A receiver whose memory the test owns, and the ways to it.

use bytes::Bytes;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};
use tandem_kv::Ticket;
use tandem_transfer::{
    Loopback, NoLinks, Piece, Push, ReadyBlocks, Refused, Sink, Tcp, TransferError, TransferService, Transport,
};
use tokio::sync::Semaphore;

pub const TICKET: u64 = 0xdead_beef_0000_0007;
pub const BLOCK_BYTES: usize = 256 << 10;
/// Time in which something that is not held up would have happened.
pub const PENDING: Duration = Duration::from_millis(300);
/// Time in which everything happens on the slowest machine.
pub const SOON: Duration = Duration::from_secs(30);

/// The receiver's memory, with the rules a worker has: a ticket names its missing blocks, each is written once and whole.
#[derive(Clone)]
pub struct Memory(pub Arc<State>);

pub struct State {
    tickets: Mutex<BTreeMap<Ticket, Given>>,
    /// Of a sender whose blocks are copied from where they are.
    shown: Mutex<Vec<Bytes>>,
    /// One permit lets one write happen.
    allowed: Semaphore,
    /// One permit for each write that has come.
    pub asked: Semaphore,
}

/// What a ticket allows.
struct Given {
    block_bytes: usize,
    /// Those that are missing, and those that have landed.
    blocks: BTreeMap<u32, Option<Bytes>>,
}

impl Memory {
    fn new() -> Self {
        Self(Arc::new(State {
            tickets: Mutex::default(),
            shown: Mutex::default(),
            allowed: Semaphore::new(Semaphore::MAX_PERMITS),
            asked: Semaphore::new(0),
        }))
    }

    pub fn give_out(&self, ticket: u64, missing: impl IntoIterator<Item = u32>) {
        self.give_out_for(BLOCK_BYTES, ticket, missing);
    }

    pub fn give_out_for(&self, block_bytes: usize, ticket: u64, missing: impl IntoIterator<Item = u32>) {
        let blocks = missing.into_iter().map(|index| (index, None)).collect();
        self.0.tickets.lock().expect("not poisoned").insert(named(ticket), Given { block_bytes, blocks });
    }

    /// Takes the ticket back; gives what had landed.
    pub fn revoke(&self, ticket: u64) -> BTreeMap<u32, Bytes> {
        let given = self.0.tickets.lock().expect("not poisoned").remove(&named(ticket)).expect("it was given out");
        given.blocks.into_iter().filter_map(|(index, block)| Some((index, block?))).collect()
    }

    /// From now on writes wait for [`Memory::release`].
    pub fn hold(&self) {
        self.0.allowed.forget_permits(usize::MAX);
    }

    pub fn release(&self, writes: usize) {
        self.0.allowed.add_permits(writes);
    }

    /// From now on a sender may say that this is at the place that is given back.
    pub fn show(&self, payload: Bytes) -> u32 {
        let mut shown = self.0.shown.lock().expect("not poisoned");
        shown.push(payload);
        shown.len() as u32 - 1
    }

    fn sink(&self) -> Sink {
        let memory = self.clone();
        Sink::new(move |ticket, piece| {
            let memory = memory.clone();
            async move {
                let blocks: Vec<(u32, Bytes)> = match piece {
                    Piece::Block { index, payload } => vec![(index, payload)],
                    Piece::Ready(ready) => {
                        let shown = memory.0.shown.lock().expect("not poisoned");
                        let places = ready.source_blocks.iter().map(|place| shown[*place as usize].clone());
                        ready.block_indices.into_iter().zip(places).collect()
                    }
                };
                memory.0.asked.add_permits(1);
                memory.0.allowed.acquire().await.expect("open").forget();
                // Some writes take longer than others.
                for _ in 0..blocks[0].1.first().map_or(0, |byte| byte % 4) {
                    tokio::task::yield_now().await;
                }
                let mut tickets = memory.0.tickets.lock().expect("not poisoned");
                let Given { block_bytes, blocks: given } = tickets.get_mut(&ticket).ok_or(Refused)?;
                let fits = |(index, payload): &(u32, Bytes)| given.get(index) == Some(&None) && payload.len() == *block_bytes;
                if !blocks.iter().all(fits) {
                    return Err(Refused);
                }
                given.extend(blocks.into_iter().map(|(index, payload)| (index, Some(payload))));
                Ok(())
            }
        })
    }
}

/// A transport and a receiver that it reaches.
pub struct Rig {
    pub transport: Box<dyn Transport>,
    pub address: String,
    pub memory: Memory,
    /// Blocks stay where they are, and the receiver takes them from there.
    pub by_place: bool,
    pub disconnect: Box<dyn FnOnce() + Send>,
}

/// A push, whichever way its blocks go.
pub struct Sending {
    push: Push,
    shown: Option<Memory>,
}

impl Sending {
    pub async fn send(&mut self, index: u32, payload: Bytes) -> Result<(), TransferError> {
        let Some(memory) = &self.shown else { return self.push.send(index, payload).await };
        let place = memory.show(payload);
        self.push.ready(ReadyBlocks { block_indices: vec![index], source_blocks: vec![place] }).await
    }

    pub async fn broken(&mut self) -> TransferError {
        self.push.broken().await
    }

    pub async fn finish(self) -> Result<(), TransferError> {
        self.push.finish().await
    }
}

impl Rig {
    pub fn open(&self, ticket: u64) -> Sending {
        let push = self.transport.open(&self.address, named(ticket)).expect("the address is valid");
        Sending { push, shown: self.by_place.then(|| self.memory.clone()) }
    }

    /// Sends one block and waits until it has landed.
    pub async fn send(&self, ticket: u64, index: u32, payload: Bytes) -> Result<(), TransferError> {
        let mut push = self.open(ticket);
        push.send(index, payload).await?;
        push.finish().await
    }
}

/// As workers do whose memory can be reached: only where blocks are is told.
pub fn places() -> Rig {
    Rig { by_place: true, ..tcp() }
}

pub fn loopback() -> Rig {
    let (transport, memory) = (Loopback::default(), Memory::new());
    let address = "decode-0".to_owned();
    let reachable = transport.add(&address, memory.sink());
    Rig { transport: Box::new(transport), address, memory, by_place: false, disconnect: Box::new(move || drop(reachable)) }
}

pub fn tcp() -> Rig {
    let memory = Memory::new();
    // A runtime of its own: shut down, it closes every connection, as a process that dies does.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.set_nonblocking(true).expect("a socket");
    let address = listener.local_addr().expect("bound").to_string();
    let service = TransferService::server(memory.sink(), NoLinks);
    runtime.spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).expect("a runtime");
        let incoming = tandem_proto::channel::incoming(listener);
        tandem_proto::channel::server().add_service(service).serve_with_incoming(incoming).await.expect("it serves");
    });
    let runtime = RuntimeGuard(Some(runtime));
    Rig { transport: Box::new(Tcp::default()), address, memory, by_place: false, disconnect: Box::new(move || drop(runtime)) }
}

struct RuntimeGuard(Option<tokio::runtime::Runtime>);

impl Drop for RuntimeGuard {
    fn drop(&mut self) {
        self.0.take().expect("dropped once").shutdown_background();
    }
}

/// Tests name tickets by a number.
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
