//! A shard of the index: the runs whose first blocks select it.

use super::{run::Run, table::Table};
use tandem_kv::SequenceHash;

/// The number of shards. It is so large that a lookup and a change rarely need the same shard, and that a shard's list of runs stays short.
pub(super) const SHARDS: usize = 1 << SHARD_BITS;
const SHARD_BITS: u32 = 6;
const RUN_BITS: u32 = 26;
const OFFSET_BITS: u32 = 10;
const SHARD_RUNS_MAX: usize = (1 << (RUN_BITS - SHARD_BITS)) - 1;

/// A block's run and its position in the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
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

    /// Returns the number in the form in which a table stores it, which is never 0.
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

impl Place {
    /// Returns the place in the form in which a table stores it, which is never 0.
    pub(super) fn value(self) -> u64 {
        self.run.value() << OFFSET_BITS | self.offset as u64
    }

    pub(super) fn of_value(value: u64) -> Self {
        let offset = value as usize & ((1 << OFFSET_BITS) - 1);
        Self { run: RunId::of_value(value >> OFFSET_BITS), offset }
    }
}

pub(super) fn shard_of(mixed: u64) -> usize {
    mixed as usize % SHARDS
}

/// What changes need to know of a run's neighbours, and lookups do not.
#[derive(Clone, Copy, Default)]
pub(super) struct Link {
    /// The block before the run's first block; `None` if prompts begin with the run.
    pub(super) before: Option<SequenceHash>,
    /// The runs that follow blocks of this run follow blocks before this offset.
    pub(super) followed: usize,
}

/// A part of the runs of the index. Lookups see only the runs that are in `heads`.
pub(super) struct Shard {
    /// The position of each run in `runs`, plus 1, by the run's first block.
    heads: Table,
    runs: Vec<Run>,
    /// The link of each run.
    links: Vec<Link>,
    free: Vec<u32>,
    number: usize,
}

impl Shard {
    pub(super) fn new(number: usize) -> Self {
        Self { heads: Table::default(), runs: Vec::new(), links: Vec::new(), free: Vec::new(), number }
    }

    /// Prefetches the memory that [`Self::find`] reads first.
    #[inline]
    pub(super) fn prefetch(&self, mixed: u64) {
        self.heads.prefetch(mixed);
    }

    /// Returns the run that begins with the first of `hashes`, and how many of `hashes` are leading blocks of it.
    #[inline]
    pub(super) fn find(&self, mixed: u64, hashes: &[SequenceHash]) -> Option<(&Run, usize)> {
        let run = |at: u64| &self.runs[at as usize - 1];
        let found = run(self.heads.find(mixed, |_| true)?);
        found.holders.prefetch();
        match found.common(hashes) {
            // The found run begins with another block whose hash has the same fingerprint.
            0 => {
                let found = run(self.heads.find(mixed, |at| run(at).hashes[0] == hashes[0])?);
                Some((found, found.common(hashes)))
            }
            common => Some((found, common)),
        }
    }

    /// Returns the run that begins with this block.
    pub(super) fn begun_by(&self, mixed: u64, first: SequenceHash) -> Option<RunId> {
        let at = self.heads.find(mixed, |at| self.runs[at as usize - 1].hashes[0] == first)?;
        Some(RunId::new(at as usize - 1, self.number))
    }

    pub(super) fn get(&self, id: RunId) -> Option<&Run> {
        self.runs.get(id.at())
    }

    pub(super) fn run(&self, id: RunId) -> &Run {
        &self.runs[id.at()]
    }

    pub(super) fn run_mut(&mut self, id: RunId) -> &mut Run {
        &mut self.runs[id.at()]
    }

    pub(super) fn link_mut(&mut self, id: RunId) -> &mut Link {
        &mut self.links[id.at()]
    }

    pub(super) fn bytes(&self) -> usize {
        let runs: usize = self.runs.iter().map(Run::bytes).sum();
        let runs = runs + self.runs.capacity() * size_of::<Run>() + self.links.capacity() * size_of::<Link>();
        self.heads.bytes() + self.free.capacity() * 4 + runs
    }

    /// Adds a run that lookups do not see yet. Returns `None` if the shard is full.
    pub(super) fn add(&mut self, run: Run) -> Option<RunId> {
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
        self.heads.insert(mixed, id.at() as u64 + 1, |_| false);
    }

    /// Removes an empty run. `mixed` is the mixed hash of the block that was the run's first.
    pub(super) fn remove(&mut self, mixed: u64, id: RunId) {
        self.heads.remove(mixed, id.at() as u64 + 1);
        (self.runs[id.at()], self.links[id.at()]) = (Run::new(), Link::default());
        self.free.push(id.at() as u32);
        if self.free.len() == self.runs.len() {
            (self.runs, self.links, self.free) = (Vec::new(), Vec::new(), Vec::new());
        }
    }

    #[cfg(test)]
    pub(super) fn runs(&self) -> impl Iterator<Item = (RunId, &Run, &Link)> {
        let runs = self.runs.iter().zip(&self.links).enumerate();
        runs.filter(|(_, (run, _))| run.len() > 0).map(|(at, (run, link))| (RunId::new(at, self.number), run, link))
    }
}
