//! Connections that are slow or idle, too many connections, and clients that close their sending half.

use crate::support::*;
use hyper::StatusCode;
use serde_json::{Value, json};
use std::time::Duration;
use tandem_frontend::FrontendSettings;
use tandem_process::{Metrics, Shutdown};
use tandem_proto::channel::{Arrivals, Listener, Network};
use tandem_text::ServedModel;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    net::TcpStream,
    sync::mpsc,
    time::{Instant, sleep},
};

const LIVE: &str = "GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n";

/// A frontend on a network in memory, without a cluster. Its tests run in paused time.
struct Alone {
    dial: mpsc::Sender<DuplexStream>,
    metrics: Metrics,
    shutdown: Shutdown,
}

impl Alone {
    fn start() -> Self {
        let (dial, arriving) = mpsc::channel(8);
        let metrics = Metrics::default();
        let settings = FrontendSettings::new("127.0.0.1:1", ServedModel::sim("m"));
        let listener = Listener::new(Arrivals::Memory(arriving), Network::default());
        let shutdown = Shutdown::default();
        tokio::spawn(tandem_frontend::run(listener, settings, metrics.clone(), shutdown.clone()));
        Self { dial, metrics, shutdown }
    }

    async fn connect(&self) -> DuplexStream {
        let (ours, theirs) = duplex(1 << 20);
        self.dial.send(theirs).await.expect("the frontend accepts");
        ours
    }
}

/// Returns what the frontend sends until it closes the connection, and the number of seconds until then.
async fn until_closed(mut stream: DuplexStream) -> (String, u64) {
    let (since, mut text) = (Instant::now(), String::new());
    stream.read_to_string(&mut text).await.ok();
    (text, since.elapsed().as_secs())
}

#[tokio::test(start_paused = true)]
async fn connection_without_a_complete_head_is_closed_after_ten_seconds() {
    let frontend = Alone::start();
    assert_eq!(until_closed(frontend.connect().await).await, (String::new(), 10), "a connection without any bytes");
    let mut half = frontend.connect().await;
    half.write_all(b"GET /live HTTP/1.1\r\nhost: loc").await.expect("the frontend reads");
    assert_eq!(until_closed(half).await.1, 10);
    // The time limit is not extended for a client that sends single bytes.
    let (mut read, mut write) = tokio::io::split(frontend.connect().await);
    let dripping = tokio::spawn(async move {
        for byte in LIVE.bytes().cycle() {
            sleep(Duration::from_millis(900)).await;
            if write.write_all(if byte == b'\r' || byte == b'\n' { b"x" } else { std::slice::from_ref(&byte) }).await.is_err() {
                return;
            }
        }
    });
    let (since, mut text) = (Instant::now(), String::new());
    read.read_to_string(&mut text).await.ok();
    assert_eq!(since.elapsed().as_secs(), 10, "{text}");
    drop(read);
    dripping.await.expect("the task ends when the connection closes");
}

#[tokio::test(start_paused = true)]
async fn idle_connection_is_closed_after_75_seconds() {
    let frontend = Alone::start();
    let mut stream = frontend.connect().await;
    for _ in 0..3 {
        stream.write_all(LIVE.as_bytes()).await.expect("the connection is open");
        let mut answer = [0; 512];
        let bytes = stream.read(&mut answer).await.expect("the frontend answers");
        assert!(answer[..bytes].starts_with(b"HTTP/1.1 200"));
        sleep(Duration::from_secs(70)).await;
    }
    assert_eq!(until_closed(stream).await, (String::new(), 5));
    let mut stream = frontend.connect().await;
    stream.write_all(LIVE.as_bytes()).await.expect("the connection is open");
    let mut answer = [0; 512];
    let bytes = stream.read(&mut answer).await.expect("the frontend answers");
    assert!(answer[..bytes].starts_with(b"HTTP/1.1 200"));
    sleep(Duration::from_secs(30)).await;
    stream.write_all(b"GET /li").await.expect("the connection is open");
    assert_eq!(until_closed(stream).await.1, 10, "the next request's head must also arrive within ten seconds");
}

