//! Divides a shared resource among clients.

use crate::admission::Client;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};
use tokio::sync::Semaphore;

/// Semaphores of one size, one for each client that holds or waits for permits.
pub(crate) struct Shares {
    /// The permits of each client.
    permits: usize,
    /// Never more entries than open connections: unused ones are removed at the next call of [`Shares::of`].
    in_use: Mutex<HashMap<Client, Weak<Semaphore>>>,
}

impl Shares {
    pub(crate) fn new(permits: usize) -> Self {
        Self { permits: permits.min(Semaphore::MAX_PERMITS), in_use: Mutex::default() }
    }

    /// Returns the client's semaphore. It is the same for all calls while the semaphore or one of its permits is held.
    pub(crate) fn of(&self, client: &Client) -> Arc<Semaphore> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_kept_while_a_permit_is_held() {
        let (shares, client) = (Shares::new(1), Client::Account("a".to_owned()));
        let permit = shares.of(&client).try_acquire_owned().expect("its permit is free");
        assert!(shares.of(&client).try_acquire_owned().is_err());
        assert!(shares.of(&Client::Account("b".to_owned())).try_acquire_owned().is_ok(), "another client has its own permits");
        drop(permit);
        assert!(shares.of(&client).try_acquire_owned().is_ok());
        assert_eq!(shares.in_use.lock().len(), 1, "unused shares are removed");
    }
}
