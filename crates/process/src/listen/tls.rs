//! TLS on a listener. The certificate and its key are read again when their files change; open connections keep the old certificate.

use crate::{retry::error_chain, watched_file::WatchedFile};
use metrics::Gauge;
use parking_lot::RwLock;
use rustls::{
    ServerConfig,
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{Error as PemError, PemObject},
    },
};
use std::{convert::Infallible, io, path::PathBuf, sync::Arc, time::Duration};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// The maximum size of a file in bytes. A certificate chain has a few kilobytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The time limit for a handshake. A client on another continent needs less than a second.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// A certificate and its key that were read at the start.
#[derive(Debug)]
pub struct TlsFiles {
    certificate: File,
    key: File,
    config: Arc<ServerConfig>,
}

#[derive(Debug)]
struct File {
    path: PathBuf,
    text: String,
    watched: WatchedFile,
}

/// A certificate or a key that cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum TlsFilesError {
    #[error("{} cannot be read", .path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{} has no certificate in PEM format; give the certificate chain, with the server's certificate first", .path.display())]
    NoCertificate { path: PathBuf },
    #[error("{} is not in PEM format", .path.display())]
    Pem { path: PathBuf, source: PemError },
    #[error("the certificate in {} and the key in {} cannot be used together", .certificate.display(), .key.display())]
    Pair { certificate: PathBuf, key: PathBuf, source: rustls::Error },
}

impl TlsFiles {
    /// Reads a certificate chain and the private key of its first certificate, both in PEM format.
    ///
    /// # Errors
    /// Fails if a file cannot be read or parsed, or if the key does not belong to the certificate.
    pub fn open(certificate: PathBuf, key: PathBuf) -> Result<Self, TlsFilesError> {
        let open = |path: PathBuf| match WatchedFile::open(path.clone(), FILE_BYTES_MAX) {
            Ok((text, watched)) => Ok(File { path, text, watched }),
            Err(source) => Err(TlsFilesError::Unreadable { path, source }),
        };
        let (certificate, key) = (open(certificate)?, open(key)?);
        let config = config(&certificate, &key)?;
        Ok(Self { certificate, key, config })
    }

    /// Returns an acceptor with the certificate as it was read.
    pub fn acceptor(&self) -> Tls {
        Tls { config: Arc::new(RwLock::new(Arc::clone(&self.config))) }
    }
}

fn config(certificate: &File, key: &File) -> Result<Arc<ServerConfig>, TlsFilesError> {
    let pem = |file: &File| {
        let path = file.path.clone();
        move |source| TlsFilesError::Pem { path, source }
    };
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate.text.as_bytes()).collect();
    let chain = chain.map_err(pem(certificate))?;
    if chain.is_empty() {
        return Err(TlsFilesError::NoCertificate { path: certificate.path.clone() });
    }
    let secret = PrivateKeyDer::from_pem_slice(key.text.as_bytes()).map_err(pem(key))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("ring has the default protocols").with_no_client_auth().with_single_cert(chain, secret);
    let mut config =
        config.map_err(|source| TlsFilesError::Pair { certificate: certificate.path.clone(), key: key.path.clone(), source })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Accepts TLS connections with the current certificate. It is cheap to clone.
#[derive(Clone)]
pub struct Tls {
    config: Arc<RwLock<Arc<ServerConfig>>>,
}

impl Tls {
    /// Returns the acceptor, and an endless future that reloads the files whenever they change. While the new files are unusable, the old
    /// certificate stays in use, and `outdated` is 1.
    pub fn new(files: TlsFiles, outdated: Gauge) -> (Self, impl Future<Output = Infallible> + use<>) {
        let TlsFiles { mut certificate, mut key, config: first } = files;
        let tls = Self { config: Arc::new(RwLock::new(first)) };
        let current = Arc::clone(&tls.config);
        let watch = async move {
            loop {
                let changed = tokio::select! {
                    changed = certificate.watched.changed() => (changed, &mut certificate),
                    changed = key.watched.changed() => (changed, &mut key),
                };
                let read = match changed {
                    (Ok(text), file) => {
                        file.text = text;
                        config(&certificate, &key)
                    }
                    (Err(source), file) => Err(TlsFilesError::Unreadable { path: file.path.clone(), source }),
                };
                match read {
                    Ok(config) => {
                        tracing::info!("the TLS certificate was read again");
                        *current.write() = config;
                        outdated.set(0.0);
                    }
                    // A new certificate and its key are written one after the other, so for a second they may not match.
                    Err(error) => {
                        tracing::error!(error = error_chain(&error), "the last valid TLS certificate stays in use");
                        outdated.set(1.0);
                    }
                }
            }
        };
        (tls, watch)
    }

    /// Returns the encrypted stream; `None` if the handshake fails or takes too long.
    pub(super) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> Option<TlsStream<S>> {
        let config = Arc::clone(&self.config.read());
        match tokio::time::timeout(HANDSHAKE_MAX, TlsAcceptor::from(config).accept(stream)).await {
            Ok(Ok(stream)) => Some(stream),
            Ok(Err(error)) => {
                tracing::debug!(%error, "a client's TLS handshake failed");
                None
            }
            Err(_) => {
                tracing::debug!("a client's TLS handshake took too long");
                None
            }
        }
    }
}
