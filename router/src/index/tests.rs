//! Property tests of the index against a naive model, which has one set of hashes per worker and counts overlap block by block.

use super::*;
use proptest::{collection::vec, prelude::*, sample::Index};
use std::collections::{BTreeMap, BTreeSet};

/// A tree of blocks, in which the path from a root to a block is a prompt. The parent of block `i` has a smaller number than `i`. Some
/// blocks have hashes with equal low bits and equal high bits.
struct Prompts {
    parents: Vec<Option<usize>>,
}

impl Prompts {
    fn new(choices: &[Option<Index>]) -> Self {
        let parents = choices.iter().enumerate().map(|(block, parent)| (block > 0).then(|| parent.map(|p| p.index(block)))?);
        Self { parents: parents.collect() }
    }

    fn hash(block: usize) -> SequenceHash {
        SequenceHash((block as u64 + 1).wrapping_mul(0x0100_0000_0000_0001))
    }

    /// Returns the hashes of the prompt that ends with this block.
    fn prompt(&self, block: usize) -> Vec<SequenceHash> {
        let mut prompt: Vec<SequenceHash> =
            std::iter::successors(Some(block), |block| self.parents[*block]).map(Self::hash).collect();
        prompt.reverse();
        prompt
    }

    fn children(&self, block: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.parents.len()).filter(move |child| self.parents[*child] == Some(block))
    }

    /// Returns the snapshot of a worker that has cached these blocks, parents first.
    fn snapshot(&self, cached: &BTreeSet<SequenceHash>) -> Snapshot {
        let stored = (0..self.parents.len())
            .filter(|block| cached.contains(&Self::hash(*block)))
            .map(|block| StoredChain { parent: self.parents[block].map(Self::hash), sequence_hashes: vec![Self::hash(block)] })
            .collect();
        Snapshot { at_event_id: 0, stored }
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// The worker computes the prompt that ends with this block.
    Store(u32, Index),
    /// The worker evicts this block if it is a leaf of its cache. If the worker has not cached the block, the removal only increments a
    /// counter.
    Evict(u32, Index),
    Clear(u32),
    Forget(u32),
    /// A snapshot of the worker arrives. It has the prompts that end with these blocks.
    Replace(u32, Vec<Index>),
    /// The worker stores a chain whose parent is a block that it has not cached.
    Orphan(u32, Index),
}

fn op() -> impl Strategy<Value = Op> {
    // The worker numbers are so large that a set of workers needs several 64-bit words. Most operations concern a few workers, so that sets
    // are shared, grow and shrink.
    let worker = prop_oneof![4 => 0..4_u32, 2 => 60..70_u32, 1 => 0..200_u32].boxed();
    let block = || any::<Index>();
    prop_oneof![
        12 => (worker.clone(), block()).prop_map(|(worker, block)| Op::Store(worker, block)),
        8 => (worker.clone(), block()).prop_map(|(worker, block)| Op::Evict(worker, block)),
        1 => worker.clone().prop_map(Op::Clear),
        1 => worker.clone().prop_map(Op::Forget),
        1 => (worker.clone(), vec(block(), 0..4)).prop_map(|(worker, blocks)| Op::Replace(worker, blocks)),
        1 => (worker, block()).prop_map(|(worker, block)| Op::Orphan(worker, block)),
    ]
}

type Model = BTreeMap<u32, BTreeSet<SequenceHash>>;

