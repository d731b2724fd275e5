//! Which chunks make a step: admission, chunked prefill, continuous batching, preemption. A plain state machine.
//!
//! [`Machine::plan`] says what to compute, [`Machine::complete`] takes the result. Between the two nothing else is called.
//! Blocks belong to sequences; every way out of a sequence gives them back ([`Machine::check_invariants`]).
//! All prompts are cut the same way: `Prefill` and `Prompt` sequences compute all tokens but the last, samples compute the rest.

mod admission;
mod fair;
mod forking;

mod rates;
mod receiving;
mod room;
mod sending;
mod sequence;
#[cfg(test)]
mod tests;
mod waiting;

use crate::sampling::{SampledToken, Sampler, logprobs};
use crate::{Chunk, EngineInfo, EngineSettings, Event, FinishReason, StepOutput, ticket};
use fair::{Claim, Turns, fair_order};

use rates::Rates;
use receiving::{EndedReservations, release};
use sending::report_ready_blocks;
pub(crate) use sequence::JobId;
use sequence::{Role, Sample, Sequence};
use std::collections::BTreeMap;
use std::time::Duration;
use tandem_kv::{BlockId, CacheSettings, KvBatch, Load, PrefixCache, ReadyBlock, StepStats};
use waiting::Waiting;

/// What the owner of the engine does for the machine, in this order, before the next step or write.
#[derive(Debug)]
pub(crate) enum Action {
    /// Tells a job.
    Tell(JobId, Event),
    /// Copies a block's KV inside the engine.
    Copy { from: BlockId, to: BlockId },
    /// Reads the content of blocks and reports them to a job as [`Event::BlocksReady`].
    ReadBlocks(JobId, Vec<ReadyBlock>),
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
}

