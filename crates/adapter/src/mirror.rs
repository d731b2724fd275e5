//! The adapter's copy of an engine's prefix cache, in Tandem's blocks.
//!
//! An engine's block has `engine_block_size` ÷ `block_size` Tandem blocks. Their sequence hashes are computed from the block's tokens and
//! the block before it or, for a prompt's first block, the salt. A block that cannot be identified in this way is not routable: neither it
//! nor a block after it is reported, and [`Unroutable`] counts it.
//!
//! Invariants:
//! - Every identified block is counted in each tier as often as the engine has reported it there, because engines keep duplicates.
//! - A Tandem block is *reported* while an engine block holds it and its parent is reported. So the reported blocks are prefix-closed, as
//!   the router's index requires, even while an engine has dropped a block and kept its children.
//! - A snapshot and the mirror's later events together give the blocks that are reported now.
//!
//! If a model has several groups of layers, the blocks of the first one with full attention are mirrored. The others decide up to which of these
//! blocks a prefix can be reused (`groups`).
//!
//! If an engine publishes no KV events, its mirror holds the blocks that it is assumed to have cached ([`Mirror::assume_stored`]).

mod assumed;
mod blocks;
mod groups;

use crate::event::{BlocksRemoved, BlocksStored, EngineEvent, EngineHash, ExtraKeys};
use assumed::Assumed;
use blocks::MirrorBlocks;
use foldhash::fast::RandomState;
use groups::{LayerGroups, Need};
use std::collections::{BTreeSet, HashMap};
use tandem_kv::{
    ByTier, HashKey, ImageStart, KvEvent, Namespace, SequenceHash, Snapshot, Tier, TokenId, child_hashes, root_hash,
};

/// The settings of a [`Mirror`].
#[derive(Clone, Copy, Debug)]
pub struct MirrorSettings {
    /// The key with which the cluster's sequence hashes are computed.
    pub hash_key: HashKey,
    /// The number of tokens in a block of the cluster.
    pub block_size: u32,
    /// The number of tokens in a block of the engine: a multiple of `block_size`.
    pub engine_block_size: u32,
    /// The capacity of the engine's device memory, in blocks of the cluster. At most this many blocks are assumed to be cached.
    pub device_blocks: u32,
    /// Whether the engine also reports the leading blocks that a request found in the cache, as stored blocks without a parent (vLLM's
    /// `kv_cache_report_mode: full`).
    pub hits_are_reported: bool,
    /// The tier that is in truth a store outside of the host; `None` if the engine's events name each tier as it is.
    pub store: Option<Tier>,
    /// Maximum number of engine blocks that are mirrored, in all tiers. Further blocks that an engine stores are not routable.
    pub engine_blocks_max: usize,
}

/// The engine's block size is not a multiple of the cluster's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the engine's block size of {engine_block_size} tokens is not a multiple of the cluster's, {block_size} tokens; change one of the two"
)]
pub struct WrongBlockSize {
    /// The number of tokens in a block of the engine.
    pub engine_block_size: u32,
    /// The number of tokens in a block of the cluster.
    pub block_size: u32,
}

/// The numbers of engine blocks that were stored but are not routable, by reason. They never decrease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unroutable {
    /// The number of first blocks of prompts whose cache salt was not made by Tandem.
    pub namespace: u64,
    /// The number of blocks after a block that is not routable or that the mirror does not know.
    pub parent: u64,
    /// The number of blocks whose KV depends on more than tokens, cache salt and images of Tandem's clients.
    pub extra_keys: u64,
    /// The number of blocks of layers whose kind of attention has no known rule for reuse.
    pub group: u64,
    /// The number of blocks of another size, or without their tokens.
    pub block_size: u64,
    /// The number of blocks in a kind of memory that Tandem does not know.
    pub medium: u64,
    /// The number of blocks beyond the maximum number of mirrored blocks.
    pub excess: u64,
}

