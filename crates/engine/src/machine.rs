//! The scheduler. It decides which chunks form a step, by admission, chunked prefill, continuous batching and preemption. It is a state
//! machine without I/O or clocks.
//!
//! [`Machine::plan`] returns the chunks of the next step, and [`Machine::complete`] applies the step's output. Between these two calls no
//! other method may be called. Blocks belong to sequences: however a sequence ends, it releases its blocks. Sequences of the roles
//! `Prefill` and `Prompt` compute all tokens of a prompt but the last. Sequences of the role `Sample` compute the last token and the
//! generated ones.

mod admission;
mod budget;
mod fair;
mod forking;
mod preemption;
mod rates;
mod receiving;
mod sending;
mod sequence;
#[cfg(test)]
mod tests;
mod waiting;

use crate::sampling::{NO_TOKEN, SampledToken, Sampler, constraint_refusal, logprobs};
use crate::{Chunk, EngineInfo, EngineSettings, Event, FinishReason, Refusal, StepOutput, ticket};
use budget::ShortSteps;
use fair::{RoundRobin, fair_order};
use rates::Rates;
pub(crate) use receiving::EndedWrite;
use receiving::{EndedReservations, release};
use sending::report_ready_blocks;
pub(crate) use sequence::JobId;
use sequence::{Role, Sample, Sequence};
use std::collections::{BTreeMap, HashSet};
use std::time::Duration;
use tandem_kv::{BlockId, CacheSettings, KvBatch, Load, PrefixCache, ReadyBlock, StepStats, Violation, ensure};
use waiting::Waiting;

/// An action that the owner of the engine must carry out for the machine. Actions are carried out in order, before the next step and before
/// the next write to a reservation.
#[derive(Debug)]
pub(crate) enum Action {
    /// Send the event to the job.
    Emit(JobId, Event),
    /// Copy a block's KV inside the engine.
    Copy { from: BlockId, to: BlockId },
    /// Read the content of blocks and send them to a job as [`Event::BlocksReady`].
    ReadBlocks(JobId, Vec<ReadyBlock>),
    /// Close a job: its last event has been sent.
    End(JobId),
}

#[derive(Debug)]
pub(crate) struct Plan {
    chunks: Vec<PlannedChunk>,
}

#[derive(Clone, Copy, Debug)]
struct PlannedChunk {
    sequence: usize,
    /// The number of tokens to compute. The chunk begins at the first token of the sequence that is not computed yet.
    len: usize,
}

pub(crate) struct Machine {
    info: EngineInfo,
    settings: EngineSettings,
    cache: PrefixCache,
    /// Sequences that have no blocks: new ones and preempted ones.
    waiting: Waiting,
    /// Sequences whose blocks are reserved for KV that another worker writes, the oldest first.
    reserved: Vec<Sequence>,
    /// Ended reservations whose tickets may still be used by late writes.
    ended_reservations: EndedReservations,
    /// Prompts whose KV is complete and whose samples have not all started, the oldest first.
    forking: Vec<Sequence>,
    /// Sequences that have blocks and are computed by steps, the oldest first. If a step cannot compute all of them, it computes the first
    /// ones in the fair order.
    running: Vec<Sequence>,
    /// Divides the prompt tokens of each step between accounts.
    round_robin: RoundRobin,
    /// Limits the number of steps from which outranked prompts are left out.
    short_steps: ShortSteps,
    /// The oldest job, if it has been on this engine for [`EXEMPT_AFTER`] and another job outranks it. Its first sequence precedes all others.
    exempt: Option<JobId>,
    /// The number of prompt tokens whose KV was computed by this engine or received from another worker.
    prefilled: u64,
    /// Sequences of the role `Prefill` whose KV is completely computed. Their blocks are held until their jobs are dropped.
    held: Vec<Sequence>,
    /// The number of each job's samples that have not finished.
    live: BTreeMap<JobId, u32>,
    actions: Vec<Action>,
    included_request_ids: Vec<String>,
    rates: Rates,
    preemptions: u64,
    invariant_violations: u32,
    draw_ticket: ticket::Draw,
}

