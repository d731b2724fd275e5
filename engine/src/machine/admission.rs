//! Which sequences get blocks, and when: submission and admission.

use super::fair::{Shares, due};
use super::sequence::{JobId, Order, Prompt, PromptLogprobs, Remote, Role, Sending, Sequence, Twin};
use super::waiting::Due;
use super::{Action, Machine, Sampler};
use crate::{Event, Generate, Generated, KvSource, Prefill, Refusal};
use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
    sync::Arc,
    time::Duration,
};
use tandem_kv::Wanted;

/// Whoever computes runs, and each step brings it on; one that is held up for so long by others is not waited for any more.
/// Half of what a first token may take.
const TWIN_WAIT_MAX: Duration = Duration::from_secs(30);

/// KV that comes from elsewhere may be late, and a prompt that waits for it here keeps its own prefill worker waiting for a ticket:
/// half as long as that one does.
const LANDING_WAIT_MAX: Duration = Duration::from_secs(5);

/// Waiting prompts that a new one is compared with, the latest first: a burst is found, and a long queue costs no time.
const AHEAD_MAX: usize = 64;

/// Prompts take blocks when no more than this many full steps of their account come before them: enough for the ticket of a transfer to
/// come meanwhile. Those that would be computed later leave the blocks to prompts that go before them.
const STEPS_AHEAD: usize = 4;

