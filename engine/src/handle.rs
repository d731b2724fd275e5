//! The thread that owns an engine and its step machine, and the handles to it.
//!
//! Commands wait while a step runs; those that have come by its end are taken before the next one. A job's events go through a channel that is
//! bounded by the job itself (its tokens, its blocks), so that a slow listener never holds up the steps of others.

use crate::machine::{Action, JobId, Machine};
use crate::{Engine, EngineInfo, Event, Generate, Prefill, Refusal};
use bytes::Bytes;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tandem_kv::{KvBatch, Load, Snapshot, StepStats};
use tokio::sync::{Notify, broadcast, mpsc, oneshot, watch};
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
}

/// The block was not written: the ticket is unknown or spent, or the block is not one that is missing, or its size is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ticket does not allow this write")]
pub struct WriteRefused;

/// A cheap handle to the thread that owns an engine. The thread ends when the last handle and job are gone.
#[derive(Clone)]
pub struct EngineHandle {
    info: Arc<EngineInfo>,
    commands: mpsc::Sender<Command>,
    wake: Arc<Notify>,
    load: watch::Receiver<Load>,
}

/// One job on the engine. Dropping it cancels the job at the next step and gives back all it holds.
pub struct Job {
    id: JobId,
    events: mpsc::UnboundedReceiver<Event>,
    commands: mpsc::Sender<Command>,
    wake: Arc<Notify>,
}

/// Commands in flight; senders wait beyond that.
const COMMANDS_MAX: usize = 256;
/// Batches a slow watcher may be behind before it has to start again from a snapshot.
const BATCHES_MAX: usize = 1_024;

enum Command {
    Prefill(Prefill, oneshot::Sender<Result<Accepted, Refusal>>),
    Generate(Generate, oneshot::Sender<Result<Accepted, Refusal>>),
    SendBlocks(JobId, Vec<u32>),
    Write { ticket: u64, index: u32, payload: Bytes, reply: oneshot::Sender<Result<(), WriteRefused>> },
    Watch(oneshot::Sender<(Snapshot, broadcast::Receiver<Arc<KvBatch>>)>),
}

type Accepted = (JobId, mpsc::UnboundedReceiver<Event>);

impl EngineHandle {
    /// Starts the thread.
    pub fn start(engine: Box<dyn Engine>, settings: EngineSettings) -> Self {
        let (handle, driving) = Self::driven(engine, settings);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime without I/O needs nothing from the system");
        std::thread::Builder::new()
            .name("tandem-engine".to_owned())
            .spawn(move || runtime.block_on(driving))
            .expect("the system can start a thread");
        handle
    }

    /// What the thread does, for the caller to drive: so simulated engines run under a test's paused time. It ends when the last
    /// handle and job are gone.
    pub fn driven(engine: Box<dyn Engine>, settings: EngineSettings) -> (Self, impl Future<Output = ()> + Send) {
        let (handle, driver) = Self::new(engine, settings);
        (handle, driver.run())
    }

    fn new(engine: Box<dyn Engine>, settings: EngineSettings) -> (Self, Driver) {
        let info = engine.describe();
        // From the system's randomness: the standard library seeds every hasher with it.
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8);
        let machine = Machine::new(info.clone(), settings, seed);
        let (commands, received) = mpsc::channel(COMMANDS_MAX);
        let (load, watched) = watch::channel(machine.load());
        let wake = Arc::new(Notify::new());
        let driver = Driver {
            engine,
            machine,
            commands: received,
            jobs: HashMap::new(),
            next_job: 0,
            wake: Arc::clone(&wake),
            batches: broadcast::Sender::new(BATCHES_MAX),
            load,
            started: Instant::now(),
        };
        (Self { info: Arc::new(info), commands, wake, load: watched }, driver)
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
        Ok(Job { id, events, commands: self.commands.clone(), wake: Arc::clone(&self.wake) })
    }

    /// Writes one block under a ticket; returns when it is in the engine's memory.
    pub async fn write_block(&self, ticket: u64, block_index: u32, payload: Bytes) -> Result<(), WriteRefused> {
        let write = |reply| Command::Write { ticket, index: block_index, payload, reply };
        self.ask(write).await.unwrap_or(Err(WriteRefused))
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

    /// `None` when the engine is gone.
    async fn ask<T>(&self, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        self.commands.send(command(reply)).await.ok()?;
        answer.await.ok()
    }
}

