//! Removes, in slices, the blocks of rows that lookups no longer see.

use super::{PrefixIndex, run::RUN_BLOCKS, shard::RunId};

/// Maximum number of runs that one slice visits. A run takes up to a microsecond, without its blocks.
const SLICE_RUNS: usize = 256;
/// A slice ends after this many blocks.
const SLICE_BLOCKS: usize = 4 * RUN_BLOCKS;

impl PrefixIndex {
    /// Removes some of the blocks of workers that were removed, or whose caches were cleared or replaced. Returns whether there are more
    /// such blocks. A call takes less than a millisecond, during which no changes can be applied; lookups are not delayed.
    pub fn sweep(&self) -> bool {
        let mut writer = self.writer.lock();
        let Some(row) = writer.retired.front().copied() else { return false };
        if writer.drop_places(row) > 0 {
            return true;
        }
        let (mut runs, mut blocks) = (0, 0);
        while runs < SLICE_RUNS && blocks < SLICE_BLOCKS {
            runs += 1;
            if writer.sweeping.is_empty() {
                writer.sweeping = writer.take_runs(row);
            }
            let Some(value) = writer.sweeping.pop() else {
                writer.free(row);
                writer.retired.pop_front();
                return !writer.retired.is_empty();
            };
            let id = RunId::of_value(value);
            let mut shard = self.shards[id.shard()].write();
            // Since the run was taken from the list, it may have been removed, and another run may have been given its number.
            let held = shard.get(id).map_or(0, |run| run.holders.get(row));
            if held > 0 {
                blocks += held as usize;
                self.shorten(&mut writer, &mut shard, id, row, held, 0);
            }
        }
        true
    }
}