/// A copy of one engine's prefix cache, in blocks of the cluster.
pub struct Mirror {
    settings: MirrorSettings,
    /// The engine chooses these hashes. The seed of the table's hash function is random, and an engine that found collisions nevertheless
    /// would slow only its own worker.
    engine_blocks: HashMap<EngineHash, EngineBlock, RandomState>,
    blocks: MirrorBlocks,
    assumed: Assumed,
    /// The group of layers whose blocks are mirrored: the first group with full attention that the engine reported; `None` before its first report.
    group: Option<u32>,
    groups: LayerGroups,
    ignored_kinds: BTreeSet<String>,
    unroutable: Unroutable,
}

struct EngineBlock {
    /// The Tandem block before this block; `None` at the start of a prompt.
    parent: Option<SequenceHash>,
    /// The sequence hashes of the Tandem blocks in this engine block, in the order of their tokens.
    hashes: BlockHashes,
    copies: ByTier<u32>,
}

/// The hashes of the Tandem blocks in an engine block. Most engines' blocks have one.
enum BlockHashes {
    One(SequenceHash),
    Several(Box<[SequenceHash]>),
}

/// What the mirror does with the blocks of a group of layers.
enum GroupUse {
    /// Mirrors them: the group decides which blocks are cached.
    Mirrored,
    /// Follows the group at this position in [`LayerGroups`]: it decides up to which blocks a prefix can be reused.
    Followed(usize),
    /// Counts them only.
    Ignored,
}

/// What precedes an engine's block in its prompt: nothing, a known Tandem block, or an unknown one.
#[derive(Clone, Copy)]
enum Before {
    Nothing,
    Block(SequenceHash),
    Unidentified,
}

/// The kinds of attention that can reuse a cached prefix if all of its blocks are cached.
const FULL_ATTENTION: [&str; 3] = ["full_attention", "mla_attention", "sink_full_attention"];
/// Maximum number of names of ignored kinds of attention and memory that are kept for the log. vLLM has ten kinds of attention.
const IGNORED_KINDS_MAX: usize = 16;

impl Mirror {
    /// Returns the mirror of an empty cache.
    ///
    /// # Errors
    /// Fails if the engine's block size is not a multiple of the cluster's.
    pub fn new(settings: MirrorSettings) -> Result<Self, WrongBlockSize> {
        let MirrorSettings { block_size, engine_block_size, device_blocks, .. } = settings;
        if block_size == 0 || engine_block_size == 0 || !engine_block_size.is_multiple_of(block_size) {
            return Err(WrongBlockSize { engine_block_size, block_size });
        }
        Ok(Self {
            settings,
            engine_blocks: HashMap::default(),
            blocks: MirrorBlocks::default(),
            assumed: Assumed::new(device_blocks as usize),
            group: None,
            groups: LayerGroups::default(),
            ignored_kinds: BTreeSet::new(),
            unroutable: Unroutable::default(),
        })
    }

    /// Returns the maximum number of blocks in the mirror.
    pub fn cached_blocks_max(&self) -> u32 {
        let MirrorSettings { block_size, engine_block_size, device_blocks, engine_blocks_max, .. } = self.settings;
        // Each block may also be in the tiers' chains, and each engine block a reuse point. Some more markers describe other blocks.
        let blocks = (engine_block_size / block_size) as usize * (1 + Tier::ALL.len()) + 1;
        let identified = engine_blocks_max.saturating_mul(blocks).saturating_add(2 + Tier::ALL.len());
        device_blocks.max(identified.try_into().unwrap_or(u32::MAX))
    }

    /// Applies events in the order in which the engine reported them.
    pub fn apply(&mut self, events: &[EngineEvent]) {
        for event in events {
            match event {
                EngineEvent::Stored(stored) => self.store(stored),
                EngineEvent::Removed(removed) => self.remove(removed),
                EngineEvent::Cleared => self.clear(),
            }
        }
    }

