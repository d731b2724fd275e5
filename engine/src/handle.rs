//! The thread that owns an engine and its step machine, and the handles to it.
//!
//! Commands wait while a step runs; those that have come by its end are taken before the next one. A job's events go through a channel in
//! which there is always room for them: a generation whose listener is behind pauses before its next token, and a prefill tells each of
//! its blocks once, all of which it holds. So a slow listener holds up nobody else, loses nothing, and costs a bounded memory.

mod block_write;

use crate::machine::{Action, JobId, Machine};
use crate::sim::SimClock;
use crate::{Engine, EngineError, EngineInfo, Event, Generate, Prefill, Refusal, WriteRefused, ticket};
use block_write::{EndedWrite, EndedWrites, ReservedWrite};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tandem_kv::{BlockAccess, BlockWrite, HashKey, KvBatch, KvMemory, Load, Snapshot, StepStats, Ticket};
use tokio::sync::{Notify, broadcast, mpsc, mpsc::error::TrySendError, oneshot, watch};
use tokio::time::Instant;

/// How a worker's steps are made.
#[derive(Clone, Copy, Debug)]
pub struct EngineSettings {
    /// Tokens computed in one step.
    pub chunk_budget: u32,
    /// Sequences in one step.
    pub batch_max: u32,
    /// Jobs that wait for blocks.
    pub queue_max: u32,
    /// Off: nothing is reused and 0 is reported.
    pub prefix_caching: bool,
    /// The key of block hashes; the same in the whole cluster.
    pub hash_key: HashKey,
    /// Events that a generation's listener may be behind; beyond it the generation pauses until half of them have been heard.
    pub unheard_max: u32,
    /// An engine that is at one step for so long hangs ([`EngineHandle::hung`]).
    pub step_max: Duration,
}

/// A cheap handle to the thread that owns an engine. The thread ends when the last handle and job are gone.
#[derive(Clone)]
pub struct EngineHandle {
    info: Arc<EngineInfo>,
    commands: mpsc::Sender<Command>,
    wake: Arc<Notify>,
    kv_memory: Option<Arc<dyn KvMemory>>,
    load: watch::Receiver<Load>,
    at_work: watch::Receiver<Option<Instant>>,
    step_max: Duration,
    go_on_at: usize,
}

/// One job on the engine. Dropping it cancels the job at the next step and gives back all it holds.
pub struct Job {
    id: JobId,
    events: mpsc::Receiver<Event>,
    /// Left in the channel when a paused job may go on.
    go_on_at: usize,
    commands: mpsc::Sender<Command>,
    wake: Arc<Notify>,
}

/// Commands in flight; senders wait beyond that.
const COMMANDS_MAX: usize = 256;
/// `Scheduled` or `Reserved`, `Started`, `PromptLogprobs`, `Computed`, and a last word.
const ONCE_A_JOB: usize = 5;
/// Batches a slow watcher may be behind before it has to start again from a snapshot.
const BATCHES_MAX: usize = 1_024;

enum Command {
    Prefill(Prefill, oneshot::Sender<Result<Accepted, Refusal>>),
    Generate(Generate, oneshot::Sender<Result<Accepted, Refusal>>),
    SendBlocks { job: JobId, indices: Vec<u32>, access: BlockAccess },
    Write { ticket: Ticket, index: u32, payload: Bytes, reply: oneshot::Sender<Result<(), WriteRefused>> },
    BeginWrite { ticket: Ticket, indices: Vec<u32>, reply: oneshot::Sender<Result<Box<dyn BlockWrite>, WriteRefused>> },
    Refuse { ticket: Ticket, why: WriteRefused, reply: oneshot::Sender<WriteRefused> },
    Confirm(Ticket),
    Watch(oneshot::Sender<(Snapshot, broadcast::Receiver<Arc<KvBatch>>)>),
}

type Accepted = (JobId, mpsc::Receiver<Event>);

