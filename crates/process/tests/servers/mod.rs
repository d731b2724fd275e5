//! Starts etcd and NATS servers for the tests of several crates. Each server has its own port and temporary data.
#![allow(dead_code, reason = "not all tests use all of it")]

use std::{
    fs,
    io::ErrorKind,
    net::{Ipv4Addr, TcpListener as Listener},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};
use tokio::time::Instant;

/// Time limit of every wait for a server. Only a failing test waits this long.
pub const TIMEOUT: Duration = Duration::from_secs(30);

/// Returns a free port outside the ranges that the system and other tests use, so that no other program takes it before it is bound. Each
/// test process has its own range.
pub fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 2_000 + (std::process::id() % 300) as u16 * 25;
    loop {
        let port = first + NEXT.fetch_add(1, Ordering::Relaxed) % 500;
        if Listener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
}

/// A server that can be stopped and started again. Dropping this value kills the server.
pub struct Server {
    program: &'static str,
    /// The text that the server logs once it serves. Its port is open earlier, but an etcd server that is killed before it serves loses its data.
    ready: &'static str,
    args: Vec<String>,
    folder: tempfile::TempDir,
    port: u16,
    process: Option<Child>,
}

impl Server {
    pub fn etcd(args: &[&str]) -> Self {
        let scheme = if args.iter().any(|arg| arg.contains("cert-file")) { "https" } else { "http" };
        let (port, peers) = (port(), port());
        let own = [
            format!("--listen-client-urls={scheme}://127.0.0.1:{port}"),
            format!("--advertise-client-urls={scheme}://127.0.0.1:{port}"),
            format!("--listen-peer-urls=http://127.0.0.1:{peers}"),
            format!("--initial-advertise-peer-urls=http://127.0.0.1:{peers}"),
            format!("--initial-cluster=default=http://127.0.0.1:{peers}"),
            // A cluster of one member needs no time for an election, so half of the default intervals are safe and make the start faster.
            "--heartbeat-interval=50".to_owned(),
            "--election-timeout=500".to_owned(),
        ];
        Self::new(
            ("etcd", "ready to serve client requests"),
            port,
            own.into_iter().chain(args.iter().map(|arg| (*arg).to_owned())).collect(),
        )
    }

    pub fn nats(args: &[&str]) -> Self {
        let port = port();
        let own = ["--addr=127.0.0.1".to_owned(), format!("--port={port}")];
        Self::new(
            ("nats-server", "Server is ready"),
            port,
            own.into_iter().chain(args.iter().map(|arg| (*arg).to_owned())).collect(),
        )
    }

    fn new((program, ready): (&'static str, &'static str), port: u16, args: Vec<String>) -> Self {
        let mut server = Self {
            program,
            ready,
            args,
            folder: tempfile::tempdir().expect("the system can create a temporary folder"),
            port,
            process: None,
        };
        server.start();
        server
    }

    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    /// Starts the server with the data on its disk, and waits until it serves.
    pub fn start(&mut self) {
        assert!(self.process.is_none(), "the server runs already");
        let log = fs::File::create(self.folder.path().join("log")).expect("the folder is writable");
        let mut command = Command::new(self.program);
        command.args(&self.args).env("ETCD_DATA_DIR", self.data()).stdin(Stdio::null());
        let spawned = command.stdout(log.try_clone().expect("the log file can be shared")).stderr(log).spawn();
        self.process = match spawned {
            Ok(process) => Some(process),
            Err(error) if error.kind() == ErrorKind::NotFound => panic!(
                "{} is missing: apt-get install etcd-server nats-server, or leave these tests out with `-- --skip servers`",
                self.program
            ),
            Err(error) => panic!("{} does not start: {error}", self.program),
        };
        let started = Instant::now();
        while !self.log().contains(self.ready) {
            assert!(started.elapsed() < TIMEOUT, "{} does not serve: {}", self.program, self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the log contains this text this many times. Other tasks run meanwhile.
    pub async fn wait_for_log(&self, text: &str, times: usize) {
        let started = Instant::now();
        while self.log().matches(text).count() < times {
            assert!(started.elapsed() < TIMEOUT, "{} does not log {text:?}: {}", self.program, self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    pub fn signal(&self, signal: &str) {
        let id = self.process.as_ref().expect("the server runs").id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().expect("kill runs").success());
    }

    pub fn kill(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        process.kill().expect("the process is a child of this one");
        process.wait().expect("the process is a child of this one");
    }

    pub fn lose_data(&self) {
        assert!(self.process.is_none(), "the server must not run");
        fs::remove_dir_all(self.data()).expect("the data folder exists");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
