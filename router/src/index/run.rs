//! A run: consecutive blocks of prompts, with the rows that have cached its leading blocks.

use super::prefetch::prefetch;
use tandem_kv::SequenceHash;

/// Maximum number of blocks of a run. The limit bounds the time for which a change locks a run.
pub(super) const RUN_BLOCKS: usize = 1 << 10;

/// The number of consecutive blocks of a prompt that share an entry in the memory of removed blocks, so that each has a byte of a word.
pub(super) const GROUP: usize = 8;

/// The search for the first difference of two lists of hashes compares this many positions in one round.
const PROBES: usize = 15;
/// The number of hashes in a line of the processor's cache.
const LINE: usize = 8;
/// The search for the first difference of two lists of hashes compares this many cache lines at their ends first.
const LINES: usize = 8;

/// Consecutive blocks of prompts. Each holder of a run has cached at least its first block, and at least one holder has cached its last
/// block.
///
/// A run fills one line of the processor's cache, so that a lookup reads only one line for a run that has few holders.
#[repr(align(64))]
pub(super) struct BlockRun {
    pub(super) hashes: Vec<SequenceHash>,
    /// The hash of the last block. With this copy, a lookup of a prompt that has all blocks of the run need not read `hashes`.
    pub(super) last: SequenceHash,
    /// The offset in this run at which the run that was added last branches off. Most prompts that leave this run leave it here.
    pub(super) fork: u32,
    pub(super) holders: Holders,
}

/// The rows that have cached leading blocks of a run, and how many leading blocks each has cached. Most runs have few holders and need no
/// bit sets.
#[derive(Clone)]
pub(super) enum Holders {
    Few(Few),
    Many(Groups),
}

/// Up to [`FEW`] holders, then zeros. The last [`BLOCKS_BITS`] bits of a holder are its number of blocks, the other bits its row.
#[derive(Clone, Default)]
pub(super) struct Few([u32; FEW]);

/// The number of holders that fit into the run's line of the processor's cache.
pub(super) const FEW: usize = 5;
const BLOCKS_BITS: u32 = RUN_BLOCKS.ilog2() + 1;

/// Several holders, grouped by their numbers of blocks.
#[derive(Clone)]
pub(super) struct Groups {
    /// The number of 64-bit words in a set of rows.
    words: u32,
    /// The set of all holders, followed by the groups in the order of their numbers of blocks. Each group has its number of blocks and the
    /// set of its holders.
    sets: Box<[u64]>,
}

/// Returns the position of the first block in the group of the block at this position of a prompt.
pub(super) fn first_of_group(at: usize) -> usize {
    at / GROUP * GROUP
}

/// Returns the index of a row's word in a set, and the row's bit in that word.
pub(super) fn place(row: u32) -> (usize, u64) {
    (row as usize / 64, 1 << (row % 64))
}

/// Returns the rows in this word of a set.
pub(super) fn rows(word: usize, mut bits: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let row = (bits != 0).then(|| word as u32 * 64 + bits.trailing_zeros())?;
        bits &= bits - 1;
        Some(row)
    })
}

/// Returns how many leading hashes are equal. A sequence hash identifies a block and all blocks before it, so equal hashes at one position
/// imply equal hashes at all positions before it.
pub(super) fn common(one: &[SequenceHash], other: &[SequenceHash]) -> usize {
    let len = one.len().min(other.len());
    let is_equal = |blocks: usize| one[blocks - 1] == other[blocks - 1];
    // Most prompts that leave a run leave it near its end, where the turn of a conversation begins: the lines there are read first.
    let near = |line: usize| len.checked_sub(line * LINE).filter(|blocks| *blocks > 0);
    let different = (0..=LINES).filter(|line| near(*line).is_some_and(|blocks| !is_equal(blocks))).count();
    let mut equal = if different > LINES { 0 } else { near(different).unwrap_or(0) };
    let mut differ = different.checked_sub(1).and_then(near).unwrap_or(len + 1);
    while differ - equal > 1 {
        // The probes of one round do not depend on each other, so the processor reads them from memory at the same time.
        let step = (differ - equal).div_ceil(PROBES + 1);
        let probes = (1..=PROBES).map(|probe| equal + probe * step).filter(|len| *len < differ);
        let equal_probes = probes.filter(|blocks| is_equal(*blocks)).count();
        equal += equal_probes * step;
        differ = differ.min(equal + step);
    }
    equal
}

