//! Settings of a frontend.

use crate::{keys::ApiKeys, passthrough::Passthrough, render::Renderer};
use axum::http::HeaderName;
use clap::ValueEnum;
use ipnet::IpNet;
use serde::Serialize;
use std::{path::PathBuf, time::Duration};
use tandem_process::{
    discovery::MemberSource,
    line_file::LineFile,
    listen::{Hosts, ServerCertificate},
    trace::Tracer,
};
use tandem_text::ServedModel;
use tokio::net::TcpListener;

/// The settings of a frontend. [`FrontendSettings::new`] has the defaults.
pub struct FrontendSettings {
    /// The routers' gRPC addresses. Each request is sent to one healthy router. If that router is lost, any other router can book the
    /// request.
    pub routers: MemberSource,
    /// The name that the operator gave the cluster. A router of another cluster is not used.
    pub cluster: String,
    /// The served models: at least one, with different ids. All have the same limits.
    pub models: Vec<ServedModel>,
    /// The models whose requests are passed through to other servers. None of them is a served model.
    pub passthrough: Passthrough,
    /// The number of tokens in a block. All processes of a cluster have the same.
    pub block_size: u32,
    /// The maximum number of running sequences (prompts × `n`). Requests beyond it are refused with 503.
    pub concurrent_sequences: usize,
    /// The maximum number of running sequences of one client (account, else address). The client's requests beyond it are refused with 429.
    /// `None`: one client may use all sequences.
    pub sequences_per_client: Option<usize>,
    /// The maximum size of a body, in bytes. `None`: it is computed from the length of the model's context, as 4 to 32 MiB.
    pub body_max_bytes: Option<usize>,
    /// The maximum total size of the bodies that are read or parsed at a time, in bytes, without the first 16 KiB of each body. Requests
    /// beyond it are refused with 503.
    pub bodies_max_bytes: usize,
    /// The maximum size of the cache of texts with their tokens, in bytes. 0: each text is encoded again.
    pub encoding_cache_bytes: usize,
    /// The maximum number of open connections. Connections beyond it are closed with a 503 response.
    pub connections_max: usize,
    /// The maximum number of open connections from one address (for IPv6: from one /64 network). The limit does not apply to trusted
    /// proxies. 0: no limit.
    pub connections_per_address_max: usize,
    /// Names accepted in the header `Host`, in addition to IP addresses and localhost. The listener `admin` checks `Host`; that of
    /// the API does if it is on a loopback address or this list is not empty. This prevents DNS rebinding: a web page's name can resolve to
    /// any address, but the page cannot change the browser's `Host`.
    pub hosts: Hosts,
    /// The certificate of the listener of the API or of an endpoint picker, which then accepts only TLS. `None`: the listener is plain. The
    /// listener `admin` has no TLS.
    pub tls: Option<ServerCertificate>,
    /// The listener of `/metrics` and `/dashboard`. `None`: the API's listener serves them.
    pub admin: Option<TcpListener>,
    /// How long a request waits while no router answers, for example because the only one restarts. Requests that wait count as running, so
    /// `concurrent_sequences` bounds their number.
    pub router_wait: Duration,
    /// The maximum time from a request to its first token, including all attempts.
    pub first_token_timeout: Duration,
    /// The maximum time for which a request may wait in the queue for its prefill. If the router estimates a longer wait, the request is
    /// refused with 503. `None`: no request is refused for its wait.
    pub max_wait: Option<Duration>,
    /// The maximum number of attempts up to the first token; then the request fails. Each resume may make as many attempts again.
    pub attempts: u32,
    /// If the worker in whose queue an attempt waits for its prefill makes no progress for this long, another worker is tried, unless the
    /// attempt was the last one.
    pub attempt_timeout: Duration,
    /// How many times a generation whose worker is lost is resumed on another worker. 0: such a generation ends with an error.
    pub resumes: u32,
    /// A client that reads nothing of its response for this long is disconnected, which releases the sequences of its request.
    pub unread_max: Duration,
    /// How long a connection without a request stays open while the frontend drains, because its client may just be sending one.
    pub drain_idle: Duration,
    /// Whether other processes may listen on the same ports. If so, a draining frontend closes the listener `admin` as early as the API's.
    pub shares_port: bool,
    /// The time without an event after which a stream sends a comment, so that proxies keep the connection open. The shortest timeout of
    /// common proxies is 15 s. Status and headers are sent with the first token or comment; later errors are events in a response with
    /// status 200.
    pub keep_alive: Duration,
    /// The maximum number of finished prompts that the dashboard shows. 0: there is no dashboard.
    pub dashboard_requests: usize,
    /// The file that `tandem audit check --result` writes, shown on the dashboard and in the metrics. `None`: no audit result is shown.
    pub audit_result: Option<PathBuf>,
    /// Creates the spans of requests.
    pub tracer: Tracer,
    /// The name of the header with a request's account, for the ledger and the isolation of accounts. A proxy that authenticates clients
    /// sets the header. Requests of untrusted peers with this header are refused. `None`: requests have no account.
    pub account_header: Option<HeaderName>,
    /// The keys of clients. Each request of the API then needs one, and has the key's account. `None`: requests need no key.
    pub api_keys: Option<ApiKeys>,
    /// The file that gets a line for each call of the API, with its key, status and usage, and without text. `None`: there is no such file.
    pub audit_log: Option<LineFile>,
    /// The origins whose web pages may use the API from a browser, such as `https://chat.example`, or `*` for all.
    pub cors_origins: Vec<String>,
    /// Which requests share cached KV.
    pub cache_isolation: CacheIsolation,
    /// The peers that are trusted: they may send the account header and `traceparent`, and see details of the cluster. If the list is
    /// empty, a listener on loopback or in memory trusts every peer whose request was not forwarded, and any other listener trusts no peer.
    pub trusted_proxies: Vec<IpNet>,
    /// Which clients may use the headers `x-tandem-details` and `x-tandem-explain`.
    pub expose_details: ExposeDetails,
    /// The servers that convert conversations with images to token ids. A model without one has no images.
    pub renderers: Vec<Renderer>,
    /// For an endpoint picker: the maximum number of further endpoints that it names to the gateway. `None`: this is no endpoint picker.
    pub alternatives: Option<u32>,
}

