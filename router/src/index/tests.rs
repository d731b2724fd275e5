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
    fn new(choices: &[Option<Index>], deep: bool) -> Self {
        let parent = |(block, parent): (usize, &Option<Index>)| match parent {
            // A deep tree is one long chain with few branches, so its runs are long.
            _ if deep && block % 13 != 0 => Some(block - 1),
            Some(parent) if block > 0 => Some(parent.index(block)),
            _ => None,
        };
        Self { parents: choices.iter().enumerate().map(parent).collect() }
    }

    fn hash(block: usize) -> SequenceHash {
        SequenceHash((block as u64 + 1).wrapping_mul(0x0100_0000_0000_0001))
    }

    fn prompt(&self, block: usize) -> Vec<SequenceHash> {
        let mut prompt: Vec<SequenceHash> =
            std::iter::successors(Some(block), |block| self.parents[*block]).map(Self::hash).collect();
        prompt.reverse();
        prompt
    }

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
    /// The worker computes the prompt that ends with this block. If `again` is true, the event names blocks that the worker has already
    /// stored.
    Store {
        worker: usize,
        block: Index,
        again: bool,
    },
    /// The worker evicts the last blocks of the prompt that ends with this block, in either order. It may keep blocks after them, and may
    /// have cached only some of them.
    Evict {
        worker: usize,
        block: Index,
        count: usize,
        last_first: bool,
    },
    /// The worker evicts these blocks in this order.
    Scattered {
        worker: usize,
        blocks: Vec<Index>,
    },
    Clear(usize),
    /// The worker leaves, and another worker joins in its place.
    Leave(usize),
    /// A snapshot of the worker arrives, with the prompts that end with these blocks.
    Replace(usize, Vec<Index>),
    /// A snapshot of the worker begins to arrive and is then abandoned.
    GiveUp(Vec<Index>),
    /// The worker stores a chain whose parent is a block that it has not cached.
    Orphan(usize, Index),
    Sweep,
}

/// The number of workers. It is so large that a set of workers needs two words.
const WORKERS: usize = 70;

fn op() -> impl Strategy<Value = Op> {
    // Most operations concern only a few workers, so that sets of workers are shared, grow and shrink.
    let worker = || prop_oneof![4 => 0..4_usize, 2 => 60..WORKERS, 1 => 0..WORKERS];
    let block = any::<Index>;
    prop_oneof![
        12 => (worker(), block(), any::<bool>()).prop_map(|(worker, block, again)| Op::Store { worker, block, again }),
        8 => (worker(), block(), 1..9_usize, any::<bool>())
            .prop_map(|(worker, block, count, last_first)| Op::Evict { worker, block, count, last_first }),
        2 => (worker(), vec(block(), 1..9)).prop_map(|(worker, blocks)| Op::Scattered { worker, blocks }),
        1 => worker().prop_map(Op::Clear),
        1 => worker().prop_map(Op::Leave),
        1 => (worker(), vec(block(), 0..4)).prop_map(|(worker, blocks)| Op::Replace(worker, blocks)),
        1 => vec(block(), 0..4).prop_map(Op::GiveUp),
        1 => (worker(), block()).prop_map(|(worker, block)| Op::Orphan(worker, block)),
        2 => Just(Op::Sweep),
    ]
}

struct Modelled {
    index: PrefixIndex,
    slots: Vec<WorkerSlot>,
    cached: Vec<BTreeSet<SequenceHash>>,
}

impl Modelled {
    fn new() -> Self {
        let index = PrefixIndex::new(7);
        let slots = (0..WORKERS).map(|_| index.add_worker()).collect();
        Self { index, slots, cached: vec![BTreeSet::new(); WORKERS] }
    }

    fn store(&mut self, worker: usize, parent: Option<SequenceHash>, hashes: &[SequenceHash]) {
        let chain = StoredChain { parent, sequence_hashes: hashes.to_vec() };
        assert_eq!(self.index.apply(self.slots[worker], &Change::Stored(chain)), Skipped::default());
        self.cached[worker].extend(hashes);
    }

    fn remove(&mut self, worker: usize, hashes: Vec<SequenceHash>) {
        let absent_blocks = hashes.iter().filter(|hash| !self.cached[worker].remove(hash)).count() as u64;
        let skipped = self.index.apply(self.slots[worker], &Change::Removed(hashes));
        assert_eq!(skipped, Skipped { absent_blocks, ..Skipped::default() });
    }

