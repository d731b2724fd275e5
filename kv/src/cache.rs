//! The block pool and the prefix cache over it, in one owner because a block's life crosses both.

use crate::{BlockId, KvEvent, Namespace, Snapshot, TokenId};

/// What a cache is made of.
#[derive(Clone, Copy, Debug)]
pub struct CacheSettings {
    /// Blocks in the engine's memory.
    pub capacity_blocks: u32,
    /// Tokens in a block.
    pub block_size: u32,
    /// Off: nothing is ever shared or found, and no events are made.
    pub prefix_caching: bool,
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

/// free + cached + in_use is the capacity, always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Hold nothing.
    pub free: u32,
    /// Hold reusable KV that nobody uses now; may be evicted.
    pub cached: u32,
    /// Pinned by at least one sequence.
    pub in_use: u32,
}

/// Blocks, their owners and their content.
pub struct PrefixCache {
    settings: CacheSettings,
}

#[expect(unused_variables, clippy::todo)]
impl PrefixCache {
    /// An empty cache.
    pub fn new(settings: CacheSettings) -> Self {
        Self { settings }
    }

    /// What it was made with.
    pub fn settings(&self) -> CacheSettings {
        self.settings
    }

    /// In one step: finds the longest cached prefix of `tokens` (full blocks, at most `reuse_max_blocks`), pins it, and
    /// takes fresh blocks until there are `len_blocks`. All or nothing.
    pub fn acquire(
        &mut self,
        namespace: &Namespace,
        tokens: &[TokenId],
        reuse_max_blocks: u32,
        len_blocks: u32,
    ) -> Result<Acquired, Full> {
        todo!()
    }

    /// One more fresh block, pinned.
    pub fn allocate(&mut self) -> Result<BlockId, Full> {
        todo!()
    }

    /// Pins a block once more, for another owner.
    pub fn pin(&mut self, block: BlockId) {
        todo!()
    }

    /// Makes a pinned, full block reusable: it holds the KV of `tokens` after `parent`. Returns the block that stands for
    /// these tokens from now on, pinned for the caller: `block` itself, or an equal one cached before (`block` is released then).
    pub fn commit(&mut self, namespace: &Namespace, parent: Option<BlockId>, block: BlockId, tokens: &[TokenId]) -> BlockId {
        todo!()
    }

    /// Gives one pin back. A block with no pins left stays cached if it was committed, else it is free.
    pub fn release(&mut self, block: BlockId) {
        todo!()
    }

    /// Drops everything that nobody uses; what is in use is no longer found and is free when released.
    pub fn clear(&mut self) {
        todo!()
    }

    /// The changes since the last call.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        todo!()
    }

    /// Id of the last change made; 0 before the first.
    pub fn last_event_id(&self) -> u64 {
        todo!()
    }

    /// All that is cached now (pinned or not).
    pub fn snapshot(&self) -> Snapshot {
        todo!()
    }

    /// How many blocks are in which state.
    pub fn counts(&self) -> Counts {
        todo!()
    }

    /// Panics with a sentence if the books do not balance. For tests, and for an idle worker.
    pub fn check_invariants(&self) {
        todo!()
    }
}
