//! The loop of an engine's thread: it handles commands, runs steps, and sends events.

use super::{
    EngineSettings,
    block_write::{EndedWrites, ReservedWrite},
};
use crate::machine::{Action, JobId, Machine};
use crate::sampling::Prepared;
use crate::{Engine, EngineError, Event, Generate, Prefill, Refusal, SimClock, WriteRefused, ticket};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tandem_kv::{BlockAccess, BlockWrite, KvBatch, Load, Snapshot, StepStats, Ticket};
use tokio::sync::{Notify, broadcast, mpsc, mpsc::error::TrySendError, oneshot, watch};
use tokio::time::Instant;

/// The number of a job's events that occur at most once: `Scheduled` or `Reserved`, `Started`, `PromptLogprobs`, `Computed`, and the last event.
const SINGLE_EVENTS: usize = 5;
/// A slow subscriber may lag behind by at most this many batches of KV events. A subscriber that lags further has to start again from a snapshot.
const BATCHES_MAX: usize = 1_024;
/// Minimum time between two checks of the invariants.
const AUDIT_INTERVAL: Duration = Duration::from_secs(10);

pub(super) enum Command {
    Prefill(Prefill, oneshot::Sender<Result<Accepted, Refusal>>),
    Generate(Box<Generate>, Option<Arc<Prepared>>, oneshot::Sender<Result<Accepted, Refusal>>),
    SendBlocks { job: JobId, indices: Vec<u32>, access: BlockAccess },
    Write { ticket: Ticket, index: u32, payload: Bytes, reply: oneshot::Sender<Result<(), WriteRefused>> },
    BeginWrite { ticket: Ticket, indices: Vec<u32>, reply: oneshot::Sender<Result<Box<dyn BlockWrite>, WriteRefused>> },
    Refuse { ticket: Ticket, why: WriteRefused, reply: oneshot::Sender<WriteRefused> },
    Confirm(Ticket),
    Watch(oneshot::Sender<(Snapshot, broadcast::Receiver<Arc<KvBatch>>)>),
}

pub(super) type Accepted = (JobId, mpsc::Receiver<Event>);

struct Subscriber {
    events: mpsc::Sender<Event>,
    /// The number of buffered events at which the job pauses. A prefill never pauses: it holds its blocks whether they were sent or not, so
    /// a pause would not save memory.
    max_buffered_events: usize,
    paused: bool,
}

pub(super) struct Driver {
    /// The first field: it is dropped before the senders, whose receivers then know that the engine is released.
    engine: Box<dyn Engine>,
    machine: Machine,
    commands: mpsc::Receiver<Command>,
    /// Jobs are sorted by id, so that the blocks of several cancelled jobs are always released in the same order.
    jobs: BTreeMap<JobId, Subscriber>,
    pub max_buffered_events: usize,
    next_job: JobId,
    wake: Arc<Notify>,
    ended_writes: EndedWrites,
    batches: broadcast::Sender<Arc<KvBatch>>,
    pub load: watch::Sender<Load>,
    /// The time at which the current step or command began; `None` while the engine is idle.
    pub busy_since: watch::Sender<Option<Instant>>,
    started: Instant,
    sim_clock: SimClock,
    last_audit: Option<Duration>,
    is_lost: bool,
}

impl Driver {
    pub fn new(
        engine: Box<dyn Engine>,
        settings: &EngineSettings,
        draw_ticket: ticket::Draw,
        sim_clock: SimClock,
        commands: mpsc::Receiver<Command>,
        wake: Arc<Notify>,
    ) -> Self {
        let machine = Machine::new(engine.describe(), *settings, draw_ticket);
        Self {
            engine,
            load: watch::Sender::new(machine.load()),
            machine,
            commands,
            jobs: BTreeMap::new(),
            max_buffered_events: (settings.max_buffered_events as usize).max(1),
            next_job: 0,
            wake,
            ended_writes: EndedWrites::default(),
            batches: broadcast::Sender::new(BATCHES_MAX),
            busy_since: watch::Sender::new(None),
            started: Instant::now(),
            sim_clock,
            last_audit: None,
            is_lost: false,
        }
    }

