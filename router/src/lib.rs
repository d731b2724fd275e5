//! Chooses the workers of each request: sequence hashes and loads in, placements out; never text or token ids.
//!
//! [`run`] serves the gRPC service `Router` and watches the workers. Two parts are pure: [`PrefixIndex`] knows which worker has
//! cached which block, and `route::place` chooses.

mod breaker;
mod cluster;
mod index;
mod metrics;
mod peer_watch;
mod rates;
mod replication;
mod route;
mod service;
mod settings;
mod subscription;
#[cfg(test)]
mod tests;
mod worker_bookings;
mod worker_watch;

pub use index::{PrefixIndex, Skipped, WorkerSlot};
pub use settings::{Costs, PolicyKind, PrefillPlace, RouterSettings};

use cluster::Cluster;
use peer_watch::PeerWatcher;
use service::RouterService;
use std::{
    collections::{BTreeMap, btree_map::Entry::Vacant},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};
use tandem_node::{
    Metrics, Shutdown,
    discovery::{DiscoveryError, MemberSource, Members},
};
use tandem_proto::{
    channel::{self, Listener, Network},
    v1::router_server::RouterServer,
};
use tokio::task::JoinSet;
use tonic::{service::Routes, transport::Endpoint};
use worker_watch::WorkerWatcher;

/// Why a router cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// The list of workers or peers cannot be used.
    #[error(transparent)]
    Workers(#[from] DiscoveryError),
    /// The socket failed.
    #[error("the router's server failed")]
    Serve(#[from] tonic::transport::Error),
}

/// How long a router that has just started waits for the workers that are listed: longer than it takes to find that a host is
/// unreachable.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(5);

/// Routes until the shutdown. While it drains, new streams are refused, and frontends are asked to move the open ones to other
/// routers; streams that stay open end when it stops. Dropping the future ends the watching of workers and peers.
///
/// # Errors
/// If the lists of workers or peers are invalid, or the server fails.
pub async fn run(
    listener: impl Into<Listener>,
    settings: RouterSettings,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), RouterError> {
    let listener = listener.into();
    let mut settings = settings;
    settings.identity.key_fingerprint = listener.network().key().fingerprint().to_owned();
    let cluster = Arc::new(Cluster::new(settings.clone(), metrics.clone()));
    let (workers, peers) = (settings.workers.clone().open(&metrics)?, settings.peers.clone().open(&metrics)?);
    let has_peers = !matches!(&settings.peers, MemberSource::List(list) if list.is_empty());
    let network = listener.network().clone();
    let workers = watch_workers(workers, &cluster, &network, &settings);
    let peers = watch_peers(peers, &cluster, &network, &settings);
    let startup_timeout = async {
        tokio::time::sleep(STARTUP_TIMEOUT).await;
        cluster.lock().stop_expecting_workers();
        std::future::pending().await
    };
    // A booking is a held stream, and one frontend may hold them all.
    let streams_max = u32::try_from(settings.bookings_max).unwrap_or(u32::MAX);
    let service = RouterService {
        cluster: cluster.clone(),
        settings: settings.clone(),
        key: network.key().clone(),
        has_peers,
        shutdown: shutdown.clone(),
    };
    let service = RouterServer::new(service).max_decoding_message_size(channel::MESSAGE_BYTES_MAX);
    let draining = shutdown.clone();
    let server = channel::server().max_concurrent_streams(streams_max);
    let on_refused = cluster.lock().count_unauthenticated();
    let serve = listener.serve(server, Routes::new(service), on_refused, async move { draining.draining().await });
    tokio::select! {
        biased;
        () = shutdown.stopped() => Ok(()),
        // Polled before the server, so that it is known which workers are expected when the first request arrives.
        never = workers => match never {},
        never = peers => match never {},
        never = startup_timeout => never,
        served = serve => Ok(served?),
    }
}

/// Watches every listed worker. One that has joined stays until it leaves even when it is not listed any more, if the list is
/// only advisory. Cancel-safe: dropping the future ends all watching.
async fn watch_workers(mut listed: Members, cluster: &Arc<Cluster>, network: &Network, settings: &RouterSettings) -> Infallible {
    let mut watchers = Watchers::default();
    loop {
        let is_member = |address: &str| cluster.lock().members.is_member(address);
        watchers.update(&listed, is_member, |address, endpoint| {
            cluster.lock().expect_worker(&address);
            let (cluster, network, broker) = (cluster.clone(), network.clone(), settings.broker.clone());
            WorkerWatcher { cluster, network, address, endpoint, silence_max: settings.silence_max, broker }.run()
        });
        tokio::select! {
            biased;
            () = listed.changed() => tracing::info!(listed = listed.now().len(), "list of workers changed"),
            () = cluster.member_left(), if listed.are_advisory() => {}
        }
    }
}

/// Watches every listed peer router, by the same rules as [`watch_workers`].
async fn watch_peers(mut listed: Members, cluster: &Arc<Cluster>, network: &Network, settings: &RouterSettings) -> Infallible {
    let mut watchers = Watchers::default();
    let &RouterSettings { silence_max, bookings_max, .. } = settings;
    loop {
        let is_connected = |address: &str| cluster.lock().peers.is_connected(address);
        watchers.update(&listed, is_connected, |address, endpoint| {
            let (cluster, network) = (cluster.clone(), network.clone());
            PeerWatcher { cluster, network, address, endpoint, silence_max, bookings_max }.run()
        });
        tokio::select! {
            biased;
            () = listed.changed() => tracing::info!(listed = listed.now().len(), "list of routers changed"),
            () = cluster.peer_left(), if listed.are_advisory() => {}
        }
    }
}

/// One task for each watched address. Dropping it aborts them.
#[derive(Default)]
struct Watchers(BTreeMap<String, JoinSet<()>>);

impl Watchers {
    /// Starts watching new addresses, and stops watching those that are not listed any more, unless the list is advisory and
    /// the process is connected.
    fn update<F>(&mut self, listed: &Members, is_connected: impl Fn(&str) -> bool, watch: impl Fn(String, Endpoint) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (addresses, advisory) = (listed.now(), listed.are_advisory());
        self.0.retain(|address, _| addresses.contains(address) || (advisory && is_connected(address)));
        for address in addresses {
            let Vacant(entry) = self.0.entry(address.clone()) else { continue };
            let endpoint = channel::endpoint(address).expect("lists are checked when they are read");
            entry.insert(JoinSet::new()).spawn(watch(address.clone(), endpoint));
        }
    }
}
