//! Property tests of the cache against a naive model: a list of cached prefixes that every operation searches completely.

use super::{
    super::{CacheSettings, Counts, Full, PrefixCache},
    wanted,
};
use crate::{BlockId, Change, HashKey, KvEvent, Namespace, SequenceHash, Snapshot, StoredChain, TokenId, sequence_hashes};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const BLOCK_SIZE: usize = 2;

/// An operation. The numbers `namespace` and `blocks` are used as they are. The other numbers select an item of a list, modulo the list's
/// length.
#[derive(Clone, Debug)]
enum Op {
    Acquire { namespace: usize, prompt: Vec<TokenId>, reuse: bool },
    Grow { sequence: usize, token: TokenId },
    Commit { sequence: usize, blocks: usize },
    Fork { sequence: usize },
    PinOne { sequence: usize, block: usize },
    ReleaseOne { pin: usize },
    Release { sequence: usize, first_block: usize },
    Clear,
    TakeEvents,
    Join,
}

fn op() -> impl Strategy<Value = Op> {
    let n = 0..64_usize;
    prop_oneof![
        6 => (0..2_usize, vec(0..2_u32, 1..12), prop::bool::weighted(0.9))
            .prop_map(|(namespace, prompt, reuse)| Op::Acquire { namespace, prompt, reuse }),
        4 => (n.clone(), 0..2_u32).prop_map(|(sequence, token)| Op::Grow { sequence, token }),
        8 => (n.clone(), 1..5_usize).prop_map(|(sequence, blocks)| Op::Commit { sequence, blocks }),
        1 => n.clone().prop_map(|sequence| Op::Fork { sequence }),
        1 => (n.clone(), n.clone()).prop_map(|(sequence, block)| Op::PinOne { sequence, block }),
        1 => n.clone().prop_map(|pin| Op::ReleaseOne { pin }),
        5 => (n.clone(), n).prop_map(|(sequence, first_block)| Op::Release { sequence, first_block }),
        1 => prop::bool::weighted(0.3).prop_map(|clear| if clear { Op::Clear } else { Op::TakeEvents }),
        3 => Just(Op::TakeEvents),
        1 => Just(Op::Join),
    ]
}

#[derive(Clone, Debug, PartialEq)]
struct Prefix {
    namespace: usize,
    tokens: Vec<TokenId>,
}

impl Prefix {
    fn begins(&self, other: &Prefix) -> bool {
        self.namespace == other.namespace && other.tokens.starts_with(&self.tokens)
    }
}

struct Entry {
    prefix: Prefix,
    hash: SequenceHash,
    block: BlockId,
    /// The last step in which the prefix or a continuation of it was in use.
    used_at: usize,
}

struct Sequence {
    namespace: usize,
    tokens: Vec<TokenId>,
    blocks: Vec<BlockId>,
    committed: usize,
}

impl Sequence {
    fn prefix(&self, blocks: usize) -> Prefix {
        Prefix { namespace: self.namespace, tokens: self.tokens[..blocks * BLOCK_SIZE].to_vec() }
    }
}

struct Model {
    settings: CacheSettings,
    hash_mask: u64,
    entries: Vec<Entry>,
    sequences: Vec<Sequence>,
    pins: Vec<BlockId>,
    outdated: BTreeSet<BlockId>,
    step: usize,
}

fn namespace(number: usize) -> Namespace {
    Namespace::new("model", "", "", ["", "salt"][number])
}

