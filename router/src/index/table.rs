//! A hash table that grows and shrinks in segments.
//!
//! A table is a directory of segments (extendible hashing): the first bits of an entry's fingerprint select the segment, the last bits its
//! bucket. A segment that fills up is split in two, so no insertion moves more than 4,097 entries. A slot has 8 bytes: 28 bits of the key's
//! hash (the fingerprint) and 36 bits of value. The table does not store keys. The caller compares them, and finds them through the values.
//!
//! A bucket is one line of the processor's cache: seven slots, and a byte of each slot's fingerprint (its tag), which are compared at once.
//! A search that visited one slot after another would have branches that are often mispredicted. An entry whose bucket is full is in the
//! next bucket that is not full.

use super::prefetch::prefetch;

/// The number 1 in each byte.
const BYTES: u64 = 0x0101_0101_0101_0101;
const BUCKET_SLOTS: usize = 7;
/// This bit of a full bucket's tags says that searches for entries in later buckets may pass this bucket.
const OVERFULL: u64 = 1 << 63;
/// Maximum average number of entries in a bucket. Searches in fuller tables take longer.
const BUCKET_ENTRIES: usize = 4;
/// A segment has 64 KiB. Splitting or merging takes about 50 microseconds.
const SEGMENT_BUCKETS: usize = 1 << 10;
const SEGMENT_BUCKETS_MIN: usize = 2;
const FINGERPRINT_BITS: u32 = 28;
const VALUE_BITS: u32 = 64 - FINGERPRINT_BITS;
const VALUE_MASK: u64 = (1 << VALUE_BITS) - 1;

/// Maximum number of entries of a table. With at most this many entries, a fingerprint has enough bits to select a segment and a bucket.
pub(super) const ENTRIES_MAX: usize = 100_000_000;

/// A hash table with values from 1 to 2^36 - 1. The fields that a search in a small table reads come first.
#[repr(C)]
pub(super) struct HashTable {
    depth: u32,
    /// The only segment of a small table. It is stored here, so that a search in such a table reads only the slots. Unused if `depth` is
    /// not 0.
    small: Segment,
    segments: Vec<Segment>,
    /// The number of the segment for each prefix of `depth` bits of a fingerprint.
    directory: Vec<u32>,
    free_segments: Vec<u32>,
    len: usize,
}

/// The entries whose fingerprints have the same first `depth` bits.
#[repr(C)]
struct Segment {
    buckets: Box<[TableBucket]>,
    len: usize,
    depth: u32,
}

#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct TableBucket {
    /// The tag of each slot; 0 for an empty slot. The last byte is 0 unless the bucket is [`OVERFULL`].
    tags: u64,
    /// The entries; 0 in an empty slot.
    slots: [u64; BUCKET_SLOTS],
}

/// The position of a slot in a segment.
#[derive(Clone, Copy)]
struct SlotPosition {
    bucket: usize,
    slot: usize,
}

fn fingerprint(hash: u64) -> u64 {
    hash >> VALUE_BITS
}

/// Returns the tag of the entries with this fingerprint, which is never 0.
fn tag(fingerprint: u64) -> u64 {
    (fingerprint >> SEGMENT_BUCKETS.trailing_zeros() & 0xff).max(1)
}

/// Returns a word in which the highest bit of each byte that is 0 is set. It may also be set in later bytes that are not 0.
fn zero_bytes(bytes: u64) -> u64 {
    bytes.wrapping_sub(BYTES) & !bytes & BYTES << 7
}

impl TableBucket {
    /// Returns the first slot with the tag for which `is_it` is true. `is_it` may also be called for a few slots with other tags.
    #[inline]
    fn slot(&self, tag: u64, mut is_it: impl FnMut(u64) -> bool) -> Option<usize> {
        let mut marked = zero_bytes(self.tags ^ (tag * BYTES));
        while marked != 0 {
            let slot = marked.trailing_zeros() as usize / 8;
            if self.slots.get(slot).is_some_and(|entry| is_it(*entry)) {
                return Some(slot);
            }
            marked &= marked - 1;
        }
        None
    }

    #[inline]
    fn first_empty(&self) -> Option<usize> {
        let slot = zero_bytes(self.tags).trailing_zeros() as usize / 8;
        (slot < BUCKET_SLOTS).then_some(slot)
    }
}

impl Segment {
    fn new(buckets: usize, depth: u32) -> Self {
        Self { buckets: vec![TableBucket::default(); buckets].into(), len: 0, depth }
    }

    #[inline]
    fn mask(&self) -> usize {
        self.buckets.len() - 1
    }

    #[inline]
    fn home(&self, fingerprint: u64) -> usize {
        fingerprint as usize & self.mask()
    }

