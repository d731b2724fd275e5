//! Settings of a frontend.

use crate::model::ServedModel;
use axum::http::HeaderName;
use clap::ValueEnum;
use ipnet::IpNet;
use serde::Serialize;
use std::{path::PathBuf, time::Duration};
use tandem_node::{discovery::MemberSource, trace::Tracer};
use tokio::net::TcpListener;

/// The settings of a frontend. [`FrontendSettings::new`] has the defaults.
pub struct FrontendSettings {
    /// The routers' gRPC addresses. Each request goes to a healthy one; any of them can take over what another has booked.
    pub routers: MemberSource,
    /// The operator's name of the cluster; a router of another cluster is not used.
    pub cluster: String,
    /// The served model.
    pub model: ServedModel,
    /// Tokens in a block; equal in the whole cluster.
    pub block_size: u32,
    /// The maximum of running sequences (prompts × `n`); further requests are refused with 503.
    pub concurrent_sequences: usize,
    /// The maximum of running sequences of one client (account, else address); its further requests are refused with 429.
    pub sequences_per_client: Option<usize>,
    /// The longest accepted body, in bytes. `None`: it follows from the model's context, 4 to 32 MiB.
    pub body_max_bytes: Option<usize>,
    /// The maximum of all bodies that are read or parsed at a time, in bytes, not counting the first 16 KiB of each; further requests
    /// are refused with 503.
    pub bodies_max_bytes: usize,
    /// The maximum of open connections; further ones are closed with 503.
    pub connections_max: usize,
    /// The maximum of open connections from one address (an IPv6 /64), except trusted proxies. 0: no limit for one address.
    pub connections_per_address_max: usize,
    /// Names accepted in `Host`, besides IP addresses and localhost. Checked if the listener is on a loopback address or the list is not
    /// empty: a web page can give its own name any address, but cannot change the `Host` that the browser sends.
    pub allowed_hosts: Vec<String>,
    /// The listener of `/metrics` and `/dashboard`. `None`: they are served with the API.
    pub admin: Option<TcpListener>,
    /// The maximum time from a request to its first token, including all attempts.
    pub first_token_timeout: Duration,
    /// Placements tried before a request is given up.
    pub attempts: u32,
    /// An attempt whose prefill has not begun within this time is retried on another worker, except the last attempt.
    pub attempt_timeout: Duration,
    /// How often a generation whose worker is lost is resumed on another worker. 0: it ends with an error event.
    pub resumes: u32,
    /// A client that reads nothing of its response for this long is disconnected, which releases its request's sequences.
    pub unread_max: Duration,
    /// The time without an event after which a stream sends a comment, so that proxies keep the connection (they time out after 15 seconds
    /// at the earliest). Status and headers are sent with the first token or comment; later errors are events in a response with status 200.
    pub keep_alive: Duration,
    /// The number of finished prompts that the dashboard shows. 0: there is no dashboard.
    pub dashboard_requests: usize,
    /// The file that `tandem audit check --result` writes, shown on the dashboard and in the metrics.
    pub audit_result: Option<PathBuf>,
    /// Creates the spans of requests.
    pub tracer: Tracer,
    /// The header with a request's account, for the ledger and the isolation of accounts. A proxy that authenticates clients sets it;
    /// requests of untrusted peers with this header are refused.
    pub account_header: Option<HeaderName>,
    /// Which requests share cached KV.
    pub cache_isolation: CacheIsolation,
    /// Peers that may send the account header and `traceparent`, and see details of the cluster. Empty: all peers, if the listener is on
    /// loopback (or in memory), for requests that were not forwarded; else none.
    pub trusted_proxies: Vec<IpNet>,
    /// Which clients may use `x-tandem-details` and `x-tandem-explain`.
    pub expose_details: ExposeDetails,
}

/// Which requests share cached KV. Requests for another model, or with another `cache_salt`, never do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheIsolation {
    /// Requests of all clients.
    #[default]
    Shared,
    /// Requests of one account. Requests without an account share only with each other.
    Account,
}

/// Which clients may use `x-tandem-details` and `x-tandem-explain`. Both show which prompts are cached and where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExposeDetails {
    /// No client may use them.
    Never,
    /// Clients at an address in --trusted-proxies may use them; without that list, only programs on this host.
    #[default]
    Trusted,
    /// Every client may use them.
    Always,
}

impl FrontendSettings {
    /// The defaults for one router (`host:port`) and a model.
    pub fn new(router: impl Into<String>, model: ServedModel) -> Self {
        Self {
            routers: MemberSource::List(vec![router.into()]),
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
