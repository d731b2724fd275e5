//! A list, or a file with one that is read again while the process runs.
//!
//! A file that changes badly changes nothing: the last good list stays until there is another. One that is just being written
//! is not half believed: a change counts when two looks in a row see the same.

use super::{ADDRESSES_MAX, DiscoveryError};
use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    time::Duration,
};
use tandem_proto::channel::{self, InvalidAddress};

/// Between two looks at a file: a worker that is added is found within two of them, and a look costs next to nothing.
const LOOK: Duration = Duration::from_millis(500);
/// A file of so many addresses is not a list of workers.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A file that is looked at again and again.
#[derive(Debug)]
pub(super) struct Watched {
    path: PathBuf,
    /// As it was read last.
    text: String,
    /// What was wrong with it then, so that it is logged once.
    told: Option<DiscoveryError>,
}

impl Watched {
    /// Reads it for the first time.
    pub(super) fn open(path: PathBuf) -> Result<(BTreeSet<String>, Self), DiscoveryError> {
        let text = read(&path)?;
        Ok((parsed(&text)?, Self { path, text, told: None }))
    }

    /// Resolves when it lists others than these. Cancel-safe.
    pub(super) async fn changed(&mut self, now: &BTreeSet<String>) -> BTreeSet<String> {
        loop {
            tokio::time::sleep(LOOK).await;
            let path = self.path.clone();
            let look = tokio::task::spawn_blocking(move || read(&path)).await.expect("reading returns its errors");
            let listed = match look {
                // Another text than before may be half of what is to come.
                Ok(text) if text != self.text => {
                    self.text = text;
                    continue;
                }
                look => look.and_then(|text| parsed(&text)),
            };
            match listed {
                Ok(listed) => {
                    self.told = None;
                    if listed != *now {
                        return listed;
                    }
                }
                Err(error) if self.told.as_ref() != Some(&error) => {
                    tracing::warn!("the list stays as it was: {error}");
                    self.told = Some(error);
                }
                Err(_) => {}
            }
        }
    }
}

fn read(path: &Path) -> Result<String, DiscoveryError> {
    let failed = |error: io::Error| DiscoveryError::File { path: path.to_owned(), problem: error.to_string() };
    let mut text = String::new();
    let file = fs::File::open(path).map_err(failed)?;
    file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(failed(io::Error::other("it is larger than 1 MiB")));
    }
    Ok(text)
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
        discovery::{Members, Workers},
    };

    fn list(addresses: &[&str]) -> BTreeSet<String> {
        addresses.iter().map(|address| (*address).to_owned()).collect()
    }

    fn open(workers: Workers) -> Result<Members, DiscoveryError> {
        workers.open(&Metrics::default())
    }

    fn write(path: &Path, text: &str) {
        std::fs::write(path, text).expect("a temporary file");
    }

    #[test]
    fn lists_are_checked_and_said_twice_is_said_once() {
        let members = open(["a:1", "b:2", "a:1"].map(str::to_owned).into_iter().collect()).expect("valid");
        assert_eq!(*members.now(), list(&["a:1", "b:2"]));
        assert_eq!(parsed("# all\n a:1 # first\n\nb:2\r\n"), Ok(list(&["a:1", "b:2"])));
        assert_eq!(parsed("a:1 b:2"), Err(DiscoveryError::Address { address: "a:1 b:2".to_owned() }));
        let many = (0..=ADDRESSES_MAX).map(|host| format!("h{host}:1\n")).collect::<String>();
        assert_eq!(parsed(&many), Err(DiscoveryError::TooMany { found: ADDRESSES_MAX + 1 }));
    }

    #[test]
    fn what_is_wrong_at_the_start_is_told_at_the_start() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("workers");
        let opened = || open(Workers::File(path.clone())).map(drop).map_err(|error| error.to_string());
        assert!(opened().is_err_and(|error| error.contains("cannot be read")));
        write(&path, "worker-1\n");
        assert!(opened().is_err_and(|error| error.contains("write host:port")));
        write(&path, &"#".repeat(FILE_BYTES_MAX as usize + 1));
        assert!(opened().is_err_and(|error| error.contains("1 MiB")));
        write(&path, "");
        assert_eq!(opened(), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_is_followed_and_its_mistakes_change_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("workers");
        write(&path, "a:1\n");
        let mut members = open(Workers::File(path.clone())).expect("valid");
        for (text, then) in [("a:1\nb:2\n", list(&["a:1", "b:2"])), ("b:2\n", list(&["b:2"])), ("", list(&[]))] {
            write(&path, text);
            members.changed().await;
            assert_eq!(*members.now(), then, "{text:?}");
        }
        write(&path, "nonsense");
        assert!(tokio::time::timeout(LOOK * 5, members.changed()).await.is_err());
        std::fs::remove_file(&path).expect("ours");
        assert!(tokio::time::timeout(LOOK * 5, members.changed()).await.is_err());
        assert_eq!(*members.now(), list(&[]));
        write(&path, "c:3");
        members.changed().await;
        assert_eq!(*members.now(), list(&["c:3"]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_text_that_is_still_growing_is_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("workers");
        write(&path, "a:1\nb:2\n");
        let mut members = open(Workers::File(path.clone())).expect("valid");
        let mut changed = Box::pin(members.changed());
        for text in ["", "a:1\n", "a:1\nb:2\n", "a:1\nb:2\nc:3\n"] {
            write(&path, text);
            let one_look = LOOK + Duration::from_millis(1);
            assert!(tokio::time::timeout(one_look, changed.as_mut()).await.is_err(), "{text:?}");
        }
        changed.await;
        assert_eq!(*members.now(), list(&["a:1", "b:2", "c:3"]));
    }
}
