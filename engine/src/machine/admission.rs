//! Who gets blocks: submission, admission, growth, preemption.

use super::sequence::{JobId, Prompt, PromptLogprobs, Remote, Role, Sending, Sequence, Twin};
use super::{Action, Machine, Sampler, release};
use crate::{Event, Generate, Generated, KvSource, Prefill, Refusal};
use std::time::Duration;
use tandem_kv::Wanted;

/// Whoever computes runs, and each step brings it on; one that is held up for so long by others is not waited for any more.
/// Half of what a first token may take.
const TWIN_WAIT_MAX: Duration = Duration::from_secs(30);

impl Machine {
    /// Queues a prefill. Jobs' numbers grow with their arrival.
    pub fn prefill(&mut self, job: JobId, prefill: Prefill, now: Duration) -> Result<(), Refusal> {
        prefill.check(&self.info)?;
        self.check_queue()?;
        let prompt_len = prefill.prompt.len();
        self.waiting.push_back(Sequence {
            job,
            order: (job, 0),
            namespace: prefill.namespace,
            tokens: prefill.prompt,
            prompt_len,
            blocks: Vec::new(),
            computed: 0,
            committed: 0,
            cache_reads: true,
            submitted: now,
            twin: None,
            queued: None,
            role: Role::Prefill(Sending::default()),
        });
        self.live.insert(job, 1);
        self.taken_in.push(prefill.request_id);
        Ok(())
    }

    /// Queues a generation. Jobs' numbers grow with their arrival.
    pub fn generate(&mut self, job: JobId, generate: Generate, now: Duration) -> Result<(), Refusal> {
        generate.check(&self.info)?;
        self.check_queue()?;
        let len_max = generate.len_max(&self.info);
        let (boundary, tokens) = (generate.prompt.len(), generate.shared());
        let begin = |sample| Generated { sample, tokens: Vec::new() };
        let samples = match generate.generated {
            none if none.is_empty() => (0..generate.samples).map(begin).collect(),
            resumed => resumed,
        };
        let remote = match generate.kv {
            KvSource::Local => None,
            KvSource::Remote => Some(Remote::default()),
        };
        let prompt = Prompt {
            sampler: Sampler::new(generate.sampling, &generate.prompt),
            samples,
            boundary,
            len_max,
            logprobs: generate.prompt_logprobs.map(|top| PromptLogprobs { top, rows: vec![None] }),
            remote,
        };
        self.live.insert(job, prompt.samples.len() as u32);
        self.waiting.push_back(Sequence {
            job,
            order: (job, 0),
            namespace: generate.namespace,
            prompt_len: tokens.len(),
            blocks: Vec::new(),
            computed: 0,
            committed: 0,
            cache_reads: prompt.logprobs.is_none() && len_max > boundary,
            tokens,
            submitted: now,
            twin: None,
            queued: None,
            role: Role::Prompt(Box::new(prompt)),
        });
        self.taken_in.push(generate.request_id);
        Ok(())
    }

    fn check_queue(&self) -> Result<(), Refusal> {
        if self.waiting.len() >= self.settings.queue_max as usize { Err(Refusal::Full) } else { Ok(()) }
    }

    /// Takes waiting sequences in, in their order, while there are blocks for all each has. Those whose next block is being
    /// computed for another let others go first, and match it then: a burst of one prompt is computed once.
    pub(super) fn admit(&mut self, now: Duration) {
        let mut place = 0;
        while self.running.len() + self.reserved.len() < self.settings.batch_max as usize && place < self.waiting.len() {
            if self.waits_for_twin(place, now) {
                place += 1;
                continue;
            }
            let mut sequence = self.waiting.remove(place).expect("the place is one of those that wait");
            let size = self.info.block_size as usize;
            let reuse_max = sequence.reuse_max_blocks(size);
            let len_blocks = sequence.target().div_ceil(size);
            // A block for each sequence that grows, and for a last prompt token that begins one: who comes does not push out who
            // runs, nor is pushed out, at once.
            let growing = self.running.iter().chain(&self.reserved).filter(|other| other.grows()).count();
            let grows_at_once = matches!(sequence.role, Role::Prompt(_)) && sequence.target().is_multiple_of(size);
            let wanted = Wanted {
                reuse_max_blocks: reuse_max as u32,
                len_blocks: len_blocks as u32,
                spare_blocks: (growing + usize::from(grows_at_once)) as u32,
            };
            let acquired = self.cache.acquire(&sequence.namespace, &sequence.tokens, wanted);
            let Ok(acquired) = acquired else {
                self.waiting.insert(place, sequence);
                break;
            };
            sequence.twin = None;
            sequence.blocks = acquired.blocks;
            sequence.committed = acquired.cached_blocks as usize;
            sequence.computed = sequence.committed * size;
            let first_time = sequence.queued.is_none();
            sequence.queued.get_or_insert(now.saturating_sub(sequence.submitted));
            self.start(sequence, first_time, now);
        }
    }

