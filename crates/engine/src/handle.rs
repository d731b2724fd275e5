//! Handles to the thread that owns an engine and its scheduler.
//! Commands are queued while a step runs; those that have arrived by its end are handled before the next step. A job's events go through a
//! channel that always has capacity for them: backpressure pauses a generation while its client's buffer is full, and a prefill sends each
//! of its blocks once. So a slow client delays no other client, loses no event, and uses a bounded amount of memory.

mod block_write;
mod constraints;
mod driver;

use crate::machine::JobId;
use crate::{Engine, EngineInfo, Event, Generate, Prefill, Refusal, SimClock, WriteRefused, ticket};
use bytes::Bytes;
use constraints::Constraints;
use driver::{Accepted, Command, Driver};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tandem_grammar::Vocabulary;
use tandem_kv::{BlockAccess, BlockWrite, HashKey, KvBatch, KvMemory, Load, Snapshot, Ticket};
use tokio::sync::{Notify, broadcast, mpsc, oneshot, watch};
use tokio::time::Instant;

/// The limits of an engine's scheduler.
#[derive(Clone, Copy, Debug)]
pub struct EngineSettings {
    /// Maximum number of tokens in one step: prompt tokens plus one for each decoding sequence.
    pub chunk_budget: u32,
    /// The longest time between two tokens of a running answer in steps that also compute prompts. If it is `None`, the limit is a multiple
    /// of the time of a step without prompts. Prompt tokens get at least half of each step, even if this time is exceeded.
    pub itl_max: Option<Duration>,
    /// Maximum number of sequences in one step.
    pub batch_max: u32,
    /// Maximum number of jobs that wait for their first blocks.
    pub queue_max: u32,
    /// Whether blocks are reused. If false, every prompt is reported with 0 cached tokens.
    pub prefix_caching: bool,
    /// The key of block hashes; the same in the whole cluster.
    pub hash_key: HashKey,
    /// When a job has this many buffered events, backpressure pauses its generation. The generation resumes when half of them are left.
    pub max_buffered_events: u32,
    /// The time limit of a step. If a step takes longer, the engine hangs ([`EngineHandle::hung`]).
    pub step_max: Duration,
}

/// A handle to the thread that owns an engine; cheap to clone. The thread ends when the last handle and job are dropped.
#[derive(Clone)]
pub struct EngineHandle {
    info: Arc<EngineInfo>,
    commands: mpsc::Sender<Command>,
    wake: Arc<Notify>,
    kv_memory: Option<Arc<dyn KvMemory>>,
    load: watch::Receiver<Load>,
    busy_since: watch::Receiver<Option<Instant>>,
    step_max: Duration,
    batch_max: u32,
    chunk_budget: u32,
    resume_below: usize,
    constraints: Constraints,
}

/// One job on the engine. Dropping this value cancels the job at the next step and releases all that the job holds.
pub struct Job {
    id: JobId,
    events: mpsc::Receiver<Event>,
    /// Wakes the engine's thread. Dropped after `events`, because the thread must then see that the job's events are closed.
    _wake: WakeOnDrop,
    engine: EngineHandle,
}

/// Maximum number of commands that are queued for the engine's thread; further senders wait.
const COMMANDS_MAX: usize = 256;

impl EngineHandle {
    /// Starts the thread that owns the engine.
    pub fn start(engine: Box<dyn Engine>, settings: EngineSettings) -> Self {
        let (handle, driver) = Self::new(engine, settings, ticket::from_system(), SimClock::default());
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime without I/O needs nothing from the system");
        std::thread::Builder::new()
            .name("tandem-engine".to_owned())
            .spawn(move || runtime.block_on(driver.run()))
            .expect("the system can start a thread");
        handle
    }

    /// Returns a handle to a simulated engine, and a future that runs the engine instead of a thread. So the engine can run in tokio's paused time:
    /// after each step the future sleeps for the duration that `clock` has accumulated. The future ends when the last handle and job are dropped.
    /// Tickets are derived from `seed`, so that a run can be repeated. They can be predicted, so they protect nothing.
    pub fn simulated(
        engine: Box<dyn Engine>,
        clock: SimClock,
        settings: EngineSettings,
        seed: u64,
    ) -> (Self, impl Future<Output = ()> + Send) {
        let (handle, driver) = Self::new(engine, settings, ticket::from_seed(seed), clock);
        handle.constraints.compute_masks_at_once();
        (handle, driver.run())
    }

