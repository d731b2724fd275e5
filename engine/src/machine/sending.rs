//! Blocks of prefills that go elsewhere.

use super::{
    Action, Machine,
    sequence::{JobId, Role, Sequence},
};
use crate::Event;

impl Machine {
    /// Says which blocks of a prefill to tell, and whether by their place; those that are computed are told now.
    pub fn send_blocks(&mut self, job: JobId, mut indices: Vec<u32>, by_place: bool) {
        indices.sort_unstable_by(|a, b| b.cmp(a));
        indices.dedup();
        let with_blocks = self.running.iter_mut().chain(&mut self.held).find(|sequence| sequence.job == job);
        let Some(sequence) = with_blocks.or_else(|| self.waiting.of_job_mut(job).next()) else { return };
        let blocks = sequence.target().div_ceil(self.info.block_size as usize);
        indices.retain(|index| (*index as usize) < blocks);
        if let Role::Prefill(sending) = &mut sequence.role {
            sending.wanted.get_or_insert(indices);
            sending.by_place = by_place;
        }
        tell_finished_blocks(&mut self.actions, sequence, self.info.block_size as usize);
        self.tell_sent_prefills();
    }

    /// Tells the prefills that are computed and of which every block asked for has been told. They keep their blocks until their
    /// job is dropped, so copies on their way elsewhere never outgrow the cache.
    pub(super) fn tell_sent_prefills(&mut self) {
        for sequence in &mut self.held {
            if let Role::Prefill(sending) = &mut sequence.role
                && !sending.all_told
                && sending.wanted.as_ref().is_some_and(Vec::is_empty)
            {
                sending.all_told = true;
                self.actions.push(Action::Emit(sequence.job, Event::Computed(std::mem::take(&mut sequence.chunks))));
            }
        }
    }
}

/// Asks for the reading of blocks that are wanted and computed, or tells their places, in their order.
pub(super) fn tell_finished_blocks(actions: &mut Vec<Action>, sequence: &mut Sequence, block_size: usize) {
    let finished = match sequence.remaining() {
        0 => sequence.blocks.len(),
        _ => sequence.computed / block_size,
    };
    let Role::Prefill(sending) = &mut sequence.role else { return };
    let Some(wanted) = &mut sending.wanted else { return };
    let ready = std::iter::from_fn(|| wanted.pop_if(|index| (*index as usize) < finished));
    let mut ready = ready.map(|index| (index, sequence.blocks[index as usize])).peekable();
    if !sending.by_place {
        actions.extend(ready.map(|(index, block)| Action::Read { job: sequence.job, index, block }));
    } else if ready.peek().is_some() {
        actions.push(Action::Emit(sequence.job, Event::Ready(ready.collect())));
    }
}
