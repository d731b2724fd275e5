//! A shard of the index: the runs whose first blocks select it.

use super::{
    prefetch::prefetch,
    run::{BlockRun, first_of_group},
    table::HashTable,
};
use parking_lot::RwLock;
use tandem_kv::SequenceHash;

/// The number of shards: enough that a lookup and a change rarely need the same shard, and that a shard's list of runs stays short.
pub(super) const SHARDS: usize = 1 << SHARD_BITS;
const SHARD_BITS: u32 = 6;
const RUN_BITS: u32 = 26;
const OFFSET_BITS: u32 = 10;
/// The number of bits for a run's position in its shard. The position is stored plus 1, so that it is never 0.
const AT_BITS: u32 = RUN_BITS - SHARD_BITS;
const SHARD_RUNS_MAX: usize = (1 << AT_BITS) - 1;

/// A block's run and its position in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockPlace {
    pub(super) run: RunId,
    pub(super) offset: usize,
}

/// A run's number. Its last bits are the number of its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunId(u32);

impl RunId {
    fn new(at: usize, shard: usize) -> Self {
        Self((at << SHARD_BITS | shard) as u32)
    }

    /// Returns the value that stands for this run in a table, which is never 0.
    pub(super) fn value(self) -> u64 {
        u64::from(self.0) + 1
    }

    pub(super) fn of_value(value: u64) -> Self {
        Self(value as u32 - 1)
    }

    pub(super) fn shard(self) -> usize {
        self.0 as usize % SHARDS
    }

    fn at(self) -> usize {
        self.0 as usize >> SHARD_BITS
    }
}

impl BlockPlace {
    /// Returns the value that stands for this place in a table, which is never 0.
    pub(super) fn value(self) -> u64 {
        self.run.value() << OFFSET_BITS | self.offset as u64
    }

    pub(super) fn of_value(value: u64) -> Self {
        let offset = value as usize & ((1 << OFFSET_BITS) - 1);
        Self { run: RunId::of_value(value >> OFFSET_BITS), offset }
    }
}

/// Returns the position of the run with this value in `heads`.
fn at_of(head: u64) -> usize {
    (head as usize & ((1 << AT_BITS) - 1)) - 1
}

pub(super) fn shard_of(mixed: u64) -> usize {
    mixed as usize % SHARDS
}

/// The neighbours of a run. Only changes of the index read them, never lookups.
#[derive(Clone, Copy)]
pub(super) struct Link {
    /// The block before the run's first block; `None` if prompts begin with the run.
    pub(super) before: Option<SequenceHash>,
    /// No other run follows a block of this run at this offset or after it.
    pub(super) followed: u32,
    /// The position of the run's first block in its prompts.
    pub(super) start: u32,
    /// The first block of the group ([`GROUP`](super::run::GROUP)) that continues in this run; only if the run begins within a group.
    pub(super) leader: SequenceHash,
}

impl Default for Link {
    fn default() -> Self {
        Self { before: None, followed: 0, start: 0, leader: SequenceHash(0) }
    }
}

impl Link {
    /// Returns the first block of the group with the run's block at this offset, or with the block after the run's end.
    pub(super) fn leader(&self, run: &[SequenceHash], offset: usize) -> SequenceHash {
        first_of_group(self.start as usize + offset)
            .checked_sub(self.start as usize)
            .and_then(|at| run.get(at))
            .copied()
            .unwrap_or(self.leader)
    }
}

/// A shard and its lock. The fields that a lookup reads are in one line of the processor's cache.
#[repr(align(64))]
pub(super) struct Locked(RwLock<IndexShard>);

impl std::ops::Deref for Locked {
    type Target = RwLock<IndexShard>;

    fn deref(&self) -> &RwLock<IndexShard> {
        &self.0
    }
}

/// The runs of one shard. Lookups see only the runs that are in `heads`.
#[repr(C)]
pub(super) struct IndexShard {
    runs: Vec<BlockRun>,
    /// Maps the first block of each run to the run's position in `runs`, plus 1, in the last bits, and its [`BlockRun::fork`] in the bits
    /// before.
    heads: HashTable,
    links: Vec<Link>,
    free: Vec<u32>,
    number: usize,
}

impl Locked {
    pub(super) fn new(number: usize) -> Self {
        let (runs, links, free) = (Vec::new(), Vec::new(), Vec::new());
        Self(RwLock::new(IndexShard { runs, heads: HashTable::default(), links, free, number }))
    }
}