    /// Assumes that an engine without KV events has cached a sequence of tokens that it computed. At most `device_blocks` blocks are assumed to be
    /// cached. The least recently used ones are dropped first, children before their parents.
    pub fn assume_stored(&mut self, namespace: &Namespace, tokens: &[TokenId], images: &[ImageStart]) {
        let whole = tokens.len() - tokens.len() % self.settings.engine_block_size as usize;
        let hashes = self.sequence_hashes(namespace, &tokens[..whole], images);
        self.assumed.store(&hashes, &mut self.blocks);
    }

    /// Drops all blocks of the mirror.
    pub fn clear(&mut self) {
        self.engine_blocks.clear();
        self.assumed.clear();
        self.blocks.clear();
        self.groups.clear(&mut self.blocks);
        self.mark_unfollowed();
    }

    /// Returns the changes of the reported blocks since the last call. The ids of all changes of a mirror have no gaps.
    pub fn take(&mut self) -> Vec<KvEvent> {
        self.blocks.take()
    }

    /// Returns the id of the last change of the reported blocks.
    pub fn last_id(&self) -> u64 {
        self.blocks.last_id()
    }

    /// Returns all reported blocks of the mirror.
    pub fn snapshot(&self) -> Snapshot {
        self.blocks.snapshot()
    }

    /// Returns the number of reported Tandem blocks, without reuse points and other markers.
    pub fn cached_blocks(&self) -> usize {
        self.blocks.reported()
    }

    /// Returns the number of blocks in each tier; all 0 if only the device has ever held blocks.
    pub fn tier_blocks(&self) -> ByTier<u32> {
        self.blocks.tier_blocks()
    }

    /// Returns how many leading blocks of a prompt the engine has cached and can reuse, by tier: first those on the device, then those that follow
    /// in each slower tier.
    pub fn cached_prefix(&self, namespace: &Namespace, tokens: &[TokenId], images: &[ImageStart]) -> ByTier<u32> {
        let hashes = self.sequence_hashes(namespace, tokens, images);
        let held = self.blocks.prefix(&hashes);
        let mut reusable = self.groups.reusable(&hashes[..held.iter().sum::<u32>() as usize]) as u32;
        held.map(|blocks| {
            let used = blocks.min(reusable);
            reusable -= used;
            used
        })
    }

    /// Returns the numbers of blocks that were not routable.
    pub fn unroutable(&self) -> &Unroutable {
        &self.unroutable
    }

    /// Returns the kinds of attention and memory whose blocks were ignored, as the engine names them.
    pub fn ignored_kinds(&self) -> &BTreeSet<String> {
        &self.ignored_kinds
    }

    fn sequence_hashes(&self, namespace: &Namespace, tokens: &[TokenId], images: &[ImageStart]) -> Vec<SequenceHash> {
        let MirrorSettings { hash_key, block_size, .. } = &self.settings;
        child_hashes(hash_key, namespace.root(hash_key), *block_size as usize, tokens, images)
    }

    fn store(&mut self, stored: &BlocksStored) {
        let tier = match &stored.tier {
            Ok(tier) => self.tier(*tier),
            Err(unknown) => {
                self.unroutable.medium += stored.hashes.len() as u64;
                let name = format!("medium {unknown}");
                return self.ignore(name);
            }
        };
        match self.group_use(stored) {
            GroupUse::Mirrored => {}
            GroupUse::Followed(position) => return self.hold_followed(position, stored),
            GroupUse::Ignored => {
                self.unroutable.group += stored.hashes.len() as u64;
                return;
            }
        }
        let is_held = |block: &EngineBlock| block.copies[tier.index()] > 0;
        let begins_held =
            stored.parent.is_none() && stored.hashes.first().and_then(|first| self.engine_blocks.get(first)).is_some_and(is_held);
        // The engine reports a prompt's first block as stored although it already holds that block. So the event reports blocks that were found in
        // the cache.
        let are_hits = self.settings.hits_are_reported && begins_held;
        let mut before = match &stored.parent {
            None => Before::Nothing,
            Some(parent) => self.engine_blocks.get(parent).map_or(Before::Unidentified, EngineBlock::last),
        };
        for (index, hash) in stored.hashes.iter().enumerate() {
            before = match self.identify(stored, index, before) {
                Ok(mut block) => {
                    if !(are_hits && is_held(&block)) {
                        block.hold(tier, &mut self.blocks);
                    }
                    let last = block.last();
                    if let Before::Block(last) = last {
                        self.groups.learn(hash, block.parent, last, &mut self.blocks);
                    }
                    self.engine_blocks.insert(hash.clone(), block);
                    last
                }
                Err(count) => {
                    *count += 1;
                    Before::Unidentified
                }
            };
        }
    }

