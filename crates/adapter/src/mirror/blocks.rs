//! A mirror's Tandem blocks: the tiers that hold each block, and the chains in which the block is reported.

use foldhash::fast::RandomState;
use std::collections::HashMap;
use tandem_kv::{ByTier, EventLog, KvEvent, SequenceHash, Snapshot, StoredChain, Tier};

/// The blocks of a mirror.
///
/// The *chain* of all blocks has each block that the engine holds and whose parent, if any, is in the chain. As soon as only a slower tier
/// holds some block, the tiers' chains ([`Tier::note`]) are reported as well. So engines with one tier need no further blocks.
#[derive(Default)]
pub(super) struct MirrorBlocks {
    /// The held blocks, and the parents of held blocks, which need not be held themselves. Sequence hashes are hashes already, made with the
    /// cluster's key, which an engine does not have. So a fast hash function suffices; its seed is random in each table.
    blocks: HashMap<SequenceHash, MirrorBlock, RandomState>,
    /// The first held block without a parent.
    first_root: Option<SequenceHash>,
    /// The tiers whose chains are reported. They remain reported when the slower tiers are empty.
    chains: ByTier<bool>,
    /// The number of blocks in each tier.
    in_tier: ByTier<usize>,
    /// The number of blocks in the chain of all blocks, without notes.
    reported: usize,
    log: EventLog,
}

/// The held children of a block form a list, so that a block is added and removed in constant time.
#[derive(Default)]
struct MirrorBlock {
    parent: Option<SequenceHash>,
    first_child: Option<SequenceHash>,
    /// The blocks before and after this one in the list of their parent's children.
    previous: Option<SequenceHash>,
    next: Option<SequenceHash>,
    /// How many of the engine's blocks hold this block in each tier. A note has one on the device until it is withdrawn.
    copies: ByTier<u32>,
    /// Whether this is a note: it has no tokens, says something about other blocks, and is in no tier.
    is_note: bool,
    /// The set of chains in which the block is reported, a bit for each.
    reported: u8,
}

/// A set of blocks that is reported: all held blocks, or the chain of a tier.
#[derive(Clone, Copy)]
enum Chain {
    All,
    Of(Tier),
}

impl Chain {
    fn bit(self) -> u8 {
        match self {
            Self::All => 1 << Tier::ALL.len(),
            Self::Of(tier) => 1 << tier.index(),
        }
    }

    fn name(self, hash: SequenceHash) -> SequenceHash {
        match self {
            Self::All => hash,
            Self::Of(tier) => hash.in_tier(tier),
        }
    }
}

impl MirrorBlocks {
    /// Records that one more of the engine's blocks holds this block in the tier. `parent` is ignored if the block is already held.
    pub fn hold(&mut self, parent: Option<SequenceHash>, hash: SequenceHash, tier: Tier) {
        self.begin_chains(tier);
        let block = self.blocks.entry(hash).or_default();
        let is_new = !block.is_held();
        block.copies[tier.index()] += 1;
        self.in_tier[tier.index()] += usize::from(block.copies[tier.index()] == 1);
        if is_new {
            self.link(parent, hash);
        }
        self.refresh(hash);
    }

    /// Records that one of the engine's blocks no longer holds this block in the tier. At least one must have held it.
    pub fn release(&mut self, hash: SequenceHash, tier: Tier) {
        let block = self.blocks.get_mut(&hash).expect("a released block was held");
        block.copies[tier.index()] -= 1;
        self.in_tier[tier.index()] -= usize::from(block.copies[tier.index()] == 0);
        self.refresh(hash);
        self.drop_unheld(hash);
    }

    /// Reports a note: a block without tokens that says something about other blocks.
    pub fn note(&mut self, hash: SequenceHash) {
        let block = self.blocks.entry(hash).or_default();
        if !block.is_held() {
            (block.copies, block.is_note) = ([1, 0, 0, 0], true);
            self.link(None, hash);
            self.refresh(hash);
        }
    }

    /// Withdraws a note.
    pub fn withdraw(&mut self, hash: SequenceHash) {
        if let Some(block) = self.blocks.get_mut(&hash).filter(|block| block.is_held()) {
            block.copies = [0; 4];
            self.refresh(hash);
            self.drop_unheld(hash);
        }
    }