impl Model {
    fn entry(&self, prefix: &Prefix) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.prefix == *prefix)
    }

    /// Returns the chained hash of the prefix. The cache under test masks the hash at each step, so this function does, too.
    fn hash(&self, prefix: &Prefix) -> SequenceHash {
        let first = namespace(prefix.namespace).root(&HashKey::NONE);
        let blocks = prefix.tokens.chunks(BLOCK_SIZE);
        blocks.fold(first, |before, tokens| SequenceHash(before.child(&HashKey::NONE, tokens).0 & self.hash_mask))
    }

    fn is_held(&self, block: BlockId) -> bool {
        self.pins.contains(&block) || self.sequences.iter().any(|sequence| sequence.blocks.contains(&block))
    }

    fn is_used(&self, prefix: &Prefix) -> bool {
        self.entries.iter().any(|entry| prefix.begins(&entry.prefix) && self.is_held(entry.block))
    }

    fn blocks_in_use(&self) -> BTreeSet<BlockId> {
        let held = self.sequences.iter().flat_map(|sequence| &sequence.blocks);
        let used = self.entries.iter().filter(|entry| self.is_used(&entry.prefix)).map(|entry| &entry.block);
        held.chain(&self.pins).chain(used).copied().collect()
    }

    fn counts(&self) -> Counts {
        let in_use = self.blocks_in_use().len() as u32;
        let cached = self.entries.iter().filter(|entry| !self.is_used(&entry.prefix)).count() as u32;
        Counts { free: self.settings.capacity_blocks - in_use - cached, cached, in_use }
    }

    fn overlap(&self, prompt: &Prefix, reuse_max: usize) -> usize {
        let is_cached = |blocks: &usize| {
            let tokens = prompt.tokens[..blocks * BLOCK_SIZE].to_vec();
            self.entry(&Prefix { tokens, ..*prompt }).is_some()
        };
        (1..=reuse_max).take_while(is_cached).count()
    }

    fn evict_for(&mut self, blocks: usize) {
        while (self.counts().free as usize) < blocks {
            let is_leaf = |entry: &Entry| {
                !self.entries.iter().any(|other| other.prefix != entry.prefix && entry.prefix.begins(&other.prefix))
            };
            let evictable = self.entries.iter().enumerate().filter(|(_, entry)| is_leaf(entry) && !self.is_used(&entry.prefix));
            let (oldest, _) = evictable.min_by_key(|(_, entry)| entry.used_at).expect("an evictable block was counted");
            self.entries.remove(oldest);
        }
    }

    fn end_step(&mut self) {
        self.step += 1;
        let used: Vec<_> = self.entries.iter().map(|entry| self.is_used(&entry.prefix)).collect();
        for (entry, used) in self.entries.iter_mut().zip(used) {
            if used {
                entry.used_at = self.step;
            }
        }
    }
}

/// A router's view of the cache: the parent of each stored hash.
#[derive(Clone, Debug, Default, PartialEq)]
struct Replica {
    at_event_id: u64,
    parents: BTreeMap<SequenceHash, Option<SequenceHash>>,
}

impl Replica {
    fn from_snapshot(snapshot: &Snapshot) -> Self {
        let mut replica = Self { at_event_id: snapshot.at_event_id, ..Self::default() };
        for chain in &snapshot.stored {
            replica.store(chain);
        }
        replica
    }

    fn store(&mut self, chain: &StoredChain) {
        let mut parent = chain.parent;
        for hash in &chain.sequence_hashes {
            assert!(parent.is_none_or(|parent| self.parents.contains_key(&parent)), "a block was stored after an unknown parent");
            assert_eq!(self.parents.insert(*hash, parent), None, "a block was stored twice");
            parent = Some(*hash);
        }
    }

    fn apply(&mut self, event: &KvEvent) {
        if event.event_id <= self.at_event_id {
            return;
        }
        assert_eq!(event.event_id, self.at_event_id + 1, "the event ids have a gap");
        self.at_event_id = event.event_id;
        match &event.change {
            Change::Stored(chain) => self.store(chain),
            Change::Removed(hashes) => {
                for hash in hashes {
                    assert!(self.parents.remove(hash).is_some(), "a block was removed that was not stored");
                    assert!(
                        !self.parents.values().any(|parent| *parent == Some(*hash)),
                        "a block was removed before its children"
                    );
                }
            }
            Change::Cleared => self.parents.clear(),
        }
    }
}

struct Run {
    cache: PrefixCache,
    model: Model,
    replicas: Vec<Replica>,
}

impl Run {
    fn new(settings: CacheSettings, hash_bits: u32) -> Self {
        let cache = if hash_bits == 64 { PrefixCache::new(settings) } else { PrefixCache::with_hash_bits(settings, hash_bits) };
        let hash_mask = cache.hash_mask;
        let (entries, sequences, pins, outdated) = Default::default();
        let model = Model { settings, hash_mask, entries, sequences, pins, outdated, step: 0 };
        Self { cache, model, replicas: vec![Replica::default()] }
    }

    fn play(&mut self, ops: Vec<Op>) {
        for op in ops {
            self.play_one(op);
            self.model.end_step();
            self.check();
        }
        while !self.model.sequences.is_empty() {
            self.release(0, 0);
        }
        for block in std::mem::take(&mut self.model.pins) {
            self.cache.release(block);
        }
        self.check();
        self.take_events();
        assert_eq!(self.cache.counts().in_use, 0, "all blocks were released");
    }

