//! The block pool and the prefix cache over it, in one owner because a block's life crosses both.
//!
//! What must stay true ([`PrefixCache::check_invariants`]):
//! - A cached block's parent is cached.
//! - **A pinned cached block pins its parent.** So whatever has no pins has no pinned block after it and can be evicted,
//!   and a parent always falls out of use after its children: the block longest unused is a leaf, and eviction in that
//!   order never leaves a child without its parent.
//! - A hash leads to one block at most. A new block takes the hash of a different one that is unpinned, which is evicted; while the
//!   different one is pinned, the new block stays private to its owner.

mod invariants;
#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;

use crate::event::EventLog;
use crate::{BlockId, HashKey, KvEvent, Namespace, SequenceHash, Snapshot, StoredChain, TokenId};
use std::collections::{BTreeMap, HashMap, HashSet};

/// What a cache is made of.
#[derive(Clone, Copy, Debug)]
pub struct CacheSettings {
    /// Blocks in the engine's memory.
    pub capacity_blocks: u32,
    /// Tokens in a block.
    pub block_size: u32,
    /// Off: nothing is ever shared or found, and no events are made.
    pub prefix_caching: bool,
    /// The key of block hashes; the same in the whole cluster.
    pub hash_key: HashKey,
}

/// Not enough blocks, even after evicting all that could be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the KV cache has no free block")]
pub struct Full;

/// Blocks taken for a prompt; each is pinned once for the caller and must be released once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acquired {
    /// In prompt order: first those found in the cache, then fresh ones.
    pub blocks: Vec<BlockId>,
    /// How many of them were found.
    pub cached_blocks: u32,
}

/// What a prompt asks of the cache.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Leading blocks that may be taken from the cache.
    pub reuse_max_blocks: u32,
    /// Blocks in all, found or fresh.
    pub len_blocks: u32,
    /// Blocks that must still be there for others afterwards, free or evictable.
    pub spare_blocks: u32,
}

/// free + cached + in_use is the capacity, always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Hold nothing.
    pub free: u32,
    /// Hold reusable KV that nobody uses now; may be evicted.
    pub cached: u32,
    /// Pinned by at least one sequence, themselves or through a block after them.
    pub in_use: u32,
}

/// Blocks, their owners and their content. Has no `Debug`: it would print token ids.
pub struct PrefixCache {
    settings: CacheSettings,
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    /// Every cached block, by its hash.
    index: HashMap<SequenceHash, BlockId>,
    /// Cached blocks without pins, by [`Content::unused_since`]. The first is the next to go.
    unused: BTreeMap<u64, BlockId>,
    /// Grows by one whenever a block falls out of use.
    clock: u64,
    log: EventLog,
    /// All ones, except in tests which want collisions.
    hash_mask: u64,
}

#[derive(Default)]
struct Block {
    /// Those of the callers, and one for each pinned cached child.
    pins: u32,
    /// What it is found by; `None`: free, or private to whoever pins it.
    content: Option<Content>,
    /// Was in use when the cache was cleared: stays private until it is free.
    outdated: bool,
}

struct Content {
    hash: SequenceHash,
    before: Before,
    tokens: Box<[TokenId]>,
    /// Its key in [`PrefixCache::unused`] while it has no pins.
    unused_since: u64,
}

/// What a block's KV depends on besides its own tokens.
#[derive(Clone, PartialEq, Eq)]
enum Before {
    /// It begins a prompt.
    Nothing(Namespace),
    /// A cached block.
    Block(BlockId),
}

impl Content {
    fn parent(&self) -> Option<BlockId> {
        match self.before {
            Before::Nothing(_) => None,
            Before::Block(parent) => Some(parent),
        }
    }

    fn is(&self, before: &Before, tokens: &[TokenId]) -> bool {
        *self.tokens == *tokens && self.before == *before
    }
}

impl PrefixCache {
    /// An empty cache.
    pub fn new(settings: CacheSettings) -> Self {
        assert!(settings.block_size > 0, "a block holds at least one token");
        Self {
            settings,
            blocks: (0..settings.capacity_blocks).map(|_| Block::default()).collect(),
            free: (0..settings.capacity_blocks).rev().map(BlockId).collect(),
            index: HashMap::new(),
            unused: BTreeMap::new(),
            clock: 0,
            log: EventLog::default(),
            hash_mask: u64::MAX,
        }
    }

    /// A cache whose hashes have only `bits` bits, so that different blocks often have the same.
    #[cfg(test)]
    fn with_hash_bits(settings: CacheSettings, bits: u32) -> Self {
        Self { hash_mask: (1 << bits) - 1, ..Self::new(settings) }
    }

    /// What it was made with.
    pub fn settings(&self) -> CacheSettings {
        self.settings
    }

