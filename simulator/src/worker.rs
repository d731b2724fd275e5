//! A worker with a model of an engine. In each step, chunks of prompts and generating sequences share the device. Blocks are in use until
//! the answer ends, prompts wait for blocks, and sequences are preempted. The prefix cache is the real implementation.

use crate::{
    Device,
    request::{Arrived, TOKENS_OF_ID, namespace},
};
use std::{collections::VecDeque, rc::Rc, time::Duration};
use tandem_kv::{BlockId, CacheSettings, HashKey, KvEvent, Load, Namespace, PrefixCache, Wanted};
use tandem_load::report::Gap;
use tandem_router::{Role, VirtualPlacement};

/// Steps with this many prompt tokens, or more, are long enough to measure a rate, as in the engine.
const LONG_STEP_TOKENS: u64 = 64;

/// A sequence on a worker.
pub(crate) struct Sequence {
    pub(crate) request: Rc<Arrived>,
    pub(crate) placement: VirtualPlacement,
    /// The number of tokens that the sequence is expected to compute. Cached tokens are not counted.
    pub(crate) own: u64,
    /// The blocks of the prompt that were cached when the sequence was first admitted.
    pub(crate) cached_blocks: Option<u32>,
    /// The time at which it was last admitted.
    pub(crate) admitted: u64,
    /// The number of prompt tokens that its latest step computed.
    pub(crate) step_tokens: u64,
    pub(crate) sampled: u64,
    pub(crate) times: Times,
    blocks: Vec<BlockId>,
    computed: u64,
    committed: usize,
    /// The number of sampled tokens that belong to the tokens to compute. The last sampled token is computed when the next one is sampled.
    fed: u64,
    /// Whether the KV is received from a prefill worker.
    received: bool,
}

/// The times at which the tokens of an answer were sampled.
#[derive(Default)]
pub(crate) struct Times {
    pub(crate) first: Option<u64>,
    pub(crate) gaps: Vec<Gap>,
    last: u64,
}

/// The sequences that a step has brought forward.
#[derive(Default)]
pub(crate) struct Stepped {
    /// The placements of those that have their first token, with the numbers of their cached blocks.
    pub(crate) first: Vec<(VirtualPlacement, u32)>,
    /// Those that have ended on this worker. They still have their blocks.
    pub(crate) ended: Vec<Sequence>,
}

/// A worker.
pub(crate) struct Engine {
    pub(crate) role: Role,
    pub(crate) cache: PrefixCache,
    pub(crate) waiting: VecDeque<Sequence>,
    /// Running sequences, the oldest request first.
    pub(crate) running: Vec<Sequence>,
    /// Sequences whose prompts are computed and whose KV is being transferred to a decode worker.
    pub(crate) sending: Vec<Sequence>,
    /// The number of sequences that are placed on this decode worker and whose prompts prefill workers are still computing.
    pub(crate) expected: u32,
    pub(crate) generated_tokens: u64,
    pub(crate) has_sent: bool,
    device: Device,
    slower: f64,
    block_tokens: u64,
    /// The number of tokens that the current step computes for each sequence in `running`; `None` between steps.
    step: Option<Vec<u64>>,
    decode_step_ms: f64,
    prefilled_tokens: u64,
    long_steps: u64,
    namespace: Namespace,
}

impl Times {
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

impl Sequence {
    /// Returns a sequence whose prompt is to be computed.
    pub(crate) fn new(request: Rc<Arrived>, placement: VirtualPlacement, own: u64) -> Self {
        Self {
            request,
            placement,
            own,
            cached_blocks: None,
            admitted: 0,
            step_tokens: 0,
            sampled: 0,
            times: Times::default(),
            blocks: Vec::new(),
            computed: 0,
            committed: 0,
            fed: 0,
            received: false,
        }
    }

    /// Makes it a sequence whose KV was received.
    pub(crate) fn received(self) -> Self {
        Self { own: 0, received: true, computed: 0, committed: 0, ..self }
    }