/// The time after which a job that others outrank may become exempt: the default of the router's limit on the wait in the queue.
const EXEMPT_AFTER: Duration = Duration::from_secs(10);
/// One audit checks the contents of this many blocks. With 100,000 blocks an audit takes 6 ms; if it checked all contents, it would take 93 ms.
const AUDITED_BLOCKS: usize = 4_096;
impl Machine {
    pub fn new(info: EngineInfo, settings: EngineSettings, draw_ticket: ticket::Draw) -> Self {
        let cache = PrefixCache::new(CacheSettings {
            capacity_blocks: info.capacity_blocks,
            block_size: info.block_size,
            prefix_caching: settings.prefix_caching,
            hash_key: settings.hash_key,
        });
        Self {
            info,
            settings,
            cache,
            waiting: Waiting::default(),
            reserved: Vec::new(),
            ended_reservations: EndedReservations::default(),
            forking: Vec::new(),
            running: Vec::new(),
            round_robin: RoundRobin::default(),
            short_steps: ShortSteps::default(),
            exempt: None,
            prefilled: 0,
            held: Vec::new(),
            live: BTreeMap::new(),
            actions: Vec::new(),
            included_request_ids: Vec::new(),
            rates: Rates::default(),
            preemptions: 0,
            invariant_violations: 0,
            draw_ticket,
        }
    }

    pub fn cancel(&mut self, job: JobId) {
        for mut sequence in self.reserved.extract_if(.., |sequence| sequence.job == job) {
            self.ended_reservations.take(&mut self.cache, &mut sequence);
        }
        for list in [&mut self.forking, &mut self.running, &mut self.held] {
            for mut sequence in list.extract_if(.., |sequence| sequence.job == job) {
                release(&mut self.cache, &mut sequence);
            }
        }
        self.waiting.remove_job(job);
        self.live.remove(&job);
    }

    /// Pauses or resumes a job. Nothing is computed for a paused job, so a slow client causes backpressure.
    pub fn set_paused(&mut self, job: JobId, paused: bool) {
        let with_blocks = self.reserved.iter_mut().chain(&mut self.forking).chain(&mut self.running);
        let all = with_blocks.filter(|sequence| sequence.job == job).chain(self.waiting.of_job_mut(job));
        all.for_each(|sequence| sequence.paused = paused);
    }

    /// Admits the waiting sequences that fit, and returns the chunks of the next step; `None` if there is nothing to compute.
    pub fn plan(&mut self, now: Duration) -> Option<Plan> {
        self.exempt = self.starving(now);
        // Running sequences get blocks before new sequences are admitted. `grow` runs a second time because a sequence that was just
        // admitted may need a block for its first token.
        self.grow();
        self.admit(now);
        self.grow();
        let batch = self.batch();
        let decodes = batch.iter().filter(|index| self.running[**index].is_decoding()).count();
        let mut allotted = self.allot(&batch, self.prompt_budget(decodes));
        let mut len =
            |index: usize| if self.running[index].is_decoding() { 1 } else { allotted.remove(&index).unwrap_or_default() };
        let chunks = batch.into_iter().map(|sequence| PlannedChunk { sequence, len: len(sequence) });
        let chunks: Vec<_> = chunks.filter(|chunk| chunk.len > 0).collect();
        (!chunks.is_empty()).then_some(Plan { chunks })
    }

    /// Returns the oldest job if it has been on this engine for [`EXEMPT_AFTER`] and another job outranks it. Paused sequences are ignored.
    fn starving(&self, now: Duration) -> Option<JobId> {
        let all = || {
            let waiting = self.waiting.iter().map(|queued| &queued.sequence);
            self.running.iter().chain(&self.reserved).chain(&self.forking).chain(waiting).filter(|of| !of.paused)
        };
        let oldest = all().min_by_key(|of| of.order)?;
        let starves = now.saturating_sub(oldest.submitted) >= EXEMPT_AFTER && all().any(|of| of.outranks(oldest));
        starves.then_some(oldest.job)
    }