    /// In one step: finds the longest cached prefix of `tokens` (full blocks only), pins it, and takes fresh blocks until
    /// there are as many as wanted. All or nothing.
    pub fn acquire(&mut self, namespace: &Namespace, tokens: &[TokenId], wanted: Wanted) -> Result<Acquired, Full> {
        let Wanted { reuse_max_blocks, len_blocks, spare_blocks } = wanted;
        let mut blocks = self.find(namespace, tokens, reuse_max_blocks.min(len_blocks));
        let found = blocks.len();
        let missing = len_blocks as usize - found;
        let found_unused = blocks.iter().filter(|id| self.block(**id).pins == 0).count();
        if missing + spare_blocks as usize > self.free.len() + self.unused.len() - found_unused {
            return Err(Full);
        }
        for id in &blocks {
            self.hold(*id);
        }
        blocks.extend((0..missing).map(|_| self.take().expect("free and unused blocks were counted")));
        Ok(Acquired { blocks, cached_blocks: found as u32 })
    }

    /// Leading blocks that [`PrefixCache::acquire`] would find now, at most `max_blocks`.
    pub fn overlap(&self, namespace: &Namespace, tokens: &[TokenId], max_blocks: u32) -> u32 {
        self.find(namespace, tokens, max_blocks).len() as u32
    }

    /// One more fresh block, pinned.
    pub fn allocate(&mut self) -> Result<BlockId, Full> {
        self.take().ok_or(Full)
    }

    /// Pins a block once more, for another owner.
    pub fn pin(&mut self, block: BlockId) {
        assert!(self.block(block).pins > 0, "only who holds a block can share it");
        self.hold(block);
    }

    /// Makes a pinned, full block reusable: it holds the KV of `tokens` after `parent`. Returns the block that stands for
    /// these tokens from now on, pinned for the caller: `block` itself, or an equal one cached before (`block` is released then).
    ///
    /// A different block that has the same hash is evicted with all that is cached after it, unless it is pinned: a prompt that was
    /// built to collide with another one must not keep that one out of the cache for longer than it runs itself.
    ///
    /// `block` stays private to its owners if it cannot be found by others: its parent is private, a different pinned block has its
    /// hash, it is older than the last [`PrefixCache::clear`], or caching is off.
    pub fn commit(&mut self, namespace: &Namespace, parent: Option<BlockId>, block: BlockId, tokens: &[TokenId]) -> BlockId {
        assert!(tokens.len() == self.settings.block_size as usize, "only full blocks are shared");
        assert!(self.block(block).pins > 0, "only who holds a block can say what is in it");
        if !self.settings.prefix_caching || self.block(block).outdated {
            return block;
        }
        assert!(parent.is_none_or(|parent| self.block(parent).pins > 0), "an owner of a block also holds the blocks before it");
        let (before, hash_before) = match parent {
            None => (Before::Nothing(namespace.clone()), namespace.root(&self.settings.hash_key)),
            Some(parent) => match &self.block(parent).content {
                Some(content) => (Before::Block(parent), content.hash),
                None => return block,
            },
        };
        if let Some(content) = &self.block(block).content {
            assert!(content.is(&before, tokens), "a cached block keeps its content");
            return block;
        }
        let hash = self.hash(hash_before, tokens);
        if let Some(&other) = self.index.get(&hash) {
            if self.content(other).is(&before, tokens) {
                self.hold(other);
                self.release(block);
                return other;
            }
            if self.block(other).pins > 0 {
                return block;
            }
            self.evict_with_descendants(other);
        }
        if let Some(parent) = parent {
            self.hold(parent);
        }
        self.index.insert(hash, block);
        self.log.stored(parent.map(|_| hash_before), hash);
        self.block_mut(block).content = Some(Content { hash, before, tokens: tokens.into(), unused_since: 0 });
        block
    }

    /// Gives one pin back. A block with no pins left stays cached if it was committed, else it is free.
    pub fn release(&mut self, block: BlockId) {
        let mut next = Some(block);
        while let Some(id) = next {
            let block = &mut self.blocks[id.0 as usize];
            assert!(block.pins > 0, "a block is released as often as it was pinned");
            block.pins -= 1;
            if block.pins > 0 {
                return;
            }
            next = match &mut block.content {
                None => {
                    self.free.push(id);
                    None
                }
                Some(content) => {
                    self.clock += 1;
                    content.unused_since = self.clock;
                    self.unused.insert(self.clock, id);
                    content.parent()
                }
            };
        }
    }

    /// Drops everything that nobody uses; what is in use is no longer found and is free when released.
    pub fn clear(&mut self) {
        self.index.clear();
        self.unused.clear();
        self.free.clear();
        let pinned = self.blocks.iter().filter(|block| block.pins > 0);
        let pins_of_children: Vec<_> = pinned.filter_map(|block| block.content.as_ref()?.parent()).collect();
        for parent in pins_of_children {
            self.block_mut(parent).pins -= 1;
        }
        for (id, block) in self.blocks.iter_mut().enumerate() {
            block.content = None;
            block.outdated = block.pins > 0;
            if block.pins == 0 {
                self.free.push(BlockId(id as u32));
            }
        }
        if self.settings.prefix_caching {
            self.log.cleared();
        }
    }

