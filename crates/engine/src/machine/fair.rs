//! Shares a worker fairly between accounts and requests, without a clock and without knowledge of KV blocks.
//!
//! ADR 021 explains the three rules, and ADR 042 priorities:
//! - *Places in a step* are held for as long as a sequence runs: [`Shares`] gives each account one place in rotation and, inside an account, each
//!   request one place in rotation, until all places are taken. This order decides which sequence gets the next place, and
//!   which one loses its place first.
//! - *Prompt tokens* are spent: [`RoundRobin`] allots each step's tokens to accounts by deficit round robin (Shreedhar and Varghese 1996).
//! - *Inside an account* prompts are computed in the order of [`due`]: the order in which they would finish if all shared the device equally.
//! - *Priorities* precede these three rules. Accounts rotate only among requests that rank equally across accounts, and the rotation inside an
//!   account begins with the requests that outrank its others.
//! - *One request is exempt*: the oldest one, if requests that outrank it have delayed it for long. Its first sequence precedes all others.

use super::sequence::{Flow, JobId, Owner};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// The quantum of the deficit round robin: the number of prompt tokens of an account that are computed in each round. It is about the length of a
/// short prompt, so that a short prompt is computed in the first step after its arrival. With a larger quantum, long prompts of other accounts would
/// delay short prompts.
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

/// The number of sequences that hold a place in the steps, by flow and request.
///
/// The *fair order* of an account's sequences of one priority begins with the first sequence of each of its requests, the oldest request first; next
/// come the second sequences, and so on. Then come the sequences of the account's next priority. The fair order of all sequences that rank equally
/// across accounts begins with the first sequence of each account; next come the second ones, and so on. Then come the sequences of the next rank.
#[derive(Debug, Default)]
pub(super) struct Shares {
    flows: BTreeMap<Flow, Share>,
    /// The exempt job. Its first sequence precedes all others, and takes no place in the rotation of its flow.
    exempt: Option<JobId>,
    /// Whether the first sequence of the exempt job has a place in the steps.
    exempt_runs: bool,
}

#[derive(Debug, Default)]
struct Share {
    total: usize,
    /// The number of sequences by priority within the account and by job.
    jobs: BTreeMap<(i32, JobId), usize>,
}

impl Shares {
    pub fn new(exempt: Option<JobId>) -> Self {
        Self { exempt, ..Self::default() }
    }

    pub fn add(&mut self, owner: &Owner) {
        if self.exempt == Some(owner.job) && !self.exempt_runs {
            self.exempt_runs = true;
            return;
        }
        let share = self.flows.entry(owner.flow()).or_default();
        share.total += 1;
        *share.jobs.entry((owner.priority.within, owner.job)).or_default() += 1;
    }

    pub fn of_job(&self, owner: &Owner) -> usize {
        let exempt = usize::from(self.exempt == Some(owner.job) && self.exempt_runs);
        self.in_rotation(owner) + exempt
    }

    fn in_rotation(&self, owner: &Owner) -> usize {
        let share = self.flows.get(&owner.flow());
        share.and_then(|share| share.jobs.get(&(owner.priority.within, owner.job))).copied().unwrap_or(0)
    }

    /// Returns how many sequences of the request's flow would precede one more sequence of the request in the fair order.
    pub fn before_in_flow(&self, owner: &Owner) -> usize {
        let Some(share) = self.flows.get(&owner.flow()) else { return 0 };
        let (within, own) = (owner.priority.within, self.in_rotation(owner));
        let before = share.jobs.iter().take_while(|((of_other, _), _)| *of_other <= within).map(|((of_other, job), count)| {
            if *of_other < within { *count } else { (*count).min(own + usize::from(*job < owner.job)) }
        });
        before.sum()
    }

    /// Returns how many sequences would precede one more sequence of this request in the fair order. If sequences have the same position in
    /// their flows, those of other flows are assumed to precede.
    pub fn before(&self, owner: &Owner) -> usize {
        if self.exempt == Some(owner.job) && !self.exempt_runs {
            return 0;
        }
        let (flow, own) = (owner.flow(), self.before_in_flow(owner));
        let others = self.flows.iter().take_while(|((across, _), _)| *across <= flow.0).filter(|(other, _)| **other != flow);
        let others = others.map(|((across, _), share)| if *across < flow.0 { share.total } else { share.total.min(own + 1) });
        own + others.sum::<usize>() + usize::from(self.exempt_runs)
    }

