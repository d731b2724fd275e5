//! The blocks that workers had cached and have removed, so that the router can say that a prompt was evicted, when, and where.
//!
//! A block is remembered when the last worker removes it: until then, other workers have it. Each [`GROUP`] of consecutive blocks of prompts
//! has one entry, and entries of the same bucket are in one line of the processor's cache, because reading and writing lines costs more than
//! all else. The table has a fixed size, [`BYTES`]: a new entry replaces the oldest one of its bucket, and a replaced block counts as never
//! cached.
//!
//! A lookup reads one line for each step of a binary search. The search works because the remembered blocks of a prompt are its leading ones:
//! caches evict the end of a prompt before its beginning, and the table forgets the oldest entries first.

use super::{
    prefetch::prefetch,
    run::{GROUP, first_of_group},
    shard::Link,
};
use std::sync::{
    OnceLock,
    atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
};
use tandem_kv::SequenceHash;

const BUCKETS_BITS: u32 = if cfg!(test) { 10 } else { 15 };
const BUCKET_ENTRIES: usize = 4;
/// The memory of the table: 2 MiB for 131,072 groups, which are 1,048,576 blocks. It is allocated before the first block is removed
/// ([`RemovedBlocks::allocate`]).
pub(super) const BYTES: usize = size_of::<Bucket>() << BUCKETS_BITS;

/// The fields of a group, from its lowest bit on: whether it was lost, the owner, the time, and bits of its first block's hash. The first
/// group of a bucket also has the position of the oldest entry.
const OWNER_BITS: u32 = 12;
const TIME_BITS: u32 = 22;
const TIME_SHIFT: u32 = 1 + OWNER_BITS;
const HASH_SHIFT: u32 = TIME_SHIFT + TIME_BITS;
const OLDEST_SHIFT: u32 = 62;
const TIME_MASK: u32 = (1 << TIME_BITS) - 1;
const GROUP_MASK: u64 = (1 << OLDEST_SHIFT) - 1;

/// The largest owner number.
pub(crate) const OWNER_MAX: u16 = (1 << OWNER_BITS) - 1;

/// One line of the processor's cache. Entries are written in rotation.
#[derive(Default)]
#[repr(align(64))]
struct Bucket {
    /// A byte of the hash of each block that was removed, see [`byte_of`]; 0 for the other blocks of the group.
    blocks: [AtomicU64; BUCKET_ENTRIES],
    groups: [AtomicU64; BUCKET_ENTRIES],
}

/// The cache from which blocks are removed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RemovedFrom {
    /// The owner number of the worker; 0: its blocks are not remembered.
    pub(super) owner: u16,
    /// Whether the worker has left, or its cache was cleared.
    pub(super) lost: bool,
}

#[derive(Default)]
pub(super) struct RemovedBlocks {
    buckets: OnceLock<Box<[Bucket]>>,
    /// The present time in seconds. After 48 days, times begin again at 0, and older entries seem new.
    now: AtomicU32,
}

/// Leading blocks of a prompt that a worker had cached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RemovedPrefix {
    /// The number of leading blocks, including those that are still cached.
    pub(crate) blocks: u32,
    /// The owner number of the worker that removed the last of them, see [`PrefixIndex::set_owner`](super::PrefixIndex::set_owner).
    pub(crate) owner: u16,
    /// How long ago it was removed, in seconds.
    pub(crate) age_s: u32,
    /// Whether the worker has left, or its cache was cleared.
    pub(crate) lost: bool,
}

impl RemovedBlocks {
    pub(super) fn set_time(&self, seconds: u64) {
        self.now.store(seconds as u32 & TIME_MASK, Relaxed);
    }

    pub(super) fn bytes(&self) -> usize {
        self.buckets.get().map_or(0, |_| BYTES)
    }

    /// Allocates the table. Until then, nothing is remembered.
    pub(super) fn allocate(&self) {
        self.buckets.get_or_init(|| (0..1 << BUCKETS_BITS).map(|_| Bucket::default()).collect());
    }

    /// Prefetches the memory that [`Self::add`] writes.
    pub(super) fn prefetch(&self, run: &[SequenceHash], from: usize, link: &Link, mix: impl Fn(SequenceHash) -> u64) {
        if let Some(buckets) = self.buckets.get() {
            groups(run, from, link).for_each(|(leader, ..)| prefetch(buckets, bucket_of(mix(leader))));
        }
    }