impl EngineHandle {
    /// Starts the thread.
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

    /// Returns a handle to a simulated engine, and the future that runs it in place of a thread, so that its time can be tokio's paused
    /// time: after each step the future sleeps for the time on `clock`. The future ends when the last handle and job are dropped. Tickets
    /// are drawn from `seed`: a run can be repeated, and its tickets can be predicted.
    pub fn simulated(
        engine: Box<dyn Engine>,
        clock: SimClock,
        settings: EngineSettings,
        seed: u64,
    ) -> (Self, impl Future<Output = ()> + Send) {
        let (handle, driver) = Self::new(engine, settings, ticket::from_seed(seed), clock);
        (handle, driver.run())
    }

    fn new(engine: Box<dyn Engine>, settings: EngineSettings, draw_ticket: ticket::Draw, sim_clock: SimClock) -> (Self, Driver) {
        let (info, kv_memory) = (engine.describe(), engine.kv_memory());
        let machine = Machine::new(info.clone(), settings, draw_ticket);
        let (commands, received) = mpsc::channel(COMMANDS_MAX);
        let (load, watched) = watch::channel(machine.load());
        let (at_work, working) = watch::channel(None);
        let wake = Arc::new(Notify::new());
        let driver = Driver {
            engine,
            machine,
            commands: received,
            jobs: BTreeMap::new(),
            unheard_max: (settings.unheard_max as usize).max(1),
            next_job: 0,
            wake: Arc::clone(&wake),
            ended_writes: EndedWrites::default(),
            batches: broadcast::Sender::new(BATCHES_MAX),
            load,
            at_work,
            started: Instant::now(),
            sim_clock,
            is_lost: false,
        };
        let (info, go_on_at) = (Arc::new(info), driver.unheard_max / 2);
        let (load, at_work, step_max) = (watched, working, settings.step_max);
        (Self { info, commands, wake, kv_memory, load, at_work, step_max, go_on_at }, driver)
    }

    /// What the engine is.
    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    /// Queues a prefill.
    pub async fn prefill(&self, prefill: Prefill) -> Result<Job, Refusal> {
        self.submit(|reply| Command::Prefill(prefill, reply)).await
    }

    /// Queues a generation.
    pub async fn generate(&self, generate: Generate) -> Result<Job, Refusal> {
        self.submit(|reply| Command::Generate(generate, reply)).await
    }

    async fn submit(&self, command: impl FnOnce(oneshot::Sender<Result<Accepted, Refusal>>) -> Command) -> Result<Job, Refusal> {
        // Whoever stops waiting for the answer drops a job that it never held: the thread must look then too.
        let _wake = WakeOnDrop(&self.wake);
        let (id, events) = self.ask(command).await.ok_or(Refusal::Gone)??;
        Ok(Job { id, events, go_on_at: self.go_on_at, commands: self.commands.clone(), wake: Arc::clone(&self.wake) })
    }

    /// Writes one block under a ticket; returns when it is in the KV memory.
    ///
    /// # Errors
    ///
    /// The ticket does not allow it, and may be spent by that; see [`WriteRefused`].
    pub async fn write_block(&self, ticket: Ticket, block_index: u32, payload: Bytes) -> Result<(), WriteRefused> {
        let write = |reply| Command::Write { ticket, index: block_index, payload, reply };
        self.ask(write).await.unwrap_or(Err(WriteRefused::EngineGone))
    }

    /// Ends the ticket's reservation because of a write that does not even name a block to write. Returns the reason to report.
    pub async fn refuse(&self, ticket: Ticket, why: WriteRefused) -> WriteRefused {
        self.ask(|reply| Command::Refuse { ticket, why, reply }).await.unwrap_or(WriteRefused::EngineGone)
    }

    /// Returns the KV memory for transfers that run beside the steps; `None`: blocks pass through the host.
    pub fn kv_memory(&self) -> Option<&Arc<dyn KvMemory>> {
        self.kv_memory.as_ref()
    }

