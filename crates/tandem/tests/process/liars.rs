//! Tests engines that lie about lengths, together with an honest one. Each liar is a proxy of a fake server until the lies begin.

use crate::{cluster::until, hostile::resident_max_mb, up::Up};
use serde_json::json;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use tandem_tests::fake_vllm::{FakeSettings, FakeVllm, tokenizer};
use tokio::{
    io::{self, AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};

/// The memory that `up` may use, in MB.
const RESIDENT_MAX_MB: f64 = 512.0;
/// The size of each write with which a liar sends its endless text, in bytes.
const PART: usize = 1 << 20;

/// What a liar sends: a head, if there is one, and then the same bytes again and again.
#[derive(Clone, Copy, Debug)]
enum Lie {
    /// Sent as the answer to every request.
    Answer { head: &'static str, body: &'static str },
    /// Sent as the answer to requests for tokens.
    Tokens { head: &'static str, body: &'static str },
    /// Sent to subscribers of KV events.
    Events { frame: &'static [u8] },
}

const ALL: [Lie; 9] = [
    Lie::Answer { head: "HTTP/1.1 200 OK\r\ncontent-length: 2147483648\r\n\r\n", body: "[" },
    Lie::Answer { head: "HTTP/1.1 200 OK\r\ncontent-length: 4611686018427387904\r\n\r\n{\"data\":\"", body: "x" },
    Lie::Answer { head: "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4000000000000000\r\n", body: "1" },
    Lie::Answer { head: "HTTP/1.1 500 No\r\nconnection: close\r\n\r\n", body: "no " },
    Lie::Answer { head: "HTTP/1.1 200 OK\r\nx-long: ", body: "x" },
    Lie::Tokens { head: "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\ndata: ", body: "x" },
    Lie::Tokens { head: "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n", body: "\n" },
    // A frame of 2⁶² bytes.
    Lie::Events { frame: b"\x02\x40\0\0\0\0\0\0\0" },
    // Empty frames of one message.
    Lie::Events { frame: b"\x01\0" },
];
/// What a publisher of events sends first.
const GREETING: &[u8] = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\x01NULL";
const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB";

#[derive(Clone)]
struct Liar {
    lie: Lie,
    lies: watch::Receiver<bool>,
    lied: Arc<AtomicUsize>,
    /// The ports of the fake server: the API and the events.
    server: (u16, u16),
    /// The port at which the liar publishes the events.
    events: u16,
}

impl Liar {
    async fn api(self, mut client: TcpStream) -> io::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(client.read_u8().await?);
        }
        let head = String::from_utf8(head).expect("the head of a request is text");
        match self.lie {
            Lie::Answer { head, body } if *self.lies.borrow() => return self.lie(client, head.as_bytes(), body.as_bytes()).await,
            Lie::Tokens { head: answer, body } if *self.lies.borrow() && head.contains("/generate") => {
                return self.lie(client, answer.as_bytes(), body.as_bytes()).await;
            }
            _ => {}
        }
        let mut server = TcpStream::connect(("127.0.0.1", self.server.0)).await?;
        // Each connection carries one request, so that the liar sees the head of every request.
        server.write_all(head.replacen("\r\n", "\r\nconnection: close\r\n", 1).as_bytes()).await?;
        if head.contains("/kv_event_sources") {
            let mut answer = String::new();
            server.read_to_string(&mut answer).await?;
            let (from, to) = (format!(":{}\"", self.server.1), format!(":{}\"", self.events));
            assert_eq!(from.len(), to.len(), "the length in the answer's head stays");
            return client.write_all(answer.replace(&from, &to).as_bytes()).await;
        }
        copy_bidirectional(&mut client, &mut server).await.map(drop)
    }

    async fn events(mut self, mut client: TcpStream) -> io::Result<()> {
        let mut server = TcpStream::connect(("127.0.0.1", self.server.1)).await?;
        let Lie::Events { frame } = self.lie else { return copy_bidirectional(&mut client, &mut server).await.map(drop) };
        if !*self.lies.borrow() {
            tokio::select! {
                _ = copy_bidirectional(&mut client, &mut server) => {}
                _ = self.lies.wait_for(|lies| *lies) => {}
            }
            return Ok(());
        }
        let greeting = [GREETING, &[0; 64 - GREETING.len()], READY].concat();
        self.lie(client, &greeting, frame).await
    }

    async fn lie(self, client: TcpStream, head: &[u8], body: &[u8]) -> io::Result<()> {
        // What the client sends is read, so that closing the connection does not reset it.
        let (mut from, mut to) = client.into_split();
        let reading = async { io::copy(&mut from, &mut io::sink()).await };
        let writing = async {
            to.write_all(head).await?;
            self.lied.fetch_add(1, Ordering::SeqCst);
            let part = body.repeat(PART / body.len());
            while to.write_all(&part).await.is_ok() {}
            Ok(0)
        };
        tokio::try_join!(reading, writing).map(drop)
    }
}