    /// Records that the blocks of `run` from `from` on were removed now. `mix` returns the mixed hash of a block. Calls must not overlap.
    pub(super) fn add(
        &self,
        run: &[SequenceHash],
        from: usize,
        link: &Link,
        RemovedFrom { owner, lost }: RemovedFrom,
        mix: impl Fn(SequenceHash) -> u64,
    ) {
        let Some(buckets) = self.buckets.get().filter(|_| owner > 0) else { return };
        let time = u64::from(self.now.load(Relaxed)) << TIME_SHIFT;
        let rest = time | u64::from(owner.min(OWNER_MAX)) << 1 | u64::from(lost);
        for (leader, first, hashes) in groups(run, from, link) {
            let leader = mix(leader);
            let bytes = hashes.iter().rev().fold(0, |bytes, hash| bytes << 8 | byte_of(*hash)) << (8 * first);
            buckets[bucket_of(leader)].add(leader << HASH_SHIFT & GROUP_MASK | rest, bytes);
        }
    }

    /// Returns the newest entry of the block at this position of a prompt.
    fn find(&self, prompt: &[SequenceHash], at: usize, mix: impl Fn(SequenceHash) -> u64) -> Option<u64> {
        let leader = mix(prompt[first_of_group(at)]);
        self.buckets.get()?[bucket_of(leader)].find(leader, at % GROUP, prompt[at])
    }

    /// Returns the remembered leading blocks of a prompt, of which the first `from` are cached; `None` if the next block is not remembered.
    /// `mix` returns the mixed hash of a block.
    pub(super) fn prefix(
        &self,
        prompt: &[SequenceHash],
        from: usize,
        mix: impl Fn(SequenceHash) -> u64,
    ) -> Option<RemovedPrefix> {
        if from >= prompt.len() {
            return None;
        }
        let (mut found, mut last, mut absent) = (self.find(prompt, from, &mix)?, from, prompt.len());
        while absent - last > 1 {
            let middle = last.midpoint(absent);
            match self.find(prompt, middle, &mix) {
                Some(entry) => (found, last) = (entry, middle),
                None => absent = middle,
            }
        }
        Some(RemovedPrefix {
            blocks: last as u32 + 1,
            owner: (found >> 1) as u16 & OWNER_MAX,
            age_s: age_of(found, self.now.load(Relaxed)),
            lost: found & 1 > 0,
        })
    }
}

impl Bucket {
    /// Adds removed blocks to their group, or a new entry for it.
    fn add(&self, group: u64, bytes: u64) {
        let head = self.groups[0].load(Relaxed);
        let oldest = (head >> OLDEST_SHIFT) as usize;
        let newest = (oldest + BUCKET_ENTRIES - 1) % BUCKET_ENTRIES;
        let present = self.blocks[newest].load(Relaxed);
        if self.groups[newest].load(Relaxed) & GROUP_MASK == group && filled(present) & filled(bytes) == 0 {
            self.blocks[newest].store(present | bytes, Relaxed);
            return;
        }
        let next = ((oldest + 1) % BUCKET_ENTRIES) as u64;
        let head = if oldest == 0 { group } else { head & GROUP_MASK };
        self.blocks[oldest].store(bytes, Relaxed);
        self.groups[oldest].store(group, Relaxed);
        self.groups[0].store(head | next << OLDEST_SHIFT, Relaxed);
    }

    /// Returns the newest entry with the block at this position of a group.
    fn find(&self, leader: u64, position: usize, block: SequenceHash) -> Option<u64> {
        let oldest = (self.groups[0].load(Relaxed) >> OLDEST_SHIFT) as usize;
        let newest_first = (oldest..oldest + BUCKET_ENTRIES).rev().map(|at| at % BUCKET_ENTRIES);
        let of_block = |at: &usize| self.blocks[*at].load(Relaxed) >> (8 * position) & 0xFF == byte_of(block);
        let groups = newest_first.filter(of_block).map(|at| self.groups[at].load(Relaxed) & GROUP_MASK);
        groups.into_iter().find(|group| group >> HASH_SHIFT == leader & (GROUP_MASK >> HASH_SHIFT))
    }
}

/// Returns the groups of the run's blocks from `from` on: the hash of the group's first block, the position of the run's first of these
/// blocks in the group, and the blocks.
fn groups<'a>(
    run: &'a [SequenceHash],
    from: usize,
    link: &'a Link,
) -> impl Iterator<Item = (SequenceHash, usize, &'a [SequenceHash])> {
    let mut at = from;
    std::iter::from_fn(move || {
        let first = (link.start as usize + at) % GROUP;
        let hashes = run.get(at..run.len().min(at + GROUP - first)).filter(|hashes| !hashes.is_empty())?;
        let leader = link.leader(run, at);
        at += hashes.len();
        Some((leader, first, hashes))
    })
}

/// Returns the byte that stands for a block in its group, which is never 0.
fn byte_of(block: SequenceHash) -> u64 {
    (block.0 & 0xFF).max(1)
}

/// Returns a bit for each byte of `bytes` that is not 0.
fn filled(bytes: u64) -> u64 {
    const LOW: u64 = 0x7F7F_7F7F_7F7F_7F7F;
    (((bytes & LOW) + LOW) | bytes) & !LOW
}

