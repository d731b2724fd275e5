//! An open-addressing hash table that grows and shrinks in segments.
//!
//! A table is a directory of segments (extendible hashing): the first bits of an entry's fingerprint select the segment, the last bits its
//! slot. A segment that fills up is split in two, so no insertion moves more than [`SEGMENT_SLOTS`] entries. A slot has 8 bytes: 28 bits of
//! the key's hash (the fingerprint) and 36 bits of value. The table does not store keys. The caller compares them, and finds them through
//! the values.

use super::prefetch::prefetch;

/// A segment has 64 KiB. Splitting or merging takes about 50 microseconds.
const SEGMENT_SLOTS: usize = 1 << 13;
const SEGMENT_SLOTS_MIN: usize = 1 << 4;
const FINGERPRINT_BITS: u32 = 28;
const VALUE_BITS: u32 = 64 - FINGERPRINT_BITS;
const VALUE_MASK: u64 = (1 << VALUE_BITS) - 1;

/// Maximum number of entries of a table. With at most this many entries, segments are small enough that the fingerprints in them differ.
pub(super) const ENTRIES_MAX: usize = 100_000_000;

/// A hash table with values from 1 to 2^36 - 1.
pub(super) struct Table {
    /// The only segment of a small table. It is stored here, so that a search in such a table reads only the slots. Unused if `depth` is not 0.
    small: Segment,
    segments: Vec<Segment>,
    /// The number of the segment for each prefix of `depth` bits of a fingerprint.
    directory: Vec<u32>,
    depth: u32,
    free_segments: Vec<u32>,
    len: usize,
}

/// The entries whose fingerprints have the same first `depth` bits. The value 0 is an empty slot.
struct Segment {
    slots: Vec<u64>,
    len: usize,
    depth: u32,
}

fn fingerprint(hash: u64) -> u64 {
    hash >> VALUE_BITS
}

impl Segment {
    fn new(slots: usize, depth: u32) -> Self {
        Self { slots: vec![0; slots], len: 0, depth }
    }

    #[inline]
    fn mask(&self) -> usize {
        self.slots.len() - 1
    }

    #[inline]
    fn home(&self, slot: u64) -> usize {
        (slot >> VALUE_BITS) as usize & self.mask()
    }

    /// Returns the position of the entry with this fingerprint for whose value `is_it` is true, or the position of the empty slot at which
    /// the search for it ends.
    #[inline]
    fn search(&self, fingerprint: u64, mut is_it: impl FnMut(u64) -> bool) -> Result<usize, usize> {
        let mut at = fingerprint as usize & self.mask();
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return Err(at);
            }
            if slot >> VALUE_BITS == fingerprint && is_it(slot & VALUE_MASK) {
                return Ok(at);
            }
            at = (at + 1) & self.mask();
        }
    }

    fn push(&mut self, entry: u64) {
        let mut at = self.home(entry);
        while self.slots[at] != 0 {
            at = (at + 1) & self.mask();
        }
        self.slots[at] = entry;
        self.len += 1;
    }

    fn entries(&self) -> Vec<u64> {
        // Each slot is written and then overwritten if it is empty. A branch would be predicted wrongly for a quarter of the slots.
        let (mut entries, mut len) = (vec![0; self.len + 1], 0);
        for slot in &self.slots {
            entries[len] = *slot;
            len += usize::from(*slot != 0);
        }
        entries.truncate(len);
        entries
    }

    /// Empties the slot, and moves later entries so that each can be reached from its home slot without crossing an empty slot.
    fn vacate(&mut self, mut hole: usize) {
        let mask = self.mask();
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let entry = self.slots[at];
            if entry == 0 {
                break;
            }
            if at.wrapping_sub(self.home(entry)) & mask >= at.wrapping_sub(hole) & mask {
                self.slots[hole] = entry;
                hole = at;
            }
        }
        self.slots[hole] = 0;
        self.len -= 1;
    }

    fn resized(&self, slots: usize) -> Self {
        let mut resized = Self::new(slots, self.depth);
        self.entries().into_iter().for_each(|entry| resized.push(entry));
        resized
    }
}

impl Default for Table {
    fn default() -> Self {
        let small = Segment::new(SEGMENT_SLOTS_MIN, 0);
        Self { small, segments: Vec::new(), directory: Vec::new(), depth: 0, free_segments: Vec::new(), len: 0 }
    }
}

