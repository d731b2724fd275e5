//! The files by which the commands of a user find the clusters that `tandem up` runs for this user.
//!
//! - A file has the secret of its cluster. Files and folders of other users, or to which other users have access, are not used.
//! - The process of the cluster holds a lock on the file, from before the file has its name until the process ends, however it ends. A file
//!   without a lock is left from a process that was killed; the first command that finds it removes it. No name is used twice.
//! - A file of another host or network namespace, in a folder that both use, is skipped: its addresses have no meaning here.

use crate::settings::KeySource;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, DirBuilder, File, Metadata, TryLockError},
    io::{self, ErrorKind, Read, Write},
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

/// The permission bits of users other than the owner.
const OTHERS: u32 = 0o077;
/// The permissions of a folder that is created.
const OWNER_ONLY: u32 = 0o700;
/// How the names of the files begin and end.
const NAME: (&str, &str) = ("up-", ".json");
/// How the name of the file of a cluster that drains ends.
const DRAINING: &str = ".draining.json";
/// The maximum length of a file in bytes. It has some addresses and paths.
const LEN_MAX: u64 = 64 << 10;

/// A cluster that `tandem up` runs.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct RunningCluster {
    /// The id of its process.
    pub(crate) process: u32,
    /// The URL of its API.
    pub(crate) frontend: String,
    /// Whether its API listens on all addresses of this host.
    #[serde(default)]
    pub(crate) on_all_addresses: bool,
    /// The file with the certificate of its API; `None`: the API is served without TLS.
    pub(crate) ca: Option<PathBuf>,
    /// The address of its router's gRPC listener.
    pub(crate) router: SocketAddr,
    /// Its cluster key.
    pub(crate) key: KeySource,
    /// Whether it ends as soon as its requests are answered.
    #[serde(skip)]
    pub(crate) draining: bool,
}

/// The content of a file.
#[derive(Serialize, Deserialize)]
struct RunningEntry {
    /// The host and network namespace in which the addresses have a meaning.
    network: String,
    cluster: RunningCluster,
}

/// The file of a running cluster. It is removed when this value is dropped.
pub(crate) struct RunningFile {
    path: PathBuf,
    /// The open file, which holds the lock.
    _locked: File,
}

/// Returns the folders of this user that may have such files: the first one that can be used gets new files.
pub(crate) fn folders() -> Vec<PathBuf> {
    let user = directories::ProjectDirs::from("", "", "tandem");
    let folders = user.iter().flat_map(|user| [user.runtime_dir(), user.state_dir()]);
    folders.flatten().map(Path::to_owned).collect()
}

impl RunningFile {
    /// Writes the file of a cluster of this process. Logs a warning and returns `None` if none of the folders can be used.
    pub(crate) fn write(folders: &[PathBuf], cluster: &RunningCluster) -> Option<Self> {
        let mut problems = Vec::new();
        for folder in folders {
            match Self::write_in(folder, cluster) {
                Ok(file) => return Some(file),
                Err(error) => problems.push(format!("{}: {error}", folder.display())),
            }
        }
        if !problems.is_empty() {
            let problems = problems.join("; ");
            tracing::warn!(
                "commands such as `tandem chat` have to name this cluster, and `tandem top` needs its --cluster-key-file, because the file with its addresses and key cannot be written ({problems})"
            );
        }
        None
    }

    fn write_in(folder: &Path, cluster: &RunningCluster) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(OWNER_ONLY).create(folder)?;
        is_private(&fs::symlink_metadata(folder)?).map_err(io::Error::other)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.as_file().try_lock()?;
        let entry = RunningEntry { network: network(), cluster: cluster.clone() };
        file.write_all(&serde_json::to_vec(&entry)?)?;
        let path = folder.join(format!("{}{}{}", NAME.0, tandem_process::new_instance_id(), NAME.1));
        let locked = file.persist_noclobber(&path).map_err(|failed| failed.error)?;
        Ok(Self { path, _locked: locked })
    }

    /// Renames the file, so that commands use the cluster only if no other one runs.
    pub(crate) fn mark_draining(&self) {
        // Later calls find no file of this name.
        let _ = fs::rename(&self.path, self.draining());
    }

    fn draining(&self) -> PathBuf {
        self.path.with_extension(&DRAINING[1..])
    }
}

