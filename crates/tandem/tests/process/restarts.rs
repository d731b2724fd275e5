//! Restarts of the only router and of the only frontend while clients send requests: no request fails.

use crate::{
    cluster::{Plan, address, ready, until},
    talk::{chat_body, metric},
    up::Up,
};
use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::Duration,
};
use tokio::time::Instant;

const CLIENTS: usize = 8;

struct Cluster {
    plan: Plan,
    router: Option<Up>,
    frontend: Option<Up>,
    /// The address of the frontend.
    api: SocketAddr,
    _workers: [Up; 2],
}

impl Cluster {
    fn start() -> Self {
        let (plan, api) = (Plan::new(), address());
        let at = [address(), address()];
        plan.list(&at);
        let workers = [plan.worker("prefill", "p", at[0], &[]), plan.worker("decode", "d", at[1], &[])];
        let cluster = Self { router: Some(plan.router(&[])), frontend: Some(frontend(&plan, api)), plan, api, _workers: workers };
        ready(cluster.frontend.as_ref().expect("the process runs"));
        cluster
    }

    /// Lets clients send requests one after another until `during_load` has returned; half of the clients open a connection for each.
    /// Panics unless every answer is complete. A client repeats a request only if its connection breaks and `may_break` allows it. Returns
    /// the number of repetitions.
    fn under_load(&mut self, may_break: bool, during_load: impl FnOnce(&mut Self)) -> u32 {
        let (over, answers, repeated, api) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0), self.api);
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let (over, answers, repeated) = (&over, &answers, &repeated);
                scope.spawn(move || {
                    let mut connection = None;
                    for round in 0..10_000 {
                        let last = over.load(Ordering::Relaxed);
                        let text = format!("{client} asks for the {round}th time");
                        while let Err(broken) = exchange(api, &mut connection, client % 2 == 0, &text) {
                            assert!(may_break, "the connection of client {client} broke: {broken}");
                            repeated.fetch_add(1, Ordering::Relaxed);
                            std::thread::sleep(Duration::from_millis(20));
                        }
                        answers.fetch_add(1, Ordering::Relaxed);
                        if last {
                            break;
                        }
                    }
                });
            }
            let more = |by: u32| {
                let before = answers.load(Ordering::Relaxed);
                until("clients get answers", || answers.load(Ordering::Relaxed), |answers| *answers > before + by);
            };
            more(2 * CLIENTS as u32);
            during_load(self);
            more(2 * CLIENTS as u32);
            over.store(true, Ordering::Relaxed);
        });
        repeated.into_inner()
    }
}

fn frontend(plan: &Plan, api: SocketAddr) -> Up {
    plan.start("frontend", "frontend", api, &["--engine", "sim", "--router", &plan.router_list(), "--reuse-port"])
}

/// Sends a request over the open connection, or over a new one, and reads its answer. Panics unless the answer is complete.
///
/// # Errors
/// The connection could not be opened, or broke.
fn exchange(api: SocketAddr, connection: &mut Option<BufReader<TcpStream>>, keeps: bool, text: &str) -> std::io::Result<()> {
    let mut stream = match connection.take() {
        Some(open) => open,
        None => BufReader::new(TcpStream::connect(api)?),
    };
    let (body, header) = (chat_body(text, 100, false), if keeps { "keep-alive" } else { "close" });
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: {api}\r\nconnection: {header}\r\n");
    write!(stream.get_mut(), "{head}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())?;
    let mut lines = String::new();
    while !lines.ends_with("\r\n\r\n") {
        if stream.read_line(&mut lines)? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
    assert!(lines.starts_with("HTTP/1.1 200"), "{lines}");
    let length =
        lines.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok()).expect("the answer has a length");
    let mut answer = vec![0; length];
    stream.read_exact(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("\"finish_reason\":\"length\""), "the answer is incomplete: {answer}");
    if !lines.contains("connection: close") {
        *connection = Some(stream);
    }
    Ok(())
}

#[test]
fn restarts_of_the_only_router_fail_no_request() {
    let mut cluster = Cluster::start();
    let repeated = cluster.under_load(false, |cluster| {
        for signal in ["-TERM", "-KILL", "-TERM"] {
            let (router, started) = (cluster.router.take().expect("the process runs"), Instant::now());
            router.signal(signal);
            router.wait();
            assert!(started.elapsed() < Duration::from_secs(2), "{signal}: it ended after {:?}", started.elapsed());
            let frontend = cluster.frontend.as_ref().expect("the process runs");
            until(
                "requests wait",
                || metric(frontend, "tandem_frontend_held_requests"),
                |held| held.is_some_and(|held| held > 0.0),
            );
            cluster.router = Some(cluster.plan.router(&[]));
            ready(frontend);
        }
    });
    assert_eq!(repeated, 0);
    until("the bookings end", || cluster.plan.view().bookings, |bookings| *bookings == 0);
}

#[test]
fn draining_router_does_not_wait_for_long_answers() {
    let mut cluster = Cluster::start();
    let body = chat_body("a long story", 2_000, true);
    let mut running =
        cluster.frontend.as_ref().expect("it runs").send("/v1/chat/completions", &body).expect("the frontend listens");
    let mut answer = String::new();
    while !answer.contains("data:") {
        assert_ne!(running.read_line(&mut answer).expect("the answer is UTF-8"), 0, "the answer ended early: {answer}");
    }
    let (router, started) = (cluster.router.take().expect("the process runs"), Instant::now());
    router.signal("-TERM");
    assert_eq!(router.wait().0.code(), Some(0));
    assert!(started.elapsed() < Duration::from_secs(2), "it waited for the answer: {:?}", started.elapsed());
    running.read_to_string(&mut answer).expect("the answer is UTF-8");
    assert!(answer.contains("\"finish_reason\":\"length\"") && answer.contains("data: [DONE]"), "the answer needs no router");
}

#[test]
fn replacing_a_frontend_on_a_shared_port_fails_no_request() {
    let mut cluster = Cluster::start();
    let repeated = cluster.under_load(false, |cluster| {
        for _ in 0..3 {
            let new = frontend(&cluster.plan, cluster.api);
            let old = cluster.frontend.replace(new).expect("the process runs");
            old.signal("-TERM");
            assert_eq!(old.wait().0.code(), Some(0));
        }
    });
    assert_eq!(repeated, 0);
}

#[test]
fn killed_frontend_that_restarts_fails_only_the_requests_that_it_ran() {
    let mut cluster = Cluster::start();
    let repeated = cluster.under_load(true, |cluster| {
        let killed = cluster.frontend.take().expect("the process runs");
        killed.signal("-KILL");
        killed.wait();
        cluster.frontend = Some(frontend(&cluster.plan, cluster.api));
    });
    assert!(repeated > 0, "the clients' connections broke");
    until("the bookings end", || cluster.plan.view().bookings, |bookings| *bookings == 0);
}