impl Table {
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
        prefetch(&segment.slots, fingerprint(hash) as usize & segment.mask());
    }

    /// Returns the value of the hash for which `is_it` is true. `is_it` is called with the values whose fingerprints are equal.
    #[inline]
    pub(super) fn find(&self, hash: u64, is_it: impl FnMut(u64) -> bool) -> Option<u64> {
        let segment = self.segment(fingerprint(hash));
        let at = segment.search(fingerprint(hash), is_it).ok()?;
        Some(segment.slots[at] & VALUE_MASK)
    }

    /// Inserts the value unless the hash has one for which `is_it` is true. Returns whether it was inserted.
    #[inline]
    pub(super) fn insert(&mut self, hash: u64, value: u64, is_it: impl FnMut(u64) -> bool) -> bool {
        debug_assert!(value != 0 && value <= VALUE_MASK);
        let fingerprint = fingerprint(hash);
        let segment = self.segment_mut(fingerprint);
        let Err(at) = segment.search(fingerprint, is_it) else { return false };
        segment.slots[at] = fingerprint << VALUE_BITS | value;
        segment.len += 1;
        let is_full = segment.len * 2 > segment.slots.len();
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
            segment.slots[at] = fingerprint << VALUE_BITS | new;
        }
    }

    /// Removes the value from the hash. Returns whether the hash had it.
    #[inline]
    pub(super) fn remove(&mut self, hash: u64, value: u64) -> bool {
        let fingerprint = fingerprint(hash);
        let segment = self.segment_mut(fingerprint);
        let Ok(at) = segment.search(fingerprint, |other| other == value) else { return false };
        segment.vacate(at);
        let is_sparse = segment.len * 16 < segment.slots.len() && segment.slots.len() > SEGMENT_SLOTS_MIN;
        self.len -= 1;
        if is_sparse {
            self.shrink(fingerprint);
        }
        true
    }

    /// Removes all values of one segment and returns them. The result is empty if the table is empty.
    pub(super) fn take_some(&mut self) -> Vec<u64> {
        let mut segments = std::iter::once(&mut self.small).chain(&mut self.segments);
        let Some(segment) = segments.find(|segment| segment.len > 0) else { return Vec::new() };
        let empty = Segment::new(SEGMENT_SLOTS_MIN, segment.depth);
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
        if segment.slots.len() < SEGMENT_SLOTS {
            *segment = segment.resized((segment.slots.len() * 4).min(SEGMENT_SLOTS));
            return;
        }
        let depth = segment.depth + 1;
        assert!(depth + SEGMENT_SLOTS.trailing_zeros() <= FINGERPRINT_BITS, "ENTRIES_MAX bounds the number of entries");
        let mut halves = [Segment::new(SEGMENT_SLOTS, depth), Segment::new(SEGMENT_SLOTS, depth)];
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

    /// Halves a segment that is nearly empty, or merges it with the segment from which it was split if that is nearly empty too.
    #[cold]
    fn shrink(&mut self, fingerprint: u64) {
        if self.len == 0 {
            *self = Self::default();
            return;
        }
        let segment = self.segment_mut(fingerprint);
        let (depth, half) = (segment.depth, segment.slots.len() / 2);
        if depth == 0 || half < SEGMENT_SLOTS / 2 {
            *segment = segment.resized(half);
            return;
        }
        let (pair, own) = (self.directory_range(fingerprint, depth - 1), self.directory_range(fingerprint, depth));
        let (number, other) =
            (self.directory[own.start], self.directory[if own.start == pair.start { own.end } else { pair.start }]);
        let (segment, buddy) = (&self.segments[number as usize], &self.segments[other as usize]);
        if buddy.depth != depth || (buddy.len + segment.len) * 4 > SEGMENT_SLOTS {
            return;
        }
        let mut merged = Segment::new(SEGMENT_SLOTS, depth - 1);
        segment.entries().into_iter().chain(buddy.entries()).for_each(|entry| merged.push(entry));
        self.segments[number as usize] = merged;
        self.segments[other as usize] = Segment::new(0, 0);
        self.free_segments.push(other);
        self.directory[pair].fill(number);
    }

    pub(super) fn bytes(&self) -> usize {
        let slots: usize = self.segments.iter().chain([&self.small]).map(|segment| segment.slots.capacity() * 8).sum();
        slots + self.directory.capacity() * 4 + self.segments.capacity() * size_of::<Segment>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// The table must always equal a set of pairs, while it grows to several segments and shrinks again.
    #[test]
    fn table_equals_set_while_it_grows_and_shrinks() {
        let hash = |key: u64| tandem_kv::mix(key);
        let (mut table, mut set) = (Table::default(), HashSet::new());
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
            for key in &set {
                assert_eq!(table.find(hash(*key), |value| value == key + 1), Some(key + 1), "{key}");
            }
        }
        let mut left = HashSet::new();
        while table.len() > 0 {
            let taken = table.take_some();
            assert!(taken.len() <= SEGMENT_SLOTS);
            left.extend(taken.into_iter().map(|value| value - 1));
        }
        assert_eq!(left, set);
        assert!(table.bytes() < 1_000, "{} bytes", table.bytes());
    }
}
