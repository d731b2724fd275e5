//! The groups of layers of a hybrid model, and the blocks up to which a cached prefix can be reused.
//!
//! An engine keeps a separate set of blocks for each group of layers. A prefix of full blocks is reused only if every group has what it needs to
//! continue after the prefix ([`Need`]). The mirror follows one group with full attention; this module follows the others, and
//! finds which blocks of the mirrored group are *reuse points* ([`SequenceHash::reuse_point`], docs/adr/049-reuse-points.md).
//!
//! For each block and group it keeps the *run*: how many consecutive blocks up to and including this block the group holds, up to the number that
//! it needs. A run that reaches the start of the prompt is always long enough. A block is a reuse point if all its runs are long enough.

use super::blocks::MirrorBlocks;
use crate::event::{BlocksStored, EngineHash};
use std::collections::{BTreeSet, HashMap};
use tandem_kv::SequenceHash;

/// What a group of layers needs in the cache to continue after a prefix: its last blocks, at least this many or the whole prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Need(u32);

/// The maximum number of followed groups. vLLM puts the layers of each kind of attention into one group, or into a few groups with equal
/// numbers of layers.
const GROUPS_MAX: usize = 64;

/// The followed groups, their blocks, and the reuse points.
#[derive(Default)]
pub(super) struct LayerGroups {
    /// The engine's number of each followed group, and what the group needs.
    followed: Vec<(u32, Need)>,
    /// For each engine block that a followed group holds, its number of copies by followed group.
    copies: HashMap<EngineHash, Vec<u32>>,
    /// The blocks of the mirrored group, by the last Tandem block in them. Empty while no group is followed.
    known: HashMap<SequenceHash, KnownBlock>,
    /// For each known block after another block, the pair of that block and itself.
    children: BTreeSet<(SequenceHash, SequenceHash)>,
}

struct KnownBlock {
    engine_hash: EngineHash,
    /// The last Tandem block before this block; `None` at the start of a prompt.
    parent: Option<SequenceHash>,
    /// The run of each followed group.
    runs: Vec<u32>,
    is_point: bool,
}

impl Need {
    /// All blocks of the prefix.
    pub const ALL: Self = Self(u32::MAX);

    /// Returns what the layers of this kind need; `None` if their rule is unknown.
    pub fn of(kind: &str, stored: &BlocksStored) -> Option<Self> {
        match (kind, stored.window_tokens) {
            // The window includes the current token.
            ("sliding_window" | "sliding_window_mla", Some(window)) => {
                Some(Self(window.saturating_sub(1).div_ceil(stored.block_size.max(1)).max(1)))
            }
            // The state at the end of the prefix is in the block that ends there.
            ("mamba", _) => Some(Self(1)),
            _ => None,
        }
    }
}

impl LayerGroups {
    /// Whether a prefix can be reused only up to a reuse point.
    pub fn is_hybrid(&self) -> bool {
        !self.followed.is_empty()
    }

    /// Returns the position of a followed group; `None` if the group is not followed.
    pub fn position(&self, group: u32) -> Option<usize> {
        self.followed.iter().position(|(followed, _)| *followed == group)
    }

    /// Follows a group from now on, and returns its position. Returns `None` if too many groups are followed. `known` has the mirrored group's
    /// blocks so far: each with its engine hash, the last Tandem block before it, and its last Tandem block.
    pub fn follow<'a>(
        &mut self,
        group: u32,
        need: Need,
        known: impl Iterator<Item = (&'a EngineHash, Option<SequenceHash>, SequenceHash)>,
        blocks: &mut MirrorBlocks,
    ) -> Option<usize> {
        if self.followed.len() == GROUPS_MAX {
            return None;
        }
        if self.followed.is_empty() {
            blocks.note(SequenceHash::REUSE_POINTS);
        }
        self.followed.push((group, need));
        // The new group holds nothing yet, so no block is a reuse point.
        self.forget_points(blocks);
        for (engine_hash, parent, hash) in known {
            self.insert(engine_hash.clone(), parent, hash);
        }
        Some(self.followed.len() - 1)
    }

    /// Records that the followed group at this position holds one more copy of each of the engine's blocks. At most `blocks_max` blocks are kept;
    /// returns the number of the others.
    pub fn hold(&mut self, position: usize, engine_hashes: &[EngineHash], blocks_max: usize) -> u64 {
        let mut excess = 0;
        for engine_hash in engine_hashes {
            if self.copies.len() >= blocks_max && !self.copies.contains_key(engine_hash) {
                excess += 1;
                continue;
            }
            let copies = self.copies.entry(engine_hash.clone()).or_default();
            copies.resize(self.followed.len().max(copies.len()), 0);
            copies[position] += 1;
        }
        excess
    }

    /// Returns the blocks of a cache hit that the followed group at this position needs and is not known to hold. The engine lists all
    /// blocks of the prefix for each group, but a group needs, and may hold, only the last ones.
    pub fn found(&self, position: usize, prefix: &[EngineHash]) -> Vec<EngineHash> {
        let needed = (self.followed[position].1.0 as usize).min(prefix.len());
        prefix[prefix.len() - needed..].iter().filter(|hash| !self.holds(position, hash)).cloned().collect()
    }

