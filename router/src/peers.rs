//! Follows one other router: what it has booked, for as long as it lives, and again when it returns.

use crate::{
    cluster::{Cluster, PeerId},
    exchange::{Broken, Intake},
};
use std::{convert::Infallible, sync::Arc, time::Duration};
use tandem_node::{Tries, retry::complaint};
use tandem_proto::{
    channel::{self, Network},
    v1::{BookingsRequest, router_client::RouterClient},
};
use tokio::time::{sleep, timeout};
use tonic::{Status, transport::Endpoint};

/// Pauses between tries, as with workers.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// A router's own address in the list may be another router's one day.
const ITSELF_PAUSE: Duration = Duration::from_secs(30);

/// Why a router is not followed any more.
#[derive(Debug, thiserror::Error)]
enum Lost {
    #[error("it cannot be reached")]
    Unreachable(#[from] tonic::transport::Error),
    #[error("it answered with an error")]
    Failed(#[from] Status),
    #[error("it did not answer in {0:?}")]
    Silent(Duration),
    #[error("it ended the stream")]
    Ended,
    #[error("what it says cannot be right")]
    Broken(#[from] Broken),
    #[error("it is this router itself")]
    Itself,
}

/// Follows the router at this address until dropped.
pub(crate) struct Peering {
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) network: Network,
    pub(crate) address: String,
    pub(crate) endpoint: Endpoint,
    /// How long the router may be silent: it says something every second.
    pub(crate) silence_max: Duration,
    pub(crate) bookings_max: usize,
}

impl Peering {
    /// Never returns. Dropped at any await, it leaves nothing behind.
    pub(crate) async fn run(self) {
        let mut tries = Tries::new(PAUSE_MIN, PAUSE_MAX);
        loop {
            let lost = match self.follow(&mut tries).await {
                Ok(never) => match never {},
                Err(lost) => lost,
            };
            if matches!(lost, Lost::Itself) {
                sleep(ITSELF_PAUSE).await;
                continue;
            }
            if tries.is_news(&complaint(&lost)) {
                tracing::info!(router = %self.address, "its bookings are not known: {}", complaint(&lost));
            }
            sleep(tries.pause()).await;
        }
    }

    /// One stream's life.
    async fn follow(&self, tries: &mut Tries) -> Result<Infallible, Lost> {
        let channel = self.network.connect(&self.endpoint).await?;
        let mut router = RouterClient::new(channel).max_decoding_message_size(channel::MESSAGE_BYTES_MAX);
        let (identity, own) = {
            let state = self.cluster.lock();
            (state.identity(), state.instance_id())
        };
        let request = BookingsRequest { identity: Some(identity) };
        let mut replies = self.in_time(router.bookings(request)).await??.into_inner();
        let (mut intake, mut peer) = (Intake::new(self.bookings_max), None);
        loop {
            let reply = self.in_time(replies.message()).await??.ok_or(Lost::Ended)?;
            let heard = intake.take(reply)?;
            if intake.instance_id() == Some(&*own) {
                return Err(Lost::Itself);
            }
            let peer = peer.get_or_insert_with(|| Peer::new(self));
            self.cluster.lock().peer_told(peer.id, heard);
            tries.reset();
        }
    }

    async fn in_time<T>(&self, answer: impl Future<Output = T>) -> Result<T, Lost> {
        timeout(self.silence_max, answer).await.map_err(|_| Lost::Silent(self.silence_max))
    }
}

/// A router that is followed. Dropping it takes its bookings out of the cluster.
struct Peer<'a> {
    peering: &'a Peering,
    id: PeerId,
}

impl<'a> Peer<'a> {
    fn new(peering: &'a Peering) -> Self {
        tracing::info!(router = %peering.address, "router joined");
        Self { peering, id: peering.cluster.lock().peer_joined(&peering.address) }
    }
}

impl Drop for Peer<'_> {
    fn drop(&mut self) {
        self.peering.cluster.forget_peer(self.id);
        tracing::info!(router = %self.peering.address, "router left");
    }
}
