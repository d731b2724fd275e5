//! The secret that all processes of a cluster share.

use clap::Args;
use serde::{Deserialize, Serialize};
use std::{
    error::Error,
    fs::{self, DirBuilder},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};
use tandem_process::{read_secret_file, retry::error_chain};
use tandem_proto::ClusterKey;

/// The permission bits with which all users, or a file's group, may read it.
const READABLE_BY_ALL: u32 = 0o004;
const READABLE_BY_GROUP: u32 = 0o040;

/// The file, in the user's state folder, of the cluster key that `tandem up` keeps.
const KEPT_KEY: &str = "cluster-key";
/// The permissions of the state folder, if it has to be created.
const OWNER_ONLY: u32 = 0o700;

/// The file with the cluster key.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize)]
#[command(next_help_heading = "Security")]
#[serde(rename_all = "kebab-case")]
pub struct KeyArgs {
    /// File with the cluster's secret: 32 bytes or more, the same for all processes of the cluster. With it, processes refuse calls that
    /// are not authenticated with the key, sign KV events and registrations, connect only to addresses that the cluster has signed, and
    /// hash prompts with the key. Make one with: openssl rand -hex 32 [default: none, so that a first start needs no file; `tandem up`
    /// makes a key for itself, and keeps it in the user's state folder if its engines are external]
    #[arg(long, env = "TANDEM_CLUSTER_KEY_FILE", value_name = "FILE")]
    pub cluster_key_file: Option<PathBuf>,
}

/// Where the processes of a cluster, and the tools of its user, find its key. It is never printed, because it may have the secret.
#[derive(Clone, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeySource {
    /// The file with the secret.
    File(PathBuf),
    /// The secret itself, which is in no other file.
    Secret(String),
}

impl KeySource {
    /// Makes a secret for a cluster that runs in one process.
    pub fn random() -> Self {
        Self::Secret(random_secret())
    }

    /// Returns the key.
    ///
    /// # Errors
    /// The file is missing, or the secret is too short or too long.
    pub fn read(&self) -> Result<ClusterKey, KeyFileError> {
        match self {
            Self::File(path) => KeyArgs { cluster_key_file: Some(path.clone()) }.read(),
            Self::Secret(secret) => {
                ClusterKey::new(secret.as_bytes()).map_err(|source| KeyFileError { path: PathBuf::new(), source: source.into() })
            }
        }
    }
}

/// The file of the cluster key cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("--cluster-key-file {} cannot be used; make one with: openssl rand -hex 32", path.display())]
pub struct KeyFileError {
    path: PathBuf,
    source: Box<dyn Error + Send + Sync>,
}

impl KeyArgs {
    /// Returns the cluster key, which has no secret if no file is set. Logs a warning if users other than the file's owner can read it.
    ///
    /// # Errors
    /// The file is missing, too short or too long.
    pub fn read(&self) -> Result<ClusterKey, KeyFileError> {
        let Some(path) = &self.cluster_key_file else { return Ok(ClusterKey::default()) };
        let unusable = |source| KeyFileError { path: path.clone(), source };
        let content = read_secret_file(path).map_err(|error| unusable(error.into()))?;
        let file = fs::metadata(path).map_err(|error| unusable(error.into()))?;
        let mode = file.mode();
        if is_too_open(mode, file.uid()) {
            tracing::warn!(
                path = %path.display(),
                mode = format!("{:o}", mode & 0o777),
                "users other than its owner can read the cluster key's file; run chmod 600 on it"
            );
        }
        ClusterKey::new(without_newline(&content)).map_err(|error| unusable(error.into()))
    }

    /// Returns the key of a cluster in front of external engines. The engines keep running when the cluster ends, and the salts under which
    /// they cache prompts depend on the key. If no key file is set, the key is therefore stored in the user's state folder, so that the
    /// next start uses the same one. If the key cannot be stored, it is random, and a warning says what is lost.
    ///
    /// # Errors
    /// A file is set, and it is missing, too short or too long.
    pub fn read_or_keep(&self) -> Result<(ClusterKey, KeySource), KeyFileError> {
        if self.cluster_key_file.is_some() {
            return self.read_or_make();
        }
        let user = directories::ProjectDirs::from("", "", "tandem");
        let kept = match user.as_ref().and_then(|user| user.state_dir()) {
            Some(folder) => kept_key(folder).map(|key| Ok((key, KeySource::File(folder.join(KEPT_KEY))))),
            None => Err("this user has no home directory and no XDG_STATE_HOME".into()),
        };
        kept.unwrap_or_else(|error| {
            tracing::warn!(
                error = %error_chain(&*error),
                "the cluster key cannot be kept for the next start, so a random one is used: after a restart, no request finds what the engines have cached before; set --cluster-key-file"
            );
            self.read_or_make()
        })
    }

    /// Returns the key of a cluster that runs in one process: a random one if no key file is set.
    ///
    /// # Errors
    /// A file is set, and it is missing, too short or too long.
    pub fn read_or_make(&self) -> Result<(ClusterKey, KeySource), KeyFileError> {
        let source = self.cluster_key_file.clone().map_or_else(KeySource::random, KeySource::File);
        Ok((source.read()?, source))
    }
}

