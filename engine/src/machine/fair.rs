//! Shares a worker fairly between accounts and requests, without a clock and without knowledge of KV blocks.
//!
//! ADR 021 explains the three rules:
//! - *Places in a step* are held for as long as a sequence runs: [`Shares`] gives each account one place in rotation and, inside an account, each
//!   request one place in rotation, until all places are taken. This order decides which sequence gets the next place, and
//!   which one loses its place first.
//! - *Prompt tokens* are spent: [`RoundRobin`] allots each step's tokens to accounts by deficit round robin (Shreedhar and Varghese 1996).
//! - *Inside an account* prompts are computed in the order of [`due`]: the order in which they would finish if all shared the device equally.

use super::sequence::JobId;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// In each round, this many prompt tokens of an account are computed before those of the next account. It is about the length of a short prompt, so
/// that a short prompt is computed in the first step after its arrival. With a larger quantum, long prompts of other accounts would delay short
/// prompts.
pub(super) const QUANTUM_TOKENS: usize = 256;

/// Returns the time at which a prompt of `cost` tokens is due. Time is counted in prompt tokens that this worker has computed since its start.
///
/// The prompt is due when it would be done if all prompts of its account were computed at the same speed: at `computed`, plus its own cost, plus the
/// tokens of each other prompt that would be computed by then. `others` has the remaining tokens of the account's other prompts. So equal prompts are
/// computed in the order of their arrival. A short prompt precedes a long one. Short prompts that arrive later do not delay a long prompt forever,
/// because `computed` grows until it exceeds the time at which the long prompt is due.
pub(super) fn due(computed: u64, cost: usize, others: impl Iterator<Item = usize>) -> u64 {
    computed + (others.map(|other| other.min(cost)).sum::<usize>() + cost) as u64
}

/// The number of sequences that hold a place in the steps, by account and request.
///
/// The *fair order* of an account's sequences begins with the first sequence of each of its requests, the oldest request first; the second sequence
/// of each follows, and so on. The fair order of all sequences begins with the first sequence of each account; the second of each follows, and so on.
#[derive(Debug, Default)]
pub(super) struct Shares(BTreeMap<Arc<str>, Share>);

#[derive(Debug, Default)]
struct Share {
    total: usize,
    jobs: BTreeMap<JobId, usize>,
}

impl Shares {
    pub fn add(&mut self, account: &Arc<str>, job: JobId) {
        let share = self.0.entry(Arc::clone(account)).or_default();
        share.total += 1;
        *share.jobs.entry(job).or_default() += 1;
    }

    pub fn of_job(&self, account: &str, job: JobId) -> usize {
        self.0.get(account).and_then(|share| share.jobs.get(&job)).copied().unwrap_or(0)
    }

    /// Returns how many sequences of its own account would precede one more sequence of this job in the fair order.
    pub fn before_in_account(&self, account: &str, job: JobId) -> usize {
        let Some(share) = self.0.get(account) else { return 0 };
        let own = share.jobs.get(&job).copied().unwrap_or(0);
        share.jobs.iter().map(|(other, count)| (*count).min(own + usize::from(*other < job))).sum()
    }

    /// Returns how many sequences would precede one more sequence of this job in the fair order. If sequences have the same position in their
    /// accounts, those of other accounts are assumed to precede.
    pub fn before(&self, account: &str, job: JobId) -> usize {
        let own = self.before_in_account(account, job);
        let others = self.0.iter().filter(|(other, _)| ***other != *account);
        own + others.map(|(_, share)| share.total.min(own + 1)).sum::<usize>()
    }

    pub fn last(&self) -> Option<JobId> {
        let last_of = |share: &Share| share.jobs.iter().map(|(job, count)| (*count, *job)).max();
        let accounts = self.0.values().filter_map(|share| Some((share.total, last_of(share)?.1)));
        accounts.max().map(|(_, job)| job)
    }
}

/// Returns the indices of `sequences` in the fair order. `sequences` has the account and the job of each sequence. The sequences of one job
/// must be in their own order.
pub(super) fn fair_order(sequences: &[(&str, JobId)]) -> Vec<usize> {
    let mut of_job: BTreeMap<JobId, usize> = BTreeMap::new();
    let mut order: Vec<(&str, usize, JobId, usize)> = Vec::with_capacity(sequences.len());
    for (index, (account, job)) in sequences.iter().enumerate() {
        let number = of_job.entry(*job).or_default();
        order.push((account, *number, *job, index));
        *number += 1;
    }
    order.sort_unstable();
    let mut rounds: Vec<(usize, JobId, usize)> = Vec::with_capacity(order.len());
    let mut previous: Option<(&str, usize)> = None;
    for (account, _, job, index) in order {
        let round = previous.filter(|(other, _)| *other == account).map_or(0, |(_, round)| round + 1);
        previous = Some((account, round));
        rounds.push((round, job, index));
    }
    rounds.sort_unstable();
    rounds.into_iter().map(|(_, _, index)| index).collect()
}

#[derive(Debug, Default)]
pub(super) struct RoundRobin(VecDeque<Round>);

#[derive(Debug)]
struct Round {
    account: Arc<str>,
    /// The unused tokens of the account's quantum. Only the first account in the queue can have unused tokens.
    credit: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Demand {
    pub account: Arc<str>,
    pub tokens: usize,
}

impl RoundRobin {
    /// Splits a step's `budget` of tokens. Returns the number of tokens for each demand, by its index. The demands of one account are met one after
    /// another, in their order. An account without further demands leaves the rotation and loses the rest of its quantum.
    pub fn allot(&mut self, demands: &[Demand], mut budget: usize) -> Vec<usize> {
        let mut allotted = vec![0; demands.len()];
        let mut unmet: BTreeMap<&str, VecDeque<usize>> = BTreeMap::new();
        for (index, demand) in demands.iter().enumerate() {
            unmet.entry(&demand.account).or_default().push_back(index);
        }
        self.0.retain(|round| unmet.contains_key(&*round.account));
        for demand in demands {
            if !self.0.iter().any(|round| round.account == demand.account) {
                self.0.push_back(Round { account: Arc::clone(&demand.account), credit: 0 });
            }
        }
        while budget > 0
            && let Some(mut round) = self.0.pop_front()
        {
            if round.credit == 0 {
                round.credit = QUANTUM_TOKENS;
            }
            let indices = unmet.get_mut(&*round.account).expect("the rotation has only accounts with demands");
            while let Some(index) = indices.front().copied() {
                let missing = demands[index].tokens - allotted[index];
                let given = missing.min(round.credit).min(budget);
                allotted[index] += given;
                round.credit -= given;
                budget -= given;
                if given < missing {
                    break;
                }
                indices.pop_front();
            }
            match (indices.is_empty(), round.credit) {
                (true, _) => {}
                (false, 0) => self.0.push_back(round),
                (false, _) => self.0.push_front(round),
            }
        }
        allotted
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
