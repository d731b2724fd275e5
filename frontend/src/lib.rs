//! Text in, text out: OpenAI's HTTP in front of a cluster of token ids.
//!
//! A request's way: `http` reads it, `request` checks it, `prompt` makes tokens of it, `dispatch` has it placed and opens the
//! decode worker's stream, `stream` makes text of what comes, `usage` says what it cost. Everything taken for a request (a
//! permit, a booking, a generation) is held by values that live in its response, and goes when the client goes.

mod admission;
mod audit;
mod cores;
mod dispatch;
mod error;
mod http;
mod listen;
mod metrics;
mod model;
mod prompt;
mod recent;
mod request;
mod shares;
mod stream;
mod usage;

pub use audit::{AuditResult, AuditResultError};
pub use model::{ServedModel, ServedModelError};
pub use prompt::{EncodeError, Special, Tokenizer};

pub use axum::http::HeaderName;
pub use http::ExposeDetails;
use clap::ValueEnum;
use http::Trust;
pub use ipnet::IpNet;
use listen::Places;
use serde::Serialize;
use std::{path::PathBuf, sync::Arc, time::Duration};
use tandem_node::{
    Metrics, Shutdown,
    discovery::{DiscoveryError, Workers},
    trace::Tracer,
};
use tandem_proto::channel::Listener;
use tokio::net::TcpListener;

/// Connections to [`FrontendSettings::admin`]: scrapers, health checks and a few viewers of the page.
const ADMIN_CONNECTIONS_MAX: usize = 256;

/// How a frontend behaves. [`FrontendSettings::new`] has the defaults.
pub struct FrontendSettings {
    /// Of the routers' gRPC. Each request goes to one of those that are well; any can take over what another has booked.
    pub routers: Workers,
    /// The operator's name of the cluster; a router of another is not used.
    pub cluster: String,
    /// What is served.
    pub model: ServedModel,
    /// Tokens in a block: the cluster's constant.
    pub block_size: u32,
    /// Sequences (prompts × `n`) that run at a time; beyond, requests are refused with 503. Bounds memory and the load a cluster
    /// can be given.
    pub concurrent_sequences: usize,
    /// The sequences of one client, an account or else an address, that run at a time; beyond, its requests are refused with
    /// 429. `None`: one client may take all.
    pub sequences_per_client: Option<usize>,
    /// The longest body that is read. `None`: it follows from the model's context, 4 to 32 MiB.
    pub body_max_bytes: Option<usize>,
    /// Bytes of all bodies that are read or parsed at a time; beyond, requests are refused with 503. The first 16 KiB of each
    /// body do not count.
    pub bodies_max_bytes: usize,
    /// Connections that are open at a time; further ones are closed with 503.
    pub connections_max: usize,
    /// Of these, connections from one address (an IPv6 /64) that is not a trusted proxy's. 0: no bound of their own.
    pub connections_per_address_max: usize,
    /// Names in `Host` besides IP addresses and localhost. Checked where the listener is on a loopback address, and everywhere when
    /// there are any: a web page can give its own name any address, but cannot change the `Host` that the browser sends.
    pub allowed_hosts: Vec<String>,
    /// Where `/metrics` and `/dashboard` are served. `None`: beside the API.
    pub admin: Option<TcpListener>,
    /// How long a request may wait for its first token, all attempts together.
    pub first_token_timeout: Duration,
    /// Placements tried before a request is given up.
    pub attempts: u32,
    /// An attempt whose prefill has not begun in this time is tried elsewhere, but for the last: a worker that is stuck, or
    /// whose queue is longer than others', costs so much and not the whole wait for the first token.
    pub attempt_timeout: Duration,
    /// Times a generation whose worker is lost goes on elsewhere with the same text. 0: it ends with an error event.
    pub resumes: u32,
    /// A client that reads nothing of what is there for it is gone after this: its request would hold its permit
    /// for ever. 5 minutes: nobody pauses an answer for longer and still wants the rest of it.
    pub unread_max: Duration,
    /// The time without an event after which a stream sends a comment, so that proxies keep the connection. Status and headers are sent with
    /// the first token or comment: an earlier error has its own status, a later one is an event in a response with status 200. The default
    /// is 10 seconds, because proxies time out after 15 at the earliest.
    pub keep_alive: Duration,
    /// Prompts that the page at `/dashboard` remembers. 0: there is no such page.
    pub dashboard_requests: usize,
    /// Where `tandem audit check` leaves its result, for the page and the metrics.
    pub audit_result: Option<PathBuf>,
    /// Begins the traces of requests.
    pub tracer: Tracer,
    /// The header that holds a request's account, for the ledger and, if accounts are isolated, for the cache. A proxy that authenticates
    /// clients sets it; requests of untrusted peers that have it are refused.
    pub account_header: Option<HeaderName>,
    /// Which requests share cached KV.
    pub cache_isolation: CacheIsolation,
    /// Peers that are trusted with the account header, `traceparent`, and details of the cluster. Empty: all, if the listener is one of
    /// loopback (or in memory), for requests that were not forwarded; else none.
    pub trusted_proxies: Vec<IpNet>,
    /// Which clients may use `x-tandem-details` and `x-tandem-explain`.
    pub expose_details: ExposeDetails,
}

