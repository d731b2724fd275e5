//! Submits jobs, and admits waiting sequences: decides which of them get blocks, and when.

use super::fair::{Shares, due};
use super::sequence::{Due, Flow, JobId, Order, Owner, Prompt, PromptLogprobs, Remote, Role, Sending, Sequence};
use super::waiting::{PrefixOwner, Queued};
use super::{Action, Machine, Sampler};
use crate::sampling::Prepared;
use crate::{CachedTokens, Event, Generate, Generated, KvSource, Prefill, Refusal};
use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
    sync::Arc,
    time::Duration,
};
use tandem_kv::{Priority, Wanted};

/// The time for which a sequence waits for a prefix owner that computes its blocks: half the time limit for a first token. A prefix owner takes
/// longer only if other sequences delay it.
const PREFIX_WAIT_MAX: Duration = Duration::from_secs(30);

/// The time for which a sequence waits for its prefix owner if the KV of one of the two comes from another worker. It is short, because the prefill
/// worker keeps the blocks of a remote prompt meanwhile.
const REMOTE_PREFIX_WAIT_MAX: Duration = Duration::from_secs(5);

/// A new prompt is compared with this many earlier prompts, the latest first. The number is large enough to detect a burst of equal prompts, and
/// bounds the work when the queue is long.
const COMPARED_PROMPTS_MAX: usize = 64;

/// A new prompt gets blocks only if the prompts that precede it need less than this many full steps. So later prompts leave the blocks to earlier
/// ones. The number is large enough that the ticket of a transfer arrives before its prompt is computed.
const LOOKAHEAD_STEPS: usize = 4;

impl Machine {
    /// Queues a prefill. `job` must be greater than the ids of all earlier jobs.
    ///
    /// # Errors
    /// Returns a [`Refusal`] if the request can never run on this engine, or if the queue is full.
    pub fn prefill(&mut self, job: JobId, prefill: Prefill, now: Duration) -> Result<(), Refusal> {
        prefill.check(&self.info)?;
        self.check_queue()?;
        let role = Role::Prefill(Sending::default());
        let owner = Owner { account: prefill.account.into(), priority: prefill.priority, job };
        self.queue(Sequence::new(owner, prefill.namespace, prefill.prompt, role, now));
        self.live.insert(job, 1);
        self.included_request_ids.push(prefill.request_id);
        Ok(())
    }

    /// Queues a generation without a constraint.
    #[cfg(test)]
    pub fn generate(&mut self, job: JobId, generate: Generate, now: Duration) -> Result<(), Refusal> {
        self.generate_constrained(job, generate, None, now)
    }

