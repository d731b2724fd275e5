//! Excludes a transfer path to a peer for some time after a failure.

use parking_lot::Mutex;
use std::{collections::HashMap, time::Duration};
use tandem_process::Backoff;
use tokio::time::Instant;

/// A path keeps the failures of at most this many peers: more than a cluster has workers of one role.
pub(crate) const PEERS_MAX: usize = 256;

/// The longest pause is a random time between this value and twice this value, so it is at most five minutes.
pub(crate) const BACKOFF_MAX: Duration = Duration::from_secs(150);

/// Excludes a transfer path to a peer for some time after each failure. The time grows with each failure until a success, as [`Backoff`] describes.
pub(crate) struct PeerBackoff {
    min: Duration,
    peers: Mutex<HashMap<String, Failed>>,
}

struct Failed {
    backoff: Backoff,
    retry_at: Instant,
}

impl PeerBackoff {
    /// Returns a backoff that excludes no peer yet. The pause after a peer's first failure is between `min` and twice `min`.
    pub(crate) fn new(min: Duration) -> Self {
        Self { min, peers: Mutex::default() }
    }

    pub(crate) fn is_open(&self, peer: &str) -> bool {
        self.peers.lock().get(peer).is_some_and(|failed| Instant::now() < failed.retry_at)
    }

    pub(crate) fn fail(&self, peer: &str) {
        let (now, mut peers) = (Instant::now(), self.peers.lock());
        if peers.len() >= PEERS_MAX && !peers.contains_key(peer) {
            peers.retain(|_, failed| now < failed.retry_at);
            if peers.len() >= PEERS_MAX {
                peers.clear();
            }
        }
        let new = || Failed { backoff: Backoff::new(self.min, BACKOFF_MAX), retry_at: now };
        let failed = peers.entry(peer.to_owned()).or_insert_with(new);
        failed.retry_at = now + failed.backoff.next_delay();
    }

    pub(crate) fn succeed(&self, peer: &str) {
        self.peers.lock().remove(peer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIN: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn backoff_of_a_peer_doubles_with_each_failure_and_ends_with_a_success() {
        let backoff = PeerBackoff::new(MIN);
        assert!(!backoff.is_open("p"), "the peer has not failed");
        for seconds in [1, 2, 4, 8, 16, 32, 64, 128, 150, 150] {
            backoff.fail("p");
            assert!(backoff.is_open("p") && !backoff.is_open("another"));
            tokio::time::advance(Duration::from_secs(seconds) * 99 / 100).await;
            assert!(backoff.is_open("p"), "the backoff lasts at least {seconds} s");
            tokio::time::advance(Duration::from_secs(seconds) * 102 / 100).await;
            assert!(!backoff.is_open("p"), "the backoff lasts at most twice {seconds} s");
        }
        backoff.succeed("p");
        backoff.fail("p");
        tokio::time::advance(MIN * 2).await;
        assert!(!backoff.is_open("p"), "the backoff begins again with the shortest pause");
    }

    #[tokio::test(start_paused = true)]
    async fn paths_to_failed_peers_are_retried_at_different_times_and_the_number_of_peers_is_bounded() {
        let backoff = PeerBackoff::new(BACKOFF_MAX);
        for peer in 0..10 * PEERS_MAX {
            backoff.fail(&peer.to_string());
            assert!(backoff.is_open(&peer.to_string()) && backoff.peers.lock().len() <= PEERS_MAX);
        }
        let peers = backoff.peers.lock();
        let retries = || peers.values().map(|failed| failed.retry_at);
        assert!(retries().min() < retries().max());
    }
}