    fn act(&mut self, prompts: &Prompts, op: &Op) {
        let pick = |block: &Index| block.index(prompts.parents.len());
        let of_prompts = |blocks: &[Index]| -> BTreeSet<SequenceHash> {
            blocks.iter().flat_map(|block| prompts.prompt(pick(block))).collect()
        };
        match op {
            Op::Store { worker, block, again } => {
                let prompt = prompts.prompt(pick(block));
                let known = prompt.iter().take_while(|hash| self.cached[*worker].contains(hash)).count();
                let known = if *again { known / 2 } else { known };
                self.store(*worker, known.checked_sub(1).map(|at| prompt[at]), &prompt[known..]);
            }
            Op::Evict { worker, block, count, last_first } => {
                let mut prompt = prompts.prompt(pick(block));
                let mut evicted = prompt.split_off(prompt.len().saturating_sub(*count));
                if *last_first {
                    evicted.reverse();
                }
                self.remove(*worker, evicted);
            }
            Op::Scattered { worker, blocks } => {
                self.remove(*worker, blocks.iter().map(|block| Prompts::hash(pick(block))).collect());
            }
            Op::Clear(worker) => {
                self.cached[*worker].clear();
                self.index.apply(self.slots[*worker], &Change::Cleared);
            }
            Op::Leave(worker) => {
                self.cached[*worker].clear();
                self.index.remove_worker(self.slots[*worker]);
                assert_eq!(self.index.add_worker(), self.slots[*worker], "the slot is used again");
            }
            Op::Replace(worker, blocks) => {
                let cached = of_prompts(blocks);
                assert_eq!(self.index.replace(self.slots[*worker], &prompts.snapshot(&cached)), Skipped::default());
                self.cached[*worker] = cached;
            }
            Op::GiveUp(blocks) => {
                let mut replacement = self.index.replacement();
                prompts.snapshot(&of_prompts(blocks)).stored.iter().for_each(|chain| replacement.store(chain));
            }
            Op::Orphan(worker, block) => {
                if let [.., parent, last] = prompts.prompt(pick(block))[..]
                    && !self.cached[*worker].contains(&parent)
                {
                    let chain = StoredChain { parent: Some(parent), sequence_hashes: vec![last] };
                    let skipped = self.index.apply(self.slots[*worker], &Change::Stored(chain));
                    assert_eq!(skipped, Skipped { orphaned_blocks: 1, ..Skipped::default() });
                }
            }
            Op::Sweep => {
                self.index.sweep();
            }
        }
    }

    fn assert_overlap(&self, prompt: &[SequenceHash]) {
        let leading = self.index.overlap(prompt);
        for (slot, cached) in self.slots.iter().zip(&self.cached) {
            let expected = prompt.iter().take_while(|hash| cached.contains(hash)).count();
            assert_eq!(leading[slot.0 as usize] as usize, expected, "{slot:?}");
        }
    }

    fn assert_blocks(&self) {
        for (slot, cached) in self.slots.iter().zip(&self.cached) {
            assert_eq!(self.index.blocks(*slot), cached.len() as u64, "{slot:?}");
        }
    }

    /// Checks that an index without workers is empty.
    fn finish(self) {
        self.index.check_invariants();
        self.slots.iter().for_each(|slot| self.index.remove_worker(*slot));
        while self.index.sweep() {}
        self.index.check_invariants();
        assert!(self.index.is_empty());
    }
}

