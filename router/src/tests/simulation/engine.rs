//! A worker with a model of an engine. In each step, chunks of prompts and running sequences share the device. Blocks are in use until the
//! answer ends, prompts wait for blocks, and sequences are preempted. The prefix cache is the real implementation.

use super::{Prompt, namespace};
use crate::cluster::MemberId;
use std::collections::{HashSet, VecDeque};
use tandem_kv::{
    BlockId, CacheSettings, Change, HashKey, KvEvent, Load, PrefixCache, SequenceHash, TokenId, Wanted, sequence_hashes,
};
use tandem_proto::v1::{StepTotals, worker_info::Role};

/// The number of tokens in a block, as in the recorded trace.
pub(super) const BLOCK_TOKENS: u64 = 512;
/// The most prompt tokens in a step.
const CHUNK_TOKENS: u64 = 2_048;
const BATCH_MAX: usize = 256;
/// Times on the default simulated device, in microseconds: 50 for each prompt token (20,000 tokens/s), 4 ms for each step with prompt
/// tokens, 6 ms for each step with decoding sequences, and 0.1 ms for each of these sequences.
const PREFILL_TOKEN_US: f64 = 50.0;
const PREFILL_STEP_US: f64 = 4_000.0;
const DECODE_STEP_US: f64 = 6_000.0;
const DECODE_SEQUENCE_US: f64 = 100.0;
/// A sequence on a worker.
pub(super) struct Sequence {
    pub(super) request: usize,
    pub(super) blocks: Vec<BlockId>,
    pub(super) computed: u64,
    pub(super) committed: usize,
    pub(super) generated: u64,
    /// The number of tokens that the sequence is expected to compute. Cached tokens are not counted.
    pub(super) own: u64,
    /// Whether the sequence's KV is received from a prefill worker.
    pub(super) received: bool,
    /// The number of blocks that were cached when the sequence was first admitted; `None` once this number is included in the hit rate.
    pub(super) cached: Option<u32>,
}

/// A worker.
pub(super) struct Worker {
    pub(super) member: MemberId,
    pub(super) role: Role,
    pub(super) slower: f64,
    pub(super) cache: PrefixCache,
    pub(super) cached: HashSet<SequenceHash>,
    pub(super) waiting: VecDeque<Sequence>,
    /// Running sequences, the oldest first.
    pub(super) running: Vec<Sequence>,
    /// Sequences whose prompts are computed and whose KV is being transferred to a decode worker.
    pub(super) sending: Vec<Sequence>,
    /// The number of sequences that are placed on this decode worker and whose prompts prefill workers are still computing.
    pub(super) expected: u32,
    /// The number of tokens that the current step computes for each sequence in `running`; `None` between steps.
    pub(super) step: Option<Vec<u64>>,
    pub(super) step_ms: f64,
    pub(super) totals: StepTotals,
    /// The number of steps that were long enough to measure a rate.
    pub(super) long_steps: u64,
}

impl Sequence {
    pub(super) fn new(request: usize, own: u64, received: bool) -> Self {
        Self { request, blocks: Vec::new(), computed: 0, committed: 0, generated: 0, own, received, cached: None }
    }

    pub(super) fn target(&self, prompts: &[Prompt]) -> u64 {
        prompts[self.request].blocks.len() as u64 * BLOCK_TOKENS + self.generated
    }

    pub(super) fn remaining(&self, prompts: &[Prompt]) -> u64 {
        self.target(prompts) - self.computed.min(self.target(prompts))
    }
}

fn common(one: &Prompt, other: &Prompt) -> usize {
    one.blocks.iter().zip(&*other.blocks).take_while(|(one, other)| one == other).count()
}

impl Worker {
    pub(super) fn new(member: MemberId, role: Role, slower: f64, capacity_blocks: u32) -> Self {
        let cache = CacheSettings { capacity_blocks, block_size: 1, prefix_caching: true, hash_key: HashKey::NONE };
        Self {
            member,
            role,
            slower,
            cache: PrefixCache::new(cache),
            cached: HashSet::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            sending: Vec::new(),
            expected: 0,
            step: None,
            step_ms: 0.0,
            totals: StepTotals::default(),
            long_steps: 0,
        }
    }

    /// Takes the cache's new events, and updates `cached` with them.
    pub(super) fn take_events(&mut self) -> Vec<KvEvent> {
        let events = self.cache.take_events();
        for event in &events {
            match &event.change {
                Change::Stored(chain) => self.cached.extend(&chain.sequence_hashes),
                Change::Removed(hashes) => hashes.iter().for_each(|hash| {
                    self.cached.remove(hash);
                }),
                Change::Cleared => self.cached.clear(),
            }
        }
        events
    }

    /// Returns how many leading blocks of the prompt are cached, or will be computed by queued or running sequences of other prompts.
    pub(super) fn known_blocks(&self, prompt: &Prompt, prompts: &[Prompt]) -> usize {
        let hashes = sequence_hashes(&HashKey::NONE, &namespace(), 1, &prompt.blocks[..prompt.blocks.len() - 1]);
        let cached = hashes.iter().take_while(|hash| self.cached.contains(hash)).count();
        let before = self.waiting.iter().chain(self.running.iter().filter(|other| other.remaining(prompts) > 0));
        before.filter(|other| !other.received).map(|other| common(&prompts[other.request], prompt)).max().unwrap_or(0).max(cached)
    }

    pub(super) fn release(&mut self, sequence: &mut Sequence) {
        for block in sequence.blocks.drain(..).rev() {
            self.cache.release(block);
        }
    }

