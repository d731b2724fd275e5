//! Chooses the workers of each request, from sequence hashes and loads. The router never sees text or token ids.
//!
//! [`run`] serves the gRPC service `Router` and watches the workers. Two parts are pure: [`PrefixIndex`] knows which worker has
//! cached which block, and `route::place` chooses. [`VirtualRouter`] makes the same placements in virtual time, for simulations.

mod answers;
mod applied;
mod breaker;
mod cluster;
mod demand;
mod index;
mod metrics;
mod peer_watch;
mod places;
mod predictions;
mod prefill_queue;
mod rates;
mod replication;
mod route;
mod service;
mod settings;
mod subscription;
mod wanted;
mod watch;
mod worker_bookings;
mod worker_watch;

pub use cluster::{VirtualBooking, VirtualPlacement, VirtualReport, VirtualRequest, VirtualRouter, VirtualWorker};
pub use index::{PrefixIndex, Replacement, Skipped, WorkerSlot};
pub use route::{Candidate, WorkerRole};
pub use settings::{Costs, PolicyKind, PrefillPlace, RouterSettings, ServiceLevels};
pub use tandem_proto::{Cause, Causes, Funnel};
pub use wanted::{WANTED_INTERVAL, WantedWorkers};

use cluster::{Cluster, UnavailableWorkers};
use peer_watch::PeerWatcher;
use service::RouterService;
use std::{
    collections::{BTreeMap, btree_map::Entry::Vacant},
    convert::Infallible,
    sync::Arc,
    time::Duration,
};
use tandem_process::{
    Metrics, Shutdown,
    discovery::{DiscoveryError, Members},
    supervise,
};
use tandem_proto::{
    channel::{self, Listener, PeerRole},
    v1::router_server::RouterServer,
};
use tokio::{
    sync::Notify,
    task::JoinSet,
    time::{Instant, MissedTickBehavior},
};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use watch::{RemoteProcess, Watch};
use worker_watch::WorkerWatcher;