impl PrefixIndex {
    fn check_invariants(&self) {
        let writer = self.writer.lock();
        let (mut held, mut blocks, mut followed) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::<_, followed::Follows>::new());
        for shard in &self.shards {
            let shard = shard.read();
            for (id, run, link) in shard.runs() {
                assert!(
                    run.len() <= run::RUN_BLOCKS && run.holders.blocks_max() == run.len() && link.followed as usize <= run.len()
                );
                for (offset, hash) in run.hashes.iter().enumerate() {
                    assert_eq!(blocks.insert(*hash, offset < link.followed as usize), None, "each block is in one run");
                }
                if let Some(before) = link.before {
                    followed.entry(before).or_default().runs += 1;
                } else {
                    assert_eq!(link.start, 0, "a run without an earlier one begins prompts");
                }
                assert_eq!(Some(&run.last), run.hashes.last());
                let (found, _) =
                    shard.find(self.mix(run.hashes[0]), &run.hashes, |_| ()).expect("a run is found by its first block");
                assert!(std::ptr::eq(found, run));
                for (row, blocks) in run.holders.to_vec() {
                    if !writer.retired.contains(&row) {
                        for (offset, hash) in run.hashes[..blocks as usize].iter().enumerate() {
                            assert_eq!(self.locate(&writer, row, *hash), Some(shard::BlockPlace { run: id, offset }));
                        }
                    }
                    assert_eq!(run.holders.get(row), blocks);
                    let (row_runs, row_blocks): &mut (usize, u64) = held.entry(row).or_default();
                    (*row_runs, *row_blocks) = (*row_runs + 1, *row_blocks + u64::from(blocks));
                }
            }
        }
        for (block, follows) in &mut followed {
            follows.absent = !blocks.contains_key(block);
            assert_ne!(blocks.get(block), Some(&false), "a run knows up to where it is followed");
        }
        writer.check(followed, &held);
    }

    fn is_empty(&self) -> bool {
        let writer = self.writer.lock();
        writer.is_empty() && self.shards.iter().all(|shard| shard.read().runs().next().is_none())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn index_equals_naive_model_after_any_history(
        parents in vec(prop_oneof![1 => Just(None), 9 => any::<Index>().prop_map(Some)], 1..60),
        deep in any::<bool>(),
        ops in vec(op(), 1..80),
        unknown in 0..3_usize,
    ) {
        let (prompts, mut modelled) = (Prompts::new(&parents, deep), Modelled::new());
        for op in &ops {
            modelled.act(&prompts, op);
            modelled.assert_blocks();
            modelled.assert_overlap(&prompts.prompt(parents.len() - 1));
        }
        for block in 0..parents.len() {
            let mut prompt = prompts.prompt(block);
            prompt.extend((0..unknown as u64).map(|unknown| SequenceHash(u64::MAX - unknown)));
            modelled.assert_overlap(&prompt);
        }
        modelled.finish();
    }
}

/// The prompts are longer than a run and have common first blocks. The workers evict blocks at the ends, at the beginnings and in the
/// middle of the prompts.
#[test]
fn overlaps_of_long_prompts_with_evicted_blocks_equal_naive_model() {
    let mut random = 1_u64;
    let mut below = |bound: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % bound
    };
    let prompts: Vec<Vec<SequenceHash>> = (1..6_u64)
        .map(|name| (0..2_500).map(|at| SequenceHash(if at < 700 * (name % 2 + 1) { at } else { name << 32 | at })).collect())
        .collect();
    let mut modelled = Modelled::new();
    for step in 0..800 {
        let (worker, prompt, len) = (below(12), &prompts[below(5)], 1 + below(2_500));
        match below(3) {
            0 => modelled.store(worker, None, &prompt[..len]),
            kind => {
                let mut removed = prompt[len - 1 - below(len).min(below(900))..len].to_vec();
                if kind == 2 {
                    removed.reverse();
                }
                modelled.remove(worker, removed);
            }
        }
        modelled.assert_blocks();
        modelled.assert_overlap(&prompts[step % 5]);
        modelled.index.sweep();
    }
    modelled.finish();
}

fn chain(first: u64, len: u64) -> Change {
    Change::Stored(StoredChain { parent: None, sequence_hashes: (first..first + len).map(SequenceHash).collect() })
}

#[test]
fn removal_skips_absent_block_and_continues() {
    let (index, hashes): (_, Vec<SequenceHash>) = (PrefixIndex::new(0), (1..=3).map(SequenceHash).collect());
    let worker = index.add_worker();
    index.apply(worker, &chain(1, 3));
    let skipped = index.apply(worker, &Change::Removed(vec![hashes[2], SequenceHash(99), hashes[1]]));
    assert_eq!(skipped, Skipped { absent_blocks: 1, ..Skipped::default() });
    assert_eq!(index.overlap(&hashes), [1]);
}

