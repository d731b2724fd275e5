//! Tests that a client which attacks the frontend in several ways at once does not keep another client from being answered.
//!
//! The attack has 1,024 idle connections (half of them with an incomplete header), 200 connections that send a byte every 500 ms, 50 bodies of 32 MiB
//! that need much more memory when they are parsed, and ten requests of 128 samples. It comes from 127.0.0.2; without accounts, the frontend
//! distinguishes clients by address. The test prints a table. It needs a machine that does nothing else: `cargo test --release -p tandem --test
//! process -- --ignored --nocapture one_client_does_not_starve_another_client`
#![expect(clippy::print_stdout, reason = "the test prints measurements")]

use crate::{
    cluster::{Plan, address, ready, series, until},
    talk::chat_body,
    up::Up,
};
use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpSocket,
    task::JoinSet,
    time::Instant,
};

/// The numbers of attacking clients of each kind.
const IDLE: usize = 1_024;
const SLOW: usize = 200;
const BODIES: usize = 50;
const BODY_BYTES: usize = 32 << 20;
const SAMPLED: usize = 10;

/// The frontend's resident memory during the attack must not exceed this limit, in MB.
const RESIDENT_MAX_MB: f64 = 400.0;
/// The length of the other client's prompts in letters, which are the simulator's tokens.
const PROMPT: usize = 2_000;

const ROUNDS: usize = 5;
/// In each round, the other client sends this many questions without the attack, and again during it.
const QUESTIONS: usize = 40;
/// The 99th percentile of the time to first token during the attack may be this many times as long as without the attack. The compared ratio is the
/// median of the ratios of all rounds.
const RATIO_MAX: f64 = 3.0;
/// Time limit of a response to `/live`.
const LIVE_MAX: Duration = Duration::from_millis(500);

#[test]
#[ignore = "takes three minutes of a machine that does nothing else"]
fn one_client_does_not_starve_another_client() {
    let plan = Plan::new();
    let workers = [address(), address()];
    plan.list(&workers);
    let router = plan.router(&[]);
    let frontend = plan.frontend(&["--max-body-bytes", &BODY_BYTES.to_string()]);
    let real_time = ["--sim-speedup", "1"];
    let _workers = [plan.worker("prefill", "p", workers[0], &real_time), plan.worker("decode", "d", workers[1], &real_time)];
    ready(&frontend);
    send_question(&frontend, "warm-up");

    let mut measured = Measurements::default();
    for round in 0..ROUNDS {
        let idle: Vec<Answer> =
            (0..QUESTIONS).map(|number| send_question(&frontend, &format!("{round} {number} idle"))).collect();
        let attack = Attack::start(&plan, frontend.address().parse().expect("the frontend's address is valid"));
        until(
            "the attack has requests in flight",
            || series(&frontend, "tandem_frontend_inflight_requests"),
            |inflight| *inflight > 0.0,
        );
        std::thread::sleep(Duration::from_secs(2));
        let live = LivenessProbe::start(&frontend);
        let attacked: Vec<Answer> =
            (0..QUESTIONS).map(|number| send_question(&frontend, &format!("{round} {number} attacked"))).collect();
        measured.live.extend(live.stop());
        assert!(attack.bodies.load(Ordering::Relaxed) >= BODIES, "the bodies were sent");
        drop(attack);
        // The same questions must have the same answers after the attack as during it.
        until("the attack is over", || series(&frontend, "tandem_frontend_inflight_requests"), |inflight| *inflight == 0.0);
        for (number, answer) in attacked.iter().enumerate() {
            assert_eq!(
                answer.text,
                send_question(&frontend, &format!("{round} {number} attacked")).text,
                "the answer to question {number} differs"
            );
        }
        measured.rounds.push([times(&idle), times(&attacked)]);
    }
    let resident = resident_max_mb(&frontend);
    println!("{}", measured.table(resident));
    measured.check(resident);
    drop(router);
}

struct Answer {
    first_token: Duration,
    text: String,
}

fn times(answers: &[Answer]) -> Vec<Duration> {
    answers.iter().map(|answer| answer.first_token).collect()
}

