//! Connections to etcd: settings, errors and reconnection.

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

/// Time limit of a call, which etcd normally answers in milliseconds. After a timeout, the next endpoint is tried.
pub(super) const CALL_WAIT: Duration = Duration::from_secs(3);
/// The shortest delay between attempts to connect; `PAUSE_MAX` is the longest. With these delays, a restarted etcd is noticed within two seconds, and
/// attempts while no etcd runs cost almost nothing.
pub(super) const PAUSE_MIN: Duration = Duration::from_millis(100);
pub(super) const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The interval of keep-alive pings. A silent connection is closed after the interval plus the timeout. The interval must be above 5 s, because etcd
/// closes connections that ping more often.
const PING_INTERVAL: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Settings of the connection to etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdSettings {
    /// `host:port` of the etcd servers. It is sufficient if one of them can be reached.
    pub endpoints: Vec<String>,
    /// User name and password; `None` disables authentication. A password's file is read for each connection, and a connection that etcd no
    /// longer authenticates is replaced.
    pub user: Option<(String, Secret)>,
    /// Settings of TLS; `None` leaves the connections unencrypted.
    pub tls: Option<EtcdTls>,
    /// The cluster's name, which is part of every key.
    pub cluster: String,
    /// The cluster key, with which registrations are signed. Registrations without its signature are ignored, so that a program that may
    /// write to etcd cannot make this cluster's processes connect to it and send it their bearer token.
    pub key: ClusterKey,
    /// A process that does not renew its lease for this long is deregistered.
    pub lease_ttl: Duration,
}

/// PEM files for TLS. They are read for each connection, so they may be replaced while the process runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTls {
    /// The file of the CA certificate with which etcd's certificate is verified.
    pub ca: PathBuf,
    /// The client certificate and its key; `None` if the process presents no certificate.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// The reason why a call to etcd or a connection to it failed, or why the settings are invalid.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum EtcdError {
    #[error("{} cannot be read; check --etcd-ca, --etcd-cert and --etcd-key", .path.display())]
    File { path: PathBuf, source: io::Error },
    /// A file has invalid content, or an endpoint is invalid.
    #[error("etcd at {endpoint} cannot be used; check --etcd, --etcd-ca, --etcd-cert and --etcd-key")]
    Settings { endpoint: String, source: tonic::transport::Error },
    /// No connection could be opened, or the endpoint's certificate is not trusted.
    #[error("etcd at {endpoint} cannot be reached")]
    Unreachable { endpoint: String, source: tonic::transport::Error },
    #[error("etcd answered with an error")]
    Failed(#[from] etcd_client::Error),
    #[error("etcd did not answer within {CALL_WAIT:?}")]
    Silent,
    #[error("etcd has closed the stream")]
    Closed,
    /// The revision from which changes were to be watched was compacted, or the server has lost its leader.
    #[error("etcd has cancelled the watch")]
    Cancelled,
    #[error("this process's lease in etcd has expired or was revoked")]
    LeaseLost,
}

impl EtcdSettings {
    /// Checks the settings as far as possible without a connection.
    ///
    /// # Errors
    /// Fails if a file cannot be read, or if a file or an endpoint is invalid.
    pub fn check(&self) -> Result<(), EtcdError> {
        self.endpoints.iter().try_for_each(|endpoint| self.endpoint(endpoint).map(drop))
    }

    fn endpoint(&self, address: &str) -> Result<Endpoint, EtcdError> {
        let failed = |source| EtcdError::Settings { endpoint: address.to_owned(), source };
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
    fs::read(path).map_err(|source| EtcdError::File { path: path.to_owned(), source })
}

#[derive(Debug)]
pub(super) struct EtcdConnector {
    pub(super) settings: EtcdSettings,
    next: usize,
}

impl EtcdConnector {
    /// Returns a connector that starts with a random endpoint, so that the processes of a cluster spread over all endpoints.
    pub(super) fn new(settings: EtcdSettings) -> Self {
        Self { settings, next: RandomState::new().hash_one(0) as usize % 1_024 }
    }

    pub(super) async fn connect(&mut self) -> Result<Client, EtcdError> {
        let endpoints = &self.settings.endpoints;
        let address = &endpoints[self.next % endpoints.len()];
        self.next = self.next.wrapping_add(1);
        let channel = self.settings.endpoint(address)?.connect().await;
        let channel = channel.map_err(|source| EtcdError::Unreachable { endpoint: address.clone(), source })?;
        // With this option, a server without a leader returns an error instead of an old state.
        let mut options = ConnectOptions::new().with_require_leader(true);
        if let Some((name, password)) = &self.settings.user {
            options = options.with_user(name, password.expose()).with_auto_token_refresh(true);
        }
        in_time(Client::from_channel(Channel::Tonic(channel), Some(options))).await
    }
}

pub(super) async fn in_time<T>(answer: impl Future<Output = Result<T, etcd_client::Error>>) -> Result<T, EtcdError> {
    Ok(tokio::time::timeout(CALL_WAIT, answer).await.map_err(|_| EtcdError::Silent)??)
}