#[test]
fn empty_index_reports_no_overlap() {
    let index = PrefixIndex::new(0);
    assert!(index.overlap(&[SequenceHash(1)]).is_empty());
    assert_eq!((index.apply(WorkerSlot(5), &chain(0, 3)), index.blocks(WorkerSlot(5))), (Skipped::default(), 0));
    index.remove_worker(WorkerSlot(5));
    let worker = index.add_worker();
    assert_eq!((index.overlap(&[]), index.overlap(&[SequenceHash(1)])), (vec![0], vec![0]));
    index.apply(worker, &chain(0, 1));
    assert_eq!(index.overlap(&[SequenceHash(0)]), [1], "the hash 0 is a valid hash");
}

#[test]
fn lookups_ignore_a_removed_worker_before_its_blocks_are_swept() {
    let index = PrefixIndex::new(0);
    let (leaving, staying) = (index.add_worker(), index.add_worker());
    for worker in [leaving, staying] {
        (0..40).for_each(|name| assert_eq!(index.apply(worker, &chain(name << 32, 500)), Skipped::default()));
    }
    (40..80).for_each(|name| assert_eq!(index.apply(leaving, &chain(name << 32, 500)), Skipped::default()));
    index.remove_worker(leaving);
    let mut slices = 1;
    let joined = index.add_worker();
    assert_eq!(joined, leaving, "the slot is used again at once");
    index.apply(joined, &chain(7 << 32, 20));
    let lookup = |name: u64| index.overlap(&(name << 32..(name << 32) + 500).map(SequenceHash).collect::<Vec<_>>());
    while index.sweep() {
        slices += 1;
        (0..80).for_each(|name| assert_eq!(lookup(name), [if name == 7 { 20 } else { 0 }, if name < 40 { 500 } else { 0 }]));
    }
    assert!(slices > 4, "40,000 blocks are removed in slices, not in {slices}");
    assert_eq!((index.blocks(joined), index.blocks(staying)), (20, 20_000));
    index.check_invariants();
}

/// 10,000 workers join and leave one after another. A set of workers must remain one word of 64 bits, because numbers are used again.
#[test]
fn sets_of_workers_stay_small_while_workers_join_and_leave() {
    let index = PrefixIndex::new(0);
    let staying = index.add_worker();
    index.apply(staying, &chain(0, 10));
    for _ in 0..10_000 {
        let worker = index.add_worker();
        index.apply(worker, &chain(0, 20));
        index.apply(worker, &Change::Cleared);
        index.apply(worker, &chain(0, 5));
        index.remove_worker(worker);
        while index.sweep() {}
    }
    assert_eq!(index.view.read().visible.len(), 1);
    assert!(index.writer.lock().rows() <= 64);
    assert_eq!(index.overlap(&[SequenceHash(0)]), [1]);
    index.check_invariants();
}

/// Prompts fork within a group of blocks, so runs begin within one. What both prompts share is remembered when the last of them is removed.
#[test]
fn removed_blocks_of_prompts_that_fork_within_a_group_are_remembered() {
    let index = PrefixIndex::new(0);
    let workers = [0; 2].map(|_| index.add_worker());
    workers.iter().for_each(|worker| index.set_owner(*worker, worker.0 as u16 + 1));
    let one: Vec<SequenceHash> = (0..30).map(SequenceHash).collect();
    let other: Vec<SequenceHash> = (0..13).chain(100..117).map(SequenceHash).collect();
    let stored = |prompt: &[SequenceHash]| Change::Stored(StoredChain { parent: None, sequence_hashes: prompt.to_vec() });
    for (worker, prompt) in [(workers[0], &one), (workers[0], &other), (workers[1], &one)] {
        assert_eq!(index.apply(worker, &stored(prompt)), Skipped::default());
    }
    let remove = |worker: usize, blocks: &[SequenceHash]| {
        index.apply(workers[worker], &Change::Removed(blocks.iter().rev().copied().collect()));
    };
    let removed = |prompt: &[SequenceHash], cached| index.removed(prompt, cached).map(|prefix| (prefix.blocks, prefix.owner));
    remove(0, &other[20..]);
    remove(0, &other[13..20]);
    remove(0, &one[9..]);
    assert_eq!(removed(&other, 13), Some((30, 1)));
    assert_eq!(removed(&one, 9), None, "the other worker has these blocks");
    remove(1, &one);
    assert_eq!(removed(&one, 9), Some((30, 2)));
    remove(0, &one[..9]);
    assert_eq!((removed(&one, 0), removed(&other, 0)), (Some((30, 2)), Some((30, 1))));
    index.check_invariants();
}