    /// Runs until all handles and jobs are dropped, or the device is lost.
    pub async fn run(mut self) {
        loop {
            self.busy_since.send_replace(Some(Instant::now()));
            // Only the commands that are queued now are handled. Others may arrive meanwhile, and running sequences must not wait for them.
            for _ in 0..self.commands.len() {
                let Ok(command) = self.commands.try_recv() else { break };
                self.handle_command(command);
            }
            self.end_writes();
            self.update_backpressure();
            // The clock is read only once, so that the plan and the wait for a deadline use the same time.
            let now = self.now();
            let plan = self.machine.plan(now);
            let succeeded = self.run_actions();
            if self.is_lost {
                return;
            }
            if !succeeded {
                // This plan contains sequences that have ended, so it is not executed.
                continue;
            }
            let Some(plan) = plan else {
                self.audit(now);
                self.publish(None);
                self.busy_since.send_replace(None);
                let deadline = self.machine.next_deadline(now).map(|deadline| self.started + deadline);
                tokio::select! {
                    biased;
                    command = self.commands.recv() => {
                        let Some(command) = command else { return };
                        self.busy_since.send_replace(Some(Instant::now()));
                        self.handle_command(command);
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
                    self.run_actions();
                    self.publish(Some(stats));
                }
                Err(error) => {
                    self.fail(&error);
                    self.run_actions();
                }
            }
            if self.is_lost {
                return;
            }
            // Other tasks of a simulation's runtime must be able to run between two steps.
            tokio::task::yield_now().await;
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn handle_command(&mut self, command: Command) {
        let now = self.now();
        match command {
            Command::Prefill(prefill, reply) => {
                let blocks = prefill.prompt.len().div_ceil(self.machine.info().block_size as usize);
                self.accept(reply, blocks, usize::MAX, |machine, job| machine.prefill(job, prefill, now));
            }
            Command::Generate(generate, prepared, reply) => {
                // Each sample needs capacity for two more events: one more token in the step that fills the buffer, and its last event.
                let samples = (generate.samples as usize).max(generate.generated.len());
                let (max, capacity) = (self.max_buffered_events, self.max_buffered_events + 2 * samples);
                self.accept(reply, capacity, max, |machine, job| machine.generate_constrained(job, *generate, prepared, now));
            }
            Command::SendBlocks { job, indices, access } => self.machine.send_blocks(job, indices, access),
            Command::BeginWrite { ticket, indices, reply } => {
                let begun = self.machine.begin_write(ticket, &indices, now);
                let (ended, wake) = (self.ended_writes.clone(), Arc::clone(&self.wake));
                let write = |blocks| ReservedWrite { ticket, indices, blocks, complete: false, ended, wake };
                // If the caller no longer waits, the write is dropped with the reply, which ends the write.
                let _ = reply.send(begun.map(|blocks| Box::new(write(blocks)) as _));
            }
            Command::Refuse { ticket, why, reply } => {
                // Jobs whose clients have disconnected are cancelled first, because blocks that arrive late for a cancelled job are not
                // misuse.
                self.update_backpressure();
                let _ = reply.send(self.machine.refuse(ticket, why));
            }
            Command::Confirm(ticket) => {
                self.end_writes();
                self.machine.confirm(ticket, now);
            }
            Command::Write { ticket, index, payload, reply } => {
                let target = self.machine.write(ticket, index, payload.len(), now);
                let written = target.and_then(|block| {
                    self.engine.write_block(block, &payload).map_err(|error| {
                        self.fail(&error);
                        WriteRefused::EngineEnded
                    })
                });
                let _ = reply.send(written);
            }
            Command::Watch(reply) => {
                // The snapshot includes all changes up to now, so earlier subscribers must receive these changes first.
                self.publish(None);
                let _ = reply.send((self.machine.snapshot(), self.batches.subscribe()));
            }
        }
        self.run_actions();
    }

    /// Submits a job. `capacity` is the number of buffered events besides [`SINGLE_EVENTS`].
    fn accept(
        &mut self,
        reply: oneshot::Sender<Result<Accepted, Refusal>>,
        capacity: usize,
        max_buffered_events: usize,
        submit: impl FnOnce(&mut Machine, JobId) -> Result<(), Refusal>,
    ) {
        let job = self.next_job;
        self.next_job += 1;
        let accepted = submit(&mut self.machine, job).map(|()| {
            let (events, receiver) = mpsc::channel(capacity + SINGLE_EVENTS);
            self.jobs.insert(job, Subscriber { events, max_buffered_events, paused: false });
            (job, receiver)
        });
        // If the caller no longer waits, the job's receiver is dropped with the reply, which cancels the job.
        let _ = reply.send(accepted);
    }

    fn end_writes(&mut self) {
        self.ended_writes.take().into_iter().for_each(|ended| self.machine.end_write(ended));
    }

    /// Cancels jobs that were dropped, pauses those whose event buffers are full, and resumes those whose buffers are half empty.
    fn update_backpressure(&mut self) {
        let machine = &mut self.machine;
        self.jobs.retain(|job, Subscriber { events, max_buffered_events, paused }| {
            if events.is_closed() {
                machine.cancel(*job);
                return false;
            }
            let buffered = events.max_capacity() - events.capacity();
            let limit = if *paused { *max_buffered_events / 2 } else { *max_buffered_events - 1 };
            let was_paused = std::mem::replace(paused, buffered > limit);
            if *paused != was_paused {
                machine.set_paused(*job, *paused);
            }
            true
        });
    }

    /// Ends all jobs, because the content of the device's memory is unknown after a failure.
    fn fail(&mut self, error: &EngineError) {
        tracing::error!(%error, "the engine failed; all requests on this worker are aborted");
        self.is_lost |= matches!(error, EngineError::Lost(_));
        self.machine.fail();
    }

    fn run_actions(&mut self) -> bool {
        let mut failure = None;
        for action in self.machine.take_actions() {
            match action {
                Action::Emit(job, event) => self.emit(job, event),
                Action::Copy { from, to } => failure = self.engine.copy_block(from, to).err().or(failure),
                Action::ReadBlocks(job, mut blocks) => {
                    let read = blocks.iter_mut().try_for_each(|ready| {
                        ready.content = vec![0; self.machine.info().block_bytes];
                        self.engine.read_block(ready.block, &mut ready.content)
                    });
                    match read {
                        Ok(()) => self.emit(job, Event::BlocksReady(blocks)),
                        Err(error) => failure = Some(error),
                    }
                }
                Action::End(job) => {
                    self.jobs.remove(&job);
                }
            }
        }
        let Some(error) = failure else { return true };
        self.fail(&error);
        // `Machine::fail` has added actions that only send the last events of the jobs.
        self.run_actions();
        false
    }

    fn emit(&self, job: JobId, event: Event) {
        if let Some(Subscriber { events, .. }) = self.jobs.get(&job) {
            let sent = events.try_send(event);
            // A closed channel is not an error: `update_backpressure` cancels the job before the next step.
            assert!(!matches!(sent, Err(TrySendError::Full(_))), "a job's channel has capacity for all its events");
        }
    }

    fn audit(&mut self, now: Duration) {
        if self.last_audit.is_none_or(|last| now - last >= AUDIT_INTERVAL) {
            self.last_audit = Some(now);
            self.machine.audit();
        }
    }

    fn publish(&mut self, step: Option<StepStats>) {
        let mut batch = self.machine.take_batch(step);
        batch.load.refused_graphs = self.engine.refused_graphs();
        let load_changed = *self.load.borrow() != batch.load;
        if load_changed {
            self.load.send_replace(batch.load.clone());
        }
        if load_changed || step.is_some() || !batch.events.is_empty() || !batch.included_request_ids.is_empty() {
            // Publishing fails only if there is no subscriber.
            let _ = self.batches.send(Arc::new(batch));
        }
    }
}
