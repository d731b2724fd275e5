//! The blocks that runs directly follow. Usually, new blocks are appended to a run without a search, for each of them, for a run that
//! begins with it. The search is needed only after a block that was removed from the index while a run still followed it.

use super::shard::{SHARDS, shard_of};
use crate::index::KeyedState;
use std::collections::HashMap;
use tandem_kv::SequenceHash;

pub(super) struct Followed {
    /// The blocks, spread over several maps by their mixed hashes, so that a map that grows is small.
    maps: Vec<HashMap<SequenceHash, Follows, KeyedState>>,
    /// The number of blocks in `maps` that are not in the index any more.
    absent: usize,
}

/// The runs that follow one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Follows {
    pub(super) runs: u32,
    /// Whether the block is not in the index any more.
    pub(super) absent: bool,
}

impl Followed {
    /// Returns an empty set. `seed` only seeds hash tables.
    pub(super) fn new(seed: u64) -> Self {
        let map = || HashMap::with_hasher(KeyedState::with_seed(seed));
        Self { maps: std::iter::repeat_with(map).take(SHARDS).collect(), absent: 0 }
    }

    /// Records that a run follows the block, whose mixed hash is `mixed`.
    pub(super) fn add(&mut self, mixed: u64, block: SequenceHash) {
        self.maps[shard_of(mixed)].entry(block).or_default().runs += 1;
    }

    /// Records that a run that followed the block was removed.
    pub(super) fn remove(&mut self, mixed: u64, block: SequenceHash) {
        let map = &mut self.maps[shard_of(mixed)];
        let follows = map.get_mut(&block).expect("the run was added");
        follows.runs -= 1;
        if follows.runs == 0 {
            self.absent -= usize::from(follows.absent);
            map.remove(&block);
            if map.len() * 8 < map.capacity() {
                map.shrink_to(map.len() * 2);
            }
        }
    }

    /// Whether a run follows some block that is not in the index.
    pub(super) fn any_absent(&self) -> bool {
        self.absent > 0
    }

    /// Records whether the block is in the index. Returns whether a run follows it.
    pub(super) fn set_absent(&mut self, mixed: u64, block: SequenceHash, absent: bool) -> bool {
        let Some(follows) = self.maps[shard_of(mixed)].get_mut(&block) else { return false };
        self.absent = self.absent + usize::from(absent) - usize::from(follows.absent);
        follows.absent = absent;
        true
    }

    /// Whether a run follows the block.
    pub(super) fn contains(&self, mixed: u64, block: SequenceHash) -> bool {
        self.maps[shard_of(mixed)].contains_key(&block)
    }

    pub(super) fn bytes(&self) -> usize {
        self.maps.iter().map(|map| map.capacity() * size_of::<(SequenceHash, Follows, u8)>()).sum()
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (SequenceHash, Follows)> {
        self.maps.iter().flatten().map(|(block, follows)| (*block, *follows))
    }
}
