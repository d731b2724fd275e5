//! Discovery: the addresses of peers, from a list, a file or etcd.

mod etcd;
mod list;
mod record;
mod register;
mod watch;

pub use etcd::{EtcdError, EtcdSettings, EtcdTls};
pub use record::{MemberRecord, Role};
pub use register::register;

use crate::Metrics;
use std::{collections::BTreeSet, path::PathBuf};
use tandem_proto::ClusterKey;
use tokio::{sync::watch::Receiver, task::JoinSet};

/// Maximum number of addresses that one process may have as peers. A router keeps a connection to each; larger clusters must be divided.
const ADDRESSES_MAX: usize = 1_024;

/// The source of the addresses of peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberSource {
    /// The addresses are a static list of `host:port`.
    List(Vec<String>),
    /// The addresses are in a file with one `host:port` per line and comments after `#`. It is read again while the process runs.
    File(PathBuf),
    /// The addresses are those of the processes that are registered in etcd with one of these roles.
    Etcd(EtcdSettings, Vec<Role>),
}

impl FromIterator<String> for MemberSource {
    fn from_iter<I: IntoIterator<Item = String>>(addresses: I) -> Self {
        Self::List(addresses.into_iter().collect())
    }
}

/// The reason why the addresses of a source cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum DiscoveryError {
    #[error("the address {address:?} cannot be used; write host:port")]
    Address { address: String },
    #[error("{found} addresses are listed, at most {ADDRESSES_MAX} are allowed; divide them into several clusters")]
    TooMany { found: usize },
    #[error("the member list {} cannot be read ({problem}); write one host:port per line", .path.display())]
    File { path: PathBuf, problem: String },
}

impl MemberSource {
    /// Returns this source with the key of its cluster. Registrations in etcd are then accepted only if they are signed with the key. Addresses
    /// from a list or file need no signature.
    pub fn with_key(self, key: ClusterKey) -> Self {
        match self {
            Self::Etcd(settings, roles) => Self::Etcd(EtcdSettings { key, ..settings }, roles),
            list @ (Self::List(_) | Self::File(_)) => list,
        }
    }

    /// Checks that a list or file can be used. etcd may be unreachable at any time, and is not asked.
    ///
    /// # Errors
    /// Fails if the list or file cannot be used.
    pub fn check(&self) -> Result<(), DiscoveryError> {
        match self {
            Self::List(list) => list::checked(list.iter().cloned()).map(drop),
            Self::File(path) => list::WatchedAddresses::open(path.clone()).map(drop),
            Self::Etcd(..) => Ok(()),
        }
    }

    /// Opens the source. A list or file is read now. etcd is watched from now on and may be unreachable.
    ///
    /// # Errors
    /// Fails if the list or file cannot be used.
    pub fn open(self, metrics: &Metrics) -> Result<Members, DiscoveryError> {
        let (now, source) = match self {
            Self::List(list) => (list::checked(list.into_iter())?, AddressSource::List),
            Self::File(path) => {
                let (now, file) = list::WatchedAddresses::open(path.clone())?;
                if now.is_empty() {
                    tracing::warn!(file = %path.display(), "the list of members is empty; write one host:port per line");
                }
                (now, AddressSource::File(file))
            }
            Self::Etcd(settings, roles) => {
                let (addresses, task) = watch::watch(settings, roles, metrics);
                (BTreeSet::new(), AddressSource::Etcd { addresses, _task: task })
            }
        };
        Ok(Members { now, source })
    }
}

/// The current addresses of a [`MemberSource`].
#[derive(Debug)]
pub struct Members {
    now: BTreeSet<String>,
    source: AddressSource,
}

#[derive(Debug)]
enum AddressSource {
    List,
    File(list::WatchedAddresses),
    Etcd { addresses: Receiver<BTreeSet<String>>, _task: JoinSet<()> },
}

impl Members {
    /// Returns the addresses as of the last time that [`Members::changed`] resolved.
    pub fn now(&self) -> &BTreeSet<String> {
        &self.now
    }

    /// Returns whether the removal of an address is only a hint. A process that is deregistered from etcd may still be running, because etcd
    /// may have lost its data or its connection to the process. If an operator removes an address from a file, the process at this address
    /// must not be used.
    pub fn are_advisory(&self) -> bool {
        matches!(self.source, AddressSource::Etcd { .. })
    }

    /// Resolves when the addresses have changed. It never resolves for a static list. This method is cancel-safe.
    pub async fn changed(&mut self) {
        self.now = match &mut self.source {
            AddressSource::List => std::future::pending().await,
            AddressSource::File(file) => file.changed(&self.now).await,
            AddressSource::Etcd { addresses, .. } => {
                addresses.changed().await.expect("the task keeps the sender until it is dropped");
                addresses.borrow_and_update().clone()
            }
        };
    }
}
