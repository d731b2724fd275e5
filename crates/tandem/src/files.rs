//! The limit on open files. Each connection is an open file, and many systems allow a process only 1,024 unless it raises the limit.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Files for the process's own work: models, logs, connections to other processes, and those of the admin port.
const RESERVE: u64 = 512;

/// The frontend's limits on open connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Connections {
    pub(crate) all: u32,
    /// The maximum from one address; 0: no limit.
    pub(crate) per_address: u32,
}

/// Raises the limit on open files to its maximum.
pub(crate) fn raise_limit() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "the limit on open files cannot be raised to its maximum");
    }
}

/// Returns the limits on connections, lowered with a warning if the process may not open that many files: clients' connections could otherwise
/// prevent it from opening any file, and new clients would wait without an answer.
pub(crate) fn within_limit(connections: Connections) -> Connections {
    let Some(files) = getrlimit(Resource::Nofile).current else { return connections };
    let lowered = connections.within(files);
    if lowered != connections {
        tracing::warn!(
            files,
            max_connections = connections.all,
            lowered_to = lowered.all,
            per_address = lowered.per_address,
            "the limit on open files is too low for --max-connections and the own work of the process, so fewer connections are accepted; allow \
             {} files (ulimit -n, LimitNOFILE= of systemd, `ulimits` of a container), or set --max-connections to at most {}",
            u64::from(connections.all) + RESERVE,
            lowered.all
        );
    }
    lowered
}

impl Connections {
    /// Returns these limits, lowered if the process may open only `files` files and needs some of them for its own work. If they are
    /// lowered, one address gets at most half of all connections, so that one client leaves capacity to others.
    fn within(self, files: u64) -> Self {
        let free = files - RESERVE.min(files / 2);
        match u32::try_from(free) {
            Ok(free) if free < self.all => {
                let all = free.max(1);
                Self { all, per_address: self.per_address.min(all.div_ceil(2)) }
            }
            _ => self,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_files_for_the_process() {
        let of = |all, per_address| Connections { all, per_address };
        for (files, given, expected) in [
            (1_048_576, of(8192, 4096), of(8192, 4096)),
            (8192 + RESERVE, of(8192, 4096), of(8192, 4096)),
            (8192 + RESERVE - 1, of(8192, 4096), of(8191, 4096)),
            (4096, of(8192, 4096), of(3584, 1792)),
            (4096, of(8192, 10), of(3584, 10)),
            (4096, of(8192, 0), of(3584, 0)),
            (256, of(8192, 4096), of(128, 64)),
            (256, of(100, 50), of(100, 50)),
            (1, of(8, 4), of(1, 1)),
            (0, of(8, 4), of(1, 1)),
            (u64::MAX, of(u32::MAX, 4096), of(u32::MAX, 4096)),
        ] {
            assert_eq!(given.within(files), expected, "{files} files, {given:?}");
        }
    }
}
