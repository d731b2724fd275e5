//! The ways into this worker's KV memory that do not lead through the host: which one a prompt takes, and the taking.
//!
//! A ticket's way is settled when it is given out: the prefill worker's memory is open by then, or the link is. Copies end when they end, whoever
//! has left: they are tasks that the process's end waits for.

use futures::{FutureExt, future::BoxFuture};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};
use tandem_engine::{EngineHandle, KvMemory, Link, LinkEnd, PeerMemory, WriteRefused};
use tandem_kv::BlockId;
use tandem_node::{Shutdown, worker::Requests};
use tandem_proto::v1::{self, Ready, Way};
use tandem_transfer::{Links, Piece, Receiver, Refused, Sink};
use tokio::{
    sync::{oneshot, watch},
    task::spawn_blocking,
    time::Instant,
};

/// After a link could not be made, until the next one is tried to the same worker. NCCL keeps something of each that was not.
const LINK_AGAIN: Duration = Duration::from_secs(300);
/// For a prefill worker to open the stream that goes with a link.
const OPEN_WAIT: Duration = Duration::from_secs(30);
/// Prefill workers that are remembered; those without a link are forgotten first.
const LINKED_MAX: usize = 256;

/// Of one worker. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Ways(Arc<Inner>);

struct Inner {
    engine: EngineHandle,
    memory: Option<Arc<dyn KvMemory>>,
    link_devices: u32,
    state: Mutex<State>,
    requests: Requests,
    shutdown: Shutdown,
}

#[derive(Default)]
struct State {
    /// Memories that are open, by their worker's instance: no longer than a prompt needs them, so that a worker that has gone leaves nothing
    /// behind.
    open: HashMap<String, Weak<dyn PeerMemory>>,
    /// Where a ticket's blocks are copied from.
    sources: HashMap<u64, Arc<dyn PeerMemory>>,
    /// By the prefill worker's instance.
    lines: HashMap<String, Line>,
}

/// The receiving end of a link, on its way or there.
struct Line {
    communicator: Vec<u8>,
    state: watch::Receiver<Making>,
    /// The prefill worker holds the stream that goes with it.
    open: bool,
}

/// How far a link has come.
#[derive(Clone)]
enum Making {
    Begun,
    Made(Arc<dyn Link>),
    Failed(Instant),
}

/// What a ticket says of its way. Its prompt's blocks can be taken as long as it is held.
pub(crate) struct Chosen {
    pub(crate) way: Way,
    pub(crate) communicator: Vec<u8>,
    _source: Option<Source>,
}

/// A ticket's place in [`State::sources`].
struct Source {
    ticket: u64,
    ways: Ways,
}

impl Drop for Source {
    fn drop(&mut self) {
        let source = self.ways.state().sources.remove(&self.ticket);
        drop_elsewhere(source);
    }
}

/// What takes its time to be closed must not hold up a thread of the runtime.
fn drop_elsewhere(value: impl Send + 'static) {
    // At the end of the process there is none.
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn_blocking(|| drop(value));
    }
}

/// What metrics call it.
pub(crate) fn name(way: Way) -> &'static str {
    match way {
        Way::Tcp => "tcp",
        Way::CudaIpc => "cuda_ipc",
        Way::Nccl => "nccl",
    }
}

