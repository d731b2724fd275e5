//! Serves OpenAI's and Anthropic's HTTP APIs for a cluster whose routers and workers process token ids.
//!
//! A request passes these modules in order: `http` reads it, `api` checks it, `text` tokenizes it, `dispatch` requests a placement
//! and opens the decode worker's stream, `stream` converts the tokens to text, and `usage` counts them. The response owns everything that
//! is reserved for a request (sequences, booking, generation). It is dropped when the client disconnects, which releases everything.

mod admission;
mod audit;
mod calls;
mod clock;
mod cores;
mod dispatch;
mod error;
mod heads;
mod http;
mod keys;
mod metrics;
mod models;
mod passthrough;
mod prefix;
mod prompt;
mod recent;
mod render;
mod settings;
mod shares;
mod stream;
mod usage;

pub use audit::{AuditResult, AuditResultError};
pub use axum::http::HeaderName;
pub use http::starting::StartingAnswers;
pub use ipnet::IpNet;
pub use keys::{ApiKey, ApiKeyFile, ApiKeyFileError, ApiKeys, KeyCache, KeyHash};
pub use passthrough::{Passthrough, PassthroughError};
pub use render::{InvalidRenderer, Renderer};
pub use settings::{CacheIsolation, ExposeDetails, FrontendSettings};

use calls::CallLog;
use futures::future::OptionFuture;
use http::{App, Origins, Trust};
use keys::Keys;
use models::Models;
use std::{sync::Arc, time::Duration};
pub use tandem_process::listen::{ServerCertificate, TlsFilesError};
use tandem_process::{
    Metrics, Shutdown,
    discovery::DiscoveryError,
    listen::{self, ConnectionLimits, Drain, Hosts, Tls},
};
use tandem_proto::channel::Listener;
use tandem_text::ServedModel;
use tokio_util::sync::CancellationToken;