/// Sends a request. Returns the part of the answer that the first read delivers.
async fn live(stream: &mut DuplexStream) -> String {
    stream.write_all(LIVE.as_bytes()).await.expect("the connection is open");
    let mut answer = [0; 512];
    let bytes = stream.read(&mut answer).await.expect("the frontend answers");
    String::from_utf8_lossy(&answer[..bytes]).into_owned()
}

#[tokio::test(start_paused = true)]
async fn draining_frontend_serves_one_more_request_on_each_connection() {
    let frontend = Alone::start();
    let [mut late, mut idle, mut informed] = [frontend.connect().await, frontend.connect().await, frontend.connect().await];
    for stream in [&mut late, &mut idle, &mut informed] {
        let answer = live(stream).await;
        assert!(answer.starts_with("HTTP/1.1 200") && !answer.contains("connection: close"), "{answer}");
    }
    let shutdown = frontend.shutdown.clone();
    tokio::spawn(async move {
        shutdown.spawn(std::future::pending());
        shutdown.run(Duration::from_secs(60)).await;
    });
    frontend.dial.closed().await;
    assert!(live(&mut informed).await.contains("connection: close"));
    assert_eq!(until_closed(informed).await, (String::new(), 0), "the client has read that the connection closes");
    sleep(Duration::from_secs(4)).await;
    assert!(live(&mut late).await.contains("connection: close"), "a client sends without knowing that the frontend drains");
    assert_eq!(until_closed(late).await.1, 0);
    assert_eq!(until_closed(idle).await, (String::new(), 1), "an idle connection stays open for five seconds");
}

#[tokio::test(start_paused = true)]
async fn slow_body_gets_408_and_releases_its_memory() {
    let frontend = Alone::start();
    let mut stream = frontend.connect().await;
    let head =
        format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{{");
    stream.write_all(head.as_bytes()).await.expect("the frontend reads");
    let (text, seconds) = until_closed(stream).await;
    assert!(text.starts_with("HTTP/1.1 408") && text.contains("body_too_slow"), "{text}");
    assert!((5..=20).contains(&seconds), "{seconds}");
    let counted = frontend.metrics.render();
    assert!(counted.contains("tandem_frontend_reading_requests 0"), "{counted}");
    assert!(counted.contains("tandem_frontend_connections 0"), "{counted}");
}

#[tokio::test]
async fn connections_beyond_the_limit_get_503() {
    for (all, per_address) in [(3, 0), (100, 3)] {
        let cluster = Cluster::with(|settings| {
            settings.connections_max = all;
            settings.connections_per_address_max = per_address;
        })
        .await;
        let mut open = Vec::new();
        for _ in 0..3 {
            open.push(TcpStream::connect(cluster.frontend).await.expect("the frontend listens"));
        }
        cluster.counted("tandem_frontend_connections 3").await;
        let mut text = String::new();
        let mut refused = TcpStream::connect(cluster.frontend).await.expect("the frontend listens");
        soon(refused.read_to_string(&mut text)).await.expect("the frontend replies before it closes the connection");
        assert!(text.starts_with("HTTP/1.1 503") && text.contains("retry-after: 1"), "{text}");
        let body: Value =
            serde_json::from_str(text.split_once("\r\n\r\n").expect("the answer has a head").1).expect("the body is JSON");
        assert_eq!(body["error"]["code"], "too_many_connections");
        assert!(cluster.metric("tandem_frontend_connections_refused_total 1").await);
        drop(open);
        cluster.counted("tandem_frontend_connections 0").await;
        assert_eq!(cluster.get("/live").await.0, StatusCode::OK, "closed connections do not count");
    }
}

async fn send_raw(cluster: &Cluster, version: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(cluster.frontend).await.expect("the frontend listens");
    let body = body.to_string();
    let head = format!(
        "POST {CHAT} HTTP/{version}\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await.expect("the frontend reads");
    stream
}

/// Most servers behave like this, because a FIN does not show whether the client still reads.
#[tokio::test]
async fn client_that_closes_its_sending_half_counts_as_disconnected() {
    for version in ["1.0", "1.1"] {
        let mut cluster = Cluster::start().await;
        let mut client = send_raw(&cluster, version, &chat(json!({}))).await;
        let call = cluster.call().await;
        client.shutdown().await.expect("the connection is open");
        call.closed().await;
        cluster.counted("tandem_frontend_cancelled_total 1").await;
    }
}
