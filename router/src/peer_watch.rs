//! Receives the bookings of one peer router while it is connected.

use crate::{
    cluster::{Cluster, PeerId},
    replication::PeerReceiver,
    watch::{ConnectionEnd, Reason, RemoteProcess, Watch},
};
use std::convert::Infallible;
use tandem_process::Backoff;
use tandem_proto::{
    channel,
    v1::{BookingsRequest, router_client::RouterClient},
};

/// Watches one peer router, which sends a heartbeat every second.
pub(crate) struct PeerWatcher(pub(crate) RemoteProcess);

impl Watch for PeerWatcher {
    fn cluster(&self) -> &Cluster {
        &self.0.cluster
    }

    async fn receive(&self, backoff: &mut Backoff) -> Result<Infallible, ConnectionEnd> {
        let Self(remote) = self;
        let mut router = RouterClient::new(remote.connect().await?).max_decoding_message_size(channel::MESSAGE_BYTES_MAX);
        let (identity, own) = {
            let state = remote.cluster.lock();
            (state.identity(), state.instance_id.clone())
        };
        let request = BookingsRequest { identity: Some(identity) };
        let mut replies = remote.in_time(router.bookings(request)).await??.into_inner();
        let (mut receiver, mut peer) = (PeerReceiver::new(remote.cluster.settings.bookings_max), None);
        loop {
            let reply = remote.in_time(replies.message()).await??.ok_or(ConnectionEnd::Closed)?;
            let update = receiver.take(reply)?;
            if receiver.instance_id.as_deref() == Some(&*own) {
                return Err(ConnectionEnd::Itself);
            }
            let peer = peer.get_or_insert_with(|| ConnectedPeer::new(remote));
            remote.cluster.lock().update_peer(peer.id, update);
            backoff.reset();
        }
    }

    fn on_lost(&self, lost: &ConnectionEnd, reason: Reason) {
        if reason.is_new && !matches!(lost, ConnectionEnd::Itself) {
            tracing::info!(router = %self.0.address, "peer router unavailable, so its bookings are unknown: {}", reason.text);
        }
    }
}

/// A connected peer. Dropping it removes its bookings from the cluster.
struct ConnectedPeer<'a> {
    remote: &'a RemoteProcess,
    id: PeerId,
}

impl<'a> ConnectedPeer<'a> {
    fn new(remote: &'a RemoteProcess) -> Self {
        tracing::info!(router = %remote.address, "peer router connected");
        Self { remote, id: remote.cluster.lock().add_peer(&remote.address) }
    }
}

impl Drop for ConnectedPeer<'_> {
    fn drop(&mut self) {
        self.remote.cluster.remove_peer(self.id);
        tracing::info!(router = %self.remote.address, "peer router disconnected");
    }
}
