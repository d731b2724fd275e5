//! The files of a process's cluster certificate. They are read again when they change.

use crate::{Metrics, retry::error_chain, watched_file::WatchedFile};
use std::{convert::Infallible, io, path::PathBuf};
use tandem_proto::channel::{ClusterTls, ClusterTlsError, PeerRole, TlsPem};

/// The maximum size of a file in bytes. A certificate chain has a few kilobytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The paths of the PEM files: the process's certificate chain, its private key, and the certificates of the cluster's authority.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the type documents its fields")]
pub struct ClusterTlsPaths {
    pub certificate: PathBuf,
    pub key: PathBuf,
    pub ca: PathBuf,
}

/// The files cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum ClusterTlsFilesError {
    #[error("{} cannot be read", .path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("the certificate in {}, its key or its authority cannot be used", .certificate.display())]
    Unusable { certificate: PathBuf, source: Box<ClusterTlsError> },
}

/// The opened files of a process's cluster certificate.
#[derive(Debug)]
pub struct ClusterTlsFiles {
    paths: ClusterTlsPaths,
    texts: [String; 3],
    watched: [WatchedFile; 3],
}

impl ClusterTlsFiles {
    /// Reads the files and returns the certificate. It must name a process with this role and, if `cluster` is set, a process of this
    /// cluster.
    ///
    /// # Errors
    /// A file cannot be read, or the certificate cannot be used.
    pub fn open(
        paths: ClusterTlsPaths,
        role: PeerRole,
        cluster: Option<&str>,
    ) -> Result<(ClusterTls, Self), ClusterTlsFilesError> {
        let open = |path: &PathBuf| {
            let opened = WatchedFile::open(path.clone(), FILE_BYTES_MAX);
            opened.map_err(|source| ClusterTlsFilesError::Unreadable { path: path.clone(), source })
        };
        let [certificate, key, ca] = [open(&paths.certificate)?, open(&paths.key)?, open(&paths.ca)?];
        let (texts, watched) = ([certificate.0, key.0, ca.0], [certificate.1, key.1, ca.1]);
        let files = Self { paths, texts, watched };
        match ClusterTls::new(files.pem(), role, cluster) {
            Ok(tls) => Ok((tls, files)),
            Err(source) => Err(files.unusable(source)),
        }
    }

    /// Reloads the certificate whenever the files change; never returns. While the new files are unusable, the old certificate stays in use.
    pub async fn follow(mut self, tls: ClusterTls, metrics: Metrics) -> Infallible {
        let outdated = metrics.gauge(
            "tandem_cluster_tls_outdated",
            "1 while the files of the process's certificate cannot be used, so that the last valid ones stay in use.",
            &[],
        );
        outdated.set(0.0);
        loop {
            let [certificate, key, ca] = &mut self.watched;
            let (at, read) = tokio::select! {
                read = certificate.changed() => (0, read),
                read = key.changed() => (1, read),
                read = ca.changed() => (2, read),
            };
            let used = match read {
                Ok(text) => {
                    self.texts[at] = text;
                    tls.replace(self.pem()).map_err(|source| self.unusable(source))
                }
                Err(source) => {
                    let ClusterTlsPaths { certificate, key, ca } = &self.paths;
                    Err(ClusterTlsFilesError::Unreadable { path: [certificate, key, ca][at].clone(), source })
                }
            };
            match used {
                Ok(()) => {
                    tracing::info!("the certificate of this process was read again");
                    outdated.set(0.0);
                }
                // A new certificate and its key are written one after the other, so for a second they may not match.
                Err(error) => {
                    tracing::error!(error = error_chain(&error), "the last valid certificate of this process stays in use");
                    outdated.set(1.0);
                }
            }
        }
    }

    fn unusable(&self, source: ClusterTlsError) -> ClusterTlsFilesError {
        ClusterTlsFilesError::Unusable { certificate: self.paths.certificate.clone(), source: Box::new(source) }
    }

    fn pem(&self) -> TlsPem<'_> {
        let [certificate, key, ca] = &self.texts;
        TlsPem { certificate, key, ca }
    }
}