impl Drop for RunningFile {
    fn drop(&mut self) {
        for path in [&self.path, &self.draining()] {
            let _ = fs::remove_file(path);
        }
    }
}

impl RunningCluster {
    /// Returns the only cluster that this user runs, or `None` if there is none; one that drains only if no other runs. `command` is the command that needs it, for the error.
    ///
    /// # Errors
    /// Several clusters run, or one of the folders or files cannot be read.
    pub(crate) fn only(folders: &[PathBuf], command: &str) -> Result<Option<Self>> {
        let mut running = Self::all(folders)?;
        if running.iter().any(|one| !one.draining) {
            running.retain(|one| !one.draining);
        }
        if running.len() > 1 {
            let names: Vec<String> = running.iter().map(|one| format!("{} (process {})", one.frontend, one.process)).collect();
            bail!("you run several clusters: {}; name one, such as: {command} {}", names.join(", "), running[0].frontend);
        }
        Ok(running.pop())
    }

    /// Returns the clusters that this user runs, ordered by the URLs of their frontends. Removes the files of processes that were killed.
    pub(crate) fn all(folders: &[PathBuf]) -> Result<Vec<Self>> {
        let mut running = Vec::new();
        for folder in folders {
            // Skips a folder that does not exist or belongs to another user (after `su`, to the login user): it has no files of this user.
            if !fs::symlink_metadata(folder).is_ok_and(|metadata| metadata.is_dir() && is_private(&metadata).is_ok()) {
                continue;
            }
            let names = fs::read_dir(folder).with_context(|| format!("{} cannot be read", folder.display()))?.flatten();
            let names = names.map(|entry| entry.path()).filter(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with(NAME.0) && name.ends_with(NAME.1)
            });
            for path in names {
                running.extend(read(&path).with_context(|| format!("{} cannot be used; remove it", path.display()))?);
            }
        }
        running.sort_by(|one: &Self, other| one.frontend.cmp(&other.frontend));
        Ok(running)
    }
}

/// Returns the cluster in a file; `None` if its process has ended, or runs on another host. Removes the file of a process that has ended.
fn read(path: &Path) -> Result<Option<RunningCluster>> {
    let mut file = match File::open(path) {
        // The cluster has ended meanwhile.
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let metadata = file.metadata()?;
    ensure!(metadata.is_file() && metadata.len() <= LEN_MAX, "it is not a file of `tandem up`");
    is_private(&metadata).map_err(anyhow::Error::msg)?;
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(error.into()),
        Ok(()) => {
            // Another command may have removed it.
            let _ = fs::remove_file(path);
            return Ok(None);
        }
    }
    let mut text = Vec::new();
    file.read_to_end(&mut text)?;
    let entry: RunningEntry = serde_json::from_slice(&text)?;
    let draining = path.to_string_lossy().ends_with(DRAINING);
    Ok((entry.network == network()).then_some(RunningCluster { draining, ..entry.cluster }))
}

/// Returns an error unless only this user has access.
fn is_private(metadata: &Metadata) -> Result<(), &'static str> {
    match (metadata.uid() == rustix::process::geteuid().as_raw(), metadata.mode() & OTHERS) {
        (true, 0) => Ok(()),
        (true, _) => Err("other users have access to it; run chmod go= on it"),
        (false, _) => Err("it belongs to another user"),
    }
}

