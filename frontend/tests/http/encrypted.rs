//! The API over TLS, with certificates that the test signs itself.

use crate::support::*;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName},
};
use serde_json::json;
use std::{fs, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};
use tandem_frontend::{ServerCertificate, TlsFilesError};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsConnector;

/// A certificate for localhost and its key, in files.
struct Files {
    folder: TempDir,
}

impl Files {
    fn new() -> (Self, CertificateDer<'static>) {
        let files = Self { folder: tempfile::tempdir().expect("the system can create a temporary folder") };
        let certificate = files.replace();
        (files, certificate)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes another certificate, and returns it.
    fn replace(&self) -> CertificateDer<'static> {
        let signed = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("the name is valid");
        fs::write(self.path("cert.pem"), signed.cert.pem()).expect("the folder is writable");
        fs::write(self.path("key.pem"), signed.signing_key.serialize_pem()).expect("the folder is writable");
        signed.cert.der().clone()
    }

    fn open(&self) -> Result<ServerCertificate, TlsFilesError> {
        ServerCertificate::open(self.path("cert.pem"), self.path("key.pem"))
    }

    async fn cluster(&self) -> Cluster {
        let files = self.open().expect("the files are valid");
        Cluster::with(|settings| settings.tls = Some(files)).await
    }
}

/// Sends a request over a connection that trusts only this certificate, and returns the reply.
async fn ask(frontend: SocketAddr, trusted: &CertificateDer<'static>, request: &str) -> std::io::Result<String> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.clone()).expect("the certificate is valid");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.expect("ring has the default protocols").with_root_certificates(roots).with_no_client_auth();
    let stream = TcpStream::connect(frontend).await?;
    let name = ServerName::try_from("localhost").expect("the name is valid");
    let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply).await?;
    Ok(reply)
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
}

#[tokio::test]
async fn api_is_served_over_tls_only() {
    let (files, certificate) = Files::new();
    let mut cluster = files.cluster().await;
    let frontend = cluster.frontend;
    let body = chat(json!({ "stream": true, "stream_options": { "include_usage": true } })).to_string();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json";
    let request = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let trusted = certificate.clone();
    let reply = tokio::spawn(async move { ask(frontend, &trusted, &request).await });
    cluster.call().await.answer(Some(0), "hello").await;
    let reply = soon(reply).await.expect("the client task runs").expect("the certificate is trusted");
    assert!(reply.starts_with("HTTP/1.1 200") && reply.contains("\"hello\"") && reply.contains("[DONE]"), "{reply}");

    // A client that does not encrypt gets no answer, and the certificate of another server is not accepted.
    let mut plain = TcpStream::connect(frontend).await.expect("the frontend listens");
    plain.write_all(get("/live").as_bytes()).await.expect("the frontend reads");
    let mut reply = Vec::new();
    // The connection may end with a reset.
    let _ = soon(plain.read_to_end(&mut reply)).await;
    assert!(!String::from_utf8_lossy(&reply).contains("HTTP"), "{reply:?}");
    let (_others, other) = Files::new();
    soon(ask(frontend, &other, &get("/live"))).await.expect_err("the certificate is not trusted");
}

#[tokio::test]
async fn operators_port_stays_plain() {
    let (files, _) = Files::new();
    let opened = files.open().expect("the files are valid");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let admin = listener.local_addr().expect("the listener is bound");
    let _cluster = Cluster::with(|settings| {
        settings.tls = Some(opened);
        settings.admin = Some(listener);
    })
    .await;
    let reply = send(admin, hyper::Method::GET, "/metrics", &[], "".into()).await;
    assert_eq!(reply.status(), hyper::StatusCode::OK);
}

#[tokio::test]
async fn changed_certificate_takes_effect_and_a_broken_one_does_not() {
    let (files, first) = Files::new();
    let cluster = files.cluster().await;
    let live = async |certificate: &CertificateDer<'static>| soon(ask(cluster.frontend, certificate, &get("/live"))).await;
    live(&first).await.expect("the certificate is trusted");
    let second = files.replace();
    for _ in 0..200 {
        if live(&second).await.is_ok() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    live(&second).await.expect("the new certificate is in use");
    live(&first).await.expect_err("the old certificate is not in use");
    fs::write(files.path("cert.pem"), "nonsense").expect("the folder is writable");
    cluster.counted("tandem_frontend_tls_outdated 1").await;
    live(&second).await.expect("the last valid certificate is in use");
}

#[test]
fn unusable_certificate_is_refused_at_the_start() {
    let (files, _) = Files::new();
    files.open().expect("the files are valid");
    let (others, _) = Files::new();
    let error =
        ServerCertificate::open(files.path("cert.pem"), others.path("key.pem")).expect_err("the key is another certificate's");
    assert!(error.to_string().contains("cannot be used together"), "{error}");
    fs::write(files.path("cert.pem"), "").expect("the folder is writable");
    assert!(files.open().expect_err("the file is empty").to_string().contains("has no certificate in PEM format"));
    fs::remove_file(files.path("cert.pem")).expect("the folder is writable");
    assert!(files.open().expect_err("the file is missing").to_string().contains("cert.pem cannot be read"));
}
