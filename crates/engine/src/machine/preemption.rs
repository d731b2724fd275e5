//! Lets running sequences grow, and preempts sequences: decides which sequences release their blocks when no block is free.

use super::{
    Machine,
    fair::Shares,
    receiving::release,
    sequence::{JobId, Owner, Role, Sequence},
    waiting::Queued,
};

impl Machine {
    /// Allocates the block that the next token of each running sequence needs. If no block is free, other sequences release theirs, in this order:
    /// paused sequences, reservations that have not started, forking prompts, the last sequence in the fair order. Reservations and forking prompts
    /// that outrank this last sequence keep their blocks.
    pub(super) fn grow(&mut self) {
        let size = self.info.block_size as usize;
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &mut self.running[index];
            if sequence.paused || sequence.blocks.len() * size > sequence.computed || sequence.remaining() == 0 {
                index += 1;
            } else if let Ok(block) = self.cache.allocate() {
                sequence.blocks.push(block);
            } else if self.preempt_paused() {
                index = 0;
            } else {
                let last = self.last_in_fair_order(None).expect("a growing sequence is a running sequence");
                if let Some(reservation) = self.last_outranked(&self.reserved, last) {
                    self.revoke(reservation);
                } else if let Some(forking) = self.last_outranked(&self.forking, last) {
                    self.preempt_forking(forking);
                } else {
                    self.preempt(last);
                    index = index.min(self.running.len()).saturating_sub(usize::from(last < index));
                }
            }
        }
    }

    /// Returns the index in `list` of the sequence to preempt: of the sequences that do not outrank the running sequence at `victim`, the
    /// youngest one of the rank that is served last.
    fn last_outranked(&self, list: &[Sequence], victim: usize) -> Option<usize> {
        let victim = &self.running[victim];
        self.last_that(list, |of| !of.outranks(victim))
    }

    /// Returns the index of the sequence to preempt: of the sequences that are not exempt and for which `may_lose` is true, the youngest one
    /// of the rank that is served last.
    fn last_that(&self, list: &[Sequence], may_lose: impl Fn(&Sequence) -> bool) -> Option<usize> {
        let candidates = list.iter().enumerate().filter(|(_, of)| may_lose(of) && self.exempt != Some(of.job));
        candidates.max_by_key(|(index, of)| (of.priority.across, *index)).map(|(index, _)| index)
    }

    /// Preempts a sequence to free blocks for a sequence of `owner` that needs `blocks` of them. Returns whether it preempted one.
    ///
    /// A paused sequence is preempted first. Next, `owner` preempts a sequence that it outranks, if all such sequences together hold enough
    /// blocks: a forking prompt that does not outrank the last running sequence in the fair order, or else that last sequence. If `owner`
    /// outranks neither, the last sequence is preempted if it has the same rank and its owner has more than a fair share. For this rule, an
    /// owner is an account with its sequences of this rank or, if both sequences belong to one account, a request. An owner has more than a
    /// fair share if it holds more blocks than the owner of the new sequence will hold, and will still have at least as many sequences. So
    /// each owner keeps its first sequence, and two owners never preempt each other alternately.
    pub(super) fn preempt_for(&mut self, owner: &Owner, blocks: usize) -> bool {
        if self.preempt_paused() {
            return true;
        }
        let last = self.last_in_fair_order(Some(owner.job)).filter(|last| self.exempt != Some(self.running[*last].job));
        let outranks_last = |of: &Sequence| last.is_some_and(|last| of.outranks(&self.running[last]));
        let forking = self.last_that(&self.forking, |of| owner.outranks(of) && !outranks_last(of));
        if forking.is_some() || last.is_some_and(|last| owner.outranks(&self.running[last])) {
            let counts = self.cache.counts();
            let outranked = self.holdings(|of| owner.outranks(of) && !of.is_remote() && self.exempt != Some(of.job));
            let forks: usize = self.forking.iter().filter(|of| owner.outranks(of)).map(|of| of.blocks.len()).sum();
            let suffices = outranked.blocks + forks + (counts.free + counts.cached) as usize >= blocks;
            match (suffices, forking, last) {
                (true, Some(forking), _) => self.preempt_forking(forking),
                (true, None, Some(last)) => self.preempt(last),
                _ => {}
            }
            return suffices;
        }
        let Some(last) = last else { return false };
        let victim = &self.running[last];
        if victim.priority.outranks(owner.priority, victim.account == owner.account) {
            return false;
        }
        let (victims, own) = if victim.account == owner.account {
            (self.holdings(|of| of.job == victim.job), self.holdings(|of| of.job == owner.job))
        } else {
            let of_rank = |of: &Sequence| of.priority.across == owner.priority.across;
            (
                self.holdings(|of| of_rank(of) && of.account == victim.account),
                self.holdings(|of| of_rank(of) && of.account == owner.account),
            )
        };
        let preempts = victims.exceed(own, blocks);
        if preempts {
            self.preempt(last);
        }
        preempts
    }

    fn last_in_fair_order(&self, excluded: Option<JobId>) -> Option<usize> {
        let mut shares = Shares::new(self.exempt);
        for sequence in self.running.iter().filter(|sequence| Some(sequence.job) != excluded) {
            shares.add(&sequence.owner());
        }
        let job = shares.last()?;
        self.running.iter().rposition(|sequence| sequence.job == job)
    }

    fn holdings(&self, is_owned: impl Fn(&Sequence) -> bool) -> Holdings {
        let mut holdings = Holdings::default();
        let mut previous = None;
        for sequence in self.running.iter().chain(&self.reserved).filter(|sequence| is_owned(sequence)) {
            holdings.sequences += 1;
            // The samples of a job share the full blocks of its prompt, so these blocks are counted only once.
            let shared = if previous == Some(sequence.job) { sequence.prompt_len / self.info.block_size as usize } else { 0 };
            holdings.blocks += sequence.blocks.len().saturating_sub(shared);
            previous = Some(sequence.job);
        }
        holdings
    }

    /// Preempts the youngest paused sequence; returns whether there was one. If it kept its blocks, other sequences would wait for them until the
    /// client of the paused sequence reads again.
    pub(super) fn preempt_paused(&mut self) -> bool {
        if let Some(youngest) = self.forking.iter().rposition(|parent| parent.paused) {
            self.preempt_forking(youngest);
            return true;
        }
        let Some(youngest) = self.running.iter().rposition(|sequence| sequence.paused) else { return false };
        self.preempt(youngest);
        true
    }

    fn preempt(&mut self, index: usize) {
        let mut sequence = self.running.remove(index);
        release(&mut self.cache, &mut sequence);
        // The records of the computed chunks are dropped, because the chunks are computed again or their blocks are found in the cache.
        sequence.chunks.clear();
        self.preemptions += 1;
        self.requeue(sequence);
    }

    /// Queues a sequence that has released its blocks. It precedes all sequences of its account that have never had blocks.
    pub(super) fn requeue(&mut self, mut sequence: Sequence) {
        sequence.computed = 0;
        sequence.committed = 0;
        if let Role::Prompt(prompt) = &mut sequence.role
            && let Some(logprobs) = &mut prompt.logprobs
        {
            // The prompt's logprobs are computed again. The first row stays, because the first token never has a logprob.
            logprobs.rows.truncate(1);
        }
        let cached_blocks = self.cached_prefix(&sequence);
        self.waiting.push(Queued { sequence, cached_blocks, expected_prefix: None, prefix_owner: None });
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Holdings {
    sequences: usize,
    blocks: usize,
}

impl Holdings {
    /// Returns whether the owner with the holdings `self` may lose a sequence, so that the owner with the holdings `other` gains one of `blocks`
    /// blocks. Two conditions must hold: after the exchange the first owner has at least as many sequences as the second, and the first owner now has
    /// more blocks than the second will have.
    fn exceed(self, other: Self, blocks: usize) -> bool {
        self.sequences >= other.sequences + 2 && self.blocks > other.blocks + blocks
    }
}