impl Machine {
    /// Queues a prefill. Jobs' numbers grow with their arrival.
    pub fn prefill(&mut self, job: JobId, prefill: Prefill, now: Duration) -> Result<(), Refusal> {
        prefill.check(&self.info)?;
        self.check_queue()?;
        let prompt_len = prefill.prompt.len();
        self.queue(Sequence {
            job,
            order: (job, 0),
            account: prefill.account.into(),
            due: 0,
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
        self.included_request_ids.push(prefill.request_id);
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
            account: generate.account.into(),
            due: 0,
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
        self.included_request_ids.push(generate.request_id);
        Ok(())
    }

    fn check_queue(&self) -> Result<(), Refusal> {
        // Those that have run already were let in once, and clients that do not read may keep many of them here.
        if self.waiting.len_new() >= self.settings.queue_max as usize { Err(Refusal::Full) } else { Ok(()) }
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
        let others = self.waiting.iter().chain(&self.reserved).chain(&self.running);
        let others = others.filter(|other| other.account == sequence.account && !other.is_decoding());
        let cost = sequence.remaining().saturating_sub(sequence.found * self.info.block_size as usize);
        sequence.due = due(self.prefilled, cost, others.map(|other| self.own_tokens(other)));
        self.waiting.push(sequence);
    }

    /// Leading blocks of a sequence that are cached now.
    pub(super) fn found(&self, sequence: &Sequence) -> usize {
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

    /// Takes in what waits, in the fair order, while there are places in the steps and blocks. The first that lacks blocks may take them
    /// from one that has more than its share; if it cannot, all others wait for it: none is passed for ever. Sequences whose next block
    /// is being computed for another, or lands for it, let others go first, and match it then: a burst of one prompt is computed once,
    /// and sent once.
    pub(super) fn admit(&mut self, now: Duration) {
        while !(self.waiting.is_empty() && self.forking.is_empty()) && self.admit_in_turn(now) {}
    }

    /// True: it made room at the cost of a sequence that is to wait in turn, so that the order is a new one.
    fn admit_in_turn(&mut self, now: Duration) -> bool {
        let mut shares = Shares::default();
        for sequence in self.running.iter().filter(|sequence| !sequence.paused).chain(&self.reserved) {
            shares.add(&sequence.account, sequence.job);
        }
        let accounts: BTreeSet<&Arc<str>> =
            self.waiting.accounts().chain(self.forking.iter().map(|leader| &leader.account)).collect();
        let mut lines: Vec<Line> = accounts.into_iter().map(|account| Line::of(Arc::clone(account))).collect();
        let mut heads: BinaryHeap<Reverse<(usize, JobId, usize)>> = BinaryHeap::new();
        for (number, line) in lines.iter_mut().enumerate() {
            line.advance(self, &shares);
            heads.extend(line.head(&shares).map(|(before, job)| Reverse((before, job, number))));
        }
        while let Some(Reverse((_, _, number))) = heads.pop() {
            let line = &mut lines[number];
            let Some(next) = line.next.take() else { continue };
            let job = next.job();
            if shares.before(&line.account, job) >= self.settings.batch_max as usize {
                // Nor is there a place for the others of this account.
                continue;
            }
            match self.admit_one(next, &shares, now) {
                Admitted::Runs => shares.add(&line.account, job),
                Admitted::HasBlocks => {}
                Admitted::NotYet => line.pass(next),
                Admitted::NoneOfItsAccount => line.new_is_over = true,
                Admitted::NoRoom { made } => return made,
            }
            line.advance(self, &shares);
            heads.extend(line.head(&shares).map(|(before, job)| Reverse((before, job, number))));
        }
        false
    }

    fn admit_one(&mut self, next: Next, shares: &Shares, now: Duration) -> Admitted {
        let order = match next {
            Next::Sample(job) => return self.admit_sample(job, shares),
            Next::Again(order) | Next::New((_, order)) => order,
        };
        if self.waiting.get(order).is_none_or(|sequence| sequence.paused) || self.waits_for_twin(order, now) {
            return Admitted::NotYet;
        }
        let sequence = &self.waiting.get(order).expect("it was there a moment ago");
        if sequence.queued.is_none() && !sequence.is_remote() && self.tokens_before(sequence) >= self.lookahead() {
            return Admitted::NoneOfItsAccount;
        }
        let (account, job) = (Arc::clone(&sequence.account), sequence.job);
        let size = self.info.block_size as usize;
        let reuse_max = sequence.reuse_max_blocks(size);
        let len_blocks = sequence.target().div_ceil(size);
        // A block for each sequence before it that grows, and for a last prompt token that begins one: it neither pushes out one of
        // those, nor is pushed out, at once.
        let grows_at_once = matches!(sequence.role, Role::Prompt(_)) && sequence.target().is_multiple_of(size);
        let wanted = Wanted {
            reuse_max_blocks: reuse_max as u32,
            len_blocks: len_blocks as u32,
            spare_blocks: (self.growing(shares.before(&account, job)) + usize::from(grows_at_once)) as u32,
        };
        let Ok(acquired) = self.cache.acquire(&sequence.namespace, &sequence.tokens, wanted) else {
            let found = self.found(sequence);
            self.waiting.get_mut(order).expect("it still waits").found = found;
            return Admitted::NoRoom { made: self.make_room(&account, job, len_blocks) };
        };
        let mut sequence = self.waiting.remove(order).expect("it waits until here");
        sequence.twin = None;
        sequence.blocks = acquired.blocks;
        sequence.committed = acquired.cached_blocks as usize;
        sequence.computed = sequence.committed * size;
        let first_time = sequence.queued.is_none();
        sequence.queued.get_or_insert(now.saturating_sub(sequence.submitted));
        self.start(sequence, first_time, now)
    }

    /// One more sample of a prompt whose KV is here.
    fn admit_sample(&mut self, job: JobId, shares: &Shares) -> Admitted {
        let Some(leader) = self.forking.iter().find(|leader| leader.job == job && !leader.paused) else {
            return Admitted::NotYet;
        };
        let account = Arc::clone(&leader.account);
        let runs = shares.of_job(&account, job) > 0;
        let spare = if runs { self.growing(shares.before(&account, job)) } else { 0 };
        if self.start_sample(job, spare) {
            return Admitted::Runs;
        }
        if runs {
            return Admitted::NoRoom { made: self.push_back_paused() };
        }
        if !self.make_room(&account, job, 1) {
            self.keep_first_sample(job);
        }
        Admitted::NoRoom { made: true }
    }

    /// How many sequences will want a block before one that `before` others precede in the fair order.
    fn growing(&self, before: usize) -> usize {
        self.running.iter().chain(&self.reserved).filter(|other| other.grows()).count().min(before)
    }

    /// Prompt tokens that will be computed before those of a new prompt of the same account.
    fn tokens_before(&self, sequence: &Sequence) -> usize {
        let before = self.running.iter().enumerate().filter(|(place, other)| {
            other.account == sequence.account
                && !other.is_decoding()
                && !other.paused
                && self.is_first(*place)
                && (other.due, other.order) < (sequence.due, sequence.order)
        });
        before.map(|(_, other)| other.remaining()).sum()
    }

    fn lookahead(&self) -> usize {
        STEPS_AHEAD * self.settings.chunk_budget as usize
    }

    /// Whether a sequence with blocks is about to compute, or to receive, the next block that a waiting one needs. It is looked for
    /// again when that one has come as far as the two are alike, or has gone.
    fn waits_for_twin(&mut self, order: Order, now: Duration) -> bool {
        let Self { cache, waiting, running, reserved, settings, info, .. } = self;
        let (Some(sequence), size) = (waiting.get_mut(order), info.block_size as usize) else { return false };
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
    fn start(&mut self, sequence: Sequence, first_time: bool, now: Duration) -> Admitted {
        let job = sequence.job;
        if sequence.is_remote() {
            self.prefilled += sequence.remaining() as u64;
            self.reserve(sequence, now);
        } else {
            if first_time {
                let scheduled = Event::Scheduled { cached_tokens: sequence.computed as u32 };
                self.actions.push(Action::Tell(job, scheduled));
            }
            self.settle(sequence, now);
        }
        let works = |other: &Sequence| other.job == job;
        let runs =
            self.running.binary_search_by_key(&job, |other| other.order.0).is_ok() || self.reserved.iter().rev().any(works);
        if runs { Admitted::Runs } else { Admitted::HasBlocks }
    }
}

/// What became of the next of a line.
enum Admitted {
    /// It has a place in the steps.
    Runs,
    /// Its KV is complete: it needs no place, or its samples do.
    HasBlocks,
    /// Its listener is behind, or it waits for what another one computes.
    NotYet,
    /// Enough prompts of its account come before it.
    NoneOfItsAccount,
    /// There are no blocks for it. `made`: another sequence has just given its own back.
    NoRoom { made: bool },
}

/// What may be admitted next of an account.
#[derive(Clone, Copy)]
enum Next {
    Again(Order),
    /// Of a forking job.
    Sample(JobId),
    New(Due),
}

impl Next {
    fn job(self) -> JobId {
        match self {
            Self::Sample(job) | Self::Again((job, _)) | Self::New((_, (job, _))) => job,
        }
    }
}

/// An account's way through one admission.
struct Line {
    account: Arc<str>,
    next: Option<Next>,
    /// Samples and preempted sequences that wait for something else.
    passed: BTreeSet<Order>,
    /// The last of the new prompts that was looked at.
    new_after: Option<Due>,
    new_is_over: bool,
}

impl Line {
    fn of(account: Arc<str>) -> Self {
        Self { account, next: None, passed: BTreeSet::new(), new_after: None, new_is_over: false }
    }

    fn pass(&mut self, next: Next) {
        match next {
            Next::Again(order) => _ = self.passed.insert(order),
            Next::Sample(job) => _ = self.passed.insert((job, u32::MAX)),
            Next::New(due) => self.new_after = Some(due),
        }
    }

    /// Finds the next one: that of the request with the fewest places; of such, what has had blocks before goes before new prompts.
    fn advance(&mut self, machine: &Machine, shares: &Shares) {
        let places = |job| shares.of_job(&self.account, job);
        let again = machine.waiting.again(&self.account).filter(|order| !self.passed.contains(order));
        let again = again.map(|order| ((places(order.0), order), Next::Again(order)));
        let forking = machine.forking.iter().filter(|leader| leader.account == self.account && !leader.paused);
        let forking = forking.map(|leader| (leader.job, u32::MAX)).filter(|order| !self.passed.contains(order));
        let forking = forking.map(|order| ((places(order.0), order), Next::Sample(order.0)));
        let begun = again.chain(forking).min_by_key(|(key, _)| *key);
        self.next = match begun {
            Some(((0, _), next)) => Some(next),
            begun => {
                let new = if self.new_is_over { None } else { machine.waiting.next_new(&self.account, self.new_after) };
                new.map(Next::New).or(begun.map(|(_, next)| next))
            }
        };
    }

    /// How many of its account's sequences come before the next one, and its job.
    fn head(&self, shares: &Shares) -> Option<(usize, JobId)> {
        let job = self.next?.job();
        Some((shares.before_in_account(&self.account, job), job))
    }
}