/// Which requests share cached KV. Requests for another model, or with another `cache_salt`, never do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheIsolation {
    /// Requests of all clients
    #[default]
    Shared,
    /// Requests of one account; those without an account share with each other only
    Account,
}

impl FrontendSettings {
    /// The defaults for one router and a model.
    pub fn new(router: impl Into<String>, model: ServedModel) -> Self {
        Self {
            routers: Workers::List(vec![router.into()]),
            cluster: "tandem".to_owned(),
            model,
            block_size: 16,
            concurrent_sequences: 1024,
            sequences_per_client: None,
            body_max_bytes: None,
            bodies_max_bytes: 256 << 20,
            connections_max: 8192,
            connections_per_address_max: 4096,
            allowed_hosts: Vec::new(),
            admin: None,
            first_token_timeout: Duration::from_secs(60),
            attempts: 3,
            attempt_timeout: Duration::from_secs(30),
            resumes: 8,
            unread_max: Duration::from_secs(300),
            keep_alive: Duration::from_secs(10),
            dashboard_requests: 512,
            audit_result: None,
            tracer: Tracer::default(),
            account_header: None,
            cache_isolation: CacheIsolation::Shared,
            trusted_proxies: Vec::new(),
            expose_details: ExposeDetails::Trusted,
        }
    }
}

/// The frontend cannot run.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// The list of routers cannot be used.
    #[error(transparent)]
    Routers(#[from] DiscoveryError),
    /// Blocks have at least one token.
    #[error("block_size must be at least 1")]
    BlockSize,
    /// The listener's address cannot be read.
    #[error("the HTTP server failed: {0}")]
    Serve(#[from] std::io::Error),
}

/// Serves HTTP until the process drains and every request has ended, or until it stops. While it drains, new requests are
/// refused with 503; what still runs at the stop ends with an error event.
///
/// # Errors
/// The settings cannot be used, or the routers' addresses cannot be followed.
pub async fn run(
    listener: impl Into<Listener>,
    mut settings: FrontendSettings,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), FrontendError> {
    if settings.block_size == 0 {
        return Err(FrontendError::BlockSize);
    }
    let (listener, admin) = (listener.into(), settings.admin.take().map(Listener::from));
    let routers = settings.routers.clone().open(&metrics)?;
    let trust = Trust::new(settings.trusted_proxies.clone(), listener.is_local()?, settings.expose_details);
    let (unread_max, allowed_hosts) = (settings.unread_max, std::mem::take(&mut settings.allowed_hosts));
    let (connections_max, per_address_max) = (settings.connections_max, settings.connections_per_address_max);
    let proxies = settings.trusted_proxies.clone();
    let app = Arc::new(http::App::new(settings, trust, routers.now(), listener.network().clone(), &metrics, shutdown.clone()));
    let serve = |listener: Listener, routes: axum::Router, places: Places| {
        let routes = http::guarded(routes, &listener, &allowed_hosts);
        listen::serve(listener, routes, Arc::new(places), unread_max, app.admission().clone().drained())
    };
    let places = Places::new(connections_max, per_address_max, proxies, app.metrics());
    let api = serve(listener, http::api(Arc::clone(&app), admin.is_none()), places);
    let admin = admin.map(|listener| {
        let places = Places::new(ADMIN_CONNECTIONS_MAX, 0, Vec::new(), app.metrics());
        serve(listener, http::admin(Arc::clone(&app)), places)
    });
    let server = async { tokio::join!(api, futures::future::OptionFuture::from(admin)) };
    tokio::select! {
        biased;
        _ = server => Ok(()),
        () = after_stop(&shutdown) => Ok(()),
        never = app.follow(routers) => match never {},
    }
}

/// Streams hear of the stop themselves; this much later the last of their bytes are on the way.
async fn after_stop(shutdown: &Shutdown) {
    const LAST_BYTES: Duration = Duration::from_millis(200);
    shutdown.stopped().await;
    tokio::time::sleep(LAST_BYTES).await;
}