    /// Returns the position of the entry with this fingerprint for whose value `is_it` is true, or the position of the empty slot at which
    /// the search for it ends.
    #[inline]
    fn search(&self, fingerprint: u64, mut is_it: impl FnMut(u64) -> bool) -> Result<SlotPosition, SlotPosition> {
        let (tag, mut bucket) = (tag(fingerprint), self.home(fingerprint));
        loop {
            let slots = &self.buckets[bucket];
            if let Some(slot) = slots.slot(tag, |entry| entry >> VALUE_BITS == fingerprint && is_it(entry & VALUE_MASK)) {
                return Ok(SlotPosition { bucket, slot });
            }
            if let Some(slot) = slots.first_empty() {
                return Err(SlotPosition { bucket, slot });
            }
            bucket = (bucket + 1) & self.mask();
        }
    }

    /// Adds an entry, for which a search ends at `at`.
    #[inline]
    fn add(&mut self, at: SlotPosition, entry: u64) {
        let mut passed = self.home(entry >> VALUE_BITS);
        while passed != at.bucket {
            self.buckets[passed].tags |= OVERFULL;
            passed = (passed + 1) & self.mask();
        }
        self.set(at, entry);
        self.len += 1;
    }

    /// Fills or empties a slot.
    #[inline]
    fn set(&mut self, SlotPosition { bucket, slot }: SlotPosition, entry: u64) {
        let bucket = &mut self.buckets[bucket];
        let (tag, shift) = (if entry == 0 { 0 } else { tag(entry >> VALUE_BITS) }, slot * 8);
        bucket.tags = bucket.tags & !(0xff << shift) | tag << shift;
        bucket.slots[slot] = entry;
    }

    fn push(&mut self, entry: u64) {
        // This loop is quicker than `search`, which compares tags.
        let mut bucket = self.home(entry >> VALUE_BITS);
        let slot = loop {
            match self.buckets[bucket].first_empty() {
                Some(slot) => break slot,
                None => bucket = (bucket + 1) & self.mask(),
            }
        };
        self.add(SlotPosition { bucket, slot }, entry);
    }

    fn entries(&self) -> Vec<u64> {
        // Each slot is written and then overwritten if it is empty. A branch would be mispredicted for a quarter of the slots.
        let (mut entries, mut len) = (vec![0; self.len + 1], 0);
        for slot in self.buckets.iter().flat_map(|bucket| bucket.slots) {
            entries[len] = slot;
            len += usize::from(slot != 0);
        }
        entries.truncate(len);
        entries
    }

    #[inline]
    fn vacate(&mut self, at: SlotPosition) {
        self.set(at, 0);
        self.len -= 1;
        if self.buckets[at.bucket].tags & OVERFULL != 0 {
            self.refill(at);
        }
    }

    /// Moves later entries into the emptied slot `hole`, and into the slots that these entries leave. A search ends at an empty slot, so no
    /// entry may be behind an empty slot at which its search would end.
    #[cold]
    fn refill(&mut self, mut hole: SlotPosition) {
        let mask = self.mask();
        let (mut bucket, mut more) = (hole.bucket, true);
        while more {
            bucket = (bucket + 1) & mask;
            let slots = &self.buckets[bucket];
            more = slots.tags & OVERFULL != 0;
            let is_late = |entry: &u64| {
                let home = self.home(entry >> VALUE_BITS);
                *entry != 0 && bucket.wrapping_sub(home) & mask >= bucket.wrapping_sub(hole.bucket) & mask
            };
            if let Some(slot) = slots.slots.iter().position(is_late) {
                self.set(hole, slots.slots[slot]);
                hole = SlotPosition { bucket, slot };
                self.set(hole, 0);
            }
        }
        self.buckets[hole.bucket].tags &= !OVERFULL;
    }

    fn resized(&self, buckets: usize) -> Self {
        let mut resized = Self::new(buckets, self.depth);
        self.entries().into_iter().for_each(|entry| resized.push(entry));
        resized
    }
}

impl Default for HashTable {
    fn default() -> Self {
        let small = Segment::new(SEGMENT_BUCKETS_MIN, 0);
        Self { small, segments: Vec::new(), directory: Vec::new(), depth: 0, free_segments: Vec::new(), len: 0 }
    }
}

impl HashTable {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn prefix(&self, fingerprint: u64) -> usize {
        (fingerprint >> (FINGERPRINT_BITS - self.depth)) as usize
    }

    #[inline]
    fn segment(&self, fingerprint: u64) -> &Segment {
        match self.depth {
            0 => &self.small,
            _ => &self.segments[self.directory[self.prefix(fingerprint)] as usize],
        }
    }

