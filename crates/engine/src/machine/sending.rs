//! Reports the computed blocks of prefills that must be sent to other workers.

use super::{
    Action, Machine,
    sequence::{JobId, Role, Sequence},
};
use crate::Event;
use tandem_kv::{BlockAccess, ReadyBlock};

impl Machine {
    /// Sets which blocks of a job's prefill to report, and how. Blocks that are already computed are reported at once. Further calls for
    /// the same job have no effect.
    pub fn send_blocks(&mut self, job: JobId, mut indices: Vec<u32>, access: BlockAccess) {
        indices.sort_unstable_by(|a, b| b.cmp(a));
        indices.dedup();
        let with_blocks = self.running.iter_mut().chain(&mut self.held).find(|sequence| sequence.job == job);
        let Some(sequence) = with_blocks.or_else(|| self.waiting.of_job_mut(job).next()) else { return };
        let blocks = sequence.target().div_ceil(self.info.block_size as usize);
        indices.retain(|index| (*index as usize) < blocks);
        if let Role::Prefill(sending) = &mut sequence.role {
            sending.wanted.get_or_insert((indices, access));
        }
        report_ready_blocks(&mut self.actions, sequence, self.info.block_size as usize);
        self.report_sent_prefills();
    }

    /// Reports that prefills are complete: all tokens are computed, and all requested blocks were reported. A prefill keeps its blocks until its job
    /// is dropped, even if the blocks were copied in order to be sent. So these copies never take more memory than the cache.
    pub(super) fn report_sent_prefills(&mut self) {
        for sequence in &mut self.held {
            if let Role::Prefill(sending) = &mut sequence.role
                && !sending.all_reported
                && sending.wanted.as_ref().is_some_and(|(indices, _)| indices.is_empty())
            {
                sending.all_reported = true;
                self.actions.push(Action::Emit(sequence.job, Event::Computed(std::mem::take(&mut sequence.chunks))));
            }
        }
    }
}

pub(super) fn report_ready_blocks(actions: &mut Vec<Action>, sequence: &mut Sequence, block_size: usize) {
    let computed = match sequence.remaining() {
        0 => sequence.blocks.len(),
        _ => sequence.computed / block_size,
    };
    let Role::Prefill(sending) = &mut sequence.role else { return };
    let Some((wanted, access)) = &mut sending.wanted else { return };
    let ready = std::iter::from_fn(|| wanted.pop_if(|index| (*index as usize) < computed));
    let ready = ready.map(|index| ReadyBlock { index, block: sequence.blocks[index as usize], content: Vec::new() });
    let ready: Vec<_> = ready.collect();
    if !ready.is_empty() {
        let (job, access) = (sequence.job, *access);
        actions.push(match access {
            BlockAccess::Copied => Action::ReadBlocks(job, ready),
            BlockAccess::InPlace => Action::Emit(job, Event::BlocksReady(ready)),
        });
    }
}
