//! Finds how many leading blocks of a prompt each worker has cached.

use super::{
    PrefixIndex, WorkerSlot,
    prefetch::prefetch,
    run::{FEW, Holders, place, rows},
    shard::shard_of,
};
use std::sync::atomic::Ordering::Relaxed;
use tandem_kv::{ByTier, SequenceHash, Tier};

/// Maximum number of blocks in which a lookup searches backwards for a reuse point, so that long prompts do not delay others. Earlier reuse
/// points are ignored.
const REUSE_SEARCH_BLOCKS: u32 = 1 << 12;

/// The rows that lookups see.
#[derive(Default)]
pub(super) struct VisibleRows {
    pub(super) visible: Vec<Visible>,
    /// The worker of each visible row.
    worker_of: Vec<WorkerSlot>,
    /// One more than the largest worker slot.
    workers: usize,
}

/// One word of the set of visible rows.
#[derive(Clone, Copy, Default)]
pub(super) struct Visible {
    rows: u64,
    /// Whether each row of this word has the number of its worker's slot, so that a lookup need not read `worker_of`.
    in_order: bool,
}

impl VisibleRows {
    pub(super) fn show(&mut self, worker: WorkerSlot, row: u32) {
        let (word, bit) = place(row);
        if row as usize >= self.worker_of.len() {
            self.worker_of.resize(row as usize + 1, worker);
        }
        self.visible.resize(self.visible.len().max(word + 1), Visible::default());
        self.worker_of[row as usize] = worker;
        self.workers = self.workers.max(worker.0 as usize + 1);
        self.set(word, self.visible[word].rows | bit);
    }

    /// `workers` is one more than the largest slot of the remaining workers.
    pub(super) fn hide(&mut self, row: u32, workers: usize) {
        self.workers = workers;
        let (word, bit) = place(row);
        self.set(word, self.visible[word].rows & !bit);
        while self.visible.last().is_some_and(|word| word.rows == 0) {
            self.visible.pop();
        }
        self.worker_of.truncate(self.visible.len() * 64);
    }

    fn set(&mut self, word: usize, set: u64) {
        let in_order = rows(word, set).all(|row| self.worker_of[row as usize].0 == row);
        self.visible[word] = Visible { rows: set, in_order };
    }

    fn is_visible(&self, row: u32) -> bool {
        let (word, bit) = place(row);
        self.visible.get(word).is_some_and(|word| word.rows & bit != 0)
    }

    /// Returns the visible rows of the holders.
    fn rows_of(&self, holders: &Holders) -> Vec<u32> {
        holders.to_vec().into_iter().map(|(row, _)| row).filter(|row| self.is_visible(*row)).collect()
    }

    /// Returns the slot of the worker that has this row.
    #[inline]
    fn slot(&self, row: u32) -> usize {
        if self.visible[row as usize / 64].in_order { row as usize } else { self.worker_of[row as usize].0 as usize }
    }

    /// Sets the number of leading blocks to `blocks` for each worker whose row is in `set`, the word with the index `word` of a set of
    /// rows. These numbers must be 0 before.
    #[inline]
    fn fill(&self, leading: &mut [u32], word: usize, set: u64, blocks: usize) {
        /// The bit of each row in half a word. With constants, the compiler sets several workers' numbers in one instruction.
        const BITS: [u32; 32] = {
            let (mut bits, mut row) = ([0; 32], 0);
            while row < 32 {
                bits[row] = 1 << row;
                row += 1;
            }
            bits
        };
        if set == 0 || blocks == 0 {
            return;
        }
        if set.is_power_of_two() || !self.visible[word].in_order {
            rows(word, set).for_each(|row| leading[self.slot(row)] = blocks as u32);
            return;
        }
        let (low, high) = leading[word * 64..word * 64 + 64].split_at_mut(32);
        for (half, set) in [(low, set as u32), (high, (set >> 32) as u32)] {
            for (leading, bit) in half.iter_mut().zip(BITS) {
                *leading |= if set & bit == 0 { 0 } else { blocks as u32 };
            }
        }
    }
}

/// The state of a lookup that has visited some of the runs along the prompt.
struct LookupState<'a> {
    view: &'a VisibleRows,
    /// The number of leading blocks by worker slot. The list has an entry for each row of `view`, even if there are fewer workers.
    leading: Vec<u32>,
    /// The set of rows that have cached all blocks of the visited runs. It is in `many_words` if there are more than 1,024 rows.
    few_words: [u64; 16],
    many_words: Vec<u64>,
    /// After a run with few holders was visited, this list replaces the set, which is then empty.
    list: Option<([u32; FEW], usize)>,
}

