//! A simulated worker, whose engine is a model. In each step, chunks of prompts and generating sequences share the device. A sequence holds
//! its blocks until its answer ends, prompts wait for blocks, and sequences are preempted if no block is free. The prefix cache is the real
//! implementation.
//!
//! The order of prompts is that of the engine for one account (docs/adr/021-fair-shares.md): the due time of a prompt is the time at which it
//! would be done if all prompts shared the device equally, and the prompt with the earliest due time is computed first. The last token of a
//! prompt is computed by the step that samples the first token of the answer.

mod budget;
mod report;

use crate::{
    SimulatedDevice,
    request::{Arrived, TOKENS_OF_ID, namespace},
};
use std::{collections::VecDeque, rc::Rc, time::Duration};
use tandem_kv::{BlockId, CacheSettings, HashKey, KvEvent, Namespace, PrefixCache, Wanted};
use tandem_load::report::Gap;
use tandem_router::{VirtualPlacement, WorkerRole};

pub(crate) fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// A new prompt gets blocks only while the prompts that precede it need less than this many full steps, as in the engine.
const LOOKAHEAD_STEPS: u64 = 4;

/// A step with at least this many prompt tokens is long enough to measure a rate, as in the engine.
const LONG_STEP_TOKENS: u64 = 64;

/// A sequence on a worker.
pub(crate) struct SimulatedSequence {
    pub(crate) request: Rc<Arrived>,
    pub(crate) placement: VirtualPlacement,
    /// The number of tokens that the sequence is expected to compute. Cached tokens are not counted.
    pub(crate) own: u64,
    /// The number of blocks of the prompt that were cached when the sequence was first admitted. A sequence that is placed again keeps this
    /// number if it already has its first token.
    pub(crate) cached_blocks: Option<u32>,
    /// The virtual time at which the sequence was last admitted, in microseconds.
    pub(crate) admitted: u64,
    /// The number of prompt tokens that its latest step computed.
    pub(crate) step_tokens: u64,
    pub(crate) sampled: u64,
    pub(crate) times: TokenTimes,
    /// The placement with which the first token was sampled.
    pub(crate) begun_with: Option<VirtualPlacement>,
    /// Whether the latest placement has led to a token.
    pub(crate) has_token: bool,
    /// The number of placements since the sequence's latest token, including the current placement.
    pub(crate) attempt: u32,
    /// The number of times that the answer was continued on another worker.
    pub(crate) resumes: u32,
    blocks: Vec<BlockId>,
    computed: u64,
    committed: usize,
    /// The number of tokens of the prompt and of the answer that were known when the sequence was placed.
    prompt_tokens: u64,
    /// Whether all of the `prompt_tokens` except the last are computed, so that the next steps sample tokens.
    samples: bool,
    /// Whether the KV comes from a prefill worker.
    received: bool,
    /// Whether the sequence was preempted on this worker.
    preempted: bool,
    /// The place of the sequence in the order of prompts: its due time, counted in prompt tokens that its worker has computed, and then its
    /// number on the worker.
    due: (u64, u64),
}

/// The times at which the tokens of an answer were sampled.
#[derive(Default)]
pub(crate) struct TokenTimes {
    pub(crate) first: Option<u64>,
    pub(crate) gaps: Vec<Gap>,
    last: u64,
}

/// The result of a step.
#[derive(Default)]
pub(crate) struct Stepped {
    /// The placements that have led to a first token, each with the number of cached blocks. This number is `None` if the sequence continues
    /// an answer.
    pub(crate) first: Vec<(VirtualPlacement, Option<u32>)>,
    /// The sequences that have ended on this worker. They still hold their blocks.
    pub(crate) ended: Vec<SimulatedSequence>,
}