    /// Returns the right to write blocks under a ticket while steps run, by way of [`EngineHandle::kv_memory`]: all of them, or none.
    ///
    /// # Errors
    ///
    /// As for [`EngineHandle::write_block`].
    pub async fn begin_write(&self, ticket: Ticket, indices: Vec<u32>) -> Result<Box<dyn BlockWrite>, WriteRefused> {
        self.ask(|reply| Command::BeginWrite { ticket, indices, reply }).await.unwrap_or(Err(WriteRefused::EngineGone))
    }

    /// Confirms that the worker which computed the blocks has written them all: the prompt starts if none is missing.
    pub async fn confirm(&self, ticket: Ticket) {
        // The engine being gone shows as the end of the events.
        let _ = self.commands.send(Command::Confirm(ticket)).await;
    }

    /// The cache as it is, and every batch after it: a batch's events with ids up to the snapshot's are in the snapshot.
    /// `None` when the engine is gone.
    pub async fn watch(&self) -> Option<(Snapshot, broadcast::Receiver<Arc<KvBatch>>)> {
        self.ask(Command::Watch).await
    }

    /// The load as of the last step.
    pub fn load(&self) -> Load {
        self.load.borrow().clone()
    }

    /// Resolves when the load satisfies `condition`.
    pub async fn wait_for_load(&self, condition: impl FnMut(&Load) -> bool) {
        // The engine being gone is as idle as it gets.
        let _ = self.load.clone().wait_for(condition).await;
    }

    /// Resolves when the engine has been at one step (or at one block that is written) for longer than it may, at once if it is so now.
    /// Jobs that wait for others, for blocks or for their own listeners do not make it hang, nor does having nothing to do.
    pub async fn hung(&self) {
        loop {
            let now = Instant::now();
            let by = self.at_work.borrow().unwrap_or(now) + self.step_max;
            if by <= now {
                return;
            }
            tokio::time::sleep_until(by).await;
        }
    }

    /// `None` when the engine is gone.
    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.ok()?;
        answer.await.ok()
    }
}

impl Job {
    /// The next event; `None` after the last. Cancel-safe.
    pub async fn next(&mut self) -> Option<Event> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// Polls for the next event, as [`Job::next`] does.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let event = ready!(self.events.poll_recv(context));
        // While it is paused nothing comes after what is here: it passes this number, one by one.
        if self.events.len() == self.go_on_at {
            self.wake.notify_one();
        }
        Poll::Ready(event)
    }

    /// Prefill: reports these blocks with [`Event::BlocksReady`] as soon as they are computed. To be called once per job.
    pub async fn send_blocks(&self, block_indices: Vec<u32>, access: BlockAccess) {
        // If the engine has ended, so have the events.
        let _ = self.commands.send(Command::SendBlocks { job: self.id, indices: block_indices, access }).await;
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.events.close();
        self.wake.notify_one();
    }
}

struct WakeOnDrop<'a>(&'a Notify);

impl Drop for WakeOnDrop<'_> {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

/// Who hears a job's events.
struct Listener {
    events: mpsc::Sender<Event>,
    /// What it may be behind. Prefills never wait for it: their blocks are held, computed or not.
    unheard_max: usize,
    /// The job waits for it.
    behind: bool,
}

/// The owner of the engine.
struct Driver {
    engine: Box<dyn Engine>,
    machine: Machine,
    commands: mpsc::Receiver<Command>,
    /// In their order: what is given back by many at a time is given back in the same order each time.
    jobs: BTreeMap<JobId, Listener>,
    unheard_max: usize,
    next_job: JobId,
    wake: Arc<Notify>,
    ended_writes: EndedWrites,
    batches: broadcast::Sender<Arc<KvBatch>>,
    load: watch::Sender<Load>,
    /// Since when it has been at what it does now; `None` while it waits for something to do.
    at_work: watch::Sender<Option<Instant>>,
    started: Instant,
    sim_clock: SimClock,
    /// The device has failed for good.
    is_lost: bool,
}

