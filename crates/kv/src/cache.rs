//! The block pool and the prefix cache. One type owns both, because blocks move between the pool and the cache.
//!
//! Invariants ([`PrefixCache::check_invariants`]):
//! - A cached block's parent is cached.
//! - **A pinned cached block pins its parent.** So an unpinned block has no pinned descendants and can be evicted, and a parent always
//!   becomes unused after its children: the least recently used block is a leaf, and eviction in LRU order never leaves a child without
//!   its parent.
//! - A hash identifies at most one block. If a new block has the hash of a different, unpinned block, that one is evicted; if the different
//!   block is pinned, the new block stays private to its owner.

mod invariants;
#[cfg(test)]
mod tests;

pub use invariants::{Violation, ensure};

use crate::event::EventLog;
use crate::{BlockId, HashKey, KvEvent, Namespace, SequenceHash, Snapshot, StoredChain, TokenId};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The settings of a [`PrefixCache`]: its dimensions and options.
#[derive(Clone, Copy, Debug)]
pub struct CacheSettings {
    /// The number of blocks in the engine's memory.
    pub capacity_blocks: u32,
    /// The number of tokens in a block.
    pub block_size: u32,
    /// If false, no block is kept in the cache or found there, and there are no events.
    pub prefix_caching: bool,
    /// The key of block hashes, which is the same in the whole cluster.
    pub hash_key: HashKey,
}

/// The cache has too few blocks for the request, even if all unused blocks are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the KV cache has no free block")]
pub struct Full;

/// Blocks allocated for a prompt. Each is pinned once for the caller and must be released once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Acquired {
    /// The allocated blocks in prompt order: first those found in the cache, then fresh ones.
    pub blocks: Vec<BlockId>,
    /// The number of leading `blocks` that were found in the cache.
    pub cached_blocks: u32,
}

/// The blocks that a prompt needs.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// The largest number of leading blocks that may be taken from the cache.
    pub reuse_max_blocks: u32,
    /// The total number of blocks to return, found or fresh.
    pub len_blocks: u32,
    /// The number of free or evictable blocks that must remain for other prompts after the allocation.
    pub spare_blocks: u32,
}

/// The number of blocks in each state; their sum is the capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The number of blocks without content.
    pub free: u32,
    /// The number of blocks with reusable KV and without pins; they may be evicted.
    pub cached: u32,
    /// The number of blocks pinned by at least one sequence, directly or through a descendant.
    pub in_use: u32,
}

/// The block pool and the prefix cache. `Debug` is not implemented, because its output would contain the clients' token ids.
pub struct PrefixCache {
    settings: CacheSettings,
    blocks: Vec<Block>,
    free: Vec<BlockId>,
    index: HashMap<SequenceHash, BlockId>,
    /// Cached blocks without pins, by [`Content::unused_since`]. The first is the next to be evicted.
    unused: BTreeMap<u64, BlockId>,
    /// The number of times that any block has lost its last pin. [`Content::unused_since`] is its value when the block lost its last pin.
    clock: u64,
    log: EventLog,
    next_checked: usize,
    /// The bits of a hash that are used: all of them, except in tests that need collisions.
    hash_mask: u64,
}

#[derive(Default)]
struct Block {
    /// The number of pins: the callers' own, and one for each pinned cached child.
    pins: u32,
    /// The cached content; `None` if the block is free, or in use but not shared.
    content: Option<Content>,
    /// Whether the block was in use when the cache was cleared. Such a block is not shared until it has been free.
    outdated: bool,
}

struct Content {
    hash: SequenceHash,
    prefix: Prefix,
    tokens: Box<[TokenId]>,
    unused_since: u64,
}

/// The content before a block in its prompt: the namespace if the block is the first one, otherwise the parent block.
#[derive(Clone, PartialEq, Eq)]
enum Prefix {
    Empty(Namespace),
    Block(BlockId),
}

