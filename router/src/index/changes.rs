//! Changes of the index. Only one change runs at a time: the caller holds the lock of [`IndexWriter`].

use super::{
    PrefixIndex, Skipped, WorkerSlot,
    followed::Followed,
    removed::RemovedFrom,
    run::{BlockRun, RUN_BLOCKS, common},
    shard::{BlockPlace, IndexShard, Link, RunId, shard_of},
    table::{ENTRIES_MAX, HashTable},
};
use std::collections::{BTreeSet, VecDeque};
use tandem_kv::SequenceHash;

/// The slots of a block are prefetched this many blocks before they are needed.
const AHEAD: usize = 48;

/// The data that changes need and lookups do not need.
pub(super) struct IndexWriter {
    followed: Followed,
    rows: Vec<Row>,
    row_of: Vec<Option<u32>>,
    free_rows: BTreeSet<u32>,
    /// The rows that are hidden from lookups and whose blocks are to be removed. `sweeping` has runs of the first of these rows, which a
    /// sweep will visit next.
    pub(super) retired: VecDeque<u32>,
    pub(super) sweeping: Vec<u64>,
}

/// The blocks that a row has cached, and the runs in which they are.
#[derive(Default)]
struct Row {
    /// The place in the index of each block that the row's worker has cached ([`BlockPlace::value`]).
    blocks: HashTable,
    /// The runs of which the row has cached leading blocks ([`RunId::value`]).
    runs: HashTable,
    /// How many of the blocks are markers ([`SequenceHash::is_marker`]).
    markers: u64,
    removed_from: RemovedFrom,
}

impl IndexWriter {
    /// Returns a writer for an empty index. `seed` is the seed of hash tables.
    pub(super) fn new(seed: u64) -> Self {
        Self {
            followed: Followed::new(seed),
            rows: Vec::new(),
            row_of: Vec::new(),
            free_rows: BTreeSet::new(),
            retired: VecDeque::new(),
            sweeping: Vec::new(),
        }
    }

    pub(super) fn add_row(&mut self) -> u32 {
        self.free_rows.pop_first().unwrap_or_else(|| {
            self.rows.push(Row::default());
            self.rows.len() as u32 - 1
        })
    }

    /// Adds a worker with this row, in the first free slot.
    pub(super) fn add_worker(&mut self, row: u32) -> WorkerSlot {
        let slot = self.row_of.iter().position(Option::is_none).unwrap_or(self.row_of.len());
        if slot == self.row_of.len() {
            self.row_of.push(None);
        }
        self.row_of[slot] = Some(row);
        WorkerSlot(slot as u32)
    }

    pub(super) fn set_owner(&mut self, worker: WorkerSlot, owner: u16) {
        if let Some(row) = self.row(worker) {
            self.rows[row as usize].removed_from.owner = owner;
        }
    }

    pub(super) fn removed_from(&self, row: u32) -> RemovedFrom {
        self.rows[row as usize].removed_from
    }

    /// Removes the worker and returns its row, which the caller must retire; `None` if there is no such worker.
    pub(super) fn remove_worker(&mut self, worker: WorkerSlot) -> Option<u32> {
        let row = self.row_of.get_mut(worker.0 as usize)?.take();
        if let Some(row) = row {
            self.rows[row as usize].removed_from.lost = true;
        }
        while self.row_of.last() == Some(&None) {
            self.row_of.pop();
        }
        row
    }

    /// Returns one more than the largest slot of a worker.
    pub(super) fn workers(&self) -> usize {
        self.row_of.len()
    }

    pub(super) fn row(&self, worker: WorkerSlot) -> Option<u32> {
        self.row_of.get(worker.0 as usize).copied().flatten()
    }

    /// Gives the worker another row. Returns its earlier row, which the caller must retire.
    pub(super) fn set_row(&mut self, worker: WorkerSlot, row: u32) -> Option<u32> {
        let old = self.row_of[worker.0 as usize].replace(row);
        if let Some(old) = old {
            self.rows[row as usize].removed_from.owner = self.rows[old as usize].removed_from.owner;
            self.rows[old as usize].removed_from.lost = self.blocks(row) == 0;
        }
        old
    }

