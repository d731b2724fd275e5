//! Mutual TLS: both ends of a connection prove by a certificate that they are processes of the same cluster, and which role they have.
//!
//! A certificate counts if the cluster's authority has signed it and its URI names the cluster and a role ([`Peer`]). Host names are not
//! compared, because workers are dialled at any address. The current certificate is used for each new connection; open ones keep theirs.

use super::{
    guard::OnRefused,
    peer::{Peer, PeerRole},
};
use hyper_util::rt::TokioIo;
use parking_lot::RwLock;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme,
    client::{
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_cert_signed_by_trust_anchor,
    },
    crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature},
    pki_types::{
        CertificateDer, PrivateKeyDer, ServerName, UnixTime,
        pem::{Error as PemError, PemObject},
    },
    server::{ParsedCertificate, VerifierBuilderError, WebPkiClientVerifier},
};
use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{
    codegen::{BoxFuture, Service},
    transport::{Uri, server::Connected},
};

/// The time limit for a handshake, which is the same as for connecting.
const HANDSHAKE_MAX: Duration = Duration::from_secs(3);
/// The maximum number of handshakes at a time. Further connections wait in the kernel.
const HANDSHAKES_MAX: usize = 1_024;
/// HTTP/2, the protocol of gRPC.
const PROTOCOL: &[u8] = b"h2";

/// The contents of the files of a process, in PEM format.
#[derive(Clone, Copy, Debug)]
pub struct TlsPem<'a> {
    /// The certificate chain, with the process's own certificate first.
    pub certificate: &'a str,
    /// The private key of the first certificate.
    pub key: &'a str,
    /// The certificates of the cluster's authority.
    pub ca: &'a str,
}

/// Certificates or a key that cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum ClusterTlsError {
    #[error("a certificate or key file of the cluster is not in PEM format")]
    Pem(#[from] PemError),
    #[error("the file of the cluster's authority has no usable certificate")]
    Ca(#[source] VerifierBuilderError),
    #[error("the certificate and its key cannot be used together")]
    Pair(#[from] rustls::Error),
    #[error(
        "the certificate names no process: its URI must be spiffe://DOMAIN/tandem/CLUSTER/ROLE, with a ROLE such as decode-worker"
    )]
    Unnamed,
    #[error("the certificate is for {found}, but this process is {expected}")]
    OtherProcess { found: Peer, expected: Peer },
}

/// The certificate of this process and of its authority, which may be replaced at any time. It is cheap to clone.
#[derive(Clone, Debug)]
pub struct ClusterTls {
    own: Arc<Peer>,
    current: Arc<RwLock<Configs>>,
}

#[derive(Clone, Debug)]
struct Configs {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

impl ClusterTls {
    /// Reads the certificate of a process with this role. `cluster` is the cluster name that the certificate must have; `None` accepts the
    /// name in the certificate.
    ///
    /// # Errors
    /// Fails if the certificate cannot be used, or if it names another process.
    pub fn new(pem: TlsPem<'_>, role: PeerRole, cluster: Option<&str>) -> Result<Self, ClusterTlsError> {
        let (configs, found) = configs(pem)?;
        let expected = Peer { role, cluster: cluster.unwrap_or(&found.cluster).to_owned() };
        if found != expected {
            return Err(ClusterTlsError::OtherProcess { found, expected });
        }
        Ok(Self { own: Arc::new(expected), current: Arc::new(RwLock::new(configs)) })
    }

    /// Uses another certificate for new connections.
    ///
    /// # Errors
    /// Fails if the certificate cannot be used, or if it names another process. The old certificate then stays in use.
    pub fn replace(&self, pem: TlsPem<'_>) -> Result<(), ClusterTlsError> {
        let (configs, found) = configs(pem)?;
        if found != *self.own {
            return Err(ClusterTlsError::OtherProcess { found, expected: Peer::clone(&self.own) });
        }
        *self.current.write() = configs;
        Ok(())
    }