    fn play_one(&mut self, op: Op) {
        let sequences = self.model.sequences.len();
        match op {
            Op::Acquire { namespace, prompt, reuse } => self.acquire(namespace, prompt, reuse),
            Op::Clear => self.clear(),
            Op::TakeEvents => self.take_events(),
            Op::Join => self.replicas.push(Replica::from_snapshot(&self.cache.snapshot())),
            Op::ReleaseOne { pin } if !self.model.pins.is_empty() => {
                let block = self.model.pins.swap_remove(pin % self.model.pins.len());
                self.cache.release(block);
            }
            Op::ReleaseOne { .. } => {}
            _ if sequences == 0 => {}
            Op::Grow { sequence, token } => self.grow(sequence % sequences, token),
            Op::Commit { sequence, blocks } => (0..blocks).for_each(|_| self.commit(sequence % sequences)),
            Op::Fork { sequence } => self.fork(sequence % sequences),
            Op::PinOne { sequence, block } => self.pin_one(sequence % sequences, block),
            Op::Release { sequence, first_block } => self.release(sequence % sequences, first_block),
        }
    }

    fn acquire(&mut self, number: usize, prompt: Vec<TokenId>, reuse: bool) {
        let model = &mut self.model;
        let reuse_max = if reuse { (prompt.len() - 1) / BLOCK_SIZE } else { 0 };
        let len_blocks = prompt.len().div_ceil(BLOCK_SIZE);
        let overlap = model.overlap(&Prefix { namespace: number, tokens: prompt.clone() }, reuse_max);
        let acquired = self.cache.acquire(&namespace(number), &prompt, wanted(reuse_max as u32, len_blocks as u32));

        let mut sequence = Sequence { namespace: number, tokens: prompt, blocks: vec![], committed: overlap };
        sequence.blocks = (1..=overlap)
            .map(|n| model.entry(&sequence.prefix(n)).expect("the model has the overlapping blocks").block)
            .collect();
        model.sequences.push(sequence);
        let counts = model.counts();
        let missing = len_blocks - overlap;
        if (counts.free + counts.cached) < missing as u32 {
            model.sequences.pop();
            return assert_eq!(acquired, Err(Full));
        }
        let acquired = acquired.expect("enough blocks are free or evictable");
        assert_eq!((acquired.cached_blocks as usize, acquired.blocks.len()), (overlap, len_blocks));
        assert_eq!(acquired.blocks[..overlap], model.sequences.last().expect("the sequence was pushed").blocks[..]);
        model.evict_for(missing);
        for block in &acquired.blocks[overlap..] {
            self.took_fresh(*block, self.model.sequences.len() - 1);
        }
    }

    fn grow(&mut self, number: usize, token: TokenId) {
        if self.model.sequences[number].tokens.len().is_multiple_of(BLOCK_SIZE) {
            let counts = self.model.counts();
            let allocated = self.cache.allocate();
            if counts.free + counts.cached == 0 {
                return assert_eq!(allocated, Err(Full));
            }
            self.model.evict_for(1);
            self.took_fresh(allocated.expect("enough blocks are free or evictable"), number);
        }
        self.model.sequences[number].tokens.push(token);
    }

    fn took_fresh(&mut self, block: BlockId, owner: usize) {
        let model = &mut self.model;
        assert!(!model.blocks_in_use().contains(&block), "a block in use was allocated again");
        assert!(!model.entries.iter().any(|entry| entry.block == block), "a cached block was allocated without eviction");
        model.outdated.remove(&block);
        model.sequences[owner].blocks.push(block);
    }

    fn commit(&mut self, number: usize) {
        let model = &mut self.model;
        let sequence = &model.sequences[number];
        let at = sequence.committed;
        if (at + 1) * BLOCK_SIZE > sequence.tokens.len() {
            return;
        }
        let (block, prefix) = (sequence.blocks[at], sequence.prefix(at + 1));
        let parent = at.checked_sub(1).map(|before| sequence.blocks[before]);
        let is_cached = |block| model.entries.iter().any(|entry| entry.block == block);
        let tokens = &sequence.tokens[at * BLOCK_SIZE..][..BLOCK_SIZE];
        let stands = self.cache.commit(&namespace(sequence.namespace), parent, block, tokens);

        let hash = model.hash(&prefix);
        let may_be_shared = model.settings.prefix_caching && parent.is_none_or(is_cached) && !model.outdated.contains(&block);
        let equal = model.entry(&prefix).map(|entry| entry.block);
        let foreign = model.entries.iter().find(|entry| equal.is_none() && entry.hash == hash);
        let foreign = foreign.map(|entry| entry.prefix.clone());
        let cached = may_be_shared && !foreign.as_ref().is_some_and(|foreign| model.is_used(foreign));
        if cached && let Some(foreign) = foreign {
            // Another prefix that is not in use has the same hash. The cache evicts it with its continuations.
            model.entries.retain(|entry| !foreign.begins(&entry.prefix));
        }
        assert_eq!(stands, equal.filter(|_| cached).unwrap_or(block));
        if cached && equal.is_none() {
            model.entries.push(Entry { prefix, hash, block, used_at: model.step });
        }
        let sequence = &mut model.sequences[number];
        sequence.blocks[at] = stands;
        sequence.committed += 1;
    }

