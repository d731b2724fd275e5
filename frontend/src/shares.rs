//! Limits each client's use of a resource.

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Weak},
};
use tokio::sync::Semaphore;

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