/// The state of a worker's engine.
pub(crate) struct SimulatedEngine {
    pub(crate) role: WorkerRole,
    pub(crate) cache: PrefixCache,
    pub(crate) waiting: VecDeque<SimulatedSequence>,
    /// Running sequences, the oldest request first.
    pub(crate) running: Vec<SimulatedSequence>,
    /// Sequences whose prompts are computed and whose KV is being transferred to a decode worker.
    pub(crate) sending: Vec<SimulatedSequence>,
    /// The number of sequences that are placed on this decode worker and whose prompts prefill workers are still computing.
    pub(crate) expected: u32,
    pub(crate) generated_tokens: u64,
    pub(crate) has_sent: bool,
    /// Whether the worker is running; false while it is lost.
    pub(crate) present: bool,
    /// Whether the worker gets no further requests, and ends with its last one.
    pub(crate) drains: bool,
    /// The virtual time at which the worker has joined, in microseconds.
    pub(crate) since: u64,
    /// The number of times that the worker was lost.
    pub(crate) losses: u64,
    device: SimulatedDevice,
    slower: f64,
    block_tokens: u64,
    /// The number of tokens that the current step computes for each sequence in `running`; `None` between steps.
    step: Option<Vec<u64>>,
    decode_step_ms: f64,
    /// The number of prompt tokens that were computed here or whose KV was received.
    prefilled_tokens: u64,
    /// The number of sequences that were added to the queue so far.
    enqueued: u64,
    long_steps: u64,
    /// The mean fraction of a full step's time that prompt tokens take, as engines report it.
    prompt_share: f64,
    namespace: Namespace,
}

impl TokenTimes {
    fn add(&mut self, now: u64) {
        if self.first.is_none() {
            self.first = Some(now);
        } else {
            let length = Duration::from_micros(now - self.last);
            match self.gaps.last_mut() {
                Some(gap) if gap.length == length => gap.count += 1,
                _ => self.gaps.push(Gap { length, count: 1 }),
            }
        }
        self.last = now;
    }
}

impl SimulatedSequence {
    /// Returns a sequence whose prompt is to be computed.
    pub(crate) fn new(request: Rc<Arrived>, placement: VirtualPlacement) -> Self {
        Self {
            prompt_tokens: request.prompt_tokens,
            request,
            placement,
            own: 0,
            cached_blocks: None,
            admitted: 0,
            step_tokens: 0,
            sampled: 0,
            times: TokenTimes::default(),
            begun_with: None,
            has_token: false,
            attempt: 1,
            resumes: 0,
            blocks: Vec::new(),
            computed: 0,
            committed: 0,
            samples: false,
            received: false,
            preempted: false,
            due: (0, 0),
        }
    }

    /// Returns the sequence after its KV was received from a prefill worker.
    pub(crate) fn received(self) -> Self {
        Self { own: 0, received: true, computed: 0, committed: 0, ..self }
    }

    /// Returns the sequence with a new placement, after one of its workers was lost. The tokens of the answer are computed again with the prompt.
    pub(crate) fn placed_again(self, placement: VirtualPlacement) -> Self {
        let cached_blocks = self.cached_blocks.filter(|_| self.sampled > 0);
        Self {
            placement,
            cached_blocks,
            sampled: self.sampled,
            times: self.times,
            begun_with: self.begun_with,
            attempt: self.attempt,
            resumes: self.resumes,
            prompt_tokens: self.request.prompt_tokens + self.sampled,
            ..Self::new(self.request, placement)
        }
    }

    /// Returns the number of tokens to compute before the next one is sampled, or before the prompt is complete.
    pub(crate) fn target(&self) -> u64 {
        if self.samples { self.request.prompt_tokens + self.sampled } else { self.prompt_tokens - 1 }
    }

    fn remaining(&self) -> u64 {
        self.target() - self.computed.min(self.target())
    }

    /// Returns whether the next step only samples a token of this sequence.
    fn is_decoding(&self) -> bool {
        self.samples && self.remaining() == 1
    }

    fn sample(&mut self, now: u64) {
        self.sampled += 1;
        self.times.add(now);
    }
}