    fn new(engine: Box<dyn Engine>, settings: EngineSettings, draw_ticket: ticket::Draw, clock: SimClock) -> (Self, Driver) {
        let (info, kv_memory) = (Arc::new(engine.describe()), engine.kv_memory());
        let (commands, received) = mpsc::channel(COMMANDS_MAX);
        let wake = Arc::new(Notify::new());
        let driver = Driver::new(engine, &settings, draw_ticket, clock, received, Arc::clone(&wake));
        let (load, busy_since) = (driver.load.subscribe(), driver.busy_since.subscribe());
        let EngineSettings { step_max, batch_max, chunk_budget, .. } = settings;
        let resume_below = driver.max_buffered_events / 2;
        let constraints = Constraints::new(Arc::clone(&wake));
        let handle = Self {
            info,
            commands,
            wake,
            kv_memory,
            load,
            busy_since,
            step_max,
            batch_max,
            chunk_budget,
            resume_below,
            constraints,
        };
        (handle, driver)
    }

    /// Returns the properties of the engine's model and KV memory. They never change.
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Returns [`EngineSettings::batch_max`].
    pub fn batch_max(&self) -> u32 {
        self.batch_max
    }

    /// Returns [`EngineSettings::chunk_budget`].
    pub fn chunk_budget(&self) -> u32 {
        self.chunk_budget
    }

    /// Queues a prefill.
    ///
    /// # Errors
    /// Returns a [`Refusal`] if the request can never run on this engine, if the queue is full, or if the engine's thread has ended.
    pub async fn prefill(&self, prefill: Prefill) -> Result<Job, Refusal> {
        self.submit(|reply| Command::Prefill(prefill, reply)).await
    }

    /// Queues a generation.
    ///
    /// # Errors
    /// Returns a [`Refusal`] if the request can never run on this engine, if the queue is full, or if the engine's thread has ended.
    pub async fn generate(&self, mut generate: Generate) -> Result<Job, Refusal> {
        let prepared = match generate.sampling.constraint.take() {
            Some(constraint) => Some(self.constraints.prepare(constraint, &generate).await?),
            None => None,
        };
        self.submit(|reply| Command::Generate(Box::new(generate), prepared, reply)).await
    }

    /// Sets the vocabulary of the model, without which the engine refuses constraints on the output.
    #[must_use]
    pub fn with_vocabulary(mut self, vocabulary: Arc<Vocabulary>) -> Self {
        self.constraints.set_vocabulary(vocabulary);
        self
    }

    async fn submit(&self, command: impl FnOnce(oneshot::Sender<Result<Accepted, Refusal>>) -> Command) -> Result<Job, Refusal> {
        // If this future is dropped, so is the job's receiver. Then `wake` makes the thread check for dropped receivers.
        let wake = WakeOnDrop(Arc::clone(&self.wake));
        let (id, events) = self.ask(command).await.ok_or(Refusal::Gone)??;
        Ok(Job { id, events, _wake: wake, engine: self.clone() })
    }

    /// Writes the prompt's block `block_index`, which has `block_bytes` bytes, under a ticket. Returns when the block is in the engine's memory.
    ///
    /// # Errors
    /// Returns [`WriteRefused`] if the ticket does not allow the write. Most refusals also end the reservation.
    pub async fn write_block(&self, ticket: Ticket, block_index: u32, payload: Bytes) -> Result<(), WriteRefused> {
        let write = |reply| Command::Write { ticket, index: block_index, payload, reply };
        self.ask(write).await.unwrap_or(Err(WriteRefused::EngineEnded))
    }

    /// Ends the ticket's reservation because the ticket was misused. Returns the reason to report: `why`, or that the ticket has no
    /// reservation, or that the engine has ended.
    pub async fn refuse(&self, ticket: Ticket, why: WriteRefused) -> WriteRefused {
        self.ask(|reply| Command::Refuse { ticket, why, reply }).await.unwrap_or(WriteRefused::EngineEnded)
    }

