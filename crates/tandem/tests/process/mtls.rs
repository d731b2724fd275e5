//! Certificates between the processes of a cluster: every port refuses processes without one, and each role may make its own calls only.

use crate::{
    cluster::{Plan, address, certificate_flags, make_certificates, ready, tls, until},
    talk::chat,
    up::{Up, tandem},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};
use tandem_proto::{
    channel::{self, ClusterTls, Network, PeerRole, TlsPem},
    v1::{BookingsRequest, DescribeRequest, WorkersRequest, control_client::ControlClient, router_client::RouterClient},
};
use tonic::{Code, Status};

/// Two routers, a prefill worker, a decode worker and a frontend, with the certificates in a folder.
struct Cluster {
    plan: Plan,
    /// The gRPC addresses of a router, the prefill worker and the decode worker.
    at: [SocketAddr; 3],
    processes: BTreeMap<&'static str, Up>,
}

impl Cluster {
    fn start(folder: &Path) -> Self {
        let (plan, workers) = (Plan::with_routers(2).with_certificates(folder.to_owned()), [address(), address()]);
        plan.list(&workers);
        let processes = BTreeMap::from([
            ("frontend", plan.frontend(&["--admin-listen", "127.0.0.1:0"])),
            ("router", plan.router_at(0, &[])),
            ("second router", plan.router_at(1, &[])),
            ("prefill worker", plan.worker("prefill", "p", workers[0], &[])),
            ("decode worker", plan.worker("decode", "d", workers[1], &[])),
        ]);
        let cluster = Self { at: [plan.routers[0], workers[0], workers[1]], plan, processes };
        ready(cluster.frontend());
        cluster
    }

    fn frontend(&self) -> &Up {
        &self.processes["frontend"]
    }

    fn channel(&self, at: SocketAddr, tls: Option<ClusterTls>) -> channel::Channel {
        let network = Network::tcp(self.plan.key.clone()).with_tls(tls).expecting(&PeerRole::ALL);
        let _within = self.plan.runtime.enter();
        network.connect_lazy(&channel::endpoint(&at.to_string()).expect("the address is valid"))
    }

    fn describe(&self, at: SocketAddr, tls: Option<ClusterTls>) -> Result<(), Status> {
        let channel = self.channel(at, tls);
        self.plan.runtime.block_on(ControlClient::new(channel).describe(DescribeRequest::default())).map(drop)
    }

    /// Calls a router at this address, as tools and as other routers do.
    fn view_and_bookings(&self, at: SocketAddr, tls: Option<ClusterTls>) -> [Result<(), Status>; 2] {
        let mut client = RouterClient::new(self.channel(at, tls));
        self.plan.runtime.block_on(async {
            let view = client.workers(WorkersRequest {}).await.map(drop);
            let bookings = async { client.bookings(BookingsRequest::default()).await?.into_inner().message().await };
            [view, bookings.await.map(drop)]
        })
    }

    /// Calls the router, and the workers, with the cluster key and this certificate. Returns the failures.
    fn call(&self, tls: Option<ClusterTls>) -> [Result<(), Status>; 3] {
        let [router, _] = self.view_and_bookings(self.at[0], tls.clone());
        [router, self.describe(self.at[1], tls.clone()), self.describe(self.at[2], tls)]
    }
}

fn ports(process: &Up) -> BTreeSet<u16> {
    let files = fs::read_dir(format!("/proc/{}/fd", process.id())).expect("the process runs");
    let targets = files.flatten().filter_map(|file| fs::read_link(file.path()).ok()?.into_os_string().into_string().ok());
    let sockets: BTreeSet<String> =
        targets.filter_map(|target| Some(target.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())).collect();
    let table = fs::read_to_string("/proc/net/tcp").expect("the system has a table of sockets");
    let listening = table.lines().filter_map(|line| {
        // The fields are a number, the local and the remote address, the state (0A: listening), five others, and the socket.
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_own = *fields.get(3)? == "0A" && sockets.contains(*fields.get(9)?);
        u16::from_str_radix(fields[1].split_once(':')?.1, 16).ok().filter(|_| is_own)
    });
    listening.collect()
}

