//! The sequences that wait for blocks and a place in the steps. They hold nothing.

use super::sequence::{JobId, Order, Sequence};
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound::{Excluded, Unbounded},
    sync::Arc,
};

/// By arrival, and by account. An account has an entry only while something of it waits.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    sequences: BTreeMap<Order, Sequence>,
    accounts: BTreeMap<Arc<str>, Line>,
    new: usize,
}

/// What waits of one account.
#[derive(Debug, Default)]
struct Line {
    /// Have had blocks before, and go before those that have not.
    again: BTreeSet<Order>,
    /// Have not had blocks yet, in the order in which they are due.
    new: BTreeSet<Due>,
}

/// When a prompt is due ([`super::fair::due`]); of equal ones the older goes first.
pub(super) type Due = (u64, Order);

impl Waiting {
    pub fn push(&mut self, sequence: Sequence) {
        let line = self.accounts.entry(Arc::clone(&sequence.account)).or_default();
        if sequence.queued.is_some() {
            line.again.insert(sequence.order);
        } else {
            line.new.insert((sequence.due, sequence.order));
            self.new += 1;
        }
        let before = self.sequences.insert(sequence.order, sequence);
        assert!(before.is_none(), "a sequence waits once");
    }

    pub fn remove(&mut self, order: Order) -> Option<Sequence> {
        let sequence = self.sequences.remove(&order)?;
        let line = self.accounts.get_mut(&sequence.account).expect("what waits is in the line of its account");
        let listed = if sequence.queued.is_some() {
            line.again.remove(&order)
        } else {
            self.new -= 1;
            line.new.remove(&(sequence.due, order))
        };
        assert!(listed, "what waits is in the line of its account");
        if line.again.is_empty() && line.new.is_empty() {
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

    pub fn get(&self, order: Order) -> Option<&Sequence> {
        self.sequences.get(&order)
    }

    pub fn get_mut(&mut self, order: Order) -> Option<&mut Sequence> {
        self.sequences.get_mut(&order)
    }

    pub fn of_job_mut(&mut self, job: JobId) -> impl Iterator<Item = &mut Sequence> {
        self.sequences.range_mut((job, 0)..=(job, u32::MAX)).map(|(_, sequence)| sequence)
    }

    /// In the order of their arrival.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Sequence> {
        self.sequences.values()
    }

    pub fn accounts(&self) -> impl Iterator<Item = &Arc<str>> {
        self.accounts.keys()
    }

    /// Those of an account that have had blocks before.
    pub fn again(&self, account: &str) -> impl Iterator<Item = Order> {
        self.accounts.get(account).into_iter().flat_map(|line| line.again.iter().copied())
    }

    /// Of an account's prompts that have not had blocks yet, the next one that is due after `after`.
    pub fn next_new(&self, account: &str, after: Option<Due>) -> Option<Due> {
        let line = self.accounts.get(account)?;
        line.new.range((after.map_or(Unbounded, Excluded), Unbounded)).next().copied()
    }

    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Those that have not had blocks yet.
    pub fn len_new(&self) -> usize {
        self.new
    }

    /// Panics with a sentence if the lines are not those of the sequences.
    #[cfg(test)]
    pub fn check_invariants(&self) {
        for (order, sequence) in &self.sequences {
            assert_eq!(*order, sequence.order, "each is found by its order");
            assert!(sequence.blocks.is_empty(), "what waits holds no blocks");
            let line = &self.accounts[&sequence.account];
            let listed =
                if sequence.queued.is_some() { line.again.contains(order) } else { line.new.contains(&(sequence.due, *order)) };
            assert!(listed, "each is in the line of its account");
        }
        let new: usize = self.accounts.values().map(|line| line.new.len()).sum();
        let again: usize = self.accounts.values().map(|line| line.again.len()).sum();
        assert_eq!((new, new + again), (self.new, self.sequences.len()), "the lines have nothing else");
        assert!(self.accounts.values().all(|line| !line.new.is_empty() || !line.again.is_empty()), "no line is empty");
    }
}
