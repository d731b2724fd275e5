//! The prefix index: which worker has cached which block. It is exact, and a query skips most blocks of a long prompt.
//!
//! One flat table maps a sequence hash to the set of workers that have cached the block. A worker's cache is prefix-closed (a block is
//! cached only while its parent is), so along a prompt the set only shrinks: [`PrefixIndex::overlap`] finds the next block that some worker
//! lacks by galloping (exponential, then binary) search and skips the blocks between.
//!
//! Invariants: every set in the table is non-empty; `by_worker[w]` has the hashes of the sets that contain `w`, so that a worker is removed
//! without scanning other workers' blocks; a stored chain whose parent the worker has not cached is skipped, so a wrong event cannot break
//! prefixes that are already in the index.

use std::collections::{HashMap, HashSet, hash_map::Entry};
use tandem_kv::{Change, SequenceHash, Snapshot, StoredChain};

/// A worker's bit position in the index's sets. Slots are small and dense: the caller reuses the slots of removed workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerSlot(pub u32);

/// The numbers of blocks of a change that the index could not apply, by reason. The rest of the change is applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Blocks that were removed but were not in the index.
    pub absent_blocks: u64,
    /// Blocks that were stored under a parent that the worker has not cached.
    pub orphaned_blocks: u64,
}

/// Maps each sequence hash to the workers that have cached the block.
pub struct PrefixIndex {
    workers: HashMap<SequenceHash, Workers, KeyedState>,
    /// All bit sets, one after the other, of `words` words each.
    sets: Vec<u64>,
    free_sets: Vec<u32>,
    words: usize,
    /// The hashes of each worker's blocks, by the worker's slot.
    by_worker: Vec<HashSet<SequenceHash, KeyedState>>,
}

/// The workers that have cached a block. Most blocks are cached by only one worker and need no bit set.
#[derive(Clone, Copy)]
enum Workers {
    One(u32),
    /// The number of the bit set in [`PrefixIndex::sets`] that names the workers.
    Set(u32),
}

impl PrefixIndex {
    /// Returns an empty index. The key only seeds hash tables; a random key keeps crafted prompts from slowing the index down.
    pub fn new(key: u64) -> Self {
        let workers = HashMap::with_hasher(KeyedState::with_seed(key));
        Self { workers, sets: Vec::new(), free_sets: Vec::new(), words: 1, by_worker: Vec::new() }
    }

    /// Applies a change of the worker's cache.
    pub fn apply(&mut self, worker: WorkerSlot, change: &Change) -> Skipped {
        let mut skipped = Skipped::default();
        match change {
            Change::Stored(chain) => self.store(worker, chain, &mut skipped),
            Change::Removed(hashes) => {
                skipped.absent_blocks = hashes.iter().filter(|hash| !self.remove(worker, **hash)).count() as u64;
            }
            Change::Cleared => self.forget(worker),
        }
        skipped
    }

    /// Replaces the worker's blocks in the index by those of the snapshot.
    pub fn replace(&mut self, worker: WorkerSlot, snapshot: &Snapshot) -> Skipped {
        self.forget(worker);
        let mut skipped = Skipped::default();
        for chain in &snapshot.stored {
            self.store(worker, chain, &mut skipped);
        }
        skipped
    }

    /// Removes all of the worker's blocks. The time is proportional to their number and independent of other workers' blocks.
    pub fn forget(&mut self, worker: WorkerSlot) {
        let Some(hashes) = self.by_worker.get_mut(worker.0 as usize) else { return };
        let empty = HashSet::with_hasher(self.workers.hasher().clone());
        for hash in std::mem::replace(hashes, empty) {
            self.remove_worker(worker, hash);
        }
    }

    /// Returns for each worker, by its slot, how many leading blocks of the prompt it has cached.
    pub fn overlap(&self, hashes: &[SequenceHash]) -> Vec<u32> {
        let mut leading = vec![0; self.by_worker.len()];
        let Some(first) = hashes.first() else { return leading };
        // Each worker in `active` has cached `hashes[..common]`.
        let mut active: Vec<u64> = (0..self.words).map(|word| self.word(self.workers.get(first), word)).collect();
        let mut common = 1;
        while active.iter().any(|word| *word != 0) {
            let common_max = self.common(hashes, common, &active);
            let next = hashes.get(common_max).and_then(|hash| self.workers.get(hash));
            for (word, active) in active.iter_mut().enumerate() {
                let keep = if common_max < hashes.len() { *active & self.word(next, word) } else { 0 };
                for bit in bits(*active & !keep) {
                    leading[word * 64 + bit] = common_max as u32;
                }
                *active = keep;
            }
            common = common_max + 1;
        }
        leading
    }

    /// Returns how many blocks the worker has cached.
    pub fn blocks(&self, worker: WorkerSlot) -> u64 {
        self.by_worker.get(worker.0 as usize).map_or(0, |hashes| hashes.len() as u64)
    }

