//! Where should this run? Hashes and loads in, placements out; never text or token ids.
//!
//! [`run`] serves `Router` and follows the workers. Its two halves are pure: [`PrefixIndex`] knows which worker holds which
//! block, `route::place` chooses.

mod booked;
mod breaker;
mod cluster;
mod feed;
mod index;
mod metrics;
mod route;
mod service;
mod settings;
#[cfg(test)]
mod simulation;
mod watch;

pub use index::{PrefixIndex, Skipped, WorkerSlot};
pub use settings::{Costs, PolicyKind, PrefillPlace, RouterSettings};

use cluster::Cluster;
use service::RouterService;
use std::{
    collections::{BTreeMap, btree_map::Entry::Vacant},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};
use tandem_node::{
    Metrics, Shutdown,
    discovery::{DiscoveryError, Members},
};
use tandem_proto::{link, v1::router_server::RouterServer};
use tokio::{net::TcpListener, task::JoinSet};
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

/// Routes until the shutdown: new streams are refused when it drains, those that are open may end until it stops.
/// Dropping the future ends the following of workers; streams end with the shutdown.
pub async fn run(
    listener: TcpListener,
    settings: RouterSettings,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), RouterError> {
    let cluster = Arc::new(Cluster::new(settings.clone(), metrics));
    let following = follow(settings.workers.clone().open()?, cluster.clone(), settings.silence_max);
    // A booking is a held stream, and one frontend may hold them all.
    let streams_max = u32::try_from(settings.bookings_max).unwrap_or(u32::MAX);
    let service = RouterServer::new(RouterService { cluster, settings, shutdown: shutdown.clone() })
        .max_decoding_message_size(link::MESSAGE_BYTES_MAX);
    let draining = shutdown.clone();
    let serve = link::server()
        .max_concurrent_streams(streams_max)
        .add_service(service)
        .serve_with_incoming_shutdown(link::incoming(listener), async move { draining.draining().await });
    tokio::select! {
        served = serve => Ok(served?),
        () = shutdown.stopped() => Ok(()),
        never = following => match never {},
    }
}

/// Follows every worker that is listed, for as long as it is. Dropped, it leaves nothing behind.
async fn follow(mut members: Members, cluster: Arc<Cluster>, silence_max: Duration) -> Infallible {
    let mut watchers: BTreeMap<String, JoinSet<()>> = BTreeMap::new();
    loop {
        let listed = members.now();
        if listed.is_empty() {
            tracing::warn!("no workers are listed; every request will be refused");
        }
        watchers.retain(|address, _| listed.contains(address));
        for address in listed {
            let Vacant(place) = watchers.entry(address.clone()) else { continue };
            let endpoint = link::endpoint(address).expect("lists are checked when they are read");
            let watcher = Watcher { cluster: cluster.clone(), address: address.clone(), endpoint, silence_max };
            place.insert(JoinSet::new()).spawn(watcher.run());
        }
        members.changed().await;
        tracing::info!(workers = members.now().len(), "the list of workers has changed");
    }
}