    /// The changes since the last call.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.log.take()
    }

    /// Id of the last change made; 0 before the first.
    pub fn last_event_id(&self) -> u64 {
        self.log.last_id()
    }

    /// All that is cached now (pinned or not).
    pub fn snapshot(&self) -> Snapshot {
        let mut starts = Vec::new();
        let mut children: HashMap<BlockId, Vec<BlockId>> = HashMap::new();
        for (id, block) in (0..).map(BlockId).zip(&self.blocks) {
            match block.content.as_ref().map(Content::parent) {
                None => {}
                Some(None) => starts.push(id),
                Some(Some(parent)) => children.entry(parent).or_default().push(id),
            }
        }
        // Each chain goes on to a leaf; where it passes a fork, the other ways start chains of their own later.
        let mut stored = Vec::new();
        while let Some(start) = starts.pop() {
            let parent = self.content(start).parent().map(|parent| self.content(parent).hash);
            let mut sequence_hashes = Vec::new();
            let mut next = Some(start);
            while let Some(id) = next {
                sequence_hashes.push(self.content(id).hash);
                let mut ways = children.remove(&id).unwrap_or_default();
                next = ways.pop();
                starts.extend(ways);
            }
            stored.push(StoredChain { parent, sequence_hashes });
        }
        Snapshot { at_event_id: self.log.last_id(), stored }
    }

    /// How many blocks are in which state.
    pub fn counts(&self) -> Counts {
        let (free, cached) = (self.free.len() as u32, self.unused.len() as u32);
        Counts { free, cached, in_use: self.settings.capacity_blocks - free - cached }
    }

    /// The longest cached prefix, at most `max_blocks` long.
    fn find(&self, namespace: &Namespace, tokens: &[TokenId], max_blocks: u32) -> Vec<BlockId> {
        let mut found = Vec::new();
        let mut before = Before::Nothing(namespace.clone());
        let mut hash = namespace.root(&self.settings.hash_key);
        for tokens in tokens.chunks_exact(self.settings.block_size as usize).take(max_blocks as usize) {
            hash = self.hash(hash, tokens);
            match self.index.get(&hash) {
                Some(&id) if self.content(id).is(&before, tokens) => {
                    found.push(id);
                    before = Before::Block(id);
                }
                _ => break,
            }
        }
        found
    }

    /// A block that holds nothing, pinned once; the block longest unused is evicted for it if need be.
    fn take(&mut self) -> Option<BlockId> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let (_, id) = self.unused.pop_first()?;
                self.forget(id);
                id
            }
        };
        *self.block_mut(id) = Block { pins: 1, content: None, outdated: false };
        Some(id)
    }

    /// Evicts an unpinned block and all cached blocks after it, children before their parents. One look at each unpinned block: a
    /// pinned block pins its parents, so none comes after an unpinned one.
    fn evict_with_descendants(&mut self, root: BlockId) {
        let mut evicted = vec![root];
        let mut found = HashSet::from([root]);
        // Children fall out of use before their parents: from the latest to the earliest, each parent is met before its children.
        for (_, &id) in self.unused.range(..self.content(root).unused_since).rev() {
            if self.content(id).parent().is_some_and(|parent| found.contains(&parent)) {
                found.insert(id);
                evicted.push(id);
            }
        }
        for id in evicted.into_iter().rev() {
            let since = self.content(id).unused_since;
            self.unused.remove(&since);
            self.forget(id);
            self.free.push(id);
        }
    }

    /// An unpinned block that is no longer listed as such is no longer found, either.
    fn forget(&mut self, id: BlockId) {
        let content = self.block_mut(id).content.take().expect("unused blocks are cached");
        self.index.remove(&content.hash);
        self.log.removed(content.hash);
    }

    /// One more pin; the first one of a cached block pins its parent too.
    fn hold(&mut self, block: BlockId) {
        let mut next = Some(block);
        while let Some(id) = next.take() {
            let block = &mut self.blocks[id.0 as usize];
            if let (0, Some(content)) = (block.pins, &block.content) {
                self.unused.remove(&content.unused_since);
                next = content.parent();
            }
            block.pins += 1;
        }
    }

    fn hash(&self, before: SequenceHash, tokens: &[TokenId]) -> SequenceHash {
        SequenceHash(before.child(&self.settings.hash_key, tokens).0 & self.hash_mask)
    }

    fn block(&self, id: BlockId) -> &Block {
        &self.blocks[id.0 as usize]
    }

    fn block_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.0 as usize]
    }

    fn content(&self, id: BlockId) -> &Content {
        self.block(id).content.as_ref().expect("the index and parents lead to cached blocks")
    }
}
