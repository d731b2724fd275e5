//! Settings of discovery: how processes find each other.

use super::common::{address, with_commas};
use clap::Args;
use serde::Serialize;
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use tandem_process::{
    Secret,
    discovery::{EtcdError, EtcdSettings, EtcdTls, MemberSource, Role},
};
use tandem_proto::ClusterKey;

/// The name of a cluster whose operator sets none.
pub(crate) const CLUSTER: &str = "tandem";

/// The cluster's name and etcd, for every role.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Discovery")]
#[serde(rename_all = "kebab-case")]
pub struct DiscoveryArgs {
    /// Name of the cluster; processes of clusters with other names are refused
    #[arg(long, env = "TANDEM_CLUSTER", value_name = "NAME", default_value = CLUSTER, value_parser = cluster_name)]
    pub cluster: String,

    /// host:port of etcd's members, separated by commas. Processes register in etcd and find each other there [default: no etcd; addresses
    /// are listed by flags]
    #[arg(long, env = "TANDEM_ETCD", value_name = "ADDRESSES", value_delimiter = ',', value_parser = address)]
    #[serde(serialize_with = "with_commas")]
    pub etcd: Vec<String>,

    /// etcd user name; needs a password
    #[arg(long, env = "TANDEM_ETCD_USER", value_name = "NAME")]
    pub etcd_user: Option<String>,

    /// etcd password. Set it in the environment or in a file: flags show in the list of processes
    #[arg(long, env = "TANDEM_ETCD_PASSWORD", value_name = "PASSWORD", hide_env_values = true)]
    #[serde(skip)]
    pub etcd_password: Option<Secret>,

    /// File with the etcd password, read again for each connection
    #[arg(long, env = "TANDEM_ETCD_PASSWORD_FILE", value_name = "FILE", value_parser = Secret::of_argument)]
    #[serde(skip)]
    pub etcd_password_file: Option<Secret>,

    /// CA certificate (PEM) for verifying etcd; turns on TLS
    #[arg(long, env = "TANDEM_ETCD_CA", value_name = "FILE")]
    pub etcd_ca: Option<PathBuf>,

    /// Client certificate (PEM) for etcd; needs --etcd-ca and --etcd-key
    #[arg(long, env = "TANDEM_ETCD_CERT", value_name = "FILE")]
    pub etcd_cert: Option<PathBuf>,

    /// Private key (PEM) of the client certificate for etcd
    #[arg(long, env = "TANDEM_ETCD_KEY", value_name = "FILE")]
    pub etcd_key: Option<PathBuf>,

    /// Lifetime of this process's lease in etcd without renewal, in seconds; after it the process is deregistered. The default survives
    /// short network failures
    #[arg(long, env = "TANDEM_LEASE_TTL", value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    pub lease_ttl: u64,

    /// host:port at which other processes reach this one [default: the address of --listen; with --etcd and --listen on all addresses, this
    /// host's name and the port]
    #[arg(long, env = "TANDEM_ADVERTISE", value_name = "ADDRESS", value_parser = address)]
    pub advertise: Option<String>,
}

/// The reason that a process cannot register.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryArgsError {
    /// The process listens on all addresses, and the host has no usable name.
    #[error(
        "{0} is not an address that other processes can connect to, and this host has no usable name; \
         set --advertise to the host:port at which they reach this process"
    )]
    NoAdvertisedAddress(SocketAddr),
    /// A file for the connection to etcd cannot be used.
    #[error(transparent)]
    Etcd(EtcdError),
}

impl DiscoveryArgs {
    /// Returns the settings for etcd of a process that listens on `listens`, and the address that the process registers; `None` if it does
    /// not use etcd.
    ///
    /// # Errors
    /// A file cannot be used, or the process listens on all addresses and the host has no usable name.
    pub fn registration(&self, listens: SocketAddr) -> Result<Option<(EtcdSettings, String)>, DiscoveryArgsError> {
        let Some(settings) = self.etcd() else { return Ok(None) };
        settings.check().map_err(DiscoveryArgsError::Etcd)?;
        match &self.advertise {
            Some(address) => Ok(Some((settings, address.clone()))),
            None if listens.ip().is_unspecified() => {
                let named = format!("{}:{}", rustix::system::uname().nodename().to_string_lossy(), listens.port());
                let named = address(&named).map_err(|_| DiscoveryArgsError::NoAdvertisedAddress(listens))?;
                Ok(Some((settings, named)))
            }
            None => Ok(Some((settings, listens.to_string()))),
        }
    }

    /// Returns the source of the addresses of members with these roles: etcd if it is set, else `list`.
    pub(super) fn members(&self, roles: &[Role], list: Vec<String>) -> MemberSource {
        match self.etcd() {
            Some(etcd) => MemberSource::Etcd(etcd, roles.to_vec()),
            None => MemberSource::List(list),
        }
    }

    /// Returns the settings for etcd, in which the cluster key is not set yet; `None` if no etcd is set.
    fn etcd(&self) -> Option<EtcdSettings> {
        if self.etcd.is_empty() {
            return None;
        }
        let identity = self.etcd_cert.clone().zip(self.etcd_key.clone());
        Some(EtcdSettings {
            endpoints: self.etcd.clone(),
            user: self.etcd_user.clone().zip(self.password().cloned()),
            tls: self.etcd_ca.clone().map(|ca| EtcdTls { ca, identity }),
            cluster: self.cluster.clone(),
            key: ClusterKey::default(),
            lease_ttl: Duration::from_secs(self.lease_ttl),
        })
    }

    fn password(&self) -> Option<&Secret> {
        self.etcd_password.as_ref().or(self.etcd_password_file.as_ref())
    }
}

/// Checks a cluster's name. It becomes part of names in etcd and NATS, in which `/` and `.` are separators.
pub(crate) fn cluster_name(text: &str) -> Result<String, &'static str> {
    name(text, "-_").ok_or("write 1 to 64 letters, digits, - and _")
}

/// Returns the text if it has 1 to 64 characters, all of them letters, digits or `signs`.
pub(super) fn name(text: &str, signs: &str) -> Option<String> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || signs.contains(letter);
    ((1..=64).contains(&text.len()) && text.chars().all(fits)).then(|| text.to_owned())
}
