//! The prefix index: which worker has cached which block.
//!
//! Blocks are kept in runs (docs/adr/033-index.md). A run is a chain of consecutive blocks. It has a number for each holder, a worker that
//! has cached its first block: how many of its leading blocks the holder has cached. So a lookup visits a few runs instead of all blocks of
//! a prompt, and a change of a shared run writes one number.
//!
//! Lookups run while changes are applied. The runs are spread over shards, each with a lock of its own, and a lookup waits only while the
//! run that it needs is being changed. Changes are serialized by a mutex. No call moves more than some thousand blocks at once: the tables
//! grow in segments, and the blocks of a worker that has left are removed in slices ([`PrefixIndex::sweep`]).
//!
//! A worker's cache is one row. If the cache is cleared or replaced, the worker gets another row at once, and the old row is hidden from
//! lookups until its blocks are removed.
//!
//! Invariants: each block is in exactly one run; a run is in the shard that its first block selects, and is found there by that block; the
//! rows of [`Holders`](run::Holders) have cached exactly the blocks that were stored for them and not removed.

mod changes;
mod followed;
mod lookup;
mod prefetch;
mod removed;
mod run;
mod shard;
mod sweep;
mod table;

use changes::IndexWriter;
use lookup::VisibleRows;
use parking_lot::{Mutex, RwLock};
use removed::RemovedBlocks;
pub(crate) use removed::{OWNER_MAX, RemovedPrefix};
use shard::{Locked, SHARDS};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use tandem_kv::{Change, SequenceHash, Snapshot, StoredChain};

/// A worker's number in the index. Numbers are small: those of removed workers are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerSlot(pub u32);

/// How many blocks of a change the index could not apply, by reason. The rest of the change is applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Blocks that were removed but were not in the index.
    pub absent_blocks: u64,
    /// Blocks that were stored under a parent that the worker has not cached.
    pub orphaned_blocks: u64,
    /// Blocks for which the index has no space.
    pub beyond_index_blocks: u64,
}

impl std::ops::AddAssign for Skipped {
    fn add_assign(&mut self, other: Self) {
        self.absent_blocks += other.absent_blocks;
        self.orphaned_blocks += other.orphaned_blocks;
        self.beyond_index_blocks += other.beyond_index_blocks;
    }
}

/// The most blocks that one change stores or removes before it lets other changes of the index run.
const SLICE_BLOCKS: usize = 1 << 10;

/// Maps sequence hashes to the workers that have cached the blocks.
pub struct PrefixIndex {
    key: IndexKey,
    shards: Box<[Locked]>,
    view: RwLock<VisibleRows>,
    writer: Mutex<IndexWriter>,
    removed: RemovedBlocks,
    /// Whether a marker was ever stored ([`SequenceHash::is_marker`]). If not, lookups search for none.
    has_markers: AtomicBool,
}

/// The seed of the index's tables. Sequence hashes are hashes already, but clients may be able to choose them.
#[derive(Clone, Copy)]
struct IndexKey(u64);

impl IndexKey {
    fn mix(self, value: u64) -> u64 {
        let product = u128::from(value ^ self.0) * 0x9E37_79B9_7F4A_7C15_u128;
        product as u64 ^ (product >> 64) as u64
    }
}

impl PrefixIndex {
    /// Returns an empty index. The key only seeds hash tables; a random key keeps crafted prompts from slowing the index down.
    pub fn new(key: u64) -> Self {
        Self {
            key: IndexKey(tandem_kv::mix(key)),
            shards: (0..SHARDS).map(Locked::new).collect(),
            view: RwLock::default(),
            writer: Mutex::new(IndexWriter::new(key)),
            removed: RemovedBlocks::default(),
            has_markers: AtomicBool::new(false),
        }
    }

    fn mix(&self, hash: SequenceHash) -> u64 {
        self.key.mix(hash.0)
    }

    /// Adds a worker with an empty cache.
    pub fn add_worker(&self) -> WorkerSlot {
        let mut writer = self.writer.lock();
        let row = writer.add_row();
        let worker = writer.add_worker(row);
        self.view.write().show(worker, row);
        worker
    }

    /// Sets the owner number, at most 4,095, that is remembered with the blocks that the worker removes. While it is 0, its first value,
    /// these blocks are not remembered.
    pub fn set_owner(&self, worker: WorkerSlot, owner: u16) {
        if owner > 0 {
            self.removed.allocate();
        }
        self.writer.lock().set_owner(worker, owner);
    }

    /// Sets the present time, in seconds since any fixed time.
    pub(crate) fn set_time(&self, seconds: u64) {
        self.removed.set_time(seconds);
    }

    /// Returns the longest remembered prefix of the prompt that a worker had cached and has removed; `None` if it is not longer than the
    /// first `cached` blocks.
    pub(crate) fn removed(&self, hashes: &[SequenceHash], cached: u32) -> Option<RemovedPrefix> {
        self.removed.prefix(hashes, cached as usize, |hash| self.mix(hash))
    }