    /// Returns the stored block at `index`, and removes it from `engine_blocks` if it is known. If the block is not routable, returns the counter
    /// of the reason instead.
    fn identify(&mut self, stored: &BlocksStored, index: usize, before: Before) -> Result<EngineBlock, &mut u64> {
        if let Some(block) = self.engine_blocks.remove(&stored.hashes[index]) {
            return Ok(block);
        }
        let MirrorSettings { hash_key, block_size, engine_block_size, engine_blocks_max, .. } = self.settings;
        let unroutable = &mut self.unroutable;
        let size = engine_block_size as usize;
        if stored.block_size != engine_block_size || Some(stored.tokens.len()) != stored.hashes.len().checked_mul(size) {
            return Err(&mut unroutable.block_size);
        }
        let keys = stored.extra_keys.get(index).unwrap_or(&ExtraKeys::None);
        let (parent, first, images) = match (before, keys.known()) {
            (Before::Unidentified, _) => return Err(&mut unroutable.parent),
            (_, None) | (Before::Block(_), Some((Some(_), _))) => return Err(&mut unroutable.extra_keys),
            (Before::Block(parent), Some((None, images))) => (Some(parent), parent, images),
            (Before::Nothing, Some((salt, images))) => match salt.and_then(root_hash) {
                Some(root) => (None, root, images),
                None => return Err(&mut unroutable.namespace),
            },
        };
        if self.engine_blocks.len() >= engine_blocks_max {
            return Err(&mut unroutable.excess);
        }
        let tokens = &stored.tokens[index * size..][..size];
        let hashes = match images {
            [] if engine_block_size == block_size => BlockHashes::One(first.child(&hash_key, tokens)),
            images => BlockHashes::Several(child_hashes(&hash_key, first, block_size as usize, tokens, images).into()),
        };
        Ok(EngineBlock { parent, hashes, copies: [0; 4] })
    }

    /// Records blocks of a followed group. Their hashes are those of the mirrored group's blocks, which the engine may report later.
    fn hold_followed(&mut self, position: usize, stored: &BlocksStored) {
        let is_whole = stored.hashes.len().checked_mul(stored.block_size as usize) == Some(stored.tokens.len());
        // An event from the start of a prompt may report stored blocks or cache hits. Only blocks that the group holds in both cases count.
        let found = (self.settings.hits_are_reported && stored.parent.is_none() && is_whole)
            .then(|| self.groups.found(position, &stored.hashes));
        let held = found.as_deref().unwrap_or(&stored.hashes);
        self.unroutable.excess += self.groups.hold(position, held, self.settings.engine_blocks_max);
        self.refresh(&stored.hashes);
    }

    fn tier(&self, reported: Tier) -> Tier {
        if self.settings.store == Some(reported) { Tier::Store } else { reported }
    }

