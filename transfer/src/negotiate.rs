//! The receiving side: chooses each ticket's path from what both ends offer, and leaves out a path to a peer on which it failed.

use crate::{
    Destination, Lifetime, TransferMode, TransferService, host,
    ipc::IpcReceiver,
    nccl::NcclReceiver,
    path::{Decision, Grant, Offer, ReceivePath},
};
use parking_lot::Mutex;
use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::Duration,
};
use tandem_kv::{KvMemory, Ticket};
use tandem_proto::v1::{self, PrefillDone, TransferCapabilities, transfer_server::TransferServer};
use tokio::time::Instant;

/// Peers that a path knows at a time: more than a cluster has workers of a role.
pub(crate) const PEERS_MAX: usize = 256;

/// After a communicator failed, until the next one to the same peer. NCCL keeps a thread for each whose other end did not join.
const NCCL_BACKOFF: Duration = Duration::from_secs(1);
const BACKOFF_MAX: Duration = Duration::from_secs(300);

/// The paths on which a decode worker receives.
pub struct ReceivePaths {
    /// The preferred ones first; the host path, which is always available, is not among them.
    paths: Vec<Arc<dyn ReceivePath>>,
    destination: Arc<dyn Destination>,
    ipc: Option<IpcReceiver>,
    nccl: Option<NcclReceiver>,
}

/// A ticket's path. Its blocks can be received while this exists.
pub struct Negotiated {
    destination: Arc<dyn Destination>,
    ticket: Ticket,
    label: &'static str,
    grant: Option<Box<dyn Grant>>,
}

impl ReceivePaths {
    /// Makes the paths that the worker may use; `memory` is that of the engine, if devices can reach it.
    pub fn new(destination: impl Destination, memory: Option<Arc<dyn KvMemory>>, mode: TransferMode, lifetime: Lifetime) -> Self {
        let destination: Arc<dyn Destination> = Arc::new(destination);
        let memory = memory.filter(|_| mode == TransferMode::Auto);
        let ipc = memory.clone().map(|memory| {
            // A memory that cannot be opened rarely can later: it is on another host.
            let backoff = Arc::new(Backoff::new(BACKOFF_MAX, BACKOFF_MAX));
            IpcReceiver::new(memory, Arc::clone(&destination), backoff, lifetime.clone())
        });
        let nccl = memory.and_then(|memory| {
            let backoff = Arc::new(Backoff::new(NCCL_BACKOFF, BACKOFF_MAX));
            NcclReceiver::new(memory, Arc::clone(&destination), backoff, lifetime)
        });
        let mut paths: Vec<Arc<dyn ReceivePath>> = Vec::new();
        paths.extend(ipc.clone().map(|ipc| Arc::new(ipc) as _));
        paths.extend(nccl.clone().map(|nccl| Arc::new(nccl) as _));
        Self { paths, destination, ipc, nccl }
    }

    /// Returns the gRPC service that receives blocks.
    pub fn service(&self) -> TransferServer<TransferService> {
        TransferService::new(Arc::clone(&self.destination), self.ipc.clone(), self.nccl.clone()).into_server()
    }

    /// Returns the label of the path that is always available.
    pub fn fallback_label() -> &'static str {
        host::LABEL
    }

    /// Chooses the path of a ticket's blocks, and sets the fields of the ticket for it. `peer` is the prefill worker's instance, `offered` what it
    /// offers. At most one path is prepared for later tickets.
    pub async fn negotiate(
        &self,
        peer: &str,
        offered: Option<&TransferCapabilities>,
        secret: Ticket,
        ticket: &mut v1::Ticket,
    ) -> Negotiated {
        let destination = Arc::clone(&self.destination);
        let mut negotiated = Negotiated { destination, ticket: secret, label: host::LABEL, grant: None };
        for path in offered.into_iter().flat_map(|_| &self.paths) {
            let Some(capabilities) = offered else { break };
            match path.offer(Offer { peer, capabilities, secret, ticket }).await {
                Decision::Accepted(grant) => {
                    (negotiated.label, negotiated.grant) = (path.label(), grant);
                    break;
                }
                Decision::Prepares(grant) => {
                    negotiated.grant = Some(grant);
                    break;
                }
                Decision::Unavailable => {}
            }
        }
        negotiated
    }
}