#[test]
fn every_port_refuses_processes_without_a_certificate_of_the_cluster() {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let (ours, others) = (folder.path().join("ours"), folder.path().join("others"));
    [&ours, &others].into_iter().for_each(|folder| make_certificates(folder));
    let cluster = Cluster::start(&ours);
    until("the routers are connected", || cluster.plan.view().peers, |peers| *peers == 1);
    chat(cluster.frontend(), &"a prompt of many blocks ".repeat(30));
    // Each process has a port for gRPC (a frontend: for clients) and one for metrics, which serves no calls of the cluster.
    for (name, process) in &cluster.processes {
        let ports = ports(process);
        assert_eq!(ports.len(), 2, "the ports of the {name}: {ports:?}");
        for at in ports.into_iter().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port))) {
            for (caller, tls) in [("without a certificate", None), ("of another authority", Some(tls(&others, PeerRole::Router)))]
            {
                let [view, bookings] = cluster.view_and_bookings(at, tls.clone());
                for refused in [view, bookings, cluster.describe(at, tls)] {
                    assert!(refused.is_err(), "the {name} answers a process {caller} at {at}");
                }
            }
        }
    }
    let [router, prefill, decode] = cluster.call(Some(tls(&ours, PeerRole::Tool)));
    assert!(router.is_ok(), "{router:?}");
    for refused in [prefill, decode] {
        assert!(refused.as_ref().is_err_and(|status| status.code() == Code::PermissionDenied), "{refused:?}");
    }
    let [router, prefill, decode] = cluster.call(Some(tls(&ours, PeerRole::Router)));
    assert!(router.is_ok() && prefill.is_ok() && decode.is_ok(), "{router:?} {prefill:?} {decode:?}");
    let bookings = |role| cluster.view_and_bookings(cluster.at[0], Some(tls(&ours, role)))[1].clone();
    let is_denied = |result: Result<(), Status>| result.is_err_and(|status| status.code() == Code::PermissionDenied);
    assert!(!is_denied(bookings(PeerRole::Router)) && is_denied(bookings(PeerRole::Frontend)));
}

#[test]
fn top_needs_a_certificate() {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    make_certificates(folder.path());
    let cluster = Cluster::start(folder.path());
    let (router, key) = (cluster.at[0].to_string(), cluster.plan.file("key"));
    let top = |flags: &[String]| {
        let common =
            ["top", &router, "--once", "--interval", "0.1", "--cluster-key-file", key.to_str().expect("the path is UTF-8")];
        tandem(&common).args(flags).output().expect("the binary runs")
    };
    let shown = top(&certificate_flags(folder.path(), "tool"));
    assert!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));
    let other = tempfile::tempdir().expect("the system can create a temporary folder");
    make_certificates(other.path());
    for flags in [Vec::new(), certificate_flags(other.path(), "tool")] {
        let refused = top(&flags);
        let error = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(1) && error.contains("--cluster-cert"), "{error}");
    }
    let wrong = top(&certificate_flags(folder.path(), "frontend"));
    let error = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(error.contains("tandem/frontend") && error.contains("tandem/tool"), "{error}");
}

#[test]
fn renewed_certificates_are_used_without_a_restart() {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    make_certificates(folder.path());
    let cluster = Cluster::start(folder.path());
    let before = fs::read(folder.path().join("router.pem")).expect("the file was made");
    make_certificates(folder.path());
    assert_ne!(before, fs::read(folder.path().join("router.pem")).expect("the file was made"));
    for log in ["router", "frontend", "p", "d"] {
        let read_again = |log: &String| log.contains("the certificate of this process was read again");
        until("the certificate is read again", || cluster.plan.log(log), read_again);
    }
    assert!(cluster.call(Some(tls(folder.path(), PeerRole::Router))).iter().all(Result::is_ok));
    chat(cluster.frontend(), "after the renewal");
}

#[test]
fn secrets_script_makes_and_renews_a_certificate_for_each_role() {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/secrets.sh");
    let run = |mtls: &str| {
        let mut command = Command::new("bash");
        command.arg(&script).arg(folder.path()).env("TANDEM", env!("CARGO_BIN_EXE_tandem"));
        command.env("TANDEM_MTLS", mtls).env("TANDEM_CLUSTER", "blue").output().expect("the script runs")
    };
    let of = |role: &str, file: &str| -> PathBuf { folder.path().join("certificates").join(role).join(file) };
    let text = |path: PathBuf| fs::read_to_string(path).expect("the file was made");
    assert!(run("off").status.success());
    assert!(of("router", "").is_dir() && !of("router", "cert.pem").exists());
    let wrong = run("yes");
    assert!(!wrong.status.success() && String::from_utf8_lossy(&wrong.stderr).contains("set it to on or off"), "{wrong:?}");
    let mut made = Vec::new();
    for _ in 0..2 {
        let output = run("on");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        for role in PeerRole::ALL {
            // A router's folder also has the certificate for `tandem top`.
            let (place, name) = if role == PeerRole::Tool { ("router", "tool") } else { (role.name(), "cert") };
            let [certificate, key, ca] =
                [format!("{name}.pem"), format!("{name}.key"), "ca.pem".to_owned()].map(|file| text(of(place, &file)));
            let pem = TlsPem { certificate: &certificate, key: &key, ca: &ca };
            assert!(ClusterTls::new(pem, role, Some("blue")).is_ok(), "{role:?}");
        }
        made.push(["ca.pem", "cert.pem"].map(|file| text(of("router", file))));
    }
    assert!(made[0][0] == made[1][0] && made[0][1] != made[1][1], "the authority stays, the certificate is renewed");
    let mode = fs::metadata(of("all", "")).expect("the folder was made").permissions().mode();
    assert_eq!(mode & 0o077, 0, "only the owner can read the key of the authority");
}
