//! The ways into this worker's KV memory that do not lead through the host: which one a prompt takes, and the taking.
//!
//! A ticket's way is settled when it is given out: the prefill worker's memory is open by then, or the link is. Copies end when they end, whoever
//! has left: they are tasks that the process's end waits for.

use futures::{FutureExt, future::BoxFuture};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};
use tandem_engine::{EngineHandle, WriteRefused};
use tandem_kv::{BlockId, CommunicatorEnd, DeviceTransferError, KvCommunicator, KvMemory, PeerMemory, Ticket};
use tandem_node::Shutdown;
use tandem_proto::v1::{self, PrefillDone, ReadyBlocks, TransferPath};
use tandem_transfer::{Links, Piece, Receiver, Refused, Sink};
use tandem_worker::{Requests, WorkerMetrics};
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot},
    task::spawn_blocking,
    time::Instant,
};

/// After a link has failed, until the next one to the same worker is tried: doubled each time, until one has moved something. NCCL keeps
/// something of each that was not made.
const AGAIN: Duration = Duration::from_secs(1);
const AGAIN_MAX: Duration = Duration::from_secs(300);
/// For a prefill worker to open the stream that goes with a link.
const OPEN_WAIT: Duration = Duration::from_secs(30);
/// Prefill workers that are remembered. Those of which nothing good is known are forgotten beyond it.
const KNOWN_MAX: usize = 256;

/// Links that are made at a time, from the ticket that names the communicator until this end has joined: joining takes a thread.
const JOINS_MAX: usize = 4;

/// Of one worker. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Ways(Arc<Inner>);

struct Inner {
    engine: EngineHandle,
    memory: Option<Arc<dyn KvMemory>>,
    link_devices: u32,
    state: Mutex<State>,
    /// A line has come further.
    changed: Notify,
    /// [`JOINS_MAX`] permits.
    joins: Arc<Semaphore>,
    metrics: Arc<WorkerMetrics>,
    requests: Requests,
    shutdown: Shutdown,
}

/// By the prefill worker's instance, but for the sources.
#[derive(Default)]
struct State {
    /// Handles of memories, from a `PrefillDone` each.
    handles: HashMap<String, Vec<u8>>,
    /// Memories that are open: no longer than a prompt needs them, so that a worker that has gone leaves nothing behind.
    open: HashMap<String, Weak<dyn PeerMemory>>,
    /// Memories that could not be opened, and when.
    closed: HashMap<String, Instant>,
    /// Where a ticket's blocks are copied from.
    sources: HashMap<Ticket, Arc<dyn PeerMemory>>,
    lines: HashMap<String, Line>,
}

/// The receiving end of a link, on its way or there.
struct Line {
    /// Empty until it is named.
    communicator: Vec<u8>,
    stage: Stage,
    /// Since the last one that moved something.
    failures: u32,
}

enum Stage {
    /// A ticket has named it. Both ends join when the ticket's blocks have landed. `awaited`: a stream waits for that already.
    Begun {
        awaited: bool,
    },
    /// The prefill worker has still to open the stream that goes with it.
    Made(Arc<dyn KvCommunicator>),
    Open,
    Failed(Instant),
}

impl Line {
    fn fail(&mut self) -> Stage {
        self.failures += 1;
        std::mem::replace(&mut self.stage, Stage::Failed(Instant::now()))
    }

    /// Nothing stands against making another one.
    fn may_be_tried_again(&self) -> bool {
        matches!(self.stage, Stage::Failed(at) if at.elapsed() >= again_after(self.failures))
    }
}

fn again_after(failures: u32) -> Duration {
    AGAIN.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(AGAIN_MAX)
}

/// What a ticket says of its way. Its prompt's blocks can be taken as long as it is held.
pub(crate) struct Chosen {
    pub(crate) way: TransferPath,
    pub(crate) communicator: Vec<u8>,
    pub(crate) wants_ipc_handle: bool,
    _source: Option<Source>,
    joining: Option<Joining>,
}

/// A link that a ticket names, until it is open. Dropped before it is made, it has failed.
struct Joining {
    ways: Ways,
    prefill: String,
    /// Empty until it is named.
    name: Vec<u8>,
    /// One of [`JOINS_MAX`].
    permit: Option<OwnedSemaphorePermit>,
}

impl Joining {
    /// Of the line, if it still has this name.
    fn line(&self, then: impl FnOnce(&mut Line)) {
        let lines = &mut self.ways.state().lines;
        if let Some(line) = lines.get_mut(&self.prefill).filter(|line| line.communicator == self.name) {
            then(line);
        }
    }

