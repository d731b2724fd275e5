//! Fair shares of a worker: which account and which request comes next. Pure: no clocks, no blocks.
//!
//! Three rules, argued in ADR 021:
//! - *Places in a step* are held, not spent: [`Shares`] gives accounts in turn one place each, and inside an account requests in turn
//!   one place each, until there are no more. This order says which sequence comes next, and which is the last.
//! - *Prompt tokens* are spent: [`Turns`] deals each step's tokens to accounts by deficit round robin.
//! - *Inside an account* prompts are computed in the order of [`due`], in which they would be done if all shared the device equally.

use super::sequence::JobId;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// Prompt tokens that an account may have computed before the next account has its turn. About a short prompt, so that one is
/// computed in the first step after its arrival; larger quanta would let long prompts of others go before it.
pub(super) const QUANTUM_TOKENS: usize = 256;

/// When a prompt of `cost` tokens would be done if all prompts of its account were computed at the same speed: at `computed` + what
/// each of the `others` has computed by then + its own cost. Prompts are computed one after another in this order. So equal prompts are
/// computed in the order of their arrival, and a short one goes before a long one, but not for ever: `computed`, which is what the
/// worker has computed until now, grows beyond the time at which the long one is due.
pub(super) fn due(computed: u64, cost: usize, others: impl Iterator<Item = usize>) -> u64 {
    computed + (others.map(|other| other.min(cost)).sum::<usize>() + cost) as u64
}

/// The sequences that hold a place in the steps, by account and request.
///
/// The *fair order* of an account's sequences: the first sequence of each of its requests, the oldest request first, then the second of
/// each, and so on. The fair order of all: the first of each account, then the second of each account, and so on.
#[derive(Debug, Default)]
pub(super) struct Shares(BTreeMap<Arc<str>, Share>);

#[derive(Debug, Default)]
struct Share {
    total: usize,
    /// None has 0.
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

    /// How many sequences of its own account come before one more sequence of this job.
    pub fn before_in_account(&self, account: &str, job: JobId) -> usize {
        let Some(share) = self.0.get(account) else { return 0 };
        let own = share.jobs.get(&job).copied().unwrap_or(0);
        share.jobs.iter().map(|(other, count)| (*count).min(own + usize::from(*other < job))).sum()
    }

    /// How many sequences come before one more sequence of this job; of two accounts with equally many, the other one goes first.
    pub fn before(&self, account: &str, job: JobId) -> usize {
        let own = self.before_in_account(account, job);
        let others = self.0.iter().filter(|(other, _)| ***other != *account);
        own + others.map(|(_, share)| share.total.min(own + 1)).sum::<usize>()
    }

    /// The account and the job of the last sequence in the fair order.
    pub fn last(&self) -> Option<(&Arc<str>, JobId)> {
        let last_of = |share: &Share| share.jobs.iter().map(|(job, count)| (*count, *job)).max();
        let accounts = self.0.iter().filter_map(|(account, share)| Some((share.total, last_of(share)?.1, account)));
        accounts.max_by_key(|(total, job, _)| (*total, *job)).map(|(_, job, account)| (account, job))
    }
}

/// The places of `sequences` (account and job of each, a job's in their order) in the fair order.
pub(super) fn fair_order(sequences: &[(&str, JobId)]) -> Vec<usize> {
    let mut of_job: BTreeMap<JobId, usize> = BTreeMap::new();
    let mut order: Vec<(&str, usize, JobId, usize)> = Vec::with_capacity(sequences.len());
    for (place, (account, job)) in sequences.iter().enumerate() {
        let number = of_job.entry(*job).or_default();
        order.push((account, *number, *job, place));
        *number += 1;
    }
    order.sort_unstable();
    let mut rounds: Vec<(usize, JobId, usize)> = Vec::with_capacity(order.len());
    let mut previous: Option<(&str, usize)> = None;
    for (account, _, job, place) in order {
        let round = previous.filter(|(other, _)| *other == account).map_or(0, |(_, round)| round + 1);
        previous = Some((account, round));
        rounds.push((round, job, place));
    }
    rounds.sort_unstable();
    rounds.into_iter().map(|(_, _, place)| place).collect()
}

/// The accounts' turns to have prompt tokens computed: a ring of the accounts that want some now.
#[derive(Debug, Default)]
pub(super) struct Turns(VecDeque<Turn>);

#[derive(Debug)]
struct Turn {
    account: Arc<str>,
    /// What is left of the account's quantum. Only the first of the ring has some.
    credit: usize,
}

/// Prompt tokens that one sequence wants.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    pub account: Arc<str>,
    pub tokens: usize,
}

impl Turns {
    /// Deals a step's `budget`: what each claim gets of it. An account's claims are met one after another, in their order. An account that
    /// wants nothing more leaves the ring, and what it did not use of its quantum is forgotten.
    pub fn deal(&mut self, claims: &[Claim], mut budget: usize) -> Vec<usize> {
        let mut dealt = vec![0; claims.len()];
        let mut wanting: BTreeMap<&str, VecDeque<usize>> = BTreeMap::new();
        for (place, claim) in claims.iter().enumerate() {
            wanting.entry(&claim.account).or_default().push_back(place);
        }
        self.0.retain(|turn| wanting.contains_key(&*turn.account));
        for claim in claims {
            if !self.0.iter().any(|turn| turn.account == claim.account) {
                self.0.push_back(Turn { account: Arc::clone(&claim.account), credit: 0 });
            }
        }
        while budget > 0
            && let Some(mut turn) = self.0.pop_front()
        {
            if turn.credit == 0 {
                turn.credit = QUANTUM_TOKENS;
            }
            let places = wanting.get_mut(&*turn.account).expect("the ring has only accounts that want something");
            while let Some(place) = places.front().copied() {
                let missing = claims[place].tokens - dealt[place];
                let given = missing.min(turn.credit).min(budget);
                dealt[place] += given;
                turn.credit -= given;
                budget -= given;
                if given < missing {
                    break;
                }
                places.pop_front();
            }
            match (places.is_empty(), turn.credit) {
                (true, _) => {}
                (false, 0) => self.0.push_back(turn),
                (false, _) => self.0.push_front(turn),
            }
        }
        dealt
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
