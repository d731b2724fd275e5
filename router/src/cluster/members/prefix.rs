//! Remembers blocks that no member has cached: those that a worker removed, and those of prompts that were computed just now.

use super::ClusterMembers;
use crate::index::OWNER_MAX;
use tandem_kv::SequenceHash;
use tandem_proto::v1;
use tokio::time::Instant;

/// The names of the workers that may have removed blocks, by their owner numbers in the index, from 1. Further workers share the number
/// [`OWNER_MAX`], which has no name.
pub(super) struct RemovedBy {
    names: Vec<String>,
    began: Instant,
}

impl Default for RemovedBy {
    fn default() -> Self {
        Self { names: Vec::new(), began: Instant::now() }
    }
}

impl RemovedBy {
    /// Returns the owner number of the worker with this name.
    pub(super) fn number(&mut self, worker_id: &str) -> u16 {
        let at = self.names.iter().position(|name| name == worker_id).unwrap_or_else(|| {
            if self.names.len() + 1 < OWNER_MAX.into() {
                self.names.push(worker_id.to_owned());
                return self.names.len() - 1;
            }
            self.names.len()
        });
        at as u16 + 1
    }

    fn name(&self, number: u16) -> String {
        usize::from(number).checked_sub(1).and_then(|at| self.names.get(at)).cloned().unwrap_or_default()
    }
}

impl ClusterMembers {
    /// Returns this time for the index, in seconds.
    pub(super) fn seconds(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.removed.began).as_secs()
    }

    /// Returns the largest number of leading blocks that the prompt has in common with prompts that were computed just before `now`.
    pub(in crate::cluster) fn just_computed(&self, hashes: &[SequenceHash], now: Instant) -> u32 {
        self.just_computed.longest(hashes, now) as u32
    }

    /// Returns the longest remembered prefix of the prompt that workers have removed; `None` if it is not longer than the first `cached`
    /// blocks.
    pub(in crate::cluster) fn removed(&self, hashes: &[SequenceHash], cached: u32, now: Instant) -> Option<v1::KnownPrefix> {
        self.index.set_time(self.seconds(now));
        let removed = self.index.removed(hashes, cached)?;
        Some(v1::KnownPrefix {
            worker_id: self.removed.name(removed.owner),
            blocks: removed.blocks,
            removed_s: Some(removed.age_s),
            lost: removed.lost,
            ..Default::default()
        })
    }
}