impl<'a> LookupState<'a> {
    #[expect(clippy::slow_vector_initialization, reason = "the C library's calloc has no cache of freed memory for each thread")]
    fn new(view: &'a VisibleRows) -> Self {
        let words = view.visible.len();
        let mut leading = Vec::with_capacity(view.workers.max(words * 64));
        leading.resize(leading.capacity(), 0);
        let mut answer = Self { view, leading, few_words: [0; 16], many_words: Vec::new(), list: None };
        if words > answer.few_words.len() {
            answer.many_words.resize(words, 0);
        }
        let (active, ..) = answer.parts();
        active.iter_mut().zip(&view.visible).for_each(|(active, visible)| *active = visible.rows);
        answer
    }

    fn parts(&mut self) -> (&mut [u64], &mut [u32]) {
        let words = self.view.visible.len();
        let active = if self.many_words.is_empty() { &mut self.few_words[..words] } else { &mut self.many_words[..] };
        (active, &mut self.leading)
    }

    /// Visits the next run. Its first `common` blocks are the prompt's blocks after the first `from`. Returns whether some row has cached
    /// all of the prompt's blocks in the visited runs.
    #[inline]
    fn visit(&mut self, holders: &Holders, from: usize, common: usize) -> bool {
        let view = self.view;
        if self.list.is_none() {
            let (active, leading) = self.parts();
            match holders {
                Holders::Many(groups) => {
                    for (word, active) in active.iter_mut().enumerate() {
                        let keep = *active & groups.all().get(word).copied().unwrap_or(0);
                        view.fill(leading, word, *active & !keep, from);
                        *active = keep;
                    }
                    for (blocks, set) in groups.by_blocks().take_while(|(blocks, _)| (*blocks as usize) < common) {
                        for (word, (active, set)) in active.iter_mut().zip(set).enumerate() {
                            view.fill(leading, word, *active & set, from + blocks as usize);
                            *active &= !set;
                        }
                    }
                    return active.iter().any(|word| *word != 0);
                }
                Holders::Few(few) => {
                    let (mut list, mut len) = ([0; FEW], 0);
                    for (row, _) in few.entries() {
                        let (word, bit) = place(row);
                        list[len] = row;
                        len += usize::from(active.get(word).is_some_and(|active| active & bit != 0));
                    }
                    for (word, active) in active.iter_mut().enumerate() {
                        view.fill(leading, word, std::mem::take(active), from);
                    }
                    self.list = Some((list, len));
                }
            }
        }
        let Some((list, len)) = &mut self.list else { return false };
        let mut kept = 0;
        for at in 0..*len {
            let row = list[at];
            let held = (holders.get(row) as usize).min(common);
            self.leading[view.slot(row)] = (from + held) as u32;
            list[kept] = row;
            kept += usize::from(held == common);
        }
        *len = kept;
        kept > 0
    }

    /// Returns the number of leading blocks of each worker. `end` is the number of the prompt's blocks in the visited runs.
    fn finish(mut self, end: usize) -> Vec<u32> {
        let view = self.view;
        let (active, leading) = self.parts();
        active.iter().enumerate().for_each(|(word, rows)| view.fill(leading, word, *rows, end));
        self.leading.truncate(view.workers);
        self.leading
    }
}

impl PrefixIndex {
    /// Returns for each worker, by its slot, how many leading blocks of the prompt it has cached and can reuse: up to its last reuse point,
    /// if the worker has reported [`SequenceHash::REUSE_POINTS`].
    ///
    /// If a worker's cache changes during the call, the returned number was right at some time during the call.
    pub fn overlap(&self, hashes: &[SequenceHash]) -> Vec<u32> {
        self.lookup(hashes).0
    }

    /// Returns the result of [`Self::overlap`], and for each worker how many leading blocks it has cached, whether it can reuse them or
    /// not. The second list is empty if these numbers are equal.
    pub(crate) fn lookup(&self, hashes: &[SequenceHash]) -> (Vec<u32>, Vec<u32>) {
        if let Some(first) = hashes.first() {
            prefetch(&self.shards, shard_of(self.mix(*first)));
        }
        let view = self.view.read();
        let mut answer = LookupState::new(&view);
        let end = self.walk(hashes, |holders, from, common| answer.visit(holders, from, common));
        let mut leading = answer.finish(end);
        let held = self.limit_to_reuse_points(hashes, &view, &mut leading);
        (leading, held)
    }