    /// Returns the role in the peer's certificate if the certificate is one of this cluster.
    fn role(&self, certificates: Option<&[CertificateDer<'_>]>) -> io::Result<PeerRole> {
        let peer = certificates.and_then(|chain| Peer::of(chain.first()?));
        let fits = peer.filter(|peer| peer.cluster == self.own.cluster);
        let refused =
            || io::Error::new(io::ErrorKind::PermissionDenied, "the peer's certificate names no process of this cluster");
        Ok(fits.ok_or_else(refused)?.role)
    }

    async fn accept(self, stream: TcpStream) -> io::Result<TlsIo> {
        let config = Arc::clone(&self.current.read().server);
        let stream = in_time(TlsAcceptor::from(config).accept(stream)).await?;
        let peer = self.role(stream.get_ref().1.peer_certificates())?;
        Ok(TlsIo { stream: stream.into(), peer })
    }

    /// Returns the encrypted connection. Calls `on_refused` if it is refused.
    pub(super) async fn admit(self, stream: TcpStream, on_refused: OnRefused) -> Option<TlsIo> {
        let refused = |error: &io::Error| {
            tracing::debug!(%error, "a connection was refused");
            on_refused();
        };
        self.accept(stream).await.inspect_err(refused).ok()
    }

    async fn connect(self, address: String, expected: &[PeerRole]) -> io::Result<TlsIo> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let config = Arc::clone(&self.current.read().client);
        // The name is not compared with the certificate.
        let name = ServerName::try_from("tandem").map_err(io::Error::other)?;
        let stream = in_time(TlsConnector::from(config).connect(name, stream)).await.map_err(not_encrypted)?;
        let peer = self.role(stream.get_ref().1.peer_certificates())?;
        if !expected.contains(&peer) {
            let text = format!("the certificate at this address is that of a {}, which does not serve these calls", peer.name());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        Ok(TlsIo { stream: stream.into(), peer })
    }
}

async fn in_time<T>(handshake: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(HANDSHAKE_MAX, handshake).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Replaces the error of a peer that does not answer with TLS by one that says what to do.
fn not_encrypted(error: io::Error) -> io::Error {
    let cause = error.get_ref().and_then(|cause| cause.downcast_ref());
    match cause {
        Some(rustls::Error::InvalidMessage(rustls::InvalidMessage::InvalidContentType)) => io::Error::new(
            error.kind(),
            "the process at this address has no certificate; start it with --cluster-cert, --cluster-cert-key and --cluster-ca",
        ),
        _ => error,
    }
}

fn configs(pem: TlsPem<'_>) -> Result<(Configs, Peer), ClusterTlsError> {
    let chain = |text: &str| CertificateDer::pem_slice_iter(text.as_bytes()).collect::<Result<Vec<_>, _>>();
    let (certificates, key) = (chain(pem.certificate)?, PrivateKeyDer::from_pem_slice(pem.key.as_bytes())?);
    let own = certificates.first().and_then(Peer::of).ok_or(ClusterTlsError::Unnamed)?;
    let mut roots = RootCertStore::empty();
    for certificate in chain(pem.ca)? {
        roots.add(certificate)?;
    }
    let (roots, provider) = (Arc::new(roots), Arc::new(rustls::crypto::ring::default_provider()));
    let clients = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider));
    let clients = clients.build().map_err(ClusterTlsError::Ca)?;
    let versions = &[&rustls::version::TLS13];
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(versions)?;
    let mut server = server.with_client_cert_verifier(clients).with_single_cert(certificates.clone(), key.clone_key())?;
    server.alpn_protocols = vec![PROTOCOL.to_vec()];
    let servers = Arc::new(Servers { roots, provider: Arc::clone(&provider) });
    let client = ClientConfig::builder_with_provider(provider).with_protocol_versions(versions)?;
    let client = client.dangerous().with_custom_certificate_verifier(servers);
    let mut client = client.with_client_auth_cert(certificates, key)?;
    client.alpn_protocols = vec![PROTOCOL.to_vec()];
    Ok((Configs { server: Arc::new(server), client: Arc::new(client) }, own))
}

/// Verifies that the cluster's authority has signed a server's certificate. The name in it is compared after the handshake.
#[derive(Debug)]
struct Servers {
    roots: Arc<RootCertStore>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Servers {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let certificate = ParsedCertificate::try_from(end_entity)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&certificate, &self.roots, intermediates, now, algorithms)?;
        if Peer::of(end_entity).is_none() {
            return Err(CertificateError::NotValidForName.into());
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// An encrypted connection to a process of the cluster.
pub(super) struct TlsIo {
    stream: TlsStream<TcpStream>,
    peer: PeerRole,
}

/// Calls on a server have the caller's role as an extension.
impl Connected for TlsIo {
    type ConnectInfo = PeerRole;

    fn connect_info(&self) -> PeerRole {
        self.peer
    }
}

impl AsyncRead for TlsIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for TlsIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Returns the connections that arrive, once their handshakes are complete. The handshakes do not wait for each other. A connection whose
/// handshake returns `None` is left out.
pub fn accepted<Io: Send + 'static, H: Future<Output = Option<Io>> + Send + 'static>(
    arriving: impl Stream<Item = io::Result<TcpStream>> + Unpin,
    handshake: impl Fn(TcpStream) -> H,
) -> impl Stream<Item = io::Result<Io>> {
    let state = (arriving, JoinSet::new(), handshake);
    futures::stream::unfold(state, async |(mut arriving, mut handshakes, handshake)| {
        loop {
            tokio::select! {
                Some(done) = handshakes.join_next() => if let Ok(Some(io)) = done {
                    return Some((Ok(io), (arriving, handshakes, handshake)));
                },
                next = arriving.next(), if handshakes.len() < HANDSHAKES_MAX => match next {
                    Some(Ok(stream)) => drop(handshakes.spawn(handshake(stream))),
                    Some(Err(error)) => return Some((Err(error), (arriving, handshakes, handshake))),
                    None => return None,
                },
            }
        }
    })
}

/// Opens encrypted connections to processes of these roles.
pub(super) struct Dialer {
    pub(super) tls: ClusterTls,
    pub(super) expected: &'static [PeerRole],
}

impl Service<Uri> for Dialer {
    type Response = TokioIo<TlsIo>;
    type Error = io::Error;
    type Future = BoxFuture<Self::Response, io::Error>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), io::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let (tls, expected) = (self.tls.clone(), self.expected);
        let address = to.authority().map(|authority| authority.as_str().to_owned()).unwrap_or_default();
        Box::pin(async move { tls.connect(address, expected).await.map(TokioIo::new) })
    }
}

#[cfg(test)]
pub(super) use tests::Authority;

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, SanType};
    use rustls::{client::ResolvesClientCert, sign::CertifiedKey};
    use std::net::Ipv4Addr;
    use tokio::net::TcpListener;

    /// An authority that signs certificates.
    pub(in crate::channel) struct Authority(CertifiedIssuer<'static, KeyPair>);

    impl Authority {
        pub(in crate::channel) fn new() -> Self {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            let key = KeyPair::generate().expect("keys can be made");
            Self(CertifiedIssuer::self_signed(params, key).expect("the parameters are valid"))
        }

        /// Returns a certificate with this URI, its key and the authority, in PEM format.
        fn sign(&self, uri: &str) -> [String; 3] {
            let mut params = CertificateParams::default();
            params.subject_alt_names = vec![SanType::URI(uri.try_into().expect("the URI is ASCII"))];
            let key = KeyPair::generate().expect("keys can be made");
            let certificate = params.signed_by(&key, &*self.0).expect("the parameters are valid");
            [certificate.pem(), key.serialize_pem(), self.0.pem()]
        }

        pub(in crate::channel) fn tls(&self, cluster: &str, role: PeerRole) -> ClusterTls {
            let files = self.sign(&Peer { cluster: cluster.to_owned(), role }.uri("d"));
            ClusterTls::new(pem(&files), role, Some(cluster)).expect("the certificate is valid")
        }
    }

    #[derive(Debug)]
    struct NoCertificate;

    impl ResolvesClientCert for NoCertificate {
        fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
            None
        }

        fn has_certs(&self) -> bool {
            false
        }
    }

    fn pem([certificate, key, ca]: &[String; 3]) -> TlsPem<'_> {
        TlsPem { certificate, key, ca }
    }

    /// Connects `client` to `server`. Returns the client's role as the server sees it, and the server's role as the client sees it.
    async fn meet(server: &ClusterTls, client: &ClusterTls, expected: &[PeerRole]) -> [io::Result<PeerRole>; 2] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free");
        let address = listener.local_addr().expect("the listener is bound").to_string();
        let accepts = async {
            let (stream, _) = listener.accept().await.expect("the client connects");
            server.clone().accept(stream).await.map(|io| io.peer)
        };
        let (accepted, connected) = tokio::join!(accepts, client.clone().connect(address, expected));
        [accepted, connected.map(|io| io.peer)]
    }

    #[tokio::test]
    async fn processes_of_one_cluster_learn_each_others_roles() {
        let authority = Authority::new();
        let (server, client) = (authority.tls("c", PeerRole::Router), authority.tls("c", PeerRole::Frontend));
        let [of_client, of_server] = meet(&server, &client, &[PeerRole::Router]).await;
        assert_eq!((of_client.ok(), of_server.ok()), (Some(PeerRole::Frontend), Some(PeerRole::Router)));
        let [_, refused] = meet(&server, &client, &[PeerRole::DecodeWorker]).await;
        assert!(refused.is_err_and(|error| error.to_string().contains("router")), "the frontend wants a decode worker");
    }

    #[tokio::test]
    async fn processes_of_other_clusters_and_authorities_are_refused() {
        let (authority, other) = (Authority::new(), Authority::new());
        let server = authority.tls("c", PeerRole::Router);
        for stranger in [authority.tls("other", PeerRole::Router), other.tls("c", PeerRole::Router)] {
            let [as_client, _] = meet(&server, &stranger, &PeerRole::ALL).await;
            let [_, as_server] = meet(&stranger, &server, &PeerRole::ALL).await;
            assert!(as_client.is_err() && as_server.is_err(), "{as_client:?} {as_server:?}");
        }
    }

    #[tokio::test]
    async fn client_without_a_certificate_is_refused() {
        let authority = Authority::new();
        let (server, client) = (authority.tls("c", PeerRole::Router), authority.tls("c", PeerRole::Frontend));
        Arc::make_mut(&mut client.current.write().client).client_auth_cert_resolver = Arc::new(NoCertificate);
        let [refused, _] = meet(&server, &client, &PeerRole::ALL).await;
        assert!(refused.is_err());
    }

    #[tokio::test]
    async fn error_names_a_server_without_a_certificate_as_the_cause() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free");
        let address = listener.local_addr().expect("the listener is bound").to_string();
        let serves = async {
            let (mut stream, _) = listener.accept().await.expect("the client connects");
            // The SETTINGS with which an HTTP/2 server begins.
            tokio::io::AsyncWriteExt::write_all(&mut stream, b"\0\0\0\x04\0\0\0\0\0").await.expect("the client reads");
            stream
        };
        let client = Authority::new().tls("c", PeerRole::Router);
        let (_stream, refused) = tokio::join!(serves, client.connect(address, &PeerRole::ALL));
        let error = refused.map(drop).expect_err("the server does not encrypt").to_string();
        assert!(error.contains("has no certificate") && error.contains("--cluster-cert"), "{error}");
    }

    #[tokio::test]
    async fn replaced_certificate_is_used_if_it_names_the_same_process() {
        let (old, new) = (Authority::new(), Authority::new());
        let (server, client) = (old.tls("c", PeerRole::Router), new.tls("c", PeerRole::Frontend));
        assert!(meet(&server, &client, &PeerRole::ALL).await[0].is_err());
        let other = server.replace(pem(&new.sign("spiffe://d/tandem/c/tool")));
        assert!(matches!(other, Err(ClusterTlsError::OtherProcess { .. })));
        let unnamed = server.replace(pem(&new.sign("https://d")));
        assert!(matches!(unnamed, Err(ClusterTlsError::Unnamed)));
        server.replace(pem(&new.sign("spiffe://d/tandem/c/router"))).expect("the certificate is valid");
        assert!(meet(&server, &client, &PeerRole::ALL).await.iter().all(Result::is_ok));
    }
}
