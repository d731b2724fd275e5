//! How processes find each other through etcd, and where they say that they are.

use super::{
    roles::{address, with_commas},
    secret_file,
};
use clap::Args;
use serde::Serialize;
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use tandem_node::{
    Secret,
    discovery::{EtcdError, EtcdSettings, EtcdTls},
};
use tandem_proto::ClusterKey;

/// etcd, for all roles.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Options of discovery")]
#[serde(rename_all = "kebab-case")]
pub struct DiscoveryFlags {
    /// host:port of etcd's members, with commas between: processes register there and find each other, without any list
    /// [default: no etcd, but lists]
    #[arg(long, env = "TANDEM_ETCD", value_name = "ADDRESSES", value_delimiter = ',', value_parser = address)]
    #[serde(serialize_with = "with_commas", skip_serializing_if = "Vec::is_empty")]
    pub etcd: Vec<String>,

    /// Who we are to etcd, if it asks
    #[arg(long, env = "TANDEM_ETCD_USER", value_name = "NAME", requires_all = ["etcd", "etcd_secret"])]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etcd_user: Option<String>,

    /// The password; never printed, and not for others to see when it comes from the environment
    #[arg(
        long,
        env = "TANDEM_ETCD_PASSWORD",
        value_name = "PASSWORD",
        hide_env_values = true,
        requires = "etcd_user",
        group = "etcd_secret"
    )]
    #[serde(skip)]
    pub etcd_password: Option<Secret>,

    /// A file that holds the password; it is read once, at the start
    #[arg(long, env = "TANDEM_ETCD_PASSWORD_FILE", value_name = "FILE", value_parser = secret_file, requires = "etcd_user", group = "etcd_secret")]
    #[serde(skip)]
    pub etcd_password_file: Option<Secret>,

    /// A PEM file of whom to believe that it is etcd; connections are encrypted then
    #[arg(long, env = "TANDEM_ETCD_CA", value_name = "FILE", requires = "etcd")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etcd_ca: Option<PathBuf>,

    /// Our own certificate, if etcd asks for one
    #[arg(long, env = "TANDEM_ETCD_CERT", value_name = "FILE", requires_all = ["etcd_ca", "etcd_key"])]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etcd_cert: Option<PathBuf>,

    /// The key to it
    #[arg(long, env = "TANDEM_ETCD_KEY", value_name = "FILE", requires = "etcd_cert")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub etcd_key: Option<PathBuf>,

    /// A process that etcd has not heard of for so long is off the list; shorter ones end at a short hiccup of the network
    #[arg(long, env = "TANDEM_LEASE_TTL", value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    pub lease_ttl: u64,

    /// host:port at which others reach this process [default: where it listens; with --etcd, and if that is on all addresses, this
    /// host's name and the port]
    #[arg(long, env = "TANDEM_ADVERTISE", value_name = "ADDRESS", value_parser = address)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advertise: Option<String>,
}

/// Why a process cannot take part in discovery.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryFlagsError {
    /// This host has no name that could be on the list.
    #[error(
        "it listens on {0}, which nobody can connect to, and this host has no usable name; say with --advertise at which host:port others reach it"
    )]
    NoAdvertisedAddress(SocketAddr),
    /// Files that are not there, or not what they should be.
    #[error("{}", tandem_node::retry::error_chain(.0))]
    Etcd(#[source] EtcdError),
}

impl DiscoveryFlags {
    /// How etcd is used by a process that listens there, and its address on the list; `None` without etcd.
    pub fn registration(
        &self,
        cluster: &str,
        listens: SocketAddr,
    ) -> Result<Option<(EtcdSettings, String)>, DiscoveryFlagsError> {
        let Some(settings) = self.etcd(cluster) else { return Ok(None) };
        settings.check().map_err(DiscoveryFlagsError::Etcd)?;
        match &self.advertise {
            Some(address) => Ok(Some((settings, address.clone()))),
            None if listens.ip().is_unspecified() => {
                let named = format!("{}:{}", rustix::system::uname().nodename().to_string_lossy(), listens.port());
                let named = address(&named).map_err(|_| DiscoveryFlagsError::NoAdvertisedAddress(listens))?;
                Ok(Some((settings, named)))
            }
            None => Ok(Some((settings, listens.to_string()))),
        }
    }

    /// How etcd is used by a cluster without a key; `None` without it.
    pub(super) fn etcd(&self, cluster: &str) -> Option<EtcdSettings> {
        if self.etcd.is_empty() {
            return None;
        }
        let password = self.etcd_password.clone().or_else(|| self.etcd_password_file.clone());
        let identity = self.etcd_cert.clone().zip(self.etcd_key.clone());
        Some(EtcdSettings {
            endpoints: self.etcd.clone(),
            user: self.etcd_user.clone().zip(password),
            tls: self.etcd_ca.clone().map(|ca| EtcdTls { ca, identity }),
            cluster: cluster.to_owned(),
            key: ClusterKey::default(),
            lease_ttl: Duration::from_secs(self.lease_ttl),
        })
    }
}
