//! From a prompt to its samples.
//!
//! A prompt whose KV is here waits in `forking` with its blocks, and gives a sample of its own to the steps whenever the fair order has a
//! place for one more. So a request of many samples holds the blocks of one prompt and of those samples that run, however many it asks for.

use super::{
    Action, Machine,
    receiving::release,
    sequence::{JobId, Prompt, Role, Sample, Sequence},
};
use crate::{Event, FinishReason, Generated, Started};
use std::{sync::Arc, time::Duration};

impl Machine {
    /// The prompt's KV is here. Samples that have nothing left to generate end at once, the others wait for their places.
    pub(super) fn fork(&mut self, mut leader: Sequence, now: Duration) {
        let (job, chunks) = (leader.job, std::mem::take(&mut leader.chunks));
        let queue = leader.queued.unwrap_or_default();
        let prompt = prompt_of(&mut leader);
        let started = match prompt.remote.take() {
            Some(remote) => Started {
                queue,
                kv_transfer: remote.first_write.map_or(Duration::ZERO, |first| now - first),
                kv_transfer_bytes: remote.bytes,
                chunks,
            },
            None => Started { queue, chunks, ..Started::default() },
        };
        self.actions.push(Action::Tell(job, Event::Started(started)));
        if let Some(logprobs) = prompt.logprobs.take() {
            self.actions.push(Action::Tell(job, Event::PromptLogprobs(logprobs.rows)));
        }
        let (boundary, len_max) = (prompt.boundary, prompt.len_max);
        let at_limit = |generated: &mut Generated| boundary + generated.tokens.len() >= len_max;
        let ended: Vec<Generated> = prompt.samples.extract_if(.., at_limit).collect();
        if prompt.samples.is_empty() {
            release(&mut self.cache, &mut leader);
        } else {
            self.forking.push(leader);
        }
        for Generated { sample: number, .. } in ended {
            self.finish(job, number, FinishReason::Length);
        }
    }

    /// Starts the next sample of a forking prompt if there are blocks for it and `spare` more. The last one takes the prompt's own.
    pub(super) fn start_sample(&mut self, job: JobId, spare: usize) -> bool {
        let size = self.info.block_size as usize;
        let Some(place) = self.forking.iter().position(|leader| leader.job == job) else { return false };
        let leader = &mut self.forking[place];
        let (full, held) = (leader.computed / size, leader.blocks.len());
        let prompt_len = leader.prompt_len;
        let prompt = prompt_of(leader);
        let last = prompt.samples.len() == 1;
        let known = prompt.boundary + prompt.samples[0].tokens.len();
        // One that goes on by one token gets the block for it when it grows.
        let known = if known == prompt_len { 0 } else { known.div_ceil(size) };
        let fresh = held.max(known) - if last { held } else { full };
        let counts = self.cache.counts();
        let available = (counts.free + counts.cached) as usize;
        if available < fresh + spare {
            return false;
        }
        let generated = prompt.samples.remove(0);
        let mut sample = sample_of(leader, generated);
        let mut fresh: Vec<_> = (0..fresh).map(|_| self.cache.allocate().expect("free and cached blocks were counted")).collect();
        if last {
            sample.blocks = std::mem::take(&mut leader.blocks);
            self.forking.remove(place);
        } else {
            leader.blocks[..full].iter().for_each(|block| self.cache.pin(*block));
            sample.blocks = leader.blocks[..full].to_vec();
            if let (Some(from), Some(to)) = (leader.blocks.get(full), fresh.first()) {
                self.actions.push(Action::Copy { from: *from, to: *to });
            }
        }
        sample.blocks.append(&mut fresh);
        self.run(sample);
        true
    }

    /// Gives a forking prompt's blocks back: its samples wait without, and compute or find them again.
    pub(super) fn dissolve(&mut self, place: usize) {
        let mut leader = self.forking.remove(place);
        self.preemptions += 1;
        for generated in std::mem::take(&mut prompt_of(&mut leader).samples) {
            let sample = sample_of(&mut leader, generated);
            self.wait_again(sample);
        }
        release(&mut self.cache, &mut leader);
    }

    /// Dissolves the youngest forking prompt; false if there is none.
    pub(super) fn dissolve_youngest(&mut self) -> bool {
        let Some(youngest) = self.forking.len().checked_sub(1) else { return false };
        self.dissolve(youngest);
        true
    }

    /// There are no blocks for more than one sample of a forking prompt: the first takes the prompt's own, the others wait without.
    pub(super) fn keep_first_sample(&mut self, job: JobId) {
        let Some(place) = self.forking.iter().position(|leader| leader.job == job) else { return };
        let leader = &mut self.forking[place];
        let others = prompt_of(leader).samples.split_off(1);
        let others: Vec<Sequence> = others.into_iter().map(|generated| sample_of(leader, generated)).collect();
        if !self.start_sample(job, 0) {
            self.dissolve(place);
        }
        for sample in others {
            self.wait_again(sample);
        }
    }
}

/// A sample of a prompt whose KV is here, without blocks.
fn sample_of(leader: &mut Sequence, generated: Generated) -> Sequence {
    let (job, prompt_len, submitted, queued, due) = (leader.job, leader.prompt_len, leader.submitted, leader.queued, leader.due);
    let (computed, committed, paused, cache_reads) = (leader.computed, leader.committed, leader.paused, leader.cache_reads);
    let (account, namespace) = (Arc::clone(&leader.account), leader.namespace.clone());
    let Prompt { sampler, boundary, len_max, .. } = prompt_of(leader);
    let (boundary, len_max, number) = (*boundary, *len_max, generated.sample);
    let sampler = sampler.for_sample(number).resumed(&generated.tokens);
    Sequence {
        job,
        order: (job, number),
        account,
        due,
        namespace,
        tokens: [&leader.tokens[..boundary], &generated.tokens].concat(),
        prompt_len,
        blocks: Vec::new(),
        computed,
        committed,
        paused,
        cache_reads,
        submitted,
        found: 0,
        ahead: None,
        twin: None,
        queued,
        chunks: Vec::new(),
        role: Role::Sample(Box::new(Sample { number, sampler, len_max })),
    }
}

fn prompt_of(leader: &mut Sequence) -> &mut Prompt {
    match &mut leader.role {
        Role::Prompt(prompt) => prompt,
        _ => unreachable!("only prompts fork"),
    }
}