/// The reason that a router cannot run.
#[derive(Debug, thiserror::Error)]
pub enum RouterError {
    /// The list of workers or peers cannot be read, or is invalid.
    #[error(transparent)]
    Workers(#[from] DiscoveryError),
    /// Serving on the socket failed.
    #[error("the router's gRPC server failed")]
    Serve(#[from] tonic::transport::Error),
}

/// How long a router that has just started waits for the listed workers before it places requests without them. A connection to an
/// unreachable host fails sooner.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a draining router checks whether another router is still connected.
const RELEASE_POLL: Duration = Duration::from_millis(50);

/// Routes until the shutdown. While the router drains, new streams are refused, and frontends are asked to move open streams to other
/// routers. Without another router, the streams end after this message, because running requests need no router. Dropping the
/// future stops watching workers and peers.
///
/// # Errors
/// The lists of workers or peers are invalid, or the server fails.
pub async fn run(
    listener: impl Into<Listener>,
    mut settings: RouterSettings,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), RouterError> {
    let listener = listener.into();
    let network = listener.network().clone();
    settings.identity.key_fingerprint = network.key().fingerprint().to_owned();
    let (workers, peers) = (settings.workers.clone().open(&metrics)?, settings.peers.clone().open(&metrics)?);
    // Each booking has an open stream, and all bookings may come from one frontend.
    let streams_max = u32::try_from(settings.bookings_max).unwrap_or(u32::MAX);
    let cluster = Arc::new(Cluster::new(settings, metrics));
    let remote = {
        let (cluster, network) = (cluster.clone(), network.clone());
        move |address: &str, expected| RemoteProcess {
            cluster: cluster.clone(),
            network: network.expecting(expected),
            address: address.to_owned(),
            endpoint: channel::endpoint(address).expect("member lists are checked when they are read"),
        }
    };
    let is_member = |address: &str| cluster.lock().members.is_member(address);
    let watch_worker = {
        let remote = remote.clone();
        move |address: &str| {
            let remote = remote(address, &[PeerRole::PrefillWorker, PeerRole::DecodeWorker]);
            remote.cluster.lock().update_unavailable(|workers| workers.expect(address));
            WorkerWatcher(remote).run()
        }
    };
    if workers.are_advisory() {
        cluster.lock().update_unavailable(UnavailableWorkers::expect_list);
    }
    let on_listed = || cluster.lock().update_unavailable(UnavailableWorkers::on_listed);
    let workers = watch_all("workers", workers, &cluster.member_left, is_member, watch_worker, on_listed);
    let is_connected = |address: &str| cluster.lock().peers.is_connected(address);
    let watch_peer = move |address: &str| PeerWatcher(remote(address, &[PeerRole::Router])).run();
    let peers = watch_all("routers", peers, &cluster.peer_left, is_connected, watch_peer, || {});
    let released = CancellationToken::new();
    let service = RouterService {
        cluster: cluster.clone(),
        key: network.key().clone(),
        since: Instant::now(),
        shutdown: shutdown.clone(),
        released: released.clone(),
    };
    let service = RouterServer::new(service).max_decoding_message_size(channel::MESSAGE_BYTES_MAX);
    let server = channel::server().max_concurrent_streams(streams_max);
    let on_refused = cluster.lock().count_unauthenticated();
    let serve = listener.serve(server, Routes::new(service), on_refused, shutdown.draining());
    tokio::select! {
        biased;
        () = shutdown.stopped() => Ok(()),
        // The watchers are polled before the server. So the expected workers are known when the first request arrives.
        never = workers => match never {},
        never = peers => match never {},
        never = end_startup(&cluster) => match never {},
        never = cluster.sweep() => match never {},
        never = plan_workers(&cluster) => match never {},
        never = release(&cluster, &shutdown, &released) => match never {},
        served = serve => Ok(served?),
    }
}

/// Ends the start of the router after [`STARTUP_TIMEOUT`], even if listed workers have not answered yet.
async fn end_startup(cluster: &Cluster) -> Infallible {
    tokio::time::sleep(STARTUP_TIMEOUT).await;
    cluster.lock().update_unavailable(UnavailableWorkers::stop_expecting);
    std::future::pending().await
}

/// Decides regularly how many workers are wanted.
async fn plan_workers(cluster: &Cluster) -> Infallible {
    let mut interval = tokio::time::interval(WANTED_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        cluster.lock().plan_workers();
    }
}

/// Once the router drains, waits until no other router is connected, and then ends the streams of all requests. While another router is
/// connected, frontends book running requests with it, and close their streams to this router.
async fn release(cluster: &Cluster, shutdown: &Shutdown, released: &CancellationToken) -> Infallible {
    shutdown.draining().await;
    while cluster.lock().peers.len() > 0 {
        tokio::time::sleep(RELEASE_POLL).await;
    }
    released.cancel();
    std::future::pending().await
}

/// Watches every listed process. Calls `on_listed` when the list has been read. If the list is advisory, a process that is removed from it
/// is watched until it disconnects. Cancel-safe: dropping the future ends all watching.
async fn watch_all<F: Future<Output = Infallible> + Send + 'static>(
    what: &str,
    mut listed: Members,
    disconnected: &Notify,
    is_connected: impl Fn(&str) -> bool,
    watch: impl Fn(&str) -> F + Clone + Send + Sync + 'static,
    on_listed: impl Fn(),
) -> Infallible {
    // Each address has one task, which is aborted when its `JoinSet` is dropped.
    let mut watchers: BTreeMap<String, JoinSet<Infallible>> = BTreeMap::new();
    let mut is_listed = !listed.are_advisory();
    loop {
        let (addresses, advisory) = (listed.now(), listed.are_advisory());
        watchers.retain(|address, _| addresses.contains(address) || (advisory && is_connected(address)));
        for address in addresses {
            if let Vacant(entry) = watchers.entry(address.clone()) {
                // The first watch is created at once, because from then on the router expects the process.
                let (mut first, watch, address) = (Some(watch(address)), watch.clone(), address.clone());
                let name = format!("{what}: watch of {address}");
                entry
                    .insert(JoinSet::new())
                    .spawn(async move { supervise(&name, || first.take().unwrap_or_else(|| watch(&address))).await });
            }
        }
        if is_listed {
            on_listed();
        }
        tokio::select! {
            biased;
            () = listed.changed() => {
                is_listed = true;
                tracing::info!(listed = listed.now().len(), "the list of {what} changed");
            }
            () = disconnected.notified(), if advisory => {}
        }
    }
}