    #[inline]
    fn segment_mut(&mut self, fingerprint: u64) -> &mut Segment {
        if self.depth == 0 {
            return &mut self.small;
        }
        let number = self.directory[self.prefix(fingerprint)];
        &mut self.segments[number as usize]
    }

    /// Prefetches the slots of a hash that will soon be searched for.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        let segment = self.segment(fingerprint(hash));
        prefetch(&segment.buckets, segment.home(fingerprint(hash)));
    }

    /// Returns the value of the hash for which `is_it` is true. `is_it` is called only with values whose hashes have the same fingerprint.
    #[inline]
    pub(super) fn find(&self, hash: u64, is_it: impl FnMut(u64) -> bool) -> Option<u64> {
        let segment = self.segment(fingerprint(hash));
        let SlotPosition { bucket, slot } = segment.search(fingerprint(hash), is_it).ok()?;
        Some(segment.buckets[bucket].slots[slot] & VALUE_MASK)
    }

    /// Inserts the value unless the hash has one for which `is_it` is true. Returns whether it was inserted.
    #[inline]
    pub(super) fn insert(&mut self, hash: u64, value: u64, is_it: impl FnMut(u64) -> bool) -> bool {
        debug_assert!(value != 0 && value <= VALUE_MASK);
        let fingerprint = fingerprint(hash);
        let segment = self.segment_mut(fingerprint);
        let Err(at) = segment.search(fingerprint, is_it) else { return false };
        segment.add(at, fingerprint << VALUE_BITS | value);
        let is_full = segment.len > segment.buckets.len() * BUCKET_ENTRIES;
        self.len += 1;
        if is_full {
            self.grow(fingerprint);
        }
        true
    }

    /// Replaces a value of the hash; does nothing if the hash does not have it.
    pub(super) fn replace(&mut self, hash: u64, old: u64, new: u64) {
        let fingerprint = fingerprint(hash);
        let segment = self.segment_mut(fingerprint);
        if let Ok(at) = segment.search(fingerprint, |value| value == old) {
            segment.set(at, fingerprint << VALUE_BITS | new);
        }
    }

    /// Removes the value from the hash. Returns whether the hash had it.
    #[inline]
    pub(super) fn remove(&mut self, hash: u64, value: u64) -> bool {
        let fingerprint = fingerprint(hash);
        let segment = self.segment_mut(fingerprint);
        let Ok(at) = segment.search(fingerprint, |other| other == value) else { return false };
        segment.vacate(at);
        let is_sparse = segment.len * 2 < segment.buckets.len() && segment.buckets.len() > SEGMENT_BUCKETS_MIN;
        self.len -= 1;
        if is_sparse {
            self.shrink(fingerprint);
        }
        true
    }

    /// Removes all values of one segment and returns them. The result is empty only if the table is empty.
    pub(super) fn take_some(&mut self) -> Vec<u64> {
        let mut segments = std::iter::once(&mut self.small).chain(&mut self.segments);
        let Some(segment) = segments.find(|segment| segment.len > 0) else { return Vec::new() };
        let empty = Segment::new(SEGMENT_BUCKETS_MIN, segment.depth);
        let taken = std::mem::replace(segment, empty);
        self.len -= taken.len;
        if self.len == 0 {
            *self = Self::default();
        }
        taken.entries().into_iter().map(|entry| entry & VALUE_MASK).collect()
    }

    #[cold]
    fn grow(&mut self, fingerprint: u64) {
        let segment = self.segment_mut(fingerprint);
        if segment.buckets.len() < SEGMENT_BUCKETS {
            *segment = segment.resized((segment.buckets.len() * 4).min(SEGMENT_BUCKETS));
            return;
        }
        let depth = segment.depth + 1;
        assert!(depth + SEGMENT_BUCKETS.trailing_zeros() <= FINGERPRINT_BITS, "ENTRIES_MAX bounds the number of entries");
        let mut halves = [Segment::new(SEGMENT_BUCKETS, depth), Segment::new(SEGMENT_BUCKETS, depth)];
        for entry in segment.entries() {
            halves[(entry >> (64 - depth)) as usize & 1].push(entry);
        }
        let [low, high] = halves;
        if self.depth == 0 {
            self.small = Segment::new(0, 0);
            (self.segments, self.directory, self.depth) = (vec![low, high], vec![0, 1], 1);
            return;
        }
        if depth > self.depth {
            self.directory = self.directory.iter().flat_map(|segment| [*segment; 2]).collect();
            self.depth = depth;
        }
        *self.segment_mut(fingerprint) = low;
        let other = self.add_segment(high);
        let range = self.directory_range(fingerprint, depth - 1);
        let half = range.start + range.len() / 2;
        self.directory[half..range.end].fill(other);
    }

    fn add_segment(&mut self, segment: Segment) -> u32 {
        match self.free_segments.pop() {
            Some(number) => {
                self.segments[number as usize] = segment;
                number
            }
            None => {
                self.segments.push(segment);
                self.segments.len() as u32 - 1
            }
        }
    }

    /// Returns the positions in the directory that share the first `depth` bits of the fingerprint.
    fn directory_range(&self, fingerprint: u64, depth: u32) -> std::ops::Range<usize> {
        let count = 1 << (self.depth - depth);
        let start = self.prefix(fingerprint) & !(count - 1);
        start..start + count
    }

    /// Halves a nearly empty segment, or merges it with the segment from which it was split if both are nearly empty.
    #[cold]
    fn shrink(&mut self, fingerprint: u64) {
        if self.len == 0 {
            *self = Self::default();
            return;
        }
        let segment = self.segment_mut(fingerprint);
        let (depth, half) = (segment.depth, segment.buckets.len() / 2);
        if depth == 0 || half < SEGMENT_BUCKETS / 2 {
            *segment = segment.resized(half);
            return;
        }
        let (pair, own) = (self.directory_range(fingerprint, depth - 1), self.directory_range(fingerprint, depth));
        let (number, other) =
            (self.directory[own.start], self.directory[if own.start == pair.start { own.end } else { pair.start }]);
        let (segment, buddy) = (&self.segments[number as usize], &self.segments[other as usize]);
        if buddy.depth != depth || buddy.len + segment.len > SEGMENT_BUCKETS * BUCKET_ENTRIES / 2 {
            return;
        }
        let mut merged = Segment::new(SEGMENT_BUCKETS, depth - 1);
        segment.entries().into_iter().chain(buddy.entries()).for_each(|entry| merged.push(entry));
        self.segments[number as usize] = merged;
        self.segments[other as usize] = Segment::new(0, 0);
        self.free_segments.push(other);
        self.directory[pair].fill(number);
    }

    pub(super) fn bytes(&self) -> usize {
        let slots: usize =
            self.segments.iter().chain([&self.small]).map(|segment| segment.buckets.len() * size_of::<TableBucket>()).sum();
        slots + self.directory.capacity() * 4 + self.segments.capacity() * size_of::<Segment>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Checks that each bucket knows that entries may be behind it.
    fn check(segment: &Segment) {
        for (number, bucket) in segment.buckets.iter().enumerate() {
            assert!(bucket.tags & OVERFULL == 0 || bucket.first_empty().is_none());
            for entry in bucket.slots.into_iter().filter(|entry| *entry != 0) {
                let mut passed = segment.home(entry >> VALUE_BITS);
                while passed != number {
                    assert!(segment.buckets[passed].tags & OVERFULL != 0, "a search for {entry} passes bucket {passed}");
                    passed = (passed + 1) & segment.mask();
                }
            }
        }
    }

    /// The table must always equal a set of pairs, while it grows to several segments and shrinks again.
    #[test]
    fn table_equals_set_while_it_grows_and_shrinks() {
        let hash = |key: u64| tandem_kv::mix(key);
        let (mut table, mut set) = (HashTable::default(), HashSet::new());
        for (keys, removed) in [(100_000_u64, 99_990_u64), (50_000, 40_000), (70_000, 80_000)] {
            let first = set.len() as u64 * 1_000_000;
            let added: Vec<u64> = (first..first + keys).collect();
            for key in &added {
                assert!(table.insert(hash(*key), key + 1, |_| false) && set.insert(*key));
                assert!(!table.insert(hash(*key), 7, |value| value == key + 1), "the hash has the value");
            }
            for key in &added {
                assert_eq!(table.find(hash(*key), |value| value == key + 1), Some(key + 1));
            }
            let gone: Vec<u64> = set.iter().copied().take(removed as usize).collect();
            for key in gone {
                assert!(table.remove(hash(key), key + 1) && set.remove(&key) && !table.remove(hash(key), key + 1));
                assert_eq!(table.find(hash(key), |value| value == key + 1), None);
            }
            assert_eq!(table.len(), set.len());
            table.segments.iter().chain([&table.small]).for_each(check);
            for key in &set {
                assert_eq!(table.find(hash(*key), |value| value == key + 1), Some(key + 1), "{key}");
            }
        }
        let mut left = HashSet::new();
        while table.len() > 0 {
            let taken = table.take_some();
            assert!(taken.len() <= SEGMENT_BUCKETS * BUCKET_SLOTS);
            left.extend(taken.into_iter().map(|value| value - 1));
        }
        assert_eq!(left, set);
        assert!(table.bytes() < 1_000, "{} bytes", table.bytes());
    }
}