    /// Joins the prefill worker's end, while prompts' blocks come over TCP.
    async fn link(mut self, memory: Arc<dyn KvMemory>) {
        let (inner, name, permit) = (Arc::clone(&self.ways.0), self.name.clone(), self.permit.take());
        let linking = spawn_blocking(move || {
            // The thread may go on after the task that waits for it.
            let _permit = permit;
            memory.join(&name, CommunicatorEnd::Receiver)
        });
        let linked = tokio::select! {
            linked = linking => linked.expect("making a link does not panic"),
            () = inner.shutdown.draining() => return,
        };
        let mut linked = match linked {
            Ok(link) => Some(link),
            Err(error) => return no_link(&self.prefill, &error),
        };
        self.line(|line| {
            if let Some(link) = linked.take() {
                line.stage = Stage::Made(link);
            }
        });
        inner.shutdown.drop_elsewhere(linked);
        inner.changed.notify_waiters();
        // The stream never comes if the other end has failed.
        tokio::select! {
            () = tokio::time::sleep(OPEN_WAIT) => {}
            () = inner.shutdown.draining() => {}
        }
        let mut unopened = None;
        self.line(|line| {
            if matches!(line.stage, Stage::Made(_)) {
                unopened = Some(line.fail());
            }
        });
        inner.shutdown.drop_elsewhere(unopened);
    }
}

impl Drop for Joining {
    fn drop(&mut self) {
        self.line(|line| {
            if matches!(line.stage, Stage::Begun { .. }) {
                line.fail();
            }
        });
        self.ways.0.changed.notify_waiters();
    }
}

fn no_link(prefill: &str, error: &DeviceTransferError) {
    tracing::warn!(%error, prefill, "no link; its prompts' KV comes over TCP");
}

/// What [`Ways::begin`] has found.
enum Next {
    /// Blocks can go over this communicator.
    Linked(Vec<u8>),
    Join(Joining),
    Nothing,
}

/// A ticket's place in [`State::sources`].
struct Source {
    ticket: Ticket,
    ways: Ways,
}

impl Drop for Source {
    fn drop(&mut self) {
        let source = self.ways.state().sources.remove(&self.ticket);
        self.ways.0.shutdown.drop_elsewhere(source);
    }
}

/// What metrics call it.
pub(crate) fn name(way: TransferPath) -> &'static str {
    match way {
        TransferPath::Tcp => "tcp",
        TransferPath::CudaIpc => "cuda_ipc",
        TransferPath::Nccl => "nccl",
    }
}