    pub fn clear(&mut self) {
        let was_reported = self.blocks.values().any(|block| block.reported > 0);
        *self = Self { log: std::mem::take(&mut self.log), ..Self::default() };
        if was_reported {
            self.log.cleared();
        }
    }

    pub fn take(&mut self) -> Vec<KvEvent> {
        self.log.take()
    }

    pub fn last_id(&self) -> u64 {
        self.log.last_id()
    }

    /// Returns the number of blocks with tokens that are reported, without the repetitions in the tiers' chains.
    pub fn reported(&self) -> usize {
        self.reported
    }

    /// Returns the number of blocks in each tier; all 0 if only the device has ever held blocks.
    pub fn tier_blocks(&self) -> ByTier<u32> {
        let has_tiers = self.chains.contains(&true);
        self.in_tier.map(|blocks| if has_tiers { u32::try_from(blocks).unwrap_or(u32::MAX) } else { 0 })
    }

    /// Returns all reported blocks as chains. Each chain follows one branch of every fork to a leaf; the other branches start chains of
    /// their own.
    pub fn snapshot(&self) -> Snapshot {
        let mut stored = Vec::new();
        for of in self.chains() {
            let mut starts: Vec<_> = self.reported_children(None, of).map(|hash| (None, hash)).collect();
            while let Some((parent, start)) = starts.pop() {
                let mut chain = StoredChain { parent, sequence_hashes: vec![of.name(start)] };
                let mut last = start;
                loop {
                    let mut branches = self.reported_children(Some(last), of);
                    let Some(next) = branches.next() else { break };
                    starts.extend(branches.map(|branch| (Some(of.name(last)), branch)));
                    chain.sequence_hashes.push(of.name(next));
                    last = next;
                }
                stored.push(chain);
            }
        }
        Snapshot { at_event_id: self.log.last_id(), stored }
    }

    /// Returns how many leading blocks of a prompt the engine finds in each tier. The first ones are on its device. It searches each slower tier, and
    /// those before it, for the blocks that follow.
    pub fn prefix(&self, hashes: &[SequenceHash]) -> ByTier<u32> {
        let mut from = 0;
        Tier::ALL.map(|tier| {
            let is_in = |hash: &&SequenceHash| {
                self.blocks.get(hash).is_some_and(|block| block.copies[..=tier.index()].iter().any(|copies| *copies > 0))
            };
            let blocks = hashes[from..].iter().take_while(is_in).count();
            from += blocks;
            blocks as u32
        })
    }

    /// Begins to report the chain of the tier before this one, because this one holds a block now. The chain of the store begins with it.
    fn begin_chains(&mut self, tier: Tier) {
        let faster = tier.index().checked_sub(1).map(|faster| Tier::ALL[faster]);
        for begins in faster.into_iter().chain((tier == Tier::Store).then_some(tier)) {
            if !std::mem::replace(&mut self.chains[begins.index()], true) {
                self.note(begins.note());
                let roots: Vec<_> = self.children_of(None).collect();
                roots.into_iter().for_each(|root| self.refresh(root));
            }
        }
    }

    fn chains(&self) -> impl Iterator<Item = Chain> + use<> {
        let of_tiers = self.chains;
        std::iter::once(Chain::All).chain(Tier::ALL.into_iter().filter(move |tier| of_tiers[tier.index()]).map(Chain::Of))
    }

    /// Reports the block and those after it in the chains in which they are now, and no longer in others.
    fn refresh(&mut self, hash: SequenceHash) {
        for chain in self.chains() {
            let Some(block) = self.blocks.get(&hash) else { return };
            let parent = block.parent;
            let follows = || parent.is_none_or(|parent| self.blocks.get(&parent).is_some_and(|block| block.is_reported(chain)));
            match (block.is_reported(chain), block.is_in(chain)) {
                (false, true) if follows() => self.report(hash, chain),
                (true, false) => self.retract(hash, chain),
                _ => {}
            }
        }
    }

    /// Removes the block if it is not held any more. While it has children, its place is kept.
    fn drop_unheld(&mut self, hash: SequenceHash) {
        let block = self.block(hash);
        if block.is_held() {
            return;
        }
        let MirrorBlock { parent, first_child, previous, next, .. } = std::mem::take(block);
        match first_child {
            Some(_) => block.first_child = first_child,
            None => _ = self.blocks.remove(&hash),
        }
        match previous {
            Some(previous) => self.block(previous).next = next,
            None => *self.first_child(parent) = next,
        }
        if let Some(next) = next {
            self.block(next).previous = previous;
        }
        let is_empty = |parent: &SequenceHash| {
            self.blocks.get(parent).is_some_and(|parent| !parent.is_held() && parent.first_child.is_none())
        };
        if let Some(parent) = parent.filter(is_empty) {
            self.blocks.remove(&parent);
        }
    }

