//! etcd: where it is, who we are to it, and connections to it.

use crate::Secret;
use etcd_client::{Certificate, Channel, Client, ConnectOptions, Identity, TlsOptions};
use std::{
    fs,
    hash::{BuildHasher, RandomState},
    io,
    path::{Path, PathBuf},
    time::Duration,
};
use tandem_proto::ClusterKey;
use tonic::transport::Endpoint;

/// etcd answers in milliseconds; who does not within this time is tried later, and another endpoint first.
pub(super) const CALL_WAIT: Duration = Duration::from_secs(3);
/// Pauses between tries: a restart of etcd is noticed within a second, and its absence costs nearly nothing.
pub(super) const PAUSE_MIN: Duration = Duration::from_millis(100);
pub(super) const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A silent connection is given up after both. etcd closes connections that ping more often than every 5 s.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// How etcd is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdSettings {
    /// `host:port` of its members; any of them will do.
    pub endpoints: Vec<String>,
    /// Name and password, if it wants to know who asks.
    pub user: Option<(String, Secret)>,
    /// Encrypted, if there is something here.
    pub tls: Option<EtcdTls>,
    /// The cluster's name: part of every key.
    pub cluster: String,
    /// The key with which registrations are signed. Registrations without its signature are ignored, so that a program that may write to
    /// etcd cannot make this cluster's processes connect to it and send it their bearer token.
    pub key: ClusterKey,
    /// A process that is not heard of for so long is taken off the list.
    pub lease_ttl: Duration,
}

/// PEM files. They are read at every connection, so that they may be replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTls {
    /// Who vouches for etcd.
    pub ca: PathBuf,
    /// Who we are: a certificate and its key.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// Why etcd cannot be used now.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// A file of [`EtcdTls`].
    #[error("{} cannot be read; check --etcd-ca, --etcd-cert and --etcd-key", .path.display())]
    File {
        /// As it was set.
        path: PathBuf,
        /// What the system says.
        #[source]
        cause: io::Error,
    },
    /// What is in the files, or an endpoint that is none.
    #[error("etcd at {endpoint} cannot be used with these settings")]
    Settings {
        /// Which of them.
        endpoint: String,
        /// What is wrong.
        #[source]
        cause: tonic::transport::Error,
    },
    /// Nobody there, or nobody we trust.
    #[error("etcd at {endpoint} cannot be reached")]
    Unreachable {
        /// Which of them.
        endpoint: String,
        /// Why.
        #[source]
        cause: tonic::transport::Error,
    },
    /// It answers with an error.
    #[error("etcd refuses or fails")]
    Failed(#[from] etcd_client::Error),
    /// It does not answer.
    #[error("etcd did not answer in {CALL_WAIT:?}")]
    Silent,
    /// A stream has ended.
    #[error("etcd has closed the stream")]
    Closed,
    /// A watch has ended: history it needs is gone, or etcd has lost its leader.
    #[error("etcd has cancelled the watch")]
    Cancelled,
    /// The lease has expired, or etcd has lost it.
    #[error("the lease is lost")]
    LeaseLost,
}

impl EtcdSettings {
    /// Whether they could be used, as far as one can tell without etcd.
    pub fn check(&self) -> Result<(), EtcdError> {
        self.endpoints.iter().try_for_each(|endpoint| self.endpoint(endpoint).map(drop))
    }

    fn endpoint(&self, address: &str) -> Result<Endpoint, EtcdError> {
        let failed = |cause| EtcdError::Settings { endpoint: address.to_owned(), cause };
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let endpoint = Endpoint::from_shared(format!("{scheme}://{address}"))
            .map_err(failed)?
            .connect_timeout(CALL_WAIT)
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT);
        let Some(files) = &self.tls else { return Ok(endpoint) };
        let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(read(&files.ca)?));
        if let Some((certificate, key)) = &files.identity {
            tls = tls.identity(Identity::from_pem(read(certificate)?, read(key)?));
        }
        endpoint.tls_config(tls).map_err(failed)
    }
}

fn read(path: &Path) -> Result<Vec<u8>, EtcdError> {
    fs::read(path).map_err(|cause| EtcdError::File { path: path.to_owned(), cause })
}

/// Connects to one endpoint after the other: the next when one fails.
#[derive(Debug)]
pub(super) struct Connector {
    pub(super) settings: EtcdSettings,
    next: usize,
}

impl Connector {
    /// Begins with any, so that not all processes ask the same one.
    pub(super) fn new(settings: EtcdSettings) -> Self {
        Self { settings, next: RandomState::new().hash_one(0) as usize % 1_024 }
    }

    pub(super) async fn connect(&mut self) -> Result<Client, EtcdError> {
        let endpoints = &self.settings.endpoints;
        let address = &endpoints[self.next % endpoints.len()];
        self.next = self.next.wrapping_add(1);
        let channel = self.settings.endpoint(address)?.connect().await;
        let channel = channel.map_err(|cause| EtcdError::Unreachable { endpoint: address.clone(), cause })?;
        // A member that is cut off from the others says so instead of showing an old state.
        let mut options = ConnectOptions::new().with_require_leader(true);
        if let Some((name, password)) = &self.settings.user {
            options = options.with_user(name, password.expose()).with_auto_token_refresh(true);
        }
        in_time(Client::from_channel(Channel::Tonic(channel), Some(options))).await
    }
}

/// An answer, or the lack of one.
pub(super) async fn in_time<T>(answer: impl Future<Output = Result<T, etcd_client::Error>>) -> Result<T, EtcdError> {
    Ok(tokio::time::timeout(CALL_WAIT, answer).await.map_err(|_| EtcdError::Silent)??)
}
