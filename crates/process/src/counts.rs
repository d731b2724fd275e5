//! Counts of a resource's use, in total and by client.

use std::{collections::HashMap, hash::Hash};

/// The amount of a resource that is in use, in total and by each client.
pub struct Counts<K> {
    /// The amount in use by all clients.
    pub all: usize,
    /// The amount that each client uses. A client that uses nothing has no entry.
    pub by_key: HashMap<K, usize>,
}

impl<K> Default for Counts<K> {
    fn default() -> Self {
        Self { all: 0, by_key: HashMap::new() }
    }
}

impl<K: Clone + Eq + Hash> Counts<K> {
    /// Returns the amount that the client uses.
    pub fn of(&self, key: &K) -> usize {
        self.by_key.get(key).copied().unwrap_or(0)
    }

    /// Adds to the total, and to the client's amount if `key` is given.
    pub fn add(&mut self, key: Option<&K>, count: usize) {
        self.all += count;
        if let Some(key) = key {
            *self.by_key.entry(key.clone()).or_default() += count;
        }
    }

    /// Undoes an earlier [`Counts::add`] with the same arguments.
    pub fn remove(&mut self, key: Option<&K>, count: usize) {
        self.all -= count;
        if let Some(key) = key
            && let Some(left) = self.by_key.get_mut(key)
        {
            *left -= count;
            if *left == 0 {
                self.by_key.remove(key);
            }
        }
    }
}
