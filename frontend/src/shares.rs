//! Counts and limits each client's use of a resource.

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Weak},
};
use tokio::sync::Semaphore;

/// The amount of a resource that is in use, in total and by each client.
pub(crate) struct Counts<K> {
    pub(crate) all: usize,
    /// The amount that each client uses. A client that uses nothing has no entry.
    pub(crate) by_key: HashMap<K, usize>,
}

impl<K> Default for Counts<K> {
    fn default() -> Self {
        Self { all: 0, by_key: HashMap::new() }
    }
}

impl<K: Clone + Eq + Hash> Counts<K> {
    pub(crate) fn of(&self, key: &K) -> usize {
        self.by_key.get(key).copied().unwrap_or(0)
    }

    pub(crate) fn add(&mut self, key: Option<&K>, count: usize) {
        self.all += count;
        if let Some(key) = key {
            *self.by_key.entry(key.clone()).or_default() += count;
        }
    }

    /// Reverts an earlier [`Counts::add`].
    pub(crate) fn remove(&mut self, key: Option<&K>, count: usize) {
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

/// A semaphore for each client that holds permits of it or waits for them. All semaphores have the same number of permits.
pub(crate) struct Shares<K> {
    permits: usize,
    /// The semaphores in use, by client. Unused semaphores are removed at the next call of [`Shares::of`], so there are never more
    /// semaphores than open connections.
    in_use: Mutex<HashMap<K, Weak<Semaphore>>>,
}

impl<K: Clone + Eq + Hash> Shares<K> {
    pub(crate) fn new(permits: usize) -> Self {
        Self { permits: permits.min(Semaphore::MAX_PERMITS), in_use: Mutex::default() }
    }

    /// Returns the client's semaphore. While the semaphore or one of its permits is held, further calls return the same semaphore.
    pub(crate) fn of(&self, client: &K) -> Arc<Semaphore> {
        let mut in_use = self.in_use.lock();
        in_use.retain(|_, share| share.strong_count() > 0);
        if let Some(share) = in_use.get(client).and_then(Weak::upgrade) {
            return share;
        }
        let share = Arc::new(Semaphore::new(self.permits));
        in_use.insert(client.clone(), Arc::downgrade(&share));
        share
    }
}