    /// Queues a generation. `job` must be greater than the ids of all earlier jobs. `prepared` is the compiled constraint, if there is one.
    ///
    /// # Errors
    /// Returns a [`Refusal`] if the request can never run on this engine, or if the queue is full.
    pub fn generate_constrained(
        &mut self,
        job: JobId,
        generate: Generate,
        prepared: Option<Arc<Prepared>>,
        now: Duration,
    ) -> Result<(), Refusal> {
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
            KvSource::Handle => return Err(Refusal::Unsupported("this worker's engine cannot pull KV with a KV handle".into())),
        };
        let prompt = Prompt {
            sampler: Sampler::new(generate.sampling, &generate.prompt).with_constraint(prepared),
            samples,
            boundary,
            len_max,
            logprobs: generate.prompt_logprobs.map(|top| PromptLogprobs { top, rows: vec![None] }),
            remote,
        };
        let cache_reads = prompt.logprobs.is_none() && len_max > boundary;
        self.live.insert(job, prompt.samples.len() as u32);
        let role = Role::Prompt(Box::new(prompt));
        let owner = Owner { account: generate.account.into(), priority: generate.priority, job };
        let sequence = Sequence::new(owner, generate.namespace, tokens, role, now);
        self.queue(Sequence { cache_reads, ..sequence });
        self.included_request_ids.push(generate.request_id);
        Ok(())
    }

    fn check_queue(&self) -> Result<(), Refusal> {
        // Preempted sequences do not count towards the limit: they were accepted earlier, and clients that do not read their events may keep many
        // of them in the queue.
        if self.waiting.len_new() >= self.settings.queue_max as usize { Err(Refusal::Full) } else { Ok(()) }
    }

    fn queue(&mut self, mut sequence: Sequence) {
        let cached_blocks = self.cached_prefix(&sequence);
        let mut expected_prefix = None;
        if self.settings.prefix_caching && !sequence.is_remote() {
            let size = self.info.block_size as usize;
            let earlier = self.waiting.iter().rev().map(|queued| &queued.sequence).chain(self.running.iter().rev());
            let computed_here = earlier.filter(|other| other.computes_prompt() && other.namespace == sequence.namespace);
            let prefixes = computed_here.take(COMPARED_PROMPTS_MAX).map(|other| (other.job, sequence.in_common(other, size)));
            // If several jobs have an equally long common prefix with the new sequence, the latest of these jobs is expected to compute the
            // prefix. So if one job of a burst is cancelled, only the job after it loses its expected prefix.
            expected_prefix = prefixes.min_by_key(|(_, blocks)| Reverse(*blocks));
        }
        // If a prompt's KV comes from another worker, only its last token is computed here, and it does not wait for prompts that are computed here.
        let to_compute = if sequence.is_remote() { 1 } else { sequence.remaining() };
        let cost = to_compute.saturating_sub(cached_blocks * self.info.block_size as usize);
        let equal = |other: &&Sequence| {
            (&other.account, other.priority) == (&sequence.account, sequence.priority) && !other.is_decoding()
        };
        let waiting = self.waiting.iter().filter(|queued| equal(&&queued.sequence));
        let waiting = waiting.map(|queued| self.tokens_to_compute(queued));
        let in_flight = self.reserved.iter().chain(&self.running).filter(equal).map(Sequence::remaining);
        sequence.due = due(self.prefilled, cost, waiting.chain(in_flight));
        self.waiting.push(Queued { sequence, cached_blocks, expected_prefix, prefix_owner: None });
    }

    pub(super) fn cached_prefix(&self, sequence: &Sequence) -> usize {
        let reuse_max = sequence.reuse_max_blocks(self.info.block_size as usize);
        self.cache.overlap(&sequence.namespace, &sequence.tokens, reuse_max as u32) as usize
    }

    /// Estimates how many tokens will have to be computed for a waiting sequence: those that are neither cached nor expected to be computed
    /// for another sequence.
    pub(super) fn tokens_to_compute(&self, queued: &Queued) -> usize {
        let owned = queued.prefix_owner.map_or(0, |owner| owner.blocks);
        // A job that has ended may not have computed the expected blocks.
        let expected = queued.expected_prefix.filter(|(job, _)| self.live.contains_key(job)).map_or(0, |(_, blocks)| blocks);
        let reused = queued.cached_blocks.max(owned).max(expected);
        queued.sequence.remaining().saturating_sub(reused * self.info.block_size as usize)
    }

    /// Returns the next time at which a sequence has waited too long for KV that another worker sends; `None` if no such time lies ahead.
    pub fn next_deadline(&self, now: Duration) -> Option<Duration> {
        let owners = self.waiting.iter().filter_map(|queued| queued.prefix_owner);
        owners.map(|owner| owner.waiting_since + REMOTE_PREFIX_WAIT_MAX).filter(|deadline| *deadline > now).min()
    }

    /// Admits waiting sequences in the fair order while there are free blocks and places in the batch.
    ///
    /// The first sequence that lacks blocks may preempt a sequence of an account or request with more than its share. If it preempts none,
    /// all sequences after it wait until it is admitted, so no sequence starves. A sequence whose next block is being computed or received
    /// for another sequence is deferred, and finds the block in the cache later. So equal prompts that arrive together are computed once
    /// and sent once. The exempt sequence is the first in the fair order.
    pub(super) fn admit(&mut self, now: Duration) {
        while !(self.waiting.is_empty() && self.forking.is_empty()) && self.admit_in_order(now) {}
    }

    fn admit_in_order(&mut self, now: Duration) -> bool {
        let mut shares = Shares::new(self.exempt);
        for sequence in self.running.iter().filter(|sequence| !sequence.paused).chain(&self.reserved) {
            shares.add(&sequence.owner());
        }
        if let Some((owner, candidate)) = self.exempt_candidate(&shares) {
            match self.admit_one(candidate, &shares, now) {
                Admission::Runs => shares.add(&owner),
                Admission::OutOfBlocks { preempted } => return preempted,
                Admission::Complete | Admission::Deferred | Admission::LookaheadReached => {}
            }
        }
        let flows = self.waiting.flows().cloned().chain(self.forking.iter().map(|parent| parent.owner().flow()));
        let flows: BTreeSet<Flow> = flows.collect();
        let mut flows: Vec<FlowCandidates> = flows.into_iter().map(FlowCandidates::new).collect();
        let mut heads: BinaryHeap<Reverse<(Head, usize)>> = BinaryHeap::new();
        for (index, flow) in flows.iter_mut().enumerate() {
            flow.advance(self, &shares);
            heads.extend(flow.head(&shares).map(|head| Reverse((head, index))));
        }
        while let Some(Reverse((_, index))) = heads.pop() {
            let flow = &mut flows[index];
            let Some((owner, candidate)) = flow.next.take() else { continue };
            if shares.before(&owner) >= self.settings.batch_max as usize {
                // The flow's other candidates come later in the fair order, so they cannot be admitted either.
                continue;
            }
            match self.admit_one(candidate, &shares, now) {
                Admission::Runs => shares.add(&owner),
                Admission::Complete => {}
                Admission::Deferred => flow.skip(candidate),
                Admission::LookaheadReached => flow.no_more_new = true,
                Admission::OutOfBlocks { preempted } => return preempted,
            }
            flow.advance(self, &shares);
            heads.extend(flow.head(&shares).map(|head| Reverse((head, index))));
        }
        false
    }

    /// Returns the first sequence of the exempt job, unless a sequence of this job has a place.
    fn exempt_candidate(&self, shares: &Shares) -> Option<(Owner, Candidate)> {
        let job = self.exempt?;
        let waiting = self.waiting.first_of_job(job);
        let candidate =
            waiting.map(|of| if of.queue_time.is_some() { Candidate::Preempted(of.order) } else { Candidate::New(of.due()) });
        let sequence = waiting.or_else(|| self.forking.iter().find(|parent| parent.job == job))?;
        let owner = sequence.owner();
        (shares.of_job(&owner) == 0).then(|| (owner, candidate.unwrap_or(Candidate::Sample(job))))
    }

    fn admit_one(&mut self, candidate: Candidate, shares: &Shares, now: Duration) -> Admission {
        let order = match candidate {
            Candidate::Sample(job) => return self.admit_sample(job, shares),
            Candidate::Preempted(order) | Candidate::New((_, _, order)) => order,
        };
        if self.waiting.get(order).is_none_or(|queued| queued.sequence.paused) || self.waits_for_prefix(order, now) {
            return Admission::Deferred;
        }
        let sequence = &self.waiting.get(order).expect("a candidate waits").sequence;
        let lookahead = LOOKAHEAD_STEPS * self.settings.chunk_budget as usize;
        let exempt = self.exempt == Some(sequence.job);
        if sequence.queue_time.is_none() && !sequence.is_remote() && !exempt && self.tokens_before(sequence) >= lookahead {
            return Admission::LookaheadReached;
        }
        let owner = sequence.owner();
        let size = self.info.block_size as usize;
        let len_blocks = sequence.target().div_ceil(size);
        // The candidate is admitted only if spare blocks remain: one for each growing sequence before it, and one for itself if its last prompt token
        // begins a block. Without them, the next step would have to preempt the candidate or one of these sequences.
        let grows_next = matches!(sequence.role, Role::Prompt(_)) && sequence.target().is_multiple_of(size);
        let wanted = Wanted {
            reuse_max_blocks: sequence.reuse_max_blocks(size) as u32,
            len_blocks: len_blocks as u32,
            spare_blocks: (self.growing(shares.before(&owner)) + usize::from(grows_next)) as u32,
        };
        let Ok(acquired) = self.cache.acquire(&sequence.namespace, &sequence.tokens, wanted) else {
            let cached_blocks = self.cached_prefix(sequence);
            self.waiting.get_mut(order).expect("a candidate waits").cached_blocks = cached_blocks;
            return Admission::OutOfBlocks { preempted: self.preempt_for(&owner, len_blocks) };
        };
        let mut sequence = self.waiting.remove(order).expect("a candidate waits");
        sequence.blocks = acquired.blocks;
        sequence.committed = acquired.cached_blocks as usize;
        sequence.computed = sequence.committed * size;
        if sequence.queue_time.is_none() {
            sequence.queue_time = Some(now.saturating_sub(sequence.submitted));
            if !sequence.is_remote() {
                let scheduled = Event::Scheduled { cached: Some(CachedTokens::on_device(sequence.computed as u32)) };
                self.actions.push(Action::Emit(sequence.job, scheduled));
            }
        }
        self.start(sequence, now)
    }

    fn admit_sample(&mut self, job: JobId, shares: &Shares) -> Admission {
        let parent = self.forking.iter().find(|parent| parent.job == job && !parent.paused);
        let Some(parent) = parent else { return Admission::Deferred };
        let owner = parent.owner();
        let runs = shares.of_job(&owner) > 0;
        let spare = if runs { self.growing(shares.before(&owner)) } else { 0 };
        if self.start_sample(job, spare) {
            return Admission::Runs;
        }
        if runs {
            return Admission::OutOfBlocks { preempted: self.preempt_paused() };
        }
        if !self.preempt_for(&owner, 1) {
            self.keep_first_sample(job);
        }
        Admission::OutOfBlocks { preempted: true }
    }

    /// Returns an upper bound on how many sequences will need another block, among the `before` sequences that precede a candidate in the
    /// fair order.
    fn growing(&self, before: usize) -> usize {
        self.running.iter().chain(&self.reserved).filter(|other| other.grows()).count().min(before)
    }

    /// Returns how many prompt tokens of running sequences will be computed before those of a new prompt: tokens of prompts of its account and
    /// priority that are due earlier, and of all prompts that outrank it.
    fn tokens_before(&self, sequence: &Sequence) -> usize {
        let precedes = |other: &Sequence| {
            other.outranks(sequence)
                || ((&other.account, other.priority) == (&sequence.account, sequence.priority) && other.due() < sequence.due())
        };
        let before =
            self.running.iter().enumerate().filter(|(index, other)| {
                !other.is_decoding() && !other.paused && self.is_first_of_job(*index) && precedes(other)
            });
        before.map(|(_, other)| other.remaining()).sum()
    }

    /// Returns whether an in-flight sequence is about to compute or receive the next block that a waiting sequence needs. Records that
    /// in-flight sequence as the prefix owner. Once the owner has produced the common blocks or has ended, another owner is searched for.
    fn waits_for_prefix(&mut self, order: Order, now: Duration) -> bool {
        let Self { cache, waiting, running, reserved, settings, info, .. } = self;
        let (Some(queued), size) = (waiting.get_mut(order), info.block_size as usize) else { return false };
        if !settings.prefix_caching {
            return false;
        }
        let sequence = &queued.sequence;
        if let Some(PrefixOwner { order, blocks, waiting_since }) = queued.prefix_owner {
            let owner = running.binary_search_by_key(&order, |other| other.order).map(|index| &running[index]);
            let owner = owner.ok().or_else(|| reserved.iter().find(|other| other.order == order));
            let remote = sequence.is_remote() || owner.is_some_and(Sequence::is_remote);
            if now.saturating_sub(waiting_since) >= if remote { REMOTE_PREFIX_WAIT_MAX } else { PREFIX_WAIT_MAX } {
                return false;
            }
            if owner.is_some_and(|owner| owner.committed < blocks && !owner.paused) {
                return true;
            }
        }
        let waiting_since = queued.prefix_owner.map_or(now, |owner| owner.waiting_since);
        let in_progress = |other: &&Sequence| !other.is_decoding() && !other.paused && other.namespace == sequence.namespace;
        let owners = running.iter().chain(reserved.iter()).filter(in_progress).filter_map(|other| {
            let blocks = sequence.in_common(other, size);
            let (gained, awaited) = (blocks.checked_sub(other.committed)?, other.blocks.len() - other.committed);
            // Received blocks can be matched only when all of them have been received. So waiting for a remote prompt saves work only if at least
            // half of the awaited blocks are shared.
            let pays = gained > 0 && (!other.is_remote() || gained * 2 >= awaited);
            pays.then_some(PrefixOwner { order: other.order, blocks, waiting_since })
        });
        let owner = owners.max_by_key(|owner| owner.blocks).filter(|owner| {
            let reuse_max = sequence.reuse_max_blocks(size) as u32;
            (cache.overlap(&sequence.namespace, &sequence.tokens, reuse_max) as usize) < owner.blocks
        });
        queued.prefix_owner = owner;
        owner.is_some()
    }

    fn start(&mut self, sequence: Sequence, now: Duration) -> Admission {
        let job = sequence.job;
        if sequence.is_remote() {
            self.prefilled += sequence.remaining() as u64;
            self.reserve(sequence, now);
        } else {
            self.settle(sequence, now);
        }
        let is_reserved = || self.reserved.iter().any(|other| other.job == job);
        let runs = self.running.binary_search_by_key(&job, |other| other.order.0).is_ok() || is_reserved();
        if runs { Admission::Runs } else { Admission::Complete }
    }
}