/// Sends a question of the other client, and measures the time to its first token: the head of the answer arrives with that token.
fn send_question(frontend: &Up, about: &str) -> Answer {
    let body = chat_body(&format!("{about} {}", "and so on ".repeat(PROMPT / 10)), 4, true).replacen('{', r#"{"seed":7,"#, 1);
    let sent_at = Instant::now();
    let mut stream = TcpStream::connect(frontend.address()).expect("the server listens");
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n", frontend.address());
    let head = format!("{head}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(head.as_bytes()).expect("the process reads");
    let mut first = [0];
    stream.read_exact(&mut first).expect("the frontend answers");
    let first_token = sent_at.elapsed();
    let mut answer = String::from_utf8(first.to_vec()).expect("the answer is UTF-8");
    stream.read_to_string(&mut answer).expect("the answer is UTF-8");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("[DONE]"), "the answer is incomplete: {answer}");
    let chunks = answer.split("\"content\":\"").skip(1).filter_map(|rest| rest.split('"').next());
    Answer { first_token, text: chunks.collect() }
}

struct Attack {
    _clients: JoinSet<()>,
    bodies: Arc<AtomicUsize>,
}

impl Attack {
    fn start(plan: &Plan, address: SocketAddr) -> Self {
        let _inside = plan.runtime.enter();
        let (mut clients, bodies) = (JoinSet::new(), Arc::new(AtomicUsize::new(0)));
        for number in 0..IDLE {
            let part = if number % 2 == 0 { "" } else { "POST /v1/chat/completions HTTP/1.1\r\nhost: loc" };
            clients.spawn(repeat_client(address, move |mut stream| async move {
                stream.write_all(part.as_bytes()).await?;
                // The client waits until the frontend closes the connection.
                stream.read(&mut [0; 1_024]).await.map(drop)
            }));
        }
        for _ in 0..SLOW {
            clients.spawn(repeat_client(address, move |mut stream| async move {
                stream.write_all(head(address, "content-length: 1000").as_bytes()).await?;
                loop {
                    stream.write_all(b" ").await?;
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
            }));
        }
        for number in 0..BODIES {
            let (body, counted) = (large_in_memory(number), Arc::clone(&bodies));
            clients.spawn(repeat_client(address, move |mut stream| {
                let (body, counted) = (body.clone(), Arc::clone(&counted));
                async move {
                    let length = format!("content-length: {BODY_BYTES}");
                    let sent = async {
                        stream.write_all(head(address, &length).as_bytes()).await?;
                        for chunk in body.iter() {
                            stream.write_all(chunk).await?;
                        }
                        stream.read(&mut [0; 1_024]).await
                    };
                    let sent = sent.await.map(drop);
                    counted.fetch_add(1, Ordering::Relaxed);
                    sent
                }
            }));
        }
        for number in 0..SAMPLED {
            clients.spawn(repeat_client(address, move |mut stream| async move {
                let body = format!(
                    r#"{{"model":"sim","stream":true,"n":128,"max_tokens":200,"logit_bias":{{"257":-100}},"prompt":"{number} of many {}"}}"#,
                    "again ".repeat(20)
                );
                let head = head(address, &format!("content-length: {}", body.len())).replace("chat/completions", "completions");
                stream.write_all((head + &body).as_bytes()).await?;
                let mut answer = vec![0; 1 << 16];
                while stream.read(&mut answer).await? > 0 {}
                Ok(())
            }));
        }
        Self { _clients: clients, bodies }
    }
}

/// Repeats an action, each time on a new connection. The next action starts one second after the last one has ended or failed.
async fn repeat_client<F: Future<Output = std::io::Result<()>>>(
    address: SocketAddr,
    mut act: impl FnMut(tokio::net::TcpStream) -> F,
) {
    loop {
        let socket = TcpSocket::new_v4().expect("the system can create a socket");
        socket.bind(([127, 0, 0, 2], 0).into()).expect("127.0.0.2 is an address of this machine");
        if let Ok(stream) = socket.connect(address).await {
            // An error is expected, because the frontend may refuse or close the connection.
            let _ = act(stream).await;
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

fn head(address: SocketAddr, length: &str) -> String {
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n{length}\r\n\r\n")
}

/// Returns the chunks of a body that needs many times its size when it is parsed.
fn large_in_memory(number: usize) -> Vec<Arc<[u8]>> {
    const CHUNK_BYTES: usize = 1 << 16;
    let (begin, unit) = [
        (r#"{"messages":["#, "{},"),
        (r#"{"tools":["#, "0,"),
        (r#"{"prompt":["#, "[0],"),
        (r#"{"model":"sim","stop":["#, "\"\","),
        (r#"{"model":"sim","messages":[{"role":"user","content":["#, "[],"),
    ][number % 5];
    let chunk: Arc<[u8]> = unit.bytes().cycle().take(CHUNK_BYTES / unit.len() * unit.len()).collect();
    let mut chunks: Vec<Arc<[u8]>> = vec![begin.as_bytes().into()];
    let mut left = BODY_BYTES - begin.len();
    while left >= chunk.len() {
        left -= chunk.len();
        chunks.push(Arc::clone(&chunk));
    }
    chunks.push(vec![b' '; left].into());
    chunks
}

struct LivenessProbe {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Vec<Duration>>,
}

impl LivenessProbe {
    fn start(frontend: &Up) -> Self {
        let (address, stop) = (frontend.address().to_owned(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut times = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                let sent_at = Instant::now();
                let mut answer = String::new();
                let mut stream = TcpStream::connect(&address).expect("the server listens");
                write!(stream, "GET /live HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n").expect("the process reads");
                stream.read_to_string(&mut answer).expect("the answer is UTF-8");
                assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
                times.push(sent_at.elapsed());
                std::thread::sleep(Duration::from_millis(100));
            }
            times
        });
        Self { stop, thread }
    }

    fn stop(self) -> Vec<Duration> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the frontend was live all the time")
    }
}

/// Returns the peak resident memory of the process so far, in MB.
pub fn resident_max_mb(process: &Up) -> f64 {
    let status = fs::read_to_string(format!("/proc/{}/status", process.id())).expect("the process runs");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the status has VmHWM");
    let kib: f64 = peak.trim().trim_end_matches(" kB").parse().expect("VmHWM is a number");
    kib * 1_024.0 / 1e6
}

#[derive(Default)]
struct Measurements {
    /// The times to first token in each round: first those without the attack, then those during it.
    rounds: Vec<[Vec<Duration>; 2]>,
    live: Vec<Duration>,
}

impl Measurements {
    fn all(&self, attacked: usize) -> Vec<Duration> {
        self.rounds.iter().flat_map(|round| &round[attacked]).copied().collect()
    }

    /// Returns the ratio of a percentile of the times during the attack to that of the times without it. It is the median of the ratios of all
    /// rounds. Other work on the machine affects the times with and without the attack alike, so it changes the ratio little.
    fn ratio(&self, percent: usize) -> f64 {
        let ratios = self
            .rounds
            .iter()
            .map(|[idle, attacked]| percentile(attacked, percent).as_secs_f64() / percentile(idle, percent).as_secs_f64());
        let mut ratios: Vec<f64> = ratios.collect();
        ratios.sort_by(f64::total_cmp);
        ratios[ratios.len() / 2]
    }

    fn table(&self, resident: f64) -> String {
        let row = |name: &str, percent| {
            let [idle, attacked] = [0, 1].map(|attacked| percentile(&self.all(attacked), percent).as_secs_f64());
            format!("| first token, {name} | {idle:.3} s | {attacked:.3} s | {:.1} |\n", self.ratio(percent))
        };
        let live = [50, 100].map(|percent| percentile(&self.live, percent).as_secs_f64());
        format!(
            "| | quiet | under attack | ratio |\n|---|--:|--:|--:|\n{}{}| `/live`, median and slowest | | {:.3} s, {:.3} s | |\n| frontend's peak memory | | {resident:.0} MB | |",
            row("median", 50),
            row("99th percentile", 99),
            live[0],
            live[1],
        )
    }

    fn check(&self, resident: f64) {
        let live = self.live.iter().max().expect("the probe has requests");
        assert!(*live < LIVE_MAX, "/live took {live:?}");
        let ratio = self.ratio(99);
        assert!(ratio <= RATIO_MAX, "first tokens took {ratio:.1} times as long as without the attack");
        assert!(resident <= RESIDENT_MAX_MB, "the frontend had {resident:.0} MB in use");
    }
}

fn percentile(times: &[Duration], percent: usize) -> Duration {
    let mut times = times.to_vec();
    times.sort_unstable();
    times[((times.len() * percent).div_ceil(100)).clamp(1, times.len()) - 1]
}