    /// Removes the worker. Lookups do not see its blocks any more; [`Self::sweep`] removes them.
    pub fn remove_worker(&self, worker: WorkerSlot) {
        let mut writer = self.writer.lock();
        let Some(row) = writer.remove_worker(worker) else { return };
        self.view.write().hide(row, writer.workers());
        writer.retire(row);
    }

    /// Applies a change of the worker's cache. The change is ignored if the worker was not added.
    pub fn apply(&self, worker: WorkerSlot, change: &Change) -> Skipped {
        let mut skipped = Skipped::default();
        match change {
            Change::Stored(chain) => self.store(|writer| writer.row(worker), chain, &mut skipped),
            Change::Removed(hashes) => {
                for hashes in hashes.chunks(SLICE_BLOCKS) {
                    let mut writer = self.writer.lock();
                    let Some(row) = writer.row(worker) else { break };
                    self.remove(&mut writer, row, hashes, &mut skipped);
                }
            }
            Change::Cleared => {
                self.replacement().complete(worker);
            }
        }
        skipped
    }

    /// Begins to replace the content of a worker's cache. The new content is empty at first.
    pub fn replacement(&self) -> Replacement<'_> {
        Replacement { index: self, row: Some(self.writer.lock().add_row()), skipped: Skipped::default() }
    }

    /// Replaces the worker's blocks in the index by those of the snapshot.
    pub fn replace(&self, worker: WorkerSlot, snapshot: &Snapshot) -> Skipped {
        let mut replacement = self.replacement();
        snapshot.stored.iter().for_each(|chain| replacement.store(chain));
        replacement.complete(worker)
    }

    /// Returns how many blocks the worker has cached, without markers ([`SequenceHash::is_marker`]).
    pub fn blocks(&self, worker: WorkerSlot) -> u64 {
        let writer = self.writer.lock();
        writer.row(worker).map_or(0, |row| writer.blocks(row))
    }

    /// Returns how many blocks the worker has cached, with markers.
    pub fn blocks_and_markers(&self, worker: WorkerSlot) -> u64 {
        let writer = self.writer.lock();
        writer.row(worker).map_or(0, |row| writer.blocks_and_markers(row))
    }

    /// Returns the bytes that the index has allocated. Visits every run.
    pub fn bytes(&self) -> usize {
        let writer = self.writer.lock().bytes();
        let shards: usize = self.shards.iter().map(|shard| shard.read().bytes() + size_of::<Locked>()).sum();
        writer + shards + self.removed.bytes()
    }

    /// Stores the chain in slices. `row` returns the row in which to store the next slice; `None`: the remaining blocks are not stored.
    fn store(&self, row: impl Fn(&IndexWriter) -> Option<u32>, chain: &StoredChain, skipped: &mut Skipped) {
        let (mut parent, mut rest) = (chain.parent, &chain.sequence_hashes[..]);
        while !rest.is_empty() {
            let (piece, later) = rest.split_at(rest.len().min(SLICE_BLOCKS));
            let mut writer = self.writer.lock();
            let Some(row) = row(&writer) else { return };
            let are_markers = parent.is_none_or(SequenceHash::is_marker) && piece.iter().all(|hash| hash.is_marker());
            if are_markers {
                self.has_markers.store(true, Relaxed);
            }
            let before = writer.blocks(row);
            let is_stored = self.store_piece(&mut writer, row, parent, piece, skipped);
            if are_markers {
                writer.count_markers(row, before);
            }
            if !is_stored {
                skipped.orphaned_blocks += rest.len() as u64;
                return;
            }
            (parent, rest) = (piece.last().copied(), later);
        }
    }
}

/// New content for a worker's cache, which lookups do not see until [`Self::complete`]. If it is dropped earlier, [`PrefixIndex::sweep`]
/// removes its blocks.
pub struct Replacement<'a> {
    index: &'a PrefixIndex,
    /// `None` once the replacement is complete.
    row: Option<u32>,
    skipped: Skipped,
}

impl Replacement<'_> {
    /// Adds the blocks of the chain.
    pub fn store(&mut self, chain: &StoredChain) {
        self.index.store(|_| self.row, chain, &mut self.skipped);
    }

    /// Replaces the content of the worker's cache at once. Returns how many blocks could not be stored. [`PrefixIndex::sweep`] removes the
    /// old blocks, or the new ones if the worker was removed.
    pub fn complete(mut self, worker: WorkerSlot) -> Skipped {
        let Self { index, skipped, .. } = self;
        let mut writer = index.writer.lock();
        if let Some(new) = writer.row(worker).and(self.row)
            && let Some(old) = writer.set_row(worker, new)
        {
            let mut view = index.view.write();
            view.show(worker, new);
            view.hide(old, writer.workers());
            writer.retire(old);
            self.row = None;
        }
        skipped
    }
}

impl Drop for Replacement<'_> {
    fn drop(&mut self) {
        if let Some(row) = self.row {
            self.index.writer.lock().retire(row);
        }
    }
}

/// Sequence hashes are hashes already, so the tables use a fast hash function. Its seed keeps clients from choosing the tables' buckets.
pub(crate) type KeyedState = foldhash::fast::FixedState;

#[cfg(test)]
mod tests;