    /// Returns the indices of the running sequences in the next step: all sequences that are not paused and do not wait for a mask. If these
    /// are too many, only the first ones in the fair order are returned.
    fn batch(&self) -> Vec<usize> {
        let can_run = |index: &usize| !self.running[*index].paused && !self.running[*index].awaits_mask();
        let mut batch: Vec<usize> = (0..self.running.len()).filter(can_run).collect();
        let batch_max = self.settings.batch_max as usize;
        if batch.len() > batch_max {
            let owners = batch.iter().map(|index| self.running[*index].owner());
            let order = fair_order(&owners.collect::<Vec<_>>(), self.exempt);
            batch = order[..batch_max].iter().map(|index| batch[*index]).collect();
            batch.sort_unstable();
        }
        batch
    }

    fn is_first_of_job(&self, index: usize) -> bool {
        index == 0 || self.running[index - 1].job != self.running[index].job
    }

    pub fn chunks<'a>(&'a self, plan: &'a Plan) -> Vec<Chunk<'a>> {
        let chunk = |chunk: &PlannedChunk| {
            let sequence = &self.running[chunk.sequence];
            let (start, end) = (sequence.computed, sequence.computed + chunk.len);
            let (tokens, logits) = (&sequence.tokens[start..end], sequence.logits(end));
            Chunk { tokens, start: start as u32, blocks: &sequence.blocks, logits }
        };
        plan.chunks.iter().map(chunk).collect()
    }

    /// Applies the output of a step that took `duration`.
    pub fn complete(&mut self, plan: &Plan, output: StepOutput, duration: Duration, now: Duration) -> StepStats {
        let mut stats = StepStats { duration, ..StepStats::default() };
        let (logits, mut sampled) = match output {
            StepOutput::Logits(logits) => (logits, None),
            StepOutput::Sampled { tokens, logits } => (logits, Some(tokens.into_iter())),
        };
        let mut rows = logits.chunks_exact(self.info.vocab_size);
        let mut running = std::mem::take(&mut self.running);
        let (mut refused, mut broken) = (Vec::new(), Vec::new());
        for chunk in &plan.chunks {
            let sequence = &mut running[chunk.sequence];
            let first = sequence.computed;
            let samples = first + chunk.len == sequence.tokens.len();
            let late = match &mut sequence.role {
                Role::Sample(sample) if samples => {
                    sample.is_late = sample.sampler.take_late();
                    sample.is_late
                }
                _ => false,
            };
            if sequence.is_decoding() {
                stats.decode_tokens += 1;
            } else {
                stats.prefill_tokens += chunk.len as u32;
                self.prefilled += chunk.len as u64;
            }
            // The last token of a late sample is computed again, to sample from its logits.
            sequence.computed += chunk.len - usize::from(late);
            sequence.record_chunk(chunk.len, duration, now);
            self.commit(sequence);
            match &mut sequence.role {
                Role::Prefill(_) => report_ready_blocks(&mut self.actions, sequence, self.info.block_size as usize),
                Role::Prompt(prompt) => {
                    if let Some(wanted) = &mut prompt.logprobs {
                        for (row, token) in (&mut rows).take(chunk.len).zip(&sequence.tokens[first + 1..]) {
                            wanted.rows.push(Some(logprobs(row, *token, wanted.top)));
                        }
                    }
                }
                Role::Sample(_) if late => match &mut sampled {
                    Some(tokens) => _ = tokens.next(),
                    None => _ = rows.next(),
                },
                Role::Sample(sample) if samples => {
                    let SampledToken { token, logprobs } = match &mut sampled {
                        Some(tokens) => tokens.next().expect("the device samples a token for each request"),
                        None => {
                            let row = rows.next().expect("the device returns a row for each request");
                            sample.sampler.sample(row, sequence.tokens.len() as u32)
                        }
                    };
                    if token == NO_TOKEN {
                        broken.push(sequence.job);
                        continue;
                    }
                    if let Err(error) = sample.sampler.accept(token) {
                        refused.push((sequence.job, constraint_refusal(&error)));
                        continue;
                    }
                    sequence.tokens.push(token);
                    self.actions.push(Action::Emit(sequence.job, Event::Token { sample: sample.number, token, logprobs }));
                }
                Role::Sample(_) => {}
            }
        }
        let (decodes, budget) = (stats.decode_tokens as usize, self.prompt_budget(stats.decode_tokens as usize));
        self.rates.record(&stats, self.settings.chunk_budget, budget);
        if stats.prefill_tokens > 0 {
            self.rates.record_share(budget, decodes);
        }
        self.running = running;
        for (job, refusal) in refused {
            self.end_refused(job, refusal);
        }
        for job in broken {
            tracing::error!(
                "the logits of a request are NaNs, so it fails; the model's weights or the device's memory may be damaged"
            );
            self.end_with(job, Event::Failed);
        }
        let settled: Vec<Sequence> = self.running.extract_if(.., |sequence| is_settled(sequence)).collect();
        for sequence in settled {
            self.settle(sequence, now);
        }
        self.report_sent_prefills();
        stats
    }

