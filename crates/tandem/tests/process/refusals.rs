//! Tests that incompatible processes receive no traffic, and that the reason is logged.

use crate::{
    cluster::{Plan, address, ready, series, until},
    talk::{chat, chat_body, metric},
    up::tandem,
};
use std::{net::SocketAddr, pin::Pin};
use tandem_proto::{
    channel,
    v1::{
        DescribeRequest, DrainReply, DrainRequest, SnapshotChunk, SnapshotRequest, WatchReply, WatchRequest, WorkerInfo,
        control_server::{Control, ControlServer},
        worker_info::Role,
    },
};
use tonic::{Request, Response, Status, codegen::tokio_stream::Stream};

/// A fake worker of a future version.
struct FromTheFuture {
    key_fingerprint: String,
}

#[tonic::async_trait]
impl Control for FromTheFuture {
    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<WorkerInfo>, Status> {
        Ok(Response::new(WorkerInfo {
            role: Role::Decode.into(),
            worker_id: "future".to_owned(),
            instance_id: "1".to_owned(),
            version: "99.0.0".to_owned(),
            model: "sim".to_owned(),
            revision: "sim".to_owned(),
            block_size: 16,
            capacity_blocks: 100,
            key_fingerprint: self.key_fingerprint.clone(),
            ..WorkerInfo::default()
        }))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<WatchReply, Status>> + Send>>;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::internal("no process may call this method"))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        Err(Status::internal("no process may call this method"))
    }

    type SnapshotStream = Pin<Box<dyn Stream<Item = Result<SnapshotChunk, Status>> + Send>>;

    async fn snapshot(&self, _: Request<SnapshotRequest>) -> Result<Response<Self::SnapshotStream>, Status> {
        Err(Status::internal("no process may call this method"))
    }
}

fn serve_future(plan: &Plan, runtime: &tokio::runtime::Runtime) -> SocketAddr {
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a port is free");
    let address = listener.local_addr().expect("the listener is bound");
    let server =
        channel::server().add_service(ControlServer::new(FromTheFuture { key_fingerprint: plan.key.fingerprint().to_owned() }));
    runtime.spawn(async move { server.serve_with_incoming(channel::incoming(listener)).await });
    address
}

#[test]
fn incompatible_worker_receives_no_requests() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("the runtime can be built");
    let plan = Plan::new();
    let (prefill, decode) = (address(), address());
    let incompatible = [
        ("c", &["--cluster", "other"][..], "the process's cluster is other, but the cluster's is tandem"),
        ("m", &["--served-model-name", "llama"], "the process's model is llama, but the cluster's is sim"),
        (
            "b",
            &["--block-size", "32"],
            "block size is 32, but the cluster's is 16; start the process with the cluster's --block-size",
        ),
        ("d", &[], "has the same id d; give each worker its own --worker-id"),
    ]
    .map(|(name, args, expected)| (address(), name, args, expected));
    let future = serve_future(&plan, &runtime);
    // The incompatible workers start first, because they must not determine the cluster's identity.
    let _incompatible = incompatible.each_ref().map(|(at, name, args, _)| plan.worker("decode", name, *at, args));
    let all = incompatible.each_ref().map(|(at, ..)| *at);
    plan.list(&[&[prefill, decode, future], &all[..3]].concat());
    let (router, frontend) = (plan.router(&["--served-model-name", "sim"]), plan.frontend(&[]));
    let _workers = (plan.worker("prefill", "p", prefill, &[]), plan.worker("decode", "d", decode, &[]));
    plan.joined(&["d", "p"]);
    // The last worker in `incompatible` is compatible. It is refused only because another worker already has its worker id.
    plan.list(&[&[prefill, decode, future], &all[..]].concat());
    let refused = |view: &tandem_proto::v1::WorkersReply| view.unavailable.iter().filter(|worker| worker.incompatible).count();
    let view = until("the incompatible workers are refused", || plan.view(), |view| refused(view) == 5);
    for (at, _, _, expected) in &incompatible {
        let reason =
            &view.unavailable.iter().find(|absent| absent.address == at.to_string()).expect("the view has the address").reason;
        assert!(reason.contains(expected), "{expected}: {reason}");
        let log = plan.log("router");
        assert!(log.lines().any(|line| line.contains("WARN") && line.contains(expected)), "{expected}: {log}");
    }
    let reason =
        &view.unavailable.iter().find(|absent| absent.address == future.to_string()).expect("the view has the address").reason;
    assert!(reason.contains("the process's version is 99.0.0, but the cluster's is"), "{reason}");

    ready(&frontend);
    (0..8).for_each(|number| drop(chat(&frontend, &format!("request {number}"))));
    let workers = |state| metric(&router, &format!("tandem_router_workers{{state=\"{state}\"}}"));
    assert_eq!((workers("joined"), workers("incompatible"), workers("unreachable")), (Some(2.0), Some(5.0), Some(0.0)));
    let placed = |labels| metric(&router, &format!("tandem_router_placements_total{{{labels}}}"));
    let fitting = [r#"worker="p",kind="prefill""#, r#"worker="d",kind="decode""#];
    assert_eq!(fitting.map(placed), [Some(8.0), Some(8.0)]);
    assert_eq!(series(&router, "tandem_router_placements_total"), 16.0, "no other worker received requests");
}