impl BlockRun {
    pub(super) fn new() -> Self {
        Self { hashes: Vec::new(), last: SequenceHash(0), fork: 0, holders: Holders::new([]) }
    }

    pub(super) fn len(&self) -> usize {
        self.hashes.len()
    }

    /// Returns how many leading blocks of the prompt `hashes` are leading blocks of the run.
    #[inline]
    pub(super) fn common(&self, hashes: &[SequenceHash]) -> usize {
        if hashes.get(self.hashes.len().wrapping_sub(1)) == Some(&self.last) {
            return self.hashes.len();
        }
        let fork = self.fork as usize;
        let (before, after) = (fork.checked_sub(1), fork);
        let equal = |at: usize| self.hashes.get(at).zip(hashes.get(at)).is_some_and(|(one, other)| one == other);
        match (before.is_some_and(equal), equal(after)) {
            (true, false) => fork,
            (true, true) => fork + common(&self.hashes[fork..], &hashes[fork..]),
            (false, _) => common(&self.hashes, hashes),
        }
    }

    pub(super) fn append(&mut self, hashes: &[SequenceHash]) {
        let len = self.hashes.len();
        if len + hashes.len() > self.hashes.capacity() {
            self.hashes.reserve_exact(hashes.len().max(len / 4));
        }
        self.hashes.extend_from_slice(hashes);
        self.set_last();
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.hashes.truncate(len);
        if len == 0 || self.hashes.capacity() > len * 2 + 8 {
            self.hashes.shrink_to_fit();
        }
        self.set_last();
    }

    pub(super) fn bytes(&self) -> usize {
        let sets = if let Holders::Many(groups) = &self.holders { groups.sets.len() } else { 0 };
        (self.hashes.capacity() + sets) * 8
    }

    fn set_last(&mut self) {
        self.last = self.hashes.last().copied().unwrap_or(SequenceHash(0));
    }

    /// Returns a new run with a copy of the blocks from `at` on, and with their holders.
    pub(super) fn split_off(&self, at: usize) -> Self {
        let hashes = self.hashes[at..].to_vec();
        let after = |(row, blocks): (u32, u32)| Some((row, blocks.checked_sub(at as u32).filter(|after| *after > 0)?));
        let holders = Holders::new(self.holders.to_vec().into_iter().filter_map(after));
        let mut tail = Self { hashes, last: SequenceHash(0), fork: 0, holders };
        tail.set_last();
        tail
    }

    pub(super) fn cut(&mut self, at: usize) {
        self.truncate(at);
        let pairs = self.holders.to_vec().into_iter().map(|(row, blocks)| (row, blocks.min(at as u32)));
        self.holders = Holders::new(pairs);
    }
}

impl Few {
    /// Returns the rows, each with its number of blocks.
    #[inline]
    pub(super) fn entries(&self) -> impl Iterator<Item = (u32, u32)> {
        let of_entry = |entry: &u32| (entry >> BLOCKS_BITS, entry & ((1 << BLOCKS_BITS) - 1));
        self.0.iter().take_while(|entry| **entry > 0).map(of_entry)
    }

    /// Sets the number of blocks that the row has cached. If there is no space for the row, returns false and leaves the holders unchanged.
    fn set(&mut self, row: u32, blocks: u32) -> bool {
        let len = self.entries().count();
        let at = self.entries().position(|(other, _)| other == row).unwrap_or(len);
        if blocks == 0 {
            if at < len {
                self.0.swap(at, len - 1);
                self.0[len - 1] = 0;
            }
            return true;
        }
        if at == FEW || row >> (u32::BITS - BLOCKS_BITS) > 0 {
            return false;
        }
        self.0[at] = row << BLOCKS_BITS | blocks;
        true
    }
}

impl Holders {
    fn new(pairs: impl IntoIterator<Item = (u32, u32)>) -> Self {
        let mut holders = Self::Few(Few::default());
        pairs.into_iter().for_each(|(row, blocks)| holders.set(row, 0, blocks));
        holders
    }

    #[inline]
    pub(super) fn prefetch(&self) {
        if let Self::Many(groups) = self {
            prefetch(&groups.sets, 0);
        }
    }

    /// Returns how many leading blocks the row has cached.
    #[inline]
    pub(super) fn get(&self, row: u32) -> u32 {
        match self {
            Self::Few(few) => few.entries().find(|(other, _)| *other == row).map_or(0, |(_, blocks)| blocks),
            Self::Many(groups) => groups.get(row),
        }
    }

