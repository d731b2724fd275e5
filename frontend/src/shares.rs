//! One client's part of something that all clients share.

use crate::admission::Client;
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};
use tokio::sync::Semaphore;

/// Semaphores of one size, one for each client that holds permits or waits for some.
pub(crate) struct Shares {
    /// Of each client.
    permits: usize,
    /// Never more entries than open connections: those that are not in use go with the next call of [`Shares::of`].
    in_use: Mutex<HashMap<Client, Weak<Semaphore>>>,
}

impl Shares {
    pub(crate) fn new(permits: usize) -> Self {
        Self { permits: permits.min(Semaphore::MAX_PERMITS), in_use: Mutex::default() }
    }

    /// The client's share. It is the same for all calls as long as one of them keeps it, or a permit of it.
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
    fn share_is_kept_as_long_as_a_permit_of_it() {
        let (shares, client) = (Shares::new(1), Client::Account("a".to_owned()));
        let permit = shares.of(&client).try_acquire_owned().expect("none is taken");
        assert!(shares.of(&client).try_acquire_owned().is_err());
        assert!(shares.of(&Client::Account("b".to_owned())).try_acquire_owned().is_ok(), "others have shares of their own");
        drop(permit);
        assert!(shares.of(&client).try_acquire_owned().is_ok());
        assert_eq!(shares.in_use.lock().len(), 1, "shares that are not in use are forgotten");
    }
}
