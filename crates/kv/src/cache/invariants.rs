//! Checks that the cache's data structures are consistent with each other.

use super::{Content, Prefix, PrefixCache};
use crate::BlockId;
use std::{fmt::Display, ops::Range};

/// The description of an invariant that does not hold, which shows a bug.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(String);

/// Returns an error with the text `violation` if `holds` is false. The text is formatted only in that case.
///
/// # Errors
/// Returns the violation if `holds` is false.
pub fn ensure(holds: bool, violation: impl Display) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation(violation.to_string())) }
}

impl PrefixCache {
    /// Checks all invariants of the cache.
    ///
    /// # Errors
    /// Returns the first violation that is found.
    pub fn check_invariants(&self) -> Result<(), Violation> {
        self.check(0..self.blocks.len())
    }

    /// Checks all invariants of the next `count` blocks. For all other blocks, checks only the cheap invariants, which need no search and no hash.
    /// Repeated calls go through all blocks, `count` at a time, and then begin again with the first.
    ///
    /// # Errors
    /// Returns the first violation that is found.
    pub fn check_next(&mut self, count: usize) -> Result<(), Violation> {
        let (first, len) = (self.next_checked, self.blocks.len());
        let end = (first + count).min(len);
        self.next_checked = if end < len { end } else { 0 };
        self.check(first..end)
    }

    fn check(&self, contents: Range<usize>) -> Result<(), Violation> {
        let mut is_free = vec![false; self.blocks.len()];
        for id in &self.free {
            let was_listed = std::mem::replace(&mut is_free[id.0 as usize], true);
            ensure(!was_listed, format_args!("{id:?} is free twice"))?;
        }
        let (mut cached, mut unused) = (0, 0);
        let mut pins_of_children = vec![0; self.blocks.len()];
        for (id, block) in (0..).map(BlockId).zip(&self.blocks) {
            let is_free = is_free[id.0 as usize];
            let Some(content) = &block.content else {
                ensure((block.pins == 0) == is_free, format_args!("{id:?} must be either free or in use, and not both"))?;
                continue;
            };
            ensure(!is_free, format_args!("{id:?} is both cached and free"))?;
            ensure(!block.outdated, format_args!("{id:?} is cached although it was in use when the cache was cleared"))?;
            if contents.contains(&(id.0 as usize)) {
                self.check_content(id, content)?;
                let evictable = block.pins > 0 || self.unused.get(&content.unused_since) == Some(&id);
                ensure(evictable, format_args!("{id:?} is unused and cannot be evicted"))?;
            }
            cached += 1;
            if block.pins == 0 {
                unused += 1;
            } else if let Some(parent) = content.parent() {
                pins_of_children[parent.0 as usize] += 1;
            }
        }
        ensure(self.index.len() == cached, "the number of hashes in the index differs from the number of cached blocks")?;
        ensure(self.unused.len() == unused, "a block can be evicted although it is pinned or not cached")?;
        let pinned = self.blocks.iter().zip(pins_of_children).all(|(block, pins)| block.pins >= pins);
        ensure(pinned, "a pinned cached block does not pin its parent")
    }

    fn check_content(&self, id: BlockId, content: &Content) -> Result<(), Violation> {
        ensure(self.settings.prefix_caching, format_args!("{id:?} is cached with caching off"))?;
        let is_full = content.tokens.len() == self.settings.block_size as usize;
        ensure(is_full, format_args!("{id:?} is cached and not full"))?;
        ensure(self.index.get(&content.hash) == Some(&id), format_args!("{id:?} is not found by its hash"))?;
        let parent_hash = match &content.prefix {
            Prefix::Empty(namespace) => namespace.root(&self.settings.hash_key),
            Prefix::Block(parent) => {
                let parent_block = self.block(*parent);
                let Some(parent_content) = &parent_block.content else {
                    return ensure(false, format_args!("{id:?} is cached, its parent {parent:?} is not"));
                };
                let is_older = parent_block.pins > 0 || content.unused_since < parent_content.unused_since;
                ensure(is_older, format_args!("{parent:?} would be evicted before its child {id:?}"))?;
                parent_content.hash
            }
        };
        let is_hash = content.hash == self.hash(parent_hash, &content.tokens);
        ensure(is_hash, format_args!("{id:?} has the hash of other tokens"))
    }
}

#[cfg(test)]
mod tests {
    use crate::cache::{
        PrefixCache,
        tests::{SETTINGS, run_and_release},
    };

    #[test]
    fn repeated_partial_checks_of_invariants_find_a_wrong_hash_in_any_block() {
        for damaged in 0..6 {
            let mut cache = PrefixCache::new(SETTINGS);
            run_and_release(&mut cache, &[1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]);
            assert_eq!([2; 6].map(|count| cache.check_next(count)), [const { Ok(()) }; 6]);
            cache.blocks[damaged].content.as_mut().expect("all blocks are cached").tokens = [9, 9].into();
            for round in 0..2 {
                let failed = [2; 3].map(|count| cache.check_next(count).is_err());
                assert_eq!(failed, [0, 1, 2].map(|part| part == damaged / 2), "block {damaged} in round {round}");
            }
            assert!(cache.check_invariants().is_err());
        }
    }
}