pub(crate) struct Machine {
    info: EngineInfo,
    settings: EngineSettings,
    cache: PrefixCache,
    /// Without blocks.
    waiting: Waiting,
    /// With blocks; their KV comes from elsewhere.
    reserved: Vec<Sequence>,
    /// What is left of reservations that are gone.
    ended_reservations: EndedReservations,
    /// Prompts whose KV is here and of which samples have not started yet, the oldest first.
    forking: Vec<Sequence>,
    /// In steps, the oldest first. Of more than a step takes, the first in the fair order go on.
    running: Vec<Sequence>,
    /// The accounts' turns to have prompt tokens computed.
    turns: Turns,
    /// Prompt tokens that were computed here or have come from elsewhere.
    prefilled: u64,
    /// Prefills that are computed, until their jobs are dropped.
    held: Vec<Sequence>,
    /// Samples that have not finished, by job.
    live: BTreeMap<JobId, u32>,
    actions: Vec<Action>,
    included_request_ids: Vec<String>,
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
            waiting: Waiting::default(),
            reserved: Vec::new(),
            ended_reservations: EndedReservations::default(),
            forking: Vec::new(),
            running: Vec::new(),
            turns: Turns::default(),
            prefilled: 0,
            held: Vec::new(),
            live: BTreeMap::new(),
            actions: Vec::new(),
            included_request_ids: Vec::new(),
            rates: Rates::default(),
            preemptions: 0,
            draw_ticket,
        }
    }

    /// Ends a job wherever it is; it hears nothing more.
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

    /// A job whose listener is `behind` computes nothing until it is not.
    pub fn pause(&mut self, job: JobId, behind: bool) {
        let with_blocks = self.reserved.iter_mut().chain(&mut self.forking).chain(&mut self.running);
        let all = with_blocks.filter(|sequence| sequence.job == job).chain(self.waiting.of_job_mut(job));
        all.for_each(|sequence| sequence.paused = behind);
    }

    /// Takes in what fits and says what to compute next; `None` when there is nothing to do.
    pub fn plan(&mut self, now: Duration) -> Option<Plan> {
        // Who runs goes first; who has just come may need a block for its first token.
        self.grow();
        self.admit(now);
        self.grow();
        let batch = self.batch();
        let decodes = batch.iter().filter(|place| self.running[**place].is_decoding()).count();
        let budget = (self.settings.chunk_budget as usize).saturating_sub(decodes).max(PREFILL_TOKENS_MIN);
        let mut dealt = self.deal(&batch, budget);
        let mut chunks = Vec::with_capacity(batch.len());
        for place in batch {
            let sequence = &self.running[place];
            let len = if sequence.is_decoding() { 1 } else { dealt.remove(&place).unwrap_or_default() };
            if len > 0 {
                chunks.push(PlannedChunk { sequence: place, len });
            }
        }
        (!chunks.is_empty()).then_some(Plan { chunks })
    }

    /// Which of the running sequences a step takes, by their places: all that are not paused, or the first of them in the fair order.
    fn batch(&self) -> Vec<usize> {
        let mut batch: Vec<usize> = (0..self.running.len()).filter(|place| !self.running[*place].paused).collect();
        let batch_max = self.settings.batch_max as usize;
        if batch.len() > batch_max {
            let owners = batch.iter().map(|place| (&*self.running[*place].account, self.running[*place].job));
            let order = fair_order(&owners.collect::<Vec<_>>());
            batch = order[..batch_max].iter().map(|place| batch[*place]).collect();
            batch.sort_unstable();
        }
        batch
    }

    /// No other sequence of its job runs before it.
    fn is_first(&self, place: usize) -> bool {
        place == 0 || self.running[place - 1].job != self.running[place].job
    }

    /// How many tokens of its prompt each sequence of the batch has computed in this step, by its place. What samples that were pushed
    /// back compute again comes after the prompts of other requests, as it does in the fair order.
    fn deal(&mut self, batch: &[usize], budget: usize) -> BTreeMap<usize, usize> {
        let mut places: Vec<usize> = batch.iter().copied().filter(|place| !self.running[*place].is_decoding()).collect();
        if places.is_empty() && self.turns.is_empty() {
            return BTreeMap::new();
        }
        places.sort_by_key(|place| (!self.is_first(*place), self.running[*place].due, self.running[*place].order));
        let claim = |place: &usize| {
            let sequence = &self.running[*place];
            let most = if sequence.wants_prompt_logprobs() { LOGIT_ROWS_MAX } else { usize::MAX };
            Claim { account: sequence.account.clone(), tokens: sequence.remaining().min(most) }
        };
        let claims: Vec<Claim> = places.iter().map(claim).collect();
        places.into_iter().zip(self.turns.deal(&claims, budget)).collect()
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
                    logits: sequence.logits(sequence.computed + chunk.len),
                }
            })
            .collect()
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
        for chunk in &plan.chunks {
            let sequence = &mut running[chunk.sequence];
            if sequence.is_decoding() {
                stats.decode_tokens += 1;
            } else {
                stats.prefill_tokens += chunk.len as u32;
                self.prefilled += chunk.len as u64;
            }
            let first = sequence.computed;
            sequence.computed += chunk.len;
            sequence.note_chunk(chunk.len, duration, now);
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
                Role::Sample(sample) if sequence.computed == sequence.tokens.len() => {
                    let SampledToken { token, logprobs } = match &mut sampled {
                        Some(tokens) => {
                            let sampled = tokens.next().expect("the device samples a token for each request");
                            sample.sampler.accept(sampled.token);
                            sampled
                        }
                        None => {
                            let row = rows.next().expect("the device returns a row for each request");
                            sample.sampler.sample(row, sequence.tokens.len() as u32)
                        }
                    };
                    sequence.tokens.push(token);
                    self.actions.push(Action::Tell(sequence.job, Event::Token { sample: sample.number, token, logprobs }));
                }
                Role::Sample(_) => {}
            }
        }
        self.rates.measure(&stats, self.settings.chunk_budget);
        // Most go on: they stay where they are.
        let settled: Vec<Sequence> = running.extract_if(.., |sequence| is_settled(sequence)).collect();
        self.running = running;
        for sequence in settled {
            self.settle(sequence, now);
        }
        self.report_sent_prefills();
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
                None => self.run(sequence),
            },
            _ => self.run(sequence),
        }
    }

    /// Puts a sequence with blocks in its place among those that run.
    fn run(&mut self, sequence: Sequence) {
        let place = self.running.partition_point(|other| other.order < sequence.order);
        self.running.insert(place, sequence);
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
        self.turns = Turns::default();
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
            included_request_ids: std::mem::take(&mut self.included_request_ids),
            step,
        }
    }

    pub fn load(&self) -> Load {
        let counts = self.cache.counts();
        let forking = self.forking.iter().map(Sequence::samples_left).sum::<usize>();
        let prefilled = |sequence: &&Sequence| !sequence.is_remote() && !sequence.is_decoding();
        let pending = self.waiting.iter().chain(&self.running).filter(prefilled);
        let pending = pending.map(|sequence| self.own_tokens(sequence) as u64);
        Load {
            running_sequences: (self.running.len() + self.reserved.len() + forking) as u32,
            waiting_requests: self.waiting.len() as u32,
            pending_prefill_tokens: pending.sum(),
            free_blocks: counts.free,
            cached_blocks: counts.cached,
            in_use_blocks: counts.in_use,
            prefill_tokens_per_second: self.rates.prefill_tokens_per_second(),
            prefill_measurements: self.rates.prefill_measurements(),
            prefill_fixed_ms: self.rates.prefill_fixed_ms(),
            decode_step_ms: self.rates.decode_step_ms(),
            preemptions: self.preemptions,
        }
    }

    /// Panics with a sentence if blocks or jobs do not add up.
    #[cfg(test)]
    pub fn check_invariants(&self) {
        self.cache.check_invariants();
        let with_blocks = || self.reserved.iter().chain(&self.forking).chain(&self.running).chain(&self.held);
        let mut held: std::collections::HashSet<BlockId> = with_blocks().flat_map(|sequence| &sequence.blocks).copied().collect();
        for block in self.ended_reservations.blocks() {
            assert!(held.insert(*block), "what is still written into is nobody else's");
        }
        assert_eq!(held.len() as u32, self.cache.counts().in_use, "blocks in use are those of sequences");
        self.waiting.check_invariants();
        for sequence in with_blocks().chain(self.waiting.iter()) {
            assert!(self.live.contains_key(&sequence.job), "every sequence belongs to a live job");
        }
        assert!(self.running.is_sorted_by_key(|sequence| sequence.order), "the oldest runs first");
        assert!(self.forking.iter().all(|leader| leader.samples_left() > 0), "a prompt without samples to start is gone");
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