fn act(index: &mut PrefixIndex, model: &mut Model, prompts: &Prompts, op: &Op) {
    let pick = |block: &Index| block.index(prompts.parents.len());
    match op {
        Op::Store(worker, block) => {
            let cached = model.entry(*worker).or_default();
            let prompt = prompts.prompt(pick(block));
            let known = prompt.iter().take_while(|hash| cached.contains(hash)).count();
            let chain =
                StoredChain { parent: known.checked_sub(1).map(|at| prompt[at]), sequence_hashes: prompt[known..].to_vec() };
            cached.extend(&chain.sequence_hashes);
            assert_eq!(index.apply(WorkerSlot(*worker), &Change::Stored(chain)), Skipped::default());
        }
        Op::Evict(worker, block) => {
            let cached = model.entry(*worker).or_default();
            let block = pick(block);
            if prompts.children(block).any(|child| cached.contains(&Prompts::hash(child))) {
                return;
            }
            let absent_blocks = u64::from(!cached.remove(&Prompts::hash(block)));
            let skipped = index.apply(WorkerSlot(*worker), &Change::Removed(vec![Prompts::hash(block)]));
            assert_eq!(skipped, Skipped { absent_blocks, orphaned_blocks: 0 });
        }
        Op::Clear(worker) => {
            model.remove(worker);
            index.apply(WorkerSlot(*worker), &Change::Cleared);
        }
        Op::Forget(worker) => {
            model.remove(worker);
            index.forget(WorkerSlot(*worker));
        }
        Op::Replace(worker, blocks) => {
            let cached: BTreeSet<SequenceHash> = blocks.iter().flat_map(|block| prompts.prompt(pick(block))).collect();
            assert_eq!(index.replace(WorkerSlot(*worker), &prompts.snapshot(&cached)), Skipped::default());
            model.insert(*worker, cached);
        }
        Op::Orphan(worker, block) => {
            let cached = model.entry(*worker).or_default();
            let prompt = prompts.prompt(pick(block));
            if let [.., parent, last] = prompt[..]
                && !cached.contains(&parent)
            {
                let chain = StoredChain { parent: Some(parent), sequence_hashes: vec![last] };
                let skipped = index.apply(WorkerSlot(*worker), &Change::Stored(chain));
                assert_eq!(skipped, Skipped { absent_blocks: 0, orphaned_blocks: 1 });
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn index_equals_naive_model_after_any_history(
        parents in vec(prop_oneof![1 => Just(None), 9 => any::<Index>().prop_map(Some)], 1..60),
        deep in any::<bool>(),
        ops in vec(op(), 1..80),
        unknown in 0..3_usize,
    ) {
        // A deep tree is one long chain with few branches. In such a tree the galloping search skips blocks.
        let mut prompts = Prompts::new(&parents);
        if deep {
            for (block, parent) in prompts.parents.iter_mut().enumerate() {
                if block % 13 != 0 { *parent = block.checked_sub(1) }
            }
        }
        let (mut index, mut model) = (PrefixIndex::new(7), Model::new());
        for op in &ops {
            act(&mut index, &mut model, &prompts, op);
            for (worker, cached) in &model {
                prop_assert_eq!(index.blocks(WorkerSlot(*worker)), cached.len() as u64);
            }
        }
        for block in 0..prompts.parents.len() {
            let mut prompt = prompts.prompt(block);
            prompt.extend((0..unknown as u64).map(|unknown| SequenceHash(u64::MAX - unknown)));
            let leading = index.overlap(&prompt);
            for worker in 0..200_u32 {
                let leading_of = |cached: &BTreeSet<SequenceHash>| prompt.iter().take_while(|hash| cached.contains(hash)).count();
                let expected = model.get(&worker).map_or(0, leading_of);
                prop_assert_eq!(leading.get(worker as usize).copied().unwrap_or(0) as usize, expected, "worker {}", worker);
            }
        }
        for worker in model.keys() {
            index.forget(WorkerSlot(*worker));
        }
        prop_assert!(index.workers.is_empty());
        prop_assert!(index.sets.iter().all(|word| *word == 0), "every set is free and empty");
        prop_assert_eq!(index.free_sets.len(), index.sets.len() / index.words);
    }
}

#[test]
fn removal_skips_absent_block_and_continues() {
    let hashes: Vec<SequenceHash> = (1..=3).map(SequenceHash).collect();
    let mut index = PrefixIndex::new(0);
    index.apply(WorkerSlot(0), &Change::Stored(StoredChain { parent: None, sequence_hashes: hashes.clone() }));
    let skipped = index.apply(WorkerSlot(0), &Change::Removed(vec![hashes[2], SequenceHash(99), hashes[1]]));
    assert_eq!(skipped, Skipped { absent_blocks: 1, orphaned_blocks: 0 });
    assert_eq!(index.overlap(&hashes), [1]);
}

/// Compares two durations of one run, so that the result does not depend on the machine's speed. 1,000 `Cleared` events take about a
/// hundredth of the time of removing a million blocks. If each `Cleared` scanned the whole table, they would take about thirty times that
/// time.
#[test]
fn clearing_a_worker_takes_time_for_its_own_blocks_only() {
    let mut index = PrefixIndex::new(0);
    let chain = |len: u64| Change::Stored(StoredChain { parent: None, sequence_hashes: (0..len).map(SequenceHash).collect() });
    index.apply(WorkerSlot(0), &chain(1_000_000));
    let started = tokio::time::Instant::now();
    for _ in 0..1_000 {
        index.apply(WorkerSlot(1), &chain(3));
        index.apply(WorkerSlot(1), &Change::Cleared);
    }
    let clears = started.elapsed();
    assert_eq!((index.blocks(WorkerSlot(0)), index.blocks(WorkerSlot(1))), (1_000_000, 0));
    let started = tokio::time::Instant::now();
    index.forget(WorkerSlot(0));
    let all = started.elapsed();
    assert!(clears < all, "1,000 removals of three blocks took {clears:?}, one of a million blocks {all:?}");
    assert!(index.workers.is_empty());
}

#[test]
fn empty_index_reports_no_overlap() {
    let index = PrefixIndex::new(0);
    assert!(index.overlap(&[SequenceHash(1)]).is_empty());
    assert!(index.overlap(&[]).is_empty());
    assert_eq!(index.blocks(WorkerSlot(5)), 0);
}

#[test]
fn block_with_hash_zero_is_indexed() {
    let mut index = PrefixIndex::new(0);
    let chain = StoredChain { parent: None, sequence_hashes: vec![SequenceHash(0)] };
    index.apply(WorkerSlot(1), &Change::Stored(chain));
    assert_eq!(index.overlap(&[SequenceHash(0)]), [0, 1]);
}
