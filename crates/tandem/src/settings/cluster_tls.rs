//! The certificate of a process, for encrypted connections between the processes of a cluster.

use clap::Args;
use serde::Serialize;
use std::path::PathBuf;
use tandem_process::cluster_tls::{ClusterTlsFiles, ClusterTlsFilesError, ClusterTlsPaths};
use tandem_proto::channel::{ClusterTls, PeerRole};

/// The files of the certificate.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize)]
#[command(next_help_heading = "Security")]
#[serde(rename_all = "kebab-case")]
pub struct ClusterTlsArgs {
    /// File with this process's certificate, in PEM format. With it, all connections between the cluster's processes are encrypted, a process
    /// without a certificate of --cluster-ca is refused, and each role may make its own calls only. Its URI names the role
    /// (spiffe://DOMAIN/tandem/CLUSTER/ROLE); `tandem cert` makes such files. They are read again when they change [default: none, so that
    /// a first start needs no files]
    #[arg(long, env = "TANDEM_CLUSTER_CERT", value_name = "FILE")]
    cluster_cert: Option<PathBuf>,

    /// File with the private key of --cluster-cert, in PEM format
    #[arg(long, env = "TANDEM_CLUSTER_CERT_KEY", value_name = "FILE")]
    cluster_cert_key: Option<PathBuf>,

    /// File with the certificates of the authority that signs those of all processes, in PEM format
    #[arg(long, env = "TANDEM_CLUSTER_CA", value_name = "FILE")]
    cluster_ca: Option<PathBuf>,
}

/// The files of the certificate cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum ClusterTlsArgsError {
    #[error("--cluster-cert, --cluster-cert-key and --cluster-ca are needed together; set all of them, or none")]
    Incomplete,
    #[error("--cluster-cert, --cluster-cert-key and --cluster-ca cannot be used; `tandem cert` makes such files")]
    Files(#[from] ClusterTlsFilesError),
}

impl ClusterTlsArgs {
    /// Reads the certificate of a process with this role, in this cluster unless that is `None`. Returns `None` if no files are set.
    ///
    /// # Errors
    /// Only some of the files are set, a file cannot be read, or the certificate cannot be used.
    pub fn open(
        &self,
        role: PeerRole,
        cluster: Option<&str>,
    ) -> Result<Option<(ClusterTls, ClusterTlsFiles)>, ClusterTlsArgsError> {
        let paths = match self.clone() {
            Self { cluster_cert: Some(certificate), cluster_cert_key: Some(key), cluster_ca: Some(ca) } => {
                ClusterTlsPaths { certificate, key, ca }
            }
            none if none == Self::default() => return Ok(None),
            _ => return Err(ClusterTlsArgsError::Incomplete),
        };
        Ok(Some(ClusterTlsFiles::open(paths, role, cluster)?))
    }
}