    /// Returns the KV memory for access from other threads; `None` if the engine does not allow this access.
    pub fn kv_memory(&self) -> Option<&Arc<dyn KvMemory>> {
        self.kv_memory.as_ref()
    }

    /// Returns the right to write all of these blocks under a ticket through [`EngineHandle::kv_memory`] while steps run. If one of the blocks may
    /// not be written, none may.
    ///
    /// # Errors
    /// Fails for the same reasons as [`EngineHandle::write_block`].
    pub async fn begin_write(&self, ticket: Ticket, indices: Vec<u32>) -> Result<Box<dyn BlockWrite>, WriteRefused> {
        self.ask(|reply| Command::BeginWrite { ticket, indices, reply }).await.unwrap_or(Err(WriteRefused::EngineEnded))
    }

    /// Reports that the worker that computed the blocks has written all of them. The prompt starts if no block is missing.
    pub async fn confirm(&self, ticket: Ticket) {
        // Sending fails only if the engine's thread has ended, and then the job's events have ended, too.
        let _ = self.commands.send(Command::Confirm(ticket)).await;
    }

    /// Returns the content of the cache, and a receiver of all later changes. Events with ids up to the snapshot's are included in the
    /// snapshot. `None` if the engine's thread has ended.
    pub async fn watch(&self) -> Option<(Snapshot, broadcast::Receiver<Arc<KvBatch>>)> {
        self.ask(Command::Watch).await
    }

    /// Returns the load of the engine after its last step.
    pub fn load(&self) -> Load {
        self.load.borrow().clone()
    }

    /// Resolves when the load satisfies `condition`, or when the engine's thread has ended.
    pub async fn wait_for_load(&self, condition: impl FnMut(&Load) -> bool) {
        // Waiting fails only if the engine's thread has ended. Then the load no longer changes.
        let _ = self.load.clone().wait_for(condition).await;
    }

    /// Resolves when the current step, or the write of one block, has taken longer than `step_max`; immediately if it already has. The time in which
    /// jobs wait for other jobs, for blocks or for their clients is not included, so an idle engine never hangs.
    pub async fn hung(&self) {
        loop {
            let now = Instant::now();
            let by = self.busy_since.borrow().unwrap_or(now) + self.step_max;
            if by <= now {
                return;
            }
            tokio::time::sleep_until(by).await;
        }
    }

    /// Returns when the current step, or the write of one block, began; `None` while the engine is idle.
    pub fn busy_since(&self) -> Option<Instant> {
        *self.busy_since.borrow()
    }

    /// Drops this handle, and waits until the engine's thread has released the engine and its device's memory. All other handles and all jobs
    /// must be dropped, too.
    pub async fn release(self) {
        let mut load = self.load.clone();
        drop(self);
        // The driver drops its fields in the order of their declaration, so the load's sender goes after the engine.
        while load.changed().await.is_ok() {}
    }

    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.ok()?;
        answer.await.ok()
    }
}

impl Job {
    /// Returns the next event; `None` after the last event. This method is cancel-safe.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Polls for the next event of the job. The result is `None` after the last event.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let event = ready!(self.events.poll_recv(context));
        // A paused job gets no new events, so the number of buffered events only decreases, and equals `resume_below` exactly once.
        if self.events.len() == self.engine.resume_below {
            self.engine.wake.notify_one();
        }
        Poll::Ready(event)
    }

    /// Requests these blocks of a prefill, by their indices in the prompt. Each is reported with [`Event::BlocksReady`] as soon as it is computed.
    /// Only the first request of a job has an effect.
    pub async fn send_blocks(&self, block_indices: Vec<u32>, access: BlockAccess) {
        // Sending fails only if the engine's thread has ended, and then the job's events have ended, too.
        let _ = self.engine.commands.send(Command::SendBlocks { job: self.id, indices: block_indices, access }).await;
    }
}

struct WakeOnDrop(Arc<Notify>);

impl Drop for WakeOnDrop {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

#[cfg(test)]
mod tests;