    /// Returns the number of the row's blocks without markers.
    pub(super) fn blocks(&self, row: u32) -> u64 {
        let Row { blocks, markers, .. } = &self.rows[row as usize];
        blocks.len() as u64 - markers
    }

    pub(super) fn blocks_and_markers(&self, row: u32) -> u64 {
        self.rows[row as usize].blocks.len() as u64
    }

    /// Counts the blocks that the row has now beyond its `before` blocks as markers.
    pub(super) fn count_markers(&mut self, row: u32, before: u64) {
        self.rows[row as usize].markers += self.blocks(row) - before;
    }

    /// Queues the row for the removal of its blocks. No lookup may use the row any more.
    pub(super) fn retire(&mut self, row: u32) {
        self.retired.push_back(row);
    }

    pub(super) fn free(&mut self, row: u32) {
        self.rows[row as usize] = Row::default();
        self.free_rows.insert(row);
        while let Some(last) = self.rows.len().checked_sub(1)
            && self.free_rows.remove(&(last as u32))
        {
            self.rows.pop();
        }
    }

    /// Removes the places of some blocks of a retired row. Returns their number; 0 if no block is left.
    pub(super) fn drop_places(&mut self, row: u32) -> usize {
        self.rows[row as usize].blocks.take_some().len()
    }

    /// Removes some of the row's runs from its list and returns them. The result is empty if the row has no runs.
    pub(super) fn take_runs(&mut self, row: u32) -> Vec<u64> {
        self.rows[row as usize].runs.take_some()
    }

    pub(super) fn bytes(&self) -> usize {
        let rows: usize = self.rows.iter().map(|row| row.runs.bytes() + row.blocks.bytes() + size_of::<Row>()).sum();
        self.followed.bytes() + rows
    }
}

impl PrefixIndex {
    fn hash_at(&self, place: BlockPlace) -> SequenceHash {
        self.shards[place.run.shard()].read().run(place.run).hashes[place.offset]
    }

    pub(super) fn locate(&self, writer: &IndexWriter, row: u32, hash: SequenceHash) -> Option<BlockPlace> {
        let is_it = |value| self.hash_at(BlockPlace::of_value(value)) == hash;
        writer.rows[row as usize].blocks.find(self.mix(hash), is_it).map(BlockPlace::of_value)
    }

    fn run_from(&self, hash: SequenceHash) -> Option<RunId> {
        let mixed = self.mix(hash);
        self.shards[shard_of(mixed)].read().begun_by(mixed, hash)
    }

    /// Sets how many leading blocks of the run the row has cached.
    fn set(&self, writer: &mut IndexWriter, run: &mut BlockRun, id: RunId, row: u32, old: u32, new: u32) {
        if old == new {
            return;
        }
        run.holders.set(row, old, new);
        let (runs, mixed) = (&mut writer.rows[row as usize].runs, self.key.mix(id.value()));
        if old == 0 {
            runs.insert(mixed, id.value(), |other| other == id.value());
        } else if new == 0 {
            runs.remove(mixed, id.value());
        }
    }

    /// Records that the row has cached the blocks `hashes`, which follow `parent`. If the row has not cached the parent, returns false and
    /// stores nothing.
    pub(super) fn store_piece(
        &self,
        writer: &mut IndexWriter,
        row: u32,
        parent: Option<SequenceHash>,
        mut hashes: &[SequenceHash],
        skipped: &mut Skipped,
    ) -> bool {
        // The first slots are read while the searches for the parent and for the run wait for other memory.
        let blocks = &writer.rows[row as usize].blocks;
        hashes.iter().take(4).for_each(|hash| blocks.prefetch(self.mix(*hash)));
        // The place of the next block, if that block belongs to the same run as the block before it.
        let mut next = None;
        if let Some(parent) = parent {
            let Some(BlockPlace { run, offset }) = self.locate(writer, row, parent) else { return false };
            next = Some(BlockPlace { run, offset: offset + 1 });
        }
        if writer.rows[row as usize].blocks.len() + hashes.len() > ENTRIES_MAX {
            skipped.beyond_index_blocks += hashes.len() as u64;
            return true;
        }
        while !hashes.is_empty() {
            let stored = match next.and_then(|place| self.store_known(writer, row, place, hashes)) {
                Some(stored) => Some(stored),
                None => match self.run_from(hashes[0]) {
                    Some(run) => self.store_known(writer, row, BlockPlace { run, offset: 0 }, hashes),
                    None => self.store_new(writer, row, next, hashes),
                },
            };
            let Some((place, stored)) = stored else {
                skipped.beyond_index_blocks += hashes.len() as u64;
                return true;
            };
            hashes = &hashes[stored..];
            next = Some(place);
            if stored == 0 {
                // The row has cached the block after another parent, so the event contradicts an earlier one.
                next = self.locate(writer, row, hashes[0]);
            }
        }
        true
    }

