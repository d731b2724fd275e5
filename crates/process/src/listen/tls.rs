//! TLS on a listener. The certificate and its key are read again when their files change; open connections keep the old certificate.

use crate::{LogLimit, retry::error_chain, watched_file::WatchedFile};
use metrics::Gauge;
use parking_lot::RwLock;
use rustls::{
    ServerConfig,
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{Error as PemError, PemObject},
    },
};
use std::{convert::Infallible, future::pending, io, path::PathBuf, sync::Arc, time::Duration};
use tandem_proto::channel::{self, Arrivals, Listener, Network};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tonic::{service::Routes, transport};

/// A protocol that a listener offers to clients (ALPN): that of the API.
pub const HTTP_1: &[u8] = b"http/1.1";
/// A protocol that a listener offers to clients (ALPN): that of gRPC.
pub const HTTP_2: &[u8] = b"h2";

/// The maximum size of a file in bytes. A certificate chain has a few kilobytes.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The time limit for a handshake. A client on another continent needs less than a second.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// A certificate and its key: read from files at the start, or made by this process.
#[derive(Debug)]
pub struct ServerCertificate {
    /// The files of the certificate and its key; `None`: they are in memory only.
    files: Option<[File; 2]>,
    config: ServerConfig,
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

impl ServerCertificate {
    /// Reads a certificate chain and the private key of its first certificate, both in PEM format.
    ///
    /// # Errors
    /// Fails if a file cannot be read or parsed, or if the key does not belong to the certificate.
    pub fn open(certificate: PathBuf, key: PathBuf) -> Result<Self, TlsFilesError> {
        let open = |path: PathBuf| match WatchedFile::open(path.clone(), FILE_BYTES_MAX) {
            Ok((text, watched)) => Ok(File { path, text, watched }),
            Err(source) => Err(TlsFilesError::Unreadable { path, source }),
        };
        let files = [open(certificate)?, open(key)?];
        let config = config(&files)?;
        Ok(Self { files: Some(files), config })
    }

    /// Makes a key and a certificate that it signs itself, for clients that do not check certificates.
    pub fn self_signed() -> Self {
        let made = rcgen::generate_simple_self_signed(["tandem".to_owned()]).expect("the name is valid");
        let config = with_pair(vec![made.cert.into()], made.signing_key.into()).expect("the key is the certificate's");
        Self { files: None, config }
    }

    /// Returns an acceptor of HTTP/1.1 with the certificate as it is now.
    pub fn acceptor(&self) -> Tls {
        Tls { config: Arc::new(RwLock::new(offering(HTTP_1, self.config.clone()))) }
    }
}

fn config([certificate, key]: &[File; 2]) -> Result<ServerConfig, TlsFilesError> {
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
    let pair = |source| TlsFilesError::Pair { certificate: certificate.path.clone(), key: key.path.clone(), source };
    with_pair(chain, secret).map_err(pair)
}

fn with_pair(chain: Vec<CertificateDer<'static>>, key: PrivateKeyDer<'static>) -> Result<ServerConfig, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    config.with_no_client_auth().with_single_cert(chain, key)
}

fn offering(protocol: &[u8], mut config: ServerConfig) -> Arc<ServerConfig> {
    config.alpn_protocols = vec![protocol.to_vec()];
    Arc::new(config)
}

/// Accepts TLS connections with the current certificate. It is cheap to clone.
#[derive(Clone)]
pub struct Tls {
    config: Arc<RwLock<Arc<ServerConfig>>>,
}

impl Tls {
    /// Returns the acceptor of clients that speak `protocol`, and an endless future that reloads the files whenever they change. While the new
    /// files are unusable, the old certificate stays in use, and `outdated` is 1.
    pub fn new(
        certificate: ServerCertificate,
        protocol: &'static [u8],
        outdated: Gauge,
    ) -> (Self, impl Future<Output = Infallible> + use<>) {
        let ServerCertificate { files, config: first } = certificate;
        let tls = Self { config: Arc::new(RwLock::new(offering(protocol, first))) };
        let current = Arc::clone(&tls.config);
        let watch = async move {
            let Some(mut files) = files else { return pending().await };
            loop {
                let [certificate, key] = &mut files;
                let changed = tokio::select! {
                    changed = certificate.watched.changed() => (changed, certificate),
                    changed = key.watched.changed() => (changed, key),
                };
                let read = match changed {
                    (Ok(text), file) => {
                        file.text = text;
                        config(&files)
                    }
                    (Err(source), file) => Err(TlsFilesError::Unreadable { path: file.path.clone(), source }),
                };
                match read {
                    Ok(config) => {
                        tracing::info!("the TLS certificate was read again");
                        *current.write() = offering(protocol, config);
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

    /// Returns the encrypted stream, or an error if the handshake fails or takes too long.
    pub(super) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<TlsStream<S>> {
        let config = Arc::clone(&self.config.read());
        let accepted = timeout(HANDSHAKE_MAX, TlsAcceptor::from(config).accept(stream)).await;
        accepted.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Returns the encrypted stream, as [`Tls::accept`] does. At most once a minute, a line says why there is none.
    async fn accept_or_warn(self, stream: TcpStream, limit: Arc<LogLimit>) -> Option<TlsStream<TcpStream>> {
        let refused = |error: &io::Error| {
            // A health check of the TCP port closes its connection at once.
            if error.kind() != io::ErrorKind::UnexpectedEof
                && let Some(left_out) = limit.admit()
            {
                tracing::warn!(
                    %error,
                    left_out,
                    "a gateway's TLS handshake failed; if it speaks plain gRPC, leave out --tls-cert and --tls-self-signed"
                );
            }
        };
        self.accept(stream).await.inspect_err(refused).ok()
    }
}

/// Serves gRPC to gateways until `ended` resolves, then the open connections to their end. With `tls`, connections over TCP are encrypted.
/// Gateways have no cluster key, so every caller is served.
///
/// # Errors
/// Fails if the server fails.
pub async fn serve_grpc(
    listener: Listener,
    tls: Option<Tls>,
    routes: Routes,
    ended: impl Future<Output = ()>,
) -> Result<(), transport::Error> {
    match (listener.into_arrivals(), tls) {
        (Arrivals::Tcp(listener), Some(tls)) => {
            let limit = Arc::new(LogLimit::new(1, Duration::from_secs(60)));
            let handshake = move |stream| tls.clone().accept_or_warn(stream, Arc::clone(&limit));
            let incoming = Box::pin(channel::accepted(channel::incoming(listener), handshake));
            channel::server().add_routes(routes).serve_with_incoming_shutdown(incoming, ended).await
        }
        (arrivals, _) => {
            let open = Listener::new(arrivals, Network::default());
            open.serve(channel::server(), routes, Arc::new(|| {}), ended).await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::Instant;

    #[tokio::test(start_paused = true)]
    async fn handshake_of_a_client_that_sends_nothing_ends_after_ten_seconds() {
        let (tls, _watch) = Tls::new(ServerCertificate::self_signed(), HTTP_2, Gauge::noop());
        let (_client, server) = tokio::io::duplex(64);
        let begun = Instant::now();
        let error = tls.accept(server).await.expect_err("the client sends nothing");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(begun.elapsed() < 2 * HANDSHAKE_MAX, "{:?}", begun.elapsed());
    }
}
