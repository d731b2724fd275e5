//! Which chunks make a step: admission, chunked prefill, continuous batching, preemption. A plain state machine.
//!
//! [`Machine::plan`] says what to compute, [`Machine::complete`] takes the result. Between the two nothing else is called.
//! Blocks belong to sequences; every way out of a sequence gives them back ([`Machine::check_invariants`]).
//! All prompts are cut the same way: `Prefill` and `Prompt` sequences compute all tokens but the last, samples compute the rest.

mod admission;
mod landing;
mod rates;
mod sending;
mod sequence;
#[cfg(test)]
mod tests;

use crate::sampling::{Sampler, logprobs};
use crate::{Chunk, Draw, EngineInfo, EngineSettings, Event, FinishReason, Generated, Logits, Started, StepOutput, ticket};
use landing::{Ended, release};
use rates::Rates;
use sending::tell_finished_blocks;
pub(crate) use sequence::JobId;
use sequence::{Role, Sample, Sequence};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use tandem_kv::{BlockId, CacheSettings, KvBatch, Load, PrefixCache, StepStats};

/// What the owner of the engine does for the machine, in this order, before the next step or write.
#[derive(Debug)]
pub(crate) enum Action {
    /// Tells a job.
    Tell(JobId, Event),
    /// Copies a block's KV inside the engine.
    Copy { from: BlockId, to: BlockId },
    /// Reads a block's KV and tells it to a job as [`Event::Block`].
    Read { job: JobId, index: u32, block: BlockId },
    /// The job has heard its last event.
    End(JobId),
}

/// The sequences that run in a step, by their place in `running`.
#[derive(Debug)]
pub(crate) struct Plan {
    chunks: Vec<PlannedChunk>,
}

#[derive(Clone, Copy, Debug)]
struct PlannedChunk {
    sequence: usize,
    len: usize,
    logits: Logits,
}

pub(crate) struct Machine {
    info: EngineInfo,
    settings: EngineSettings,
    cache: PrefixCache,
    /// Without blocks. Preempted sequences first, then by arrival.
    waiting: VecDeque<Sequence>,
    /// With blocks; their KV comes from elsewhere.
    reserved: Vec<Sequence>,
    /// What is left of reservations that are gone.
    ended: Ended,
    /// In steps, the oldest first.
    running: Vec<Sequence>,
    /// Prefills that are computed, until their jobs are dropped.
    held: Vec<Sequence>,
    /// Samples that have not finished, by job.
    live: BTreeMap<JobId, u32>,
    actions: Vec<Action>,
    taken_in: Vec<String>,
    rates: Rates,
    preemptions: u64,
    draw_ticket: ticket::Draw,
}