    /// Stores the leading blocks of `hashes` that are also the run's blocks from the given place on. The row must have cached the run's
    /// blocks before that place. Returns the place after the stored blocks, and their number; `None` if the run has another block there or
    /// ends there.
    fn store_known(
        &self,
        writer: &mut IndexWriter,
        row: u32,
        BlockPlace { run: id, offset }: BlockPlace,
        hashes: &[SequenceHash],
    ) -> Option<(BlockPlace, usize)> {
        let (known, held) = {
            let shard = self.shards[id.shard()].read();
            let run = shard.run(id);
            if run.hashes.get(offset) != Some(&hashes[0]) {
                return None;
            }
            (common(&run.hashes[offset..], hashes), run.holders.get(row) as usize)
        };
        if offset + known <= held {
            return Some((BlockPlace { run: id, offset: offset + known }, known));
        }
        // The comparison of hashes locks other shards, so this shard must not be locked meanwhile.
        let new = self.insert_places(writer, row, BlockPlace { run: id, offset: held }, &hashes[held - offset..known]);
        let end = held + new;
        let mut shard = self.shards[id.shard()].write();
        let run = shard.run_mut(id);
        self.set(writer, run, id, row, held as u32, end as u32);
        Some((BlockPlace { run: id, offset: end }, end - offset))
    }

    /// Stores leading blocks of `hashes`, the first of which is not in the index. The stored blocks extend the run that ends at `next` if
    /// the row is the run's only holder. Returns the place after the last stored block, and the number of stored blocks; `None` if the
    /// index is full.
    fn store_new(
        &self,
        writer: &mut IndexWriter,
        row: u32,
        next: Option<BlockPlace>,
        hashes: &[SequenceHash],
    ) -> Option<(BlockPlace, usize)> {
        let (mut extended, mut link) = (None, Link::default());
        if let Some(BlockPlace { run: id, offset }) = next {
            let shard = self.shards[id.shard()].read();
            let run = shard.run(id);
            let before = *shard.link(id);
            link.before = Some(run.hashes[offset - 1]);
            (link.start, link.leader) = (before.start + offset as u32, before.leader(&run.hashes[..offset], offset));
            extended = next.filter(|_| offset == run.len() && offset < RUN_BLOCKS && run.holders.is_only(row));
        }
        let place = match extended {
            Some(place) => place,
            None => BlockPlace { run: self.shards[shard_of(self.mix(hashes[0]))].write().add(BlockRun::new())?, offset: 0 },
        };
        let BlockPlace { run: id, offset } = place;
        let mut hashes = &hashes[..hashes.len().min(RUN_BLOCKS - offset)];
        if writer.followed.any_absent()
            && let Some(at) = hashes.iter().position(|hash| writer.followed.contains(self.mix(*hash), *hash))
        {
            // A run follows this block, so the block after it may be the first of that run.
            hashes = &hashes[..=at];
        }
        let stored = self.insert_places(writer, row, place, hashes);
        let end = offset + stored;
        let mut shard = self.shards[id.shard()].write();
        if stored > 0 {
            let run = shard.run_mut(id);
            run.append(&hashes[..stored]);
            self.set(writer, run, id, row, offset as u32, end as u32);
            if writer.followed.any_absent() && writer.followed.set_absent(self.mix(hashes[stored - 1]), hashes[stored - 1], false)
            {
                shard.link_mut(id).followed = end as u32;
            }
        }
        if extended.is_none() && stored == 0 {
            shard.remove(self.mix(hashes[0]), id);
        } else if extended.is_none() {
            shard.show(self.mix(hashes[0]), id);
            *shard.link_mut(id) = Link { followed: shard.link(id).followed, ..link };
            drop(shard);
            if let (Some(BlockPlace { run: id, offset }), Some(before)) = (next, link.before) {
                writer.followed.add(self.mix(before), before);
                let mut shard = self.shards[id.shard()].write();
                let link = shard.link_mut(id);
                link.followed = link.followed.max(offset as u32);
                let mixed = self.mix(shard.run(id).hashes[0]);
                shard.set_fork(mixed, id, offset);
            }
        }
        Some((BlockPlace { run: id, offset: end }, stored))
    }

