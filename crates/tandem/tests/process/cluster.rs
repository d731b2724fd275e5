//! A cluster of processes. Each process has a fixed port, so that it can be restarted at the same address.
#![allow(dead_code, reason = "not every test crate uses all helpers")]

use crate::up::{Up, tandem};
use std::{
    fs::{self, OpenOptions},
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicU16, Ordering},
    time::Duration,
};
use tandem_proto::{
    ClusterKey,
    channel::{self, ClusterTls, Network, PeerRole, TlsPem},
    v1::{WorkersReply, WorkersRequest, router_client::RouterClient},
};
use tokio::time::Instant;

/// Time limit of every wait. Only a failing test waits this long.
const TIMEOUT: Duration = Duration::from_secs(60);

pub const SECRET: &str = "the secret of a cluster of processes, in a test";

/// Polls a value until `holds` returns true for it, and returns it. Panics with the last value after the time limit.
pub fn until<T: std::fmt::Debug>(what: &str, read_value: impl Fn() -> T, holds: impl Fn(&T) -> bool) -> T {
    let started = Instant::now();
    loop {
        let seen = read_value();
        if holds(&seen) {
            return seen;
        }
        assert!(started.elapsed() < TIMEOUT, "timed out waiting until {what}; the last value is {seen:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns an address of this machine that no other test process uses. Its port is below those that the system assigns for port 0.
pub fn address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = 10_000 + (std::process::id() % 200) as u16 * 100;
    loop {
        let port = first + NEXT.fetch_add(1, Ordering::Relaxed) % 2_000;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return (Ipv4Addr::LOCALHOST, port).into();
        }
    }
}

/// Runs `tandem cert`, which makes or renews the certificates in this folder.
pub fn make_certificates(folder: &Path) {
    let made = tandem(&["cert", folder.to_str().expect("the path is UTF-8")]).output().expect("the binary runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let text = String::from_utf8_lossy(&made.stdout).into_owned();
    assert!(text.contains("spiffe://tandem.internal/tandem/tandem/decode-worker"), "{text}");
}

/// Returns the flags of a process with this role, for the certificates in this folder.
pub fn certificate_flags(folder: &Path, role: &str) -> Vec<String> {
    let file = |name: &str, suffix: &str| folder.join(format!("{name}.{suffix}")).to_str().expect("the path is UTF-8").to_owned();
    let flags =
        [("--cluster-cert", file(role, "pem")), ("--cluster-cert-key", file(role, "key")), ("--cluster-ca", file("ca", "pem"))];
    flags.into_iter().flat_map(|(flag, file)| [flag.to_owned(), file]).collect()
}

/// Reads the certificate of this role in a folder.
pub fn tls(folder: &Path, role: PeerRole) -> ClusterTls {
    let text = |name: &str| fs::read_to_string(folder.join(name)).expect("the file was made");
    let (certificate, key) = (text(&format!("{}.pem", role.name())), text(&format!("{}.key", role.name())));
    ClusterTls::new(TlsPem { certificate: &certificate, key: &key, ca: &text("ca.pem") }, role, None)
        .expect("the files are valid")
}

/// The addresses, the key and the files with which the processes of a cluster are started.
pub struct Plan {
    folder: tempfile::TempDir,
    pub routers: Vec<SocketAddr>,
    pub key: ClusterKey,
    /// The folder with the processes' certificates; `None` without TLS.
    certificates: Option<PathBuf>,
    /// Opens stdout and stderr of the processes. With `None`, the test reads stdout, and stderr is a file.
    output: Option<fn() -> Stdio>,
    pub runtime: tokio::runtime::Runtime,
}

impl Plan {
    pub fn new() -> Self {
        Self::with_routers(1)
    }

    pub fn with_routers(count: usize) -> Self {
        // The runtime has a thread of its own, so that it closes unused connections even while no call runs.
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("the runtime can be built");
        let (folder, routers) =
            (tempfile::tempdir().expect("the system can create a temporary folder"), (0..count).map(|_| address()).collect());
        let key = ClusterKey::new(SECRET.as_bytes()).expect("the secret is long enough");
        let plan = Self { folder, routers, key, certificates: None, output: None, runtime };
        plan.secret("key", SECRET);
        plan.list(&[]);
        plan
    }

    /// Gives every process the certificate of its role in this folder.
    #[must_use]
    pub fn with_certificates(self, folder: PathBuf) -> Self {
        Self { certificates: Some(folder), ..self }
    }

    /// Gives every process this stdout and stderr. [`Plan::start`] then does not wait until the process is ready; its address is that of `--listen`.
    #[must_use]
    pub fn with_output(self, output: fn() -> Stdio) -> Self {
        Self { output: Some(output), ..self }
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn secret(&self, name: &str, secret: &str) {
        let path = self.file(name);
        fs::write(&path, secret).expect("the folder is writable");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("the folder is writable");
    }

    pub fn list(&self, workers: &[SocketAddr]) {
        let text: String = workers.iter().map(|worker| format!("{worker} # of the test\n")).collect();
        fs::write(self.file("workers"), text).expect("the folder is writable");
    }

    /// Starts a role with the cluster's key, its certificate if the cluster has certificates, and these arguments only. Its log is in the file
    /// `name`.
    pub fn start(&self, role: &str, name: &str, listen: SocketAddr, args: &[&str]) -> Up {
        let key = self.file("key");
        let key = ["--cluster-key-file", key.to_str().expect("the path is UTF-8")];
        let certificate = self.certificates.as_ref().map_or_else(Vec::new, |folder| certificate_flags(folder, role));
        let certificate: Vec<&str> = certificate.iter().map(String::as_str).collect();
        self.start_without_key(role, name, listen, &[&key, &certificate[..], args].concat())
    }

    pub fn start_without_key(&self, role: &str, name: &str, listen: SocketAddr, args: &[&str]) -> Up {
        let at = listen.to_string();
        let args = [&[role, "--listen", &at], args].concat();
        if let Some(output) = self.output {
            return Up::unread(tandem(&args).stdout(output()).stderr(output()), listen);
        }
        let log = OpenOptions::new().create(true).append(true).open(self.file(name)).expect("the folder is writable");
        Up::spawn(&args, log)
    }

    pub fn router_list(&self) -> String {
        self.routers.iter().map(SocketAddr::to_string).collect::<Vec<_>>().join(",")
    }

    /// Starts the router. Prompts are computed on prefill workers, unless `args` has another setting.
    pub fn router(&self, args: &[&str]) -> Up {
        self.router_at(0, args)
    }

    pub fn router_at(&self, number: usize, args: &[&str]) -> Up {
        let (list, peers) = (self.file("workers"), self.router_list());
        let own =
            ["--admin-listen", "127.0.0.1:0", "--workers-file", list.to_str().expect("the path is UTF-8"), "--prefill", "remote"];
        let peers: &[&str] = if self.routers.len() > 1 { &["--peers", &peers] } else { &[] };
        self.start("router", "router", self.routers[number], &[&own, peers, args].concat())
    }

    pub fn frontend(&self, args: &[&str]) -> Up {
        let routers = self.router_list();
        let own = ["--engine", "sim", "--router", &routers];
        self.start("frontend", "frontend", ([127, 0, 0, 1], 0).into(), &[&own, args].concat())
    }

    /// Starts a worker. `role` is `prefill` or `decode`; `name` is its worker id and the name of its log.
    pub fn worker(&self, role: &str, name: &str, listen: SocketAddr, args: &[&str]) -> Up {
        let own = ["--engine", "sim", "--sim-speedup", "20", "--admin-listen", "127.0.0.1:0", "--worker-id", name];
        self.start(&format!("{role}-worker"), name, listen, &[&own, args].concat())
    }

    pub fn log(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).expect("the log is text")
    }

    /// Returns the router's view of the cluster, which is empty while the router does not answer.
    pub fn view(&self) -> WorkersReply {
        self.view_of(0)
    }

    pub fn view_of(&self, number: usize) -> WorkersReply {
        let endpoint = channel::endpoint(&self.routers[number].to_string()).expect("the address is valid");
        let tls = self.certificates.as_ref().map(|folder| tls(folder, PeerRole::Tool));
        let network = Network::tcp(self.key.clone()).with_tls(tls).expecting(&[PeerRole::Router]);
        let reply = async { RouterClient::new(network.connect(&endpoint).await.ok()?).workers(WorkersRequest {}).await.ok() };
        self.runtime.block_on(reply).map_or_else(WorkersReply::default, tonic::Response::into_inner)
    }

    pub fn joined(&self, names: &[&str]) -> WorkersReply {
        let known = |view: &WorkersReply| {
            let mut known: Vec<String> =
                view.workers.iter().flat_map(|worker| &worker.info).map(|info| info.worker_id.clone()).collect();
            known.sort();
            known
        };
        until("the workers join", || self.view(), |view| known(view) == names)
    }

    /// Waits until the worker has joined with another instance than this one. Returns the instance.
    pub fn joined_after(&self, worker: &str, instance: &str) -> String {
        let joined = || {
            let joined = self.view().workers.into_iter().flat_map(|worker| worker.info).find(|info| info.worker_id == worker);
            joined.map(|info| info.instance_id)
        };
        let is_new = |joined: &Option<String>| joined.as_deref().is_some_and(|joined| joined != instance);
        until("the new instance joins", joined, is_new).expect("an instance has joined")
    }
}

pub fn ready(process: &Up) {
    until("the process is ready", || process.get("/ready"), |answer| answer.starts_with("HTTP/1.1 200"));
}

/// Returns the sum of all series whose lines in `/metrics` start with `name`.
pub fn series(process: &Up, name: &str) -> f64 {
    let page = process.get("/metrics");
    page.lines().filter(|line| line.starts_with(name)).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}
