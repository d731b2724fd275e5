//! A fake server to which requests are passed through. The test reads each request and writes the bytes of its answer.

use crate::support::*;
use bytes::Bytes;
use hyper::Method;
use std::sync::{
    Arc,
    atomic::{AtomicU16, Ordering},
};
use tandem_frontend::{FrontendSettings, Passthrough};
use tandem_process::{Metrics, Secret};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    task::JoinHandle,
};

pub const JSON: &str = "application/json";

/// A fake server. Dropping it closes its socket.
pub struct Upstream {
    pub url: String,
    /// The status of `/health`.
    pub health: Arc<AtomicU16>,
    requests: mpsc::UnboundedReceiver<Upcall>,
    accepts: JoinHandle<()>,
}

/// A request that has arrived, and its connection.
pub struct Upcall {
    pub head: String,
    pub body: Vec<u8>,
    pub stream: BufReader<TcpStream>,
}

impl Upstream {
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let url = format!("http://{}", listener.local_addr().expect("the listener is bound"));
        let health = Arc::new(AtomicU16::new(200));
        let (sender, requests) = mpsc::unbounded_channel();
        let status = Arc::clone(&health);
        let accepts = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (sender, status) = (sender.clone(), Arc::clone(&status));
                tokio::spawn(async move {
                    let mut stream = BufReader::new(stream);
                    while let Some((head, body)) = read(&mut stream).await {
                        if !head.starts_with("GET /health ") {
                            sender.send(Upcall { head, body, stream }).ok();
                            return;
                        }
                        let status = status.load(Ordering::Relaxed);
                        let answer = format!("HTTP/1.1 {status} x\r\ncontent-length: 0\r\n\r\n");
                        stream.write_all(answer.as_bytes()).await.ok();
                    }
                });
            }
        });
        Self { url, health, requests, accepts }
    }

    /// Waits for the next request.
    pub async fn request(&mut self) -> Upcall {
        soon(self.requests.recv()).await.expect("the fake server runs")
    }

    pub fn no_request(&mut self) -> bool {
        self.requests.try_recv().is_err()
    }

    /// Returns the frontend's line of a metric of this server.
    pub fn metric(&self, name: &str, value: u64) -> String {
        format!("tandem_frontend_passthrough_{name}{{model=\"e\",server=\"{}\"}} {value}", self.url)
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.accepts.abort();
    }
}

/// Reads a request; `None` if the connection was closed.
pub async fn read(stream: &mut BufReader<TcpStream>) -> Option<(String, Vec<u8>)> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    let length = head.to_ascii_lowercase().lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body).await.ok()?;
    Some((head, body))
}

impl Upcall {
    /// Returns the value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).filter_map(|line| line.split_once(": ")).find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    pub async fn write(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).await.expect("the frontend reads");
    }

    /// Answers with a status, header lines and a body, and closes the connection.
    pub async fn answer(mut self, status: u16, headers: &str, body: impl AsRef<[u8]>) {
        let length = body.as_ref().len();
        self.write(format!("HTTP/1.1 {status} x\r\ncontent-length: {length}\r\nconnection: close\r\n{headers}\r\n")).await;
        self.write(body).await;
    }

    /// Waits until the frontend closes the connection.
    pub async fn closed(mut self) {
        let read = soon(self.stream.read(&mut [0; 1])).await;
        assert!(matches!(read, Ok(0) | Err(_)), "the frontend sends nothing more");
    }
}

/// Starts a cluster that passes requests for the model `e` through to these servers.
pub async fn cluster(upstreams: &[&Upstream]) -> Cluster {
    let metrics = Metrics::default();
    Cluster::measured(metrics.clone(), passing(upstreams, &metrics)).await
}

/// Returns the change of the settings of [`cluster`].
pub fn passing(upstreams: &[&Upstream], metrics: &Metrics) -> impl FnOnce(&mut FrontendSettings) + use<> {
    let servers = upstreams.iter().map(|upstream| ("e".to_owned(), upstream.url.clone()));
    let passthrough = Passthrough::new(servers, Some(Secret::from("key-of-the-servers".to_owned())), None, metrics);
    let passthrough = passthrough.expect("the URLs are valid");
    |settings| settings.passthrough = passthrough
}

/// Sends a request in the background.
pub fn spawn(cluster: &Cluster, path: &'static str, kind: &'static str, body: impl Into<Bytes>) -> JoinHandle<Reply> {
    let (frontend, body) = (cluster.frontend, body.into());
    tokio::spawn(async move { send(frontend, Method::POST, path, &[("content-type", kind)], body).await })
}

/// Sends a request for embeddings in the background.
pub fn embed(cluster: &Cluster) -> JoinHandle<Reply> {
    spawn(cluster, "/v1/embeddings", JSON, r#"{"model":"e","input":"a"}"#)
}

pub async fn arrived(reply: JoinHandle<Reply>) -> Reply {
    soon(reply).await.expect("the client task runs")
}
