//! Receives another worker's KV into reserved blocks, which are written between steps, or by another thread or device while steps run.
//!
//! The KV is not used or cached until the worker that computed it has confirmed that all of its blocks were written ([`Machine::confirm`]). The
//! confirmation arrives on the stream that this worker opened to that worker. Before the confirmation, an attacker that has the ticket could have
//! forged the blocks. Each block is written only once, so after a forged block the genuine block is refused, and a refused write ends the
//! reservation.
//!
//! A write that runs concurrently with the steps cannot be interrupted. Its blocks stay in use until it has ended, even if the reservation ends
//! earlier.

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

/// This many tickets of ended reservations are kept, so that a late write is not counted as a write with a guessed ticket. There cannot be so many
/// transfers in flight. The tickets take 16 KiB.
const SPENT_MAX: usize = 1_024;

/// The tickets of ended reservations, and the blocks of these reservations that are still being written.
#[derive(Debug, Default)]
pub(super) struct EndedReservations {
    writing: BTreeMap<(Ticket, u32), BlockId>,
    spent: VecDeque<Ticket>,
}

impl EndedReservations {
    /// Releases a reservation's blocks, except those that are being written.
    pub fn take(&mut self, cache: &mut PrefixCache, sequence: &mut Sequence) {
        let Remote { ticket, writing, .. } = remote(sequence);
        let ticket = ticket.expect("a reservation has a ticket");
        let indices = BTreeSet::from_iter(std::mem::take(writing));
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

/// The end of a write that [`Machine::begin_write`] has begun.
pub(crate) struct EndedWrite {
    pub ticket: Ticket,
    pub indices: Vec<u32>,
    /// True if all blocks were written. Otherwise none of them counts as written, and they are missing again.
    pub complete: bool,
}

impl Machine {
    /// Returns the block into which another worker's content for `index` is to be written. The block is treated as written from now on.
    ///
    /// # Errors
    /// Returns [`WriteRefused`] if the ticket does not allow the write. Most refusals also end the reservation.
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

    /// Returns the blocks that another thread or device is to write while steps run. If one of the blocks is not missing, none may be written.
    /// Every write that was begun must be ended with [`Machine::end_write`].
    ///
    /// # Errors
    /// Fails for the same reasons as [`Machine::write`].
    pub fn begin_write(&mut self, ticket: Ticket, indices: &[u32], now: Duration) -> Result<Vec<BlockId>, WriteRefused> {
        let Some(sequence) = self.reservation(ticket) else { return Err(self.not_live(ticket)) };
        let remote = remote(sequence);
        let wanted: BTreeSet<u32> = indices.iter().copied().collect();
        let missing = remote.missing.iter().filter(|index| wanted.contains(index)).count();
        if wanted.len() != indices.len() || missing != indices.len() {
            return Err(self.refuse(ticket, WriteRefused::NotMissing));
        }
        remote.missing.retain(|index| !wanted.contains(index));
        remote.writing.extend(indices);
        remote.first_write.get_or_insert(now);
        Ok(indices.iter().map(|index| sequence.blocks[*index as usize]).collect())
    }

    /// Ends a write that [`Machine::begin_write`] has begun.
    pub fn end_write(&mut self, EndedWrite { ticket, indices, complete }: EndedWrite) {
        for index in &indices {
            if let Some(block) = self.ended_reservations.writing.remove(&(ticket, *index)) {
                self.cache.release(block);
            }
        }
        let block_bytes = self.info.block_bytes as u64;
        let Some(sequence) = self.reservation(ticket) else { return };
        let remote = remote(sequence);
        let ended: BTreeSet<u32> = indices.iter().copied().collect();
        remote.writing.retain(|index| !ended.contains(index));
        if complete {
            remote.bytes += block_bytes * indices.len() as u64;
        } else {
            remote.missing.extend(indices);
        }
    }

    /// Ends a reservation because of a write that its ticket does not allow. Returns the reason to report: `why` or, if the ticket has no
    /// reservation, that the ticket is spent or unknown.
    pub fn refuse(&mut self, ticket: Ticket, why: WriteRefused) -> WriteRefused {
        let Some(place) = self.place(ticket) else { return self.not_live(ticket) };
        let sequence = self.reserved.remove(place);
        self.take_back(sequence, Event::WriteRefused(why));
        why
    }

    /// Ends the reservation at this index, to free blocks for running sequences.
    pub(super) fn revoke(&mut self, index: usize) {
        let sequence = self.reserved.remove(index);
        self.take_back(sequence, Event::Revoked);
    }

    fn take_back(&mut self, mut sequence: Sequence, last: Event) {
        self.ended_reservations.take(&mut self.cache, &mut sequence);
        self.live.remove(&sequence.job);
        self.actions.push(Action::Emit(sequence.job, last));
        self.actions.push(Action::End(sequence.job));
    }

    /// Offers the received blocks to the cache and starts the prompt. Must be called when the worker that computed the KV has confirmed that all of
    /// it was written. Does nothing while blocks are missing or being written.
    pub fn confirm(&mut self, ticket: Ticket, now: Duration) {
        let Some(place) = self.place(ticket) else { return };
        let Remote { missing, writing, .. } = remote(&mut self.reserved[place]);
        if !missing.is_empty() || !writing.is_empty() {
            return;
        }
        let mut sequence = self.reserved.remove(place);
        self.ended_reservations.spend(ticket);
        sequence.computed = sequence.target();
        self.commit(&mut sequence);
        self.fork(sequence, now);
    }

    /// Issues a ticket for the prompt's blocks whose KV is missing. If no block is missing, the prompt starts immediately.
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
        if self.ended_reservations.spent.contains(&ticket) { WriteRefused::SpentTicket } else { WriteRefused::UnknownTicket }
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

/// Releases all blocks of a sequence. The last block is released first, so that the cache evicts the end of a prompt before its beginning.
pub(super) fn release(cache: &mut PrefixCache, sequence: &mut Sequence) {
    for block in sequence.blocks.drain(..).rev() {
        cache.release(block);
    }
}