enum Admission {
    /// The candidate takes part in the next steps.
    Runs,
    /// The candidate's KV is complete, so the candidate takes no place in the batch. If the candidate has samples to generate, they are
    /// candidates of their own.
    Complete,
    /// Backpressure pauses the candidate, or it waits for blocks that another sequence produces.
    Deferred,
    /// The prompts that precede the candidate need [`LOOKAHEAD_STEPS`] full steps or more.
    LookaheadReached,
    /// There are too few free blocks for the candidate. `preempted` says whether another sequence has just released its blocks.
    OutOfBlocks { preempted: bool },
}

/// A sequence that admission may start next for a flow.
#[derive(Clone, Copy, Debug)]
enum Candidate {
    Preempted(Order),
    Sample(JobId),
    New(Due),
}

impl Candidate {
    fn job(self) -> JobId {
        match self {
            Self::Sample(job) | Self::Preempted((job, _)) | Self::New((_, _, (job, _))) => job,
        }
    }
}

/// The place of a flow's next candidate in the fair order: its rank across accounts, the number of sequences of its flow that precede it, and its
/// job.
type Head = (i32, usize, JobId);

/// The candidates of a flow during one round of admission.
struct FlowCandidates {
    flow: Flow,
    next: Option<(Owner, Candidate)>,
    skipped: BTreeSet<Order>,
    /// The new prompt that was tried last; `None` if no new prompt was tried in this round.
    new_after: Option<Due>,
    no_more_new: bool,
}