/// Returns what identifies this host, until it restarts, and the network namespace of this process; empty on systems without /proc.
fn network() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = fs::read_link("/proc/self/ns/net").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn cluster(port: u16) -> RunningCluster {
        RunningCluster {
            process: 7,
            frontend: format!("http://127.0.0.1:{port}"),
            on_all_addresses: false,
            ca: None,
            router: ([127, 0, 0, 1], port + 1).into(),
            key: KeySource::random(),
            draining: false,
        }
    }

    /// Returns a folder that does not exist yet, and the temporary folder that it is in.
    fn folder() -> (tempfile::TempDir, Vec<PathBuf>) {
        let parent = tempfile::tempdir().expect("the system can create a temporary folder");
        let folders = vec![parent.path().join("run/tandem")];
        (parent, folders)
    }

    fn only(folders: &[PathBuf]) -> Result<Option<String>, String> {
        let found = RunningCluster::only(folders, "tandem chat");
        found.map(|found| found.map(|found| found.frontend)).map_err(|error| format!("{error:#}"))
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("the file belongs to this user");
    }

    #[test]
    fn only_running_cluster_is_found_and_several_have_to_be_named() {
        let (_parent, folders) = folder();
        assert_eq!(only(&folders), Ok(None));
        let one = RunningFile::write(&folders, &cluster(8000)).expect("the folder is writable");
        assert_eq!(only(&folders), Ok(Some("http://127.0.0.1:8000".to_owned())));
        let mode = |path: &Path| fs::metadata(path).expect("it exists").mode() & 0o777;
        assert_eq!((mode(&folders[0]), mode(&one.path)), (0o700, 0o600));
        assert_eq!(fs::read_dir(&folders[0]).expect("it is a folder").count(), 1, "no temporary file is left");

        let two = RunningFile::write(&folders, &cluster(8010)).expect("the folder is writable");
        let error = only(&folders).expect_err("two clusters run");
        for part in ["http://127.0.0.1:8000 (process 7), http://127.0.0.1:8010", "tandem chat http://127.0.0.1:8000"] {
            assert!(error.contains(part), "{error}");
        }
        two.mark_draining();
        two.mark_draining();
        assert_eq!(only(&folders), Ok(Some("http://127.0.0.1:8000".to_owned())));
        drop(one);
        assert_eq!(
            only(&folders),
            Ok(Some("http://127.0.0.1:8010".to_owned())),
            "a cluster that drains is found if no other runs"
        );
        drop(two);
        assert_eq!(only(&folders), Ok(None));
        assert_eq!(fs::read_dir(&folders[0]).expect("it is a folder").count(), 0, "no file is left");
    }

    #[test]
    fn file_without_a_lock_is_removed() {
        let (_parent, folders) = folder();
        let written = RunningFile::write(&folders, &cluster(8000)).expect("the folder is writable");
        let stale = folders[0].join("up-killed.json");
        fs::copy(&written.path, &stale).expect("the folder is writable");
        fs::write(folders[0].join("cluster-key"), "another file").expect("the folder is writable");
        assert_eq!(only(&folders), Ok(Some("http://127.0.0.1:8000".to_owned())));
        assert!(!stale.exists() && folders[0].join("cluster-key").exists());
    }

    #[test]
    fn file_or_folder_that_others_may_read_is_not_used() {
        let (_parent, folders) = folder();
        let written = RunningFile::write(&folders, &cluster(8000)).expect("the folder is writable");
        set_mode(&written.path, 0o640);
        let error = only(&folders).expect_err("the file may be read by its group");
        assert!(error.contains("other users have access") && error.contains("up-"), "{error}");
        set_mode(&written.path, 0o600);
        set_mode(&folders[0], 0o755);
        assert_eq!(only(&folders), Ok(None));
        assert!(RunningFile::write(&folders, &cluster(8010)).is_none(), "no secret is written into an open folder");
        let second = folders[0].with_file_name("state");
        let both = [folders[0].clone(), second.clone()];
        let _other = RunningFile::write(&both, &cluster(8010)).expect("the second folder can be created");
        assert_eq!(only(&both), Ok(Some("http://127.0.0.1:8010".to_owned())));
        let link = folders[0].with_file_name("link");
        std::os::unix::fs::symlink(&second, &link).expect("the folder is writable");
        assert_eq!(only(&[link]), Ok(None), "a link is no folder of ours");
        // The system refuses to look at this path, as it does for the runtime folder of another user.
        let unreadable = written.path.join("tandem");
        assert_eq!(only(&[unreadable, second]), Ok(Some("http://127.0.0.1:8010".to_owned())));
    }

    #[test]
    fn file_of_another_network_is_skipped_and_a_broken_one_is_an_error() {
        let (_parent, folders) = folder();
        let written = RunningFile::write(&folders, &cluster(8000)).expect("the folder is writable");
        let text = fs::read_to_string(&written.path).expect("the file is text");
        fs::write(&written.path, text.replace(&network(), "another")).expect("the file is writable");
        assert_eq!(only(&folders), Ok(None));
        fs::write(&written.path, "{}").expect("the file is writable");
        assert!(only(&folders).is_err_and(|error| error.contains("cannot be used; remove it")));
    }
}