impl Driver {
    async fn run(mut self) {
        loop {
            self.at_work.send_replace(Some(Instant::now()));
            // Those that are here now: more may come as long as they are answered, and running sequences wait meanwhile.
            for _ in 0..self.commands.len() {
                let Ok(command) = self.commands.try_recv() else { break };
                self.obey(command);
            }
            self.end_writes();
            self.look_after_listeners();
            // One look at the clock: what is not yet due for the plan is due after it.
            let now = self.now();
            let plan = self.machine.plan(now);
            let went_well = self.act();
            if self.is_lost {
                return;
            }
            if !went_well {
                // Whose chunks were planned have ended.
                continue;
            }
            let Some(plan) = plan else {
                self.publish(None);
                self.at_work.send_replace(None);
                let deadline = self.machine.next_deadline(now).map(|deadline| self.started + deadline);
                tokio::select! {
                    biased;
                    command = self.commands.recv() => {
                        let Some(command) = command else { return };
                        self.at_work.send_replace(Some(Instant::now()));
                        self.obey(command);
                    }
                    () = self.wake.notified() => {}
                    () = tokio::time::sleep_until(deadline.unwrap_or(self.started)), if deadline.is_some() => {}
                }
                continue;
            };
            let started = Instant::now();
            match self.engine.step(&self.machine.chunks(&plan)) {
                Ok(output) => {
                    if let Some(simulated) = self.sim_clock.take() {
                        tokio::time::sleep(simulated).await;
                    }
                    let stats = self.machine.complete(&plan, output, started.elapsed(), self.now());
                    self.act();
                    self.publish(Some(stats));
                }
                Err(error) => {
                    self.fail(&error);
                    self.act();
                }
            }
            if self.is_lost {
                return;
            }
            // Others on this runtime get their turn between steps.
            tokio::task::yield_now().await;
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn obey(&mut self, command: Command) {
        let now = self.now();
        match command {
            Command::Prefill(prefill, reply) => {
                let blocks = prefill.prompt.len().div_ceil(self.machine.info().block_size as usize);
                self.accept(reply, blocks, usize::MAX, |machine, job| machine.prefill(job, prefill, now));
            }
            Command::Generate(generate, reply) => {
                // The step in which it comes to be too far behind brings each sample one more, and each has an end.
                let samples = (generate.samples as usize).max(generate.generated.len());
                let room = self.unheard_max + 2 * samples;
                self.accept(reply, room, self.unheard_max, |machine, job| machine.generate(job, generate, now));
            }
            Command::SendBlocks { job, indices, access } => self.machine.send_blocks(job, indices, access),
            Command::BeginWrite { ticket, indices, reply } => {
                let begun = self.machine.begin_write(ticket, &indices, now);
                let (ended, wake) = (self.ended_writes.clone(), Arc::clone(&self.wake));
                // If the sender has stopped waiting, the write is dropped, and so ended.
                let _ = reply.send(begun.map(|blocks| Box::new(ReservedWrite::new(ticket, indices, blocks, ended, wake)) as _));
            }
            Command::Refuse { ticket, why, reply } => {
                // A client that has left no longer has a live ticket: blocks that come late for it are no attack.
                self.look_after_listeners();
                // A sender that has gone does not want to know.
                let _ = reply.send(self.machine.refuse(ticket, why));
            }
            Command::Confirm(ticket) => {
                self.end_writes();
                self.machine.confirm(ticket, now);
            }
            Command::Write { ticket, index, payload, reply } => {
                let target = self.machine.write(ticket, index, payload.len(), now);
                let written = target.and_then(|block| match self.engine.write_block(block, &payload) {
                    Ok(()) => Ok(()),
                    Err(error) => {
                        self.fail(&error);
                        Err(WriteRefused::EngineGone)
                    }
                });
                // A sender that has gone does not want to know.
                let _ = reply.send(written);
            }
            Command::Watch(reply) => {
                // Everything up to here is in the snapshot, so it goes to the earlier watchers first.
                self.publish(None);
                let _ = reply.send((self.machine.snapshot(), self.batches.subscribe()));
            }
        }
        self.act();
    }

    /// `room` is for events that come more than once a job.
    fn accept(
        &mut self,
        reply: oneshot::Sender<Result<Accepted, Refusal>>,
        room: usize,
        unheard_max: usize,
        submit: impl FnOnce(&mut Machine, JobId) -> Result<(), Refusal>,
    ) {
        let job = self.next_job;
        self.next_job += 1;
        let accepted = submit(&mut self.machine, job).map(|()| {
            let (events, receiver) = mpsc::channel(room + ONCE_A_JOB);
            self.jobs.insert(job, Listener { events, unheard_max, behind: false });
            (job, receiver)
        });
        // If the caller has gone, so has the receiver, and the job is cancelled as a dropped one.
        let _ = reply.send(accepted);
    }

    fn end_writes(&mut self) {
        for EndedWrite { ticket, indices, complete } in self.ended_writes.take() {
            self.machine.end_write(ticket, &indices, complete);
        }
    }

    /// Jobs that nobody listens to any more are cancelled; those whose listeners are behind pause, and go on when these have caught up.
    fn look_after_listeners(&mut self) {
        let machine = &mut self.machine;
        self.jobs.retain(|job, Listener { events, unheard_max, behind }| {
            if events.is_closed() {
                machine.cancel(*job);
                return false;
            }
            let unheard = events.max_capacity() - events.capacity();
            let was_behind = std::mem::replace(behind, unheard > if *behind { *unheard_max / 2 } else { *unheard_max - 1 });
            if *behind != was_behind {
                machine.pause(*job, *behind);
            }
            true
        });
    }

    /// The device is not what it was: nothing that runs on it can go on.
    fn fail(&mut self, error: &EngineError) {
        tracing::error!(%error, "the engine failed; all requests on this worker end");
        self.is_lost |= matches!(error, EngineError::Lost(_));
        self.machine.fail();
    }

    /// False when the device has failed at it: then all jobs have ended.
    fn act(&mut self) -> bool {
        let mut broken = None;
        for action in self.machine.take_actions() {
            match action {
                Action::Tell(job, event) => self.tell(job, event),
                Action::Copy { from, to } => broken = self.engine.copy_block(from, to).err().or(broken),
                Action::ReadBlocks(job, mut blocks) => {
                    let read = blocks.iter_mut().try_for_each(|ready| {
                        ready.content = vec![0; self.machine.info().block_bytes];
                        self.engine.read_block(ready.block, &mut ready.content)
                    });
                    match read {
                        Ok(()) => self.tell(job, Event::BlocksReady(blocks)),
                        Err(error) => broken = Some(error),
                    }
                }
                Action::End(job) => {
                    self.jobs.remove(&job);
                }
            }
        }
        let Some(error) = broken else { return true };
        self.fail(&error);
        // Only last words.
        self.act();
        false
    }

    fn tell(&self, job: JobId, event: Event) {
        if let Some(Listener { events, .. }) = self.jobs.get(&job) {
            let told = events.try_send(event);
            // A listener that has gone is noticed before the next step.
            assert!(!matches!(told, Err(TrySendError::Full(_))), "a job's channel has room for all its events");
        }
    }

    fn publish(&mut self, step: Option<StepStats>) {
        let batch = self.machine.take_batch(step);
        let load_changed = *self.load.borrow() != batch.load;
        if load_changed {
            self.load.send_replace(batch.load.clone());
        }
        if load_changed || step.is_some() || !batch.events.is_empty() || !batch.included_request_ids.is_empty() {
            // Nobody may be watching.
            let _ = self.batches.send(Arc::new(batch));
        }
    }
}

#[cfg(test)]
mod tests;