    /// Whether somebody who runs is about to compute the next block that the sequence at `place` needs. It is looked for
    /// again when that one has come as far as the two are alike, or has gone.
    fn waits_for_twin(&mut self, place: usize, now: Duration) -> bool {
        let Self { cache, waiting, running, settings, info, .. } = self;
        let (sequence, size) = (&mut waiting[place], info.block_size as usize);
        if !settings.prefix_caching || sequence.is_remote() {
            return false;
        }
        let since = match sequence.twin {
            Some(Twin { since, .. }) if now.saturating_sub(since) > TWIN_WAIT_MAX => return false,
            Some(Twin { order, blocks, since }) => {
                let twin = running.binary_search_by_key(&order, |other| other.order);
                if twin.is_ok_and(|twin| running[twin].committed < blocks) {
                    return true;
                }
                since
            }
            None => now,
        };
        let reuse_max = sequence.reuse_max_blocks(size);
        let common = |other: &Sequence| {
            let alike = other.tokens[..other.target()].iter().zip(&sequence.tokens).take_while(|(a, b)| a == b).count();
            (alike / size).min(reuse_max)
        };
        let ahead = running.iter().filter(|other| !other.is_decoding() && other.namespace == sequence.namespace);
        let ahead = ahead.map(|other| (other.committed, Twin { order: other.order, blocks: common(other), since }));
        let ahead = ahead.filter(|(committed, twin)| *committed < twin.blocks).map(|(_, twin)| twin);
        let Some(twin) = ahead.max_by_key(|twin| twin.blocks) else {
            sequence.twin = None;
            return false;
        };
        let found = cache.overlap(&sequence.namespace, &sequence.tokens, reuse_max as u32) as usize;
        sequence.twin = (found < twin.blocks).then_some(twin);
        sequence.twin.is_some()
    }

    /// The sequence has its blocks.
    fn start(&mut self, mut sequence: Sequence, first_time: bool, now: Duration) {
        let (job, committed, computed) = (sequence.job, sequence.committed as u32, sequence.computed as u32);
        let len_blocks = sequence.blocks.len() as u32;
        match &mut sequence.role {
            Role::Prompt(prompt) if prompt.remote.is_some() => {
                let ticket = self.next_ticket();
                let missing: Vec<u32> = (committed..len_blocks).collect();
                prompt.remote = Some(Remote { ticket, missing: missing.clone(), ..Remote::default() });
                self.actions.push(Action::Tell(job, Event::Reserved { ticket, missing_blocks: missing }));
                self.reserved.push(sequence);
                self.start_landed(now);
            }
            _ => {
                if first_time {
                    self.actions.push(Action::Tell(job, Event::Scheduled { cached_tokens: computed }));
                }
                self.settle(sequence, now);
                self.running.sort_by_key(|sequence| sequence.order);
            }
        }
    }

    /// Gives decoding sequences the block their next token needs. When there is none, reservations that have not started
    /// are taken back first, then the youngest sequence waits again.
    pub(super) fn grow(&mut self) {
        let size = self.info.block_size as usize;
        let mut place = 0;
        while place < self.running.len() {
            let sequence = &mut self.running[place];
            if sequence.blocks.len() * size > sequence.computed || sequence.remaining() == 0 {
                place += 1;
            } else if let Ok(block) = self.cache.allocate() {
                sequence.blocks.push(block);
            } else if let Some(mut revoked) = self.reserved.pop() {
                release(&mut self.cache, &mut revoked);
                self.live.remove(&revoked.job);
                self.actions.push(Action::Tell(revoked.job, Event::Revoked));
                self.actions.push(Action::End(revoked.job));
            } else {
                let mut youngest = self.running.pop().expect("the sequence that grows runs");
                release(&mut self.cache, &mut youngest);
                self.preemptions += 1;
                self.wait_again(youngest);
            }
        }
    }

    /// Puts a sequence without blocks before all that have not run yet, in the order of arrival.
    pub(super) fn wait_again(&mut self, mut sequence: Sequence) {
        sequence.computed = 0;
        sequence.committed = 0;
        if let Role::Prompt(prompt) = &mut sequence.role
            && let Some(logprobs) = &mut prompt.logprobs
        {
            // They come again; the first token has none.
            logprobs.rows.truncate(1);
        }
        let place = self.waiting.iter().position(|other| other.queued.is_none() || other.order > sequence.order);
        self.waiting.insert(place.unwrap_or(self.waiting.len()), sequence);
    }
}
