//! A member list that is static, or is in a file that is polled while the process runs.
//!
//! If the file becomes invalid or empty, the last valid list stays in use: a file that lost its content must not remove all members.

use super::{ADDRESSES_MAX, DiscoveryError};
use crate::watched_file::WatchedFile;
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};
use tandem_proto::channel::{self, InvalidAddress};

/// The maximum size of a member file. A larger file is an error.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Debug)]
pub(super) struct WatchedAddresses {
    path: PathBuf,
    file: WatchedFile,
}

impl WatchedAddresses {
    pub(super) fn open(path: PathBuf) -> Result<(BTreeSet<String>, Self), DiscoveryError> {
        let (text, file) = WatchedFile::open(path.clone(), FILE_BYTES_MAX).map_err(|error| unreadable(&path, &error))?;
        let listed = parsed(&text).map_err(|error| unreadable(&path, &error))?;
        Ok((listed, Self { path, file }))
    }

    /// Resolves when the file lists addresses other than `now`, and returns them. This method is cancel-safe.
    pub(super) async fn changed(&mut self, now: &BTreeSet<String>) -> BTreeSet<String> {
        loop {
            let changed = self.file.changed().await;
            match changed.map_err(|error| unreadable(&self.path, &error)).and_then(|text| parsed(&text)) {
                Ok(listed) if listed.is_empty() => tracing::warn!(
                    file = %self.path.display(),
                    "the list of members has become empty, so the last list stays in use; to remove all members, stop their processes"
                ),
                Ok(listed) if listed != *now => return listed,
                Ok(_) => {}
                Err(error) => tracing::warn!("the last valid list of members stays in use: {error}"),
            }
        }
    }
}

fn unreadable(path: &Path, error: &impl ToString) -> DiscoveryError {
    DiscoveryError::File { path: path.to_owned(), problem: error.to_string() }
}

fn parsed(text: &str) -> Result<BTreeSet<String>, DiscoveryError> {
    let lines = text.lines().filter_map(|line| line.split('#').next()).map(str::trim);
    checked(lines.filter(|line| !line.is_empty()).map(str::to_owned))
}

pub(super) fn checked(addresses: impl Iterator<Item = String>) -> Result<BTreeSet<String>, DiscoveryError> {
    let mut all = BTreeSet::new();
    for address in addresses {
        channel::endpoint(&address).map_err(|InvalidAddress| DiscoveryError::Address { address: address.clone() })?;
        all.insert(address);
    }
    if all.len() > ADDRESSES_MAX { Err(DiscoveryError::TooMany { found: all.len() }) } else { Ok(all) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Metrics,
        discovery::{MemberSource, Members},
        watched_file::POLL_INTERVAL,
    };
    use std::time::Duration;

    fn list(addresses: &[&str]) -> BTreeSet<String> {
        addresses.iter().map(|address| (*address).to_owned()).collect()
    }

    fn open(source: MemberSource) -> Result<Members, DiscoveryError> {
        source.open(&Metrics::default())
    }

    fn write(path: &Path, text: &str) {
        std::fs::write(path, text).expect("a temporary file can be written");
    }

    #[test]
    fn member_list_is_validated_and_deduplicated() {
        let members = open(["a:1", "b:2", "a:1"].map(str::to_owned).into_iter().collect()).expect("the member source is valid");
        assert_eq!(*members.now(), list(&["a:1", "b:2"]));
        assert_eq!(parsed("# all\n a:1 # first\n\nb:2\r\n"), Ok(list(&["a:1", "b:2"])));
        assert_eq!(parsed("a:1 b:2"), Err(DiscoveryError::Address { address: "a:1 b:2".to_owned() }));
        let many = (0..=ADDRESSES_MAX).map(|host| format!("h{host}:1\n")).collect::<String>();
        assert_eq!(parsed(&many), Err(DiscoveryError::TooMany { found: ADDRESSES_MAX + 1 }));
    }

    #[test]
    fn invalid_member_file_is_refused_at_start() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().join("workers");
        let opened = || open(MemberSource::File(path.clone())).map(drop).map_err(|error| error.to_string());
        assert!(opened().is_err_and(|error| error.contains("cannot be read")));
        write(&path, "worker-1\n");
        assert!(opened().is_err_and(|error| error.contains("write host:port")));
        write(&path, &"#".repeat(FILE_BYTES_MAX as usize + 1));
        assert!(opened().is_err_and(|error| error.contains("1 MiB")));
        write(&path, "");
        assert_eq!(opened(), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn changes_of_a_member_file_are_detected_and_an_invalid_or_empty_file_is_ignored() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().join("workers");
        write(&path, "a:1\n");
        let mut members = open(MemberSource::File(path.clone())).expect("the member source is valid");
        for (text, then) in [("a:1\nb:2\n", list(&["a:1", "b:2"])), ("b:2\n", list(&["b:2"]))] {
            write(&path, text);
            members.changed().await;
            assert_eq!(*members.now(), then, "{text:?}");
        }
        for text in ["nonsense", "", "\n", "# b:2\n"] {
            write(&path, text);
            assert!(tokio::time::timeout(POLL_INTERVAL * 5, members.changed()).await.is_err(), "{text:?}");
        }
        std::fs::remove_file(&path).expect("the folder is writable");
        assert!(tokio::time::timeout(POLL_INTERVAL * 5, members.changed()).await.is_err());
        assert_eq!(*members.now(), list(&["b:2"]));
        write(&path, "c:3");
        members.changed().await;
        assert_eq!(*members.now(), list(&["c:3"]));
    }

    #[tokio::test(start_paused = true)]
    async fn member_file_is_ignored_while_it_is_being_written() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().join("workers");
        write(&path, "a:1\nb:2\n");
        let mut members = open(MemberSource::File(path.clone())).expect("the member source is valid");
        let mut changed = Box::pin(members.changed());
        for text in ["", "a:1\n", "a:1\nb:2\n", "a:1\nb:2\nc:3\n"] {
            write(&path, text);
            let one_poll = POLL_INTERVAL + Duration::from_millis(1);
            assert!(tokio::time::timeout(one_poll, changed.as_mut()).await.is_err(), "{text:?}");
        }
        changed.await;
        assert_eq!(*members.now(), list(&["a:1", "b:2", "c:3"]));
    }
}