/// Prefill goes on beside a full decode batch, however small the budget.
const PREFILL_TOKENS_MIN: usize = 16;
/// Rows of logits are large: a prompt that wants them all is cut into chunks of this many tokens.
const LOGIT_ROWS_MAX: usize = 64;
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
            waiting: VecDeque::new(),
            reserved: Vec::new(),
            ended: Ended::default(),
            running: Vec::new(),
            held: Vec::new(),
            live: BTreeMap::new(),
            actions: Vec::new(),
            taken_in: Vec::new(),
            rates: Rates::default(),
            preemptions: 0,
            draw_ticket,
        }
    }

    /// Ends a job wherever it is; it hears nothing more.
    pub fn cancel(&mut self, job: JobId) {
        for mut sequence in self.reserved.extract_if(.., |sequence| sequence.job == job) {
            self.ended.take(&mut self.cache, &mut sequence);
        }
        for list in [&mut self.running, &mut self.held] {
            for mut sequence in list.extract_if(.., |sequence| sequence.job == job) {
                release(&mut self.cache, &mut sequence);
            }
        }
        self.waiting.retain(|sequence| sequence.job != job);
        self.live.remove(&job);
    }

    /// A job whose listener is `behind` computes nothing until it is not.
    pub fn pause(&mut self, job: JobId, behind: bool) {
        let all = self.reserved.iter_mut().chain(&mut self.running).chain(&mut self.waiting);
        all.filter(|sequence| sequence.job == job).for_each(|sequence| sequence.paused = behind);
    }

    /// Takes in what fits and says what to compute next; `None` when there is nothing to do.
    pub fn plan(&mut self, now: Duration) -> Option<Plan> {
        // Who runs goes first; who has just come may need a block for its first token.
        self.grow();
        self.admit(now);
        self.grow();
        let mut chunks = Vec::new();
        // A prompt may have become more samples than there is room for: the youngest wait, with their blocks.
        let active = self.running.iter().enumerate().filter(|(_, sequence)| !sequence.paused);
        let batch = active.take(self.settings.batch_max as usize);
        let decodes = batch.clone().filter(|(_, sequence)| sequence.is_decoding()).count();
        let mut budget = (self.settings.chunk_budget as usize).saturating_sub(decodes).max(PREFILL_TOKENS_MIN);
        for (place, sequence) in batch {
            let mut len = sequence.remaining();
            if !sequence.is_decoding() {
                len = len.min(budget);
                if sequence.wants_prompt_logprobs() {
                    len = len.min(LOGIT_ROWS_MAX);
                }
                budget -= len;
            }
            if len > 0 {
                chunks.push(PlannedChunk { sequence: place, len, logits: sequence.logits(sequence.computed + len) });
            }
        }
        (!chunks.is_empty()).then_some(Plan { chunks })
    }

    /// What the engine is to compute.
    pub fn chunks<'a>(&'a self, plan: &'a Plan) -> Vec<Chunk<'a>> {
        plan.chunks
            .iter()
            .map(|chunk| {
                let sequence = &self.running[chunk.sequence];
                Chunk {
                    tokens: &sequence.tokens[sequence.computed..sequence.computed + chunk.len],
                    start: sequence.computed as u32,
                    blocks: &sequence.blocks,
                    logits: chunk.logits,
                }
            })
            .collect()
    }

    /// How what comes after each chunk is drawn, where a token does.
    pub fn draws<'a>(&'a self, plan: &'a Plan) -> Vec<Option<Draw<'a>>> {
        let draw = |chunk: &PlannedChunk| match &self.running[chunk.sequence] {
            Sequence { role: Role::Sample(sample), tokens, .. } if chunk.logits == Logits::Last => {
                Some(sample.sampler.draw_at(tokens.len() as u32))
            }
            _ => None,
        };
        plan.chunks.iter().map(draw).collect()
    }

    /// Takes a step's result, which took `duration`.
    pub fn complete(&mut self, plan: &Plan, output: &StepOutput, duration: Duration, now: Duration) -> StepStats {
        let mut stats = StepStats { duration, ..StepStats::default() };
        let mut rows = output.logits.chunks_exact(self.info.vocab_size);
        let mut drawn = output.drawn.iter();
        let mut running = std::mem::take(&mut self.running);
        for chunk in &plan.chunks {
            let sequence = &mut running[chunk.sequence];
            if sequence.is_decoding() {
                stats.decode_tokens += 1;
            } else {
                stats.prefill_tokens += chunk.len as u32;
            }
            let first = sequence.computed;
            sequence.computed += chunk.len;
            sequence.note_chunk(chunk.len, duration, now);
            self.commit(sequence);
            match &mut sequence.role {
                Role::Prefill(_) => tell_finished_blocks(&mut self.actions, sequence, self.info.block_size as usize),
                Role::Prompt(prompt) => {
                    if let Some(wanted) = &mut prompt.logprobs {
                        for (row, token) in (&mut rows).take(chunk.len).zip(&sequence.tokens[first + 1..]) {
                            wanted.rows.push(Some(logprobs(row, *token, wanted.top)));
                        }
                    }
                }
                Role::Sample(sample) => {
                    if chunk.logits == Logits::Last {
                        let (token, logprobs) = match drawn.next() {
                            Some(drawn) => sample.sampler.accept(drawn),
                            None => {
                                let row = rows.next().expect("the engine gives a row for each token that wants logits");
                                sample.sampler.draw(row, sequence.tokens.len() as u32)
                            }
                        };
                        sequence.tokens.push(token);
                        self.actions.push(Action::Tell(sequence.job, Event::Token { sample: sample.number, token, logprobs }));
                    }
                }
            }
        }
        self.rates.measure(&stats, self.settings.chunk_budget);
        // Most go on: they stay where they are.
        let settled: Vec<Sequence> = running.extract_if(.., |sequence| is_settled(sequence)).collect();
        self.running = running;
        for sequence in settled {
            self.settle(sequence, now);
        }
        self.tell_sent_prefills();
        stats
    }

    /// Where a sequence goes after a step.
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
                None => self.running.push(sequence),
            },
            _ => self.running.push(sequence),
        }
    }

    /// The prompt's KV is here: one sequence for each sample. Full blocks are shared, a partial last one is copied.
    fn fork(&mut self, mut leader: Sequence, now: Duration) {
        let Role::Prompt(prompt) = std::mem::replace(&mut leader.role, Role::Prefill(sequence::Sending::default())) else {
            unreachable!("only prompts fork");
        };
        let (job, chunks) = (leader.job, std::mem::take(&mut leader.chunks));
        let started = match &prompt.remote {
            Some(remote) => Started {
                queue: leader.queued.unwrap_or_default(),
                kv_transfer: remote.first_write.map_or(Duration::ZERO, |first| now - first),
                kv_transfer_bytes: remote.bytes,
                chunks,
            },
            None => Started { queue: leader.queued.unwrap_or_default(), chunks, ..Started::default() },
        };
        self.actions.push(Action::Tell(job, Event::Started(started)));
        if let Some(logprobs) = prompt.logprobs {
            self.actions.push(Action::Tell(job, Event::PromptLogprobs(logprobs.rows)));
        }
        let at_limit = |generated: &Generated| prompt.boundary + generated.tokens.len() >= prompt.len_max;
        let (ended, going_on): (Vec<_>, Vec<_>) = prompt.samples.into_iter().partition(at_limit);
        for Generated { sample: number, .. } in ended {
            self.finish(job, number, FinishReason::Length);
        }
        for (place, Generated { sample: number, tokens: generated }) in going_on.into_iter().enumerate().rev() {
            let sampler = prompt.sampler.for_sample(number).resumed(&generated);
            let role = Role::Sample(Box::new(Sample { number, sampler, len_max: prompt.len_max }));
            let tokens = [&leader.tokens[..prompt.boundary], &generated].concat();
            let namespace = leader.namespace.clone();
            let mut sample =
                Sequence { order: (job, number), namespace, tokens, blocks: Vec::new(), chunks: Vec::new(), role, ..leader };
            if self.share(&mut leader, &mut sample, place == 0) {
                self.running.push(sample);
            } else {
                // No blocks for its own tokens now: it computes them when there are.
                self.wait_again(sample);
            }
        }
        release(&mut self.cache, &mut leader);
        self.running.sort_by_key(|sequence| sequence.order);
    }

    /// Gives `sample` the leader's full blocks, a copy of its partial one, and blocks for what else it knows. The `last` to
    /// share takes the leader's own. All or nothing.
    fn share(&mut self, leader: &mut Sequence, sample: &mut Sequence, last: bool) -> bool {
        let size = self.info.block_size as usize;
        let full = leader.computed / size;
        let kept = if last { leader.blocks.len() } else { full };
        let known = if sample.is_decoding() { 0 } else { sample.target().div_ceil(size) };
        let mut fresh = Vec::new();
        while kept + fresh.len() < leader.blocks.len().max(known) {
            match self.cache.allocate() {
                Ok(block) => fresh.push(block),
                Err(tandem_kv::Full) => {
                    fresh.into_iter().for_each(|block| self.cache.release(block));
                    return false;
                }
            }
        }
        if last {
            sample.blocks = std::mem::take(&mut leader.blocks);
        } else {
            leader.blocks[..full].iter().for_each(|block| self.cache.pin(*block));
            sample.blocks = leader.blocks[..full].to_vec();
            if let (Some(from), Some(to)) = (leader.blocks.get(full), fresh.first()) {
                self.actions.push(Action::Copy { from: *from, to: *to });
            }
        }
        sample.blocks.append(&mut fresh);
        true
    }

    /// Offers the blocks that have become full to the cache.
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
        self.actions.push(Action::Tell(job, Event::Finished { sample, reason }));
        let live = self.live.get_mut(&job).expect("a job lives until its last sample has finished");
        *live -= 1;
        if *live == 0 {
            self.live.remove(&job);
            self.actions.push(Action::End(job));
        }
    }

    /// The engine failed: every job ends, and nothing that is cached can be trusted.
    pub fn fail(&mut self) {
        let jobs: Vec<JobId> = self.live.keys().copied().collect();
        for job in jobs {
            self.cancel(job);
            self.actions.push(Action::Tell(job, Event::Failed));
            self.actions.push(Action::End(job));
        }
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

    /// What has happened since the last call.
    pub fn take_batch(&mut self, step: Option<StepStats>) -> KvBatch {
        KvBatch {
            events: self.cache.take_events(),
            last_event_id: self.cache.last_event_id(),
            load: self.load(),
            taken_in: std::mem::take(&mut self.taken_in),
            step,
        }
    }

    pub fn load(&self) -> Load {
        let counts = self.cache.counts();
        let prefilled = |sequence: &&Sequence| !sequence.is_remote() && !sequence.is_decoding();
        let pending = self.waiting.iter().chain(&self.running).filter(prefilled);
        let pending = pending.map(|sequence| self.own_tokens(sequence) as u64);
        Load {
            running_sequences: (self.running.len() + self.reserved.len()) as u32,
            waiting_requests: self.waiting.len() as u32,
            pending_prefill_tokens: pending.sum(),
            free_blocks: counts.free,
            cached_blocks: counts.cached,
            in_use_blocks: counts.in_use,
            prefill_tokens_per_second: self.rates.prefill_tokens_per_second(),
            decode_step_ms: self.rates.decode_step_ms(),
            preemptions: self.preemptions,
        }
    }

    /// Panics with a sentence if blocks or jobs do not add up.
    #[cfg(test)]
    pub fn check_invariants(&self) {
        self.cache.check_invariants();
        let with_blocks = || self.reserved.iter().chain(&self.running).chain(&self.held);
        let mut held: std::collections::HashSet<BlockId> = with_blocks().flat_map(|sequence| &sequence.blocks).copied().collect();
        for block in self.ended.blocks() {
            assert!(held.insert(*block), "what is still written into is nobody else's");
        }
        assert_eq!(held.len() as u32, self.cache.counts().in_use, "blocks in use are those of sequences");
        assert!(self.waiting.iter().all(|sequence| sequence.blocks.is_empty()), "who waits holds nothing");
        for sequence in with_blocks().chain(&self.waiting) {
            assert!(self.live.contains_key(&sequence.job), "every sequence belongs to a live job");
        }
        assert!(self.running.is_sorted_by_key(|sequence| sequence.order), "the oldest runs first");
    }
}

/// Has come to what it was to come to.
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
        _ => (sequence.tokens.len() >= sample.len_max).then_some(FinishReason::Length),
    }
}