    /// Moves a sequence to the list that fits its state, after its admission or a step that has computed tokens of it.
    fn settle(&mut self, mut sequence: Sequence, now: Duration) {
        let done = sequence.remaining() == 0;
        match &sequence.role {
            Role::Prefill(_) if done => self.held.push(sequence),
            Role::Prompt(_) if done => self.fork(sequence, now),
            Role::Sample(sample) => match finish_reason(&sequence, sample) {
                Some(reason) => {
                    let number = sample.number;
                    release(&mut self.cache, &mut sequence);
                    self.finish(sequence.job, number, reason);
                }
                None => self.run(sequence),
            },
            _ => self.run(sequence),
        }
    }

    fn run(&mut self, sequence: Sequence) {
        let index = self.running.partition_point(|other| other.order < sequence.order);
        self.running.insert(index, sequence);
    }

    /// Commits the blocks of the sequence that have become full to the cache.
    fn commit(&mut self, sequence: &mut Sequence) {
        let size = self.info.block_size as usize;
        while (sequence.committed + 1) * size <= sequence.computed {
            let index = sequence.committed;
            let parent = index.checked_sub(1).map(|parent| sequence.blocks[parent]);
            let tokens = &sequence.tokens[index * size..][..size];
            sequence.blocks[index] = self.cache.commit(&sequence.namespace, parent, sequence.blocks[index], tokens);
            sequence.committed += 1;
        }
    }

    fn finish(&mut self, job: JobId, sample: u32, reason: FinishReason) {
        self.actions.push(Action::Emit(job, Event::Finished { sample, reason }));
        let live = self.live.get_mut(&job).expect("a job is live until its last sample has finished");
        *live -= 1;
        if *live == 0 {
            self.live.remove(&job);
            self.actions.push(Action::End(job));
        }
    }

    /// Ends a job whose constraint cannot be enforced any further.
    fn end_refused(&mut self, job: JobId, refusal: Refusal) {
        self.end_with(job, Event::Refused(refusal));
    }

    /// Ends a job with this event, unless it has ended.
    fn end_with(&mut self, job: JobId, event: Event) {
        if self.live.contains_key(&job) {
            self.cancel(job);
            self.actions.push(Action::Emit(job, event));
            self.actions.push(Action::End(job));
        }
    }

    /// Ends every job and clears the cache, because after a failed step no KV can be trusted.
    pub fn fail(&mut self) {
        let jobs: Vec<JobId> = self.live.keys().copied().collect();
        for job in jobs {
            self.cancel(job);
            self.actions.push(Action::Emit(job, Event::Failed));
            self.actions.push(Action::End(job));
        }
        self.round_robin = RoundRobin::default();
        self.cache.clear();
    }

    pub fn info(&self) -> &EngineInfo {
        &self.info
    }

    pub fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    pub fn snapshot(&self) -> tandem_kv::Snapshot {
        self.cache.snapshot()
    }

    /// Returns the changes of the cache since the last call, and the current load.
    pub fn take_batch(&mut self, step: Option<StepStats>) -> KvBatch {
        KvBatch {
            events: self.cache.take_events(),
            last_event_id: self.cache.last_event_id(),
            load: self.load(),
            included_request_ids: std::mem::take(&mut self.included_request_ids),
            step,
        }
    }

