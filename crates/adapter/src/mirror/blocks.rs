//! A mirror's Tandem blocks: the tiers that hold each block, and whether the block is reported.

use std::collections::{BTreeSet, HashMap, hash_map::Entry};
use tandem_kv::{EventLog, KvEvent, SequenceHash, Snapshot, StoredChain};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tier {
    Device,
    Host,
}

/// The numbers of a prompt's leading Tandem blocks that an engine has cached, by tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixTiers {
    /// The number of blocks, from the prompt's start, that are in the device's memory.
    pub device_blocks: u32,
    /// The number of blocks, directly after the `device_blocks`, that are in the host's memory.
    pub host_blocks: u32,
}

/// The blocks of a mirror. A block is reported if the engine holds it and its parent, if it has one, is reported.
#[derive(Default)]
pub(super) struct MirrorBlocks {
    held: HashMap<SequenceHash, MirrorBlock>,
    /// For each held block, the pair of its parent and itself. The parent need not be held.
    children: BTreeSet<(Option<SequenceHash>, SequenceHash)>,
    reported: usize,
    log: EventLog,
}

struct MirrorBlock {
    parent: Option<SequenceHash>,
    device: u32,
    host: u32,
    reported: bool,
}

impl MirrorBlocks {
    /// Records that one more of the engine's blocks holds this block in the tier. `parent` is ignored if the block is already held.
    pub fn hold(&mut self, parent: Option<SequenceHash>, hash: SequenceHash, tier: Tier) {
        match self.held.entry(hash) {
            Entry::Occupied(mut entry) => *entry.get_mut().count(tier) += 1,
            Entry::Vacant(entry) => {
                *entry.insert(MirrorBlock { parent, device: 0, host: 0, reported: false }).count(tier) += 1;
                self.children.insert((parent, hash));
                if parent.is_none_or(|parent| self.held.get(&parent).is_some_and(|parent| parent.reported)) {
                    self.report(hash);
                }
            }
        }
    }

    /// Records that one of the engine's blocks no longer holds this block in the tier. At least one must have held it.
    pub fn release(&mut self, hash: SequenceHash, tier: Tier) {
        let block = self.held.get_mut(&hash).expect("a released block was held");
        *block.count(tier) -= 1;
        if block.device > 0 || block.host > 0 {
            return;
        }
        if block.reported {
            self.retract(hash);
        }
        if let Some(block) = self.held.remove(&hash) {
            self.children.remove(&(block.parent, hash));
        }
    }

    pub fn holds(&self, hash: SequenceHash) -> bool {
        self.held.contains_key(&hash)
    }

    pub fn clear(&mut self) {
        self.held.clear();
        self.children.clear();
        if std::mem::take(&mut self.reported) > 0 {
            self.log.cleared();
        }
    }

    pub fn take(&mut self) -> Vec<KvEvent> {
        self.log.take()
    }

    pub fn last_id(&self) -> u64 {
        self.log.last_id()
    }

    pub fn reported(&self) -> usize {
        self.reported
    }

    /// Returns all reported blocks as chains. Each chain follows one branch of every fork to a leaf; the other branches start chains of
    /// their own.
    pub fn snapshot(&self) -> Snapshot {
        let mut starts: Vec<_> = self.children_of(None).map(|hash| (None, hash)).collect();
        let mut stored = Vec::new();
        while let Some((parent, start)) = starts.pop() {
            let mut chain = StoredChain { parent, sequence_hashes: vec![start] };
            let mut last = start;
            loop {
                let mut branches = self.children_of(Some(last));
                let Some(next) = branches.next() else { break };
                starts.extend(branches.map(|branch| (Some(last), branch)));
                chain.sequence_hashes.push(next);
                last = next;
            }
            stored.push(chain);
        }
        Snapshot { at_event_id: self.log.last_id(), stored }
    }

    /// Returns how many leading blocks of a prompt are on the engine's device, and how many of the next blocks are on the engine's host.
    pub fn prefix(&self, hashes: &[SequenceHash]) -> PrefixTiers {
        let is_in = |hash: &SequenceHash, of: fn(&MirrorBlock) -> u32| self.held.get(hash).is_some_and(|block| of(block) > 0);
        let device = hashes.iter().take_while(|hash| is_in(hash, |block| block.device)).count();
        let host = hashes[device..].iter().take_while(|hash| is_in(hash, |block| block.host)).count();
        PrefixTiers { device_blocks: device as u32, host_blocks: host as u32 }
    }

    fn children_of(&self, parent: Option<SequenceHash>) -> impl Iterator<Item = SequenceHash> {
        self.children.range((parent, SequenceHash(u64::MIN))..=(parent, SequenceHash(u64::MAX))).map(|(_, hash)| *hash)
    }

    fn subtree(&self, root: SequenceHash) -> Vec<SequenceHash> {
        let (mut found, mut open) = (Vec::new(), vec![root]);
        while let Some(hash) = open.pop() {
            found.push(hash);
            open.extend(self.children_of(Some(hash)));
        }
        found
    }

    fn report(&mut self, root: SequenceHash) {
        for hash in self.subtree(root) {
            let block = self.held.get_mut(&hash).expect("the tree has held blocks");
            block.reported = true;
            self.reported += 1;
            self.log.stored(block.parent, hash);
        }
    }

    fn retract(&mut self, root: SequenceHash) {
        for hash in self.subtree(root).into_iter().rev() {
            self.held.get_mut(&hash).expect("the tree has held blocks").reported = false;
            self.reported -= 1;
            self.log.removed(hash);
        }
    }
}

impl MirrorBlock {
    fn count(&mut self, tier: Tier) -> &mut u32 {
        match tier {
            Tier::Device => &mut self.device,
            Tier::Host => &mut self.host,
        }
    }
}