impl Job {
    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// Prefill: tells these blocks as [`Event::Block`] as soon as each is computed. Once a job.
    pub async fn send_blocks(&self, block_indices: Vec<u32>) {
        // The engine being gone shows as the end of the events.
        let _ = self.commands.send(Command::SendBlocks(self.id, block_indices)).await;
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

/// The owner of the engine.
struct Driver {
    engine: Box<dyn Engine>,
    machine: Machine,
    commands: mpsc::Receiver<Command>,
    jobs: HashMap<JobId, mpsc::UnboundedSender<Event>>,
    next_job: JobId,
    wake: Arc<Notify>,
    batches: broadcast::Sender<Arc<KvBatch>>,
    load: watch::Sender<Load>,
    started: Instant,
}

impl Driver {
    async fn run(mut self) {
        loop {
            // Those that are here now: more may come as long as they are answered, and running sequences wait meanwhile.
            for _ in 0..self.commands.len() {
                let Ok(command) = self.commands.try_recv() else { break };
                self.obey(command);
            }
            self.cancel_dropped_jobs();
            let plan = self.machine.plan(self.now());
            self.act();
            let Some(plan) = plan else {
                self.publish(None);
                tokio::select! {
                    command = self.commands.recv() => match command {
                        Some(command) => self.obey(command),
                        None => return,
                    },
                    () = self.wake.notified() => {}
                }
                continue;
            };
            let started = Instant::now();
            let output = self.engine.step(&self.machine.chunks(&plan));
            match output {
                Ok(output) => {
                    if !output.simulated.is_zero() {
                        tokio::time::sleep(output.simulated).await;
                    }
                    let stats = self.machine.complete(&plan, &output, started.elapsed(), self.now());
                    self.act();
                    self.publish(Some(stats));
                }
                Err(error) => {
                    tracing::error!(%error, "a step failed; all requests on this worker end");
                    self.machine.fail();
                    self.act();
                }
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
            Command::Prefill(prefill, reply) => self.accept(reply, |machine, job| machine.prefill(job, prefill, now)),
            Command::Generate(generate, reply) => self.accept(reply, |machine, job| machine.generate(job, generate, now)),
            Command::SendBlocks(job, indices) => self.machine.send_blocks(job, indices),
            Command::Write { ticket, index, payload, reply } => {
                let target = self.machine.write(ticket, index, payload.len(), now);
                if let Ok(block) = target {
                    self.engine.write_block(block, &payload);
                    self.machine.start_landed(now);
                }
                // A sender that has gone does not want to know.
                let _ = reply.send(target.map(drop));
            }
            Command::Watch(reply) => {
                // Everything up to here is in the snapshot, so it goes to the earlier watchers first.
                self.publish(None);
                let _ = reply.send((self.machine.snapshot(), self.batches.subscribe()));
            }
        }
        self.act();
    }

    fn accept(
        &mut self,
        reply: oneshot::Sender<Result<Accepted, Refusal>>,
        submit: impl FnOnce(&mut Machine, JobId) -> Result<(), Refusal>,
    ) {
        let job = self.next_job;
        self.next_job += 1;
        let accepted = submit(&mut self.machine, job).map(|()| {
            let (events, receiver) = mpsc::unbounded_channel();
            self.jobs.insert(job, events);
            (job, receiver)
        });
        // If the caller has gone, so has the receiver, and the job is cancelled as a dropped one.
        let _ = reply.send(accepted);
    }

    fn cancel_dropped_jobs(&mut self) {
        let machine = &mut self.machine;
        self.jobs.retain(|job, events| {
            let wanted = !events.is_closed();
            if !wanted {
                machine.cancel(*job);
            }
            wanted
        });
    }

    fn act(&mut self) {
        for action in self.machine.take_actions() {
            match action {
                Action::Tell(job, event) => self.tell(job, event),
                Action::Copy { from, to } => {
                    let mut payload = vec![0; self.machine.block_bytes()];
                    self.engine.read_block(from, &mut payload);
                    self.engine.write_block(to, &payload);
                }
                Action::Read { job, index, block } => {
                    let mut payload = vec![0; self.machine.block_bytes()];
                    self.engine.read_block(block, &mut payload);
                    self.tell(job, Event::Block { index, payload: payload.into() });
                }
                Action::End(job) => {
                    self.jobs.remove(&job);
                }
            }
        }
    }

    fn tell(&self, job: JobId, event: Event) {
        if let Some(events) = self.jobs.get(&job) {
            // A listener that has gone is noticed before the next step.
            let _ = events.send(event);
        }
    }

    fn publish(&mut self, step: Option<StepStats>) {
        let batch = self.machine.take_batch(step);
        let load_changed = *self.load.borrow() != batch.load;
        if load_changed {
            self.load.send_replace(batch.load.clone());
        }
        if load_changed || step.is_some() || !batch.events.is_empty() || !batch.taken_in.is_empty() {
            // Nobody may be watching.
            let _ = self.batches.send(Arc::new(batch));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sim::{SimEngine, SimSettings};
    use crate::{Sampling, StepOutput};
    use tandem_kv::{BlockId, Change, Namespace};

    const SETTINGS: EngineSettings = EngineSettings { chunk_budget: 64, batch_max: 16, queue_max: 64, prefix_caching: true };

    fn start() -> EngineHandle {
        start_engine(SimEngine::new(SimSettings::default()))
    }

    #[expect(clippy::disallowed_methods, reason = "the test's runtime ends it")]
    fn start_engine(engine: impl Engine) -> EngineHandle {
        let (handle, driving) = EngineHandle::driven(Box::new(engine), SETTINGS);
        tokio::spawn(driving);
        handle
    }

    fn generate(max_tokens: u32) -> Generate {
        Generate {
            request_id: "request".to_owned(),
            namespace: Namespace::new("sim", "", "", ""),
            prompt: (0..100).collect(),
            sampling: Sampling { max_tokens: Some(max_tokens), ..Sampling::default() },
            samples: 1,
            kv: crate::KvSource::Local,
            prompt_logprobs: None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_job_gives_its_blocks_back() {
        let engine = start();
        let mut job = engine.generate(generate(10_000)).await.expect("it fits");
        while !matches!(job.next().await, Some(Event::Token { .. })) {}
        assert!(engine.load().in_use_blocks > 0);
        drop(job);
        engine.wait_for_load(|load| load.in_use_blocks == 0 && load.running_sequences == 0).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_job_that_is_never_held_gives_its_blocks_back() {
        let engine = start();
        let mut submitting = Box::pin(engine.generate(Generate { kv: crate::KvSource::Remote, ..generate(10) }));
        // Asks, and leaves when the engine has answered.
        std::future::poll_fn(|context| std::task::Poll::Ready(submitting.as_mut().poll(context).is_pending())).await;
        engine.wait_for_load(|load| load.in_use_blocks > 0).await;
        drop(submitting);
        let idle = engine.wait_for_load(|load| load.in_use_blocks == 0 && load.waiting_requests == 0);
        tokio::time::timeout(Duration::from_secs(60), idle).await.expect("the blocks are given back");
    }

    #[tokio::test(start_paused = true)]
    async fn events_end_after_the_last_sample() {
        let engine = start();
        let mut job = engine.generate(generate(3)).await.expect("it fits");
        let mut last = None;
        while let Some(event) = job.next().await {
            last = Some(event);
        }
        assert!(matches!(last, Some(Event::Finished { .. })), "{last:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_watcher_sees_every_change_once() {
        let engine = start();
        let (empty, mut first) = engine.watch().await.expect("the engine runs");
        assert_eq!((empty.at_event_id, empty.stored.len()), (0, 0));
        let mut job = engine.generate(generate(40)).await.expect("it fits");
        while job.next().await.is_some() {}
        let (snapshot, _second) = engine.watch().await.expect("the engine runs");
        let (mut ids, mut hashes, mut taken_in) = (Vec::new(), Vec::new(), Vec::new());
        while let Ok(batch) = first.try_recv() {
            taken_in.extend(batch.taken_in.clone());
            for event in &batch.events {
                ids.push(event.event_id);
                if let Change::Stored(chain) = &event.change {
                    hashes.extend(chain.sequence_hashes.clone());
                }
            }
        }
        assert_eq!(taken_in, ["request"]);
        assert_eq!(ids, (1..=snapshot.at_event_id).collect::<Vec<_>>());
        let stored: Vec<_> = snapshot.stored.iter().flat_map(|chain| chain.sequence_hashes.clone()).collect();
        assert_eq!(stored, hashes);
    }

    struct Failing(SimEngine);

    impl Engine for Failing {
        fn describe(&self) -> EngineInfo {
            self.0.describe()
        }
        fn step(&mut self, chunks: &[crate::Chunk<'_>]) -> Result<StepOutput, crate::EngineError> {
            match chunks.iter().any(|chunk| chunk.tokens.contains(&99)) {
                true => Err(crate::EngineError("the device is on fire".into())),
                false => self.0.step(chunks),
            }
        }
        fn read_block(&self, block: BlockId, into: &mut [u8]) {
            self.0.read_block(block, into);
        }
        fn write_block(&mut self, block: BlockId, bytes: &[u8]) {
            self.0.write_block(block, bytes);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_step_ends_its_jobs_and_the_next_ones_run() {
        let engine = start_engine(Failing(SimEngine::new(SimSettings::default())));
        let mut job = engine.generate(generate(3)).await.expect("it fits");
        let mut last = None;
        while let Some(event) = job.next().await {
            last = Some(event);
        }
        assert!(matches!(last, Some(Event::Failed)), "{last:?}");
        let mut job = engine.generate(Generate { prompt: vec![1, 2], ..generate(3) }).await.expect("it fits");
        while let Some(event) = job.next().await {
            last = Some(event);
        }
        assert!(matches!(last, Some(Event::Finished { .. })), "{last:?}");
    }

    #[test]
    fn on_its_own_thread_it_works_outside_any_runtime() {
        let engine =
            EngineHandle::start(Box::new(SimEngine::new(SimSettings { speedup: 1_000.0, ..SimSettings::default() })), SETTINGS);
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a plain runtime");
        let events = runtime.block_on(async {
            let mut job = engine.generate(generate(3)).await.expect("it fits");
            let mut events = 0;
            while job.next().await.is_some() {
                events += 1;
            }
            events
        });
        assert_eq!(events, 6);
    }
}
