//! KV that comes from elsewhere: written between steps, or by somebody else while steps run.
//!
//! A write beside the steps cannot be taken back once it has begun. Its blocks stay in use until it has ended, whatever became of the
//! reservation; and as it reads from memory that its owner may have given to others meanwhile, nothing of it is used or cached before
//! the owner has confirmed that it had not.

use super::{
    Machine,
    sequence::{Remote, Role, Sequence},
};
use crate::WriteRefused;
use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};
use tandem_kv::{BlockId, PrefixCache};

/// Blocks that are written although their reservation is gone, by ticket and index.
#[derive(Debug, Default)]
pub(super) struct Arriving(BTreeMap<(u64, u32), BlockId>);

impl Arriving {
    /// Gives a reservation's blocks back, but for those that are being written.
    pub fn keep(&mut self, cache: &mut PrefixCache, sequence: &mut Sequence) {
        let Remote { ticket, arriving, .. } = remote(sequence);
        let (ticket, indices) = (*ticket, BTreeSet::from_iter(std::mem::take(arriving)));
        let blocks = std::mem::take(&mut sequence.blocks);
        for (index, block) in (0..).zip(blocks) {
            if indices.contains(&index) {
                self.0.insert((ticket, index), block);
            } else {
                sequence.blocks.push(block);
            }
        }
        release(cache, sequence);
    }

    #[cfg(test)]
    pub fn blocks(&self) -> impl Iterator<Item = &BlockId> {
        self.0.values()
    }
}

impl Machine {
    /// Where a block that comes from elsewhere is to be written; it counts as landed from now on.
    pub fn write(&mut self, ticket: u64, index: u32, len_bytes: usize, now: Duration) -> Result<BlockId, WriteRefused> {
        if len_bytes != self.info.block_bytes {
            return Err(WriteRefused);
        }
        let sequence = self.reservation(ticket).ok_or(WriteRefused)?;
        let remote = remote(sequence);
        let missing = remote.missing.iter().position(|missing| *missing == index).ok_or(WriteRefused)?;
        remote.missing.swap_remove(missing);
        remote.first_write.get_or_insert(now);
        remote.bytes += len_bytes as u64;
        Ok(sequence.blocks[index as usize])
    }

    /// Where blocks are to be written beside the steps: all of them, or none if one of them is not missing. Must be followed by
    /// [`Machine::end_arrival`].
    pub fn begin_arrival(&mut self, ticket: u64, indices: &[u32], now: Duration) -> Result<Vec<BlockId>, WriteRefused> {
        let sequence = self.reservation(ticket).ok_or(WriteRefused)?;
        let remote = remote(sequence);
        let wanted: BTreeSet<u32> = indices.iter().copied().collect();
        let missing = remote.missing.iter().filter(|index| wanted.contains(index)).count();
        if wanted.len() != indices.len() || missing != indices.len() {
            return Err(WriteRefused);
        }
        remote.missing.retain(|index| !wanted.contains(index));
        remote.arriving.extend(indices);
        remote.unconfirmed = true;
        remote.first_write.get_or_insert(now);
        Ok(indices.iter().map(|index| sequence.blocks[*index as usize]).collect())
    }

    /// Nobody writes these blocks any more; `whole`: all of them are there.
    pub fn end_arrival(&mut self, ticket: u64, indices: &[u32], whole: bool) {
        for index in indices {
            if let Some(block) = self.arriving.0.remove(&(ticket, *index)) {
                self.cache.release(block);
            }
        }
        let block_bytes = self.info.block_bytes as u64;
        let Some(sequence) = self.reservation(ticket) else { return };
        let remote = remote(sequence);
        let ended: BTreeSet<u32> = indices.iter().copied().collect();
        remote.arriving.retain(|index| !ended.contains(index));
        if whole {
            remote.bytes += block_bytes * indices.len() as u64;
        } else {
            remote.missing.extend(indices);
        }
    }

    /// What was written beside the steps was what it should be. Changes nothing while blocks are missing.
    pub fn confirm(&mut self, ticket: u64, now: Duration) {
        let Some(sequence) = self.reservation(ticket) else { return };
        let remote = remote(sequence);
        if remote.unconfirmed && remote.missing.is_empty() && remote.arriving.is_empty() {
            remote.unconfirmed = false;
            self.landed(ticket, now);
        }
    }

    /// What was to be written under the ticket so far is in its place: full blocks with none missing before them are offered to
    /// the cache, and the prompt starts after its last one.
    pub fn landed(&mut self, ticket: u64, now: Duration) {
        let Some(place) = self.reserved.iter_mut().position(|sequence| remote(sequence).ticket == ticket) else { return };
        if remote(&mut self.reserved[place]).unconfirmed {
            return;
        }
        let mut sequence = self.reserved.remove(place);
        let next = remote(&mut sequence).missing.iter().min().copied();
        sequence.computed = next.map_or(sequence.target(), |next| (next * self.info.block_size) as usize);
        self.commit(&mut sequence);
        match next {
            Some(_) => self.reserved.insert(place, sequence),
            None => self.fork(sequence, now),
        }
    }

    fn reservation(&mut self, ticket: u64) -> Option<&mut Sequence> {
        let place = self.reserved.iter_mut().position(|sequence| remote(sequence).ticket == ticket)?;
        Some(&mut self.reserved[place])
    }
}

fn remote(sequence: &mut Sequence) -> &mut Remote {
    match &mut sequence.role {
        Role::Prompt(prompt) => prompt.remote.as_mut().expect("reserved prompts are remote"),
        _ => unreachable!("only prompts are reserved"),
    }
}

/// Gives all blocks back, the last first, so that the cache forgets the end of a prompt before its beginning.
pub(super) fn release(cache: &mut PrefixCache, sequence: &mut Sequence) {
    for block in sequence.blocks.drain(..).rev() {
        cache.release(block);
    }
}
