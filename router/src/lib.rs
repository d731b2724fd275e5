//! Where should this run? Hashes and loads in, placements out; never text or token ids.
//!
//! [`run`] serves `Router` and follows the workers. Its two halves are pure: [`PrefixIndex`] knows which worker holds which
//! block, `route::place` chooses.

mod booked;
mod breaker;
mod cluster;
mod exchange;
mod feed;
mod index;
mod metrics;
mod peers;
mod rates;
mod route;
mod service;
mod settings;
#[cfg(test)]
mod simulation;
mod watch;

pub use index::{PrefixIndex, Skipped, WorkerSlot};
pub use settings::{Costs, PolicyKind, PrefillPlace, RouterSettings};

use cluster::Cluster;
use peers::Peering;
use service::RouterService;
use std::{
    collections::{BTreeMap, btree_map::Entry::Vacant},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};
use tandem_node::{
    Metrics, Shutdown,
    discovery::{DiscoveryError, Members, Workers},
};
use tandem_proto::{
    channel::{self, Listener},
    v1::router_server::RouterServer,
};
use tokio::task::JoinSet;
use tonic::{service::Routes, transport::Endpoint};
use watch::Watcher;

/// Why a router cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// The list of workers cannot be used.
    #[error(transparent)]
    Workers(#[from] DiscoveryError),
    /// The socket failed.
    #[error("the router's server failed")]
    Serve(#[from] tonic::transport::Error),
}

/// Workers that were listed at the start and have not answered after this are not waited for: longer than it takes to find
/// that a host is not there.
const AWAIT_WORKERS: Duration = Duration::from_secs(5);

/// Routes until the shutdown: new streams are refused when it drains, and frontends are asked to take those that are open
/// elsewhere; they may end until it stops. Dropping the future ends the following of workers; streams end with the shutdown.
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
    let alone = matches!(&settings.peers, Workers::List(list) if list.is_empty());
    let (silence_max, bookings_max) = (settings.silence_max, settings.bookings_max);
    let (cluster_of, network_of, broker) = (&cluster, listener.network().clone(), settings.broker.clone());
    let workers = follow(
        workers,
        Followed {
            who: "workers",
            one: |address: String, endpoint| {
                cluster_of.lock().await_worker(&address);
                let (cluster, network, broker) = (cluster_of.clone(), network_of.clone(), broker.clone());
                Watcher { cluster, network, address, endpoint, silence_max, broker }.run()
            },
            is_there: |address: &str| cluster_of.lock().has_member_at(address),
            left: || cluster_of.left(),
        },
    );
    let peers = follow(
        peers,
        Followed {
            who: "routers",
            one: |address: String, endpoint| {
                let (cluster, network) = (cluster_of.clone(), network_of.clone());
                Peering { cluster, network, address, endpoint, silence_max, bookings_max }.run()
            },
            is_there: |address: &str| cluster_of.lock().has_peer_at(address),
            left: || cluster_of.peer_left(),
        },
    );
    let patience = async {
        tokio::time::sleep(AWAIT_WORKERS).await;
        cluster.lock().await_nobody();
        std::future::pending().await
    };
    // A booking is a held stream, and one frontend may hold them all.
    let streams_max = u32::try_from(settings.bookings_max).unwrap_or(u32::MAX);
    let key = listener.network().key().clone();
    let service = RouterService { cluster: cluster.clone(), settings, key, alone, shutdown: shutdown.clone() };
    let service = RouterServer::new(service).max_decoding_message_size(channel::MESSAGE_BYTES_MAX);
    let draining = shutdown.clone();
    let server = channel::server().max_concurrent_streams(streams_max);
    let on_refused = cluster.lock().count_unauthenticated();
    let serve = listener.serve(server, Routes::new(service), on_refused, async move { draining.draining().await });
    tokio::select! {
        biased;
        () = shutdown.stopped() => Ok(()),
        // Before anybody is served, so that it is known who is waited for.
        never = workers => match never {},
        never = peers => match never {},
        never = patience => never,
        served = serve => Ok(served?),
    }
}

/// Whom to follow.
struct Followed<One, IsThere, Left> {
    /// For people.
    who: &'static str,
    /// Follows one of them until it is dropped.
    one: One,
    /// Whether who is at this address has joined.
    is_there: IsThere,
    /// Resolves when somebody has left.
    left: Left,
}

/// Follows everybody who is listed, for as long as they are. One that has joined also stays when it is listed no more, until it
/// leaves, if the list only hints. Dropped, it leaves nothing behind.
async fn follow<F, L>(
    mut members: Members,
    followed: Followed<impl Fn(String, Endpoint) -> F, impl Fn(&str) -> bool, impl Fn() -> L>,
) -> Infallible
where
    F: Future<Output = ()> + Send + 'static,
    L: Future<Output = ()>,
{
    let Followed { who, one, is_there, left } = followed;
    let mut tasks: BTreeMap<String, JoinSet<()>> = BTreeMap::new();
    loop {
        let (listed, hints) = (members.now(), members.are_hints());
        tasks.retain(|address, _| listed.contains(address) || (hints && is_there(address)));
        for address in listed {
            let Vacant(place) = tasks.entry(address.clone()) else { continue };
            let endpoint = channel::endpoint(address).expect("lists are checked when they are read");
            place.insert(JoinSet::new()).spawn(one(address.clone(), endpoint));
        }
        tokio::select! {
            biased;
            () = members.changed() => tracing::info!(listed = members.now().len(), "the list of {who} has changed"),
            () = left(), if hints => {}
        }
    }
}