    /// Allocates a block to each sequence whose next token needs one. If no block is available, it preempts the youngest sequences. Returns
    /// the number of preempted sequences.
    pub(super) fn grow(&mut self, prompts: &[Prompt]) -> u64 {
        let (mut at, mut preempted) = (0, 0);
        while at < self.running.len() {
            let sequence = &mut self.running[at];
            let full = sequence.blocks.len() as u64 * BLOCK_TOKENS <= sequence.target(prompts);
            if self.role == Role::Prefill || sequence.remaining(prompts) > 0 || !full {
                at += 1;
            } else if let Ok(block) = self.cache.allocate() {
                sequence.blocks.push(block);
            } else {
                let mut youngest = self.running.pop().expect("there is a running sequence");
                self.release(&mut youngest);
                (youngest.computed, youngest.committed, youngest.received) = (0, 0, false);
                youngest.own = youngest.target(prompts);
                self.waiting.push_front(youngest);
                preempted += 1;
            }
        }
        preempted
    }

    /// Admits queued sequences in order while there are blocks for them. A sequence whose next block is being computed for another sequence
    /// is skipped and stays queued.
    pub(super) fn admit(&mut self, prompts: &[Prompt]) {
        let mut at = 0;
        while at < self.waiting.len() && self.running.len() < BATCH_MAX {
            let sequence = &self.waiting[at];
            let prompt = &prompts[sequence.request];
            let reuse_max_blocks = prompt.blocks.len() as u32 - 1;
            let cached = self.cache.overlap(&namespace(), &prompt.blocks, reuse_max_blocks) as usize;
            let computes = |other: &&Sequence| other.committed < common(&prompts[other.request], prompt);
            let prefix_owners = self.running.iter().filter(|other| other.remaining(prompts) > 0).filter(computes);
            if !sequence.received
                && prefix_owners.map(|other| common(&prompts[other.request], prompt)).any(|blocks| blocks > cached)
            {
                at += 1;
                continue;
            }
            let growing = self.running.iter().filter(|other| other.remaining(prompts) == 0).count();
            let len_blocks = sequence.target(prompts).div_ceil(BLOCK_TOKENS) as u32;
            let wanted = Wanted { reuse_max_blocks, len_blocks, spare_blocks: growing as u32 + 1 };
            let Ok(acquired) = self.cache.acquire(&namespace(), &prompt.blocks, wanted) else { break };
            let mut sequence = self.waiting.remove(at).expect("the sequence is waiting");
            sequence.blocks = acquired.blocks;
            sequence.committed = acquired.cached_blocks as usize;
            sequence.computed = u64::from(acquired.cached_blocks) * BLOCK_TOKENS;
            if sequence.received {
                sequence.computed = sequence.target(prompts);
            } else if sequence.generated == 0 {
                sequence.cached = Some(acquired.cached_blocks);
            }
            let place = self.running.partition_point(|other| other.request < sequence.request);
            self.running.insert(place, sequence);
        }
    }

    /// Plans the next step. Returns the number of tokens for each running sequence, and the duration of the step in microseconds; `None` if
    /// no sequence runs.
    pub(super) fn plan(&mut self, prompts: &[Prompt]) -> Option<(Vec<u64>, f64)> {
        let (mut budget, mut decodes) = (CHUNK_TOKENS, 0);
        let tokens = self.running.iter().map(|sequence| match sequence.remaining(prompts) {
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
        let prefilled = CHUNK_TOKENS - budget;
        let mut time = if prefilled > 0 { PREFILL_STEP_US + prefilled as f64 * PREFILL_TOKEN_US } else { 0.0 };
        if decodes > 0 {
            let decode = (DECODE_STEP_US + f64::from(decodes) * DECODE_SEQUENCE_US) * self.slower;
            self.step_ms = decode / 1e3;
            time += decode / self.slower;
        }
        self.totals.prefilled_tokens += prefilled;
        self.long_steps += u64::from(prefilled >= 64);
        self.totals.generated_tokens += u64::from(decodes as u32);
        (time > 0.0).then_some((tokens, time * self.slower))
    }

    /// Commits the full blocks of the prompt of running sequence `at` that have been computed.
    pub(super) fn commit(&mut self, at: usize, prompts: &[Prompt]) {
        let sequence = &mut self.running[at];
        let tokens: &[TokenId] = &prompts[sequence.request].blocks;
        // The prompt's last block is incomplete, so it is never committed.
        let full = (sequence.computed / BLOCK_TOKENS).min(tokens.len() as u64 - 1) as usize;
        for at in sequence.committed..full {
            let parent = at.checked_sub(1).map(|parent| sequence.blocks[parent]);
            sequence.blocks[at] = self.cache.commit(&namespace(), parent, sequence.blocks[at], &tokens[at..=at]);
        }
        sequence.committed = sequence.committed.max(full);
    }

    pub(super) fn load(&self, prompts: &[Prompt]) -> Load {
        let counts = self.cache.counts();
        let pending = self.waiting.iter().filter(|sequence| !sequence.received).map(|sequence| sequence.own);
        let running = self.running.iter().map(|sequence| sequence.remaining(prompts));
        Load {
            running_sequences: self.running.len() as u32,
            waiting_requests: self.waiting.len() as u32 + self.expected,
            pending_prefill_tokens: pending.chain(running).sum(),
            free_blocks: counts.free,
            cached_blocks: counts.cached,
            in_use_blocks: counts.in_use,
            prefill_tokens_per_second: if self.totals.prefilled_tokens > 0 { 1e6 / PREFILL_TOKEN_US / self.slower } else { 0.0 },
            prefill_measurements: self.long_steps,
            prefill_fixed_ms: PREFILL_STEP_US / 1e3 * self.slower,
            decode_step_ms: self.step_ms,
            ..Default::default()
        }
    }
}