    /// Records that the row has cached leading blocks of `hashes`, at `place` and the places after it. Returns their number. It stops
    /// before a block that the row has cached elsewhere.
    fn insert_places(&self, writer: &mut IndexWriter, row: u32, place: BlockPlace, hashes: &[SequenceHash]) -> usize {
        let blocks = &mut writer.rows[row as usize].blocks;
        hashes.iter().take(AHEAD).for_each(|hash| blocks.prefetch(self.mix(*hash)));
        for (at, hash) in hashes.iter().enumerate() {
            if let Some(ahead) = hashes.get(at + AHEAD) {
                blocks.prefetch(self.mix(*ahead));
            }
            let value = BlockPlace { offset: place.offset + at, ..place }.value();
            if !blocks.insert(self.mix(*hash), value, |other| self.is_at(place, hashes, BlockPlace::of_value(other), *hash)) {
                return at;
            }
        }
        hashes.len()
    }

    /// Returns whether the block at `place` has this hash. `hashes`, which are about to be stored from `new` on, are treated as stored.
    fn is_at(&self, new: BlockPlace, hashes: &[SequenceHash], place: BlockPlace, hash: SequenceHash) -> bool {
        if place.run == new.run && place.offset >= new.offset {
            return hashes[place.offset - new.offset] == hash;
        }
        self.hash_at(place) == hash
    }

    /// Moves the blocks of the run from `at` on into a new run, and returns that run; `None` if the index is full.
    fn split(&self, writer: &mut IndexWriter, id: RunId, at: usize) -> Option<RunId> {
        let shard = self.shards[id.shard()].write();
        let link = *shard.link(id);
        let run = shard.run(id);
        let (tail, before) = (run.split_off(at), run.hashes[at - 1]);
        let (start, leader) = (link.start + at as u32, link.leader(&run.hashes, at));
        drop(shard);
        let (hashes, holders) = (tail.hashes.clone(), tail.holders.to_vec());
        let mixed = self.mix(hashes[0]);
        let new = {
            let mut shard = self.shards[shard_of(mixed)].write();
            let new = shard.add(tail)?;
            *shard.link_mut(new) =
                Link { before: Some(before), followed: link.followed.saturating_sub(at as u32), start, leader };
            shard.show(mixed, new);
            new
        };
        let mut shard = self.shards[id.shard()].write();
        shard.run_mut(id).cut(at);
        shard.link_mut(id).followed = at as u32;
        drop(shard);
        writer.followed.add(self.mix(before), before);
        for (row, blocks) in holders {
            let row = &mut writer.rows[row as usize];
            row.runs.insert(self.key.mix(new.value()), new.value(), |_| false);
            for (offset, hash) in hashes[..blocks as usize].iter().enumerate() {
                let (old, new) = (BlockPlace { run: id, offset: at + offset }, BlockPlace { run: new, offset });
                row.blocks.replace(self.mix(*hash), old.value(), new.value());
            }
        }
        Some(new)
    }