    fn remove(&mut self, removed: &BlocksRemoved) {
        let Ok(tier) = removed.tier else { return };
        let tier = self.tier(tier);
        let group = removed.group.unwrap_or_default();
        if let Some(position) = self.groups.position(group) {
            removed.hashes.iter().for_each(|hash| self.groups.release(position, hash));
            return self.refresh(&removed.hashes);
        }
        if self.group != Some(group) {
            return;
        }
        for hash in &removed.hashes {
            let Some(block) = self.engine_blocks.get_mut(hash) else { continue };
            block.release(tier, &mut self.blocks);
            if block.copies == [0; 4] {
                if let Before::Block(last) = block.last() {
                    self.groups.forget(hash, last, &mut self.blocks);
                }
                self.engine_blocks.remove(hash);
            }
        }
    }

    /// Determines again which of these engine blocks, and of the blocks after them, are reuse points.
    fn refresh(&mut self, engine_hashes: &[EngineHash]) {
        for hash in engine_hashes {
            if let Some(Before::Block(last)) = self.engine_blocks.get(hash).map(EngineBlock::last) {
                self.groups.refresh(last, &mut self.blocks);
            }
        }
    }

    /// Returns what to do with the blocks of the event's group. The first group with full attention is mirrored.
    fn group_use(&mut self, stored: &BlocksStored) -> GroupUse {
        let group = stored.group.unwrap_or_default();
        if let Some(position) = self.groups.position(group) {
            return GroupUse::Followed(position);
        }
        if self.group == Some(group) {
            return GroupUse::Mirrored;
        }
        let kind = stored.kind.as_deref().unwrap_or(FULL_ATTENTION[0]);
        let need = match FULL_ATTENTION.contains(&kind) {
            true if self.group.is_none() => {
                self.group = Some(group);
                return GroupUse::Mirrored;
            }
            true => Some(Need::ALL),
            false => Need::of(kind, stored),
        };
        let known = self.engine_blocks.iter().filter_map(|(engine_hash, block)| match block.last() {
            Before::Block(last) => Some((engine_hash, block.parent, last)),
            Before::Nothing | Before::Unidentified => None,
        });
        // Blocks of another size end at other tokens, so it is unknown which prefixes they allow.
        let need = need.filter(|_| stored.block_size == self.settings.engine_block_size);
        match need.and_then(|need| self.groups.follow(group, need, known, &mut self.blocks)) {
            Some(position) => GroupUse::Followed(position),
            None => {
                self.ignore(kind.to_owned());
                GroupUse::Ignored
            }
        }
    }

    /// Records that blocks of this kind are ignored.
    fn ignore(&mut self, kind: String) {
        if self.ignored_kinds.len() < IGNORED_KINDS_MAX {
            self.ignored_kinds.insert(kind);
        }
        self.mark_unfollowed();
    }

    /// Reports that some of the engine's cache is not followed, if so.
    fn mark_unfollowed(&mut self) {
        if !self.ignored_kinds.is_empty() {
            self.blocks.note(SequenceHash::UNFOLLOWED_LAYERS);
        }
    }
}

impl EngineBlock {
    fn hashes(&self) -> &[SequenceHash] {
        match &self.hashes {
            BlockHashes::One(hash) => std::slice::from_ref(hash),
            BlockHashes::Several(hashes) => hashes,
        }
    }

    fn last(&self) -> Before {
        self.hashes().last().map_or(Before::Unidentified, |last| Before::Block(*last))
    }

    /// Counts one more block with this content in the tier.
    fn hold(&mut self, tier: Tier, blocks: &mut MirrorBlocks) {
        self.copies[tier.index()] += 1;
        if self.copies[tier.index()] == 1 {
            let mut parent = self.parent;
            for hash in self.hashes() {
                blocks.hold(parent, *hash, tier);
                parent = Some(*hash);
            }
        }
    }

    /// Counts one block less in the tier. Ignored if the engine has not reported that it stored the block.
    fn release(&mut self, tier: Tier, blocks: &mut MirrorBlocks) {
        let count = &mut self.copies[tier.index()];
        let was_last = *count == 1;
        *count = count.saturating_sub(1);
        if was_last {
            for hash in self.hashes().iter().rev() {
                blocks.release(*hash, tier);
            }
        }
    }
}

#[cfg(test)]
mod tests;
