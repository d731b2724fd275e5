//! Who is in the cluster: a list, a file, or etcd.

mod card;
mod etcd;
mod follow;
mod list;
mod register;

pub use card::{Card, Role};
pub use etcd::{EtcdError, EtcdSettings, EtcdTls};
pub use register::register;

use crate::Metrics;
use std::{collections::BTreeSet, path::PathBuf};
use tandem_proto::ClusterKey;
use tokio::{sync::watch, task::JoinSet};

/// Addresses that one process follows. A router keeps a connection to each; more than these want several clusters.
const ADDRESSES_MAX: usize = 1_024;

/// Where it is said who is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Workers {
    /// `host:port` of each, for the process's life.
    List(Vec<String>),
    /// A file with one `host:port` a line; what follows a `#` is for people.
    File(PathBuf),
    /// Whoever registers there with one of these roles.
    Etcd(EtcdSettings, Vec<Role>),
}

impl FromIterator<String> for Workers {
    fn from_iter<I: IntoIterator<Item = String>>(addresses: I) -> Self {
        Self::List(addresses.into_iter().collect())
    }
}

/// Why a list cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiscoveryError {
    /// Not `host:port`.
    #[error("the address {address:?} cannot be used; write host:port")]
    Address {
        /// As it was given.
        address: String,
    },
    /// More than one process can follow.
    #[error("{found} addresses are listed, {ADDRESSES_MAX} are possible; make several clusters of them")]
    TooMany {
        /// How many.
        found: usize,
    },
    /// The file cannot be read.
    #[error("the list {} cannot be read ({problem}); write it, one host:port a line", .path.display())]
    File {
        /// As it was given.
        path: PathBuf,
        /// What the system says.
        problem: String,
    },
}

impl Workers {
    /// The same among processes with this key: registrations in etcd count only if they are signed with it. Listed addresses need no signature.
    pub fn with_key(self, key: ClusterKey) -> Self {
        match self {
            Self::Etcd(settings, roles) => Self::Etcd(EtcdSettings { key, ..settings }, roles),
            list @ (Self::List(_) | Self::File(_)) => list,
        }
    }

    /// Reads the list for the first time: what is wrong now is told now. etcd is asked from now on, and may be away.
    pub fn open(self, metrics: &Metrics) -> Result<Members, DiscoveryError> {
        let (now, source) = match self {
            Self::List(list) => (list::checked(list.into_iter())?, Source::List),
            Self::File(path) => {
                let (now, file) = list::Watched::open(path)?;
                (now, Source::File(file))
            }
            Self::Etcd(settings, roles) => {
                let (addresses, task) = follow::follow(settings, roles, metrics);
                (BTreeSet::new(), Source::Etcd { addresses, _task: task })
            }
        };
        Ok(Members { now, source })
    }
}

/// Who is listed now.
#[derive(Debug)]
pub struct Members {
    now: BTreeSet<String>,
    source: Source,
}

#[derive(Debug)]
enum Source {
    List,
    File(list::Watched),
    Etcd { addresses: watch::Receiver<BTreeSet<String>>, _task: JoinSet<()> },
}

impl Members {
    /// Their addresses.
    pub fn now(&self) -> &BTreeSet<String> {
        &self.now
    }

    /// Whether being listed no more is only a hint: etcd may have lost its data, or be cut off from a process that lives. The
    /// operator's list is an order.
    pub fn are_hints(&self) -> bool {
        matches!(self.source, Source::Etcd { .. })
    }

    /// Resolves when they have changed; never for a list. Cancel-safe.
    pub async fn changed(&mut self) {
        self.now = match &mut self.source {
            Source::List => std::future::pending().await,
            Source::File(file) => file.changed(&self.now).await,
            Source::Etcd { addresses, .. } => {
                addresses.changed().await.expect("the task tells until it is dropped");
                addresses.borrow_and_update().clone()
            }
        };
    }
}
