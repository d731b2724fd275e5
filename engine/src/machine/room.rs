//! Which sequences give blocks back when there are none: growth, preemption, and room for those that have less than their share.

use super::{
    Machine,
    fair::Shares,
    receiving::release,
    sequence::{JobId, Role, Sequence},
};

impl Machine {
    /// Gives decoding sequences the block their next token needs. When there is none, paused sequences give theirs first, then
    /// reservations that have not started are taken back, then prompts whose samples wait, then the last sequence in the fair order.
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
            } else if !self.revoke_youngest() && !self.dissolve_youngest() {
                let last = self.last_of(None).expect("the sequence that grows runs");
                self.push_back(last);
                place = place.min(self.running.len()).saturating_sub(usize::from(last < place));
            }
        }
    }

    /// There are no blocks for a sequence of `job` that wants so many. True: another sequence has just given its own back. That is a paused
    /// one, or the last in the fair order if its owner is richer: it keeps at least as many sequences as the other one has with the
    /// one that comes, and holds more blocks than that one will. The owner is the account, or the request where both are of one account.
    /// So each owner keeps its first sequence, and two never take the same blocks from each other in turn.
    pub(super) fn make_room(&mut self, account: &str, job: JobId, blocks: usize) -> bool {
        if self.push_back_paused() {
            return true;
        }
        let Some(last) = self.last_of(Some(job)) else { return false };
        let victim = &self.running[last];
        let richer = if *victim.account == *account {
            let (other, own) = (self.holdings(|of| of.job == victim.job), self.holdings(|of| of.job == job));
            other.exceeds(own, blocks)
        } else {
            let (other, own) = (self.holdings(|of| of.account == victim.account), self.holdings(|of| *of.account == *account));
            other.exceeds(own, blocks)
        };
        if richer {
            self.push_back(last);
        }
        richer
    }

    /// The place of the last running sequence in the fair order, of other jobs than this.
    fn last_of(&self, but: Option<JobId>) -> Option<usize> {
        let mut shares = Shares::default();
        for sequence in self.running.iter().filter(|sequence| Some(sequence.job) != but) {
            shares.add(&sequence.account, sequence.job);
        }
        let (_, job) = shares.last()?;
        self.running.iter().rposition(|sequence| sequence.job == job)
    }

    /// What the sequences that are `of` an owner hold.
    fn holdings(&self, of: impl Fn(&Sequence) -> bool) -> Holdings {
        let mut holdings = Holdings::default();
        let mut before = None;
        for sequence in self.running.iter().chain(&self.reserved).filter(|sequence| of(sequence)) {
            holdings.sequences += 1;
            // The samples of a job share the full blocks of its prompt.
            let shared = if before == Some(sequence.job) { sequence.prompt_len / self.info.block_size as usize } else { 0 };
            holdings.blocks += sequence.blocks.len().saturating_sub(shared);
            before = Some(sequence.job);
        }
        holdings
    }

    /// The youngest paused sequence waits again, if there is one: when its listener will have caught up is not known, and others
    /// must not wait for that.
    pub(super) fn push_back_paused(&mut self) -> bool {
        if let Some(youngest) = self.forking.iter().rposition(|leader| leader.paused) {
            self.dissolve(youngest);
            return true;
        }
        let Some(youngest) = self.running.iter().rposition(|sequence| sequence.paused) else { return false };
        self.push_back(youngest);
        true
    }

    fn push_back(&mut self, place: usize) {
        let mut sequence = self.running.remove(place);
        release(&mut self.cache, &mut sequence);
        // What they computed is computed anew, or found.
        sequence.chunks.clear();
        self.preemptions += 1;
        self.wait_again(sequence);
    }

    /// A sequence that has given its blocks back waits for others. Among those of its account it goes before all that have not had any.
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
        self.waiting.push(sequence);
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Holdings {
    sequences: usize,
    blocks: usize,
}

impl Holdings {
    /// Also when one of these sequences has gone and `other` has one more, with so many blocks.
    fn exceeds(self, other: Self, blocks: usize) -> bool {
        self.sequences >= other.sequences + 2 && self.blocks > other.blocks + blocks
    }
}
