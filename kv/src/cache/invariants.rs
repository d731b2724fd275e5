//! The books of the cache, checked against each other.

use super::{Before, Content, PrefixCache};
use crate::BlockId;

impl PrefixCache {
    /// Panics with a sentence if the books do not balance. For tests, and for an idle worker.
    pub fn check_invariants(&self) {
        let mut is_free = vec![false; self.blocks.len()];
        for id in &self.free {
            let listed_before = std::mem::replace(&mut is_free[id.0 as usize], true);
            assert!(!listed_before, "{id:?} is free twice");
        }
        let (mut cached, mut unused) = (0, 0);
        let mut pins_of_children = vec![0; self.blocks.len()];
        for (id, block) in (0..).map(BlockId).zip(&self.blocks) {
            match &block.content {
                None => assert_eq!(block.pins == 0, is_free[id.0 as usize], "{id:?} is either free or in use"),
                Some(content) => {
                    assert!(!is_free[id.0 as usize], "{id:?} is both cached and free");
                    assert!(!block.outdated, "{id:?} is cached again after a clear that left it private");
                    self.check_content(id, content);
                    cached += 1;
                    if block.pins == 0 {
                        unused += 1;
                        assert_eq!(self.unused.get(&content.unused_since), Some(&id), "{id:?} cannot be evicted");
                    } else if let Some(parent) = content.parent() {
                        pins_of_children[parent.0 as usize] += 1;
                    }
                }
            }
        }
        assert_eq!(self.index.len(), cached, "every cached block has one hash");
        assert_eq!(self.unused.len(), unused, "only cached blocks without pins can be evicted");
        for (block, pins) in self.blocks.iter().zip(pins_of_children) {
            assert!(block.pins >= pins, "every pinned cached block pins its parent");
        }
    }

    fn check_content(&self, id: BlockId, content: &Content) {
        assert!(self.settings.prefix_caching, "{id:?} is cached with caching off");
        assert_eq!(content.tokens.len(), self.settings.block_size as usize, "{id:?} is cached, so it is full");
        assert_eq!(self.index.get(&content.hash), Some(&id), "{id:?} is not found by its hash");
        let hash_before = match &content.before {
            Before::Nothing(namespace) => namespace.root(&self.settings.hash_key),
            Before::Block(parent) => {
                let parent_block = self.block(*parent);
                let parent_content = parent_block.content.as_ref();
                let parent_content = parent_content.unwrap_or_else(|| panic!("{id:?} is cached, its parent {parent:?} is not"));
                if parent_block.pins == 0 {
                    assert!(content.unused_since < parent_content.unused_since, "{parent:?} would be evicted before {id:?}");
                }
                parent_content.hash
            }
        };
        assert_eq!(content.hash, self.hash(hash_before, &content.tokens), "{id:?} has the hash of other tokens");
    }
}
