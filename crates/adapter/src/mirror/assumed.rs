//! The blocks that an engine is assumed to have cached if it publishes no KV events: those of the sequences that it has computed.

use super::blocks::MirrorBlocks;
use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
};
use tandem_kv::{SequenceHash, Tier};

pub(super) struct Assumed {
    capacity_blocks: usize,
    uses: HashMap<SequenceHash, LastUse>,
    order: BTreeSet<(LastUse, SequenceHash)>,
    last_prompt: u64,
}

/// The last prompt that used a block, and the block's position in it. A parent is used whenever its child is used, so it is dropped after
/// the child.
type LastUse = (u64, Reverse<usize>);

impl Assumed {
    pub fn new(capacity_blocks: usize) -> Self {
        Self { capacity_blocks, uses: HashMap::new(), order: BTreeSet::new(), last_prompt: 0 }
    }

    /// Assumes that the engine has cached and just used these leading blocks of a sequence, as many of them as fit.
    pub fn store(&mut self, hashes: &[SequenceHash], blocks: &mut MirrorBlocks) {
        self.last_prompt += 1;
        let mut parent = None;
        for (index, hash) in hashes.iter().take(self.capacity_blocks).enumerate() {
            let now = (self.last_prompt, Reverse(index));
            match self.uses.insert(*hash, now) {
                Some(before) => {
                    self.order.remove(&(before, *hash));
                }
                None => blocks.hold(parent, *hash, Tier::Device),
            }
            self.order.insert((now, *hash));
            parent = Some(*hash);
        }
        while self.uses.len() > self.capacity_blocks
            && let Some((_, hash)) = self.order.pop_first()
        {
            self.uses.remove(&hash);
            blocks.release(hash, Tier::Device);
        }
    }

    pub fn clear(&mut self) {
        self.uses.clear();
        self.order.clear();
    }
}
