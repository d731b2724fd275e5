//! The sequences that wait for blocks and for a place in the batch. Waiting sequences hold no blocks.

use super::sequence::{JobId, Order, Sequence};
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
    time::Duration,
};
use tandem_kv::{Violation, ensure};

/// The waiting sequences, in the order of arrival and by account. An account has an entry only while at least one of its sequences waits.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    sequences: BTreeMap<Order, Queued>,
    accounts: BTreeMap<Arc<str>, AccountQueue>,
    new: usize,
}

/// A waiting sequence, and estimates of the blocks that it will find in the cache.
#[derive(Debug)]
pub(super) struct Queued {
    pub sequence: Sequence,
    pub cached_blocks: usize,
    /// The earlier job that is expected to compute the longest prefix of this prompt, and the length of this prefix in blocks; `None` if no
    /// such job was found when the sequence was queued.
    pub expected_prefix: Option<(JobId, usize)>,
    /// The in-flight sequence that will produce the next blocks of this sequence. This sequence is not admitted before that. `None` if
    /// there is no such sequence.
    pub prefix_owner: Option<PrefixOwner>,
}

/// An in-flight sequence that will produce the blocks for which another sequence waits. It computes or receives their KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrefixOwner {
    pub order: Order,
    pub blocks: usize,
    pub waiting_since: Duration,
}

#[derive(Debug, Default)]
struct AccountQueue {
    /// Sequences that had blocks before they were preempted. They precede the sequences in `new`.
    preempted: BTreeSet<Order>,
    /// Sequences that have not had blocks yet, in the order in which they are due.
    new: BTreeSet<Due>,
}

/// A prompt's due value ([`super::fair::due`]) and its age. If several prompts have the same due value, the oldest is first.
pub(super) type Due = (u64, Order);

impl Waiting {
    pub fn push(&mut self, queued: Queued) {
        let sequence = &queued.sequence;
        let account = self.accounts.entry(Arc::clone(&sequence.account)).or_default();
        if sequence.queue_time.is_some() {
            account.preempted.insert(sequence.order);
        } else {
            account.new.insert((sequence.due, sequence.order));
            self.new += 1;
        }
        let previous = self.sequences.insert(sequence.order, queued);
        assert!(previous.is_none(), "a sequence is queued once");
    }

    pub fn remove(&mut self, order: Order) -> Option<Sequence> {
        let Queued { sequence, .. } = self.sequences.remove(&order)?;
        let account = self.accounts.get_mut(&sequence.account).expect("a waiting sequence is in its account's queue");
        let removed = if sequence.queue_time.is_some() {
            account.preempted.remove(&order)
        } else {
            self.new -= 1;
            account.new.remove(&(sequence.due, order))
        };
        assert!(removed, "a waiting sequence is in its account's queue");
        if account.preempted.is_empty() && account.new.is_empty() {
            self.accounts.remove(&sequence.account);
        }
        Some(sequence)
    }

    pub fn remove_job(&mut self, job: JobId) {
        let orders: Vec<Order> = self.sequences.range((job, 0)..=(job, u32::MAX)).map(|(order, _)| *order).collect();
        for order in orders {
            self.remove(order);
        }
    }

    pub fn get(&self, order: Order) -> Option<&Queued> {
        self.sequences.get(&order)
    }

    pub fn get_mut(&mut self, order: Order) -> Option<&mut Queued> {
        self.sequences.get_mut(&order)
    }

    pub fn of_job_mut(&mut self, job: JobId) -> impl Iterator<Item = &mut Sequence> {
        self.sequences.range_mut((job, 0)..=(job, u32::MAX)).map(|(_, queued)| &mut queued.sequence)
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Queued> {
        self.sequences.values()
    }

    pub fn accounts(&self) -> impl Iterator<Item = &Arc<str>> {
        self.accounts.keys()
    }

    pub fn preempted(&self, account: &str) -> impl Iterator<Item = Order> {
        self.accounts.get(account).into_iter().flat_map(|queue| queue.preempted.iter().copied())
    }

    /// Returns the account's first prompt that has never had blocks and is due after `after`. If `after` is `None`, all of the account's prompts that
    /// have never had blocks are considered.
    pub fn next_new(&self, account: &str, after: Option<Due>) -> Option<Due> {
        let queue = self.accounts.get(account)?;
        queue.new.range((after.map_or(Unbounded, Excluded), Unbounded)).next().copied()
    }

    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Returns the number of sequences that have never had blocks.
    pub fn len_new(&self) -> usize {
        self.new
    }

    /// Checks that the queues of the accounts contain exactly the waiting sequences.
    ///
    /// # Errors
    /// Returns the first violation that is found.
    pub fn check_invariants(&self) -> Result<(), Violation> {
        for (order, Queued { sequence, .. }) in &self.sequences {
            ensure(*order == sequence.order, "a waiting sequence is listed under the order of another one")?;
            ensure(sequence.blocks.is_empty(), "a waiting sequence holds blocks")?;
            let listed = self.accounts.get(&sequence.account).is_some_and(|queue| match sequence.queue_time {
                Some(_) => queue.preempted.contains(order),
                None => queue.new.contains(&(sequence.due, *order)),
            });
            ensure(listed, "a waiting sequence is missing in its account's queue")?;
        }
        let new: usize = self.accounts.values().map(|queue| queue.new.len()).sum();
        let preempted: usize = self.accounts.values().map(|queue| queue.preempted.len()).sum();
        let counted = (new, new + preempted) == (self.new, self.sequences.len());
        ensure(counted, "an account's queue has a sequence that does not wait")?;
        let has_entries = |queue: &AccountQueue| !queue.new.is_empty() || !queue.preempted.is_empty();
        ensure(self.accounts.values().all(has_entries), "an account's queue is empty")
    }
}
