//! The blocks that placed requests are about to compute on the workers.
//!
//! Prompts that are being prefilled form runs like those of the index. A run is a stretch of consecutive blocks. For each worker it has the
//! number of leading blocks that prompts on the worker share with it. So a booking and a lookup take a few steps for each run, and none for
//! each block. A run refers to the blocks of the prompt that began it.
//!
//! Invariants: each run has at least one entry, and as many blocks as its largest entry; each prompt has one entry in every run along it,
//! so that the next run along a prompt is found by its first block.

use crate::index::{KeyedState, WorkerSlot};
use std::{
    collections::{HashMap, VecDeque, hash_map::Entry as Slot},
    sync::Arc,
    time::Duration,
};
use tandem_kv::SequenceHash;
use tokio::time::Instant;

/// The prompts that are being prefilled, by worker.
pub(crate) struct Predictions {
    /// The runs by their first blocks.
    runs: HashMap<SequenceHash, PredictedRun, KeyedState>,
}

struct PredictedRun {
    prompt: Arc<[SequenceHash]>,
    /// The position of the run's first block in the prompt.
    start: usize,
    blocks: usize,
    /// How many predicted prompts of a worker have a number of leading blocks of the run. Ordered by worker, then by the number of blocks.
    entries: Vec<PredictedPrompts>,
}

struct PredictedPrompts {
    worker: WorkerSlot,
    blocks: u32,
    prompts: u32,
}

impl Predictions {
    /// Returns an empty set. `key` only seeds its hash table.
    pub(crate) fn new(key: u64) -> Self {
        Self { runs: HashMap::with_hasher(KeyedState::with_seed(key)) }
    }

    /// Adds a prompt that the worker will compute.
    pub(crate) fn add(&mut self, worker: WorkerSlot, prompt: &Arc<[SequenceHash]>) {
        let mut start = 0;
        while let Some(first) = prompt.get(start) {
            start += match self.runs.entry(*first) {
                Slot::Occupied(mut run) => {
                    let blocks = run.get().common(&prompt[start..]);
                    run.get_mut().add(worker, blocks);
                    blocks
                }
                Slot::Vacant(new) => {
                    let blocks = prompt.len() - start;
                    let entries = vec![PredictedPrompts { worker, blocks: blocks as u32, prompts: 1 }];
                    new.insert(PredictedRun { prompt: prompt.clone(), start, blocks, entries });
                    return;
                }
            };
        }
    }

    /// Removes a prompt that was added for the worker.
    pub(crate) fn remove(&mut self, worker: WorkerSlot, prompt: &[SequenceHash]) {
        let mut start = 0;
        while let Some(first) = prompt.get(start) {
            let run = self.runs.get_mut(first).expect("a prompt has an entry in every run along it");
            let blocks = run.common(&prompt[start..]);
            run.remove(worker, blocks);
            if run.blocks == 0 {
                self.runs.remove(first);
            }
            start += blocks;
        }
    }

    /// Removes all prompts of a worker that leaves.
    pub(crate) fn forget(&mut self, worker: WorkerSlot) {
        self.runs.retain(|_, run| {
            run.entries.retain(|entry| entry.worker != worker);
            run.shorten();
            run.blocks > 0
        });
    }

    /// Returns for each worker, by its slot, how many leading blocks of the prompt are also blocks of a prompt that the worker will
    /// compute. Workers whose slots are beyond the end of the list have no such blocks.
    pub(crate) fn leading_blocks(&self, prompt: &[SequenceHash]) -> Vec<u32> {
        let (mut leading, mut start) = (Vec::new(), 0);
        while let Some(run) = prompt.get(start).and_then(|first| self.runs.get(first)) {
            let common = run.common(&prompt[start..]);
            for PredictedPrompts { worker, blocks, .. } in &run.entries {
                let slot = worker.0 as usize;
                if slot >= leading.len() {
                    leading.resize(slot + 1, 0);
                }
                leading[slot] = leading[slot].max((start + common.min(*blocks as usize)) as u32);
            }
            start += common;
        }
        leading
    }