    /// Records that the row has not cached these blocks any more. Neighbouring blocks of a run are removed in one operation.
    pub(super) fn remove(&self, writer: &mut IndexWriter, row: u32, mut hashes: &[SequenceHash], skipped: &mut Skipped) {
        let blocks = &writer.rows[row as usize].blocks;
        hashes.iter().take(AHEAD).for_each(|hash| blocks.prefetch(self.mix(*hash)));
        while let Some(first) = hashes.first() {
            let Some(BlockPlace { run: id, offset }) = self.locate(writer, row, *first) else {
                skipped.absent_blocks += 1;
                hashes = &hashes[1..];
                continue;
            };
            let (ascends, start, end, mut kept, are_markers) = {
                let shard = self.shards[id.shard()].read();
                let run = shard.run(id);
                let held = &run.hashes[..run.holders.get(row) as usize];
                let up = held[offset..].iter().zip(hashes).take_while(|(block, hash)| block == hash).count();
                let down = held[..=offset].iter().rev().zip(hashes).take_while(|(block, hash)| block == hash).count();
                let (start, end) = if up > down { (offset, offset + up) } else { (offset + 1 - down, offset + 1) };
                self.removed.prefetch(&held[..end], start, shard.link(id), |hash| self.mix(hash));
                // A run has either markers only or none. One block with the first bits of a marker is probably one; two are for certain.
                let are_markers = run.hashes[offset.saturating_sub(1)..].iter().take(2).all(|hash| hash.is_marker());
                (up > down, start, end, held[end..].to_vec(), are_markers)
            };
            let count = end - start;
            // The row still has the blocks after the removed ones, so these blocks need a run of their own. If there is no space for
            // another run, they are removed, too.
            if !kept.is_empty() && self.split(writer, id, end).is_some() {
                kept.clear();
            }
            let held = end + kept.len();
            if are_markers {
                let markers = &mut writer.rows[row as usize].markers;
                *markers = markers.saturating_sub((count + kept.len()) as u64);
            }
            let blocks = &mut writer.rows[row as usize].blocks;
            for (at, hash) in hashes[..count].iter().enumerate() {
                if let Some(ahead) = hashes.get(at + AHEAD) {
                    blocks.prefetch(self.mix(*ahead));
                }
                let offset = if ascends { offset + at } else { offset - at };
                blocks.remove(self.mix(*hash), BlockPlace { run: id, offset }.value());
            }
            for (at, hash) in kept.iter().enumerate() {
                blocks.remove(self.mix(*hash), BlockPlace { run: id, offset: end + at }.value());
            }
            self.shorten(writer, &mut self.shards[id.shard()].write(), id, row, held as u32, start as u32);
            hashes = &hashes[count..];
        }
    }

    /// Lowers the number of leading blocks of the run that the row has cached. Blocks that no row has cached any more leave the run, and
    /// are remembered. Returns their number.
    pub(super) fn shorten(
        &self,
        writer: &mut IndexWriter,
        shard: &mut IndexShard,
        id: RunId,
        row: u32,
        old: u32,
        new: u32,
    ) -> usize {
        let link = *shard.link(id);
        let Link { before, followed, .. } = link;
        let run = shard.run_mut(id);
        self.set(writer, run, id, row, old, new);
        let (keep, len) = (run.holders.blocks_max(), run.len());
        self.removed.add(&run.hashes, keep, &link, writer.removed_from(row), |hash| self.mix(hash));
        for hash in run.hashes.get(keep..followed as usize).unwrap_or_default() {
            writer.followed.set_absent(self.mix(*hash), *hash, true);
        }
        if keep == 0 {
            let mixed = self.mix(run.hashes[0]);
            shard.remove(mixed, id);
            if let Some(before) = before {
                writer.followed.remove(self.mix(before), before);
            }
        } else if keep < len {
            run.truncate(keep);
            shard.link_mut(id).followed = followed.min(keep as u32);
        }
        len - keep
    }
}

#[cfg(test)]
use {super::followed::Follows, std::collections::BTreeMap};

#[cfg(test)]
impl IndexWriter {
    /// Checks which blocks runs follow, and for each row the numbers of its runs and blocks.
    pub(super) fn check(&self, followed: BTreeMap<SequenceHash, Follows>, rows: &BTreeMap<u32, (usize, u64)>) {
        assert_eq!(self.followed.iter().collect::<BTreeMap<_, _>>(), followed);
        assert_eq!(self.followed.any_absent(), followed.values().any(|follows| follows.absent));
        for (number, row) in self.rows.iter().enumerate() {
            if !self.retired.contains(&(number as u32)) {
                let expected = rows.get(&(number as u32)).copied().unwrap_or_default();
                assert_eq!((row.runs.len(), row.blocks.len() as u64), expected, "row {number}");
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.followed.iter().next().is_none() && self.rows.is_empty() && self.free_rows.is_empty() && self.retired.is_empty()
    }

    pub(super) fn rows(&self) -> usize {
        self.rows.len()
    }
}
