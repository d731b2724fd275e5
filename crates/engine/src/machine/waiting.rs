//! The sequences that wait for blocks and for a place in the batch. Waiting sequences hold no blocks.

use super::sequence::{Due, Flow, JobId, Order, Sequence};
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound::{Excluded, Unbounded},
    time::Duration,
};
use tandem_kv::{Violation, ensure};

/// The waiting sequences, in the order of arrival and by flow. A flow has an entry only while at least one of its sequences waits.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    sequences: BTreeMap<Order, Queued>,
    flows: BTreeMap<Flow, FlowQueue>,
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
    /// The in-flight sequence that will produce the next blocks of this sequence; `None` if there is no such sequence. This sequence is
    /// admitted only after these blocks are produced, or after the wait for them has ended.
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
struct FlowQueue {
    /// Sequences that had blocks before they were preempted, by priority. They precede the sequences of their priority in `new`.
    preempted: BTreeSet<(i32, Order)>,
    /// Sequences that have not had blocks yet, in the order in which they are due.
    new: BTreeSet<Due>,
}

impl Waiting {
    pub fn push(&mut self, queued: Queued) {
        let sequence = &queued.sequence;
        let flow = self.flows.entry(sequence.owner().flow()).or_default();
        if sequence.queue_time.is_some() {
            flow.preempted.insert((sequence.priority.within, sequence.order));
        } else {
            flow.new.insert(sequence.due());
            self.new += 1;
        }
        let previous = self.sequences.insert(sequence.order, queued);
        assert!(previous.is_none(), "a sequence is queued once");
    }

    pub fn remove(&mut self, order: Order) -> Option<Sequence> {
        let Queued { sequence, .. } = self.sequences.remove(&order)?;
        let key = sequence.owner().flow();
        let flow = self.flows.get_mut(&key).expect("a waiting sequence is in its flow's queue");
        let removed = if sequence.queue_time.is_some() {
            flow.preempted.remove(&(sequence.priority.within, order))
        } else {
            self.new -= 1;
            flow.new.remove(&sequence.due())
        };
        assert!(removed, "a waiting sequence is in its flow's queue");
        if flow.preempted.is_empty() && flow.new.is_empty() {
            self.flows.remove(&key);
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

    /// Returns the first waiting sequence of a job.
    pub fn first_of_job(&self, job: JobId) -> Option<&Sequence> {
        self.sequences.range((job, 0)..=(job, u32::MAX)).next().map(|(_, queued)| &queued.sequence)
    }

    pub fn of_job_mut(&mut self, job: JobId) -> impl Iterator<Item = &mut Sequence> {
        self.sequences.range_mut((job, 0)..=(job, u32::MAX)).map(|(_, queued)| &mut queued.sequence)
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Queued> {
        self.sequences.values()
    }

    pub fn flows(&self) -> impl Iterator<Item = &Flow> {
        self.flows.keys()
    }

    /// Returns the flow's preempted sequences, each with its priority within the account.
    pub fn preempted(&self, flow: &Flow) -> impl Iterator<Item = (i32, Order)> {
        self.flows.get(flow).into_iter().flat_map(|queue| queue.preempted.iter().copied())
    }

    /// Returns the flow's first prompt that has never had blocks and is due after `after`. If `after` is `None`, all of the flow's prompts that
    /// have never had blocks are considered.
    pub fn next_new(&self, flow: &Flow, after: Option<Due>) -> Option<Due> {
        let queue = self.flows.get(flow)?;
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

    /// Checks that the queues of the flows contain exactly the waiting sequences.
    ///
    /// # Errors
    /// Returns the first violation that is found.
    pub fn check_invariants(&self) -> Result<(), Violation> {
        for (order, Queued { sequence, .. }) in &self.sequences {
            ensure(*order == sequence.order, "a waiting sequence is listed under the order of another one")?;
            ensure(sequence.blocks.is_empty(), "a waiting sequence holds blocks")?;
            let listed = self.flows.get(&sequence.owner().flow()).is_some_and(|queue| match sequence.queue_time {
                Some(_) => queue.preempted.contains(&(sequence.priority.within, *order)),
                None => queue.new.contains(&sequence.due()),
            });
            ensure(listed, "a waiting sequence is missing in its flow's queue")?;
        }
        let new: usize = self.flows.values().map(|queue| queue.new.len()).sum();
        let preempted: usize = self.flows.values().map(|queue| queue.preempted.len()).sum();
        let counted = (new, new + preempted) == (self.new, self.sequences.len());
        ensure(counted, "a flow's queue has a sequence that does not wait")?;
        let has_entries = |queue: &FlowQueue| !queue.new.is_empty() || !queue.preempted.is_empty();
        ensure(self.flows.values().all(has_entries), "a flow's queue is empty")
    }
}
