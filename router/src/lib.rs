//! Where should this run? Hashes and loads in, placements out; never text or token ids.
//!
//! [`run`] serves `Router` and follows the workers. Its two halves are pure: [`PrefixIndex`] knows which worker holds which
//! block, `route::place` chooses.

mod booked;
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
use std::sync::Arc;
use tandem_node::{Metrics, Shutdown};
use tandem_proto::{
    link::{self, InvalidAddress},
    v1::router_server::RouterServer,
};
use tokio::{net::TcpListener, task::JoinSet};
use watch::Watcher;

/// Why a router cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// An address in the settings is not one.
    #[error("the worker address {address:?} cannot be used; write host:port")]
    WorkerAddress {
        /// As it was given.
        address: String,
        /// What is wrong with it.
        source: InvalidAddress,
    },
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
    if settings.workers.is_empty() {
        tracing::warn!("the router was given no workers; it will refuse every request");
    }
    let cluster = Arc::new(Cluster::new(settings.clone(), metrics));
    let mut watchers = JoinSet::new();
    for address in &settings.workers {
        let endpoint =
            link::endpoint(address).map_err(|source| RouterError::WorkerAddress { address: address.clone(), source })?;
        let (cluster, address) = (cluster.clone(), address.clone());
        watchers.spawn(Watcher { cluster, address, endpoint, silence_max: settings.silence_max }.run());
    }
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
    }
}