    /// Adds a block that is held now to the children of its parent.
    fn link(&mut self, parent: Option<SequenceHash>, hash: SequenceHash) {
        let next = self.first_child(parent).replace(hash);
        if let Some(next) = next {
            self.block(next).previous = Some(hash);
        }
        let block = self.block(hash);
        (block.parent, block.next) = (parent, next);
    }

    fn first_child(&mut self, parent: Option<SequenceHash>) -> &mut Option<SequenceHash> {
        match parent {
            None => &mut self.first_root,
            Some(parent) => &mut self.blocks.entry(parent).or_default().first_child,
        }
    }

    fn block(&mut self, hash: SequenceHash) -> &mut MirrorBlock {
        self.blocks.get_mut(&hash).expect("the lists have known blocks")
    }

    fn children_of(&self, parent: Option<SequenceHash>) -> impl Iterator<Item = SequenceHash> {
        let first = match parent {
            None => self.first_root,
            Some(parent) => self.blocks.get(&parent).and_then(|parent| parent.first_child),
        };
        std::iter::successors(first, |hash| self.blocks.get(hash)?.next)
    }

    fn reported_children(&self, parent: Option<SequenceHash>, chain: Chain) -> impl Iterator<Item = SequenceHash> {
        self.children_of(parent).filter(move |hash| self.blocks.get(hash).is_some_and(|block| block.is_reported(chain)))
    }

    /// Returns the block and those blocks after it for which, and for all between, `is_one` is true.
    fn subtree(&self, root: SequenceHash, is_one: impl Fn(&MirrorBlock) -> bool) -> Vec<SequenceHash> {
        let (mut found, mut open) = (Vec::new(), vec![root]);
        while let Some(hash) = open.pop() {
            found.push(hash);
            open.extend(self.children_of(Some(hash)).filter(|hash| self.blocks.get(hash).is_some_and(&is_one)));
        }
        found
    }

    fn report(&mut self, root: SequenceHash, chain: Chain) {
        // Most new blocks have no children yet.
        if self.block(root).first_child.is_none() {
            return self.report_one(root, chain);
        }
        for hash in self.subtree(root, |block| block.is_in(chain)) {
            self.report_one(hash, chain);
        }
    }

    fn report_one(&mut self, hash: SequenceHash, chain: Chain) {
        let block = self.blocks.get_mut(&hash).expect("the tree has held blocks");
        block.reported |= chain.bit();
        self.reported += usize::from(matches!(chain, Chain::All) && !block.is_note);
        self.log.stored(block.parent.map(|parent| chain.name(parent)), chain.name(hash));
    }

    fn retract(&mut self, root: SequenceHash, chain: Chain) {
        if self.block(root).first_child.is_none() {
            return self.retract_one(root, chain);
        }
        for hash in self.subtree(root, |block| block.is_reported(chain)).into_iter().rev() {
            self.retract_one(hash, chain);
        }
    }

    fn retract_one(&mut self, hash: SequenceHash, chain: Chain) {
        let block = self.blocks.get_mut(&hash).expect("the tree has held blocks");
        block.reported &= !chain.bit();
        self.reported -= usize::from(matches!(chain, Chain::All) && !block.is_note);
        self.log.removed(chain.name(hash));
    }
}

impl MirrorBlock {
    fn is_held(&self) -> bool {
        self.copies != [0; 4]
    }

    fn is_reported(&self, chain: Chain) -> bool {
        self.reported & chain.bit() > 0
    }

    /// Whether the block is in the chain, provided that its parent is.
    fn is_in(&self, chain: Chain) -> bool {
        let any = |copies: &[u32]| copies.iter().any(|copies| *copies > 0);
        match chain {
            Chain::All => any(&self.copies),
            Chain::Of(_) if self.is_note => false,
            Chain::Of(Tier::Store) => self.copies[Tier::Store.index()] > 0,
            Chain::Of(tier) => any(&self.copies[..=tier.index()]),
        }
    }
}