impl Ways {
    pub(crate) fn new(
        engine: EngineHandle,
        used: bool,
        metrics: Arc<WorkerMetrics>,
        requests: Requests,
        shutdown: Shutdown,
    ) -> Self {
        // Its series are there before the first refusal.
        WriteRefused::REASONS.iter().for_each(|(_, reason)| drop(metrics.refused_writes(reason)));
        let memory = engine.kv_memory().filter(|_| used).cloned();
        let link_devices = memory.as_ref().map_or(0, |memory| memory.nccl_ranks());
        let (state, changed, joins) = (Mutex::default(), Notify::new(), Arc::new(Semaphore::new(JOINS_MAX)));
        Self(Arc::new(Inner { engine, memory, link_devices, state, changed, joins, metrics, requests, shutdown }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }

    /// Tells the engine that the prefill worker has written all of the ticket's blocks.
    pub(crate) async fn confirm(&self, ticket: Ticket) {
        self.0.engine.confirm(ticket).await;
    }

    /// The best way from a prefill worker that is ready now.
    pub(crate) async fn choose(&self, prefill: &str, offered: Option<&v1::TransferCapabilities>, ticket: Ticket) -> Chosen {
        let tcp =
            Chosen { way: TransferPath::Tcp, communicator: Vec::new(), wants_ipc_handle: false, _source: None, joining: None };
        let (Some(memory), Some(offered)) = (&self.0.memory, offered) else { return tcp };
        if offered.cuda_ipc {
            let handle = self.state().handles.get(prefill).cloned();
            let Some(handle) = handle else { return Chosen { wants_ipc_handle: true, ..tcp } };
            if let Some(source) = self.open(memory, prefill, &handle).await {
                self.state().sources.insert(ticket, source);
                return Chosen { way: TransferPath::CudaIpc, _source: Some(Source { ticket, ways: self.clone() }), ..tcp };
            }
        }
        if offered.nccl_ranks == 0 || offered.nccl_ranks != self.0.link_devices {
            return tcp;
        }
        match self.begin(prefill) {
            Next::Linked(communicator) => Chosen { way: TransferPath::Nccl, communicator, ..tcp },
            Next::Nothing => tcp,
            Next::Join(mut joining) => {
                let names = Arc::clone(memory);
                match spawn_blocking(move || names.new_communicator_id()).await.expect("naming does not panic") {
                    Ok(name) => {
                        joining.line(|line| line.communicator = name.clone());
                        joining.name = name.clone();
                        Chosen { communicator: name, joining: Some(joining), ..tcp }
                    }
                    Err(error) => {
                        no_link(prefill, &error);
                        tcp
                    }
                }
            }
        }
    }

    /// What is to be done about a prefill worker's link.
    fn begin(&self, prefill: &str) -> Next {
        let lines = &mut self.state().lines;
        let failures = match lines.get(prefill) {
            Some(Line { communicator, stage: Stage::Open, .. }) => return Next::Linked(communicator.clone()),
            Some(line) if line.may_be_tried_again() => line.failures,
            Some(_) => return Next::Nothing,
            None => 0,
        };
        if lines.len() >= KNOWN_MAX {
            lines.retain(|_, line| !matches!(line.stage, Stage::Failed(_)));
        }
        let permit = Arc::clone(&self.0.joins).try_acquire_owned().ok();
        if lines.len() >= KNOWN_MAX || permit.is_none() {
            return Next::Nothing;
        }
        let stage = Stage::Begun { awaited: false };
        lines.insert(prefill.to_owned(), Line { communicator: Vec::new(), stage, failures });
        Next::Join(Joining { ways: self.clone(), prefill: prefill.to_owned(), name: Vec::new(), permit })
    }

    /// Takes what the `PrefillDone` of a ticket brings for later prompts, and joins the communicator that the ticket named.
    pub(crate) fn landed(&self, chosen: &mut Chosen, prefill: &str, done: &PrefillDone) {
        if chosen.wants_ipc_handle && !done.ipc_handle.is_empty() {
            let handles = &mut self.state().handles;
            if handles.len() >= KNOWN_MAX {
                handles.clear();
            }
            handles.insert(prefill.to_owned(), done.ipc_handle.clone());
        }
        if let (Some(joining), Some(memory)) = (chosen.joining.take(), &self.0.memory) {
            self.0.shutdown.spawn(joining.link(Arc::clone(memory)));
        }
    }

    async fn open(&self, memory: &Arc<dyn KvMemory>, prefill: &str, handle: &[u8]) -> Option<Arc<dyn PeerMemory>> {
        if let Some(open) = self.state().open.get(prefill).and_then(Weak::upgrade) {
            return Some(open);
        }
        if self.state().closed.get(prefill).is_some_and(|at| at.elapsed() < AGAIN_MAX) {
            return None;
        }
        let (memory, handle) = (Arc::clone(memory), handle.to_vec());
        match spawn_blocking(move || memory.open_peer(&handle)).await.expect("opening does not panic") {
            Ok(opened) => {
                let mut state = self.state();
                state.open.retain(|_, open| open.strong_count() > 0);
                state.open.insert(prefill.to_owned(), Arc::downgrade(&opened));
                Some(opened)
            }
            Err(error) => {
                tracing::debug!(%error, prefill, "its memory cannot be opened");
                let closed = &mut self.state().closed;
                if closed.len() >= KNOWN_MAX {
                    closed.clear();
                }
                closed.insert(prefill.to_owned(), Instant::now());
                None
            }
        }
    }

    /// The engine's thread decides about every block.
    pub(crate) fn sink(&self) -> Sink {
        let ways = self.clone();
        Sink::new(move |ticket, piece| {
            let ways = ways.clone();
            async move {
                match piece {
                    Piece::Block { index, payload } => {
                        ways.0.engine.write_block(ticket, index, payload).await.map_err(|why| ways.count(why))
                    }
                    Piece::Ready(ready) => ways.pull(ticket, ready).await,
                }
            }
        })
    }

    fn count(&self, why: WriteRefused) -> Refused {
        if let Some(reason) = why.reason() {
            self.0.metrics.refused_writes(reason).increment(1);
        }
        Refused
    }

    async fn pull(&self, ticket: Ticket, ready: ReadyBlocks) -> Result<(), Refused> {
        let ReadyBlocks { block_indices, source_blocks } = ready;
        let source = self.state().sources.get(&ticket).cloned();
        let Some(source) = source.filter(|_| source_blocks.len() == block_indices.len()) else {
            return Err(self.count(self.0.engine.refuse(ticket, WriteRefused::WrongPath).await));
        };
        let arrival = self.0.engine.begin_write(ticket, block_indices).await.map_err(|why| self.count(why))?;
        self.to_its_end(move || {
            let blocks: Vec<_> = source_blocks.into_iter().map(BlockId).zip(arrival.blocks().iter().copied()).collect();
            let pulled = source.copy(&blocks).inspect_err(|error| tracing::warn!(%error, "blocks were not copied"));
            // The memory may be closed with this, before anybody can see that the blocks are free.
            drop(source);
            pulled.map(|()| arrival.complete()).map_err(|_| Refused)
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
            let mut waits = false;
            loop {
                let changed = ways.0.changed.notified();
                {
                    let mut state = ways.state();
                    let (prefill, line) =
                        state.lines.iter_mut().find(|(_, line)| !name.is_empty() && line.communicator == name)?;
                    match std::mem::replace(&mut line.stage, Stage::Open) {
                        Stage::Made(link) => {
                            let prefill = prefill.clone();
                            drop(state);
                            let open: Box<dyn Receiver> =
                                Box::new(Open { ways: ways.clone(), prefill, communicator: name, link: Some(link) });
                            return Some(open);
                        }
                        // Another stream waits for it.
                        Stage::Begun { awaited: true } if !waits => {
                            line.stage = Stage::Begun { awaited: true };
                            return None;
                        }
                        Stage::Begun { .. } => line.stage = Stage::Begun { awaited: true },
                        Stage::Open => return None,
                        failed @ Stage::Failed(_) => {
                            line.stage = failed;
                            return None;
                        }
                    }
                }
                waits = true;
                tokio::select! {
                    () = changed => {}
                    () = ways.0.shutdown.draining() => return None,
                }
            }
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
    link: Option<Arc<dyn KvCommunicator>>,
}

impl Open {
    /// Of the line that this one is the end of.
    fn line(&self, then: impl FnOnce(&mut Line)) {
        let lines = &mut self.ways.state().lines;
        if let Some(line) = lines.get_mut(&self.prefill).filter(|line| line.communicator == self.communicator) {
            then(line);
        }
    }
}

impl Receiver for Open {
    fn receive(&mut self, ticket: Ticket, block_indices: Vec<u32>) -> BoxFuture<'_, Option<bool>> {
        async move {
            let (link, blocks) = (self.link.clone()?, block_indices.len());
            let arrival = self.ways.0.engine.begin_write(ticket, block_indices).await.map_err(|why| self.ways.count(why));
            let received = self.ways.to_its_end(move || match arrival {
                Ok(arrival) => {
                    let blocks: Vec<_> = arrival.blocks().iter().copied().map(Some).collect();
                    link.receive(&blocks).map(|()| arrival.complete()).map(|()| true)
                }
                Err(Refused) => link.receive(&vec![None; blocks]).map(|()| false),
            });
            let received = received.await?;
            match &received {
                Ok(_) => self.line(|line| line.failures = 0),
                Err(error) => tracing::warn!(%error, prefill = self.prefill, "a link broke"),
            }
            received.ok()
        }
        .boxed()
    }

    fn ended(&self) -> BoxFuture<'static, ()> {
        let requests = self.ways.0.requests.clone();
        async move { requests.drained().await }.boxed()
    }
}

impl Drop for Open {
    /// Whatever ended it: what goes on without it is TCP, and for a while.
    fn drop(&mut self) {
        self.line(|line| drop(line.fail()));
        self.ways.0.shutdown.drop_elsewhere(self.link.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fails_again_and_again_is_tried_ever_more_seldom() {
        let seconds = [1, 2, 3, 8, 9, 10, u32::MAX].map(|failures| again_after(failures).as_secs());
        assert_eq!(seconds, [1, 2, 4, 128, 256, 300, 300]);
        let mut line = Line { communicator: Vec::new(), stage: Stage::Begun { awaited: false }, failures: 1 };
        assert!(!line.may_be_tried_again(), "it is being made");
        line.fail();
        assert!(line.failures == 2 && !line.may_be_tried_again(), "it has only just failed");
        line.stage = Stage::Failed(Instant::now() - Duration::from_secs(3));
        assert!(line.may_be_tried_again());
    }
}
