//! Listed workers that are not members.

use std::collections::{BTreeMap, BTreeSet};
use tandem_proto::v1::UnavailableWorker;

/// Listed workers that are not members: those that could not be reached or must not join, and those that have not answered yet.
#[derive(Default)]
pub(crate) struct UnavailableWorkers {
    by_address: BTreeMap<String, UnavailableWorker>,
    /// Workers that were listed when the router started and that have neither joined nor failed to join since.
    expected: BTreeSet<String>,
    /// Whether the starting router has yet to read the list of workers from etcd.
    unlisted: bool,
    /// Whether the start is over: the router no longer waits for workers.
    started: bool,
}

impl UnavailableWorkers {
    /// Records that the starting router waits for the answer of this listed worker. Until every worker that was listed at the start has
    /// answered, this router knows fewer caches than a router that has been up for longer. The router does not wait for workers that are
    /// listed after the start.
    pub(crate) fn expect(&mut self, address: &str) {
        if !self.started {
            self.expected.insert(address.to_owned());
        }
    }

    /// Records that the starting router waits for the list of workers.
    pub(crate) fn expect_list(&mut self) {
        self.unlisted = true;
    }

    /// Records that the list of workers was read. The caller has already called [`Self::expect`] for each worker in it.
    pub(crate) fn on_listed(&mut self) {
        self.unlisted = false;
    }

    pub(crate) fn stop_expecting(&mut self) {
        self.expected.clear();
        (self.unlisted, self.started) = (false, true);
    }

    pub(crate) fn is_starting(&self) -> bool {
        self.unlisted || !self.expected.is_empty()
    }

    /// Records that a listed worker could not be reached or must not join, and why. If the new entry has no worker id, the recorded id
    /// stays.
    pub(crate) fn insert(&mut self, mut worker: UnavailableWorker) {
        if let Some(before) = self.by_address.get_mut(&worker.address).filter(|_| worker.worker_id.is_empty()) {
            worker.worker_id = std::mem::take(&mut before.worker_id);
        }
        self.remove(&worker.address);
        self.by_address.insert(worker.address.clone(), worker);
    }

    /// Removes this address from the unavailable workers, because its worker has joined or is no longer listed.
    pub(crate) fn remove(&mut self, address: &str) {
        self.started |= self.expected.remove(address) && self.expected.is_empty();
        self.by_address.remove(address);
    }

    /// Returns why the worker at this address must not join; empty if it may, or was not reached.
    pub(crate) fn refusal(&self, address: &str) -> String {
        let worker = self.by_address.get(address).filter(|worker| worker.incompatible);
        worker.map(|worker| worker.reason.clone()).unwrap_or_default()
    }

    /// Returns the workers that could not be reached or must not join, with their reasons.
    pub(super) fn values(&self) -> impl ExactSizeIterator<Item = &UnavailableWorker> {
        self.by_address.values()
    }

    /// Returns the number of listed workers that are not members.
    pub(super) fn len(&self) -> usize {
        self.by_address.len() + self.expected.len()
    }
}