impl Content {
    fn parent(&self) -> Option<BlockId> {
        match self.prefix {
            Prefix::Empty(_) => None,
            Prefix::Block(parent) => Some(parent),
        }
    }

    fn equals(&self, prefix: &Prefix, tokens: &[TokenId]) -> bool {
        *self.tokens == *tokens && self.prefix == *prefix
    }
}

impl PrefixCache {
    /// Creates an empty cache.
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
            next_checked: 0,
            hash_mask: u64::MAX,
        }
    }

    /// Creates a cache whose hashes have only `bits` bits, so that collisions are frequent.
    #[cfg(test)]
    fn with_hash_bits(settings: CacheSettings, bits: u32) -> Self {
        Self { hash_mask: (1 << bits) - 1, ..Self::new(settings) }
    }

    /// Returns the settings with which the cache was created.
    pub fn settings(&self) -> CacheSettings {
        self.settings
    }

    /// Finds the longest cached prefix of `tokens` (full blocks only), pins it, and allocates fresh blocks up to the wanted length.
    ///
    /// # Errors
    /// Returns [`Full`] if there are not enough free and evictable blocks. The cache is then unchanged.
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
            self.add_pin(*id);
        }
        blocks.extend((0..missing).map(|_| self.allocate().expect("free and unused blocks were counted")));
        Ok(Acquired { blocks, cached_blocks: found as u32 })
    }

    /// Returns how many leading blocks [`PrefixCache::acquire`] would find now, at most `max_blocks`.
    pub fn overlap(&self, namespace: &Namespace, tokens: &[TokenId], max_blocks: u32) -> u32 {
        self.find(namespace, tokens, max_blocks).len() as u32
    }

    /// Allocates one fresh block, pinned for the caller. Evicts the least recently used block if none is free.
    ///
    /// # Errors
    /// Returns [`Full`] if no block is free or evictable.
    pub fn allocate(&mut self) -> Result<BlockId, Full> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let (_, id) = self.unused.pop_first().ok_or(Full)?;
                self.remove_content(id);
                id
            }
        };
        *self.block_mut(id) = Block { pins: 1, content: None, outdated: false };
        Ok(id)
    }

    /// Pins a block once more, for another owner.
    pub fn pin(&mut self, block: BlockId) {
        assert!(self.block(block).pins > 0, "only an owner of a block can share it");
        self.add_pin(block);
    }

    /// Makes a pinned, full block reusable: it holds the KV of `tokens` after `parent`. Returns the block that the caller must use for
    /// these tokens from now on, pinned: `block` itself, or an equal block that was cached before (then `block` is released).
    /// A different block with the same hash is evicted with its descendants, unless it is pinned. So a prompt that an attacker constructed
    /// to collide with another prompt keeps that prompt out of the cache only while the attacker's prompt runs.
    /// `block` stays private to its owners if its parent is private, if a different pinned block has its hash, if it was allocated before
    /// the last [`PrefixCache::clear`], or if caching is off.
    pub fn commit(&mut self, namespace: &Namespace, parent: Option<BlockId>, block: BlockId, tokens: &[TokenId]) -> BlockId {
        assert!(tokens.len() == self.settings.block_size as usize, "only full blocks are shared");
        assert!(self.block(block).pins > 0, "only an owner of a block can commit it");
        if !self.settings.prefix_caching || self.block(block).outdated {
            return block;
        }
        assert!(parent.is_none_or(|parent| self.block(parent).pins > 0), "an owner of a block also holds the blocks before it");
        let (prefix, parent_hash) = match parent {
            None => (Prefix::Empty(namespace.clone()), namespace.root(&self.settings.hash_key)),
            Some(parent) => match &self.block(parent).content {
                Some(content) => (Prefix::Block(parent), content.hash),
                None => return block,
            },
        };
        if let Some(content) = &self.block(block).content {
            assert!(content.equals(&prefix, tokens), "a cached block keeps its content");
            return block;
        }
        let hash = self.hash(parent_hash, tokens);
        if let Some(&other) = self.index.get(&hash) {
            if self.content(other).equals(&prefix, tokens) {
                self.add_pin(other);
                self.release(block);
                return other;
            }
            if self.block(other).pins > 0 {
                return block;
            }
            self.evict_with_descendants(other);
        }
        if let Some(parent) = parent {
            self.add_pin(parent);
        }
        self.index.insert(hash, block);
        self.log.stored(parent.map(|_| parent_hash), hash);
        self.block_mut(block).content = Some(Content { hash, prefix, tokens: tokens.into(), unused_since: 0 });
        block
    }

    /// Removes one pin. A block with no pins left stays cached if it was committed; otherwise it is free.
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

    /// Drops all unused blocks. Blocks in use are no longer found, and are free when released.
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

    /// Returns the changes of the cache since the last call of this method.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.log.take()
    }

    /// Returns the id of the cache's last change; 0 before the first change.
    pub fn last_event_id(&self) -> u64 {
        self.log.last_id()
    }

    /// Returns all cached blocks, pinned or not.
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
        // Each chain goes from a block down to a leaf, through one child of each block. Further chains start at the other children.
        let mut stored = Vec::new();
        while let Some(start) = starts.pop() {
            let parent = self.content(start).parent().map(|parent| self.content(parent).hash);
            let mut sequence_hashes = Vec::new();
            let mut next = Some(start);
            while let Some(id) = next {
                sequence_hashes.push(self.content(id).hash);
                let mut branches = children.remove(&id).unwrap_or_default();
                next = branches.pop();
                starts.extend(branches);
            }
            stored.push(StoredChain { parent, sequence_hashes });
        }
        Snapshot { at_event_id: self.log.last_id(), stored }
    }

    /// Returns how many blocks are in each state.
    pub fn counts(&self) -> Counts {
        let (free, cached) = (self.free.len() as u32, self.unused.len() as u32);
        Counts { free, cached, in_use: self.settings.capacity_blocks - free - cached }
    }

    fn find(&self, namespace: &Namespace, tokens: &[TokenId], max_blocks: u32) -> Vec<BlockId> {
        let mut found = Vec::new();
        let mut prefix = Prefix::Empty(namespace.clone());
        let mut hash = namespace.root(&self.settings.hash_key);
        for tokens in tokens.chunks_exact(self.settings.block_size as usize).take(max_blocks as usize) {
            hash = self.hash(hash, tokens);
            match self.index.get(&hash) {
                Some(&id) if self.content(id).equals(&prefix, tokens) => {
                    found.push(id);
                    prefix = Prefix::Block(id);
                }
                _ => break,
            }
        }
        found
    }

    /// Evicts an unpinned block and its descendants, children before their parents. A single search of the unpinned blocks finds all
    /// descendants, because none of them is pinned: a pinned block pins its ancestors.
    fn evict_with_descendants(&mut self, root: BlockId) {
        let mut evicted = vec![root];
        let mut found = HashSet::from([root]);
        // Children become unused before their parents, so the reverse order meets each parent before its children.
        for (_, &id) in self.unused.range(..self.content(root).unused_since).rev() {
            if self.content(id).parent().is_some_and(|parent| found.contains(&parent)) {
                found.insert(id);
                evicted.push(id);
            }
        }
        for id in evicted.into_iter().rev() {
            let since = self.content(id).unused_since;
            self.unused.remove(&since);
            self.remove_content(id);
            self.free.push(id);
        }
    }

    fn remove_content(&mut self, id: BlockId) {
        let content = self.block_mut(id).content.take().expect("unused blocks are cached");
        self.index.remove(&content.hash);
        self.log.removed(content.hash);
    }

    /// Adds a pin. The first pin of a cached block also pins its parent.
    fn add_pin(&mut self, block: BlockId) {
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

    fn hash(&self, parent: SequenceHash, tokens: &[TokenId]) -> SequenceHash {
        SequenceHash(parent.child(&self.settings.hash_key, tokens).0 & self.hash_mask)
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
