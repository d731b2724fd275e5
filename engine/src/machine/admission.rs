//! Who gets blocks: submission, admission, growth, preemption.

use super::sequence::{JobId, Prompt, PromptLogprobs, Remote, Role, Sending, Sequence, Twin};
use super::{Action, Machine, Sampler, release};
use crate::{Event, Generate, Generated, KvSource, Prefill, Refusal};
use std::{cmp::Reverse, time::Duration};
use tandem_kv::Wanted;

/// Whoever computes runs, and each step brings it on; one that is held up for so long by others is not waited for any more.
/// Half of what a first token may take.
const TWIN_WAIT_MAX: Duration = Duration::from_secs(30);

/// KV that comes from elsewhere may be late, and a prompt that waits for it here keeps its own prefill worker waiting for a ticket:
/// half as long as that one does.
const LANDING_WAIT_MAX: Duration = Duration::from_secs(5);

/// Waiting prompts that a new one is compared with, the latest first: a burst is found, and a long queue costs no time.
const AHEAD_MAX: usize = 64;

impl Machine {
    /// Queues a prefill. Jobs' numbers grow with their arrival.
    pub fn prefill(&mut self, job: JobId, prefill: Prefill, now: Duration) -> Result<(), Refusal> {
        prefill.check(&self.info)?;
        self.check_queue()?;
        let prompt_len = prefill.prompt.len();
        self.queue(Sequence {
            job,
            order: (job, 0),
            namespace: prefill.namespace,
            tokens: prefill.prompt,
            prompt_len,
            blocks: Vec::new(),
            computed: 0,
            committed: 0,
            paused: false,
            cache_reads: true,
            submitted: now,
            found: 0,
            ahead: None,
            twin: None,
            queued: None,
            chunks: Vec::new(),
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
        self.queue(Sequence {
            job,
            order: (job, 0),
            namespace: generate.namespace,
            prompt_len: tokens.len(),
            blocks: Vec::new(),
            computed: 0,
            committed: 0,
            paused: false,
            cache_reads: prompt.logprobs.is_none() && len_max > boundary,
            tokens,
            submitted: now,
            found: 0,
            ahead: None,
            twin: None,
            queued: None,
            chunks: Vec::new(),
            role: Role::Prompt(Box::new(prompt)),
        });
        self.taken_in.push(generate.request_id);
        Ok(())
    }

    fn check_queue(&self) -> Result<(), Refusal> {
        // Those that have run already were let in once, and clients that do not read may keep many of them here.
        let new = self.waiting.iter().filter(|sequence| sequence.queued.is_none()).count();
        if new >= self.settings.queue_max as usize { Err(Refusal::Full) } else { Ok(()) }
    }

    fn queue(&mut self, mut sequence: Sequence) {
        sequence.found = self.found(&sequence);
        if self.settings.prefix_caching && !sequence.is_remote() {
            let size = self.info.block_size as usize;
            let before = self.waiting.iter().rev().chain(self.running.iter().rev());
            let before =
                before.filter(|other| !other.is_remote() && !other.is_decoding() && other.namespace == sequence.namespace);
            let before = before.take(AHEAD_MAX).map(|other| (other.job, sequence.in_common(other, size)));
            // Of equal ones the latest: when one of a burst leaves, only the next counts anew.
            sequence.ahead = before.min_by_key(|(_, blocks)| Reverse(*blocks));
        }
        self.waiting.push_back(sequence);
    }

    /// Leading blocks of a sequence that are cached now.
    fn found(&self, sequence: &Sequence) -> usize {
        let reuse_max = sequence.reuse_max_blocks(self.info.block_size as usize);
        self.cache.overlap(&sequence.namespace, &sequence.tokens, reuse_max as u32) as usize
    }

    /// Tokens that will have to be computed for the sequence: not those that are cached, nor those that others compute, as far as
    /// is known.
    pub(super) fn own_tokens(&self, sequence: &Sequence) -> usize {
        if !sequence.blocks.is_empty() {
            return sequence.remaining();
        }
        let twin = sequence.twin.map_or(0, |twin| twin.blocks);
        // One that has gone may not have computed them.
        let ahead = sequence.ahead.filter(|(job, _)| self.live.contains_key(job)).map_or(0, |(_, blocks)| blocks);
        sequence.remaining().saturating_sub(sequence.found.max(twin).max(ahead) * self.info.block_size as usize)
    }

    /// When somebody will have waited long enough for what is to land here for another, should nothing happen until then.
    pub fn next_deadline(&self, now: Duration) -> Option<Duration> {
        let deadlines = self.waiting.iter().filter_map(|sequence| Some(sequence.twin?.since + LANDING_WAIT_MAX));
        deadlines.filter(|deadline| *deadline > now).min()
    }

    /// Takes waiting sequences in, in their order, while there are blocks for all each has. Those whose next block is being
    /// computed for another, or lands for it, let others go first, and match it then: a burst of one prompt is computed once,
    /// and sent once.
    pub(super) fn admit(&mut self, now: Duration) {
        let mut place = 0;
        while place < self.waiting.len() && self.active() < self.settings.batch_max as usize {
            if self.waiting[place].paused || self.waits_for_twin(place, now) {
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
                sequence.found = self.found(&sequence);
                self.waiting.insert(place, sequence);
                if self.push_back_paused() {
                    continue;
                }
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

    /// Sequences with blocks, but for those that are paused.
    fn active(&self) -> usize {
        self.running.iter().filter(|sequence| !sequence.paused).count() + self.reserved.len()
    }

    /// Whether somebody who has blocks is about to compute, or to receive, the next block that the sequence at `place` needs. It is
    /// looked for again when that one has come as far as the two are alike, or has gone.
    fn waits_for_twin(&mut self, place: usize, now: Duration) -> bool {
        let Self { cache, waiting, running, reserved, settings, info, .. } = self;
        let (sequence, size) = (&mut waiting[place], info.block_size as usize);
        if !settings.prefix_caching {
            return false;
        }
        if let Some(Twin { order, blocks, since }) = sequence.twin {
            let twin = running.binary_search_by_key(&order, |other| other.order).map(|place| &running[place]);
            let twin = twin.ok().or_else(|| reserved.iter().find(|other| other.order == order));
            let lands = sequence.is_remote() || twin.is_some_and(Sequence::is_remote);
            if now.saturating_sub(since) >= if lands { LANDING_WAIT_MAX } else { TWIN_WAIT_MAX } {
                return false;
            }
            if twin.is_some_and(|twin| twin.committed < blocks && !twin.paused) {
                return true;
            }
        }
        let since = sequence.twin.map_or(now, |twin| twin.since);
        let works = |other: &&Sequence| !other.is_decoding() && !other.paused && other.namespace == sequence.namespace;
        let twins = running.iter().chain(reserved.iter()).filter(works).filter_map(|other| {
            let blocks = sequence.in_common(other, size);
            let (gained, awaited) = (blocks.checked_sub(other.committed)?, other.blocks.len() - other.committed);
            // What lands is matched when all of it has landed, however little of it is shared: less than half is not waited for.
            let pays = gained > 0 && (!other.is_remote() || gained * 2 >= awaited);
            pays.then_some(Twin { order: other.order, blocks, since })
        });
        sequence.twin = twins.max_by_key(|twin| twin.blocks).filter(|twin| {
            let reuse_max = sequence.reuse_max_blocks(size) as u32;
            (cache.overlap(&sequence.namespace, &sequence.tokens, reuse_max) as usize) < twin.blocks
        });
        sequence.twin.is_some()
    }

    /// The sequence has its blocks.
    fn start(&mut self, sequence: Sequence, first_time: bool, now: Duration) {
        if sequence.is_remote() {
            return self.reserve(sequence, now);
        }
        if first_time {
            let scheduled = Event::Scheduled { cached_tokens: sequence.computed as u32 };
            self.actions.push(Action::Tell(sequence.job, scheduled));
        }
        self.settle(sequence, now);
        self.running.sort_by_key(|sequence| sequence.order);
    }

    /// Gives decoding sequences the block their next token needs. When there is none, paused sequences give theirs first, then
    /// reservations that have not started are taken back, then the youngest sequence waits again.
    pub(super) fn grow(&mut self) {
        let size = self.info.block_size as usize;
        let mut place = 0;
        while place < self.running.len() {
            let sequence = &mut self.running[place];
            if sequence.paused || sequence.blocks.len() * size > sequence.computed || sequence.remaining() == 0 {
                place += 1;
            } else if let Ok(block) = self.cache.allocate() {
                sequence.blocks.push(block);
            } else if self.push_back_paused() {
                place = 0;
            } else if !self.revoke_youngest() {
                let youngest = self.running.pop().expect("the sequence that grows runs");
                self.push_back(youngest);
            }
        }
    }

    /// The youngest paused sequence waits again, if there is one: nobody knows when its listener will have caught up, and others
    /// must not wait for that.
    fn push_back_paused(&mut self) -> bool {
        let Some(youngest) = self.running.iter().rposition(|sequence| sequence.paused) else { return false };
        let sequence = self.running.remove(youngest);
        self.push_back(sequence);
        true
    }

    fn push_back(&mut self, mut sequence: Sequence) {
        release(&mut self.cache, &mut sequence);
        // What they computed is computed anew, or found.
        sequence.chunks.clear();
        self.preemptions += 1;
        self.wait_again(sequence);
    }

    /// Puts a sequence without blocks before all that have not run yet, in the order of arrival.
    pub(super) fn wait_again(&mut self, mut sequence: Sequence) {
        sequence.computed = 0;
        sequence.committed = 0;
        sequence.found = self.found(&sequence);
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