impl FlowCandidates {
    fn new(flow: Flow) -> Self {
        Self { flow, next: None, skipped: BTreeSet::new(), new_after: None, no_more_new: false }
    }

    fn skip(&mut self, candidate: Candidate) {
        match candidate {
            Candidate::Preempted(order) => _ = self.skipped.insert(order),
            Candidate::Sample(job) => _ = self.skipped.insert((job, u32::MAX)),
            Candidate::New(due) => self.new_after = Some(due),
        }
    }

    /// Selects the next candidate: of the sequences that no other one outranks, one of the request with the fewest places in the batch. Among
    /// requests of one priority without a place, those that had blocks before precede new prompts.
    fn advance(&mut self, machine: &Machine, shares: &Shares) {
        let owner = |within, job| {
            let (across, account) = self.flow.clone();
            Owner { account, priority: Priority { across, within }, job }
        };
        let places = |within, job| shares.of_job(&owner(within, job));
        let preempted = machine.waiting.preempted(&self.flow).filter(|(_, order)| !self.skipped.contains(order));
        let preempted = preempted.map(|(within, order)| ((within, places(within, order.0), order), Candidate::Preempted(order)));
        let forking = machine.forking.iter().filter(|parent| !parent.paused && parent.owner().flow() == self.flow);
        let forking = forking.map(|parent| (parent.priority.within, (parent.job, u32::MAX)));
        let forking = forking.filter(|(_, order)| !self.skipped.contains(order));
        let forking = forking.map(|(within, order)| ((within, places(within, order.0), order), Candidate::Sample(order.0)));
        let started = preempted.chain(forking).min_by_key(|(key, _)| *key);
        let new = if self.no_more_new { None } else { machine.waiting.next_new(&self.flow, self.new_after) };
        let new = new.map(|due| ((due.0, 0, due.2), Candidate::New(due)));
        // `min_by_key` returns the first one of two candidates with equal keys.
        let next = started.into_iter().chain(new).min_by_key(|((within, places, _), _)| (*within, *places));
        self.next = next.map(|((within, _, _), candidate)| (owner(within, candidate.job()), candidate));
    }

    /// Returns the place of the next candidate in the fair order; `None` if there is no candidate.
    fn head(&self, shares: &Shares) -> Option<Head> {
        let (owner, _) = self.next.as_ref()?;
        Some((self.flow.0, shares.before_in_flow(owner), owner.job))
    }
}