    /// Returns for each worker, by its slot, how many leading blocks of the prompt are in the chain of each tier ([`Tier::note`]); `None` if the worker
    /// does not report the chain. Workers beyond the end of the list report none.
    pub fn tier_chains(&self, hashes: &[SequenceHash]) -> Vec<ByTier<Option<u32>>> {
        let view = self.view.read();
        let mut chains = Vec::new();
        for tier in Tier::ALL {
            let Some(rows) = self.with_holders(tier.note(), |holders| view.rows_of(holders)) else { continue };
            let chain: Vec<_> = hashes.iter().map(|hash| hash.in_tier(tier)).collect();
            let mut answer = LookupState::new(&view);
            let end = self.walk(&chain, |holders, from, common| answer.visit(holders, from, common));
            let leading = answer.finish(end);
            chains.resize(view.workers, [None; 4]);
            for slot in rows.into_iter().map(|row| view.slot(row)) {
                chains[slot][tier.index()] = Some(leading[slot]);
            }
        }
        chains
    }

    /// Whether the worker has reported this marker.
    pub fn has_first(&self, worker: WorkerSlot, block: SequenceHash) -> bool {
        let view = self.view.read();
        let holds = |holders: &Holders| {
            holders.to_vec().into_iter().any(|(row, _)| view.is_visible(row) && view.slot(row) == worker.0 as usize)
        };
        self.with_holders(block, holds).unwrap_or(false)
    }

    /// A worker with a hybrid model can reuse a prefix only up to a reuse point. Lowers `leading` for each such worker to the last reuse
    /// point in its prefix, or to 0 if the last `REUSE_SEARCH_BLOCKS` blocks have none. Returns `leading` as it was; empty if no worker has
    /// a hybrid model.
    fn limit_to_reuse_points(&self, hashes: &[SequenceHash], view: &VisibleRows, leading: &mut [u32]) -> Vec<u32> {
        let hybrid = self.with_holders(SequenceHash::REUSE_POINTS, |holders| view.rows_of(holders));
        let Some(mut open) = hybrid else { return Vec::new() };
        let held = leading.to_vec();
        let mut blocks = open.iter().map(|row| leading[view.slot(*row)]).max().unwrap_or(0);
        let end = blocks.saturating_sub(REUSE_SEARCH_BLOCKS);
        while blocks > end && !open.is_empty() {
            let settle = |holders: &Holders| {
                open.retain(|row| {
                    let leading = &mut leading[view.slot(*row)];
                    let is_last = *leading >= blocks && holders.get(*row) > 0;
                    *leading = if is_last { blocks } else { *leading };
                    !is_last
                });
            };
            self.with_holders(hashes[blocks as usize - 1].reuse_point(), settle);
            blocks -= 1;
        }
        open.iter().for_each(|row| leading[view.slot(*row)] = 0);
        held
    }

    /// Calls `read` with the holders of a marker; returns `None` if the index does not have it.
    fn with_holders<T>(&self, block: SequenceHash, read: impl FnOnce(&Holders) -> T) -> Option<T> {
        if !self.has_markers.load(Relaxed) {
            return None;
        }
        let mixed = self.mix(block);
        // `read_recursive`, because this thread may already hold the read lock of the same shard.
        let shard = self.shards[shard_of(mixed)].read_recursive();
        let run = shard.run(shard.begun_by(mixed, block)?);
        Some(read(&run.holders))
    }

    /// Calls `visit` for each run along the prompt, with the run's holders, the number of the prompt's blocks before the run, and the
    /// number of the prompt's blocks in the run. Stops when `visit` returns false. Returns the number of the prompt's blocks in the visited
    /// runs.
    fn walk(&self, hashes: &[SequenceHash], mut visit: impl FnMut(&Holders, usize, usize) -> bool) -> usize {
        let mut from = 0;
        let shard_from = |from: usize| {
            let mixed = self.mix(*hashes.get(from)?);
            // `read_recursive`, because this thread may already hold the read lock of the same shard.
            let shard = self.shards[shard_of(mixed)].read_recursive();
            shard.prefetch(mixed);
            Some((mixed, shard))
        };
        let mut next = shard_from(0);
        while let Some((mixed, shard)) = next.take() {
            // `fork` predicts where the next run begins, before this run is read. So the processor reads both runs from memory at the same
            // time.
            let mut guess = 0;
            let found = shard.find(mixed, &hashes[from..], |fork| {
                guess = fork;
                next = if fork > 0 { shard_from(from + fork) } else { None };
            });
            let Some((run, common)) = found else { break };
            if common != guess {
                next = shard_from(from + common);
            }
            let more = visit(&run.holders, from, common);
            from += common;
            if !more {
                break;
            }
        }
        from
    }
}