    /// Changes the number of blocks that the row has cached, from `old` to `new`.
    pub(super) fn set(&mut self, row: u32, old: u32, new: u32) {
        match self {
            Self::Few(few) => {
                if !few.set(row, new) {
                    let mut groups = Groups { words: 1, sets: [0].into() };
                    few.entries().chain([(row, new)]).for_each(|(row, blocks)| groups.add(row, blocks));
                    *self = Self::Many(groups);
                }
            }
            Self::Many(groups) => {
                if old > 0 {
                    groups.remove(row, old);
                }
                if new > 0 {
                    groups.add(row, new);
                } else if groups.len() * 2 <= FEW {
                    *self = Self::new(self.to_vec());
                }
            }
        }
    }

    /// Returns the largest number of blocks that a row has cached.
    pub(super) fn blocks_max(&self) -> usize {
        match self {
            Self::Few(few) => few.entries().map(|(_, blocks)| blocks as usize).max().unwrap_or(0),
            Self::Many(groups) => groups.by_blocks().next_back().map_or(0, |(blocks, _)| blocks as usize),
        }
    }

    pub(super) fn is_only(&self, row: u32) -> bool {
        matches!(self, Self::Few(few) if few.entries().map(|(row, _)| row).eq([row]))
    }

    pub(super) fn to_vec(&self) -> Vec<(u32, u32)> {
        match self {
            Self::Few(few) => few.entries().collect(),
            Self::Many(groups) => {
                let of_group = |(blocks, set): (u32, &[u64])| -> Vec<(u32, u32)> {
                    let rows = set.iter().enumerate().flat_map(|(word, bits)| rows(word, *bits));
                    rows.map(|row| (row, blocks)).collect()
                };
                groups.by_blocks().flat_map(of_group).collect()
            }
        }
    }
}

impl Groups {
    #[inline]
    pub(super) fn all(&self) -> &[u64] {
        &self.sets[..self.words as usize]
    }

    /// Returns the groups of holders in the order of their numbers of blocks: each group's number of blocks, and the set of its rows.
    #[inline]
    pub(super) fn by_blocks(&self) -> impl DoubleEndedIterator<Item = (u32, &[u64])> {
        let words = self.words as usize;
        self.sets[words..].chunks_exact(words + 1).map(|group| (group[0] as u32, &group[1..]))
    }

    fn get(&self, row: u32) -> u32 {
        let (word, bit) = place(row);
        if self.all().get(word).is_none_or(|bits| bits & bit == 0) {
            return 0;
        }
        self.by_blocks().rev().find(|(_, set)| set[word] & bit != 0).map_or(0, |(blocks, _)| blocks)
    }

    fn position(&self, blocks: u32) -> usize {
        let words = self.words as usize;
        let before = self.by_blocks().rev().skip_while(|(other, _)| *other >= blocks).count();
        words + before * (words + 1)
    }

    fn add(&mut self, row: u32, blocks: u32) {
        let (word, bit) = place(row);
        self.widen(word + 1);
        let at = self.position(blocks);
        if self.sets.get(at) != Some(&u64::from(blocks)) {
            let words = self.words as usize;
            let (before, after) = self.sets.split_at(at);
            self.sets = [before, &[u64::from(blocks)], &vec![0; words], after].concat().into();
        }
        self.sets[at + 1 + word] |= bit;
        self.sets[word] |= bit;
    }

    fn remove(&mut self, row: u32, blocks: u32) {
        let (word, bit) = place(row);
        let (at, stride) = (self.position(blocks), self.words as usize + 1);
        self.sets[word] &= !bit;
        self.sets[at + 1 + word] &= !bit;
        if self.sets[at + 1..at + stride].iter().all(|word| *word == 0) {
            self.sets = [&self.sets[..at], &self.sets[at + stride..]].concat().into();
        }
    }

    fn len(&self) -> usize {
        self.all().iter().map(|word| word.count_ones() as usize).sum()
    }

    fn widen(&mut self, words: usize) {
        let old = self.words as usize;
        if words <= old {
            return;
        }
        let extra = words - old;
        let widened = |set: &[u64]| set.iter().copied().chain(std::iter::repeat_n(0, extra)).collect::<Vec<u64>>();
        let mut sets = widened(self.all());
        self.sets[old..].chunks_exact(old + 1).for_each(|group| sets.extend(widened(group)));
        (self.words, self.sets) = (words as u32, sets.into());
    }
}