    fn target(&self) -> u64 {
        self.request.prompt_tokens + self.fed
    }

    fn remaining(&self) -> u64 {
        self.target() - self.computed.min(self.target())
    }

    fn sample(&mut self, now: u64) {
        self.sampled += 1;
        self.times.add(now);
    }
}

impl Engine {
    pub(crate) fn new(role: Role, slower: f64, device: Device, block_tokens: u64, capacity_blocks: u32) -> Self {
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
            device,
            slower,
            block_tokens,
            step: None,
            decode_step_ms: 0.0,
            prefilled_tokens: 0,
            long_steps: 0,
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

    /// Returns how many tokens of the prompt are neither cached nor about to be computed by queued or running sequences of other prompts.
    pub(crate) fn own_tokens(&self, prompt: &Arrived) -> u64 {
        let computing = self.running.iter().filter(|other| other.remaining() > 0);
        let before = self.waiting.iter().chain(computing).filter(|other| !other.received);
        let computed = before.map(|other| other.request.common(prompt)).max().unwrap_or(0) as u64;
        let known = computed.max(self.cached_blocks(prompt).into()).min(prompt.reusable_blocks(self.block_tokens).into());
        prompt.prompt_tokens - known * self.block_tokens
    }

    pub(crate) fn release(&mut self, sequence: &mut Sequence) {
        for block in sequence.blocks.drain(..).rev() {
            self.cache.release(block);
        }
    }

    /// Begins the next step if none runs. Returns its duration in microseconds, or `None` if no step begins; and the number of preempted
    /// sequences.
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
            let full = sequence.blocks.len() as u64 * self.block_tokens <= sequence.target();
            if sequence.remaining() > 0 || sequence.sampled == sequence.fed || !full {
                at += 1;
            } else if let Ok(block) = self.cache.allocate() {
                sequence.blocks.push(block);
            } else {
                let mut youngest = self.running.pop().expect("there is a running sequence");
                self.release(&mut youngest);
                (youngest.computed, youngest.committed, youngest.received) = (0, 0, false);
                youngest.fed = youngest.sampled;
                youngest.own = youngest.target();
                self.waiting.push_front(youngest);
                preempted += 1;
            }
        }
        preempted
    }

    /// Admits queued sequences in order while there are blocks for them. A sequence whose next block is being computed for another sequence
    /// is skipped and stays queued.
    fn admit(&mut self, now: u64) {
        let mut at = 0;
        while at < self.waiting.len() && self.running.len() < self.device.sequences_max {
            let sequence = &self.waiting[at];
            let prompt = &*sequence.request;
            let reuse_max_blocks = prompt.reusable_blocks(self.block_tokens);
            let awaits = |other: &Sequence| {
                let common = other.request.common(prompt).min(reuse_max_blocks as usize);
                other.remaining() > 0 && other.committed < common && common > self.cached_blocks(prompt) as usize
            };
            if !sequence.received && self.running.iter().any(awaits) {
                at += 1;
                continue;
            }
            // A sequence that is alone may use all blocks. Otherwise those that generate keep room for their next blocks.
            let generating = self.running.iter().filter(|other| other.remaining() == 0).count() as u32;
            let spare_blocks = if self.running.is_empty() { 0 } else { generating + 1 };
            let len_blocks = sequence.target().div_ceil(self.block_tokens) as u32;
            let wanted = Wanted { reuse_max_blocks, len_blocks, spare_blocks };
            let Ok(acquired) = self.cache.acquire(&self.namespace, &prompt.tokens, wanted) else { break };
            let mut sequence = self.waiting.remove(at).expect("the sequence is waiting");
            sequence.blocks = acquired.blocks;
            sequence.committed = acquired.cached_blocks as usize;
            sequence.computed =
                if sequence.received { sequence.target() } else { acquired.cached_blocks as u64 * self.block_tokens };
            sequence.cached_blocks.get_or_insert(acquired.cached_blocks);
            sequence.admitted = now;
            let place = self.running.partition_point(|other| other.request.number < sequence.request.number);
            let received = sequence.received;
            self.running.insert(place, sequence);
            if received {
                self.commit(place);
            }
        }
    }