fn bucket_of(mixed: u64) -> usize {
    (mixed >> (u64::BITS - BUCKETS_BITS)) as usize
}

fn age_of(entry: u64, now: u32) -> u32 {
    now.wrapping_sub((entry >> TIME_SHIFT) as u32) & TIME_MASK
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    const OWN: RemovedFrom = RemovedFrom { owner: 1, lost: false };

    fn mix(hash: SequenceHash) -> u64 {
        tandem_kv::mix(hash.0)
    }

    /// Returns a prompt of this length, whose hashes are the positions of its blocks.
    fn prompt(len: usize) -> Vec<SequenceHash> {
        (0..len as u64).map(SequenceHash).collect()
    }

    /// Removes these blocks of [`prompt`]. They are the end of a run that begins at `start`.
    fn remove(removed: &RemovedBlocks, start: usize, blocks: Range<usize>, from: RemovedFrom) {
        let run = &prompt(blocks.end)[start..];
        let link = Link { start: start as u32, leader: SequenceHash(first_of_group(start) as u64), ..Link::default() };
        removed.add(run, blocks.start - start, &link, from, mix);
    }

    fn prefix(removed: &RemovedBlocks, from: usize, len: usize) -> Option<RemovedPrefix> {
        removed.prefix(&prompt(len), from, mix)
    }

    #[test]
    fn removed_blocks_are_found_with_owner_and_age_until_newer_ones_replace_them() {
        let removed = RemovedBlocks::default();
        assert_eq!((prefix(&removed, 0, 9), removed.bytes()), (None, 0));
        removed.allocate();
        removed.set_time(100);
        remove(&removed, 2, 10..40, RemovedFrom { owner: 7, lost: false });
        remove(&removed, 2, 3..10, RemovedFrom { owner: 7, lost: true });
        removed.set_time(150);
        remove(&removed, 20, 20..30, RemovedFrom { owner: OWNER_MAX, lost: false });
        removed.set_time(160);
        assert_eq!(prefix(&removed, 0, 40), None, "the first block is not removed");
        assert_eq!(prefix(&removed, 3, 3), None);
        let found = |blocks, owner, age_s, lost| Some(RemovedPrefix { blocks, owner, age_s, lost });
        for (len, expected) in [
            (9, found(9, 7, 60, true)),
            (10, found(10, 7, 60, true)),
            (11, found(11, 7, 60, false)),
            (25, found(25, OWNER_MAX, 10, false)),
            (70, found(40, 7, 60, false)),
        ] {
            assert_eq!(prefix(&removed, 3, len), expected);
        }
        assert_eq!(removed.bytes(), BYTES);
        removed.set_time(161);
        (1..200).for_each(|run| remove(&removed, run * 1_000, run * 1_000..(run + 1) * 1_000, OWN));
        assert_eq!(prefix(&removed, 3, 40), None, "the oldest are forgotten");
        let all = prompt(200_000);
        let kept = (1_000..200_000).filter(|at| removed.find(&all, *at, mix).is_some()).count();
        assert!(kept > ((GROUP * BUCKET_ENTRIES) << BUCKETS_BITS) * 9 / 10, "{kept} newer ones are kept");
    }

    #[test]
    fn blocks_that_are_removed_one_by_one_share_an_entry_unless_their_prompts_differ() {
        let removed = RemovedBlocks::default();
        removed.allocate();
        (0..100).rev().for_each(|at| remove(&removed, 0, at..at + 1, OWN));
        let entries = removed.buckets.get().into_iter().flatten().flat_map(|bucket| &bucket.blocks);
        assert_eq!(entries.filter(|blocks| blocks.load(Relaxed) != 0).count(), 100_usize.div_ceil(GROUP));
        // Another prompt differs from the fourth block on.
        let other: Vec<SequenceHash> = (0..3).chain(500..510).map(SequenceHash).collect();
        removed.add(&other, 3, &Link::default(), OWN, mix);
        assert_eq!(prefix(&removed, 0, 200).map(|prefix| prefix.blocks), Some(100));
        let of_other = removed.prefix(&other, 0, mix);
        assert_eq!(of_other.map(|prefix| prefix.blocks), Some(13));
    }

    #[test]
    fn blocks_without_an_owner_are_not_remembered() {
        let removed = RemovedBlocks::default();
        removed.allocate();
        remove(&removed, 0, 0..9, RemovedFrom { owner: 0, lost: false });
        assert_eq!(prefix(&removed, 0, 9), None);
    }

    #[test]
    fn age_is_right_after_the_time_wraps_around() {
        let removed = RemovedBlocks::default();
        removed.allocate();
        removed.set_time(u64::from(TIME_MASK) - 5);
        remove(&removed, 0, 0..1, OWN);
        removed.set_time(u64::from(TIME_MASK) + 10);
        assert_eq!(prefix(&removed, 0, 1).map(|prefix| prefix.age_s), Some(15));
    }
}