    pub fn load(&self) -> Load {
        let counts = self.cache.counts();
        let forking = self.forking.iter().map(Sequence::samples_left).sum::<usize>();
        let waiting = self.waiting.iter().filter(|queued| queued.sequence.computes_prompt());
        let running = self.running.iter().filter(|sequence| sequence.computes_prompt()).map(Sequence::remaining);
        let pending_tokens = waiting.map(|queued| self.tokens_to_compute(queued)).chain(running).sum::<usize>();
        Load {
            running_sequences: (self.running.len() + self.reserved.len() + forking) as u32,
            waiting_requests: self.waiting.len() as u32,
            pending_prefill_tokens: pending_tokens as u64,
            free_blocks: counts.free,
            cached_blocks: counts.cached,
            in_use_blocks: counts.in_use,
            tier_blocks: [0; 4],
            prefill_tokens_per_second: self.rates.prefill_tokens_per_second(),
            prefill_measurements: self.rates.prefill_measurements(),
            prefill_fixed_ms: self.rates.prefill_fixed_ms(),
            decode_step_ms: self.rates.decode_step_ms(),
            prompt_share: self.rates.prompt_share(),
            preemptions: self.preemptions,
            invariant_violations: self.invariant_violations,
            refused_graphs: 0,
        }
    }

    /// Checks the invariants, and the contents of the next [`AUDITED_BLOCKS`] blocks of the cache. A violation is logged, and counted in
    /// `invariant_violations` of the reported load.
    pub fn audit(&mut self) {
        let checked = self.cache.check_next(AUDITED_BLOCKS);
        if let Err(violation) = checked.and_then(|()| self.check_sequences()) {
            tracing::error!(%violation, "the engine's state violates an invariant, which is a bug; please report it with this log");
            self.invariant_violations += 1;
        }
    }

    /// Checks all invariants of the scheduler.
    ///
    /// # Errors
    /// Returns the first violation that is found.
    #[cfg(test)]
    pub fn check_invariants(&self) -> Result<(), Violation> {
        self.cache.check_invariants()?;
        self.check_sequences()
    }

    fn check_sequences(&self) -> Result<(), Violation> {
        let with_blocks = || self.reserved.iter().chain(&self.forking).chain(&self.running).chain(&self.held);
        let mut held: HashSet<BlockId> = with_blocks().flat_map(|sequence| &sequence.blocks).copied().collect();
        for block in self.ended_reservations.blocks() {
            ensure(held.insert(*block), "a block of an ended reservation that is still being written belongs to a sequence")?;
        }
        ensure(
            held.len() as u32 == self.cache.counts().in_use,
            "the number of blocks in use differs from that of the sequences",
        )?;
        self.waiting.check_invariants()?;
        for sequence in with_blocks().chain(self.waiting.iter().map(|queued| &queued.sequence)) {
            ensure(self.live.contains_key(&sequence.job), "a sequence belongs to no live job")?;
        }
        ensure(self.running.is_sorted_by_key(|sequence| sequence.order), "running sequences are not sorted by age")?;
        ensure(self.forking.iter().all(|parent| parent.samples_left() > 0), "a forking prompt has no samples to start")
    }
}

/// Returns whether no step computes the sequence any more: all tokens of the prompt are computed, or the sample has finished.
fn is_settled(sequence: &Sequence) -> bool {
    match &sequence.role {
        Role::Prefill(_) | Role::Prompt(_) => sequence.remaining() == 0,
        Role::Sample(sample) => finish_reason(sequence, sample).is_some(),
    }
}

fn finish_reason(sequence: &Sequence, sample: &Sample) -> Option<FinishReason> {
    if sample.sampler.generated_len() == 0 {
        return None;
    }
    match sequence.tokens.last() {
        Some(last) if sample.sampler.is_stop(*last) => Some(FinishReason::Stop(*last)),
        _ if sample.sampler.is_complete() => Some(FinishReason::Complete),
        _ => (sequence.tokens.len() >= sample.len_max).then_some(FinishReason::Length),
    }
}