    /// Plans the next step. Returns the number of tokens for each running sequence, and the duration of the step in microseconds; `None` if
    /// no sequence runs.
    fn plan(&mut self) -> Option<(Vec<u64>, u64)> {
        let (mut budget, mut decodes) = (self.device.step_tokens, 0_u32);
        let tokens = self.running.iter().map(|sequence| match sequence.remaining() {
            0 => {
                decodes += 1;
                1
            }
            remaining => {
                let tokens = remaining.min(budget);
                budget -= tokens;
                tokens
            }
        });
        let tokens: Vec<u64> = tokens.collect();
        if tokens.is_empty() {
            return None;
        }
        let (device, prefilled, mut time) = (&self.device, self.device.step_tokens - budget, Duration::ZERO);
        if prefilled > 0 {
            time += device.prefill_step + Duration::from_secs_f64(prefilled as f64 / device.prefill_tokens_per_second);
        }
        if decodes > 0 {
            let decode = device.decode_step + device.decode_sequence * decodes;
            self.decode_step_ms = decode.as_secs_f64() * 1e3 * self.slower;
            time += decode;
        }
        self.prefilled_tokens += prefilled;
        self.long_steps += u64::from(prefilled >= LONG_STEP_TOKENS);
        // A step takes time, so that time passes.
        Some((tokens, (time.mul_f64(self.slower).as_micros() as u64).max(1)))
    }

    /// Ends the step that runs.
    pub(crate) fn end_step(&mut self, now: u64) -> Stepped {
        let step = self.step.take().expect("a step was running");
        let mut stepped = Stepped::default();
        for (at, tokens) in step.into_iter().enumerate() {
            let prefills = self.running[at].remaining() > 0;
            let sequence = &mut self.running[at];
            if prefills {
                sequence.computed += tokens;
                sequence.step_tokens = tokens;
                self.commit(at);
            } else if sequence.sampled > sequence.fed {
                sequence.fed += 1;
                sequence.computed += 1;
            }
            let sequence = &mut self.running[at];
            if self.role == Role::Decode && sequence.remaining() == 0 {
                let is_first = sequence.times.first.is_none();
                sequence.sample(now);
                self.generated_tokens += 1;
                if is_first {
                    let cached = sequence.cached_blocks.expect("a running sequence was admitted");
                    stepped.first.push((sequence.placement, cached));
                }
            }
        }
        let role = self.role;
        stepped.ended = self
            .running
            .extract_if(.., |sequence| match role {
                Role::Prefill => sequence.remaining() == 0,
                Role::Decode => sequence.sampled >= sequence.request.answer_tokens,
            })
            .collect();
        stepped
    }

    /// Commits the full blocks of the prompt of running sequence `at` that have been computed.
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

    pub(crate) fn load(&self) -> Load {
        let counts = self.cache.counts();
        let pending = self.waiting.iter().filter(|sequence| !sequence.received).map(|sequence| sequence.own);
        let running = self.running.iter().map(Sequence::remaining);
        let has_prefilled = self.prefilled_tokens > 0;
        let rate = self.device.prefill_tokens_per_second / self.slower;
        Load {
            running_sequences: self.running.len() as u32,
            waiting_requests: self.waiting.len() as u32 + self.expected,
            pending_prefill_tokens: pending.chain(running).sum(),
            free_blocks: counts.free,
            cached_blocks: counts.cached,
            in_use_blocks: counts.in_use,
            prefill_tokens_per_second: if has_prefilled { rate } else { 0.0 },
            prefill_measurements: self.long_steps,
            prefill_fixed_ms: if has_prefilled { self.device.prefill_step.as_secs_f64() * 1e3 * self.slower } else { 0.0 },
            decode_step_ms: self.decode_step_ms,
            ..Default::default()
        }
    }
}
