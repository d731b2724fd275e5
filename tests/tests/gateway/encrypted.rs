//! The picker's port with TLS, called as gateways do it by default: without checking the certificate.

use crate::rig::{Gateway, LIMIT, until};
use anyhow::{Context, Result};
use rustls::{
    ClientConfig, DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::ring,
    pki_types::{CertificateDer, ServerName, UnixTime},
};
use serde_json::json;
use std::{collections::BTreeSet, fs, future::Future, io, net::SocketAddr, path::PathBuf, pin::Pin, sync::Arc, time::Duration};
use tandem::{ServedProcess, settings::UpSettings};
use tandem_proto::health::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
use tandem_tests::fake_vllm::FakeSettings;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::{codegen::Service, transport::Uri};

/// Accepts every certificate.
#[derive(Debug)]
struct Unchecked;

impl ServerCertVerifier for Unchecked {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

async fn connect(picker: SocketAddr) -> io::Result<TlsStream<TcpStream>> {
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider())).with_safe_default_protocol_versions();
    let config = config.expect("ring has the default protocols").dangerous();
    let mut config = config.with_custom_certificate_verifier(Arc::new(Unchecked)).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = ServerName::try_from("picker.example").expect("the name is valid");
    TlsConnector::from(Arc::new(config)).connect(name, TcpStream::connect(picker).await?).await
}

/// Opens encrypted connections to a picker.
pub struct Dialer(pub SocketAddr);

impl Service<Uri> for Dialer {
    type Response = hyper_util::rt::TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<io::Result<()>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let picker = self.0;
        Box::pin(async move { connect(picker).await.map(hyper_util::rt::TokioIo::new) })
    }
}

/// Returns the certificate that the picker shows to a new client.
async fn shown(gateway: &Gateway) -> Result<CertificateDer<'static>> {
    let stream = timeout(LIMIT, connect(gateway.cluster.frontend)).await??;
    let connection = stream.get_ref().1;
    assert_eq!(connection.alpn_protocol(), Some(&b"h2"[..]));
    Ok(connection.peer_certificates().and_then(|chain| chain.first()).context("no certificate")?.clone().into_owned())
}

/// The folder with the cluster's key, in which the tests write certificates.
fn in_folder(settings: &UpSettings, name: &str) -> PathBuf {
    settings.common.key.cluster_key_file.as_ref().expect("the cluster has a key").with_file_name(name)
}

/// Writes another certificate and its key, and returns the certificate.
fn write(certificate: PathBuf) -> CertificateDer<'static> {
    let signed = rcgen::generate_simple_self_signed(["picker.example".to_owned()]).expect("the name is valid");
    fs::write(&certificate, signed.cert.pem()).expect("the folder is writable");
    fs::write(certificate.with_file_name("key.pem"), signed.signing_key.serialize_pem()).expect("the folder is writable");
    signed.cert.der().clone()
}

/// Lets the picker make its certificate.
pub fn self_signed(settings: &mut UpSettings) {
    settings.picker.iter_mut().for_each(|picker| picker.args.tls_self_signed = true);
}

fn from_files(settings: &mut UpSettings) {
    let certificate = in_folder(settings, "cert.pem");
    write(certificate.clone());
    settings.frontend.tenants.tls_key = Some(certificate.with_file_name("key.pem"));
    settings.frontend.tenants.tls_cert = Some(certificate);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_accounts_and_health_checks_are_served_over_tls() -> Result<()> {
    let gateway = Gateway::with(1, FakeSettings::default(), |settings| {
        self_signed(settings);
        settings.frontend.tenants.account_header = Some("x-account".to_owned());
        // The picker has to know the address of the gateway, below TLS.
        settings.frontend.tenants.trusted_proxies = vec!["127.0.0.1/32".parse().expect("the network is valid")];
    })
    .await?;
    for account in ["a", "b"] {
        gateway.complete("the same prompt", &[("x-account", account)]).await?;
    }
    let salts: BTreeSet<String> = gateway.engines[0].seen().iter().map(|body| body["cache_salt"].to_string()).collect();
    assert_eq!(salts.len(), 2, "{salts:?}");
    let large = json!({ "model": "fake", "prompt": "a", "user": "x".repeat(9 << 20) }).to_string();
    let (_, picked) = gateway.request("/v1/completions", &[("x-account", "a")], large.as_bytes()).await?;
    assert!(picked.sent()?.1.len() > large.len());
    let health = HealthClient::new(gateway.channel.clone()).check(HealthCheckRequest { service: "readiness".to_owned() }).await?;
    assert_eq!(health.into_inner().status(), ServingStatus::Serving);
    let first = shown(&gateway).await?;
    assert_eq!(shown(&gateway).await?, first);
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn certificate_of_a_file_is_read_again_when_it_changes() -> Result<()> {
    let gateway = Gateway::with(1, FakeSettings::default(), from_files).await?;
    gateway.complete("a", &[]).await?;
    let first = shown(&gateway).await?;
    let second = write(gateway.folder.path().join("cert.pem"));
    assert_ne!(first, second);
    until("the new certificate is in use", async || Ok(shown(&gateway).await? == second)).await?;
    gateway.complete("open connections are kept", &[]).await?;
    let page = gateway.cluster.metrics().render();
    assert!(page.lines().any(|line| line == "tandem_frontend_tls_outdated 0"), "{page}");
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_without_tls_fail_at_once_and_silent_ones_do_not_hold_up_others() -> Result<()> {
    // Shorter than the time limit of a handshake.
    const SOON: Duration = Duration::from_secs(5);
    let gateway = Gateway::with(1, FakeSettings::default(), self_signed).await?;
    let picker = gateway.cluster.frontend;
    let mut silent = Vec::new();
    for _ in 0..50 {
        silent.push(TcpStream::connect(picker).await?);
    }
    let mut plain = TcpStream::connect(picker).await?;
    plain.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await?;
    let mut reply = Vec::new();
    // The connection may end with a reset.
    let _ = timeout(SOON, plain.read_to_end(&mut reply)).await.context("the plain connection is still open")?;
    timeout(SOON, shown(&gateway)).await.context("silent connections hold up others")??;
    gateway.complete("a", &[]).await?;
    drop(silent);
    gateway.cluster.stop().await;

    let plain = Gateway::start(1).await?;
    let refused = timeout(SOON, connect(plain.cluster.frontend)).await.context("the encrypted connection is still open")?;
    assert!(refused.is_err(), "the port has no TLS");
    plain.cluster.stop().await;
    Ok(())
}