/// An error that prevents the frontend from running.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// The list of routers cannot be used.
    #[error(transparent)]
    Routers(#[from] DiscoveryError),
    /// The setting `models` is empty, or two models have the same id.
    #[error("at least one model must be served, and no two models, served or passed through, may have the same id")]
    Models,
    /// The setting `block_size` is 0.
    #[error("block_size must be at least 1")]
    BlockSize,
    /// A renderer's address or certificate cannot be used.
    #[error(transparent)]
    Renderer(#[from] InvalidRenderer),
    /// The gRPC server of an endpoint picker failed.
    #[error("the endpoint picker's gRPC server failed")]
    Picker(#[from] tonic::transport::Error),
    /// The listener's address cannot be read.
    #[error("the HTTP server failed: {0}")]
    Serve(#[from] std::io::Error),
}

/// Serves HTTP until the process drains and every connection has ended, or until the process stops. A process that drains closes its
/// socket, and serves one more request on each open connection. Requests that still run when the process stops end with an error event.
///
/// # Errors
/// The settings cannot be used, the listener's address cannot be read, or the routers' addresses cannot be watched.
pub async fn run(
    listener: impl Into<Listener>,
    mut settings: FrontendSettings,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), FrontendError> {
    check(&settings)?;
    let (listener, admin) = (listener.into(), settings.admin.take().map(Listener::from));
    let routers = settings.routers.clone().open(&metrics)?;
    let (proxies, local) = (settings.trusted_proxies.clone(), listener.is_local()?);
    let trust = Trust { proxies, local, expose: settings.expose_details };
    let (unread_max, hosts) = (settings.unread_max, std::mem::take(&mut settings.hosts));
    let checks_hosts = !hosts.is_empty() || listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let (connections_max, per_address_max) = (settings.connections_max, settings.connections_per_address_max);
    let proxies = settings.trusted_proxies.clone();
    let (keys, watch_keys) = settings.api_keys.take().map(|opened| Keys::new(opened, &metrics)).unzip();
    let (tls, watch_tls) = settings.tls.take().map(|own| Tls::new(own, listen::HTTP_1, metrics::tls_outdated(&metrics))).unzip();
    let origins = Origins::new(std::mem::take(&mut settings.cors_origins));
    let (drain_idle, shares_port) = (settings.drain_idle, settings.shares_port);
    let app = Arc::new(App::new(settings, keys, trust, routers.now(), listener.network().clone(), &metrics, shutdown.clone())?);
    let drain = || Drain { begun: CancellationToken::new(), idle_max: drain_idle };
    let limits = connection_limits(&app, connections_max, per_address_max, proxies);
    let (of_api, of_admin) = (drain(), Drain { idle_max: Duration::ZERO, ..drain() });
    let (api_drains, admin_drains) = (of_api.begun.clone(), of_admin.begun.clone());
    let routes = http::guarded(http::api(Arc::clone(&app), admin.is_none()), checks_hosts.then(|| hosts.clone()), origins);
    let api = listen::serve(listener, tls, routes, limits, unread_max, of_api);
    let admin = admin.map(|listener| serve_admin(&app, listener, hosts, unread_max, of_admin));
    let server = async {
        let draining = async {
            shutdown.draining().await;
            api_drains.cancel();
            if shares_port {
                admin_drains.cancel();
            }
        };
        let api = async {
            tokio::join!(api, draining);
            // The admin port serves until the API has ended.
            admin_drains.cancel();
        };
        tokio::join!(api, OptionFuture::from(admin))
    };
    tokio::select! {
        biased;
        _ = server => Ok(()),
        () = after_stop(&shutdown) => Ok(()),
        never = app.watch_routers(routers) => match never {},
        never = app.passed.watch() => match never {},
        Some(never) = OptionFuture::from(watch_tls) => match never {},
        Some(never) = OptionFuture::from(app.call_log.clone().map(CallLog::sum_up)) => match never {},
        Some(never) = OptionFuture::from(watch_keys) => match never {},
    }
}

/// Serves Envoy's protocol for external processors, with which gateways ask for the server of each request, until the process drains and
/// every request has ended, or until the process stops. The requests' limits and accounts are those of a frontend.
///
/// # Errors
/// The settings cannot be used, the socket cannot be served, or the routers' addresses cannot be watched.
pub async fn run_picker(
    listener: impl Into<Listener>,
    mut settings: FrontendSettings,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), FrontendError> {
    check(&settings)?;
    let (listener, admin) = (listener.into(), settings.admin.take().map(Listener::from));
    let routers = settings.routers.clone().open(&metrics)?;
    // The peer is a gateway, also on this machine, and its clients may be anywhere.
    let trust = Trust { proxies: settings.trusted_proxies.clone(), local: false, expose: settings.expose_details };
    let (unread_max, hosts) = (settings.unread_max, std::mem::take(&mut settings.hosts));
    // A server that gets the request from the gateway identifies images otherwise than a renderer would here, so their hashes would never be found.
    settings.renderers.clear();
    let (tls, watch_tls) = settings.tls.take().map(|own| Tls::new(own, listen::HTTP_2, metrics::tls_outdated(&metrics))).unzip();
    let app = Arc::new(App::new(settings, None, trust, routers.now(), listener.network().clone(), &metrics, shutdown.clone())?);
    let drain = Drain { begun: CancellationToken::new(), idle_max: Duration::ZERO };
    let picked = async {
        let served = listen::serve_grpc(listener, tls, http::picker::routes(Arc::clone(&app)), shutdown.draining()).await;
        drain.begun.cancel();
        served
    };
    let admin = admin.map(|listener| serve_admin(&app, listener, hosts, unread_max, drain.clone()));
    tokio::select! {
        biased;
        (served, _) = async { tokio::join!(picked, OptionFuture::from(admin)) } => Ok(served?),
        () = shutdown.stopped() => Ok(()),
        never = app.watch_routers(routers) => match never {},
        Some(never) = OptionFuture::from(watch_tls) => match never {},
    }
}

fn check(settings: &FrontendSettings) -> Result<(), FrontendError> {
    if settings.block_size == 0 {
        return Err(FrontendError::BlockSize);
    }
    let is_passed = |model: &ServedModel| settings.passthrough.get(&model.id).is_some();
    if !Models::can_be_served(&settings.models) || settings.models.iter().any(is_passed) {
        return Err(FrontendError::Models);
    }
    Ok(())
}

fn connection_limits(app: &App, all_max: usize, per_address_max: usize, proxies: Vec<IpNet>) -> Arc<ConnectionLimits> {
    let refusal = error::ApiError::Connections.failure().body().to_string();
    Arc::new(ConnectionLimits::new(all_max, per_address_max, proxies, refusal, app.metrics.connections.clone()))
}

/// Serves the operator's pages.
fn serve_admin(
    app: &Arc<App>,
    listener: Listener,
    hosts: Hosts,
    unread_max: Duration,
    drain: Drain,
) -> impl Future<Output = ()> + use<> {
    let routes = http::guarded(http::admin(Arc::clone(app)), Some(hosts), Origins::default());
    let limits = connection_limits(app, listen::ADMIN_CONNECTIONS_MAX, listen::ADMIN_CONNECTIONS_OF_ADDRESS_MAX, Vec::new());
    listen::serve(listener, None, routes, limits, unread_max, drain)
}

/// Resolves `LAST_EVENTS` after the process is stopped, so that streams can send their last events.
async fn after_stop(shutdown: &Shutdown) {
    const LAST_EVENTS: Duration = Duration::from_millis(200);
    shutdown.stopped().await;
    tokio::time::sleep(LAST_EVENTS).await;
}
