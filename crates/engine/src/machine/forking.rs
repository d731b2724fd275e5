//! Forks a prompt into its samples.
//!
//! A prompt whose KV is complete stays in `forking` with its blocks. Whenever a place in the batch goes to it by the fair order, it starts one more
//! sample. So a request holds the blocks of its prompt and of its running samples only, however many samples it has.

use super::{
    Action, Machine,
    receiving::release,
    sequence::{JobId, Prompt, Role, Sample, Sequence},
};
use crate::{Event, FinishReason, Generated, Started};
use std::time::Duration;

impl Machine {
    /// Moves a prompt whose KV is complete to `forking`. Samples that have nothing left to generate finish immediately.
    pub(super) fn fork(&mut self, mut parent: Sequence, now: Duration) {
        let (job, chunks) = (parent.job, std::mem::take(&mut parent.chunks));
        let queue = parent.queue_time.unwrap_or_default();
        let prompt = prompt_of(&mut parent);
        let started = match prompt.remote.take() {
            Some(remote) => Started {
                queue,
                kv_transfer: remote.first_write.map_or(Duration::ZERO, |first| now - first),
                kv_transfer_bytes: remote.bytes,
                chunks,
            },
            None => Started { queue, chunks, ..Started::default() },
        };
        self.actions.push(Action::Emit(job, Event::Started(started)));
        if let Some(logprobs) = prompt.logprobs.take() {
            self.actions.push(Action::Emit(job, Event::PromptLogprobs(logprobs.rows)));
        }
        let (boundary, len_max) = (prompt.boundary, prompt.len_max);
        let end = |Generated { sample, tokens }: &Generated| match boundary + tokens.len() >= len_max {
            _ if prompt.sampler.is_complete_from_start(*sample) => Some(FinishReason::Complete),
            true => Some(FinishReason::Length),
            false => None,
        };
        let finished: Vec<(u32, FinishReason)> = prompt.samples.iter().filter_map(|of| Some((of.sample, end(of)?))).collect();
        prompt.samples.retain(|of| !finished.iter().any(|(sample, _)| *sample == of.sample));
        if prompt.samples.is_empty() {
            release(&mut self.cache, &mut parent);
        } else {
            self.forking.push(parent);
        }
        for (sample, reason) in finished {
            self.finish(job, sample, reason);
        }
    }

    /// Starts the next sample of a forking prompt if there are blocks for it and `spare` more blocks. Returns whether the sample was
    /// started. The last sample takes over the prompt's own blocks.
    pub(super) fn start_sample(&mut self, job: JobId, spare: usize) -> bool {
        let size = self.info.block_size as usize;
        let Some(index) = self.forking.iter().position(|parent| parent.job == job) else { return false };
        let parent = &mut self.forking[index];
        let (full, held) = (parent.computed / size, parent.blocks.len());
        let prompt_len = parent.prompt_len;
        let prompt = prompt_of(parent);
        let last = prompt.samples.len() == 1;
        let known = prompt.boundary + prompt.samples[0].tokens.len();
        // If a sample begins with the last prompt token, the block for this token is allocated when the sample grows.
        let known_blocks = if known == prompt_len { 0 } else { known.div_ceil(size) };
        let fresh = held.max(known_blocks) - if last { held } else { full };
        let counts = self.cache.counts();
        let available = (counts.free + counts.cached) as usize;
        if available < fresh + spare {
            return false;
        }
        let generated = prompt.samples.remove(0);
        let mut sample = sample_of(parent, generated);
        let mut fresh: Vec<_> = (0..fresh).map(|_| self.cache.allocate().expect("free and cached blocks were counted")).collect();
        if last {
            sample.blocks = std::mem::take(&mut parent.blocks);
            self.forking.remove(index);
        } else {
            parent.blocks[..full].iter().for_each(|block| self.cache.pin(*block));
            sample.blocks = parent.blocks[..full].to_vec();
            if let (Some(from), Some(to)) = (parent.blocks.get(full), fresh.first()) {
                self.actions.push(Action::Copy { from: *from, to: *to });
            }
        }
        sample.blocks.append(&mut fresh);
        self.run(sample);
        true
    }

    /// Preempts a forking prompt: its blocks are released, and its samples wait without blocks, to be computed or matched in the cache
    /// again.
    pub(super) fn preempt_forking(&mut self, index: usize) {
        let mut parent = self.forking.remove(index);
        self.preemptions += 1;
        for generated in std::mem::take(&mut prompt_of(&mut parent).samples) {
            let sample = sample_of(&mut parent, generated);
            self.requeue(sample);
        }
        release(&mut self.cache, &mut parent);
    }

    /// Starts the first sample of a forking prompt on the prompt's own blocks, because no blocks are free for a second sample. The other
    /// samples wait without blocks.
    pub(super) fn keep_first_sample(&mut self, job: JobId) {
        let Some(index) = self.forking.iter().position(|parent| parent.job == job) else { return };
        let parent = &mut self.forking[index];
        let others = prompt_of(parent).samples.split_off(1);
        let others: Vec<Sequence> = others.into_iter().map(|generated| sample_of(parent, generated)).collect();
        if !self.start_sample(job, 0) {
            self.preempt_forking(index);
        }
        for sample in others {
            self.requeue(sample);
        }
    }
}

fn sample_of(parent: &mut Sequence, generated: Generated) -> Sequence {
    let Prompt { sampler, boundary, len_max, .. } = prompt_of(parent);
    let (boundary, number) = (*boundary, generated.sample);
    let sampler = sampler.for_sample(number, &generated.tokens);
    let role = Role::Sample(Box::new(Sample { number, sampler, is_late: false, len_max: *len_max }));
    let tokens = [&parent.tokens[..boundary], &generated.tokens].concat();
    Sequence {
        order: (parent.job, number),
        due: parent.due,
        prompt_len: parent.prompt_len,
        computed: parent.computed,
        committed: parent.committed,
        paused: parent.paused,
        cache_reads: parent.cache_reads,
        queue_time: parent.queue_time,
        ..Sequence::new(parent.owner(), parent.namespace.clone(), tokens, role, parent.submitted)
    }
}

fn prompt_of(parent: &mut Sequence) -> &mut Prompt {
    match &mut parent.role {
        Role::Prompt(prompt) => prompt,
        _ => unreachable!("only prompts fork"),
    }
}