impl SimulatedEngine {
    pub(crate) fn new(
        role: WorkerRole,
        slower: f64,
        device: SimulatedDevice,
        block_tokens: u64,
        capacity_blocks: u32,
        since: u64,
    ) -> Self {
        let block_size = TOKENS_OF_ID as u32;
        let cache = CacheSettings { capacity_blocks, block_size, prefix_caching: true, hash_key: HashKey::NONE };
        Self {
            role,
            cache: PrefixCache::new(cache),
            waiting: VecDeque::new(),
            running: Vec::new(),
            sending: Vec::new(),
            expected: 0,
            generated_tokens: 0,
            has_sent: false,
            present: true,
            drains: false,
            since,
            losses: 0,
            device,
            slower,
            block_tokens,
            step: None,
            decode_step_ms: 0.0,
            prefilled_tokens: 0,
            enqueued: 0,
            long_steps: 0,
            prompt_share: 0.0,
            namespace: namespace(),
        }
    }

    pub(crate) fn take_events(&mut self) -> Vec<KvEvent> {
        self.cache.take_events()
    }

    /// Returns how many leading blocks of the prompt are cached.
    pub(crate) fn cached_blocks(&self, prompt: &Arrived) -> u32 {
        self.cache.overlap(&self.namespace, &prompt.tokens, prompt.reusable_blocks(self.block_tokens))
    }

    /// Returns how many tokens of the sequence are neither cached nor about to be computed for another queued or running sequence.
    pub(crate) fn own_tokens(&self, sequence: &SimulatedSequence) -> u64 {
        let prompt = &*sequence.request;
        let computing = self.running.iter().filter(|other| !other.is_decoding());
        let before = self.waiting.iter().chain(computing).filter(|other| !other.received);
        let computed = before.map(|other| other.request.common(prompt)).max().unwrap_or(0) as u64;
        let known = computed.max(self.cached_blocks(prompt).into()).min(prompt.reusable_blocks(self.block_tokens).into());
        sequence.target() - known * self.block_tokens
    }

    /// Removes all sequences and all cached blocks, because the worker was lost. Returns the sequences.
    pub(crate) fn lose(&mut self) -> Vec<SimulatedSequence> {
        let counts = self.cache.counts();
        let capacity_blocks = counts.free + counts.cached + counts.in_use;
        let empty = Self::new(self.role, self.slower, self.device, self.block_tokens, capacity_blocks, self.since);
        let absent = Self { present: false, drains: self.drains, losses: self.losses + 1, ..empty };
        let lost = std::mem::replace(self, absent);
        lost.waiting.into_iter().chain(lost.running).chain(lost.sending).collect()
    }

    /// Removes the sequences that were to be decoded on the worker `decode`, which was lost. The current step takes as long as before, even
    /// if it computes some of them.
    pub(crate) fn cancel(&mut self, decode: usize) -> Vec<SimulatedSequence> {
        let is_lost = |sequence: &SimulatedSequence| sequence.placement.decode == decode;
        let (mut cancelled, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut self.waiting).into_iter().partition(is_lost);
        self.waiting = kept.into();
        for at in (0..self.running.len()).rev().filter(|at| is_lost(&self.running[*at])).collect::<Vec<_>>() {
            cancelled.push(self.running.remove(at));
            if let Some(step) = &mut self.step {
                step.remove(at);
            }
        }
        cancelled.extend(self.sending.extract_if(.., |sequence| is_lost(sequence)));
        cancelled.iter_mut().for_each(|sequence| self.release(sequence));
        cancelled
    }

    /// Adds a sequence to the queue.
    pub(crate) fn enqueue(&mut self, mut sequence: SimulatedSequence) {
        if !sequence.received {
            sequence.own = self.own_tokens(&sequence);
        }
        // Only the last token of a prompt whose KV was received is computed here.
        let cost = if sequence.received { 1 } else { sequence.own };
        let waiting = self.waiting.iter().map(|other| other.own);
        let running = self.running.iter().filter(|other| !other.is_decoding()).map(SimulatedSequence::remaining);
        let before: u64 = waiting.chain(running).map(|other| other.min(cost)).sum();
        sequence.due = (self.prefilled_tokens + cost + before, self.enqueued);
        self.enqueued += 1;
        self.waiting.push_back(sequence);
    }

    pub(crate) fn release(&mut self, sequence: &mut SimulatedSequence) {
        for block in sequence.blocks.drain(..).rev() {
            self.cache.release(block);
        }
    }