/// Returns whether users for which the file is not meant can read it. A file of root may be meant for a group: in Kubernetes, a Secret's files
/// belong to root and to the pod's group.
fn is_too_open(mode: u32, owner: u32) -> bool {
    mode & READABLE_BY_ALL != 0 || (mode & READABLE_BY_GROUP != 0 && owner != 0)
}

/// Returns the key in this folder. Creates folder and key if there are none.
fn kept_key(folder: &Path) -> Result<ClusterKey, Box<dyn Error + Send + Sync>> {
    let path = folder.join(KEPT_KEY);
    let is_new = !path.exists();
    if is_new {
        create_key(folder, &path).map_err(|error| format!("{} cannot be created: {error}", path.display()))?;
    }
    let read = KeyArgs { cluster_key_file: Some(path.clone()) }.read();
    let key = read.map_err(|KeyFileError { path, source }| {
        format!("{} cannot be used; delete it, so that another key is made: {}", path.display(), error_chain(&*source))
    })?;
    tracing::info!(path = %path.display(), is_new, "using this user's stored cluster key");
    Ok(key)
}

/// Creates a file with a random secret, which only its owner may read. A file that another process has created meanwhile is left as it is.
fn create_key(folder: &Path, path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(OWNER_ONLY).create(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    writeln!(file, "{}", random_secret())?;
    file.as_file().sync_all()?;
    match file.persist_noclobber(path) {
        Err(failed) if failed.error.kind() != io::ErrorKind::AlreadyExists => Err(failed.error),
        _ => Ok(()),
    }
}

fn random_secret() -> String {
    ClusterKey::random_secret().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Removes the newline with which editors and shells end a file, because it is not meant to be part of the secret.
fn without_newline(content: &[u8]) -> &[u8] {
    let content = content.strip_suffix(b"\n").unwrap_or(content);
    content.strip_suffix(b"\r").unwrap_or(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: Option<&[u8]>) -> Result<ClusterKey, String> {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().join("key");
        if let Some(content) = content {
            fs::write(&path, content).expect("the folder is writable");
        }
        let args = KeyArgs { cluster_key_file: Some(path) };
        args.read().map_err(|error| format!("{:#}", anyhow::Error::from(error)))
    }

    #[test]
    fn final_newline_is_not_part_of_the_cluster_key() {
        let secret = b"0123456789abcdef0123456789abcdef";
        let fingerprint = |content: &[u8]| read(Some(content)).expect("the secret is long enough").fingerprint().to_owned();
        let plain = fingerprint(secret);
        assert_eq!(fingerprint(&[secret, &b"\n"[..]].concat()), plain);
        assert_eq!(fingerprint(&[secret, &b"\r\n"[..]].concat()), plain);
        assert_ne!(fingerprint(&[secret, &b" \n"[..]].concat()), plain);
        assert!(!KeyArgs::default().read().expect("--cluster-key-file is optional").is_set());
    }

    #[test]
    fn key_file_may_be_readable_by_a_group_only_if_it_belongs_to_root() {
        for (mode, owner, expected) in [
            (0o600, 1000, false),
            (0o400, 0, false),
            (0o440, 0, false),
            (0o440, 1000, true),
            (0o644, 0, true),
            (0o604, 1000, true),
        ] {
            assert_eq!(is_too_open(mode, owner), expected, "{mode:o} of user {owner}");
        }
    }

    #[test]
    fn stored_cluster_key_is_created_once_and_readable_by_its_owner_only() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let state = folder.path().join("state/tandem");
        let kept = || kept_key(&state).expect("the folder is writable").fingerprint().to_owned();
        let first = kept();
        assert_eq!(kept(), first);
        let mode = |path: &Path| fs::metadata(path).expect("it exists").mode() & 0o777;
        assert_eq!((mode(&state), mode(&state.join(KEPT_KEY))), (0o700, 0o600));
        assert_eq!(fs::read_dir(&state).expect("it is a folder").count(), 1, "no temporary file is left");
        create_key(&state, &state.join(KEPT_KEY)).expect("the folder is writable");
        assert_eq!(kept(), first, "an existing key is not replaced");
    }

    #[test]
    fn cluster_key_that_cannot_be_stored_or_read_is_an_error_that_names_its_file() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let file = folder.path().join("file");
        fs::write(&file, "").expect("the folder is writable");
        fs::write(folder.path().join(KEPT_KEY), "short").expect("the folder is writable");
        for (state, expected) in [(file.join("tandem"), "cannot be created"), (folder.path().to_owned(), "cannot be used")] {
            let Err(error) = kept_key(&state) else { panic!("there is no key") };
            let error = error.to_string();
            assert!(error.contains(expected) && error.contains(KEPT_KEY), "{error}");
        }
    }

    #[test]
    fn missing_short_or_long_key_file_is_refused_with_advice() {
        for (content, expected) in [
            (None, "openssl rand -hex 32"),
            (Some(&b""[..]), "has 0 bytes"),
            (Some(b"0123456789abcdef0123456789abcde\n"), "has 31 bytes, but needs at least 32"),
            (Some(&[b'x'; 64 * 1024 + 1]), "must hold the secret and nothing else"),
        ] {
            let error = read(content).expect_err("the key file is refused");
            assert!(error.contains(expected) && error.contains("--cluster-key-file"), "{error}");
            assert_eq!(error.matches("openssl").count(), 1, "{error}");
            assert!(!error.contains("0123"), "the secret is not shown: {error}");
        }
    }
}