/// Accepts connections at this port, until the future is dropped.
async fn accept<F: Future<Output = io::Result<()>> + Send + 'static>(listener: TcpListener, serve: impl Fn(TcpStream) -> F) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        connections.spawn(serve(stream));
    }
}

#[test]
fn engines_that_lie_about_lengths_neither_fill_memory_nor_stop_the_other_engine() {
    let runtime = tokio::runtime::Runtime::new().expect("the runtime can be built");
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    tokenizer::write(folder.path()).expect("the folder is writable");
    let fake = || {
        let settings = FakeSettings { root: Some(folder.path().to_owned()), ..FakeSettings::default() };
        runtime.block_on(FakeVllm::start(settings)).expect("the server starts")
    };
    let port = |listener: &TcpListener| listener.local_addr().expect("the listener is bound").port();
    let bind = || runtime.block_on(TcpListener::bind("127.0.0.1:0")).expect("a port is free");
    let (begin, lies) = watch::channel(false);
    let (honest, mut liars, mut urls, mut serving) = (fake(), Vec::new(), Vec::new(), JoinSet::new());
    let servers = ALL.map(|_| fake());
    for (lie, server) in ALL.into_iter().zip(&servers) {
        let published = server.publisher().expect("the server publishes events").endpoints().endpoint.clone();
        let published = published.rsplit_once(':').expect("the endpoint has a port").1.parse().expect("a number");
        let (api, events) = (bind(), bind());
        urls.push(format!("http://127.0.0.1:{}", port(&api)));
        let (server, events_port) = ((server.port(), published), port(&events));
        let liar = Liar { lie, lies: lies.clone(), lied: Arc::default(), server, events: events_port };
        liars.push(liar.clone());
        let publisher = liar.clone();
        serving.spawn_on(accept(api, move |client| liar.clone().api(client)), runtime.handle());
        serving.spawn_on(accept(events, move |client| publisher.clone().events(client)), runtime.handle());
    }
    urls.push(honest.url());
    let up = Up::start(&["--engine", "vllm", "--engine-url", &urls.join(",")], std::process::Stdio::null());
    until("all engines have joined", || up.get("/metrics"), |page| page.contains(&joined(ALL.len() + 1)));
    begin.send_replace(true);
    let ask = |number: usize| {
        let body =
            json!({ "model": "fake", "prompt": format!("question {number} {}", "of some words ".repeat(20)), "max_tokens": 6 });
        // All attempts of a request may reach liars, because their workers may not have been removed yet.
        let ask = || up.answer("/v1/completions", &body.to_string());
        let answer = until("the request is answered", ask, |answer| !answer.starts_with("HTTP/1.1 503"));
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(r#""completion_tokens":6"#), "{number}: {answer}");
    };
    let asked = AtomicUsize::new(0);
    let lied = || {
        (0..10).for_each(|_| ask(asked.fetch_add(1, Ordering::Relaxed)));
        liars.iter().map(|liar| (liar.lie, liar.lied.load(Ordering::SeqCst))).collect::<Vec<_>>()
    };
    until("all have lied", lied, |lied| lied.iter().all(|(_, times)| *times > 0));
    let resident = resident_max_mb(&up);
    assert!(resident < RESIDENT_MAX_MB, "{resident} MB");
}

/// Returns the series of the router's metrics that says how many workers have joined.
fn joined(workers: usize) -> String {
    format!("tandem_router_workers{{state=\"joined\"}} {workers}\n")
}