    /// Begins the next step if no step is running. Returns the duration of the step in microseconds (`None` if no step begins), and the
    /// number of preempted sequences.
    pub(crate) fn begin_step(&mut self, now: u64) -> (Option<u64>, u64) {
        if self.step.is_some() {
            return (None, 0);
        }
        let mut preempted = self.grow();
        self.admit(now);
        preempted += self.grow();
        let planned = self.plan();
        let time = planned.as_ref().map(|(_, time)| *time);
        self.step = planned.map(|(step, _)| step);
        (time, preempted)
    }

    /// Allocates a block to each sequence whose next token needs one. If no block is available, it preempts the youngest sequences. Returns
    /// the number of preempted sequences.
    fn grow(&mut self) -> u64 {
        let (mut at, mut preempted) = (0, 0);
        while at < self.running.len() {
            let sequence = &mut self.running[at];
            let full = sequence.blocks.len() as u64 * self.block_tokens <= sequence.computed;
            if !sequence.is_decoding() || !full {
                at += 1;
            } else if let Ok(block) = self.cache.allocate() {
                sequence.blocks.push(block);
            } else {
                let mut youngest = self.running.pop().expect("there is a running sequence");
                self.release(&mut youngest);
                (youngest.computed, youngest.committed, youngest.received, youngest.preempted) = (0, 0, false, true);
                youngest.own = youngest.target();
                self.waiting.push_front(youngest);
                preempted += 1;
            }
        }
        preempted
    }

    /// Admits queued sequences in order while there are blocks for them: first preempted sequences, then the others in the order of their due
    /// times. A sequence whose next block is being computed for another sequence is skipped and stays queued.
    fn admit(&mut self, now: u64) {
        self.waiting.make_contiguous().sort_by_key(|sequence| (!sequence.preempted, sequence.due));
        let mut at = 0;
        while at < self.waiting.len() && self.running.len() < self.device.sequences_max {
            let sequence = &self.waiting[at];
            let prompt = &*sequence.request;
            let reuse_max_blocks = prompt.reusable_blocks(self.block_tokens);
            let awaits = |other: &SimulatedSequence| {
                let common = other.request.common(prompt).min(reuse_max_blocks as usize);
                !other.is_decoding() && other.committed < common && common > self.cached_blocks(prompt) as usize
            };
            if !sequence.received && self.running.iter().any(awaits) {
                at += 1;
                continue;
            }
            let is_before = |other: &&SimulatedSequence| !other.is_decoding() && other.due < sequence.due;
            let tokens_before: u64 = self.running.iter().filter(is_before).map(SimulatedSequence::remaining).sum();
            if !sequence.preempted && !sequence.received && tokens_before >= LOOKAHEAD_STEPS * self.device.step_tokens {
                break;
            }
            // Blocks are kept free for the next tokens of the sequences that generate.
            let spare_blocks = match self.role {
                WorkerRole::Prefill => 0,
                WorkerRole::Decode => self.running.len() as u32 + u32::from(sequence.target().is_multiple_of(self.block_tokens)),
            };
            let len_blocks = sequence.target().div_ceil(self.block_tokens) as u32;
            let wanted = Wanted { reuse_max_blocks, len_blocks, spare_blocks };
            let Ok(acquired) = self.cache.acquire(&self.namespace, &prompt.tokens, wanted) else { break };
            let mut sequence = self.waiting.remove(at).expect("the sequence is waiting");
            sequence.blocks = acquired.blocks;
            sequence.committed = acquired.cached_blocks as usize;
            sequence.computed = acquired.cached_blocks as u64 * self.block_tokens;
            sequence.cached_blocks.get_or_insert(acquired.cached_blocks);
            sequence.admitted = now;
            if sequence.received {
                self.prefilled_tokens += sequence.remaining();
                sequence.computed = sequence.target();
            }
            sequence.samples |= self.role == WorkerRole::Decode && sequence.remaining() == 0;
            let place = self.running.partition_point(|other| other.due.1 < sequence.due.1);
            let received = std::mem::take(&mut sequence.received);
            self.running.insert(place, sequence);
            if received {
                self.commit(place);
            }
        }
    }

