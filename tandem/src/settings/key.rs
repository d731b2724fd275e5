//! The secret that all processes of a cluster share.

use crate::secrets;
use clap::Args;
use serde::Serialize;
use std::{error::Error, fs, os::unix::fs::PermissionsExt, path::PathBuf};
use tandem_proto::ClusterKey;

/// Permission bits that let the file's group or other users read it.
const READABLE_BY_OTHERS: u32 = 0o044;

/// The file with the cluster key.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize)]
#[command(next_help_heading = "Security")]
#[serde(rename_all = "kebab-case")]
pub struct KeyArgs {
    /// File with the cluster's secret: 32 bytes or more, the same for all processes of the cluster. With it, processes refuse calls that
    /// are not authenticated with the key, sign KV events and registrations, connect only to addresses that the cluster has signed, and
    /// hash prompts with the key. Make one with: openssl rand -hex 32 [default: none, so that a first start needs no file; `tandem up`
    /// makes a key for itself]
    #[arg(long, env = "TANDEM_CLUSTER_KEY_FILE", value_name = "FILE")]
    pub cluster_key_file: Option<PathBuf>,
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
        let content = secrets::read(path).map_err(|error| unusable(error.into()))?;
        let mode = fs::metadata(path).map_err(|error| unusable(error.into()))?.permissions().mode();
        if mode & READABLE_BY_OTHERS != 0 {
            tracing::warn!(
                path = %path.display(),
                mode = format!("{:o}", mode & 0o777),
                "users other than its owner can read the cluster key's file; run chmod 600 on it"
            );
        }
        ClusterKey::new(without_newline(&content)).map_err(|error| unusable(error.into()))
    }
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
    fn missing_short_or_long_key_file_is_refused_with_advice() {
        for (content, expected) in [
            (None, "openssl rand -hex 32"),
            (Some(&b""[..]), "has 0 bytes"),
            (Some(b"0123456789abcdef0123456789abcde\n"), "has 31 bytes, but needs at least 32"),
            (Some(&[b'x'; 64 * 1024 + 1]), "must hold the secret and nothing else"),
        ] {
            let error = read(content).expect_err("the key file is refused");
            assert!(error.contains(expected) && error.contains("--cluster-key-file"), "{error}");
            assert!(!error.contains("0123"), "the secret is not shown: {error}");
        }
    }
}