/// Which requests share cached KV. Requests for different models, or with different `cache_salt`, never share it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CacheIsolation {
    /// Requests of all clients share cached KV.
    #[default]
    Shared,
    /// Requests of the same account share cached KV. Requests without an account share it only with each other.
    Account,
}

/// Which clients may use `x-tandem-details` and `x-tandem-explain`. Both show which prompts are cached and where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExposeDetails {
    /// No client may use them.
    Never,
    /// Clients at an address in --trusted-proxies may use them; without that list, only programs on this host, if --listen is a loopback
    /// address.
    #[default]
    Trusted,
    /// Every client may use them.
    Always,
}

impl FrontendSettings {
    /// Returns the default settings for this router (`host:port`) and model.
    pub fn new(router: impl Into<String>, model: ServedModel) -> Self {
        Self {
            routers: MemberSource::List(vec![router.into()]),
            cluster: "tandem".to_owned(),
            models: vec![model],
            passthrough: Passthrough::default(),
            block_size: 16,
            concurrent_sequences: 1024,
            sequences_per_client: None,
            body_max_bytes: None,
            bodies_max_bytes: 256 << 20,
            encoding_cache_bytes: 32 << 20,
            connections_max: 8192,
            connections_per_address_max: 4096,
            hosts: Hosts::default(),
            tls: None,
            admin: None,
            router_wait: Duration::from_secs(2),
            first_token_timeout: Duration::from_secs(60),
            max_wait: Some(Duration::from_secs(10)),
            attempts: 3,
            attempt_timeout: Duration::from_secs(30),
            resumes: 8,
            unread_max: Duration::from_secs(300),
            drain_idle: Duration::from_secs(5),
            shares_port: false,
            keep_alive: Duration::from_secs(10),
            dashboard_requests: 512,
            audit_result: None,
            tracer: Tracer::default(),
            account_header: None,
            api_keys: None,
            audit_log: None,
            cors_origins: Vec::new(),
            cache_isolation: CacheIsolation::Shared,
            trusted_proxies: Vec::new(),
            expose_details: ExposeDetails::Trusted,
            renderers: Vec::new(),
            alternatives: None,
        }
    }
}