#[test]
fn memory_of_removed_blocks_is_released() {
    let index = PrefixIndex::new(0);
    let (staying, leaving) = (index.add_worker(), index.add_worker());
    (0..10).for_each(|name| assert_eq!(index.apply(staying, &chain(name << 32, 100)), Skipped::default()));
    let before = index.bytes();
    (10..2_010).for_each(|name| assert_eq!(index.apply(leaving, &chain(name << 32, 500)), Skipped::default()));
    assert!(index.bytes() > 16_000_000);
    index.remove_worker(leaving);
    while index.sweep() {}
    let after = index.bytes();
    assert!(after < before + 1_000_000, "{before} bytes before, {after} after");
    assert_eq!(index.blocks(staying), 1_000);
}

/// Lookups run while another thread stores and evicts blocks. Each result must have been right at some time: the worker always has the
/// first 300 blocks, and at most 900 blocks.
#[test]
fn overlap_found_during_changes_was_right_at_some_time() {
    let index = PrefixIndex::new(0);
    let (changing, still) = (index.add_worker(), index.add_worker());
    let prompt: Vec<SequenceHash> = (0..2_000).map(SequenceHash).collect();
    index.apply(changing, &chain(0, 300));
    index.apply(still, &chain(0, 600));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for round in 0..2_000 {
                let rest = Change::Stored(StoredChain { parent: Some(prompt[299]), sequence_hashes: prompt[300..900].to_vec() });
                assert_eq!(index.apply(changing, &rest), Skipped::default());
                let end: Vec<SequenceHash> = prompt[300..900].iter().rev().copied().collect();
                assert_eq!(index.apply(changing, &Change::Removed(end)), Skipped::default());
                let other = index.add_worker();
                index.apply(other, &chain(round << 32 | 1 << 31, 700));
                index.remove_worker(other);
                while index.sweep() {}
            }
        });
        while !writer.is_finished() {
            let leading = index.overlap(&prompt);
            assert!((300..=900).contains(&leading[0]), "{}", leading[0]);
            assert_eq!(leading[1], 600);
            assert!(leading.get(2).is_none_or(|blocks| *blocks == 0));
        }
    });
    index.check_invariants();
}

proptest! {
    #[test]
    fn hybrid_workers_reuse_a_prompt_up_to_their_last_reuse_point(
        caches in vec((any::<bool>(), 0_usize..40, vec(1_usize..=40, 0..5)), 1..8),
        asked in 0_usize..40,
    ) {
        let (index, prompt) = (PrefixIndex::new(5), (1..=40).map(SequenceHash).collect::<Vec<_>>());
        let chain = |sequence_hashes: &[SequenceHash]| {
            Change::Stored(StoredChain { parent: None, sequence_hashes: sequence_hashes.to_vec() })
        };
        let mut expected = Vec::new();
        for (is_hybrid, cached, points) in &caches {
            let worker = index.add_worker();
            index.apply(worker, &chain(&prompt[..*cached]));
            if *is_hybrid {
                index.apply(worker, &chain(&[SequenceHash::REUSE_POINTS]));
            }
            for point in points {
                index.apply(worker, &chain(&[prompt[point - 1].reuse_point()]));
            }
            let leading = asked.min(*cached);
            let reusable = points.iter().copied().filter(|point| *point <= leading).max().unwrap_or(0);
            expected.push(if *is_hybrid { reusable } else { leading } as u32);
            prop_assert_eq!(index.has_first(worker, SequenceHash::REUSE_POINTS), *is_hybrid);
        }
        prop_assert_eq!(index.overlap(&prompt[..asked]), expected);
        // A removed reuse point no longer counts, nor do the reuse points of a worker that has left.
        for (slot, (_, _, points)) in caches.iter().enumerate() {
            let removed: Vec<_> = points.iter().map(|point| prompt[point - 1].reuse_point()).collect();
            index.apply(WorkerSlot(slot as u32), &Change::Removed(removed));
        }
        let left: Vec<_> = index.overlap(&prompt[..asked]);
        for (slot, (is_hybrid, cached, _)) in caches.iter().enumerate() {
            prop_assert_eq!(left[slot] as usize, if *is_hybrid { 0 } else { asked.min(*cached) });
        }
    }
}