    pub fn last(&self) -> Option<JobId> {
        let Some(((worst, _), _)) = self.flows.last_key_value() else { return self.exempt.filter(|_| self.exempt_runs) };
        let last_of = |share: &Share| share.jobs.iter().map(|((within, job), count)| (*within, *count, *job)).max();
        let flows = self.flows.iter().rev().take_while(|((across, _), _)| across == worst);
        flows.filter_map(|(_, share)| Some((share.total, last_of(share)?.2))).max().map(|(_, job)| job)
    }
}

/// Returns the indices of `sequences` in the fair order. `sequences` has the request of each sequence. The sequences of one request must be in
/// their own order. `exempt` is the exempt job.
pub(super) fn fair_order(sequences: &[Owner], exempt: Option<JobId>) -> Vec<usize> {
    let first = sequences.iter().position(|owner| Some(owner.job) == exempt);
    let mut of_job: BTreeMap<JobId, usize> = BTreeMap::new();
    let mut order = Vec::with_capacity(sequences.len());
    for (index, Owner { account, priority, job }) in sequences.iter().enumerate().filter(|(index, _)| Some(*index) != first) {
        let number = of_job.entry(*job).or_default();
        order.push(((priority.across, account), priority.within, *number, *job, index));
        *number += 1;
    }
    order.sort_unstable();
    let mut rounds: Vec<(i32, usize, JobId, usize)> = Vec::with_capacity(order.len());
    let mut previous = None;
    for (flow, _, _, job, index) in order {
        let round = previous.filter(|(other, _)| *other == flow).map_or(0, |(_, round)| round + 1);
        previous = Some((flow, round));
        rounds.push((flow.0, round, job, index));
    }
    rounds.sort_unstable();
    first.into_iter().chain(rounds.into_iter().map(|(.., index)| index)).collect()
}

/// The rotations of accounts, one for each rank across accounts. A rank gets the tokens of a step that the ranks before it have not used.
#[derive(Debug, Default)]
pub(super) struct RoundRobin(BTreeMap<i32, VecDeque<Round>>);

#[derive(Debug)]
struct Round {
    account: Arc<str>,
    /// The number of unused tokens of the account's quantum. Only the first account of a rotation can have unused tokens.
    credit: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Demand {
    pub account: Arc<str>,
    /// The rank across accounts.
    pub across: i32,
    pub tokens: usize,
}

impl RoundRobin {
    /// Splits a step's `budget` of tokens. Returns the number of tokens for each demand, by its index. The demands of one account and rank are met
    /// one after another, in their order. An account without further demands leaves the rotation and loses the rest of its quantum.
    pub fn allot(&mut self, demands: &[Demand], mut budget: usize) -> Vec<usize> {
        let mut allotted = vec![0; demands.len()];
        let mut unmet: BTreeMap<i32, BTreeMap<&str, VecDeque<usize>>> = BTreeMap::new();
        for (index, demand) in demands.iter().enumerate() {
            unmet.entry(demand.across).or_default().entry(&demand.account).or_default().push_back(index);
        }
        for (across, rotation) in &mut self.0 {
            rotation.retain(|round| unmet.get(across).is_some_and(|unmet| unmet.contains_key(&*round.account)));
        }
        for demand in demands {
            let rotation = self.0.entry(demand.across).or_default();
            if !rotation.iter().any(|round| round.account == demand.account) {
                rotation.push_back(Round { account: Arc::clone(&demand.account), credit: 0 });
            }
        }
        for (across, rotation) in &mut self.0 {
            let Some(unmet) = unmet.get_mut(across) else { continue };
            while budget > 0
                && let Some(mut round) = rotation.pop_front()
            {
                if round.credit == 0 {
                    round.credit = QUANTUM_TOKENS;
                }
                let indices = unmet.get_mut(&*round.account).expect("a rotation has only accounts with demands");
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
                    (false, 0) => rotation.push_back(round),
                    (false, _) => rotation.push_front(round),
                }
            }
        }
        self.0.retain(|_, rotation| !rotation.is_empty());
        allotted
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