    fn fork(&mut self, number: usize) {
        let sequence = &self.model.sequences[number];
        let full = sequence.tokens.len() / BLOCK_SIZE;
        let fork = Sequence {
            tokens: sequence.tokens[..full * BLOCK_SIZE].to_vec(),
            blocks: sequence.blocks[..full].to_vec(),
            ..*sequence
        };
        for block in &fork.blocks {
            self.cache.pin(*block);
        }
        self.model.sequences.push(fork);
    }

    fn pin_one(&mut self, number: usize, block: usize) {
        let sequence = &self.model.sequences[number];
        let at = block % sequence.blocks.len().max(1);
        let Some(block) = sequence.blocks.get(at) else { return };
        self.cache.pin(*block);
        self.model.pins.push(*block);
    }

    fn release(&mut self, number: usize, first_block: usize) {
        let mut sequence = self.model.sequences.swap_remove(number);
        let first_block = first_block % sequence.blocks.len().max(1);
        sequence.blocks.rotate_left(first_block);
        for block in sequence.blocks {
            self.cache.release(block);
        }
    }

    fn clear(&mut self) {
        self.cache.clear();
        let model = &mut self.model;
        model.entries.clear();
        model.outdated = model.blocks_in_use();
    }

    fn take_events(&mut self) {
        let events = self.cache.take_events();
        for replica in &mut self.replicas {
            events.iter().for_each(|event| replica.apply(event));
        }
        let expected = Replica::from_snapshot(&self.cache.snapshot());
        for replica in &self.replicas {
            assert_eq!(*replica, expected, "the events lead to the content of the snapshot");
        }
    }

    fn check(&self) {
        self.cache.check_invariants().unwrap();
        assert_eq!(self.cache.counts(), self.model.counts());
        // The index is compared, not a snapshot: taking a snapshot would end the merging of changes into the pending event.
        let found: BTreeSet<_> = self.cache.index.iter().map(|(hash, block)| (*hash, *block)).collect();
        let expected = self.model.entries.iter().map(|entry| (entry.hash, entry.block)).collect();
        assert_eq!(found, expected, "the cache equals the model");
    }
}

fn settings(capacity_blocks: u32, prefix_caching: bool) -> CacheSettings {
    CacheSettings { capacity_blocks, block_size: BLOCK_SIZE as u32, prefix_caching, hash_key: HashKey::NONE }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cache_equals_the_naive_model(capacity in 1..16_u32, ops in vec(op(), 1..120)) {
        Run::new(settings(capacity, true), 64).play(ops);
    }

    #[test]
    fn cache_with_collisions_equals_the_naive_model(capacity in 1..16_u32, hash_bits in 0..4_u32, ops in vec(op(), 1..120)) {
        Run::new(settings(capacity, true), hash_bits).play(ops);
    }

    #[test]
    fn disabled_cache_equals_the_naive_model(capacity in 1..16_u32, ops in vec(op(), 1..60)) {
        Run::new(settings(capacity, false), 64).play(ops);
    }

    #[test]
    fn snapshot_has_the_sequence_hashes_of_the_cached_prompts(prompt in vec(any::<TokenId>(), 0..20)) {
        let mut run = Run::new(settings(16, true), 64);
        run.play_one(Op::Acquire { namespace: 0, prompt: [prompt.clone(), vec![0]].concat(), reuse: true });
        run.play_one(Op::Commit { sequence: 0, blocks: prompt.len() / BLOCK_SIZE });
        let stored: Vec<_> = run.cache.snapshot().stored.into_iter().flat_map(|chain| chain.sequence_hashes).collect();
        prop_assert_eq!(stored, sequence_hashes(&HashKey::NONE, &namespace(0), BLOCK_SIZE, &prompt));
    }
}