    /// Returns the length of the longest prefix that all `active` workers have cached. They must have cached the first `from` blocks.
    fn common(&self, hashes: &[SequenceHash], from: usize, active: &[u64]) -> usize {
        let (mut cached, mut lacking, mut stride) = (from, hashes.len() + 1, 8);
        while lacking - cached > 1 {
            let probe =
                if lacking > hashes.len() { (cached + stride).min(hashes.len()) } else { cached + (lacking - cached) / 2 };
            let workers = self.workers.get(&hashes[probe - 1]);
            if active.iter().enumerate().all(|(word, active)| active & !self.word(workers, word) == 0) {
                cached = probe;
                stride *= 2;
            } else {
                lacking = probe;
            }
        }
        cached
    }

    fn store(&mut self, worker: WorkerSlot, chain: &StoredChain, skipped: &mut Skipped) {
        self.grow_to(worker);
        let hashes = &self.by_worker[worker.0 as usize];
        if chain.parent.is_some_and(|parent| !hashes.contains(&parent)) {
            skipped.orphaned_blocks += chain.sequence_hashes.len() as u64;
            return;
        }
        for hash in &chain.sequence_hashes {
            self.add(worker, *hash);
        }
    }

    fn add(&mut self, WorkerSlot(worker): WorkerSlot, hash: SequenceHash) {
        if !self.by_worker[worker as usize].insert(hash) {
            return;
        }
        let (word, bit) = place(worker);
        match self.workers.entry(hash) {
            Entry::Vacant(entry) => {
                entry.insert(Workers::One(worker));
            }
            Entry::Occupied(mut entry) => match *entry.get() {
                Workers::One(other) => {
                    let set = self.free_sets.pop().unwrap_or_else(|| {
                        self.sets.resize(self.sets.len() + self.words, 0);
                        (self.sets.len() / self.words - 1) as u32
                    });
                    let base = set as usize * self.words;
                    self.sets[base + place(other).0] |= place(other).1;
                    self.sets[base + word] |= bit;
                    entry.insert(Workers::Set(set));
                }
                Workers::Set(set) => self.sets[set as usize * self.words + word] |= bit,
            },
        }
    }

    /// Removes the block from the worker's cache in the index. Returns whether it was there.
    fn remove(&mut self, worker: WorkerSlot, hash: SequenceHash) -> bool {
        let was_cached = self.by_worker.get_mut(worker.0 as usize).is_some_and(|hashes| hashes.remove(&hash));
        if was_cached {
            self.remove_worker(worker, hash);
        }
        was_cached
    }

    /// Removes the worker from the set of workers that have cached the block. The set must contain it.
    fn remove_worker(&mut self, WorkerSlot(worker): WorkerSlot, hash: SequenceHash) {
        let Entry::Occupied(mut entry) = self.workers.entry(hash) else { unreachable!("a cached block has workers") };
        match *entry.get() {
            Workers::One(_) => {
                entry.remove();
            }
            Workers::Set(set) => {
                let (word, bit) = place(worker);
                let members = &mut self.sets[set as usize * self.words..][..self.words];
                members[word] &= !bit;
                if members.iter().map(|word| word.count_ones()).sum::<u32>() == 1 {
                    let word = members.iter().position(|word| *word != 0).expect("one member is left");
                    entry.insert(Workers::One(word as u32 * 64 + members[word].trailing_zeros()));
                    members[word] = 0;
                    self.free_sets.push(set);
                }
            }
        }
    }

    /// Returns one 64-bit word of a set of workers.
    fn word(&self, workers: Option<&Workers>, word: usize) -> u64 {
        match workers {
            Some(Workers::One(worker)) if place(*worker).0 == word => place(*worker).1,
            Some(Workers::Set(set)) if word < self.words => self.sets[*set as usize * self.words + word],
            None | Some(Workers::One(_) | Workers::Set(_)) => 0,
        }
    }

    /// Enlarges the sets if they have no bit for this worker yet.
    fn grow_to(&mut self, WorkerSlot(worker): WorkerSlot) {
        if worker as usize >= self.by_worker.len() {
            self.by_worker.resize(worker as usize + 1, HashSet::with_hasher(self.workers.hasher().clone()));
        }
        let (word, _) = place(worker);
        if word >= self.words {
            let words = (word + 1).next_power_of_two();
            let mut sets = vec![0; self.sets.len() / self.words * words];
            for (old, new) in self.sets.chunks_exact(self.words).zip(sets.chunks_exact_mut(words)) {
                new[..self.words].copy_from_slice(old);
            }
            (self.sets, self.words) = (sets, words);
        }
    }
}

/// Returns the index of a worker's word in a set, and the worker's bit in that word.
fn place(worker: u32) -> (usize, u64) {
    (worker as usize / 64, 1 << (worker % 64))
}

/// Returns the positions of the bits that are set.
fn bits(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros() as usize)?;
        word &= word - 1;
        Some(bit)
    })
}

/// Sequence hashes are hashes already, so the tables use a fast hash function. Its seed keeps clients from choosing the tables' buckets.
pub(crate) type KeyedState = foldhash::fast::FixedState;

#[cfg(test)]
mod tests;