#[test]
fn incompatible_frontend_refuses_requests() {
    let plan = Plan::new();
    let (prefill, decode) = (address(), address());
    plan.list(&[prefill, decode]);
    let _parts = (plan.router(&[]), plan.worker("prefill", "p", prefill, &[]), plan.worker("decode", "d", decode, &[]));
    plan.joined(&["d", "p"]);
    for (args, expected) in [
        (["--cluster", "other"], "the process's cluster is other, but the cluster's is tandem"),
        (["--block-size", "32"], "the process's block size is 32, but the cluster's is 16"),
    ] {
        let frontend = plan.frontend(&args);
        let unready = frontend.get("/ready");
        assert!(unready.starts_with("HTTP/1.1 503") && unready.contains(expected), "{args:?}: {unready}");
        let refused = frontend.answer("/v1/chat/completions", &chat_body("hello", 8, false));
        assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("cluster_mismatch"), "{args:?}: {refused}");
        until(
            "the log names the reason",
            || plan.log("frontend"),
            |log| log.lines().any(|line| line.contains("WARN") && line.contains(expected)),
        );
    }
}

#[test]
fn frontend_of_a_model_without_workers_is_not_ready() {
    let plan = Plan::new();
    let (prefill, decode) = (address(), address());
    plan.list(&[prefill, decode]);
    let _parts = (plan.router(&[]), plan.worker("prefill", "p", prefill, &[]), plan.worker("decode", "d", decode, &[]));
    plan.joined(&["d", "p"]);
    let frontend = plan.frontend(&["--served-model-name", "llama"]);
    let unready = frontend.get("/ready");
    assert!(
        unready.starts_with("HTTP/1.1 503") && unready.contains("no worker serves llama; the workers serve sim"),
        "{unready}"
    );
    let refused = frontend.answer("/v1/chat/completions", &chat_body("hello", 8, false).replace("\"sim\"", "\"llama\""));
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("no_worker"), "{refused}");
    assert!(refused.contains("No worker can take the request: no worker serves the requested model"), "{refused}");
}

#[test]
fn error_at_start_advises_the_operator() {
    let no_gpu =
        if std::path::Path::new("/dev/nvidiactl").exists() { "there is no GPU number" } else { "needs an NVIDIA driver" };
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let taken = taken.local_addr().expect("the listener is bound").to_string();
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let workers = folder.path().join("workers");
    std::fs::write(&workers, "127.0.0.1:7100\n21301\n").expect("the folder is writable");
    let workers = workers.to_str().expect("the path is UTF-8");
    for (args, expected) in [
        (&["router", "--admin-listen", &taken][..], "choose another address with --admin-listen"),
        (&["router", "--workers-file", workers], "correct --workers, --workers-file"),
        (&["router", "--workers-file", workers], "workers cannot be read (the address \"21301\" cannot be used"),
        (&["frontend", "--engine", "sim", "--listen", &taken], "choose another address with --listen"),
        (&["router", "--workers-file", "/nonexistent"], "the member list /nonexistent cannot be read"),
        (&["decode-worker", "--engine", "sim", "--listen", "0.0.0.0:0"], "set --advertise"),
        (&["prefill-worker", "--engine", "cuda", "--device", "4294967295"], no_gpu),
    ] {
        let free = ["--listen", "--admin-listen"].into_iter().filter(|flag| !args.contains(flag));
        let free = free.filter(|flag| args[0] != "frontend" || *flag == "--listen").flat_map(|flag| [flag, "127.0.0.1:0"]);
        let args: Vec<&str> = args.iter().copied().chain(free).collect();
        let output = tandem(&args).output().expect("the binary runs");
        let errors = String::from_utf8(output.stderr).expect("the output is UTF-8");
        let last = errors.lines().last().unwrap_or_default();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {errors}");
        assert!(last.starts_with("tandem: ") && last.contains(expected), "{args:?}: {errors}");
    }
}
