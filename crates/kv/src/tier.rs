//! The tiers in which a worker holds KV blocks, and how a worker reports them (docs/adr/052-tiers.md).

use crate::{SequenceHash, mix};

/// A kind of memory that holds KV blocks. A later tier is slower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// The memory of the worker's device.
    Device,
    /// The memory of the worker's host.
    Host,
    /// A disk of the worker's host.
    Disk,
    /// A store outside of the worker's host. Several workers may load its blocks.
    Store,
}

/// A value for each tier, by [`Tier::index`].
pub type ByTier<T> = [T; Tier::ALL.len()];

impl Tier {
    /// All tiers, the fastest first.
    pub const ALL: [Self; 4] = [Self::Device, Self::Host, Self::Disk, Self::Store];

    /// Returns the tier's position in [`Self::ALL`].
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Returns the tier's name in metrics, usage and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::Disk => "disk",
            Self::Store => "store",
        }
    }

    /// A worker that reports this block as cached reports the tier's chain: besides each of its blocks with [`SequenceHash::in_tier`]. The chain of
    /// a tier before `Store` has the blocks that are in the tier or in a faster one; that of `Store` the blocks that are in the store. A block is in
    /// a chain only if its parent is.
    pub const fn note(self) -> SequenceHash {
        SequenceHash::marker(0x7469_6572_0000 | self as u64)
    }
}

impl SequenceHash {
    /// Returns the block with which a worker reports that this block is in the tier's chain, after the block of its parent, if the worker reports
    /// [`Tier::note`].
    #[must_use]
    pub const fn in_tier(self, tier: Tier) -> Self {
        Self::marker(mix(self.0 ^ tier.note().0) >> 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn blocks_of_the_tiers_are_distinct_markers() {
        let mut all: BTreeSet<_> = Tier::ALL.iter().map(|tier| tier.note()).collect();
        for hash in (0..1_000).map(mix).map(SequenceHash) {
            all.extend(Tier::ALL.map(|tier| hash.in_tier(tier)));
        }
        assert_eq!(all.len(), 4 + 4_000);
        assert!(all.iter().all(|hash| hash.is_marker()));
        assert_eq!(Tier::ALL.map(Tier::index), [0, 1, 2, 3]);
    }
}