    /// Whether the followed group at this position holds the block.
    pub fn holds(&self, position: usize, engine_hash: &EngineHash) -> bool {
        self.copies.get(engine_hash).and_then(|copies| copies.get(position)).is_some_and(|copies| *copies > 0)
    }

    /// Records that the followed group at this position holds one copy less of the engine's block. Ignored if it holds none.
    pub fn release(&mut self, position: usize, engine_hash: &EngineHash) {
        let Some(copies) = self.copies.get_mut(engine_hash) else { return };
        if let Some(copies) = copies.get_mut(position) {
            *copies = copies.saturating_sub(1);
        }
        if copies.iter().all(|copies| *copies == 0) {
            self.copies.remove(engine_hash);
        }
    }

    /// Records that the mirrored group holds a block.
    pub fn learn(
        &mut self,
        engine_hash: &EngineHash,
        parent: Option<SequenceHash>,
        hash: SequenceHash,
        blocks: &mut MirrorBlocks,
    ) {
        if self.is_hybrid() {
            self.insert(engine_hash.clone(), parent, hash);
            self.refresh(hash, blocks);
        }
    }

    /// Records that the mirrored group no longer holds a block.
    pub fn forget(&mut self, engine_hash: &EngineHash, hash: SequenceHash, blocks: &mut MirrorBlocks) {
        if self.known.get(&hash).is_none_or(|known| known.engine_hash != *engine_hash) {
            return;
        }
        if let Some(known) = self.known.remove(&hash) {
            if known.is_point {
                blocks.withdraw(hash.reuse_point());
            }
            if let Some(parent) = known.parent {
                self.children.remove(&(parent, hash));
            }
        }
        for child in self.children_of(hash) {
            self.refresh(child, blocks);
        }
    }

    /// Computes the runs of a known block again, and those of the blocks after it as far as they change.
    pub fn refresh(&mut self, hash: SequenceHash, blocks: &mut MirrorBlocks) {
        let mut open = vec![hash];
        while let Some(hash) = open.pop() {
            let Some(runs) = self.known.get(&hash).map(|known| self.runs(known)) else { continue };
            let is_point = runs.iter().zip(&self.followed).all(|(run, (_, need))| *run >= need.0);
            let known = self.known.get_mut(&hash).expect("the block was found above");
            let changed = known.runs != runs;
            known.runs = runs;
            match (std::mem::replace(&mut known.is_point, is_point), is_point) {
                (false, true) => blocks.note(hash.reuse_point()),
                (true, false) => blocks.withdraw(hash.reuse_point()),
                _ => {}
            }
            if changed {
                open.extend(self.children_of(hash));
            }
        }
    }

    /// Drops all blocks. The groups are still followed. `blocks` has been cleared.
    pub fn clear(&mut self, blocks: &mut MirrorBlocks) {
        *self = Self { followed: std::mem::take(&mut self.followed), ..Self::default() };
        if self.is_hybrid() {
            blocks.note(SequenceHash::REUSE_POINTS);
        }
    }

    /// Returns how many of a prompt's leading blocks can be reused, of those that are cached.
    pub fn reusable(&self, cached: &[SequenceHash]) -> usize {
        if !self.is_hybrid() {
            return cached.len();
        }
        let is_point = |hash: &SequenceHash| self.known.get(hash).is_some_and(|known| known.is_point);
        cached.iter().rposition(is_point).map_or(0, |last| last + 1)
    }

    fn insert(&mut self, engine_hash: EngineHash, parent: Option<SequenceHash>, hash: SequenceHash) {
        let known = self.known.entry(hash).or_insert_with(|| KnownBlock {
            engine_hash: engine_hash.clone(),
            parent,
            runs: Vec::new(),
            is_point: false,
        });
        known.engine_hash = engine_hash;
        if let Some(parent) = known.parent {
            self.children.insert((parent, hash));
        }
    }

    fn runs(&self, known: &KnownBlock) -> Vec<u32> {
        let run = |(position, (_, need)): (usize, &(u32, Need))| {
            if !self.holds(position, &known.engine_hash) {
                return 0;
            }
            let Some(parent) = known.parent else { return need.0 };
            let before = self.known.get(&parent).and_then(|parent| parent.runs.get(position)).copied().unwrap_or(0);
            before.saturating_add(1).min(need.0)
        };
        self.followed.iter().enumerate().map(run).collect()
    }

    fn children_of(&self, parent: SequenceHash) -> Vec<SequenceHash> {
        self.children.range((parent, SequenceHash(u64::MIN))..=(parent, SequenceHash(u64::MAX))).map(|(_, hash)| *hash).collect()
    }

    fn forget_points(&mut self, blocks: &mut MirrorBlocks) {
        for (hash, known) in &mut self.known {
            if std::mem::take(&mut known.is_point) {
                blocks.withdraw(hash.reuse_point());
            }
        }
    }
}
