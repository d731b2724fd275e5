//! Watches one peer router: receives its bookings while it is connected, and reconnects when it is lost.

use crate::{
    cluster::{Cluster, PeerId},
    replication::{PeerReceiver, ReplicationError},
};
use std::{convert::Infallible, sync::Arc, time::Duration};
use tandem_node::{Backoff, retry::error_chain};
use tandem_proto::{
    channel::{self, Network},
    v1::{BookingsRequest, router_client::RouterClient},
};
use tokio::time::{sleep, timeout};
use tonic::{Status, transport::Endpoint};

/// Bounds of the pause between attempts, the same as for workers.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Pause after an address turned out to be this router's own. Another router may have that address some day.
const ITSELF_PAUSE: Duration = Duration::from_secs(30);

/// Why a connection to a peer has ended.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("it cannot be reached")]
    Unreachable(#[from] tonic::transport::Error),
    #[error("it answered with an error")]
    Failed(#[from] Status),
    #[error("it did not answer within {0:?}")]
    Silent(Duration),
    #[error("it closed the stream")]
    Closed,
    #[error("it sent an invalid message")]
    Invalid(#[from] ReplicationError),
    #[error("it is this router itself")]
    Itself,
}

/// Watches the router at this address until dropped.
pub(crate) struct PeerWatcher {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) network: Network,
    pub(crate) address: String,
    pub(crate) endpoint: Endpoint,
    /// Time without messages after which the peer counts as lost. It sends a heartbeat every second.
    pub(crate) silence_max: Duration,
    pub(crate) bookings_max: usize,
}

impl PeerWatcher {
    /// Connects again and again; never returns. Cancel-safe: dropping the future removes the peer's bookings.
    pub(crate) async fn run(self) {
        let mut backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
        loop {
            let lost = match self.connect(&mut backoff).await {
                Ok(never) => match never {},
                Err(lost) => lost,
            };
            if matches!(lost, Lost::Itself) {
                sleep(ITSELF_PAUSE).await;
                continue;
            }
            if backoff.is_new_error(&error_chain(&lost)) {
                tracing::info!(router = %self.address, "bookings of this peer are unknown: {}", error_chain(&lost));
            }
            sleep(backoff.next_delay()).await;
        }
    }

    /// Receives bookings until the connection is lost.
    async fn connect(&self, backoff: &mut Backoff) -> Result<Infallible, Lost> {
        let channel = self.network.connect(&self.endpoint).await?;
        let mut router = RouterClient::new(channel).max_decoding_message_size(channel::MESSAGE_BYTES_MAX);
        let (identity, own) = {
            let state = self.cluster.lock();
            (state.identity(), state.instance_id())
        };
        let request = BookingsRequest { identity: Some(identity) };
        let mut replies = self.in_time(router.bookings(request)).await??.into_inner();
        let (mut receiver, mut peer) = (PeerReceiver::new(self.bookings_max), None);
        loop {
            let reply = self.in_time(replies.message()).await??.ok_or(Lost::Closed)?;
            let update = receiver.take(reply)?;
            if receiver.instance_id() == Some(&*own) {
                return Err(Lost::Itself);
            }
            let peer = peer.get_or_insert_with(|| ConnectedPeer::new(self));
            self.cluster.lock().update_peer(peer.id, update);
            backoff.reset();
        }
    }

    async fn in_time<T>(&self, answer: impl Future<Output = T>) -> Result<T, Lost> {
        timeout(self.silence_max, answer).await.map_err(|_| Lost::Silent(self.silence_max))
    }
}

/// A connected peer. Dropping it removes its bookings from the cluster.
struct ConnectedPeer<'a> {
    watcher: &'a PeerWatcher,
    id: PeerId,
}

impl<'a> ConnectedPeer<'a> {
    fn new(watcher: &'a PeerWatcher) -> Self {
        tracing::info!(router = %watcher.address, "peer router connected");
        Self { watcher, id: watcher.cluster.lock().add_peer(&watcher.address) }
    }
}

impl Drop for ConnectedPeer<'_> {
    fn drop(&mut self) {
        self.watcher.cluster.remove_peer(self.id);
        tracing::info!(router = %self.watcher.address, "peer router disconnected");
    }
}
