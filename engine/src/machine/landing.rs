//! KV that comes from another worker: written between steps, or by another thread or device while steps run.
//!
//! None of it is used or cached before the worker that computed it has said, on the stream that this worker opened to it, that all of it
//! was written ([`Machine::confirm`]). Until then the blocks could be forged by an attacker who has the ticket. Each block is written
//! only once, so after a forged block the genuine one is refused, and a refused write ends the reservation.
//!
//! A write beside the steps cannot be taken back once it has begun. Its blocks stay in use until it has ended, even if the reservation
//! is gone by then.

use super::{
    Action, Machine,
    sequence::{Remote, Role, Sequence},
};
use crate::{Event, WriteRefused};
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};
use tandem_kv::{BlockId, PrefixCache, Ticket};

/// Tickets of ended reservations that are remembered: more than transfers can be on their way, so that a late write is not taken for one
/// with a guessed ticket. 16 KiB.
const SPENT_MAX: usize = 1_024;

/// What is left of reservations that have ended.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// Blocks that are still being written, by ticket and index.
    writing: BTreeMap<(Ticket, u32), BlockId>,
    /// The latest last.
    spent: VecDeque<Ticket>,
}

impl Ended {
    /// Gives a reservation's blocks back, except those that are being written.
    pub fn take(&mut self, cache: &mut PrefixCache, sequence: &mut Sequence) {
        let Remote { ticket, arriving, .. } = remote(sequence);
        let ticket = ticket.expect("what is reserved has a ticket");
        let indices = BTreeSet::from_iter(std::mem::take(arriving));
        let blocks = std::mem::take(&mut sequence.blocks);
        for (index, block) in (0..).zip(blocks) {
            if indices.contains(&index) {
                self.writing.insert((ticket, index), block);
            } else {
                sequence.blocks.push(block);
            }
        }
        release(cache, sequence);
        self.spend(ticket);
    }

    fn spend(&mut self, ticket: Ticket) {
        if self.spent.len() == SPENT_MAX {
            self.spent.pop_front();
        }
        self.spent.push_back(ticket);
    }

    pub fn blocks(&self) -> impl Iterator<Item = &BlockId> {
        self.writing.values()
    }
}

impl Machine {
    /// Where a block that comes from elsewhere is to be written; it counts as written from now on.
    ///
    /// # Errors
    ///
    /// The ticket does not allow it; see [`WriteRefused`] for what that ends.
    pub fn write(&mut self, ticket: Ticket, index: u32, len_bytes: usize, now: Duration) -> Result<BlockId, WriteRefused> {
        let block_bytes = self.info.block_bytes;
        let Some(sequence) = self.reservation(ticket) else { return Err(self.not_live(ticket)) };
        let remote = remote(sequence);
        let Some(missing) = remote.missing.iter().position(|missing| *missing == index) else {
            return Err(self.refuse(ticket, WriteRefused::NotMissing));
        };
        if len_bytes != block_bytes {
            return Err(self.refuse(ticket, WriteRefused::WrongSize));
        }
        remote.missing.swap_remove(missing);
        remote.first_write.get_or_insert(now);
        remote.bytes += len_bytes as u64;
        Ok(sequence.blocks[index as usize])
    }

    /// Where blocks are to be written beside the steps: all of them, or none if one of them is not missing. Must be followed by
    /// [`Machine::end_arrival`].
    ///
    /// # Errors
    ///
    /// As for [`Machine::write`].
    pub fn begin_arrival(&mut self, ticket: Ticket, indices: &[u32], now: Duration) -> Result<Vec<BlockId>, WriteRefused> {
        let Some(sequence) = self.reservation(ticket) else { return Err(self.not_live(ticket)) };
        let remote = remote(sequence);
        let wanted: BTreeSet<u32> = indices.iter().copied().collect();
        let missing = remote.missing.iter().filter(|index| wanted.contains(index)).count();
        if wanted.len() != indices.len() || missing != indices.len() {
            return Err(self.refuse(ticket, WriteRefused::NotMissing));
        }
        remote.missing.retain(|index| !wanted.contains(index));
        remote.arriving.extend(indices);
        remote.first_write.get_or_insert(now);
        Ok(indices.iter().map(|index| sequence.blocks[*index as usize]).collect())
    }

    /// These blocks are not written any more; `whole`: all of them are there.
    pub fn end_arrival(&mut self, ticket: Ticket, indices: &[u32], whole: bool) {
        for index in indices {
            if let Some(block) = self.ended.writing.remove(&(ticket, *index)) {
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

    /// Ends a reservation because of a write that its ticket does not allow; gives the reason to tell, which is another one if there is no
    /// such reservation.
    pub fn refuse(&mut self, ticket: Ticket, why: WriteRefused) -> WriteRefused {
        let Some(place) = self.place(ticket) else { return self.not_live(ticket) };
        let sequence = self.reserved.remove(place);
        self.take_back(sequence, Event::WriteRefused(why));
        why
    }

    /// Ends the youngest reservation, for the sake of what runs already; false if there is none.
    pub(super) fn revoke_youngest(&mut self) -> bool {
        let Some(sequence) = self.reserved.pop() else { return false };
        self.take_back(sequence, Event::Revoked);
        true
    }

    fn take_back(&mut self, mut sequence: Sequence, last: Event) {
        self.ended.take(&mut self.cache, &mut sequence);
        self.live.remove(&sequence.job);
        self.actions.push(Action::Emit(sequence.job, last));
        self.actions.push(Action::End(sequence.job));
    }

    /// The worker that computed the KV has said that all of it was written as it should be: full blocks are offered to the cache, and
    /// the prompt starts. Changes nothing while blocks are missing.
    pub fn confirm(&mut self, ticket: Ticket, now: Duration) {
        let Some(place) = self.place(ticket) else { return };
        let Remote { missing, arriving, .. } = remote(&mut self.reserved[place]);
        if !missing.is_empty() || !arriving.is_empty() {
            return;
        }
        let mut sequence = self.reserved.remove(place);
        self.ended.spend(ticket);
        sequence.computed = sequence.target();
        self.commit(&mut sequence);
        self.fork(sequence, now);
    }

    /// Gives out a ticket for those of a prompt's blocks whose KV is not here. If there are none, the prompt starts at once.
    pub(super) fn reserve(&mut self, mut sequence: Sequence, now: Duration) {
        let ticket = (self.draw_ticket)();
        let missing: Vec<u32> = (sequence.committed as u32..sequence.blocks.len() as u32).collect();
        *remote(&mut sequence) = Remote { ticket: Some(ticket), missing: missing.clone(), ..Remote::default() };
        let none_missing = missing.is_empty();
        self.actions.push(Action::Emit(sequence.job, Event::Reserved { ticket, missing_blocks: missing }));
        self.reserved.push(sequence);
        if none_missing {
            self.confirm(ticket, now);
        }
    }

    fn not_live(&self, ticket: Ticket) -> WriteRefused {
        if self.ended.spent.contains(&ticket) { WriteRefused::SpentTicket } else { WriteRefused::UnknownTicket }
    }

    fn place(&mut self, ticket: Ticket) -> Option<usize> {
        self.reserved.iter_mut().position(|sequence| remote(sequence).ticket == Some(ticket))
    }

    fn reservation(&mut self, ticket: Ticket) -> Option<&mut Sequence> {
        let place = self.place(ticket)?;
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
