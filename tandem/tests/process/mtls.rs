//! Certificates between the processes of a cluster: every port refuses processes without one, and each role may make its own calls only.

use crate::{
    cluster::{Plan, address, ready, until},
    talk::chat,
    up::{Up, tandem},
};
use std::{fs, net::SocketAddr, path::Path};
use tandem_proto::{
    channel::{self, ClusterTls, Network, PeerRole, TlsPem},
    v1::{DescribeRequest, WorkersRequest, control_client::ControlClient, router_client::RouterClient},
};
use tonic::{Code, Status};

/// Runs `tandem cert`, which makes or renews the certificates in this folder.
fn make_certificates(folder: &Path) {
    let made = tandem(&["cert", folder.to_str().expect("the path is UTF-8")]).output().expect("the binary runs");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let text = String::from_utf8_lossy(&made.stdout).into_owned();
    assert!(text.contains("spiffe://tandem.internal/tandem/tandem/decode-worker"), "{text}");
}

fn flags(folder: &Path, role: PeerRole) -> Vec<String> {
    let file = |name: &str, suffix: &str| folder.join(format!("{name}.{suffix}")).to_str().expect("the path is UTF-8").to_owned();
    let flags = [
        ("--cluster-cert", file(role.name(), "pem")),
        ("--cluster-cert-key", file(role.name(), "key")),
        ("--cluster-ca", file("ca", "pem")),
    ];
    flags.into_iter().flat_map(|(flag, file)| [flag.to_owned(), file]).collect()
}

fn tls(folder: &Path, role: PeerRole) -> ClusterTls {
    let text = |name: &str| fs::read_to_string(folder.join(name)).expect("the file was made");
    let (certificate, key) = (text(&format!("{}.pem", role.name())), text(&format!("{}.key", role.name())));
    ClusterTls::new(TlsPem { certificate: &certificate, key: &key, ca: &text("ca.pem") }, role, None)
        .expect("the files are valid")
}

struct Cluster {
    plan: Plan,
    /// The gRPC addresses of the router, the prefill worker and the decode worker.
    at: [SocketAddr; 3],
    processes: Vec<Up>,
}

impl Cluster {
    fn start(folder: &Path) -> Self {
        let (plan, workers) = (Plan::new(), [address(), address()]);
        plan.list(&workers);
        let with = |role| flags(folder, role);
        fn args(flags: &[String]) -> Vec<&str> {
            flags.iter().map(String::as_str).collect()
        }
        let processes = vec![
            plan.frontend(&args(&with(PeerRole::Frontend))),
            plan.router(&args(&with(PeerRole::Router))),
            plan.worker("prefill", "p", workers[0], &args(&with(PeerRole::PrefillWorker))),
            plan.worker("decode", "d", workers[1], &args(&with(PeerRole::DecodeWorker))),
        ];
        ready(&processes[0]);
        Self { at: [plan.routers[0], workers[0], workers[1]], plan, processes }
    }

    /// Calls the router, and the workers, with the cluster key and this certificate. Returns the failures.
    fn call(&self, tls: Option<ClusterTls>) -> [Result<(), Status>; 3] {
        let network = Network::tcp(self.plan.key.clone()).with_tls(tls).expecting(&PeerRole::ALL);
        let channel = |at: SocketAddr| {
            let _within = self.plan.runtime.enter();
            network.connect_lazy(&channel::endpoint(&at.to_string()).expect("the address is valid"))
        };
        let worker = |at| self.plan.runtime.block_on(ControlClient::new(channel(at)).describe(DescribeRequest {})).map(drop);
        let router = self.plan.runtime.block_on(RouterClient::new(channel(self.at[0])).workers(WorkersRequest {})).map(drop);
        [router, worker(self.at[1]), worker(self.at[2])]
    }
}

#[test]
fn every_port_refuses_processes_without_a_certificate_of_the_cluster() {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let (ours, others) = (folder.path().join("ours"), folder.path().join("others"));
    [&ours, &others].into_iter().for_each(|folder| make_certificates(folder));
    let cluster = Cluster::start(&ours);
    chat(&cluster.processes[0], &"a prompt of many blocks ".repeat(30));
    for (caller, tls) in [("without a certificate", None), ("of another authority", Some(tls(&others, PeerRole::Router)))] {
        for (refused, at) in cluster.call(tls).into_iter().zip(["router", "prefill worker", "decode worker"]) {
            assert!(refused.is_err(), "the {at} answers a process {caller}");
        }
    }
    let [router, prefill, decode] = cluster.call(Some(tls(&ours, PeerRole::Tool)));
    assert!(router.is_ok(), "{router:?}");
    for refused in [prefill, decode] {
        assert!(refused.as_ref().is_err_and(|status| status.code() == Code::PermissionDenied), "{refused:?}");
    }
    let [router, prefill, decode] = cluster.call(Some(tls(&ours, PeerRole::Router)));
    assert!(router.is_ok() && prefill.is_ok() && decode.is_ok(), "{router:?} {prefill:?} {decode:?}");
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
    let shown = top(&flags(folder.path(), PeerRole::Tool));
    assert!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));
    assert!(!top(&[]).status.success());
    let wrong = top(&flags(folder.path(), PeerRole::Frontend));
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
    chat(&cluster.processes[0], "after the renewal");
}
