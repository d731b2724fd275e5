//! The blocks that workers had cached and have removed, so that the router can say that a prompt was evicted, when, and where.
//!
//! The table has a fixed size, [`BYTES`]: a new entry replaces the oldest one of its bucket, and a replaced block counts as never cached. A
//! removal writes one cache line, and a lookup reads one for each step of a binary search. The search works because the remembered blocks
//! of a prompt are its leading ones: caches evict the end of a prompt before its beginning, and the table forgets the oldest entries first.

use super::prefetch::prefetch;
use std::sync::{
    OnceLock,
    atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
};

const BUCKETS_BITS: u32 = if cfg!(test) { 10 } else { 17 };
const BUCKET_ENTRIES: usize = 7;
/// The memory of the table: 8 MiB for 917,504 blocks. It is allocated when the first block is removed.
pub(super) const BYTES: usize = size_of::<Bucket>() << BUCKETS_BITS;

/// The fields of an entry, from its lowest bit on: how the block was removed (2 bits: 1 evicted, 2 lost), the owner, the time, and bits of
/// the hash.
const OWNER_BITS: u32 = 12;
const TIME_BITS: u32 = 22;
const TIME_SHIFT: u32 = 2 + OWNER_BITS;
const HASH_SHIFT: u32 = TIME_SHIFT + TIME_BITS;
const TIME_MASK: u32 = (1 << TIME_BITS) - 1;

/// The largest owner number.
pub(crate) const OWNER_MAX: u16 = (1 << OWNER_BITS) - 1;

/// One line of the processor's cache. Entries are written in rotation, so that writing reads none of them. A block that was removed twice has
/// two entries.
#[derive(Default)]
#[repr(align(64))]
struct Bucket {
    entries: [AtomicU64; BUCKET_ENTRIES],
    /// The position of the oldest entry, which is replaced next.
    oldest: AtomicU64,
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

    pub(super) fn prefetch(&self, mixed: u64) {
        prefetch(self.buckets.get().map_or(&[], |buckets| &**buckets), bucket_of(mixed));
    }

    /// Records that the block with this mixed hash was removed now. Calls must not overlap.
    pub(super) fn add(&self, mixed: u64, RemovedFrom { owner, lost }: RemovedFrom) {
        if owner == 0 {
            return;
        }
        let buckets = self.buckets.get_or_init(|| (0..1 << BUCKETS_BITS).map(|_| Bucket::default()).collect());
        let Bucket { entries, oldest } = &buckets[bucket_of(mixed)];
        let at = oldest.load(Relaxed) as usize % BUCKET_ENTRIES;
        let time = u64::from(self.now.load(Relaxed)) << TIME_SHIFT;
        let rest = time | u64::from(owner.min(OWNER_MAX)) << 2 | if lost { 2 } else { 1 };
        entries[at].store(mixed << HASH_SHIFT | rest, Relaxed);
        oldest.store((at as u64 + 1) % BUCKET_ENTRIES as u64, Relaxed);
    }

    /// Returns the newest entry of the block with this mixed hash.
    fn find(&self, mixed: u64) -> Option<u64> {
        let Bucket { entries, oldest } = self.buckets.get()?.get(bucket_of(mixed))?;
        let (newer, older) = entries.split_at(oldest.load(Relaxed) as usize % BUCKET_ENTRIES);
        let newest_first = newer.iter().rev().chain(older.iter().rev());
        newest_first.map(|entry| entry.load(Relaxed)).find(|entry| is_of(*entry, mixed))
    }

    /// Returns the remembered leading blocks of a prompt of `len` blocks, of which the first `from` are cached; `None` if the next block is
    /// not remembered. `mixed` returns the mixed hash of a block.
    pub(super) fn prefix(&self, from: usize, len: usize, mixed: impl Fn(usize) -> u64) -> Option<RemovedPrefix> {
        if from >= len {
            return None;
        }
        let (mut found, mut last, mut absent) = (self.find(mixed(from))?, from, len);
        while absent - last > 1 {
            let middle = last.midpoint(absent);
            match self.find(mixed(middle)) {
                Some(entry) => (found, last) = (entry, middle),
                None => absent = middle,
            }
        }
        Some(RemovedPrefix {
            blocks: last as u32 + 1,
            owner: (found >> 2) as u16 & OWNER_MAX,
            age_s: age_of(found, self.now.load(Relaxed)),
            lost: found & 2 > 0,
        })
    }
}

fn bucket_of(mixed: u64) -> usize {
    (mixed >> (u64::BITS - BUCKETS_BITS)) as usize
}

/// Whether this is an entry of the block with this mixed hash. The bucket and 28 more bits of the hash are compared.
fn is_of(entry: u64, mixed: u64) -> bool {
    entry != 0 && entry >> HASH_SHIFT == mixed & (u64::MAX >> HASH_SHIFT)
}

fn age_of(entry: u64, now: u32) -> u32 {
    now.wrapping_sub((entry >> TIME_SHIFT) as u32) & TIME_MASK
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_kv::mix;

    #[test]
    fn removed_blocks_are_found_with_owner_and_age_until_newer_ones_replace_them() {
        let removed = RemovedBlocks::default();
        assert_eq!((removed.prefix(0, 9, |at| mix(at as u64)), removed.bytes()), (None, 0));
        removed.set_time(100);
        (3..40).for_each(|block| removed.add(mix(block), RemovedFrom { owner: 7, lost: block < 10 }));
        removed.set_time(150);
        (20..30).for_each(|block| removed.add(mix(block), RemovedFrom { owner: OWNER_MAX, lost: false }));
        removed.set_time(160);
        let prefix = |from: usize, len: usize| removed.prefix(from, len, |block| mix(block as u64));
        assert_eq!(prefix(0, 40), None, "the first block is not removed");
        assert_eq!(prefix(3, 3), None);
        assert_eq!(prefix(3, 9), Some(RemovedPrefix { blocks: 9, owner: 7, age_s: 60, lost: true }));
        assert_eq!(prefix(3, 25), Some(RemovedPrefix { blocks: 25, owner: OWNER_MAX, age_s: 10, lost: false }));
        assert_eq!(prefix(20, 70), Some(RemovedPrefix { blocks: 40, owner: 7, age_s: 60, lost: false }));
        assert_eq!(removed.bytes(), BYTES);
        removed.set_time(161);
        (1_000..40_000).for_each(|block| removed.add(mix(block), RemovedFrom { owner: 1, lost: false }));
        assert_eq!(prefix(3, 40), None, "the oldest are forgotten");
        let kept = (1_000..40_000).filter(|block| removed.find(mix(*block)).is_some()).count();
        assert!(kept > (BUCKET_ENTRIES << BUCKETS_BITS) * 9 / 10, "{kept} newer ones are kept");
    }

    #[test]
    fn blocks_without_an_owner_are_not_remembered() {
        let removed = RemovedBlocks::default();
        removed.add(mix(1), RemovedFrom { owner: 0, lost: false });
        assert_eq!((removed.prefix(0, 1, |_| mix(1)), removed.bytes()), (None, 0));
    }

    #[test]
    fn age_is_right_after_the_time_wraps_around() {
        let removed = RemovedBlocks::default();
        removed.set_time(u64::from(TIME_MASK) - 5);
        removed.add(mix(1), RemovedFrom { owner: 1, lost: false });
        removed.set_time(u64::from(TIME_MASK) + 10);
        assert_eq!(removed.prefix(0, 1, |_| mix(1)).map(|prefix| prefix.age_s), Some(15));
    }
}