impl IndexShard {
    /// Prefetches the memory that [`Self::find`] reads first.
    #[inline]
    pub(super) fn prefetch(&self, mixed: u64) {
        self.heads.prefetch(mixed);
    }

    /// Returns the run that begins with the first of `hashes`, and how many of `hashes` are leading blocks of it. Calls `found` with the
    /// run's [`BlockRun::fork`] before it reads the run.
    #[inline]
    pub(super) fn find(&self, mixed: u64, hashes: &[SequenceHash], found: impl FnOnce(usize)) -> Option<(&BlockRun, usize)> {
        let head = self.heads.find(mixed, |_| true)?;
        prefetch(&self.runs, at_of(head));
        found((head >> AT_BITS) as usize);
        let run = &self.runs[at_of(head)];
        run.holders.prefetch();
        match run.common(hashes) {
            // The found run begins with another block, whose hash has the same fingerprint. The search is repeated with a comparison of
            // hashes.
            0 => {
                let run = self.run(self.begun_by(mixed, hashes[0])?);
                Some((run, run.common(hashes)))
            }
            common => Some((run, common)),
        }
    }

    /// Returns the run that begins with this block.
    pub(super) fn begun_by(&self, mixed: u64, first: SequenceHash) -> Option<RunId> {
        let head = self.heads.find(mixed, |head| self.runs[at_of(head)].hashes[0] == first)?;
        Some(RunId::new(at_of(head), self.number))
    }

    /// Returns the run's value in `heads`.
    fn head(&self, id: RunId) -> u64 {
        u64::from(self.run(id).fork) << AT_BITS | (id.at() as u64 + 1)
    }

    /// Sets the run's [`BlockRun::fork`]. `mixed` is the mixed hash of its first block.
    pub(super) fn set_fork(&mut self, mixed: u64, id: RunId, fork: usize) {
        let before = self.head(id);
        self.run_mut(id).fork = fork as u32;
        self.heads.replace(mixed, before, self.head(id));
    }

    pub(super) fn get(&self, id: RunId) -> Option<&BlockRun> {
        self.runs.get(id.at())
    }

    pub(super) fn run(&self, id: RunId) -> &BlockRun {
        &self.runs[id.at()]
    }

    pub(super) fn run_mut(&mut self, id: RunId) -> &mut BlockRun {
        &mut self.runs[id.at()]
    }

    pub(super) fn link(&self, id: RunId) -> &Link {
        &self.links[id.at()]
    }

    pub(super) fn link_mut(&mut self, id: RunId) -> &mut Link {
        &mut self.links[id.at()]
    }

    pub(super) fn bytes(&self) -> usize {
        let runs: usize = self.runs.iter().map(BlockRun::bytes).sum();
        let runs = runs + self.runs.capacity() * size_of::<BlockRun>() + self.links.capacity() * size_of::<Link>();
        self.heads.bytes() + self.free.capacity() * 4 + runs
    }

    /// Adds a run that lookups do not see yet. Returns `None` if the shard is full.
    pub(super) fn add(&mut self, run: BlockRun) -> Option<RunId> {
        let at = match self.free.pop() {
            Some(at) => {
                self.runs[at as usize] = run;
                at as usize
            }
            None if self.runs.len() == SHARD_RUNS_MAX => return None,
            None => {
                self.runs.push(run);
                self.links.push(Link::default());
                self.runs.len() - 1
            }
        };
        Some(RunId::new(at, self.number))
    }

    /// Makes the run visible to lookups. `mixed` is the mixed hash of its first block.
    pub(super) fn show(&mut self, mixed: u64, id: RunId) {
        self.heads.insert(mixed, self.head(id), |_| false);
    }

    /// Removes an empty run. `mixed` is the mixed hash of the block that was the run's first.
    pub(super) fn remove(&mut self, mixed: u64, id: RunId) {
        self.heads.remove(mixed, self.head(id));
        (self.runs[id.at()], self.links[id.at()]) = (BlockRun::new(), Link::default());
        self.free.push(id.at() as u32);
        if self.free.len() == self.runs.len() {
            (self.runs, self.links, self.free) = (Vec::new(), Vec::new(), Vec::new());
        }
    }

    #[cfg(test)]
    pub(super) fn runs(&self) -> impl Iterator<Item = (RunId, &BlockRun, &Link)> {
        let runs = self.runs.iter().zip(&self.links).enumerate();
        runs.filter(|(_, (run, _))| run.len() > 0).map(|(at, (run, link))| (RunId::new(at, self.number), run, link))
    }
}