    /// Plans the next step. Returns the number of tokens for each running sequence, and the duration of the step in microseconds; `None` if
    /// no sequence runs.
    fn plan(&mut self) -> Option<(Vec<u64>, u64)> {
        if self.running.is_empty() {
            return None;
        }
        let decoding = self.running.iter().filter(|sequence| sequence.is_decoding()).count() as u64;
        let mut budget = self.prompt_budget(decoding);
        let mut tokens: Vec<u64> = self.running.iter().map(|sequence| u64::from(sequence.is_decoding())).collect();
        let mut prompts: Vec<usize> = (0..tokens.len()).filter(|at| !self.running[*at].is_decoding()).collect();
        prompts.sort_by_key(|at| self.running[*at].due);
        for at in prompts {
            tokens[at] = self.running[at].remaining().min(budget);
            budget -= tokens[at];
        }
        // As on the simulated device, a chunk of one token takes the time of a generating sequence.
        let (decodes, chunks): (Vec<u64>, Vec<u64>) =
            tokens.iter().filter(|tokens| **tokens > 0).partition(|tokens| **tokens == 1);
        let (decodes, prefilled) = (decodes.len() as u32, chunks.iter().sum::<u64>());
        let (device, mut time) = (&self.device, Duration::ZERO);
        if prefilled > 0 {
            time += device.prefill_step + Duration::from_secs_f64(prefilled as f64 / device.prefill_tokens_per_second);
        }
        if decodes > 0 {
            let decode = device.decode_step + device.decode_sequence * decodes;
            self.decode_step_ms = decode.as_secs_f64() * 1e3 * self.slower;
            time += decode;
        }
        if prefilled > 0 {
            self.record_share(decoding);
        }
        self.prefilled_tokens += prefilled;
        self.long_steps += u64::from(prefilled >= LONG_STEP_TOKENS);
        // A step takes at least a microsecond, so that virtual time advances.
        Some((tokens, (time.mul_f64(self.slower).as_micros() as u64).max(1)))
    }

    /// Ends the running step.
    pub(crate) fn end_step(&mut self, now: u64) -> Stepped {
        let step = self.step.take().expect("a step was running");
        let mut stepped = Stepped::default();
        for (at, tokens) in step.into_iter().enumerate() {
            let sequence = &mut self.running[at];
            let computes_prompt = !sequence.is_decoding();
            sequence.computed += tokens;
            if computes_prompt && tokens > 0 {
                sequence.step_tokens = tokens;
                self.commit(at);
            }
            let sequence = &mut self.running[at];
            if sequence.samples && sequence.remaining() == 0 {
                let cached_blocks = sequence.cached_blocks.filter(|_| sequence.sampled == 0);
                sequence.sample(now);
                self.generated_tokens += 1;
                if !std::mem::replace(&mut sequence.has_token, true) {
                    sequence.begun_with.get_or_insert(sequence.placement);
                    stepped.first.push((sequence.placement, cached_blocks));
                }
            }
            sequence.samples |= self.role == WorkerRole::Decode && sequence.remaining() == 0;
        }
        let role = self.role;
        stepped.ended = self
            .running
            .extract_if(.., |sequence| match role {
                WorkerRole::Prefill => sequence.remaining() == 0,
                WorkerRole::Decode => sequence.sampled >= sequence.request.answer_tokens,
            })
            .collect();
        stepped
    }

    /// Commits to the cache the prompt blocks of the running sequence `at` that are full and computed.
    fn commit(&mut self, at: usize) {
        let sequence = &mut self.running[at];
        let tokens = &sequence.request.tokens;
        let full = ((sequence.computed / self.block_tokens) as usize).min(tokens.len() / TOKENS_OF_ID);
        for at in sequence.committed..full {
            let parent = at.checked_sub(1).map(|parent| sequence.blocks[parent]);
            let content = &tokens[at * TOKENS_OF_ID..][..TOKENS_OF_ID];
            sequence.blocks[at] = self.cache.commit(&self.namespace, parent, sequence.blocks[at], content);
        }
        sequence.committed = sequence.committed.max(full);
    }
}