    /// Returns how many leading blocks of the prompt are also blocks of a prompt that some worker will compute.
    fn longest(&self, prompt: &[SequenceHash]) -> usize {
        let mut start = 0;
        while let Some(run) = prompt.get(start).and_then(|first| self.runs.get(first)) {
            start += run.common(&prompt[start..]);
        }
        start
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

/// The prompts that workers have computed lately and may not have reported yet.
pub(crate) struct UnreportedPrompts {
    prompts: Predictions,
    /// Each prompt with the time at which it was added, the oldest first.
    added: VecDeque<(Instant, WorkerSlot, Arc<[SequenceHash]>)>,
    /// The time after which a computed prompt must have been reported.
    report_time: Duration,
    /// Maximum number of prompts. Beyond it, the oldest are dropped.
    max: usize,
}

impl UnreportedPrompts {
    /// Returns an empty set, for workers whose reports arrive late: it keeps prompts for 10 s. `key` only seeds its hash table.
    pub(crate) fn of_late_workers(key: u64) -> Self {
        Self { prompts: Predictions::new(key), added: VecDeque::new(), report_time: Duration::from_secs(10), max: 4_096 }
    }

    /// Returns an empty set, for all workers: it keeps prompts only for the second that a report usually takes. `key` only seeds its hash
    /// table.
    pub(crate) fn of_all_workers(key: u64) -> Self {
        Self { report_time: Duration::from_secs(1), max: 256, ..Self::of_late_workers(key) }
    }

    /// Adds a prompt that the worker has computed.
    pub(crate) fn add(&mut self, worker: WorkerSlot, prompt: &Arc<[SequenceHash]>, now: Instant) {
        self.prompts.add(worker, prompt);
        self.added.push_back((now, worker, prompt.clone()));
        self.expire(now);
    }

    /// Removes the prompts that must have been reported by now.
    pub(crate) fn expire(&mut self, now: Instant) {
        while let Some((at, worker, prompt)) = self.added.front()
            && (self.added.len() > self.max || now > *at + self.report_time)
        {
            self.prompts.remove(*worker, prompt);
            self.added.pop_front();
        }
    }

    /// Removes all prompts of a worker that leaves.
    pub(crate) fn forget(&mut self, worker: WorkerSlot) {
        self.prompts.forget(worker);
        self.added.retain(|(_, on, _)| *on != worker);
    }

    /// Returns as [`Predictions::leading_blocks`] how many leading blocks of the prompt are blocks of a prompt in this set.
    pub(crate) fn leading_blocks(&self, prompt: &[SequenceHash], now: Instant) -> Vec<u32> {
        if self.has_recent(now) { self.prompts.leading_blocks(prompt) } else { Vec::new() }
    }

    /// Returns how many leading blocks of the prompt are blocks of any prompt in this set.
    pub(crate) fn longest(&self, prompt: &[SequenceHash], now: Instant) -> usize {
        if self.has_recent(now) { self.prompts.longest(prompt) } else { 0 }
    }

    fn has_recent(&self, now: Instant) -> bool {
        self.added.back().is_some_and(|(at, ..)| now <= *at + self.report_time)
    }
}

impl PredictedRun {
    /// Returns how many leading blocks of the prompt `hashes` are leading blocks of the run.
    fn common(&self, hashes: &[SequenceHash]) -> usize {
        common_blocks(&self.prompt[self.start..][..self.blocks], hashes)
    }

    fn position(&self, worker: WorkerSlot, blocks: usize) -> Result<usize, usize> {
        self.entries.binary_search_by_key(&(worker, blocks as u32), |entry| (entry.worker, entry.blocks))
    }

    fn add(&mut self, worker: WorkerSlot, blocks: usize) {
        match self.position(worker, blocks) {
            Ok(at) => self.entries[at].prompts += 1,
            Err(at) => self.entries.insert(at, PredictedPrompts { worker, blocks: blocks as u32, prompts: 1 }),
        }
    }

    fn remove(&mut self, worker: WorkerSlot, blocks: usize) {
        let at = self.position(worker, blocks).expect("a prompt is removed once");
        self.entries[at].prompts -= 1;
        if self.entries[at].prompts == 0 {
            self.entries.remove(at);
            self.shorten();
        }
    }

    /// Drops the last blocks of the run if no remaining prompt has them.
    fn shorten(&mut self) {
        self.blocks = self.entries.iter().map(|entry| entry.blocks as usize).max().unwrap_or(0);
    }
}

/// Returns how many leading blocks two lists have in common. Compares 16 blocks at a time, without a branch for each block.
fn common_blocks(one: &[SequenceHash], other: &[SequenceHash]) -> usize {
    const AT_ONCE: usize = 16;
    let differences = |(one, other): (&[SequenceHash], &[SequenceHash])| {
        one.iter().zip(other).fold(0, |found, (one, other)| found | (one.0 ^ other.0))
    };
    let chunks = one.chunks_exact(AT_ONCE).zip(other.chunks_exact(AT_ONCE));
    let equal = AT_ONCE * chunks.take_while(|chunks| differences(*chunks) == 0).count();
    equal + one[equal..].iter().zip(&other[equal..]).take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::{collection::vec, prelude::*, sample::Index};

    /// Returns the hashes of a prompt that has five blocks for each token.
    fn prompt(tokens: &[u8]) -> Arc<[SequenceHash]> {
        let chain = tokens.iter().flat_map(|token| [token; 5]).scan(1_u64, |hash, token| {
            *hash = tandem_kv::mix(*hash ^ u64::from(*token));
            Some(SequenceHash(*hash))
        });
        chain.collect()
    }

    #[derive(Clone, Debug)]
    enum Op {
        Add(u32, Vec<u8>),
        Remove(Index),
        Forget(u32),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => (0..5_u32, vec(0..2_u8, 0..12)).prop_map(|(worker, tokens)| Op::Add(worker, tokens)),
            4 => any::<Index>().prop_map(Op::Remove),
            1 => (0..5_u32).prop_map(Op::Forget),
        ]
    }

    proptest! {
        #[test]
        fn predictions_equal_naive_list_of_prompts(
            ops in vec(op(), 1..60),
            asked in vec(vec(0..2_u8, 0..14), 1..10),
        ) {
            let (mut predictions, mut naive) = (Predictions::new(7), Vec::<(u32, Arc<[SequenceHash]>)>::new());
            for op in ops {
                match op {
                    Op::Add(worker, tokens) => {
                        naive.push((worker, prompt(&tokens)));
                        predictions.add(WorkerSlot(worker), &prompt(&tokens));
                    }
                    Op::Remove(which) if !naive.is_empty() => {
                        let (worker, prompt) = naive.swap_remove(which.index(naive.len()));
                        predictions.remove(WorkerSlot(worker), &prompt);
                    }
                    Op::Remove(_) => {}
                    Op::Forget(worker) => {
                        naive.retain(|(other, _)| *other != worker);
                        predictions.forget(WorkerSlot(worker));
                    }
                }
                for tokens in &asked {
                    let (asked, leading) = (prompt(tokens), predictions.leading_blocks(&prompt(tokens)));
                    let longest = leading.iter().copied().max().unwrap_or(0);
                    prop_assert_eq!(predictions.longest(&asked), longest as usize);
                    for worker in 0..5 {
                        let of_worker = naive.iter().filter(|(other, _)| *other == worker);
                        let common = |prompt: &[SequenceHash]| asked.iter().zip(prompt).take_while(|(one, other)| one == other).count();
                        let expected = of_worker.map(|(_, prompt)| common(prompt)).max().unwrap_or(0);
                        prop_assert_eq!(leading.get(worker as usize).copied().unwrap_or(0) as usize, expected);
                    }
                }
            }
            for (worker, prompt) in naive {
                predictions.remove(WorkerSlot(worker), &prompt);
            }
            prop_assert!(predictions.is_empty());
        }
    }
}