impl Ways {
    pub(crate) fn new(engine: EngineHandle, used: bool, requests: Requests, shutdown: Shutdown) -> Self {
        let memory = engine.kv_memory().filter(|_| used).cloned();
        let link_devices = memory.as_ref().map_or(0, |memory| memory.link_devices());
        Self(Arc::new(Inner { engine, memory, link_devices, state: Mutex::default(), requests, shutdown }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The best way from a prefill worker that is ready now.
    pub(crate) async fn choose(&self, prefill: &str, offered: Option<&v1::Ways>, ticket: u64) -> Chosen {
        let tcp = Chosen { way: Way::Tcp, communicator: Vec::new(), _source: None };
        let (Some(memory), Some(offered)) = (&self.0.memory, offered) else { return tcp };
        if !offered.cuda_ipc.is_empty()
            && let Some(source) = self.open(memory, prefill, &offered.cuda_ipc).await
        {
            self.state().sources.insert(ticket, source);
            return Chosen { way: Way::CudaIpc, _source: Some(Source { ticket, ways: self.clone() }), ..tcp };
        }
        if offered.nccl == 0 || offered.nccl != self.0.link_devices {
            return tcp;
        }
        if let Some(line) = self.state().lines.get(prefill) {
            match &*line.state.borrow() {
                Making::Made(_) if line.open => {
                    return Chosen { way: Way::Nccl, communicator: line.communicator.clone(), ..tcp };
                }
                Making::Failed(at) if at.elapsed() >= LINK_AGAIN => {}
                Making::Begun | Making::Made(_) | Making::Failed(_) => return tcp,
            }
        }
        match self.join(memory, prefill).await {
            Some(communicator) => Chosen { communicator, ..tcp },
            None => tcp,
        }
    }

    async fn open(&self, memory: &Arc<dyn KvMemory>, prefill: &str, handle: &[u8]) -> Option<Arc<dyn PeerMemory>> {
        if let Some(open) = self.state().open.get(prefill).and_then(Weak::upgrade) {
            return Some(open);
        }
        let (memory, handle) = (Arc::clone(memory), handle.to_vec());
        match spawn_blocking(move || memory.open(&handle)).await.expect("opening does not panic") {
            Ok(opened) => {
                let mut state = self.state();
                state.open.retain(|_, open| open.strong_count() > 0);
                state.open.insert(prefill.to_owned(), Arc::downgrade(&opened));
                Some(opened)
            }
            Err(error) => {
                tracing::debug!(%error, prefill, "its memory cannot be opened");
                None
            }
        }
    }

    /// Begins to make a link, while this prompt's blocks come over TCP: its name.
    async fn join(&self, memory: &Arc<dyn KvMemory>, prefill: &str) -> Option<Vec<u8>> {
        let (named, makes) = (Arc::clone(memory), Arc::clone(memory));
        let name = spawn_blocking(move || named.name_link()).await.expect("naming does not panic");
        let name = name.inspect_err(|error| tracing::warn!(%error, "no link to a prefill worker")).ok()?;
        let (making, state) = watch::channel(Making::Begun);
        {
            let mut state_of_all = self.state();
            let lines = &mut state_of_all.lines;
            if lines.len() >= LINKED_MAX {
                lines.retain(|_, line| line.open);
            }
            lines.insert(prefill.to_owned(), Line { communicator: name.clone(), state, open: false });
        }
        let (ways, communicator, shutdown) = (self.clone(), name.clone(), self.0.shutdown.clone());
        self.0.shutdown.spawn(async move {
            let called = communicator.clone();
            let linking = spawn_blocking(move || makes.link(&called, LinkEnd::Receives));
            let linked = tokio::select! {
                linked = linking => linked.expect("making a link does not panic"),
                () = shutdown.draining() => return,
            };
            match linked {
                Ok(link) => making.send_replace(Making::Made(link)),
                Err(error) => {
                    tracing::warn!(%error, "no link to a prefill worker; its prompts' KV comes over TCP");
                    making.send_replace(Making::Failed(Instant::now()))
                }
            };
            // One whose other end failed is never opened.
            tokio::select! {
                () = tokio::time::sleep(OPEN_WAIT) => {}
                () = shutdown.draining() => return,
            }
            let is_open = ways.state().lines.values().any(|line| line.communicator == communicator && line.open);
            if !is_open && let Making::Made(link) = making.send_replace(Making::Failed(Instant::now())) {
                drop_elsewhere(link);
            }
        });
        Some(name)
    }

    /// The engine's thread decides about every block.
    pub(crate) fn sink(&self) -> Sink {
        let ways = self.clone();
        Sink::new(move |ticket, piece| {
            let ways = ways.clone();
            async move {
                match piece {
                    Piece::Block { index, payload } => {
                        ways.0.engine.write_block(ticket, index, payload).await.map_err(|WriteRefused| Refused)
                    }
                    Piece::Ready(ready) => ways.pull(ticket, ready).await,
                }
            }
        })
    }

    async fn pull(&self, ticket: u64, ready: Ready) -> Result<(), Refused> {
        let Ready { block_indices, sources } = ready;
        let source = self.state().sources.get(&ticket).cloned().ok_or(Refused)?;
        if sources.len() != block_indices.len() {
            return Err(Refused);
        }
        let arrival = self.0.engine.begin_arrival(ticket, block_indices).await.map_err(|WriteRefused| Refused)?;
        self.to_its_end(move || {
            let blocks: Vec<_> = sources.into_iter().map(BlockId).zip(arrival.blocks().iter().copied()).collect();
            let pulled = source.pull(&blocks).inspect_err(|error| tracing::warn!(%error, "blocks were not copied"));
            // The memory may be closed with this, before anybody can see that the blocks are free.
            drop(source);
            pulled.map(|()| arrival.landed()).map_err(|_| Refused)
        })
        .await
        .unwrap_or(Err(Refused))
    }

    /// Blocking work that goes on when nobody waits for it any more, and that the process's end waits for. `None`: it panicked.
    async fn to_its_end<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (done, result) = oneshot::channel();
        let working = spawn_blocking(move || {
            // Nobody may wait for it any more.
            let _ = done.send(work());
        });
        self.0.shutdown.track(working.map(drop));
        result.await.ok()
    }
}

impl Links for Ways {
    fn open(&self, name: Vec<u8>) -> BoxFuture<'static, Option<Box<dyn Receiver>>> {
        let ways = self.clone();
        async move {
            let found = ways
                .state()
                .lines
                .iter()
                .find(|(_, line)| line.communicator == name && !line.open)
                .map(|(prefill, line)| (prefill.clone(), line.state.clone()));
            let (prefill, mut state) = found?;
            let made = state.wait_for(|state| !matches!(state, Making::Begun)).await.ok()?.clone();
            let Making::Made(link) = made else { return None };
            ways.state().lines.get_mut(&prefill).filter(|line| line.communicator == name)?.open = true;
            let line: Box<dyn Receiver> = Box::new(Open { ways, prefill, communicator: name, link: Some(link) });
            Some(line)
        }
        .boxed()
    }
}

/// A link whose prefill worker says what comes over it.
struct Open {
    ways: Ways,
    prefill: String,
    communicator: Vec<u8>,
    /// `None` when it is dropped.
    link: Option<Arc<dyn Link>>,
}

impl Receiver for Open {
    fn receive(&mut self, ticket: u64, block_indices: Vec<u32>) -> BoxFuture<'_, Option<bool>> {
        async move {
            let (link, blocks) = (self.link.clone()?, block_indices.len());
            let arrival = self.ways.0.engine.begin_arrival(ticket, block_indices).await;
            let received = self.ways.to_its_end(move || match arrival {
                Ok(arrival) => {
                    let blocks: Vec<_> = arrival.blocks().iter().copied().map(Some).collect();
                    link.receive(&blocks).map(|()| arrival.landed()).map(|()| true)
                }
                Err(WriteRefused) => link.receive(&vec![None; blocks]).map(|()| false),
            });
            received.await?.inspect_err(|error| tracing::warn!(%error, "a link to a prefill worker broke")).ok()
        }
        .boxed()
    }

    fn ended(&self) -> BoxFuture<'static, ()> {
        let requests = self.ways.0.requests.clone();
        async move { requests.drained().await }.boxed()
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut state = self.ways.state();
        let is_ours = state.lines.get(&self.prefill).is_some_and(|line| line.communicator == self.communicator);
        let line = if is_ours { state.lines.remove(&self.prefill) } else { None };
        drop(state);
        drop_elsewhere((line, self.link.take()));
    }
}