impl Negotiated {
    /// Returns the path's label in metrics.
    pub fn label(&self) -> &'static str {
        self.label
    }

    /// To be called when the prefill worker has confirmed that all of the ticket's blocks were written: lets the destination use them, and
    /// prepares paths for later tickets.
    pub async fn confirmed(&mut self, done: &PrefillDone) {
        self.destination.confirm(self.ticket).await;
        if let Some(grant) = self.grant.take() {
            grant.confirmed(done);
        }
    }
}

/// The failures of one path, by peer. After each, the path to the peer is left out: for twice as long as the last time, and a random part less,
/// so that peers which failed together do not retry together.
pub(crate) struct Backoff {
    first: Duration,
    max: Duration,
    /// At most [`PEERS_MAX`].
    peers: Mutex<HashMap<String, Failures>>,
}

struct Failures {
    /// Since the last success.
    count: u32,
    retry_at: Instant,
}

impl Backoff {
    pub(crate) fn new(first: Duration, max: Duration) -> Self {
        Self { first, max, peers: Mutex::default() }
    }

    /// Whether the path to this peer is left out now.
    pub(crate) fn is_open(&self, peer: &str) -> bool {
        self.peers.lock().get(peer).is_some_and(|failures| Instant::now() < failures.retry_at)
    }

    pub(crate) fn fail(&self, peer: &str) {
        let (now, mut peers) = (Instant::now(), self.peers.lock());
        if peers.len() >= PEERS_MAX && !peers.contains_key(peer) {
            peers.retain(|_, failures| now < failures.retry_at);
        }
        if peers.len() >= PEERS_MAX && !peers.contains_key(peer) {
            peers.clear();
        }
        let failures = peers.entry(peer.to_owned()).or_insert(Failures { count: 0, retry_at: now });
        failures.count += 1;
        failures.retry_at = now + jittered(self.pause(failures.count));
    }

    pub(crate) fn succeed(&self, peer: &str) {
        self.peers.lock().remove(peer);
    }

    /// Returns the longest pause after so many failures.
    fn pause(&self, failures: u32) -> Duration {
        self.first.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(self.max)
    }
}

/// Returns a random duration between three quarters of `pause` and all of it.
fn jittered(pause: Duration) -> Duration {
    let random = RandomState::new().hash_one(()) as f64 / u64::MAX as f64;
    pause.mul_f64(1.0 - random / 4.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn backoff_doubles_per_failure_up_to_its_limit_and_ends_with_a_success() {
        let backoff = Backoff::new(NCCL_BACKOFF, BACKOFF_MAX);
        let seconds = [1, 2, 3, 8, 9, 10, u32::MAX].map(|failures| backoff.pause(failures).as_secs());
        assert_eq!(seconds, [1, 2, 4, 128, 256, 300, 300]);
        assert!(!backoff.is_open("p"), "it has not failed");
        for seconds in [1, 2, 4] {
            backoff.fail("p");
            assert!(backoff.is_open("p") && !backoff.is_open("another"));
            tokio::time::advance(Duration::from_secs(seconds) * 7 / 10).await;
            assert!(backoff.is_open("p"), "{seconds} s: jitter takes a quarter at most");
            tokio::time::advance(Duration::from_secs(seconds) * 3 / 10).await;
            assert!(!backoff.is_open("p"), "{seconds} s");
        }
        backoff.succeed("p");
        backoff.fail("p");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!backoff.is_open("p"), "it begins again");
    }

    #[tokio::test(start_paused = true)]
    async fn backoff_is_jittered_and_bounded() {
        let pauses: Vec<Duration> = (0..100).map(|_| jittered(BACKOFF_MAX)).collect();
        assert!(pauses.iter().all(|pause| (BACKOFF_MAX * 3 / 4..=BACKOFF_MAX).contains(pause)));
        assert!(pauses.iter().max() > pauses.iter().min());
        let backoff = Backoff::new(NCCL_BACKOFF, BACKOFF_MAX);
        for peer in 0..10 * PEERS_MAX {
            backoff.fail(&peer.to_string());
            assert!(backoff.is_open(&peer.to_string()) && backoff.peers.lock().len() <= PEERS_MAX);
        }
    }
}
